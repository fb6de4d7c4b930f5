"""The parameter server's mathematics: what several workers do on it is what one learner would have done."""

import itertools

import pytest
import torch
from fleet import BATCH, SIZE, Problem, Server, config_of, sync_of

from qfleet.sync.shard import ranges

CLOCKS = 100


def lockstep(server: Server, problem: Problem, workers: int, rows: list[int] | None = None) -> list[torch.Tensor]:
    """Everybody computes on the same parameters, then everybody pushes; -> the parameters after every clock."""
    after = []
    for clock in range(CLOCKS):
        params, base = server.params, server.policy.version
        grads = [problem.worker_grad(params, w, clock, BATCH if rows is None else rows[w]) for w in range(workers)]
        for w in reversed(range(workers)):  # the order must not matter
            assert not server.push(w, grads[w], base, BATCH if rows is None else rows[w]).why_not
        after.append(server.params.clone())
    return after


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("shards", [1, 2, 3])
def test_workers_in_sync_are_one_learner_with_their_batches_together(dtype: torch.dtype, shards: int) -> None:
    problem, config = Problem(dtype), config_of()
    server = Server(config, sync_of("sync"), problem.initial, 3, shards)
    got = lockstep(server, problem, 3)[-1]
    expected = problem.alone(config, 3, CLOCKS)
    assert (expected - problem.initial).abs().max() > 0.1
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-13 if dtype == torch.float64 else 2e-6)


def test_unequal_batches_are_weighted_by_their_samples() -> None:
    problem, config = Problem(), config_of()
    rows = [4, 12]
    got = lockstep(Server(config, sync_of("sync"), problem.initial, 2), problem, 2, rows)[-1]
    torch.testing.assert_close(got, problem.alone(config, 2, CLOCKS, rows), rtol=0, atol=1e-13)


@pytest.mark.parametrize(
    "other", [sync_of("ssp", staleness=0), sync_of("window", window=3), sync_of("async"), sync_of("window")]
)
def test_other_modes_in_lockstep_equal_sync_clock_by_clock(other: object) -> None:
    problem, config = Problem(), config_of()
    expected = lockstep(Server(config, sync_of("sync"), problem.initial, 3), problem, 3)
    got = lockstep(Server(config, other, problem.initial, 3, shards=2), problem, 3)  # type: ignore[arg-type]
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-13)


def test_adam_on_shards_is_adam_on_the_whole() -> None:
    problem, config = Problem(torch.float32), config_of(optimizer="adam", lr=1e-2)
    got = lockstep(Server(config, sync_of("sync"), problem.initial, 2, shards=3), problem, 2)[-1]
    torch.testing.assert_close(got, problem.alone(config, 2, CLOCKS), rtol=0, atol=1e-5)


def test_the_target_is_frozen_every_so_many_clocks() -> None:
    """In a mode that commits every push, three of them are a clock."""
    problem, config = Problem(), config_of(target_interval=4)
    for mode in ("sync", "async"):
        server = Server(config, sync_of(mode), problem.initial, 3, shards=2)
        for clock in range(10):
            params, base = server.params, server.policy.version
            for w in range(3):
                server.push(w, problem.worker_grad(params, w, clock), base)
            if clock == 7:
                frozen = server.params.clone()
        each = 1 if mode == "sync" else 3
        assert [s.target_version for s in server.shards] == [8 * each] * 2
        assert torch.equal(torch.cat([s.target for s in server.shards]), frozen)


def test_commits_wait_for_those_before_them_and_missing_parts_are_named() -> None:
    problem, config = Problem(), config_of()
    server = Server(config, sync_of("async"), problem.initial, 2)
    late = Server(config, sync_of("async"), problem.initial, 2).shards[0]
    commits = []
    for clock in range(3):
        grad = problem.worker_grad(server.params, 0, clock)
        late.stage((0, 0, clock), grad.clone())
        commits += server.push(0, grad, clock).commits
    late.commit(commits[2])
    late.commit(commits[1])
    assert late.version == 0 and torch.equal(late.params, problem.initial)
    late.commit(commits[0])
    assert late.version == 3 and torch.equal(late.params, server.params) and not late.missing
    late.commit(commits[2]._replace(version=4))  # its part is used up
    assert late.version == 4 and late.missing == [(0, 0, 2)]


def test_a_shard_goes_on_from_its_state() -> None:
    problem, config = Problem(torch.float32), config_of(optimizer="adam")
    for mode in ("sync", "diloco"):
        whole = Server(config, sync_of(mode), problem.initial, 1)
        again = Server(config, sync_of(mode), torch.zeros(SIZE), 1)
        for clock in range(6):
            if clock == 3:
                again.shards[0].load_state(whole.shards[0].state())
                again.policy.version = 3
            vector = problem.worker_grad(whole.params, 0, clock)
            whole.push(0, vector, clock)
            if clock >= 3:
                again.push(0, vector, clock)
        assert torch.equal(again.params, whole.params)


def test_ranges_cover_everything_once() -> None:
    for size, parts in ((1680, 3), (64, 4), (48, 1)):
        got = ranges(size, parts)
        assert len(got) == parts and got[0].start == 0 and got[-1].stop == size
        assert all(a.stop == b.start for a, b in itertools.pairwise(got))
        assert all(r.start % 16 == 0 and r.stop > r.start for r in got)
