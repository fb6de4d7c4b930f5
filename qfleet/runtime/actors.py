"""What runs in the processes of a cluster (see runtime.cluster): a learner, a parameter server.

| who              | waits for                                       | unblocked by                                           |
|------------------|-------------------------------------------------|--------------------------------------------------------|
| learner, a round | the hub (runtime.hub)                           | see there                                              |
| learner, a push  | as the policy says (qfleet.sync.server)         | others, or the supervisor, which removes the dead      |
| heartbeat        | its next turn                                   | time; it ends with the learner                         |
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from qfleet.config import BARRIER_MODES, Config, ConfigError
from qfleet.learner import Learned, Learner
from qfleet.runtime.checkpoint import Checkpoints
from qfleet.runtime.hub import Orders, Report, identity
from qfleet.runtime.team import Alone
from qfleet.runtime.worker import Worker, tensors
from qfleet.sync.client import Client
from qfleet.sync.policies import Commit, Key
from qfleet.sync.server import Server
from qfleet.sync.shard import Copy, Position
from qfleet.sync.traffic import Traffic
from qfleet.sync.wire import Address, Connection, Listener, Peer
from qfleet.types import Array, State


def added(a: Learned | None, b: Learned | None) -> Learned | None:
    """Both together; the mean value is the newer one's."""
    if a is None or b is None:
        return a or b
    return Learned(a.loss_sum + b.loss_sum, b.q_mean, a.updates + b.updates)


class Member(Alone):
    """The team as a learner on the cluster sees it. `late`: it takes the place of one that was lost, while others go on."""

    def __init__(
        self, config: Config, rank: int, incarnation: int, late: bool, hub: Address, token: str, here: int
    ) -> None:
        self.rank, self.size, self.here = rank, config.learners, here
        self._config, self._incarnation, self._late = config, incarnation, late
        # Three of them, since one is used by one thread: this one's, the learner's, the heartbeat's.
        self._hub, self._directory, self._pulse = (Connection(hub, token) for _ in range(3))
        self._token = token
        self.client: Client | None = None
        self._entered = False
        self._finished = threading.Event()
        self._learned: Learned | None = None
        self._values: dict[str, float] = {}
        self._clock: dict[str, float] = {}
        self._pending = False  # an answer of the hub is on its way
        self._together = config.sync.mode in BARRIER_MODES
        self._round, self._total = 0, 0
        self.stuck: Callable[[], bool] = lambda: False  # its environments do not answer
        self.save_as, self.saved_as = 0, 0  # steps of the checkpoint to take part in, and of the last one it did
        if not late:
            self.join()

    @property
    def traffic(self) -> Traffic:
        assert self.client is not None
        return self.client.traffic

    def join(self) -> None:
        """From now on the others wait for it, in modes in which they do; and it must give signs of life."""
        me = [self.rank, self._incarnation]
        self._round, _ = self._hub("join", [*me, identity(self._config)]).receive()
        seconds = self._config.sync.heartbeat / 4

        def beat() -> None:
            while not self._finished.wait(seconds):
                if not self.stuck():
                    self._pulse("beat", me).receive()

        threading.Thread(target=beat, name="heartbeat", daemon=True).start()

    def _find(self, epoch: int) -> tuple[int, Sequence[Address]]:
        (newest, addresses), _ = self._directory("where", [epoch]).receive()
        return newest, [(host, port) for host, port in addresses]

    def attach(self, learner: Learner) -> None:
        size = len(learner.flat.data)
        self.client = Client(self._config, self.rank, self._incarnation, size, self._find, self._token)
        if not self._late:
            self.enter(learner)
        else:  # to act with, until it enters
            learner.flat.data.copy_(self.client.newest())

    def enter(self, learner: Learner, own: int = 0) -> bool:
        """The first ones are there before anybody begins. A later one joins between two rounds of the others, at the hub, and
        takes part in updates from its first own: earlier, they would wait for it while it waits for them."""
        if not self._entered:
            if self._late and own * self.size < self._config.first_update:
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

    def meet(self, steps: int) -> int:
        self._hub("report", self._report(steps))
        # Where nobody waits for anybody, the answer to the report before is new enough.
        if self._together or self._pending:
            self._take_orders()
        self._pending = not self._together
        return max(self._total, steps)

    def _take_orders(self) -> None:
        self._pending = False
        answer, _ = self._hub.receive()
        orders = Orders(*answer)
        self._total, self.stopping, self.lr_scale, self.save_as = orders

    def counted(self, own: int, total: int) -> int:
        return total if self._together else own * self.size

    def last(self, steps: int) -> None:
        """It has come to its end, and nobody waits for it any more; returns when the final checkpoint is wanted."""
        if self._pending:
            self._take_orders()
        assert self.client is not None
        if self._entered:
            self.client.leave()
            self.client.joined = False
        self.save_as, _ = self._hub("last", self._report(steps)).receive()

    def wait(self) -> None:
        """For the rest of a checkpoint."""
        if self._pending:
            self._take_orders()
        assert self.client is not None
        # Where all are in the same round, none is waited for. Elsewhere some go on with theirs, and may wait for this one.
        free = self._together or not self.client.joined
        with contextlib.nullcontext() if free else self.client.aside():
            self._hub("saved", [self.rank, self.saved_as]).receive()

    def state(self) -> State:
        assert self.client is not None
        return self.client.state()

    def load_state(self, state: State) -> None:
        assert self.client is not None
        self.client.load_state(state)

    def close(self) -> None:
        self._finished.set()
        if self.client is not None:
            self.client.close()


class LearnerActor:
    """`resume`: the step of the checkpoint to go on from; 0: none."""

    def __init__(
        self, config: Config, rank: int, incarnation: int, late: bool, hub: Address, token: str, here: int, resume: int
    ) -> None:
        self._checkpoints = Checkpoints(part_of(config, rank), config.runtime.keep)
        if not Path(config.run_dir).is_dir():
            raise ConfigError(
                f"learner {rank} does not see the run directory {config.run_dir}: it must be on a file system that all machines share."
            )
        self._late, self._resume = late, resume
        self._team = Member(config, rank, incarnation, late, hub, token, here)
        self._worker = Worker(config, self._team)
        self._worker.build()
        self._team.stuck = self._stuck

    def _stuck(self) -> bool:
        """Then it gives no sign of life, and is replaced."""
        seconds, since = self._worker.config.runtime.watchdog, self._worker.waiting()
        return bool(seconds) and since is not None and time.perf_counter() - since > seconds

    def ready(self) -> None:
        """It can be called when everything is made."""

    def pid(self) -> int:
        return os.getpid()

    def version(self) -> int:
        """Of the parameters it has."""
        client = self._team.client
        return -1 if client is None else client.version

    def joined(self) -> bool:
        client = self._team.client
        return client is not None and client.joined

    def copy(self) -> Copy:
        """Of the parameters, while it goes on."""
        assert self._team.client is not None
        return self._team.client.copy()

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
            while not worker.over:
                learned = worker.round()
                self._tell(learned)
                if team.save_as > team.saved_as:
                    self._save()
            self._tell(worker.settle())
            team.last(worker.collector.steps)
            if team.save_as > team.saved_as:
                self._save()
        finally:
            team.close()
            worker.close()

    def _tell(self, learned: Learned | None) -> None:
        self._team.tell(learned, self._worker.values(), self._worker.clock())

    def _save(self) -> None:
        learned = self._worker.settle()
        if learned is not None:
            self._tell(learned)
        self._team.saved_as = self._team.save_as
        self._worker.save(self._checkpoints, {}, step=self._team.saved_as)


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

    def _forward(self, commits: Sequence[Commit], discarded: Sequence[Key]) -> None:
        for other in self._others:
            other("carry_out", [commits, discarded])

    async def listen(self, others: Sequence[Address]) -> Address:
        import ray

        self._others = [Peer(address, self._token) for address in others]
        self._listener = Listener(self._server.handlers(), self._token)
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

    async def catch_up(self, commits: Sequence[Commit]) -> None:
        self._server.catch_up(commits)

    async def restore(self, state: State, part: Copy, position: Position, members: Mapping[int, int]) -> None:
        """In the place of one that was lost: with its state of some time ago, if there is one, and a newer copy."""
        if state:
            self._server.load_state(tensors(state))
        self._server.restore(part, position, members)

    async def load(self, state: State) -> None:
        self._server.load_state(tensors(state))

    async def state(self) -> State:
        """A copy: commits go on while it travels."""
        return copy.deepcopy(self._server.state())

    async def pid(self) -> int:
        return os.getpid()

    async def serve(self) -> None:
        """For ever: who waits for it learns when the process ends."""
        await asyncio.Event().wait()
