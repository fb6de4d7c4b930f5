"""Placement: what answers sooner is chosen."""

import pytest

from qfleet import networks, recipes
from qfleet.acting import placement
from qfleet.acting.policy import Policy
from qfleet.types import Spec

SPEC = Spec(obs_shape=(3,), obs_dtype="float32", num_actions=2)


def policy_on(device: str) -> Policy:
    config = recipes.make("dqn", "CartPole-v1")
    return Policy(networks.build(config, SPEC).eval(), config, SPEC)


def test_measured_seconds_are_those_of_acting() -> None:
    assert 0 < placement.seconds(policy_on("cpu"), 8) < 1


@pytest.mark.parametrize(("gpu", "cpu", "chosen"), [(1.0, 2.0, "cuda"), (2.0, 1.0, "cpu"), (1.0, 1.0, "cuda")])
def test_the_faster_is_chosen(gpu: float, cpu: float, chosen: str, monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([gpu, cpu])
    monkeypatch.setattr(placement, "seconds", lambda policy, batch: next(times))
    assert placement.choose(policy_on, 8, "cuda") == chosen


def test_crossover_goes_from_one_to_many() -> None:
    rows = placement.crossover(policy_on, "cpu")
    assert [batch for batch, _, _ in rows] == [1, 8, 64, 512] and all(a > 0 and b > 0 for _, a, b in rows)
