"""Learners that train alone for a while and then meet at a centre: local SGD, DiLoCo, elastic averaging, consensus ADMM.

    x: the learner's parameters    c: the centre, as last seen    H: sync.local_steps

| mode     | every update                          | every H updates                                              |
|----------|---------------------------------------|--------------------------------------------------------------|
| localsgd | the optimiser's                       | push x - c; c += mean; x = c                                 |
| diloco   | the optimiser's                       | push x - c; c by a Nesterov step along the mean; x = c       |
| easgd    | the optimiser's                       | d = e (x - c); x -= d; push d; c += the sum of all d         |
| admm     | the optimiser's, then the proximal    | push x + u - c; c += mean by rho; u += x - c                 |
|          | step of rho/2 |x - c + u|^2           |                                                              |

The optimiser sees only the gradient of the loss. The target network is a copy of the centre.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from qfleet.config import SyncConfig
from qfleet.types import State

UNEQUAL = 100.0  # squared: admm changes rho where one residual is ten times the other


class Centre(Protocol):
    """Where learners meet: in main memory, wherever they compute."""

    def newest(self) -> Tensor:
        """The centre as it is now."""
        ...

    def exchange(self, move: Tensor, weight: float) -> Tensor:
        """Take part in the next move of the centre, by this weight where it is a mean; -> the centre after it."""
        ...


class Pupil(Protocol):
    """The part of a learner that is needed here."""

    lr: float
    updates: int

    @property
    def parameters(self) -> Tensor: ...
    def optimize(self, grad: Tensor) -> None: ...
    def freeze(self, parameters: Tensor) -> None: ...


class Local:
    """`step` takes the place of a learner's own `apply`."""

    def __init__(self, sync: SyncConfig, target_interval: int, learners: int, initial: Tensor, centre: Centre) -> None:
        self._c, self._interval, self._centre = sync, target_interval, centre
        self._elasticity = sync.elasticity / learners
        self._samples = 0
        self.rho = sync.rho
        self.seen = initial.clone()
        self.dual = torch.zeros_like(initial if sync.mode == "admm" else initial[:0])

    @torch.no_grad()
    def step(self, learner: Pupil, grad: Tensor, samples: int) -> None:
        learner.optimize(grad)
        self._samples += samples
        x, mode = learner.parameters, self._c.mode
        if mode == "admm":
            pull = learner.lr * self.rho
            x.add_(self.seen - self.dual, alpha=pull).div_(1.0 + pull)
        if learner.updates % self._c.local_steps == 0:
            self._meet(x, mode)
            self._samples = 0
        if learner.updates % self._interval == 0:
            learner.freeze(self.seen)

    def _meet(self, x: Tensor, mode: str) -> None:
        if mode == "easgd":
            move = (x - self._centre.newest().to(x.device)) * self._elasticity
            x.sub_(move)
            self.seen = self._exchange(move, self._samples)
        elif mode == "admm":
            before = self.seen
            self.seen = self._exchange(x + self.dual - before, self.rho)
            self.dual.add_(x - self.seen)
            self._adapt(x, before)
        else:
            self.seen = self._exchange(x - self.seen, self._samples)
            x.copy_(self.seen)

    def _exchange(self, move: Tensor, weight: float) -> Tensor:
        return self._centre.exchange(move.cpu(), weight).to(move.device)

    def _adapt(self, x: Tensor, before: Tensor) -> None:
        """Balance how far the learner is from the consensus and how far that moved, by a rho of its own. u = y / rho follows."""
        if not self._c.rho_adapt:
            return
        primal, dual = float((x - self.seen).square().sum()), self.rho**2 * float((self.seen - before).square().sum())
        factor = 2.0 if primal > UNEQUAL * dual else 0.5 if dual > UNEQUAL * primal else 1.0
        self.rho *= factor
        self.dual.div_(factor)

    def state(self) -> State:
        return {"seen": self.seen, "dual": self.dual, "rho": self.rho, "samples": self._samples}

    def load_state(self, state: State) -> None:
        self.seen = state["seen"].to(self.seen.device, copy=True)
        self.dual.copy_(state["dual"])
        self.rho, self._samples = state["rho"], state["samples"]
