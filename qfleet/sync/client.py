"""A learner's side of the parameter server: push, go on when the policy lets it, with the newest version of all shards.

Servers may go and come back elsewhere: a call that fails is made again where they are then. A push keeps its number, so it
is not applied twice.

| who                 | waits for                        | unblocked by                                         |
|---------------------|----------------------------------|------------------------------------------------------|
| a call              | its answer (qfleet.sync.server)  | the server, or its end                               |
| after one that fails| servers of a newer epoch         | `find`: whoever looks after the servers              |
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from qfleet.config import BARRIER_MODES, GRADIENT_MODES, Config
from qfleet.learner import Learner, clip
from qfleet.sync import codecs
from qfleet.sync.balance import Work
from qfleet.sync.local import Local
from qfleet.sync.policies import UNKNOWN, Push
from qfleet.sync.server import Reply
from qfleet.sync.shard import Copy, Position, ranges
from qfleet.sync.traffic import Traffic
from qfleet.sync.wire import Address, Connection, Gone, Unreachable
from qfleet.types import Array, State

T = TypeVar("T")
Find = Callable[[int, str], tuple[int, Sequence[Address]]]
EPOCHS = 5  # of servers that cannot be reached, in a row: it is no accident


class Client:
    """Worker `worker`. `find(epoch, why)`: where the servers are, once that is newer than epoch; the first one has the policy. `why` those
    of that epoch could not be reached, for people.

    `patience`: seconds after which a server that does not answer counts as gone; None: somebody else finds out.
    """

    def __init__(
        self,
        config: Config,
        worker: int,
        incarnation: int,
        size: int,
        find: Find,
        token: str,
        patience: float | None = None,
    ) -> None:
        self._config, self._worker, self.incarnation = config, worker, incarnation
        self._find, self._token, self._patience, self._epoch = find, token, patience, -1
        self._servers: list[Connection] = []
        self._unreachable: Unreachable | None = None  # it gave up, and is of no use any more
        self._ranges = ranges(size, config.sync.servers)
        self._codecs = [
            codecs.make(
                config.sync, r.stop - r.start, config.seed + incarnation, worker, part, codecs.momentum_of(config)
            )
            for part, r in enumerate(self._ranges)
        ]
        self._params, self._target = torch.zeros(size), torch.zeros(size)
        self._position = Position(-1, -1, 0.0, {})
        self._whole = threading.Lock()  # the three above belong together
        self._given = self._position  # of what the learner itself has: more may have arrived here
        self._local: Local | None = None
        self._sequence = 0
        self._pushed = 0  # bytes of the last push
        self._work, self._batch = Work(), 0
        sync = config.sync
        # In modes with a barrier: updates behind a version. In others 0.
        self._per_version = (
            (1 if sync.mode in GRADIENT_MODES else sync.local_steps) if sync.mode in BARRIER_MODES else 0
        )
        self.joined = False
        self.traffic = Traffic()
        self._connect()

    @property
    def version(self) -> int:
        return self._position.version

    # --- the learner's -----------------------------------------------------------------------------------------------

    def attach(self, learner: Learner) -> None:
        """The learner joins: it takes the servers' parameters, and agrees with them from now on."""
        self._batch = self._join().batch
        sync, c = self._config.sync, self._config.learner
        learner.flat.data.copy_(self._params)
        # Where learners train alone, the target network is a copy of the centre.
        learner.target.data.copy_(self._target if sync.mode in GRADIENT_MODES else self._params)
        self._given = self._position
        learner.updates = self._counted(learner.updates)  # as many as those who were here before
        if sync.mode not in GRADIENT_MODES:
            self._local = Local(sync, c.target_interval, self._config.learners, learner.flat.data, self)
        learner.batch_size = self._batch or learner.batch_size
        learner.sync = lambda grad, samples: self._agree(learner, grad, samples)

    def _agree(self, learner: Learner, grad: Tensor, samples: int) -> None:
        with self._work.done(samples, learner.began):
            if self._local is None:
                self._gradient(learner, grad, samples)
            else:
                self._local.step(learner, grad, samples)
        if (counted := self._counted(learner.updates)) != learner.updates:
            learner.updates = counted
            if self._local is not None:  # it may have missed the turn of its target network, too
                learner.target.data.copy_(self._params)
        learner.batch_size = self._batch or learner.batch_size

    def _counted(self, updates: int) -> int:
        """Where learners wait for each other, versions are what they count: one that others made without this learner (it was late, or
        forgotten) is not owed by it, and it would wait for ever for those who do not owe it either."""
        each = self._per_version
        return self.version * each + updates % each if each else updates

    def _gradient(self, learner: Learner, grad: Tensor, samples: int) -> None:
        if most := self._config.learner.grad_clip:  # only here the whole gradient is known
            clip(grad, most)
        self._push(grad.cpu(), samples, learner.lr, self._given.version)
        learner.flat.data.copy_(self._params)
        learner.updates += 1
        newest = self._position.target_version
        if newest != self._given.target_version or newest < 0:
            learner.target.data.copy_(self._target)
        self._given = self._position

    def exchange(self, move: Tensor, weight: float) -> Tensor:
        """As a centre (sync.local)."""
        self._push(move, weight, 1.0, self.version)
        return self._params.clone()

    # --- everybody's ---------------------------------------------------------------------------------------------------

    def newest(self) -> Tensor:
        self._try(lambda: self._take(self._ask("newest", [self._position.target_version])))
        return self._params

    def flush(self, cut: int = 0) -> None:
        """What waits for a window becomes a version, and all shards have the newest one. `cut`: for a checkpoint, they also keep their state there."""
        self._try(lambda: self._servers[0]("flush", [cut]).receive())
        self.newest()

    def leave(self, worker: int | None = None, successor: int = 0) -> None:
        """Nobody waits for this worker, or another one, any more. Incarnations before its successor cannot join again."""
        who = self._worker if worker is None else worker
        self._try(lambda: self._servers[0]("leave", [who, successor]).receive())

    def _join(self) -> Reply:
        reply = self._try(lambda: self._take(self._ask("join", [self._worker, self.incarnation])))
        self.joined = True
        return reply

    def copy(self) -> Copy:
        """The newest version that arrived here; from any thread."""
        with self._whole:
            return Copy(self._position, self._params.numpy().copy(), self._target.numpy().copy())

    def close(self) -> None:
        for server in self._servers:
            server.close()
        self._servers = []

    def state(self) -> State:
        """Of a client that waits for nothing."""
        local = {} if self._local is None else self._local.state()
        codecs = [codec.state() for codec in self._codecs]
        return {"sequence": self._sequence, "codecs": codecs, "local": local, "given": list(self._given[:2])}

    def load_state(self, state: State) -> None:
        """After that of the learner, which has the parameters and the target of then: others, and itself, may have gone on before the servers were saved."""
        incarnation, newest = self._position.applied.get(self._worker, (-1, -1))
        went_on = incarnation == self.incarnation and newest >= state["sequence"]
        self._sequence = newest + 1 if went_on else state["sequence"]
        version, target_version = state.get("given", (self.version, -1))
        self._given = self._position._replace(version=version, target_version=target_version)
        for codec, saved in zip(self._codecs, state["codecs"], strict=True):
            codec.load_state(saved)
            if went_on:  # its pushes since then carried the largest of what was kept: they would be sent again
                codec.forget()
        if self._local is not None:
            self._local.load_state(state["local"])

    # --- calls -------------------------------------------------------------------------------------------------------

    def _connect(self) -> None:
        """Servers that are not there have moved, or soon will. Where only this worker cannot reach them, they would do so for ever, and with every move all
        others wait: it gives up."""
        failures, why = list[float](), ""
        while True:
            self.close()
            self._epoch, addresses = self._find(self._epoch, why)
            try:
                for address in addresses:
                    self._servers.append(Connection(address, self._token, self._patience))
                return
            except Gone as e:
                failures.append(time.monotonic())
                why = str(e) if len(failures) == 2 else ""  # said once; and once may happen while they move
                if len(failures) >= EPOCHS and failures[-1] - failures[0] > self._config.sync.heartbeat:
                    self.close()
                    self.joined = False
                    self._unreachable = Unreachable(
                        f"{e}, {len(failures)} times in a row. Servers and learners need open TCP ports between their machines: check firewalls, and the address under which Ray knows that machine."
                    )
                    raise self._unreachable from None

    def _try(self, call: Callable[[], T]) -> T:
        while True:
            if self._unreachable is not None:
                raise self._unreachable
            try:
                return call()
            except Gone:
                self._connect()

    def _ask(self, method: str, args: Sequence[Any], arrays: Sequence[Array] = ()) -> Reply:
        return Reply.unpacked(self._servers[0](method, args, arrays).receive())

    def _push(self, vector: Tensor, samples: float, lr: float, base: int) -> None:
        """`base`: version of the parameters it was computed with."""
        messages = [codec.encode(vector[r]) for codec, r in zip(self._codecs, self._ranges, strict=True)]
        began = time.perf_counter()
        worked = self._work.tell()
        offer = partial(self._offer, messages, samples, lr, base, worked)
        reply = offer()
        if reply.why_not == UNKNOWN and self.joined:  # by a server that was restored, and had not heard of this worker
            reply = reply._replace(batch=self._join().batch)
            if self.version == base:  # others have not gone on without it
                reply = offer()
        if reply.why_not:
            for codec in self._codecs:
                codec.take_back()
        self._batch = reply.batch
        self.traffic.pushed(worked[0], self._pushed, vector.nbytes, reply.staleness, bool(reply.why_not))
        self.traffic.seconds += time.perf_counter() - began

    def _offer(
        self, messages: Sequence[Array], samples: float, lr: float, base: int, worked: tuple[int, float]
    ) -> Reply:
        push = Push(self._worker, self.incarnation, self._sequence, base, samples, lr)
        self._sequence += 1
        return self._try(lambda: self._exchange(push, messages, worked))

    def _exchange(self, push: Push, messages: Sequence[Array], worked: tuple[int, float]) -> Reply:
        before = sum(server.sent for server in self._servers)
        for call in [s("stage", [push.key], [m]) for s, m in zip(self._servers[1:], messages[1:], strict=True)]:
            call.receive()
        first = self._ask("exchange", [push, self._position.target_version, *worked], messages[:1])
        self._pushed = sum(server.sent for server in self._servers) - before
        return self._take(first)

    def _take(self, first: Reply) -> Reply:
        """The version that shard 0 named, from all of them -> what it said."""
        said = first
        while True:
            known = self._position.target_version
            calls = [server("fetch", [first.position.version, known]) for server in self._servers[1:]]
            answers = [call.receive() for call in calls]
            if all(fields is not None for fields, _ in answers):
                break
            first = self._ask("newest", [known])  # that version was gone already
        replies = [first, *map(Reply.unpacked, answers)]
        with self._whole:
            for r, reply in zip(self._ranges, replies, strict=True):
                self._params[r] = torch.from_numpy(reply.params)
                if reply.target is not None:
                    self._target[r] = torch.from_numpy(reply.target)
            # Where a shard froze another target meanwhile, all are asked for again.
            same = len({reply.position.target_version for reply in replies}) == 1
            self._position = first.position if same else first.position._replace(target_version=-1)
        return said
