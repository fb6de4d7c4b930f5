"""Learners and parameter servers as Ray actors; this process supervises them.

    this process: Trainer ── Fleet ──┬─ servers    shards of the parameters (qfleet.sync.server); with the first one, the hub:
      (log, evaluate, stop)          │             who is there, how far they are, what they should do
                                     └─ learners   each a Worker: environments, replay, learner

| who              | waits for                                       | unblocked by                                           |
|------------------|-------------------------------------------------|--------------------------------------------------------|
| learner, a round | the hub: in modes with a barrier until all live | their reports, or the supervisor, which removes those  |
|                  | learners have reported the round; else nothing  | that are dead or silent                                |
| learner, a push  | as the policy says (qfleet.sync.server)         | the same                                               |
| supervisor       | news at the hub, at most PATIENCE seconds       | any report, or time                                    |

Shutdown: the hub says stop, learners end after their round, `close` kills what is left.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

import numpy as np
import torch

from qfleet import envs, rng
from qfleet.config import BARRIER_MODES, Config, ConfigError, override
from qfleet.learner import Flat, Learned, Learner
from qfleet.runtime.checkpoint import Checkpoints
from qfleet.runtime.setup import summary
from qfleet.runtime.worker import EXPLODED, Worker
from qfleet.sync.client import Client
from qfleet.sync.policies import Commit, Key
from qfleet.sync.server import Server
from qfleet.sync.shard import ranges
from qfleet.sync.wire import Address, Connection, Listener, Peer
from qfleet.types import Array, State

PATIENCE = 1.0  # seconds in which the supervisor looks after the learners even if there is no news
SUMS = ("steps", "updates", "bytes", "sent", "rejected")  # on a learner's clock; what else is there are seconds


def added(a: Learned | None, b: Learned | None) -> Learned | None:
    """Both together; the mean value is the newer one's."""
    if a is None or b is None:
        return a or b
    return Learned(a.loss_sum + b.loss_sum, b.q_mean, a.updates + b.updates)


class Report(NamedTuple):
    """What a learner says after a round."""

    rank: int
    incarnation: int
    round: int
    steps: int
    learned: Learned | None  # since the last report
    values: dict[str, float]
    clock: dict[str, float]


class Orders(NamedTuple):
    """What it is told."""

    total: int  # steps of all learners
    stop: bool
    lr_scale: float


class Hub:
    """Runs in one event loop."""

    def __init__(self, config: Config) -> None:
        self._together = config.sync.mode in BARRIER_MODES
        self.live: dict[int, int] = {}  # rank -> incarnation
        self._beats: dict[int, float] = {}  # when it gave its last sign of life
        self._newest: dict[int, Report] = {}
        self._gone = 0  # steps of incarnations that ended
        self._orders = Orders(0, False, 1.0)
        self._told: list[Report] = []
        self._changed, self._news = asyncio.Event(), asyncio.Event()
        self._met = -1  # the last round that all have reported

    async def join(self, rank: int, incarnation: int) -> int:
        """-> the round to begin with."""
        await self.leave(rank)
        self.live[rank], self._beats[rank] = incarnation, time.monotonic()
        return self._met + 1

    async def beat(self, rank: int, incarnation: int) -> None:
        """A sign of life."""
        if self.live.get(rank) == incarnation:
            self._beats[rank] = time.monotonic()

    async def silent(self, seconds: float) -> list[int]:
        """Those who gave no sign of life for so long."""
        return [rank for rank in self.live if time.monotonic() - self._beats[rank] > seconds]

    async def leave(self, rank: int) -> None:
        self.live.pop(rank, None)
        if (last := self._newest.pop(rank, None)) is not None:
            self._gone += last.steps
        self._meet()

    async def report(self, report: Report) -> Orders:
        if self.live.get(report.rank) != report.incarnation:
            return self._orders._replace(stop=True)  # it was given up, and replaced
        self._newest[report.rank] = report
        self._told.append(report)
        self._news.set()
        self._meet()
        while self._together and self._met < report.round and self.live.get(report.rank) == report.incarnation:
            await self._changed.wait()
        return self._orders

    async def finish(self, report: Report) -> None:
        """The last one of a learner."""
        self._told.append(report)
        self._news.set()
        if self.live.get(report.rank) == report.incarnation:
            self._newest[report.rank] = report
            await self.leave(report.rank)

    def _meet(self) -> None:
        """Totals change when all have come as far, or with every report."""
        least = min((self._newest[r].round if r in self._newest else -1 for r in self.live), default=-1)
        if self._together and least <= self._met and self.live:
            return
        self._met = max(self._met, least)
        total = self._gone + sum(report.steps for report in self._newest.values())
        self._orders = self._orders._replace(total=total)
        self._changed.set()
        self._changed = asyncio.Event()

    async def news(self, seconds: float) -> tuple[int, list[Report]]:
        """Steps of all, and reports since the last call; waits for one, but not longer than that."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._news.wait(), seconds)
        told, self._told = self._told, []
        self._news.clear()
        return self._orders.total, told

    async def order(self, stop: bool, lr_scale: float) -> None:
        self._orders = self._orders._replace(stop=stop, lr_scale=lr_scale)


class Member:
    """The team as a learner on the cluster sees it."""

    stopping, lr_scale = False, 1.0

    def __init__(
        self, config: Config, rank: int, incarnation: int, hub: Any, servers: Sequence[Address], token: str, here: int
    ) -> None:
        import ray

        self.rank, self.size, self.here = rank, config.learners, here
        self._config, self._incarnation, self._hub = config, incarnation, hub
        self._servers, self._token = servers, token
        self._get = ray.get
        self.client: Client | None = None
        self._entered = False
        self._finished = threading.Event()
        self._learned: Learned | None = None
        self._values: dict[str, float] = {}
        self._clock: dict[str, float] = {}
        self._pending: Any = None
        self._together = config.sync.mode in BARRIER_MODES
        self._round = 0
        if not incarnation:
            self.join()

    def join(self) -> None:
        """From now on the others wait for it, in modes in which they do; and it must give signs of life."""
        self._round = self._get(self._hub.join.remote(self.rank, self._incarnation))
        seconds = self._config.sync.heartbeat / 4

        def beat() -> None:
            while not self._finished.wait(seconds):
                self._hub.beat.remote(self.rank, self._incarnation)

        threading.Thread(target=beat, name="heartbeat", daemon=True).start()

    def attach(self, learner: Learner) -> None:
        connections = [Connection(address, self._token) for address in self._servers]
        self.client = Client(self._config, self.rank, self._incarnation, len(learner.flat.data), connections)
        if not self._incarnation:
            self.enter(learner)
        else:  # to act with, until it enters
            learner.flat.data.copy_(self.client.newest())

    def enter(self, learner: Learner, own: int = 0) -> bool:
        """The first ones are there before anybody begins. A later one joins between two rounds of the others, at the hub, and
        takes part in updates from its first own: earlier, they would wait for it while it waits for them."""
        if not self._entered:
            if self._incarnation and own * self.size < self._config.first_update:
                return False
            assert self.client is not None
            self.client.attach(learner)
            self._entered = True
        return True

    def tell(self, learned: Learned | None, values: dict[str, float], clock: dict[str, float]) -> None:
        """What the next report holds, besides the steps."""
        self._learned, self._values, self._clock = added(self._learned, learned), values, clock

    def _report(self, steps: int) -> Report:
        report = Report(self.rank, self._incarnation, self._round, steps, self._learned, self._values, self._clock)
        self._round, self._learned = self._round + 1, None
        return report

    def finish(self, steps: int) -> None:
        """Nobody waits for it any more."""
        self._finished.set()
        if self.client is not None:
            self.client.leave()
            self.client.close()
        self._get(self._hub.finish.remote(self._report(steps)))

    def meet(self, steps: int) -> int:
        sent = self._hub.report.remote(self._report(steps))
        # Where nobody waits for anybody, the answer to the report before is new enough.
        orders: Orders = self._get(sent if self._together or self._pending is None else self._pending)
        self._pending = sent
        self.stopping, self.lr_scale = orders.stop, orders.lr_scale
        return max(orders.total, steps)

    def counted(self, own: int, total: int) -> int:
        return total if self._together else own * self.size

    def stop(self) -> None:
        self.stopping = True

    def wait(self) -> None:
        pass

    def least(self, number: int) -> int:
        return number

    def first(self, text: str) -> str:
        return text

    def state(self) -> State:
        return {}

    def load_state(self, state: State) -> None:
        pass


class LearnerActor:
    def __init__(
        self, config: Config, rank: int, incarnation: int, hub: Any, servers: Sequence[Address], token: str, here: int
    ) -> None:
        torch.set_num_threads(1)
        self._late = incarnation > 0
        self._team = Member(config, rank, incarnation, hub, servers, token, here)
        self._worker = Worker(config, self._team)
        self._worker.build()

    def ready(self) -> None:
        """It can be called when everything is made."""

    def pid(self) -> int:
        return os.getpid()

    def run(self) -> int:
        """Until it is told to stop; -> its steps."""
        worker, team = self._worker, self._team
        try:
            if self._late:
                team.join()
            worker.start()
            while not worker.over:
                learned = worker.round()
                client = team.client
                assert client is not None
                more = {"sent": client.bytes_sent, "push": client.wait_seconds, "rejected": client.rejected}
                team.tell(learned, worker.values(), worker.clock() | more)
            team.finish(worker.collector.steps)
        finally:
            worker.close()
        return worker.collector.steps


class ServerActor(Hub):
    """A shard that listens. The first one is told where the others do, and is the hub."""

    def __init__(self, config: Config, initial: Array, token: str) -> None:
        super().__init__(config)
        self._config, self._token, self._others = config, token, list[Peer]()
        self._server = Server(config, initial, self._forward)
        self._running: list[Any] = []

    def _forward(self, commits: Sequence[Commit], discarded: Sequence[Key]) -> None:
        for other in self._others:
            other("carry_out", [commits, discarded])

    async def listen(self, others: Sequence[Address]) -> Address:
        import ray

        self._others = [Peer(address, self._token) for address in others]
        listener = Listener(self._server.handlers(), self._token)
        self._running = [listener]
        if self._config.sync.mode == "window" and self._config.sync.window_ms:
            seconds = self._config.sync.window_ms / 4e3
            self._running.append(asyncio.create_task(self._server.ticking(asyncio.sleep, seconds)))
        return str(ray.util.get_node_ip_address()), listener.port  # type: ignore[no-untyped-call]

    async def give_up(self, rank: int) -> None:
        """A learner that is dead, or silent for too long."""
        await self.leave(rank)
        await self._server.leave(rank)

    async def counts(self) -> dict[str, Any]:
        server = self._server
        return {"staleness": server.staleness, "rejected": server.rejected, "version": server.policy.version}


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
        self.config = config = override(config, {"sync.transport": "server"})
        sample = envs.make(config.env, seed=rng.derive(config.seed, "sample"), num_envs=1, threads=1)
        self._open.callback(sample.close)
        self.envs = sample
        self.steps = 0
        self.team = Orderer(self)
        self._clocks: dict[int, dict[str, float]] = {}
        self._gone: dict[str, float] = {}  # counts of learners that were replaced
        self._notes: list[str] = []
        self._values: dict[int, dict[str, float]] = {}

    def summary(self) -> list[str]:
        c = self.config
        servers = f", {c.sync.servers} server{'s' if c.sync.servers > 1 else ''}" if c.sync.over == "server" else ""
        lines = summary(c, self.envs, "cpu")
        return [
            *lines,
            f"  learners      {c.learners} on Ray, sync {c.sync.mode} over {c.sync.over}{servers}, codec {c.sync.codec}",
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
        heartbeat = self.config.sync.heartbeat
        if time.monotonic() - self._looked > heartbeat / 4:
            self._looked = time.monotonic()
            for rank in self._ray.get(self._hub.silent.remote(heartbeat)):
                self._replace(rank, f"gave no sign of life for {heartbeat:g} s")

    def _replace(self, rank: int, what: str) -> None:
        self._ray.kill(self._learners[rank])
        self._ray.get(self._hub.give_up.remote(rank))
        if (clock := self._clocks.pop(rank, None)) is not None:
            for name in SUMS:
                self._gone[name] = self._gone.get(name, 0.0) + clock.get(name, 0.0)
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
        for name in ("rollout/episodes",):
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
        every = list(self._clocks.values())
        names = {name for clock in every for name in clock} | {
            "steps",
            "updates",
            "env",
            "act",
            "learn",
            "transfer",
            "wait",
            "bytes",
        }
        out = {n: self._gone.get(n, 0.0) + sum(clock.get(n, 0.0) for clock in every) for n in names}
        for name in names - set(SUMS):
            out[name] /= max(1, len(every))
        return out | {"wall": time.perf_counter(), "steps": self.steps}

    def save(self, checkpoints: Checkpoints, more: State, stuck: bool = False) -> None:
        """The weights alone, so far."""
        with self.lend():
            checkpoints.save_weights(self.steps, asdict(self.envs.spec), self._net.state_dict())

    def load(self, checkpoints: Checkpoints) -> State:
        raise ConfigError(
            "a run with learners on Ray cannot be resumed yet: its checkpoints hold weights alone. Start it again, or use torchrun."
        )

    def close(self) -> None:
        self._open.close()


def check(config: Config) -> None:
    """Can these learners work together on Ray?"""
    if config.sync.transport == "allreduce":
        raise ConfigError(
            f"learners on Ray meet at servers so far; for all-reduce use a launcher: torchrun --nproc-per-node {config.learners} -m qfleet train ..."
        )
    if config.env.num_envs % config.learners:
        raise ConfigError(
            f"env.num_envs {config.env.num_envs} cannot be divided among {config.learners} learners: change it to a multiple of {config.learners}."
        )


class Orderer:
    """The team as the supervisor sees it: what it says, all do."""

    rank, here = 0, 1

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
