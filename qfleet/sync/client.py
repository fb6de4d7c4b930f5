"""A learner's side of the parameter server: push, go on when the policy lets it, with the newest version of all shards."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from qfleet.config import BARRIER_MODES, GRADIENT_MODES, Config
from qfleet.learner import Learner, clip
from qfleet.sync import codecs
from qfleet.sync.local import Local
from qfleet.sync.policies import Push
from qfleet.sync.server import Reply
from qfleet.sync.shard import ranges
from qfleet.sync.wire import Connection
from qfleet.types import Array


class Client:
    """Worker `worker` of `servers`, whose first one has the policy."""

    def __init__(self, config: Config, worker: int, incarnation: int, size: int, servers: Sequence[Connection]) -> None:
        self._config, self._worker, self._incarnation = config, worker, incarnation
        self._servers = servers
        self._ranges = ranges(size, len(servers))
        seed = config.seed + incarnation
        self._codecs = [
            codecs.make(config.sync, r.stop - r.start, seed, worker, part) for part, r in enumerate(self._ranges)
        ]
        self._params, self._target = torch.zeros(size), torch.zeros(size)
        self._sequence = 0
        self.version = self._target_version = -1
        self.bytes_sent, self.wait_seconds, self.rejected = 0, 0.0, 0
        self.staleness = 0  # of the last push

    def attach(self, learner: Learner) -> None:
        """The learner joins: it takes the servers' parameters, and agrees with them from now on."""
        self._take(self._ask("join", [self._worker, self._incarnation]))
        learner.flat.data.copy_(self._params)
        learner.target.data.copy_(self._target)
        sync, c = self._config.sync, self._config.learner
        if sync.mode in BARRIER_MODES:  # as many updates as those who were here before
            learner.updates = self.version * (1 if sync.mode in GRADIENT_MODES else sync.local_steps)
        if sync.mode in GRADIENT_MODES:
            learner.sync = lambda grad, samples: self._gradient(learner, grad, samples)
        else:
            local = Local(sync, c.target_interval, self._config.learners, self._params, self)
            learner.sync = lambda grad, samples: local.step(learner, grad, samples)

    def _gradient(self, learner: Learner, grad: Tensor, samples: int) -> None:
        before = self._target_version
        if most := self._config.learner.grad_clip:  # only here the whole gradient is known
            clip(grad, most)
        self._push(grad, samples, learner.lr)
        learner.flat.data.copy_(self._params)
        learner.updates += 1
        if self._target_version != before:
            learner.target.data.copy_(self._target)

    def exchange(self, move: Tensor, weight: float) -> Tensor:
        """As a centre (sync.local)."""
        self._push(move, weight, 1.0)
        return self._params.clone()

    def newest(self) -> Tensor:
        self._take(self._ask("newest", [self._target_version]))
        return self._params

    def leave(self) -> None:
        """Nobody waits for this worker any more."""
        self._servers[0]("leave", [self._worker]).receive()

    def close(self) -> None:
        for server in self._servers:
            server.close()

    def _ask(self, method: str, args: Sequence[Any], arrays: Sequence[Array] = ()) -> Reply:
        return Reply.unpacked(self._servers[0](method, args, arrays).receive())

    def _push(self, vector: Tensor, samples: float, lr: float) -> None:
        push = Push(self._worker, self._incarnation, self._sequence, self.version, samples, lr)
        self._sequence += 1
        messages = [codec.encode(vector[r]) for codec, r in zip(self._codecs, self._ranges, strict=True)]
        self.bytes_sent += sum(message.nbytes for message in messages)
        began = time.perf_counter()
        for call in [s("stage", [push.key], [m]) for s, m in zip(self._servers[1:], messages[1:], strict=True)]:
            call.receive()
        reply = self._ask("exchange", [push, self._target_version], messages[:1])
        self.staleness, self.rejected = reply.staleness, self.rejected + bool(reply.why_not)
        self._take(reply)
        self.wait_seconds += time.perf_counter() - began

    def _take(self, first: Reply) -> None:
        """The version that shard 0 named, from all of them."""
        while True:
            calls = [server("fetch", [first.version, self._target_version]) for server in self._servers[1:]]
            answers = [call.receive() for call in calls]
            if all(fields is not None for fields, _ in answers):
                break
            first = self._ask("newest", [self._target_version])  # that version was gone already
        replies = [first, *map(Reply.unpacked, answers)]
        for r, reply in zip(self._ranges, replies, strict=True):
            self._params[r] = torch.from_numpy(reply.params)
            if reply.target is not None:
                self._target[r] = torch.from_numpy(reply.target)
        self.version = first.version
        if len({reply.target_version for reply in replies}) == 1:
            self._target_version = first.target_version
