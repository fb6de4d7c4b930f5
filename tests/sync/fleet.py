"""What the tests of this folder share: a small problem with known gradients, and a server driven by hand."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import gymnasium
import torch
from torch import Tensor

from qfleet.config import Config, LearnerConfig, NetworkConfig, SyncConfig
from qfleet.learner import Learner, Optimizer
from qfleet.sync import policies
from qfleet.sync.policies import Outcome, Push
from qfleet.sync.shard import Shard, ranges
from qfleet.types import Batch, Spec

BATCH, FEATURES, HIDDEN = 8, 5, 16
SIZE = 128  # of the flat parameters, of which FEATURES * HIDDEN + HIDDEN = 96 are used


def config_of(**learner: Any) -> Config:
    plain = {"optimizer": "sgd", "lr": 0.1, "grad_clip": 0.0, "target_interval": 10, "batch_size": BATCH}
    return replace(Config(), learner=LearnerConfig(**(plain | learner)))


def sync_of(mode: str, **values: Any) -> SyncConfig:
    return SyncConfig(mode=mode, **values)  # type: ignore[arg-type]


class Problem:
    """Regression by a small network: batch `clock` of worker `i` is always the same."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        self.dtype = dtype
        g = torch.Generator().manual_seed(1)
        self.initial = torch.randn(SIZE, generator=g, dtype=torch.float64).mul(0.3).to(dtype)
        self._truth = torch.randn(FEATURES, generator=g, dtype=torch.float64).to(dtype)

    def batch(self, worker: int, clock: int, rows: int = BATCH) -> tuple[Tensor, Tensor]:
        g = torch.Generator().manual_seed(1000 * clock + worker)
        x = torch.randn(rows, FEATURES, generator=g, dtype=torch.float64).to(self.dtype)
        return x, torch.sin(x @ self._truth)

    def grad(self, params: Tensor, x: Tensor, y: Tensor) -> Tensor:
        p = params.detach().clone().requires_grad_(True)
        w, v = p[: FEATURES * HIDDEN].view(FEATURES, HIDDEN), p[FEATURES * HIDDEN : (FEATURES + 1) * HIDDEN]
        (((x @ w).tanh() @ v - y) ** 2).mean().backward()  # type: ignore[no-untyped-call]
        assert p.grad is not None
        return p.grad

    def worker_grad(self, params: Tensor, worker: int, clock: int, rows: int = BATCH) -> Tensor:
        return self.grad(params, *self.batch(worker, clock, rows))

    def alone(self, config: Config, workers: int, clocks: int, rows: list[int] | None = None) -> Tensor:
        """One learner with the batches of all workers at once."""
        params = self.initial.clone()
        optimizer = Optimizer(config, params)
        rows = rows or [BATCH] * workers
        for clock in range(clocks):
            batches = [self.batch(worker, clock, rows[worker]) for worker in range(workers)]
            x, y = (torch.cat(parts) for parts in zip(*batches, strict=True))
            optimizer(self.grad(params, x, y), config.learner.lr)
        return params


@cache
def played() -> list[Tensor]:
    """Some random episodes of CartPole: observations, actions, rewards, discounts, next observations."""
    env, rows = gymnasium.make("CartPole-v1"), list[tuple[Any, ...]]()
    obs, _ = env.reset(seed=1)
    env.action_space.seed(1)
    for _ in range(500):
        action = env.action_space.sample()
        new, reward, terminated, truncated, _ = env.step(action)
        rows.append((obs.tolist(), int(action), float(reward), 0.0 if terminated else 0.99, new.tolist()))
        obs = env.reset()[0] if terminated or truncated else new
    return [torch.tensor(column) for column in zip(*rows, strict=True)]


class Games:
    """A source of batches for a learner: those of these workers together. Each has its own, always the same."""

    def __init__(self, *workers: int) -> None:
        self._workers = workers

    def sample(self, update: int, count: int = 1, beta: float = 1.0, size: int = 0) -> Batch:
        keys = [1000 * u + worker for u in range(update, update + count) for worker in self._workers]
        drawn = [torch.randint(500, (BATCH,), generator=torch.Generator().manual_seed(key)) for key in keys]
        rows = torch.cat(drawn)
        return Batch(*(column[rows] for column in played()), id=rows, weight=torch.ones(len(rows)))

    def update_priorities(self, id: Tensor, priority: Tensor) -> None:
        pass


def learner_of(config: Config) -> Learner:
    """A real one, of a small network."""
    spec = Spec(obs_shape=(4,), obs_dtype="float32", num_actions=2)
    return Learner(replace(config, network=NetworkConfig(hidden=(16, 16))), spec, torch.device("cpu"))


def learned(config: Config, workers: int, updates: int) -> Tensor:
    """Parameters and target of one learner with the batches of all workers at once, and an uncompressed gradient."""
    whole = replace(config, learner=replace(config.learner, batch_size=BATCH * workers))
    alone = learner_of(whole)
    before = alone.flat.data.clone()
    alone.learn(Games(*range(workers)), updates)
    assert (alone.flat.data - before).abs().max() > 0.1
    return torch.stack((alone.flat.data, alone.target.data))


class Server:
    """A policy and its shards."""

    def __init__(self, config: Config, sync: SyncConfig, initial: Tensor, workers: int, shards: int = 1) -> None:
        self.policy = policies.make(sync, config.learner.batch_size, config.learner.target_interval, workers)
        self.ranges = ranges(len(initial), shards)
        self.shards = [Shard(replace(config, sync=sync), initial[r]) for r in self.ranges]
        self._lr, self._pushed = config.learner.lr, [0] * workers
        for worker in range(workers):
            self.policy.join(worker)

    def push(self, worker: int, vector: Tensor, base: int, samples: float = BATCH, lr: float | None = None) -> Outcome:
        push = Push(worker, 0, self._pushed[worker], base, samples, self._lr if lr is None else lr)
        self._pushed[worker] += 1
        for shard, r in zip(self.shards, self.ranges, strict=True):
            shard.stage(push.key, vector[r].clone())
        outcome = self.policy.offer(push)
        for commit in outcome.commits:
            for shard in self.shards:
                shard.commit(commit)
        if outcome.why_not:
            for shard in self.shards:
                shard.discard(push.key)
        return outcome

    @property
    def params(self) -> Tensor:
        assert {shard.version for shard in self.shards} == {self.policy.version}
        return torch.cat([shard.params for shard in self.shards])
