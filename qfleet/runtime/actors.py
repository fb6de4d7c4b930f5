"""What runs in the processes of a cluster (see runtime.cluster): a learner, a parameter server.

| who              | waits for                                       | unblocked by                                           |
|------------------|-------------------------------------------------|--------------------------------------------------------|
| learner          | as its team does (runtime.member, runtime.ring) | see there                                              |
| server           | calls (qfleet.sync.server)                      | see there                                              |
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import os
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path

from qfleet.config import Config, ConfigError
from qfleet.learner import Learned
from qfleet.runtime.checkpoint import Checkpoints
from qfleet.runtime.failing import ERRORS, exited
from qfleet.runtime.lost import said
from qfleet.runtime.member import Member, Place
from qfleet.runtime.ring import Ring
from qfleet.runtime.worker import Worker, tensors
from qfleet.sync.policies import Commit, Key
from qfleet.sync.server import Server
from qfleet.sync.shard import Copy, Position
from qfleet.sync.wire import CONNECT, Address, Connection, Gone, Listener, Peer
from qfleet.types import Array, State


class LearnerActor:
    """`resume`: the step of the checkpoint to go on from; 0: none."""

    def __init__(self, config: Config, place: Place, resume: int) -> None:
        self._checkpoints = Checkpoints(part_of(config, place.rank), config.runtime.keep)
        if not Path(config.run_dir).is_dir():
            raise ConfigError(
                f"learner {place.rank} does not see the run directory {config.run_dir}: it must be on a file system that all machines share."
            )
        self._late, self._resume, self._whole = place.late, resume, False
        self._team = (Ring if config.sync.over == "allreduce" else Member)(config, place)
        self._worker = Worker(config, self._team)
        self._worker.build()
        self._team.stuck = self._stuck

    def _stuck(self) -> str:
        """Told with the next sign of life; then it is replaced."""
        seconds, since = self._worker.config.runtime.watchdog, self._worker.waiting()
        if not seconds or since is None or time.perf_counter() - since < seconds:
            return ""
        who = self._worker.awaited()
        return f"waited {seconds:g} s for {who}, in vain" if who else ""  # it has just answered

    def ready(self) -> None:
        """It can be called when everything is made."""

    def pid(self) -> int:
        return os.getpid()

    def version(self) -> int:
        """Of the parameters it has."""
        return self._team.version

    def joined(self) -> bool:
        """Does it take part in updates?"""
        return self._team.joined

    def copy(self) -> Copy:
        """Of the parameters, while it goes on."""
        return self._team.copy()

    def run(self) -> None:
        """Until it is told to stop."""
        worker, team = self._worker, self._team
        try:
            if self._late:
                team.join()
            if self._resume:
                worker.load(self._checkpoints, self._resume)
                team.saved_as = self._resume
            else:
                worker.start()
            self._whole = True
            while not worker.over:
                learned = worker.round()
                self._tell(learned)
                if team.save_as > team.saved_as:
                    self._save()
                elif team.complete >= team.saved_as:
                    self._checkpoints.prune()
            self._tell(worker.settle())
            team.last(worker.collector.steps)
            if team.save_as > team.saved_as:
                self._save()
        except ERRORS as e:
            error = exited(e) if isinstance(e, SystemExit) else e
            with contextlib.suppress(*ERRORS):  # nothing must hide what happened
                self._rescue(error)
            with contextlib.suppress(*ERRORS):
                self._close()
            raise error from error.__cause__
        self._close()

    def _rescue(self, error: Exception) -> None:
        """Environments failed, most likely: all come to their end and save their parts, this one without them. (Before it had a state
        of its own there is nothing to save, and a checkpoint that it could not load must stay.)"""
        if self._whole and not isinstance(error, Gone):
            ours = type(error).__module__.startswith("qfleet.")  # says what to do
            self._team.fail(said(error), "" if ours else "".join(traceback.format_exception(error)))
            self._team.last(self._worker.collector.steps)
            if self._team.save_as > self._team.saved_as:
                self._save(stuck=True)

    def _close(self) -> None:
        try:
            self._team.close()
        finally:
            self._worker.close()

    def _tell(self, learned: Learned | None) -> None:
        self._team.tell(learned, self._worker.values(), self._worker.clock())

    def _save(self, stuck: bool = False) -> None:
        learned = self._worker.settle()
        if learned is not None:
            self._tell(learned)
        self._team.saving = self._team.save_as
        if self._team.entered:
            self._worker.save(self._checkpoints, {}, stuck, step=self._team.saving)
        else:  # it has learned nothing yet: a resumed run begins with another one
            self._team.wait()
        self._team.saved_as = self._team.saving


def part_of(config: Config, rank: int) -> Path:
    """Where a learner keeps its part of the checkpoints."""
    return Path(config.run_dir) / "learners" / str(rank)


class ServerActor:
    """Shard `number`, which listens. The first one is told where the others do."""

    def __init__(self, config: Config, number: int, initial: Array, token: str) -> None:
        self._config, self.number, self._token, self._others = config, number, token, list[Peer]()
        self._server = Server(config, initial, self._forward)
        self._listener: Listener | None = None
        self._ticking: asyncio.Task[None] | None = None

    def _forward(self, commits: Sequence[Commit], discarded: Sequence[Key], cut: int) -> None:
        for other in self._others:
            other("carry_out", [commits, discarded, cut])

    async def listen(self, others: Sequence[Address]) -> Address:
        import ray

        for address in others:  # a peer that is never reached would be missed much later
            (await asyncio.to_thread(Connection, address, self._token, CONNECT)).close()
        listener = self._listener = Listener(self._server.handlers(), self._token)
        # Without one of the others it cannot go on: who is connected shall notice.
        self._others = [
            Peer(address, self._token, lambda: asyncio.ensure_future(listener.close())) for address in others
        ]
        if self._config.sync.mode == "window" and self._config.sync.window_ms:
            self._ticking = asyncio.create_task(self._server.ticking(self._config.sync.window_ms / 4e3))
        return str(ray.util.get_node_ip_address()), self._listener.port  # type: ignore[no-untyped-call]

    async def pause(self) -> tuple[Position, list[Commit]]:
        """Break all connections -> how far it is, and its newest commits."""
        for other in self._others:
            other.task.cancel()
        if self._ticking is not None:
            self._ticking.cancel()
        if self._listener is not None:
            await self._listener.close()
        return self._server.shard.position, list(self._server.shard.log)

    async def catch_up(self, commits: Sequence[Commit], lost: bool) -> int:
        return self._server.catch_up(commits, lost)

    async def restore(
        self, state: State, part: Copy, position: Position, workers: Mapping[int, tuple[int, bool]]
    ) -> int:
        """In the place of one that was lost: with its state of some time ago, if there is one, and a newer copy. -> the version of its parameters"""
        if state:
            self._server.load_state(tensors(state))
            if part.position.version < state["version"] <= position.version:
                part = self._server.shard.copy()
        self._server.restore(part, position, workers)
        return part.position.version

    async def load(self, state: State) -> None:
        self._server.load_state(tensors(state))

    async def state(self) -> State:
        """A copy: commits go on while it travels."""
        return copy.deepcopy(self._server.state())

    async def cut(self, number: int) -> State:
        return await self._server.cut(number)

    async def pid(self) -> int:
        return os.getpid()

    async def serve(self) -> None:
        """For ever: who waits for it learns when the process ends."""
        await asyncio.Event().wait()
