"""A parameter server: the shard of one process, and on the first one the policy that orders the pushes of all.

    worker ──part i──▶ stage, on every other shard ─┐ acknowledged
    worker ──push, part 0──▶ exchange, on shard 0 ◀─┘
                                │ policy: commits ──carry_out──▶ the other shards
                                ▼
                       the newest version, when the worker may go on ──▶ worker ──fetch(version)──▶ the other shards

| who         | waits for                                               | unblocked by                                   |
|-------------|---------------------------------------------------------|------------------------------------------------|
| `exchange`  | the policy to let the worker go on                      | pushes of others, `leave`, `tick`              |
| `fetch`     | the version                                             | `carry_out`                                    |
| `cut`       | the word of shard 0, between two commits                | `carry_out`                                    |

A push reaches every shard before shard 0 decides on it, so that it is applied as a whole; a version is the same on all of
them. When a shard is lost, what it had not applied is lost with it: shard 0 drops the pushes that no version has yet, and workers
that wait for one push it again, to every shard. Everything here runs in one event loop; nothing blocks it.
"""

from __future__ import annotations

import asyncio
import copy
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from qfleet.config import Config
from qfleet.sync import codecs, policies
from qfleet.sync.balance import Balance
from qfleet.sync.policies import Commit, Key, Push
from qfleet.sync.shard import Copy, Position, Shard
from qfleet.sync.wire import Answer, Handler
from qfleet.types import Array, State

KEPT = 8  # versions that can be fetched


def as_key(values: Sequence[int]) -> Key:
    worker, incarnation, sequence = values
    return worker, incarnation, sequence


class Reply(NamedTuple):
    """What a worker goes on with. Arrays are this shard's part."""

    position: Position
    why_not: str  # its push was rejected
    staleness: int
    batch: int  # samples it should have behind its next push; 0: as many as it likes
    params: Array
    target: Array | None  # None where the worker has it

    def packed(self) -> Answer:
        version, target_version, progress, applied = self.position
        fields = [version, target_version, progress, [[w, *newest] for w, newest in applied.items()]]
        return [fields, *self[1:4]], [a.view(np.uint8) for a in (self.params, self.target) if a is not None]

    @classmethod
    def unpacked(cls, answer: Answer) -> Reply:
        (fields, why_not, staleness, batch), arrays = answer
        params, target = ([a.view(np.float32) for a in arrays] + [None])[:2]
        assert params is not None
        version, target_version, progress, applied = fields
        table = {w: (incarnation, sequence) for w, incarnation, sequence in applied}
        return cls(Position(version, target_version, progress, table), why_not, staleness, batch, params, target)


class Server:
    """A shard of the parameters. `forward(commits, discarded, cut)`: on shard 0, tells the others, in order."""

    def __init__(
        self,
        config: Config,
        initial: Array,
        forward: Callable[[Sequence[Commit], Sequence[Key], int], None] = lambda commits, discarded, cut: None,
    ) -> None:
        sync, c = config.sync, config.learner
        self._forward = forward
        self.shard = Shard(config, torch.from_numpy(initial.copy()))
        self.policy = policies.make(sync, c.batch_size, c.target_interval, config.learners)
        balanced = sync.balance or sync.weights
        self._balance = Balance(c.batch_size, sync.weights) if balanced else None
        self._codec = codecs.make(sync, len(initial), 0, 0)  # to decode: no state
        self._published: OrderedDict[int, Array] = OrderedDict()
        self._target: tuple[int, Array | None] = (-1, None)
        self._cut: tuple[int, State] = (0, {})  # the newest one's number, and the state there
        self._changed = asyncio.Event()

    def handlers(self) -> dict[str, Handler]:
        """What can be called over the wire."""

        async def stage(args: list[Any], arrays: list[Array]) -> Answer:
            await self.stage(as_key(args[0]), arrays[0])
            return None, ()

        async def carry_out(args: list[Any], arrays: list[Array]) -> Answer:
            commits = [Commit(c[0], tuple((as_key(k), w) for k, w in c[1]), *c[2:]) for c in args[0]]
            await self.carry_out(commits, [as_key(k) for k in args[1]], args[2])
            return None, ()

        async def fetch(args: list[Any], arrays: list[Array]) -> Answer:
            reply = await self.fetch(*args)
            return (None, ()) if reply is None else reply.packed()

        async def join(args: list[Any], arrays: list[Array]) -> Answer:
            return (await self.join(*args)).packed()

        async def leave(args: list[Any], arrays: list[Array]) -> Answer:
            await self.leave(*args)
            return None, ()

        async def flush(args: list[Any], arrays: list[Array]) -> Answer:
            await self._act(self.policy.flush(), [], *args)
            return None, ()

        async def exchange(args: list[Any], arrays: list[Array]) -> Answer:
            return (await self.exchange(Push(*args[0]), arrays[0], *args[1:])).packed()

        async def newest(args: list[Any], arrays: list[Array]) -> Answer:
            return (await self.newest(*args)).packed()

        return {f.__name__: f for f in (stage, carry_out, fetch, join, leave, flush, exchange, newest)}

    # --- every shard --------------------------------------------------------------------------------------------------

    async def stage(self, key: Key, message: Array) -> None:
        self.shard.stage(key, self._codec.decode(message))

    async def carry_out(self, commits: Sequence[Commit], discarded: Sequence[Key], cut: int = 0) -> None:
        for key in discarded:
            self.shard.discard(key)
        for commit in commits:
            self.shard.commit(commit)
            self._keep()
        if cut:
            self._cut = cut, copy.deepcopy(self.state())
        self._wake()

    async def cut(self, number: int) -> State:
        """The state at that cut: every shard's is of the same version, though pushes go on."""
        while self._cut[0] < number:
            await self._change()
        return self._cut[1]

    async def fetch(self, version: int, target_version: int) -> Reply | None:
        """That version; None if it is too old. With the target if the worker has another than `target_version`."""
        while self.shard.version < version:
            await self._change()
        if version != self.shard.version and version not in self._published:
            return None
        return self._reply(version, target_version)

    # --- shard 0 ------------------------------------------------------------------------------------------------------

    async def join(self, worker: int, incarnation: int) -> Reply:
        self.policy.join(worker, incarnation)
        return self._reply(self.shard.version, -1)._replace(batch=self._batch_of(worker))

    async def leave(self, worker: int, successor: int = 0) -> None:
        await self._act(self.policy.leave(worker, successor), [])

    async def exchange(
        self, push: Push, message: Array, target_version: int, samples: float = 0.0, seconds: float = 0.0
    ) -> Reply:
        """Offer a push, for which so many samples were looked at in so many seconds; return when the worker may go on."""
        await self.stage(push.key, message)
        outcome = self.policy.offer(push, time.monotonic())
        if self._balance is not None and not outcome.seen_before:
            self._balance.saw(push.worker, samples, seconds)
        await self._act(outcome.commits, [push.key] if outcome.why_not else [])
        while not self.policy.ready(push.worker):
            await self._change()
        reply = self._reply(self.shard.version, target_version)
        return reply._replace(why_not=outcome.why_not, staleness=outcome.staleness, batch=self._batch_of(push.worker))

    def _batch_of(self, worker: int) -> int:
        return 0 if self._balance is None else self._balance.share(worker, self.policy.clocks)

    async def newest(self, target_version: int) -> Reply:
        return self._reply(self.shard.version, target_version)

    async def ticking(self, seconds: float) -> None:
        """Look every so many seconds for windows whose time is over, for ever."""
        while True:
            await asyncio.sleep(seconds)
            await self._act(self.policy.tick(time.monotonic()), [])

    async def _act(self, commits: Sequence[Commit], discarded: Sequence[Key], cut: int = 0) -> None:
        if commits or discarded or cut:
            self._forward(commits, discarded, cut)
            await self.carry_out(commits, discarded, cut)
        else:
            self._wake()

    # --- repair -------------------------------------------------------------------------------------------------------

    def catch_up(self, commits: Sequence[Commit], lost: bool) -> int:
        """Those that another shard heard of and this one did not. Nobody is connected. `lost`: a shard begins anew, without the parts of pushes
        that wait; so all are dropped. -> how many were accepted already."""
        for commit in commits:
            if commit.version > self.shard.version:
                self.shard.commit(commit)
        self._forget()
        if not lost:
            return 0
        self.shard.drop()
        return self.policy.drop()

    def restore(self, copy: Copy, position: Position, workers: Mapping[int, tuple[int, bool]]) -> None:
        """Begin with a copy, as if it were of that position. `workers`: their incarnations, and do they take part?"""
        self.shard.move(copy, position)
        self.policy.restore(position.version, position.progress, position.applied)
        for worker, (incarnation, takes_part) in workers.items():
            self.policy.leave(worker, incarnation)
            if takes_part:
                self.policy.join(worker, incarnation)
        self._forget()

    def state(self) -> State:
        return self.shard.state() | {"balance": [] if self._balance is None else self._balance.state()}

    def load_state(self, state: State) -> None:
        """Of the same shard, earlier."""
        self.shard.load_state(state)
        if self._balance is not None:
            self._balance.load_state(state["balance"])
        version, _, progress, applied = self.shard.position
        self.policy.restore(version, progress, applied)
        self._forget()

    def _forget(self) -> None:
        """What was published: versions are counted from somewhere else now."""
        self._published.clear()
        self._target = (-1, None)
        self._wake()

    # --- versions -----------------------------------------------------------------------------------------------------

    def _keep(self) -> None:
        """Versions that somebody read stay readable for a while; those that nobody read need not be published."""
        while len(self._published) > KEPT:
            self._published.popitem(last=False)

    def _reply(self, version: int, target_version: int) -> Reply:
        if version not in self._published:
            assert version == self.shard.version
            self._published[version] = self.shard.params.numpy().copy()
        newest = self.shard.target_version
        target = None
        if newest != target_version:
            if self._target[0] != newest:
                self._target = (newest, self.shard.target.numpy().copy())
            target = self._target[1]
        return Reply(self.shard.position._replace(version=version), "", 0, 0, self._published[version], target)

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _change(self) -> None:
        await self._changed.wait()
