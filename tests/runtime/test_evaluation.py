"""Greedy episodes that do not end by themselves."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

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


def played(env: str, player: Always, episodes: int) -> evaluation.Evaluation:
    envs = evaluation.make_envs(EnvConfig(id=env), episodes, seed=1, threads=1)
    try:
        result = evaluation.play(player, envs, episodes, seed=1, step=0)
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
