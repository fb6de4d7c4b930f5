"""Vector environments with a step of their own."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import pytest

from qfleet.config import ConfigError, EnvConfig
from qfleet.envs import Envs, make


def native(id: str, num_envs: int = 4, **settings: Any) -> Envs:
    return make(EnvConfig(id=id, num_envs=num_envs, vectorize="native", **settings), seed=1)


@pytest.mark.parametrize("kwargs", [{}, {"sutton_barto_reward": True}])
def test_cartpole_vector_equals_the_single_environment(kwargs: dict[str, Any]) -> None:
    """Every step of the vector is repeated by an ordinary CartPole put into the state before it."""
    single: Any = gym.make("CartPole-v1", **kwargs).unwrapped
    rng = np.random.default_rng(0)
    ends = 0
    with native("CartPole-v1", kwargs=kwargs) as envs:
        vec: Any = envs._vec  # type: ignore[attr-defined]
        envs.reset()
        for _ in range(150):
            before, actions = vec.state.copy(), rng.integers(0, 2, 4)
            s = envs.step(actions)
            for i in np.flatnonzero(~s.first):
                single.reset()
                single.state = before[:, i]
                obs, reward, terminated, _, _ = single.step(actions[i])
                assert np.allclose(s.obs[i], obs, rtol=1e-6, atol=0)
                assert (s.reward[i], s.terminated[i]) == (reward, terminated)
            assert (s.reward[s.first] == 0).all()
            assert (np.abs(s.obs[s.first]) <= 0.05).all()
            ends += int(s.terminated.sum())
    assert ends > 10


def test_cartpole_vector_is_cut_at_500_steps() -> None:
    with native("CartPole-v1", num_envs=1) as envs:
        obs = envs.reset()
        for t in range(1, 501):  # balance it
            x, v, angle, turn = obs[0]
            s = envs.step(np.array([int(angle + 0.4 * turn + 0.03 * x + 0.08 * v > 0)]))
            obs = s.obs
            assert (bool(s.truncated[0]), bool(s.terminated[0]), s.reward[0]) == (t == 500, False, 1)
        s = envs.step(np.array([0]))
        assert (bool(s.first[0]), bool(s.truncated[0]), s.reward[0]) == (True, False, 0)


def test_reset_in_the_same_step_becomes_the_next() -> None:
    """Environment i ends after 3 + i steps; the first step of a new episode must see episode, step 1, nothing skipped."""
    rows: list[list[Any]] = [[], []]
    with native("env_toys:SameStep-v0", num_envs=2) as envs:
        assert envs.reset()[:, 1].tolist() == [0, 0]
        for _ in range(9):
            s = envs.step(np.array([1, 2]))
            for i in (0, 1):
                rows[i].append((int(s.obs[i, 1]), float(s.reward[i]), bool(s.terminated[i]), bool(s.first[i])))
    one, end, start = (lambda t, r: (t, r, False, False)), (lambda t, r: (t, r, True, False)), (0, 0.0, False, True)
    assert rows[0] == [one(1, 2), one(2, 2), end(3, 2), start, one(1, 2), one(2, 2), end(3, 2), start, one(1, 2)]
    assert rows[1] == [one(1, 3), one(2, 3), one(3, 3), end(4, 3), start, one(1, 3), one(2, 3), one(3, 3), end(4, 3)]


def test_same_step_without_a_way_out_is_refused_or_stepped_singly() -> None:
    with pytest.raises(ConfigError, match="resets in the same step"):
        native("env_toys:Stubborn-v0")
    with make(EnvConfig(id="env_toys:Stubborn-v0", num_envs=2), seed=1) as envs:
        assert envs.kind == "inprocess"
        assert any("resets in the same step" in note for note in envs.notes)


def test_cartpole_is_native_by_default() -> None:
    with make(EnvConfig(id="CartPole-v1"), seed=1) as envs:
        assert (envs.kind, envs.num_envs, envs.notes) == ("native", 8, [])
