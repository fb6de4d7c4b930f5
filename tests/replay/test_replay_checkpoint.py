"""State and segments: a reloaded replay samples what the original samples, to the bit."""

from typing import Any

import numpy as np
import pytest
import torch
from streams import Row, make_config, make_spec, random_stream, to_step

from qfleet.replay import Replay
from qfleet.types import Batch


def feed(replay: Replay, streams: list[list[Row]], rng: np.random.Generator, turns: int) -> None:
    """Columns at different paces, with updates of priorities in between."""
    for turn in range(turns):
        left = int(rng.integers(4))
        length = int(rng.integers(1, 9))
        done = replay.count.tolist()
        replay.extend(
            to_step([streams[c][done[c] : done[c] + length] for c in range(left, 4) if done[c] == done[left]]), left
        )
        if replay.num_starts:
            batch = replay.sample(turn)
            replay.update_priorities(batch.id, batch.reward)


def equal(a: Batch, b: Batch) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


SIDES = ["host host", "device device", "host device", "device host"]


@pytest.mark.parametrize(
    "prioritized, sides",
    # Not across with priorities: their powers may differ in the last bit between numba and torch.
    [(False, sides) for sides in SIDES] + [(True, sides) for sides in SIDES[:2]],
)
def test_incremental_segments_over_wraps(prioritized: bool, sides: str) -> None:
    """Saved by a replay whose starts the host or the device decides, and loaded by one or the other."""
    saved_by, loaded_by = (side == "host" for side in sides.split())
    config = make_config(n=3, prioritized=prioritized)  # 40 rows a column
    rng = np.random.default_rng(0)
    streams = [random_stream(rng, 1000, c) for c in range(4)]
    replay = Replay(config, make_spec(4), on_host=saved_by)
    segments: list[dict[str, torch.Tensor]] = []
    since: torch.Tensor | None = None
    for save in range(12):
        feed(replay, streams, rng, turns=(3, 40, 1, 0)[save % 4])
        segments.append(replay.segment(since))
        since = replay.count.clone()
        state = replay.state()

        again = Replay(config, make_spec(4), on_host=loaded_by)
        again.load_state(state)
        for segment in reversed(segments):  # any order: what was overwritten since is skipped
            again.load_segment(segment)
        assert again.num_starts == replay.num_starts and torch.equal(again.count, replay.count)
        for update in range(3):
            assert equal(again.sample(update, beta=0.4), replay.sample(update, beta=0.4))
        if prioritized:
            assert torch.equal(again._sampler.tree, replay._sampler.tree)  # type: ignore[union-attr]
    assert replay.count.min() > 80 and len(set(replay.count.tolist())) > 1
    assert sum(len(s["row"]) for s in segments) > 160  # some rows were saved and overwritten later

    # And they go on alike: ends of episodes that begin before the checkpoint, new starts, priorities.
    seeds = [np.random.default_rng(9) for _ in range(2)]
    for one, seed in zip((replay, again), seeds, strict=True):
        feed(one, streams, seed, turns=30)
    assert equal(again.sample(99), replay.sample(99))
    assert again.num_starts == replay.num_starts


def test_state_is_a_copy_and_survives_plain_arrays() -> None:
    """Checkpoints hand back NumPy arrays; and what was saved does not change when training goes on."""
    config = make_config(prioritized=True)
    rng = np.random.default_rng(0)
    streams = [random_stream(rng, 200, c) for c in range(4)]
    replay = Replay(config, make_spec())
    feed(replay, streams, rng, 20)
    state: dict[str, Any] = {name: value.numpy() for name, value in replay.state().items()}
    live, segment, expected = replay.state(), replay.segment(None), replay.sample(5)
    feed(replay, streams, rng, 5)
    for saved in (state, live):
        again = Replay(config, make_spec())
        again.load_state(saved)
        again.load_segment(segment)
        assert equal(again.sample(5), expected)


def test_segment_holds_the_rows_as_they_came() -> None:
    rng = np.random.default_rng(0)
    streams = [random_stream(rng, 50, c) for c in range(2)]
    replay = Replay(make_config(capacity=60, columns=2), make_spec())
    replay.extend(to_step(streams))
    segment = replay.segment(torch.tensor([45, 10]))
    expected = [(t, 0) for t in range(45, 50)] + [(t, 1) for t in range(20, 50)]  # 30 rows a column are kept
    assert list(zip(segment["row"].tolist(), segment["column"].tolist(), strict=True)) == expected
    for name in Row._fields:
        found = segment[name].double().numpy()
        wanted = np.array([getattr(streams[c][t], name) for t, c in expected], dtype=np.float64)
        np.testing.assert_array_equal(found, wanted)


def test_wrong_checkpoints_are_refused() -> None:
    replay = Replay(make_config(), make_spec())
    replay.extend(to_step([random_stream(np.random.default_rng(0), 10, c) for c in range(4)]))
    with pytest.raises(ValueError, match=r"\(40, 4\).*this one \(80, 2\).*replay\.capacity"):
        Replay(make_config(columns=2), make_spec()).load_state(replay.state())
    with pytest.raises(ValueError, match="load the state first"):
        Replay(make_config(), make_spec()).load_segment(replay.segment())
    segment = replay.segment()
    segment["obs"] = segment["obs"][:, :1]
    with pytest.raises(ValueError, match=r"shape \(1,\)"):
        replay.load_segment(segment)
