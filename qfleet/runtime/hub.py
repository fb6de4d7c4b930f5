"""Where the learners of a cluster meet: who is there, how far they are, what they should do, where the servers are.

It runs on a thread of the supervisor, so it lasts as long as the run; learners call it over the wire (qfleet.sync.wire).

| who              | waits for                                          | unblocked by                                       |
|------------------|----------------------------------------------------|----------------------------------------------------|
| `join`           | in modes with a barrier: a checkpoint that is      | the supervisor, when it is complete                |
|                  | being written                                      |                                                    |
| `report`         | in modes with a barrier: all live learners to      | their reports, or the supervisor, which removes    |
|                  | report the round; else nothing                     | those that are dead or silent                      |
| `saved`          | in modes with a barrier, and at the end: the       | the supervisor, when it is complete                |
|                  | others' and the supervisor's part of it            |                                                    |
| `where`          | servers that are newer than those that failed      | the supervisor, which repairs them                 |
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict
from typing import Any, NamedTuple, TypeVar

from qfleet import __version__
from qfleet.config import Config
from qfleet.learner import Learned
from qfleet.sync.wire import Address, Answer, Handler, Listener, Loop
from qfleet.types import Array, State

T = TypeVar("T")
READY, WAITING, BROKEN = "ready", "waiting", "broken"  # may be in a group; not yet; is in one that cannot go on


class Report(NamedTuple):
    """What a learner says after a round."""

    rank: int
    incarnation: int
    round: int
    steps: int
    learned: Learned | None  # since the last report
    values: dict[str, float]
    clock: dict[str, float]
    group: str = READY  # all-reduce: can it take part in updates?
    version: int = -1  # of the parameters it has
    why: str = ""  # all-reduce: the group cannot go on


class Orders(NamedTuple):
    """What it is told."""

    total: int  # steps of all learners
    stop: bool
    lr_scale: float
    save: int  # step of the newest checkpoint to take part in
    epoch: int = 0  # all-reduce: number of the group that makes the next updates
    members: Sequence[int] = ()  # and who is in it
    complete: int = 0  # step of the newest checkpoint of which all parts are saved


def identity(config: Config) -> list[str]:
    """Learners of one run have this in common."""
    return [__version__, hashlib.sha256(json.dumps(asdict(config)).encode()).hexdigest()[:12]]


class Hub:
    """Its coroutines run in one event loop, in which nothing else can happen between two `await`s."""

    def __init__(self, config: Config) -> None:
        self._together = config.sync.together
        self._identity = identity(config)
        self.live: dict[int, int] = {}  # rank -> incarnation
        self._beats: dict[int, float] = {}  # when it gave its last sign of life
        self._stuck: dict[int, str] = {}  # what it has been waiting for too long, outside of the team
        self._newest: dict[int, Report] = {}
        self._gone = 0  # steps of incarnations that ended
        self._wanted = self._orders = Orders(0, False, 1.0, 0)  # from the next meeting on, and until then
        self._told: list[Report] = []
        self._changed, self._news = asyncio.Event(), asyncio.Event()
        self._met = -1  # the last round that all have reported
        self._saved: dict[int, tuple[int, int]] = {}  # the checkpoint each learner has saved, and its own steps there
        self._complete = 0  # checkpoint that is saved by all
        self.ended: set[int] = set()  # live learners that have come to their end
        self.failed: tuple[int, str, str] | None = None  # the first that did by an error; what it says, its traceback
        self._final = False  # the final checkpoint is wanted
        self._epoch, self._addresses = 0, list[Address]()
        self._grouped: list[tuple[int, int]] = []  # members of the newest group, and their incarnations
        self.breaks = 0  # of a group of the same members, in a row, without an update
        self.why = ""  # the last one did
        self._updates = -1  # made when it did
        self._complaints = 0  # learners that wait for other servers
        self._troubles: list[str] = []  # of those that could not reach any, for people

    # --- learners --------------------------------------------------------------------------------------------------

    def handlers(self) -> dict[str, Handler]:
        """What can be called over the wire."""

        async def join(args: list[Any], arrays: list[Array]) -> Answer:
            return await self.join(*args), ()

        async def beat(args: list[Any], arrays: list[Array]) -> Answer:
            rank, incarnation, stuck = args
            if self.live.get(rank) == incarnation:
                self._beats[rank], self._stuck[rank] = time.monotonic(), stuck
            return None, ()

        async def report(args: list[Any], arrays: list[Array]) -> Answer:
            return await self.report(_report(args)), ()

        async def last(args: list[Any], arrays: list[Array]) -> Answer:
            return await self.last(_report(args)), ()

        async def fail(args: list[Any], arrays: list[Array]) -> Answer:
            rank, incarnation, what, trace = args
            if self.live.get(rank) == incarnation and self.failed is None:
                self.failed = rank, what, trace
            return None, ()

        async def saved(args: list[Any], arrays: list[Array]) -> Answer:
            return await self.saved(*args), ()

        async def where(args: list[Any], arrays: list[Array]) -> Answer:
            return await self.where(*args), ()

        return {f.__name__: f for f in (join, beat, report, last, fail, saved, where)}

    async def join(self, rank: int, incarnation: int, identity: list[str]) -> tuple[int, int]:
        """-> the round to begin with, and the checkpoint that it comes too late for. Where all wait while that one is written, nobody may make updates alone meanwhile."""
        for mine, its, what in zip(self._identity, identity, ("qfleet", "config"), strict=True):
            if mine != its:
                hint = "Install the same version everywhere." if what == "qfleet" else "Start it with this run's."
                raise ValueError(f"learner {rank} has {what} {its}, this run {mine}: it cannot join. {hint}")
        while self._together and self._wanted.save > self._complete:
            await self._changed.wait()
        if rank in self.live:
            self.leave(rank)
        self.live[rank], self._beats[rank], self._stuck[rank] = incarnation, time.monotonic(), ""
        self._saved.pop(rank, None)
        return self._met + 1, self._wanted.save

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

    async def last(self, report: Report) -> int:
        """What a learner says at its end -> the final checkpoint, when it is wanted; 0 where none is."""
        if self.live.get(report.rank) != report.incarnation:
            return 0
        self._told.append(report)
        self._news.set()
        self._newest[report.rank] = report
        self.ended.add(report.rank)
        self._meet()
        while not self._final:
            await self._changed.wait()
        return self._orders.save

    async def saved(self, rank: int, step: int) -> bool:
        """Its part of a checkpoint is on disk; -> is all of it? It is waited for where all wait for each other anyway."""
        self._saved[rank] = step, self._steps_of(rank)
        self._news.set()
        while (self._together or self._final) and self._complete < step:
            await self._changed.wait()
        return self._complete >= step

    def _steps_of(self, rank: int) -> int:
        return self._newest[rank].steps if rank in self._newest else 0

    async def where(self, rank: int, epoch: int, why: str) -> tuple[int, list[Address]]:
        """Servers that are newer than those of that epoch, which failed."""
        self._complaints += 1
        if why:
            self._troubles.append(f"learner {rank} cannot go on: {why}. All connect anew")
        self._news.set()
        try:
            while self._epoch <= epoch:
                await self._changed.wait()
        finally:
            self._complaints -= 1
        return self._epoch, self._addresses

    def _meet(self) -> None:
        """Totals and orders change when all have come as far, or with every report."""
        going = [r for r in self.live if r not in self.ended]
        least = min((self._newest[r].round if r in self._newest else -1 for r in going), default=self._met)
        if self._together and least <= self._met and going:
            return
        self._met = max(self._met, least)
        total = self._gone + sum(report.steps for report in self._newest.values())
        epoch, members = self._group()
        self._orders = self._wanted._replace(total=total, epoch=epoch, members=members)
        self._wake()

    def _group(self) -> tuple[int, list[int]]:
        """Another one when somebody left or can take part now, or when the one there is cannot go on."""
        ready = sorted(
            (r, incarnation)
            for r, incarnation in self.live.items()
            if r not in self.ended and r in self._newest and self._newest[r].group != WAITING
        )
        reports = [self._newest[r] for r, _ in ready]
        broken = any(report.group == BROKEN for report in reports)
        self._count(reports, broken and ready == self._grouped)
        changed = broken or ready != self._grouped
        self._grouped = ready
        return self._orders.epoch + changed, [r for r, _ in ready]

    def _count(self, reports: Sequence[Report], broke: bool) -> None:
        """A group that broke with all its members there."""
        updates = max((report.version for report in reports), default=-1)
        self.breaks = 0 if not broke else 1 if updates > self._updates else self.breaks + 1
        self._updates = updates
        for report in reports:
            if broke and report.why:
                self.why = f"learner {report.rank}: {report.why}"

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    # --- the supervisor --------------------------------------------------------------------------------------------

    def leave(self, rank: int) -> None:
        """Nobody waits for it any more."""
        self.live.pop(rank, None)
        self.ended.discard(rank)
        if (last := self._newest.pop(rank, None)) is not None:
            self._gone += last.steps
        self._meet()

    def ailing(self, seconds: float) -> dict[int, str]:
        """Those that are stuck, or gave no sign of life for so long: what happened to them."""
        silent = {rank for rank in self.live if time.monotonic() - self._beats[rank] > seconds}
        stuck = {rank: self._stuck[rank] for rank in self.live if self._stuck[rank]}
        return dict.fromkeys(silent, f"gave no sign of life for {seconds:g} s") | stuck

    async def news(self, seconds: float) -> tuple[int, list[Report]]:
        """Steps of all, and reports since the last call; waits for something new, but not longer than that."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._news.wait(), seconds)
        told, self._told = self._told, []
        self._news.clear()
        return self._orders.total, told

    def order(self, **wanted: Any) -> None:
        self._wanted = self._wanted._replace(**wanted)
        if not self._together:
            self._orders = self._orders._replace(**wanted)

    def save(self, step: int, final: bool) -> dict[int, int]:
        """All learners shall save their part of a checkpoint: soon, or at their end -> these learners."""
        self.order(save=step)
        if final:
            self._final, self._orders = True, self._orders._replace(save=step)
            self._wake()
        return dict(self.live)

    def parts(self, step: int, of: Mapping[int, int]) -> tuple[list[int], list[int]]:
        """Of those that are still there: who has saved its part of that checkpoint, and who has not."""
        there = [rank for rank, incarnation in of.items() if self.live.get(rank) == incarnation]
        there_is = {rank for rank, (newest, _) in self._saved.items() if newest >= step}
        return [r for r in there if r in there_is], [r for r in there if r not in there_is]

    def complete(self, step: int) -> None:
        self._complete = step
        self.order(complete=step)
        self._wake()

    def complained(self) -> tuple[int, list[str]]:
        """How many learners wait for other servers, and what was said since the last time by those that could not reach any."""
        said, self._troubles = self._troubles, []
        return self._complaints, said

    def moved(self, addresses: Sequence[Address]) -> int:
        """The servers are here now -> their epoch."""
        self._epoch, self._addresses = self._epoch + 1, list(addresses)
        self._wake()
        return self._epoch

    def state(self, parts: Collection[int]) -> State:
        """With the steps that learners had made when they saved their `parts`."""
        steps = {str(r): self._saved[r][1] if r in parts else self._steps_of(r) for r in self._newest}
        return {"gone": self._gone, "steps": steps, "total": self._gone + sum(steps.values()), "lr_scale": self._orders.lr_scale}  # fmt: skip

    def load_state(self, state: State, present: Collection[int]) -> None:
        """`present`: learners that go on where they were; what the others did is done."""
        for rank, steps in ((int(rank), steps) for rank, steps in state["steps"].items()):
            if rank in present:
                self._newest[rank] = Report(rank, 0, -1, steps, None, {}, {})
            else:
                self._gone += steps
        self._gone += state["gone"]
        self._wanted = self._orders = Orders(state["total"], False, state["lr_scale"], 0)


def _report(args: list[Any]) -> Report:
    report = Report(*args)
    return report if report.learned is None else report._replace(learned=Learned(*report.learned))


class Meeting:
    """A hub on a thread of this process."""

    def __init__(self, config: Config, token: str) -> None:
        self._loop = Loop()

        async def make() -> tuple[Hub, Listener]:
            hub = Hub(config)
            return hub, Listener(hub.handlers(), token)

        self.hub, self._listener = self._loop.run(make())
        self.port = self._listener.port

    def news(self, seconds: float) -> tuple[int, list[Report]]:
        return self._loop.run(self.hub.news(seconds))

    def at_hub(self, what: Callable[[Hub], T]) -> T:
        """Do something between its coroutines."""

        async def inside() -> T:
            return what(self.hub)

        return self._loop.run(inside())

    def close(self) -> None:
        self._loop.run(self._listener.close())
        self._loop.close()
