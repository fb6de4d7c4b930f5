"""One range of the flat parameters: pushed parts wait here until a commit names them, and commits are carried out in order."""

from __future__ import annotations

import itertools
from collections import deque
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from qfleet.config import GRADIENT_MODES, Config, SyncConfig
from qfleet.learner import ALIGN, Optimizer
from qfleet.sync.codecs import momentum_of
from qfleet.sync.policies import Commit, Key
from qfleet.types import Array, State

LOGGED = 256  # commits


def ranges(size: int, parts: int) -> list[slice]:
    """Nearly equal ranges of a buffer; their edges are multiples of ALIGN."""
    edges = [size * i // parts // ALIGN * ALIGN for i in range(parts)] + [size]
    return [slice(a, b) for a, b in itertools.pairwise(edges)]


class Position(NamedTuple):
    """How far a shard is."""

    version: int
    target_version: int
    progress: float
    applied: dict[int, tuple[int, int]]  # newest incarnation and sequence of every worker that are in this version


class Copy(NamedTuple):
    """Parameters and target of a version: a worker's, of all shards, or one shard's part of them."""

    position: Position
    params: Array
    target: Array

    def part(self, r: slice) -> Copy:
        return self._replace(params=self.params[r].copy(), target=self.target[r].copy())


class Shard:
    def __init__(self, config: Config, initial: Tensor) -> None:
        self.params = initial.clone()
        self.target = initial.clone()
        self.version = self.target_version = 0
        self.progress, self.applied = 0.0, dict[int, tuple[int, int]]()
        self.log: deque[Commit] = deque(maxlen=LOGGED)  # the newest commits, for shards that did not hear of them
        self.missing: list[Key] = []  # parts that a commit named and that were not here
        self._staged: dict[Key, Tensor] = {}
        self._later: dict[int, Commit] = {}
        self._tau = config.learner.tau
        # Whoever pushes clips: only it knows the whole gradient.
        momentum = config.learner.momentum - momentum_of(config)
        plain = replace(config, learner=replace(config.learner, grad_clip=0.0, momentum=momentum))
        gradients = config.sync.mode in GRADIENT_MODES
        self._rule = Optimizer(plain, self.params) if gradients else Outer(config.sync, self.params)

    def stage(self, key: Key, part: Tensor) -> None:
        """A push's part of this range. It waits."""
        self._staged[key] = part

    def discard(self, key: Key) -> None:
        self._staged.pop(key, None)

    def drop(self) -> None:
        """Parts that wait: their pushes will come again."""
        self._staged.clear()

    @torch.no_grad()
    def commit(self, commit: Commit) -> None:
        """Carry it out, and those that waited for it; one that comes too early waits."""
        self._later[commit.version] = commit
        while (due := self._later.pop(self.version + 1, None)) is not None:
            total = torch.zeros_like(self.params)
            for key, weight in due.parts:
                self.applied[key[0]] = key[1:]
                if (part := self._staged.pop(key, None)) is None:
                    self.missing.append(key)
                else:
                    total.add_(part, alpha=weight)
            self._rule(total, due.lr)
            self.version, self.progress = due.version, due.progress
            self.log.append(due)
            # Parts of workers that died before they were offered: nobody will name them any more.
            for key in [k for k in self._staged if k[1:] <= self.applied.get(k[0], (-1, -1))]:
                del self._staged[key]
            if due.freeze:
                self.target.lerp_(self.params, self._tau)
                self.target_version = self.version

    @property
    def position(self) -> Position:
        return Position(self.version, self.target_version, self.progress, dict(self.applied))

    def copy(self) -> Copy:
        return Copy(self.position, self.params.numpy().copy(), self.target.numpy().copy())

    def move(self, copy: Copy, position: Position) -> None:
        """Begin with a copy, as if it were of that position. A target that should have been frozen in between is, now."""
        self.params.copy_(torch.tensor(copy.params))
        self.target.copy_(torch.tensor(copy.target))
        if position.target_version > copy.position.target_version:
            self.target.lerp_(self.params, self._tau)
        self.version, self.target_version, self.progress, self.applied = position

    def state(self) -> State:
        return {
            "params": self.params,
            "target": self.target,
            "rule": self._rule.state(),
            "version": self.version,
            "target_version": self.target_version,
            "progress": self.progress,
            "applied": [[worker, *newest] for worker, newest in self.applied.items()],
            "missing": [list(key) for key in self.missing],
        }

    def load_state(self, state: State) -> None:
        self.params.copy_(state["params"])
        self.target.copy_(state["target"])
        self._rule.load_state(state["rule"])
        self.missing = [(worker, incarnation, sequence) for worker, incarnation, sequence in state.get("missing", [])]
        self.version, self.target_version, self.progress, self.applied = position_in(state)


def position_in(state: State) -> Position:
    """How far a shard was whose state this is."""
    applied = {worker: (incarnation, sequence) for worker, incarnation, sequence in state["applied"]}
    return Position(state["version"], state["target_version"], state["progress"], applied)


class Outer:
    """The centre follows the learners' mean move: simply, or with Nesterov's momentum (diloco)."""

    def __init__(self, sync: SyncConfig, data: Tensor) -> None:
        self.data = data
        self.lr, self.momentum = (sync.outer_lr, sync.outer_momentum) if sync.mode == "diloco" else (1.0, 0.0)
        self._velocity = torch.zeros_like(data if self.momentum else data[:0])

    @torch.no_grad()
    def __call__(self, move: Tensor, lr: float) -> None:
        """`lr` is the policy's part in it; the move is what the learners did, so it is added."""
        if self.momentum:
            self._velocity.mul_(self.momentum).add_(move)
            move = move + self.momentum * self._velocity
        self.data.add_(move, alpha=self.lr * lr)

    def state(self) -> State:
        return {"velocity": self._velocity}

    def load_state(self, state: State) -> None:
        self._velocity.copy_(state["velocity"])
