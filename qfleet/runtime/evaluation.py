"""Evaluation on environments of its own: greedy, but for a few random actions where a task needs them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol

import numpy as np

from qfleet import envs as environments
from qfleet import rng
from qfleet.acting.actor import FrameStack
from qfleet.config import Config, EnvConfig
from qfleet.envs import Envs, ids
from qfleet.types import Array

MAX_ENVS = 20
MAX_EPISODE_STEPS = 27_000  # 30 minutes of Atari; a greedy policy may otherwise stay in one place for ever
IDLE_FRAMES = 3 * 60 * 60  # 3 minutes of Atari without a reward: it will not serve the next ball of Breakout, say


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Unclipped returns of whole episodes."""

    env: str
    step: int
    episodes: int
    mean_return: float
    std_return: float
    returns: list[float]
    epsilon: float  # part of random actions

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def num_envs(episodes: int) -> int:
    """How many environments play that many episodes."""
    return min(episodes, MAX_ENVS)


def make_envs(config: EnvConfig, episodes: int, seed: int, threads: int) -> Envs:
    if ids.atari_game(ids.find(config.id)) is not None:  # their number decides how games are stepped: these are few
        config = replace(config, vectorize="auto")
    return environments.make(config, seed=seed, num_envs=num_envs(episodes), threads=threads)


class Player(Protocol):
    """Observations [B, *input_shape] in, greedy actions [B] out."""

    config: Config

    def act(self, obs: Array) -> Array: ...


class Chance:
    """Replaces a part of the actions by random ones."""

    def __init__(self, epsilon: float, seed: int, num_actions: int) -> None:
        self.epsilon, self._num_actions = epsilon, num_actions
        self._draws = np.random.default_rng(rng.derive(seed, "random actions of an evaluation"))

    def __call__(self, actions: Array) -> Array:
        if not self.epsilon:
            return actions
        random = self._draws.integers(self._num_actions, size=actions.shape)
        return np.where(self._draws.random(actions.shape) < self.epsilon, random, actions)


def play(
    player: Player,
    envs: Envs,
    episodes: int,
    seed: int,
    step: int,
    stop: Callable[[], bool | None] = lambda: False,
    epsilon: float | None = None,
) -> Evaluation | None:
    """None if `stop` became true on the way. Every environment plays its share of the episodes, so short episodes are not counted more often than long ones.

    An episode that does not end counts with what it has; its environment cannot be used again.
    """
    n = envs.num_envs
    patience = IDLE_FRAMES // envs.frame_skip if envs.frame_skip > 1 else MAX_EPISODE_STEPS  # steps without a reward
    share = np.full(n, episodes // n) + (np.arange(n) < episodes % n)
    stack = FrameStack(envs.spec, n)
    chance = Chance(player.config.runtime.eval_epsilon if epsilon is None else epsilon, seed, envs.spec.num_actions)
    obs, first = envs.reset(rng.derive(seed, "evaluation")), np.ones(n, np.bool_)
    running, length, idle = np.zeros(n), np.zeros(n, np.int64), np.zeros(n, np.int64)
    returns: list[list[float]] = [[] for _ in range(n)]
    while (share > 0).any():
        if stop():
            return None
        s = envs.step(chance(player.act(stack.push(obs, first))))
        obs, first = s.obs, s.first
        running += s.reward
        length += ~s.first
        idle = np.where(s.reward == 0, idle + 1, 0)
        over = s.terminated | s.truncated
        stuck = (length >= MAX_EPISODE_STEPS) | (idle >= patience)
        for e in np.flatnonzero((over | stuck) & (share > 0)):
            returns[e].append(float(running[e]))
            share[e] = 0 if stuck[e] else share[e] - 1
        running[over] = 0
        length[over] = idle[over] = 0
    played = [r for each in returns for r in each]
    return Evaluation(
        env=player.config.env.id,
        step=step,
        episodes=len(played),
        mean_return=float(np.mean(played)),
        std_return=float(np.std(played)),
        returns=played,
        epsilon=chance.epsilon,
    )
