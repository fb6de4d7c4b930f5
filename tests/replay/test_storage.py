"""The rings against a reference that builds every transition episode by episode; uniform sampling; memory."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from streams import GAMMA, Row, Sample, make_config, make_spec, random_stream, reference, to_step

from qfleet import device, machine
from qfleet import rng as rng_module
from qfleet.config import ConfigError
from qfleet.replay import Replay, memory
from qfleet.types import Batch, Spec


def assert_matches(batch: Batch, expected: dict[int, Sample]) -> None:
    """Every sample of the batch is the reference's for its id, and every reference sample occurs."""
    assert set(batch.id.tolist()) == set(expected)
    wanted = [expected[i] for i in batch.id.tolist()]
    np.testing.assert_array_equal(batch.obs, np.stack([s.obs for s in wanted]))
    np.testing.assert_array_equal(batch.next_obs, np.stack([s.next_obs for s in wanted]))
    np.testing.assert_array_equal(batch.action, [s.action for s in wanted])
    np.testing.assert_allclose(batch.reward, [s.reward for s in wanted], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(batch.discount, [s.discount for s in wanted], rtol=1e-6)


@pytest.mark.parametrize("on_host", [True, False], ids=["host", "device"])
@pytest.mark.parametrize("prioritized", [False, True])
@pytest.mark.parametrize("stack", [1, 4])
@pytest.mark.parametrize("n", [1, 3, 5])
def test_all_samples_match_the_reference(n: int, stack: int, prioritized: bool, on_host: bool) -> None:
    columns, rows, clip = 4, 40, 1.5 if n == 3 else 0.0
    config = make_config(capacity=columns * rows, columns=columns, n=n, batch=6000, clip=clip, prioritized=prioritized)
    replay = Replay(config, make_spec(stack), on_host=on_host)
    rng = np.random.default_rng(n * 10 + stack)
    streams = [random_stream(rng, 600, column) for column in range(columns)]
    written = [0] * columns
    for turn in range(60):
        # Any range of columns, at any pace, sometimes more rows than the ring holds.
        left = int(rng.integers(columns))
        right = int(rng.integers(left, columns)) + 1
        length = int(rng.integers(1, 6))
        if turn % 10 == 0:
            left, right, length = 0, columns, 55
        new = [streams[c][written[c] : written[c] + length] for c in range(left, right)]
        replay.extend(to_step(new), left)
        for c in range(left, right):
            written[c] += length
        expected = {
            row * columns + c: sample
            for c in range(columns)
            for row, sample in reference(streams[c][: written[c]], rows, n, stack, clip).items()
        }
        assert replay.count.tolist() == written
        assert replay.num_starts == len(expected)
        if expected and turn % 4 == 3:
            assert_matches(replay.sample(turn), expected)
    assert min(written) > 6 * rows


def test_worked_example() -> None:
    """n = 2 over: o0 r1, o1 r2 truncated, o2 terminal row, o3 first r4 life lost, o4 r8, o5 restart, o6, o7."""
    stream = [
        Row((10.0, 1.0), 0, 1.0, first=True),
        Row((11.0, 1.0), 1, 2.0, truncated=True),
        Row((12.0, 1.0), 0, 0.0),
        Row((13.0, 1.0), 2, 4.0, first=True, terminated=True),
        Row((14.0, 1.0), 3, 8.0),
        Row((15.0, 1.0), 4, 16.0, first=True),
        Row((16.0, 1.0), 5, 32.0),
        Row((17.0, 1.0), 0, 64.0),
    ]
    replay = Replay(make_config(capacity=20, columns=1, n=2, batch=200), make_spec())
    replay.extend(to_step([stream]))
    batch = replay.sample(0)
    found = {
        i: (r, d, o[0], a)
        for i, r, d, o, a in zip(
            batch.id.tolist(),
            batch.reward.tolist(),
            batch.discount.tolist(),
            batch.next_obs.tolist(),
            batch.action.tolist(),
            strict=True,
        )
    }
    two = pytest.approx(GAMMA**2)
    assert found == {
        0: (pytest.approx(1 + GAMMA * 2), two, 12.0, 0),
        1: (2.0, pytest.approx(GAMMA), 12.0, 1),  # cut by the truncation, bootstraps from the terminal row
        3: (4.0, 0.0, 14.0, 2),  # life lost: no bootstrap; row 4 cannot cross the restart, row 2 is terminal
        5: (pytest.approx(16 + GAMMA * 32), two, 17.0, 4),
    }


def test_nothing_lies_above_row_0() -> None:
    """A column that begins in the middle of an episode: its first stacks show zeros, not what the memory held."""
    replay = Replay(make_config(capacity=20, columns=1, batch=200), make_spec(4))
    replay._storage.obs[:-1] = 99.0
    stream = [Row((10.0 + t, 1.0), 0, 0.0) for t in range(6)]
    replay.extend(to_step([stream]))
    assert_matches(replay.sample(0), reference(stream, 20, 1, 4))


def fill(replay: Replay, columns: int, length: int, seed: int = 0) -> None:
    rng = np.random.default_rng(seed)
    replay.extend(to_step([random_stream(rng, length, c) for c in range(columns)]))


def test_many_updates_at_once_are_the_same_as_one_by_one() -> None:
    replay = Replay(make_config(n=3), make_spec(4))
    fill(replay, 4, 70)
    at_once = replay.sample(5, count=3)
    one_by_one = [replay.sample(update) for update in (5, 6, 7)]
    for field, parts in zip(at_once, zip(*one_by_one, strict=True), strict=True):
        assert torch.equal(field, torch.cat(parts))


def test_draw_of_one_column_is_the_documented_mapping() -> None:
    """floor(x * number of starts), oldest first: what the single-file oracle does."""
    replay = Replay(make_config(capacity=50, columns=1, seed=7), make_spec())
    rng = np.random.default_rng(3)
    stream = random_stream(rng, 130, 0)
    replay.extend(to_step([stream]))
    starts = sorted(reference(stream, 50, 1, 1))
    x = rng_module.uniform(rng_module.key(7, "replay"), 11, 32)
    assert replay.sample(11).id.tolist() == [starts[int(v)] for v in x * len(starts)]


def test_uniform_over_all_starts() -> None:
    """Columns with very different numbers of starts: every start equally likely."""
    replay = Replay(make_config(batch=500), make_spec())
    rng = np.random.default_rng(0)
    for column, length in enumerate((5, 90, 17, 40)):
        replay.extend(to_step([random_stream(rng, length, column)]), column)
    ids = replay.sample(0, count=200).id
    _, counts = np.unique(ids.numpy(), return_counts=True)
    assert len(counts) == replay.num_starts
    expected = len(ids) / replay.num_starts
    chi_square = float(((counts - expected) ** 2 / expected).sum())
    freedom = replay.num_starts - 1
    assert abs(chi_square - freedom) < 3 * np.sqrt(2 * freedom)


def test_weights_are_one_and_priorities_ignored() -> None:
    replay = Replay(make_config(), make_spec())
    fill(replay, 4, 30)
    before = replay.sample(1)
    replay.update_priorities(before.id, torch.full((32,), 100.0))
    assert torch.equal(before.weight, torch.ones(32))
    assert torch.equal(replay.sample(1).id, before.id)


def test_seed_decides_the_samples() -> None:
    samples = []
    for seed in (None, 1, 2):
        replay = Replay(make_config(seed=1), make_spec(), seed=seed)
        fill(replay, 4, 30)
        samples.append(replay.sample(0).id.tolist())
    assert samples[0] == samples[1] != samples[2]


def test_dtypes_are_the_stored_ones() -> None:
    spec = Spec(obs_shape=(3, 3, 2), obs_dtype="bool", num_actions=1000, frame_stack=1)
    replay = Replay(make_config(columns=1), spec)
    step = to_step([random_stream(np.random.default_rng(0), 20, 0)])
    obs = torch.rand(20, 1, 3, 3, 2) < 0.5
    replay.extend(step._replace(obs=obs, action=step.action + 900))
    batch = replay.sample(0)
    assert batch.obs.dtype == torch.bool and batch.obs.shape == (32, 3, 3, 2)
    assert torch.equal(batch.obs, obs[batch.id, 0])
    assert batch.action.dtype == torch.int64 and torch.equal(batch.action, step.action[batch.id, 0] + 900)


def test_nothing_to_sample_yet() -> None:
    replay = Replay(make_config(n=3), make_spec())
    fill(replay, 4, 3)
    assert replay.num_starts == 0
    with pytest.raises(ValueError, match="no complete window"):
        replay.sample(0)


# --- memory -----------------------------------------------------------------------------------------------------

ATARI = Spec(obs_shape=(84, 84), obs_dtype="uint8", num_actions=18, frame_stack=4)


@pytest.mark.parametrize("prioritized", [False, True])
def test_a_million_atari_steps_take_at_most_7_3_gb(prioritized: bool) -> None:
    needed = Replay.memory(make_config(capacity=1_000_000, columns=8, prioritized=prioritized), ATARI)
    assert 7.056e9 < needed < 7.1e9


@pytest.mark.parametrize("prioritized", [False, True])
def test_memory_counts_what_is_allocated(prioritized: bool) -> None:
    config = make_config(capacity=4000, prioritized=prioritized)
    replay = Replay(config, make_spec())
    store, sampler = replay._storage, replay._sampler
    tensors = [store.obs[:-1], store.action, store.reward, store.flags, torch.from_numpy(store.is_start)]
    tensors.append(getattr(sampler, "tree" if prioritized else "ring"))
    assert Replay.memory(config, make_spec()) == sum(t.numel() * t.itemsize for t in tensors)


def test_too_large_is_refused_with_the_flag_to_change() -> None:
    config = make_config(capacity=1_000_000_000, columns=8)
    with pytest.raises(ConfigError) as error:
        Replay(config, ATARI)
    message = str(error.value)
    assert "needs 7067.00 GB on cpu" in message and "available" in message
    suggested = int(re.search(r"--replay\.capacity (\d+)", message)[1])  # type: ignore[index]
    smaller = make_config(capacity=suggested, columns=8)
    assert Replay.memory(smaller, ATARI) < device.free_memory(torch.device("cpu"))  # type: ignore[operator]


def test_unknown_memory_is_not_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MEMINFO", "PROCESS_CGROUP", "CGROUPS"):
        monkeypatch.setattr(machine, name, tmp_path / "nothing")
    assert device.free_memory(torch.device("cpu")) is None
    memory.check(make_config(), 10**18, torch.device("cpu"))
