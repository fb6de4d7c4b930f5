"""Which pushes become one version, and who waits for whom."""

import random

import pytest
from fleet import sync_of

from qfleet.config import SyncConfig
from qfleet.sync import policies
from qfleet.sync.policies import Outcome, Policy, Push


def made(sync: SyncConfig, workers: int, batch: int = 10, interval: int = 100) -> Policy:
    policy = policies.make(sync, batch, interval, workers)
    for worker in range(workers):
        policy.join(worker)
    return policy


def offer(policy: Policy, worker: int, sequence: int, base: int, samples: float = 10, now: float = 0.0) -> Outcome:
    return policy.offer(Push(worker, 0, sequence, base, samples, lr=1.0), now)


def test_sync_waits_for_everybody_and_weights_by_samples() -> None:
    policy = made(sync_of("sync"), 3)
    assert policy.ready(0)
    assert offer(policy, 0, 0, 0).commits == [] and not policy.ready(0) and policy.ready(1)
    assert offer(policy, 2, 0, 0, samples=30).commits == []
    (commit,) = offer(policy, 1, 0, 0).commits
    assert commit.version == 1 and commit.lr == 1.0
    assert commit.parts == (((0, 0, 0), 0.2), ((1, 0, 0), 0.2), ((2, 0, 0), 0.6))
    assert policy.ready(0)


def test_sync_does_not_wait_for_backup_workers_whose_pushes_come_late() -> None:
    policy = made(sync_of("sync", backup=1), 3)
    offer(policy, 0, 0, 0)
    (commit,) = offer(policy, 1, 0, 0).commits
    assert [key[0] for key, _ in commit.parts] == [0, 1]
    late = offer(policy, 2, 0, 0)
    assert "after the commit" in late.why_not and late.staleness == 1 and policy.ready(2) and policy.version == 1
    offer(policy, 2, 1, 1)
    assert offer(policy, 0, 1, 1).commits[0].version == 2


def test_without_its_backups_all_are_waited_for() -> None:
    """Two of three are enough; when one is gone, these are the two."""
    policy = made(sync_of("sync", backup=1), 3)
    policy.leave(2)
    assert offer(policy, 0, 0, 0).commits == []
    assert offer(policy, 1, 0, 0).commits[0].version == 1
    policy.leave(1)
    assert offer(policy, 0, 1, 1).commits[0].version == 2


@pytest.mark.parametrize("mode", ["sync", "async", "window", "ssp", "easgd"])
def test_who_was_given_up_cannot_come_back(mode: str) -> None:
    """Its process may live for a while: its pushes are refused, and nobody waits for it again."""
    policy = made(sync_of(mode), 2)
    policy.leave(1, successor=1)
    assert "replaced" in offer(policy, 1, 0, 0).why_not
    with pytest.raises(ValueError, match="learner 1 was replaced"):
        policy.join(1, 0)
    assert policy.clocks.keys() == {0}
    policy.join(1, 1)
    assert policy.offer(Push(1, 1, 0, 0, 10, 1.0)).why_not == ""


def test_those_who_leave_are_not_waited_for_but_what_they_pushed_counts() -> None:
    policy = made(sync_of("sync"), 3)
    offer(policy, 0, 0, 0)
    offer(policy, 2, 0, 0)
    policy.leave(2)
    (commit,) = policy.leave(1)
    assert [key[0] for key, _ in commit.parts] == [0, 2]
    assert offer(policy, 0, 1, 1).commits[0].parts == (((0, 0, 1), 1.0),)
    assert "join again" in offer(policy, 1, 0, 1).why_not
    policy.join(1, incarnation=1)
    assert offer(policy, 0, 2, 2).commits == []
    assert policy.offer(Push(1, 1, 0, 2, 10, 1.0)).commits[0].version == 3


@pytest.mark.parametrize("mode", ["sync", "async", "window", "ssp", "easgd"])
def test_no_push_is_taken_twice(mode: str) -> None:
    """Messages repeated, and pushes of an incarnation that was replaced, among those of three workers in any order."""
    policy, random_ = made(sync_of(mode), 3), random.Random(1)
    sequence, incarnation, applied = [0, 0, 0], [0, 0, 0], []
    sent: list[Push] = []
    for _ in range(2000):
        worker = random_.randrange(3)
        choice = random_.random()
        if choice < 0.05:
            incarnation[worker], sequence[worker] = incarnation[worker] + 1, 0
            applied += policy.leave(worker)
            policy.join(worker, incarnation[worker])
        push = Push(worker, incarnation[worker], sequence[worker], policy.version, 10, 1.0)
        if choice > 0.7 and sent:
            push = random_.choice(sent)
        elif not policy.ready(worker):
            continue
        else:
            sequence[worker] += 1
        sent.append(push)
        applied += policy.offer(push).commits
    keys = [key for commit in applied for key, _ in commit.parts]
    assert len(keys) == len(set(keys)) > 100
    assert [commit.version for commit in applied] == list(range(1, policy.version + 1))


@pytest.mark.parametrize("mode", ["sync", "window"])
def test_what_waits_can_be_dropped_and_offered_again(mode: str) -> None:
    """But not what is in a commit."""
    policy = made(sync_of(mode), 2)
    offer(policy, 0, 0, 0)
    assert len(offer(policy, 1, 0, 0).commits) == 1
    offer(policy, 0, 1, 1)
    assert policy.drop() == 1 and policy.ready(0) and policy.drop() == 0
    assert offer(policy, 1, 0, 0).seen_before and offer(policy, 0, 0, 0).seen_before
    assert not offer(policy, 1, 1, 1).commits  # alone, now
    again = offer(policy, 0, 1, 1)
    assert not again.seen_before and again.commits[0].parts == (((0, 0, 1), 0.5), ((1, 0, 1), 0.5))
    offer(policy, 1, 2, 2)
    policy.leave(1, successor=1)  # its push stays, until it is dropped; it cannot come back
    assert policy.drop() == (1 if mode == "sync" else 0)
    assert "replaced" in offer(policy, 1, 2, 2).why_not


def test_a_checkpoint_closes_the_window() -> None:
    policy = made(sync_of("window", window=4), 4)
    offer(policy, 0, 0, 0)
    (commit,) = policy.flush()
    assert commit.parts == (((0, 0, 0), 1.0),) and commit.lr == commit.progress == 0.25  # as the part of a clock it is
    assert not policy.flush() and offer(policy, 0, 0, 0).seen_before
    barrier = made(sync_of("sync"), 2)
    offer(barrier, 0, 0, 0)
    assert not barrier.flush()  # its worker waits for the others


def test_async_takes_everything_at_once_scaled_by_share_and_staleness() -> None:
    policy = made(sync_of("async", damping="inverse"), 3)
    first = offer(policy, 0, 0, 0)
    assert first.commits[0].lr == pytest.approx(1 / 3) and first.staleness == 0
    for sequence in range(1, 8):
        assert offer(policy, 0, sequence, policy.version).commits[0].version == sequence + 1
    stale = offer(policy, 1, 0, 0, samples=5)  # 8 versions, where two are usual: four times as stale
    assert stale.staleness == 8 and stale.commits[0].lr == pytest.approx(1 / 6 / 4)
    assert made(sync_of("async", damping="sqrt"), 1).offer(Push(0, 0, 0, -9, 10, 1.0)).commits[0].lr == pytest.approx(
        1 / 3
    )
    assert policy.progress == pytest.approx(8 / 3 + 1 / 6)


def test_async_rejects_what_is_too_stale() -> None:
    policy = made(sync_of("async", staleness=2), 2)
    for sequence in range(3):
        offer(policy, 0, sequence, sequence)
    got = offer(policy, 1, 0, 0)
    assert not got.commits and "3 versions old" in got.why_not and "(2)" in got.why_not
    assert offer(policy, 1, 1, 3).commits


def test_window_closes_by_number_or_by_time() -> None:
    policy = made(sync_of("window", window=4, window_ms=50), 2)
    assert not offer(policy, 0, 0, 0, now=1.0).commits and policy.ready(0)
    assert not offer(policy, 0, 1, 0, now=1.01).commits
    assert not policy.tick(1.04)
    (commit,) = policy.tick(1.06)
    assert commit.lr == 1.0 and len(commit.parts) == 2
    assert not policy.tick(2.0)
    for sequence in range(2, 5):
        assert not offer(policy, 0, sequence, 1, now=3.0).commits
    (commit,) = offer(policy, 1, 0, 0, now=3.0).commits
    assert len(commit.parts) == 4 and commit.lr == 1.0  # never more than one whole update
    single = made(sync_of("window", window=1), 4)
    assert offer(single, 3, 0, 0).commits[0].lr == pytest.approx(0.25)


def test_a_window_of_everybody_shrinks_with_those_who_leave() -> None:
    policy = made(sync_of("window"), 3)
    offer(policy, 0, 0, 0)
    offer(policy, 1, 0, 0)
    assert len(policy.leave(2)) == 1


def test_ssp_lets_the_fast_run_ahead_by_the_bound() -> None:
    policy = made(sync_of("ssp", staleness=2), 3)
    for clock in range(3):
        assert policy.ready(0)
        offer(policy, 0, clock, 0)
    assert not policy.ready(0) and policy.ready(1)
    offer(policy, 1, 0, 0)
    assert not policy.ready(0)
    offer(policy, 2, 0, 0)
    assert policy.ready(0)
    offer(policy, 0, 3, 0)
    assert not policy.ready(0)
    policy.leave(1)
    assert not policy.ready(0)
    policy.leave(2)
    assert policy.ready(0)
    policy.join(2, incarnation=1)  # begins where the slowest is
    assert policy.ready(0) and policy.ready(2)
