import pytest
from streams import make_config

from qfleet.config import Config, override
from qfleet.replay import Limiter


def limiter(**values: object) -> Limiter:
    return Limiter(override(Config(), {name.replace("__", "."): value for name, value in values.items()}))


def test_no_burst_and_exact_ratio() -> None:
    """8 samples per step, batches of 64: one update every 8 steps, counted from min_steps on."""
    limit = limiter(replay__min_steps=1000, replay__samples_per_step=8, learner__batch_size=64)
    assert [limit.updates_due(steps, 0) for steps in (0, 999, 1000, 1007, 1008, 1016)] == [0, 0, 0, 0, 1, 2]
    updates = 0
    for steps in range(0, 50_001, 4):
        due = limit.updates_due(steps, updates)
        assert due in (0, 1)
        updates += due
    assert updates == (50_000 - 1000) * 8 // 64


def test_ratio_does_not_round() -> None:
    """0.1 has no exact binary form; 10,000 steps are 1,000 updates all the same, and never one early."""
    limit = limiter(replay__min_steps=1000, replay__samples_per_step=0.1, learner__batch_size=1)
    assert [limit.updates_due(1000 + 10 * k, k - 1) for k in range(1, 1001)] == [1] * 1000
    assert [limit.updates_due(1000 + 10 * k - 1, k - 1) for k in range(1, 1001)] == [0] * 1000


def test_never_negative() -> None:
    assert limiter(replay__min_steps=1000).updates_due(2000, 10**6) == 0


@pytest.mark.parametrize(("n", "columns"), [(1, 4), (3, 8)])
def test_waits_for_a_complete_window(n: int, columns: int) -> None:
    limit = Limiter(make_config(n=n, columns=columns))
    assert limit.min_steps == (n + 1) * columns
    assert limit.updates_due(limit.min_steps - 1, 0) == 0
