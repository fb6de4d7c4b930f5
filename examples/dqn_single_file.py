"""DQN in one file: the oracle. It imports nothing from qfleet, and the serial schedule (lag 0) must have the same losses.

    python examples/dqn_single_file.py            trains CartPole-v1 and prints returns
    losses = train(updates=500)                   what tests/test_oracle.py compares

What it shares with qfleet is written out here in full: the order of events in a round, the rules of the stream of rows, and
the stateless random numbers. Everything else is the plainest possible PyTorch: autograd, torch.optim.Adam, Python lists.
"""

from __future__ import annotations

import copy
import itertools
import math
import zlib
from dataclasses import dataclass

import gymnasium as gym
import numpy as np
import torch
from torch import nn
from torch.nn import functional as F


@dataclass(frozen=True, kw_only=True)
class Settings:
    env: str = "CartPole-v1"
    seed: int = 1
    total_steps: int = 20_000
    steps_per_round: int = 8  # collect this many rows, then update
    hidden: tuple[int, ...] = (64, 64)
    min_steps: int = 500
    samples_per_step: float = 16.0
    batch_size: int = 32
    lr: float = 1e-3
    gamma: float = 0.99
    n_step: int = 3
    grad_clip: float = 10.0
    target_interval: int = 100
    epsilon_start: float = 1.0
    epsilon_end: float = 0.05
    epsilon_steps: int = 4_000
    capacity: int = 10_000


# --- random numbers: SplitMix64 of (seed, purpose, counter, index) -----------------------------------------------------

MASK = (1 << 64) - 1


def mix(z: int) -> int:
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def key(seed: int, purpose: str) -> int:
    return mix((seed * 0x9E3779B97F4A7C15 + zlib.crc32(purpose.encode()) * 0xBF58476D1CE4E5B9) & MASK)


def uniform(k: int, counter: int, n: int) -> list[float]:
    return [(mix((k + ((counter << 32) + i) * 0x9E3779B97F4A7C15) & MASK) >> 11) * 2.0**-53 for i in range(n)]


# --- the stream: row t is o_t, a_t, and the reward and flags a_t produced ------------------------------------------------


@dataclass
class Row:
    obs: np.ndarray
    first: bool  # obs is the first of an episode
    action: int = 0
    reward: float = 0.0
    terminated: bool = False
    truncated: bool = False

    @property
    def end(self) -> bool:
        return self.terminated or self.truncated


def is_start(rows: list[Row], s: int, n: int) -> bool:
    """Row s can be sampled: its window is complete and it does not hold a terminal observation."""
    return s + n < len(rows) and not rows[s + 1].first


def transition(rows: list[Row], s: int, n: int, gamma: float) -> tuple[np.ndarray, int, float, float, np.ndarray]:
    """n-step: sum rewards up to the first end; only a termination stops the bootstrap."""
    total, m = 0.0, 0
    for i in range(n):
        total += gamma**i * rows[s + i].reward
        m += 1
        if rows[s + i].end:
            break
    discount = 0.0 if rows[s + m - 1].terminated else gamma**m
    return rows[s].obs, rows[s].action, total, discount, rows[s + m].obs


# --- training --------------------------------------------------------------------------------------------------------------


def make_net(sizes: list[int]) -> nn.Sequential:
    layers: list[nn.Module] = []
    for a, b in itertools.pairwise(sizes):
        layers += [nn.Linear(a, b), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def train(c: Settings, updates: int | None = None, log: bool = False) -> list[float]:
    """-> the loss of every update."""
    torch.set_num_threads(1)
    env = gym.make(c.env)
    assert isinstance(env.action_space, gym.spaces.Discrete)
    actions, width = int(env.action_space.n), math.prod(env.observation_space.shape or ())
    torch.manual_seed(key(c.seed, "network") >> 33)
    net = make_net([width, *c.hidden, actions])
    target = copy.deepcopy(net)
    optimizer = torch.optim.Adam(net.parameters(), lr=c.lr)
    explore, replay = key(c.seed, "explore"), key(c.seed, "replay")

    env_seed = key(key(c.seed, "environments") >> 33, "environment 0") >> 33
    rows: list[Row] = []  # the whole stream; only the newest `capacity` rows may be sampled
    starts: list[int] = []
    now, over = Row(env.reset(seed=env_seed)[0], True), False
    losses: list[float] = []
    ticks = steps = 0
    episode_return = 0.0
    returns: list[float] = []

    while steps < c.total_steps and (updates is None or len(losses) < updates):
        for _ in range(c.steps_per_round):  # collect
            epsilon = c.epsilon_start + (c.epsilon_end - c.epsilon_start) * min(1.0, steps / c.epsilon_steps)
            u = uniform(explore, ticks, 2)
            with torch.no_grad():
                greedy = int(net(torch.as_tensor(now.obs)[None]).argmax(1))
            now.action = int(u[1] * actions) if u[0] < epsilon else greedy
            if over:  # this row holds a terminal observation: the action is ignored, the next row starts an episode
                following, over = Row(env.reset()[0], True), False
            else:
                obs, reward, terminated, truncated, _ = env.step(now.action)
                now.reward, now.terminated, now.truncated = float(reward), terminated, truncated
                following, over = Row(obs, False), terminated or truncated
                steps += 1
                episode_return += now.reward
                if over:
                    returns.append(episode_return)
                    episode_return = 0.0
            rows.append(now)
            now = following
            ticks += 1
        known = starts[-1] if starts else -1
        fresh = range(known + 1, len(rows) - c.n_step)
        starts = [s for s in starts if s >= len(rows) - c.capacity] + [s for s in fresh if is_start(rows, s, c.n_step)]
        if log and steps % 1000 < c.steps_per_round and returns:
            print(
                f"step {steps:6d}  updates {len(losses):6d}  return of the last 20 episodes {np.mean(returns[-20:]):.1f}"
            )

        due = math.floor(max(0, steps - c.min_steps) * c.samples_per_step / c.batch_size)
        while len(losses) < due:  # update
            picks = [starts[math.floor(u * len(starts))] for u in uniform(replay, len(losses), c.batch_size)]
            obs, action, reward, discount, next_obs = zip(
                *(transition(rows, s, c.n_step, c.gamma) for s in picks), strict=True
            )
            with torch.no_grad():
                best = target(torch.as_tensor(np.stack(next_obs))).amax(1)
                y = torch.tensor(reward) + torch.tensor(discount) * best
            q = net(torch.as_tensor(np.stack(obs))).gather(1, torch.tensor(action)[:, None])[:, 0]
            loss = F.smooth_l1_loss(q, y)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(net.parameters(), c.grad_clip)
            optimizer.step()
            losses.append(loss.item())
            if len(losses) % c.target_interval == 0:
                target.load_state_dict(net.state_dict())
    env.close()
    return losses if updates is None else losses[:updates]


if __name__ == "__main__":
    train(Settings(), log=True)
