"""One range of the flat parameters: pushed parts wait here until a commit names them, and commits are carried out in order."""

from __future__ import annotations

import itertools
from dataclasses import replace

import torch
from torch import Tensor

from qfleet.config import GRADIENT_MODES, Config, SyncConfig
from qfleet.learner import Optimizer
from qfleet.sync.policies import Commit, Key
from qfleet.types import State


def ranges(size: int, parts: int, align: int = 16) -> list[slice]:
    """Nearly equal ranges of a buffer; their edges are multiples of `align`."""
    edges = [size * i // parts // align * align for i in range(parts)] + [size]
    return [slice(a, b) for a, b in itertools.pairwise(edges)]


class Shard:
    def __init__(self, config: Config, initial: Tensor) -> None:
        self.params = initial.clone()
        self.target = initial.clone()
        self.version = self.target_version = 0
        self.missing: list[Key] = []  # parts that a commit named and that were not here
        self._staged: dict[Key, Tensor] = {}
        self._later: dict[int, Commit] = {}
        self._tau = config.learner.tau
        # Whoever pushes clips: only it knows the whole gradient.
        plain = replace(config, learner=replace(config.learner, grad_clip=0.0))
        gradients = config.sync.mode in GRADIENT_MODES
        self._rule = Optimizer(plain, self.params) if gradients else Outer(config.sync, self.params)

    def stage(self, key: Key, part: Tensor) -> None:
        """A push's part of this range. It waits."""
        self._staged[key] = part

    def discard(self, key: Key) -> None:
        self._staged.pop(key, None)

    @torch.no_grad()
    def commit(self, commit: Commit) -> None:
        """Carry it out, and those that waited for it; one that comes too early waits."""
        self._later[commit.version] = commit
        while (due := self._later.pop(self.version + 1, None)) is not None:
            total = torch.zeros_like(self.params)
            for key, weight in due.parts:
                if (part := self._staged.pop(key, None)) is None:
                    self.missing.append(key)
                else:
                    total.add_(part, alpha=weight)
            self._rule(total, due.lr)
            self.version += 1
            if due.freeze:
                self.target.lerp_(self.params, self._tau)
                self.target_version = self.version

    def state(self) -> State:
        return {
            "params": self.params,
            "target": self.target,
            "rule": self._rule.state(),
            "version": self.version,
            "target_version": self.target_version,
        }

    def load_state(self, state: State) -> None:
        self.params.copy_(state["params"])
        self.target.copy_(state["target"])
        self._rule.load_state(state["rule"])
        self.version, self.target_version = state["version"], state["target_version"]


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
