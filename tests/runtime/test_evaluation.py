"""Greedy episodes that do not end by themselves."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

import qfleet
from qfleet.config import Config, EnvConfig
from qfleet.runtime import evaluation
from qfleet.types import Array

NOOP, FIRE = 0, 1


@dataclass
class Always:
    """One action for ever."""

    action: int
    config: Config = field(default_factory=Config)
    steps: int = 0

    def act(self, obs: Array) -> Array:
        self.steps += 1
        return np.full(len(obs), self.action)


def played(env: str, player: Always, episodes: int, epsilon: float = 0.0) -> evaluation.Evaluation:
    envs = evaluation.make_envs(EnvConfig(id=env), episodes, seed=1, threads=1)
    try:
        result = evaluation.play(player, envs, episodes, seed=1, step=0, epsilon=epsilon)
    finally:
        envs.close()
    assert result is not None
    return result


def test_a_game_that_waits_to_be_served_ends_after_three_minutes() -> None:
    idle, serving = Always(NOOP), Always(FIRE)
    got, other = played("breakout", idle, 2), played("breakout", serving, 2)
    patience = evaluation.IDLE_FRAMES // 4
    assert got.episodes == 2 and patience <= idle.steps < patience + 500
    assert other.episodes == 2 and serving.steps < patience and other.mean_return >= got.mean_return


def test_a_few_random_actions_serve() -> None:
    one, two = Always(NOOP), Always(NOOP)
    got = played("breakout", one, 2, epsilon=0.05)
    assert one.steps < evaluation.IDLE_FRAMES // 4 and got.epsilon == 0.05  # all balls were lost
    assert got == played("breakout", two, 2, epsilon=0.05) and one.steps == two.steps  # the same seed


@pytest.mark.parametrize("epsilon", [0.0, 0.3, 1.0])
def test_the_part_of_random_actions(epsilon: float) -> None:
    chance, actions = evaluation.Chance(epsilon, 7, num_actions=4), np.full(1000, 9)
    random = np.concatenate([chance(actions) for _ in range(20)])
    replaced = random[random != 9]
    assert abs(len(replaced) / 20_000 - epsilon) < 0.01 and (actions == 9).all()
    if epsilon:
        np.testing.assert_allclose(np.bincount(replaced, minlength=4) / len(replaced), 0.25, atol=0.02)


class Late(gym.Env[Any, Any]):
    """One reward, after more steps than Atari would be given."""

    observation_space = gym.spaces.Box(0, 1, (1,), np.float32)
    action_space = gym.spaces.Discrete(2)
    LENGTH = evaluation.IDLE_FRAMES + 100

    def reset(self, **kwargs: Any) -> Any:
        super().reset(**kwargs)
        self.t = 0
        return np.zeros(1, np.float32), {}

    def step(self, action: int) -> Any:
        self.t += 1
        over = self.t == self.LENGTH
        return np.zeros(1, np.float32), float(over), over, False, {}


def test_other_tasks_may_be_without_reward_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    gym.register("Late-v0", Late)
    try:
        assert played("Late-v0", Always(0), 1).returns == [1.0]
        monkeypatch.setattr(evaluation, "MAX_EPISODE_STEPS", 50)
        player = Always(0)
        assert played("Late-v0", player, 1).returns == [0.0] and player.steps == 50
    finally:
        del gym.registry["Late-v0"]


def test_bad_numbers_are_refused() -> None:
    with pytest.raises(ValueError, match="epsilon is 2, but it must be between 0 and 1"):
        qfleet.evaluate("run", epsilon=2)
    with pytest.raises(ValueError, match="episodes is 0, but it must be at least 1"):
        qfleet.evaluate("run", episodes=0)
