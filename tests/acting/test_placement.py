"""Placement: what answers sooner is chosen."""

from typing import Any

import pytest
import torch

from qfleet import recipes
from qfleet.acting import placement
from qfleet.types import Spec

SPEC = Spec(obs_shape=(3,), obs_dtype="float32", num_actions=2)
CONFIG = recipes.make("dqn", "CartPole-v1")


def test_measured_seconds_are_those_of_acting() -> None:
    assert 0 < placement.seconds(placement.untrained(CONFIG, SPEC, "cpu"), 8) < 1


@pytest.mark.parametrize(("gpu", "cpu", "chosen"), [(1.0, 2.0, "cuda"), (2.0, 1.0, "cpu"), (1.0, 1.0, "cuda")])
def test_the_faster_is_chosen(gpu: float, cpu: float, chosen: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def untrained(config: Any, spec: Spec, device: str) -> str:
        return device

    monkeypatch.setattr(placement, "untrained", untrained)
    monkeypatch.setattr(placement, "seconds", lambda policy, batch: {"cuda": gpu, "cpu": cpu}[policy])
    assert placement.choose(CONFIG, SPEC, 8, torch.device("cuda")) == chosen
    assert placement.choose(CONFIG, SPEC, 8, torch.device("cpu")) == "cpu"


def test_crossover_goes_from_one_to_many() -> None:
    rows = placement.crossover(CONFIG, SPEC, "cpu")
    assert [batch for batch, _, _ in rows] == [1, 8, 64, 512] and all(a > 0 and b > 0 for _, a, b in rows)
