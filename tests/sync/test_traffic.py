"""What pushes cost, counted and shown."""

import pytest

from qfleet.sync.traffic import Traffic, rates


def test_counts_become_rates() -> None:
    traffic = Traffic()
    before = traffic.counts()
    traffic.pushed(64, size=100, plain=400, staleness=0)
    traffic.pushed(32, size=100, plain=400, staleness=3)
    traffic.pushed(32, size=50, plain=400, staleness=9, rejected=True)
    traffic.seconds += 1.0
    passed = {name: value - before[name] for name, value in traffic.counts().items()}
    got = rates(passed, wall=4.0)
    assert got["sync/pushes_per_second"] == 0.75 and got["sync/samples_per_second"] == 32
    assert got["sync/compression"] == pytest.approx(1200 / 250) and got["sync/wait"] == 0.25
    assert got["sync/staleness"] == 4 and got["sync/rejected"] == pytest.approx(1 / 3)
    shares = [got[f"sync/stale_{low}"] for low in (0, 1, 2, 4, 8)]
    assert shares == pytest.approx([1 / 3, 0, 1 / 3, 0, 1 / 3])


def test_learners_that_tell_each_other_have_rates_of_their_own() -> None:
    traffic = Traffic()
    traffic.told(1, 0, 0.0)
    before = traffic.counts()
    traffic.pushed(64, size=100, plain=400)
    for seconds in (1.0, 1.5):
        traffic.told(1, 32, seconds)
    passed = {name: value - before[name] for name, value in traffic.counts().items()}
    got = rates(passed, wall=4.0)
    assert {name: got[name] for name in got if name.startswith("learner")} == {
        "learner_1/samples_per_second": 16.0,
        "learner_1/wait": 0.375,
    }


def test_nothing_is_said_where_nothing_was_pushed() -> None:
    assert rates({}, 1.0) == {} and rates(Traffic().counts(), 1.0) == {}
