"""A learner in the default group of torch.distributed: every update is agreed on with the other ranks, or every few."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from qfleet.config import GRADIENT_MODES, Config
from qfleet.learner import Learner, clip
from qfleet.sync import allreduce
from qfleet.sync.balance import Work
from qfleet.sync.codecs import momentum_of
from qfleet.sync.local import Local
from qfleet.sync.traffic import Traffic
from qfleet.types import State


class Group:
    """`on_device`: GPUs send to each other (NCCL). Otherwise vectors go through main memory."""

    def __init__(self, config: Config, learner: Learner, on_device: bool = False) -> None:
        self._config, self._learner = config, learner
        self._on_device = on_device and config.sync.codec == "fp32"
        self.work, self.traffic = Work(), Traffic()
        self._samples = 0  # since the last exchange
        self._given_up = False  # the last exchange, here
        flat = learner.flat
        momentum = momentum_of(config)
        learner.optimizer.momentum -= momentum
        # A vector with momentum is longer than the gradients in it: their sender clips these, as where there are servers.
        self._clip = learner.optimizer.clip if momentum else 0.0
        learner.optimizer.clip -= self._clip
        self._mean = allreduce.make(config.sync, flat.places, len(flat.data), config.seed, momentum)
        self._centre: allreduce.Centre | None = None
        self._local: Local | None = None
        if config.sync.mode not in GRADIENT_MODES:
            self._centre = allreduce.Centre(config.sync, self._agreed, flat.data.cpu())
            interval = config.learner.target_interval
            self._local = Local(config.sync, interval, dist.get_world_size(), flat.data, self._centre)

    def agree(self, grad: Tensor, samples: int) -> None:
        """In the place of the learner's own `apply`."""
        if self._local is None and not self._on_device:
            vector = grad.cpu()  # which waits for the device: the learner's own work
        else:
            vector = grad
        if self._clip:
            clip(vector, self._clip)
        self._samples += samples
        with self.work.done(samples, self._learner.began):
            if self._local is None:
                self._learner.apply(self._agreed(vector, samples).to(grad.device))
            else:
                self._local.step(self._learner, grad, samples)

    def _agreed(self, vector: Tensor, weight: float) -> Tensor:
        """The mean over all, and what it took."""
        used = self._mean.used
        sent, waited = used.bytes, used.seconds
        try:
            mean = self._mean(vector, weight)
        except allreduce.Cut:
            self._given_up = True
            raise
        finally:
            self.traffic.seconds += used.seconds - waited
        self.traffic.pushed(self._samples, used.bytes - sent, allreduce.reduced(vector.nbytes))
        self._samples = 0
        return mean

    @torch.no_grad()
    def adopt(self) -> None:
        """Everybody takes over what all must have in common from whoever has made most updates: all of it, or, when that one is lost
        meanwhile, nothing. Who claimed its updates without its parameters would be the next one that all take over from."""
        learner, updates = self._learner, [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size())]
        mine = [tensor for tensor in self._common() if tensor.numel()]
        common = [tensor.to("cpu", copy=True) for tensor in mine]
        with allreduce.among_others():
            dist.all_gather(updates, torch.tensor([learner.updates]))
            for tensor in common:
                dist.broadcast(tensor, updates.index(max(updates)))
        # Another one may have had the messages of all, and made the update that was given up here.
        if self._given_up and all(torch.equal(a.cpu(), b) for a, b in zip(mine, common, strict=True)):
            self._mean.take_back()
        self._given_up = False
        for tensor, new in zip(mine, common, strict=True):
            tensor.copy_(new)
        learner.updates = int(max(updates))
        if self._local is not None and self._centre is not None:
            self._local.seen = self._centre.newest().to(learner.device, copy=True)

    def begin(self) -> None:
        """Local modes: the learner's own parameters are those of the centre."""
        if self._local is not None:
            self._learner.flat.data.copy_(self._local.seen)

    def _common(self) -> list[Tensor]:
        learner, optimizer = self._learner, self._learner.optimizer
        common = [learner.target.data, *self._mean.common()]
        if self._centre is None:
            return [*common, learner.flat.data, optimizer.step.view(1), optimizer.m, optimizer.v]
        return [*common, *self._centre.common()]

    def state(self) -> State:
        return {name: part.state() for name, part in self._parts()}

    def load_state(self, state: State) -> None:
        for name, part in self._parts():
            part.load_state(state[name])

    def _parts(self) -> list[tuple[str, Any]]:
        parts = {"mean": self._mean, "centre": self._centre, "local": self._local}
        return [(name, part) for name, part in parts.items() if part is not None]
