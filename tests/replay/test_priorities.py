"""Prioritised sampling: the distribution, the weights, and the tree, in numba and in torch."""

import subprocess
import sys

import numpy as np
import pytest
import torch
from streams import make_config, make_spec, random_stream, to_step

from qfleet import rng as rng_module
from qfleet.replay import Replay
from qfleet.replay.priorities import EPSILON, Priorities
from qfleet.types import Batch

CPU = torch.device("cpu")


def make(kernel: bool = True, length: int = 70, **values: object) -> Replay:
    replay = Replay(make_config(prioritized=True, **values), make_spec(4))  # type: ignore[arg-type]
    use(replay, kernel)
    rng = np.random.default_rng(0)
    replay.extend(to_step([random_stream(rng, length, c) for c in range(4)]))
    return replay


def use(replay: Replay, kernel: bool) -> None:
    """Kernels or plain torch operations (what a GPU runs)."""
    replay._storage.kernel = replay._sampler.kernel = kernel  # type: ignore[union-attr]


def leaves(replay: Replay) -> np.ndarray:
    return replay._sampler.leaves.numpy()  # type: ignore[union-attr,no-any-return]


def all_ids(replay: Replay) -> torch.Tensor:
    return replay._storage.ids(torch.from_numpy(np.flatnonzero(replay._storage.is_start)))


@pytest.mark.parametrize("kernel", [False, True])
def test_distribution_and_weights(kernel: bool) -> None:
    """P = (|error| + epsilon) ** alpha / total; weights (N P) ** -beta over the batch's largest."""
    replay = make(kernel, batch=500, alpha=0.7)
    ids = all_ids(replay)
    error = torch.linspace(-3, 3, len(ids))
    replay.update_priorities(ids, error)
    power = (error.double().abs().numpy() + EPSILON) ** 0.7
    probability = dict(zip(ids.tolist(), power / power.sum(), strict=True))

    drawn = []
    for update in range(200):
        batch = replay.sample(update, beta=0.4)
        p = np.array([probability[i] for i in batch.id.tolist()])
        weight = (len(ids) * p) ** -0.4
        np.testing.assert_allclose(batch.weight, weight / weight.max(), rtol=1e-5)
        drawn.append(batch.id.numpy())
    found, counts = np.unique(np.concatenate(drawn), return_counts=True)
    expected = 200 * 500 * np.array([probability[i] for i in found.tolist()])
    # Stratified draws vary less than independent ones, so five standard deviations of those are a lot.
    assert (np.abs(counts - expected) < 5 * np.sqrt(expected)).all()
    assert counts.sum() == 200 * 500 and len(found) >= len(ids) - 1


def test_each_stratum_is_drawn_once() -> None:
    replay = make(batch=16)
    total = leaves(replay).sum()
    ends = leaves(replay).cumsum()
    u = rng_module.uniform(rng_module.key(1, "replay"), 9, 16)
    slots = np.searchsorted(ends, (np.arange(16) + u) / 16 * total, side="right")
    assert replay.sample(9).id.tolist() == replay._storage.ids(torch.from_numpy(slots)).tolist()


@pytest.mark.parametrize("kernel", [False, True])
def test_duplicates_take_the_maximum_even_below_the_old_priority(kernel: bool) -> None:
    replay = make(kernel, alpha=1.0)
    a, b = all_ids(replay)[[5, 9]].tolist()
    replay.update_priorities(torch.tensor([a, b, a, a]), torch.tensor([0.2, 0.5, 0.4, 0.3]))
    slot = {i: s for s, i in zip(np.flatnonzero(leaves(replay)), all_ids(replay).tolist(), strict=True)}
    assert leaves(replay)[slot[a]] == pytest.approx(0.4 + EPSILON)
    assert leaves(replay)[slot[b]] == pytest.approx(0.5 + EPSILON)


@pytest.mark.parametrize("kernel", [False, True])
def test_stale_ids_and_nan_are_dropped(kernel: bool) -> None:
    replay = make(kernel, length=40, alpha=1.0)  # the rings are exactly full
    old = all_ids(replay)
    rng = np.random.default_rng(5)
    replay.extend(to_step([random_stream(rng, 10, c) for c in range(4)]))
    fresh = torch.isin(old, all_ids(replay))
    assert 0 < int(fresh.sum()) < len(old)
    replay.update_priorities(old, torch.full((len(old),), 7.0))
    assert int((leaves(replay) > 6).sum()) == int(fresh.sum())
    before = leaves(replay).copy()
    replay.update_priorities(old[fresh], torch.full((int(fresh.sum()),), float("nan")))
    replay.update_priorities(old[fresh], torch.full((int(fresh.sum()),), float("inf")))
    replay.update_priorities(torch.arange(10_000, 10_064), torch.ones(64))
    np.testing.assert_array_equal(leaves(replay), before)


@pytest.mark.parametrize("kernel", [False, True])
def test_new_starts_get_the_running_maximum(kernel: bool) -> None:
    replay = make(kernel, length=30, alpha=1.0)
    assert set(leaves(replay).tolist()) == {0.0, 1.0}
    ids = all_ids(replay)
    replay.update_priorities(ids[:1], torch.tensor([5.0]))
    replay.update_priorities(ids[:1], torch.tensor([0.1]))  # the maximum stays
    rng = np.random.default_rng(6)
    replay.extend(to_step([random_stream(rng, 6, c) for c in range(4)]))
    new = all_ids(replay)[~torch.isin(all_ids(replay), ids)]
    values = np.sort(leaves(replay))[::-1]
    assert len(new) > 0
    np.testing.assert_allclose(values[: len(new)], 5.0 + EPSILON, rtol=1e-6)
    assert values[len(new)] == 1.0


def equal(a: Batch, b: Batch) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_kernels_and_torch_agree_to_the_bit() -> None:
    """The same rows, errors and draws through both, over several wraps. alpha and beta 1: powers are exact."""
    replays = [make(kernel, n=3, alpha=1.0) for kernel in (False, True)]
    rng = np.random.default_rng(1)
    for update in range(60):
        batches = [replay.sample(update, beta=1.0) for replay in replays]
        assert equal(*batches)
        error = torch.from_numpy(rng.normal(size=32).astype(np.float32)).exp()
        rows = to_step([random_stream(rng, 5, c) for c in range(4)])
        for replay in replays:
            replay.update_priorities(batches[0].id, error)
            replay.extend(rows)
        assert torch.equal(*(replay._sampler.tree for replay in replays))  # type: ignore[union-attr]


@pytest.mark.parametrize("kernel", [False, True])
def test_rebuilt_from_leaves_it_is_the_same_to_the_bit(kernel: bool) -> None:
    """Parents are never incremented: thousands of updates leave no trace but the leaves."""
    size = 3000
    tree = Priorities(size, 0.6, CPU, kernel)
    rng = np.random.default_rng(2)
    tree.load(torch.from_numpy(rng.random(size)), torch.ones(1))
    oldest = torch.zeros(4, dtype=torch.int64)
    for _ in range(300):
        errors = torch.from_numpy(np.exp(rng.normal(size=64) * 5).astype(np.float32))
        tree.update(torch.from_numpy(rng.integers(size, size=64)), errors, oldest)
    again = Priorities(size, 0.6, CPU, kernel)
    again.load(tree.leaves, tree.highest)
    assert torch.equal(tree.tree, again.tree)
    np.testing.assert_allclose(tree.levels[-1].item(), tree.leaves.sum().item(), rtol=1e-12)


@pytest.mark.parametrize("kernel", [False, True])
@pytest.mark.parametrize("size", [7, 8, 9, 600])
def test_a_leaf_of_zero_is_never_drawn(size: int, kernel: bool) -> None:
    """Priorities over 60 orders of magnitude, most of them 0, so that sums round in every way."""
    rng = np.random.default_rng(size)
    tree = Priorities(size, 1.0, CPU, kernel)
    for trial in range(30):
        priority = np.where(rng.random(size) < 0.3, 10.0 ** rng.uniform(-30, 30, size), 0.0)
        priority[rng.integers(size)] = 1.0
        tree.load(torch.from_numpy(priority), torch.ones(1))
        slots, weight = tree.draw(123, trial, 64, 1.0)
        assert (priority[slots] > 0).all() and weight.isfinite().all()


@pytest.mark.parametrize("kernel", [False, True])
def test_a_draw_behind_everything_takes_the_last_start(kernel: bool) -> None:
    """A node may be larger than what is found below it when sums round; here it is made so on purpose."""
    tree = Priorities(100, 1.0, CPU, kernel)
    priority = torch.zeros(100, dtype=torch.float64)
    priority[[3, 42]] = 1.0
    tree.load(priority, torch.ones(1))
    tree.levels[-1].fill_(4.0)
    slots, _ = tree.draw(123, 0, 8, 1.0)
    assert slots.tolist() == [3, 3, 42, 42, 42, 42, 42, 42]


def test_kernel_draws_the_random_numbers_of_rng() -> None:
    from qfleet.replay import kernels

    for key, counter in ((rng_module.key(3, "replay"), 0), (rng_module.key(4, "x"), 2**31 + 5)):
        drawn = [kernels.uniform(np.uint64(key), counter, i) for i in range(20)]
        np.testing.assert_array_equal(drawn, rng_module.uniform(key, counter, 20))


def test_prioritised_batches_are_drawn_one_by_one() -> None:
    with pytest.raises(AssertionError):
        make().sample(0, count=2)


def run_python(code: str, **env: str) -> str:
    result = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    return result.stdout.strip()


def test_uniform_replay_does_not_import_numba() -> None:
    code = "import sys, qfleet.replay; print('numba' in sys.modules)"
    assert run_python(code, PYTHONPATH=":".join(sys.path)) == "False"


def test_kernels_work_where_no_cache_can_be_written() -> None:
    """numba refuses cache=True outright when neither the package's nor the user's folder is writable."""
    code = (
        "import numba.core.caching as c\n"
        "c.CacheImpl._locator_classes = []\n"
        "c.FunctionCache._impl_class._locator_classes = []\n"
        "import numpy as np\n"
        "from qfleet.replay import kernels\n"
        "print(kernels.uniform(np.uint64(1), 0, 0) < 1)"
    )
    assert run_python(code, PYTHONPATH=":".join(sys.path)) == "True"
