"""Batches in proportion to speed."""

import time

import pytest

from qfleet.sync.balance import SETTLED, Balance, Work, shares


@pytest.mark.parametrize(
    ("weights", "total", "expected"),
    [
        ([1, 1], 16, [8, 8]),
        ([3, 1], 16, [12, 4]),
        ([1, 1, 1], 16, [6, 5, 5]),
        ([1000, 1, 1], 16, [14, 1, 1]),  # nobody has none
        ([1, 2, 4], 7, [1, 2, 4]),
    ],
)
def test_shares_are_whole_numbers_in_proportion(weights: list[float], total: int, expected: list[int]) -> None:
    assert shares(weights, total) == expected


@pytest.mark.parametrize("costs", [[(0.0, 1.0), (0.0, 4.0)], [(20.0, 1.0), (5.0, 2.0), (0.0, 6.0)]])
def test_all_come_to_need_the_same_time(costs: list[tuple[float, float]]) -> None:
    """Seconds of a batch are `fixed + each * samples`."""
    balance = Balance(256)
    workers = range(len(costs))
    batches = [balance.share(w, workers) for w in workers]
    assert batches == [256] * len(costs)  # nothing is known yet
    for _ in range(200):
        for w, (fixed, each) in enumerate(costs):
            balance.saw(w, batches[w], fixed + each * batches[w])
        batches = [balance.share(w, workers) for w in workers]
        assert sum(batches) == 256 * len(costs)
    times = [fixed + each * b for b, (fixed, each) in zip(batches, costs, strict=True)]
    assert max(times) < (1 + 2 * SETTLED) * min(times)


def test_who_leaves_gives_its_part_to_nobody_and_small_changes_are_left_alone() -> None:
    balance = Balance(10)
    for w in range(3):
        balance.saw(w, 10, 1.0 + w)
    before = [balance.share(w, (0, 1, 2)) for w in range(3)]
    assert sum(before) == 30
    balance.saw(0, 10, 1.02)
    assert [balance.share(w, (0, 1, 2)) for w in range(3)] == before
    assert balance.share(0, (0, 2)) + balance.share(2, (0, 2)) == 20
    other = Balance(10)
    other.load_state(balance.state())
    assert [other.share(w, (0, 2)) for w in (0, 2)] == [balance.share(w, (0, 2)) for w in (0, 2)]


def test_given_weights_are_not_measured() -> None:
    balance = Balance(32, (3.0, 1.0))
    balance.saw(0, 1, 100.0)
    assert [balance.share(w, (0, 1)) for w in (0, 1)] == [48, 16]


def test_work_counts_what_is_not_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 10.0
    monkeypatch.setattr(time, "perf_counter", lambda: now)
    work = Work()
    with work.done(8, began=9.0):
        now = 15.0  # waited
    now = 17.0
    with work.done(8, began=9.0):
        now = 20.0
    now = 50.0  # something else went on
    with work.done(8, began=49.0):
        pass
    assert work.tell() == (24, 1.0 + 2.0 + 1.0)
    assert work.tell() == (0, 0.0)
