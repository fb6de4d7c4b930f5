"""Observation and action spaces, against values worked out by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from env_toys import Coded
from gymnasium import spaces

from qfleet.config import ConfigError
from qfleet.envs.base import empty_step
from qfleet.envs.local import Slice
from qfleet.envs.spaces import actions, observations


def seen(space: Any, values: list[Any]) -> list[Any]:
    """The rows an environment with these observations writes."""
    how = observations(space, "toy")
    part = Slice([Coded(space, values)], how, actions(spaces.Discrete(2), "toy"), empty_step(1, how.shape, how.dtype))
    part.reset([None])
    rows = [part.out.obs[0].copy()]
    for _ in values[1:]:
        part.step(np.zeros(1, np.int64))
        rows.append(part.out.obs[0].copy())
    return rows


@pytest.mark.parametrize(
    ("space", "value", "row", "dtype"),
    [
        (spaces.Box(-np.inf, np.inf, (2,), np.float64), np.array([0.1, 1e30]), [0.1, 1e30], "float32"),
        (spaces.Box(-5, 5, (2,), np.int64), np.array([-5, 5]), [-5, 5], "float32"),
        (spaces.Box(0.0, 1.0, (), np.float32), np.float32(0.5), [0.5], "float32"),
        (spaces.Box(0, 255, (1, 2, 1), np.uint8), np.array([[[7], [255]]]), [[[7], [255]]], "uint8"),
        (spaces.Box(0, 1, (2,), np.bool_), np.array([True, False]), [True, False], "bool"),
        (spaces.Discrete(4), 2, [0, 0, 1, 0], "float32"),
        (spaces.Discrete(3, start=-1), np.int64(-1), [1, 0, 0], "float32"),
        (spaces.MultiBinary(3), np.array([1, 0, 1], np.int8), [1, 0, 1], "float32"),
        (spaces.MultiDiscrete([2, 3]), np.array([1, 0]), [0, 1, 1, 0, 0], "float32"),
        (spaces.Tuple([spaces.Discrete(2), spaces.Box(0, 9, (2,))]), (1, np.array([3, 4])), [0, 1, 3, 4], "float32"),
        (
            spaces.Dict(a=spaces.Box(0, 9, (1, 2)), b=spaces.Discrete(2)),
            {"a": np.array([[1, 2]]), "b": 0},
            [1, 2, 1, 0],
            "float32",
        ),
    ],
)
def test_observations(space: Any, value: Any, row: Any, dtype: str) -> None:
    (got,) = seen(space, [value])
    assert got.dtype == dtype
    assert np.array_equal(got, np.array(row, dtype))


def test_a_row_is_written_anew_every_step() -> None:
    rows = seen(spaces.Discrete(3), [0, 2, 1])
    assert [r.tolist() for r in rows] == [[1, 0, 0], [0, 0, 1], [0, 1, 0]]


@pytest.mark.parametrize(
    "space",
    [
        spaces.Text(5),
        spaces.Sequence(spaces.Discrete(2)),
        spaces.Graph(spaces.Discrete(2), None),
        spaces.Dict(image=spaces.Box(0, 1, (2,)), mission=spaces.Text(5)),
    ],
)
def test_spaces_without_a_size_are_refused(space: Any) -> None:
    with pytest.raises(ConfigError, match="Text, Sequence and Graph do not"):
        observations(space, "toy")


def acted(space: Any, numbers: list[int]) -> list[Any]:
    """What the environment receives for these numbers, one at a time and as a batch."""
    how = actions(space, "toy")
    env = Coded(spaces.Discrete(1), [0], space)
    part = Slice([env], observations(spaces.Discrete(1), "toy"), how, empty_step(1, (1,), "float32"))
    part.reset([None])
    for n in numbers:
        part.step(np.array([n]))
    assert np.array_equal(how.batch(np.array(numbers)), np.array(env.received))
    assert all(space.contains(a) for a in env.received)
    return [np.asarray(a).tolist() for a in env.received]


def test_actions() -> None:
    assert acted(spaces.Discrete(3), [0, 2]) == [0, 2]
    assert acted(spaces.Discrete(3, start=4), [0, 2]) == [4, 6]
    assert acted(spaces.MultiDiscrete([2, 3]), [0, 1, 3, 5]) == [[0, 0], [0, 1], [1, 0], [1, 2]]
    assert acted(spaces.MultiDiscrete([2, 3], start=[1, -1]), [0, 5]) == [[1, -1], [2, 1]]
    assert acted(spaces.MultiDiscrete([[2], [3]]), [4]) == [[[1], [1]]]
    assert actions(spaces.MultiDiscrete([2, 3]), "toy").count == 6


@pytest.mark.parametrize(
    ("space", "message"),
    [
        (spaces.Box(-1, 1, (2,)), "DQN needs discrete actions"),
        (spaces.MultiBinary(3), "DQN needs discrete actions"),
        (spaces.Dict(a=spaces.Discrete(2)), "DQN needs discrete actions"),
        (spaces.MultiDiscrete([1000, 101]), "101,000 combinations"),
    ],
)
def test_actions_that_cannot_be_numbered_are_refused(space: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        actions(space, "toy")


def test_an_action_may_be_changed_by_the_environment() -> None:
    how = actions(spaces.MultiDiscrete([2, 2]), "toy")
    how.each(np.array([3]))[0][:] = 0
    assert how.each(np.array([3]))[0].tolist() == [1, 1]
