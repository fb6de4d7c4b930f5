"""What runs in the processes of a cluster (see runtime.cluster): the hub, a learner, a parameter server.

| who              | waits for                                       | unblocked by                                           |
|------------------|-------------------------------------------------|--------------------------------------------------------|
| learner, a round | the hub: in modes with a barrier until all live | their reports, or the supervisor, which removes those  |
|                  | learners have reported the round; else nothing  | that are dead or silent                                |
| learner, a push  | as the policy says (qfleet.sync.server)         | the same                                               |
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from qfleet.config import BARRIER_MODES, Config
from qfleet.learner import Learned, Learner
from qfleet.runtime.team import Alone
from qfleet.runtime.worker import Worker
from qfleet.sync.client import Client
from qfleet.sync.policies import Commit, Key
from qfleet.sync.server import Server
from qfleet.sync.wire import Address, Connection, Listener, Peer
from qfleet.types import Array


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


class Member(Alone):
    """The team as a learner on the cluster sees it."""

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


class LearnerActor:
    def __init__(
        self, config: Config, rank: int, incarnation: int, hub: Any, servers: Sequence[Address], token: str, here: int
    ) -> None:
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
                seen = {
                    "sync/staleness": client.staleness,
                    "sync/rejected": client.rejected,
                    "sync/sent_mb": client.bytes_sent / 1e6,
                }
                clock = worker.clock()
                clock["wait"] += client.wait_seconds
                team.tell(learned, worker.values() | seen, clock)
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
            self._running.append(asyncio.create_task(self._server.ticking(seconds)))
        return str(ray.util.get_node_ip_address()), listener.port  # type: ignore[no-untyped-call]

    async def give_up(self, rank: int) -> None:
        """A learner that is dead, or silent for too long."""
        await self.leave(rank)
        await self._server.leave(rank)
