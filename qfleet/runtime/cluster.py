"""Learners and parameter servers as Ray actors; this process supervises them.

    this process: Trainer ── Fleet ──┬─ servers    shards of the parameters (qfleet.sync.server); with the first one, the hub:
      (log, evaluate, stop)          │             who is there, how far they are, what they should do
                                     └─ learners   each a Worker: environments, replay, learner

| who        | waits for                                  | unblocked by        |
|------------|--------------------------------------------|---------------------|
| supervisor | news at the hub, at most PATIENCE seconds  | any report, or time |

Who waits inside the actors: runtime.actors. Shutdown: the hub says stop, learners end after their round, `close` kills what
is left.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import numpy as np
import torch

from qfleet import envs, rng
from qfleet.config import Config, ConfigError, override
from qfleet.learner import Flat, Learned, Learner
from qfleet.runtime.actors import LearnerActor, ServerActor, added
from qfleet.runtime.checkpoint import Checkpoints
from qfleet.runtime.setup import summary
from qfleet.runtime.team import TeamError, check_division
from qfleet.runtime.worker import EXPLODED
from qfleet.sync.client import Client
from qfleet.sync.shard import ranges
from qfleet.sync.wire import Connection
from qfleet.types import State

PATIENCE = 1.0  # seconds in which the supervisor looks after the learners even if there is no news
SUMS = (
    "rollout/episodes",
    "sync/rejected",
    "sync/sent_mb",
)  # metrics that are counts: the rest are means over the learners
SECONDS = ("env", "act", "learn", "transfer", "wait")  # on a learner's clock


class Fleet:
    """All of them together, as the trainer sees a worker."""

    def __init__(self, config: Config) -> None:
        try:
            import ray
        except ImportError:
            raise ConfigError(
                f"learners is {config.learners}, which needs Ray: pip install 'qfleet[ray]'. (Or start them with torchrun, see docs/sync.md.)"
            ) from None
        self._ray = ray
        self._open = contextlib.ExitStack()
        self.device, self.threads = torch.device("cpu"), os.cpu_count() or 1
        check(config)
        self.config = config = override(config, {"sync.transport": "server", "device": "cpu"})
        sample = envs.make(config.env, seed=rng.derive(config.seed, "sample"), num_envs=1, threads=1)
        self._open.callback(sample.close)
        self.envs = sample
        self.steps = 0
        self.team = Orderer(self)
        self._clocks: dict[int, dict[str, float]] = {}
        self._ended: list[dict[str, float]] = []  # clocks of learners that were replaced
        self._updates = 0  # of all learners
        self._notes: list[str] = []
        self._values: dict[int, dict[str, float]] = {}

    def summary(self) -> list[str]:
        c = self.config
        servers = f"{c.sync.servers} server{'s' if c.sync.servers > 1 else ''}"
        return [
            *summary(c, self.envs, "cpu"),
            f"  learners      {c.learners} on Ray with {servers}, sync {c.sync.mode}, codec {c.sync.codec}",
        ]

    def build(self) -> None:
        ray, config = self._ray, self.config
        if not ray.is_initialized():
            ray.init(
                num_cpus=max(os.cpu_count() or 1, config.learners + config.sync.servers + 1),
                include_dashboard=False, log_to_driver=False, logging_level="ERROR",
            )  # fmt: skip
            self._open.callback(ray.shutdown)
        first = Learner(config, self.envs.spec, self.device)
        self._net, self.flat, initial = first.net, first.flat, first.flat.data.numpy().copy()
        spread = {"num_cpus": 1}
        token = secrets.token_hex(16)
        parts = [initial[r] for r in ranges(len(initial), config.sync.servers)]
        self._servers = [ray.remote(**spread)(ServerActor).remote(config, part, token) for part in parts]
        self._hub = self._servers[0]
        others = ray.get([server.listen.remote([]) for server in self._servers[1:]])
        addresses = [ray.get(self._servers[0].listen.remote(others)), *others]
        self._client = Client(config, -1, 0, len(initial), [Connection(address, token) for address in addresses])
        self._open.callback(self._client.close)
        self._made = ray.remote(max_concurrency=2, **spread)(LearnerActor)
        self._about = (addresses, token)
        for made in self._servers:
            self._open.callback(ray.kill, made)
        self._incarnations = [0] * config.learners
        self._learners = [self._learner(rank) for rank in range(config.learners)]
        self._open.callback(self._end)
        self._running: dict[Any, int] = {}  # what ends with a learner -> its rank
        self._looked = time.monotonic()

    def _learner(self, rank: int) -> Any:
        c = self.config
        return self._made.remote(c, rank, self._incarnations[rank], self._hub, *self._about, c.learners)

    def _end(self) -> None:
        for learner in self._learners:
            self._ray.kill(learner)

    def start(self) -> None:
        self._ray.get([learner.ready.remote() for learner in self._learners])
        self._running = {learner.run.remote(): rank for rank, learner in enumerate(self._learners)}

    @property
    def over(self) -> bool:
        return self.team.stopping or self.steps >= self.config.total_steps

    def round(self) -> Learned | None:
        """Whatever was reported since the last time."""
        learned = self._news(PATIENCE)
        if not self.over:
            self._look_after()
        return added(learned, self.settle()) if self.over else learned

    def _look_after(self) -> None:
        """Replace learners that died or give no sign of life. One that failed by itself would fail again: it ends the run."""
        ended, _ = self._ray.wait(list(self._running), num_returns=len(self._running), timeout=0)
        for ref in ended:
            rank = self._running[ref]
            try:
                self._ray.get(ref)
                del self._running[ref]
            except self._ray.exceptions.RayActorError:
                self._replace(rank, "ended")
            except self._ray.exceptions.RayTaskError as e:
                raise TeamError(f"learner {rank} failed: {type(e.cause).__name__}: {e.cause}") from None
        heartbeat = self.config.sync.heartbeat
        if time.monotonic() - self._looked > heartbeat / 4:
            self._looked = time.monotonic()
            for rank in self._ray.get(self._hub.silent.remote(heartbeat)):
                self._replace(rank, f"gave no sign of life for {heartbeat:g} s")

    def _replace(self, rank: int, what: str) -> None:
        self._ray.kill(self._learners[rank])
        self._ray.get(self._hub.give_up.remote(rank))
        if rank in self._clocks:
            self._ended.append(self._clocks.pop(rank))
        self._running = {ref: r for ref, r in self._running.items() if r != rank}
        self._incarnations[rank] += 1
        self._learners[rank] = self._learner(rank)
        self._running[self._learners[rank].run.remote()] = rank
        self._notes.append(f"learner {rank} {what} at step {self.steps:,}: a new one takes its place")

    def _news(self, seconds: float) -> Learned | None:
        learned: Learned | None = None
        self.steps, told = self._ray.get(self._hub.news.remote(seconds))
        for report in told:
            if report.incarnation != self._incarnations[report.rank]:
                continue
            if report.clock:
                self._values[report.rank] = report.values
                self._clocks[report.rank] = report.clock
            learned = added(learned, report.learned)
        self._updates += 0 if learned is None else learned.updates
        return learned

    @contextlib.contextmanager
    def lend(self) -> Iterator[Flat]:
        self.flat.data.copy_(self._client.newest())
        yield self.flat

    def settle(self) -> Learned | None:
        """At the end, when all learners have ended, too: what they said last."""
        if not self.over or not self._running:
            return None
        self._ray.wait(list(self._running), num_returns=len(self._running), timeout=self.config.sync.heartbeat)
        self._running = {}
        return self._news(0.0)

    def exploded(self) -> bool:
        return not bool(self._client.newest().abs().max() < EXPLODED)

    def note(self) -> str:
        return self._notes.pop(0) if self._notes else ""

    def values(self) -> dict[str, float]:
        """Means over the learners; counts are sums."""
        every = list(self._values.values())
        names = {name for values in every for name in values}
        mean = {n: float(np.mean([values[n] for values in every if n in values])) for n in sorted(names)}
        for name in SUMS:
            mean[name] = sum(values.get(name, 0.0) for values in every)
        return mean

    def waiting(self) -> float | None:
        return None

    def awaited(self) -> str:
        return ""

    def kill(self) -> None:
        self.close()

    def clock(self) -> dict[str, float]:
        """Counts of all learners; seconds are means over them, so that shares are shares of a learner's time."""
        every = [*self._ended, *self._clocks.values()]
        seconds = {n: sum(clock[n] for clock in every) / self.config.learners for n in SECONDS}
        counts = {"steps": self.steps, "updates": self._updates, "bytes": sum(clock["bytes"] for clock in every)}
        return {"wall": time.perf_counter(), **counts, **seconds}

    def save(self, checkpoints: Checkpoints, more: State, stuck: bool = False) -> None:
        """The weights alone, so far."""
        with self.lend():
            checkpoints.save_weights(self.steps, asdict(self.envs.spec), self._net.state_dict())

    def load(self, checkpoints: Checkpoints) -> State:
        raise ConfigError(
            f"this run has {self.config.learners} learners. Under torchrun or mpirun, resume it as it was started; learners on Ray cannot be resumed yet (their checkpoints hold weights alone)."
        )

    def close(self) -> None:
        self._open.close()


def check(config: Config) -> None:
    """Can these learners work together on Ray?"""
    if config.sync.transport == "allreduce":
        raise ConfigError(
            f"learners on Ray meet at servers so far; for all-reduce use a launcher: torchrun --nproc-per-node {config.learners} -m qfleet train ..."
        )
    check_division(config, config.learners)


class Orderer:
    """The team as the supervisor sees it: what it says, all do."""

    def __init__(self, fleet: Fleet) -> None:
        self.size = fleet.config.learners
        self._fleet, self.stopping, self._scale = fleet, False, 1.0

    @property
    def lr_scale(self) -> float:
        return self._scale

    @lr_scale.setter
    def lr_scale(self, value: float) -> None:
        self._scale = value
        self._order()

    def stop(self) -> None:
        self.stopping = True
        self._order()

    def _order(self) -> None:
        self._fleet._ray.get(self._fleet._hub.order.remote(self.stopping, self._scale))
