"""A vector as bytes and back: as it is, or smaller.

| codec | bytes a number | what is lost                                                                                |
|-------|----------------|---------------------------------------------------------------------------------------------|
| fp32  | 4              | nothing                                                                                     |
| bf16  | 2              | rounded up or down at random, right in the mean                                             |
| int8  | 1.016          | the same, in 255 levels of the largest number among 256 neighbours                          |
| topk  | 8 · sync.topk  | all but the largest: the rest is kept and added to the next vector (error feedback)         |

Where gradients are sent by topk and the optimiser is sgd with momentum, the momentum is the sender's (as in Deep Gradient Compression, Lin et
al. 2018): what is kept for later would otherwise arrive without it.

The residual belongs to the sender: it is in its checkpoint. Of a message that nobody uses (a push that was refused) nothing is kept but what
was due before: the vector is dropped whole, or given again. Random numbers follow from (seed, worker, message): no state.
"""

from __future__ import annotations

import math
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from qfleet import rng
from qfleet.config import GRADIENT_MODES, Config, SyncConfig
from qfleet.jit import kernel
from qfleet.replay.kernels import uniform
from qfleet.types import Array, State

BLOCK = 256  # numbers that share a scale in int8


class Codec(Protocol):
    def encode(self, x: Tensor) -> Array:
        """-> bytes (uint8)."""
        ...

    def decode(self, message: Array) -> Tensor: ...
    def take_back(self) -> None:
        """Nobody used the last message: what is kept is as if its vector had never been there."""
        ...

    def forget(self) -> None:
        """What was kept for later."""
        ...

    def state(self) -> State: ...
    def load_state(self, state: State) -> None: ...


class _KeepsNothing:
    def take_back(self) -> None:
        pass

    def forget(self) -> None:
        pass


def momentum_of(config: Config) -> float:
    """The momentum that a sender adds, in the place of the optimiser."""
    sync = config.sync
    return config.learner.momentum if sync.codec == "topk" and sync.mode in GRADIENT_MODES else 0.0


def make(sync: SyncConfig, size: int, seed: int, worker: int, part: int = 0, momentum: float = 0.0) -> Codec:
    """For vectors of this size. powersgd is not here: it knows matrices (see allreduce)."""
    key = rng.key(seed, f"codec {worker} {part}")
    if sync.codec == "bf16":
        return BFloat16(size, key)
    if sync.codec == "int8":
        return Int8(size, key)
    if sync.codec == "topk":
        return TopK(size, sync.topk, momentum)
    return Plain()


class Plain(_KeepsNothing):
    def encode(self, x: Tensor) -> Array:
        return x.detach().numpy().view(np.uint8)

    def decode(self, message: Array) -> Tensor:
        return torch.from_numpy(message).view(torch.float32)

    def state(self) -> State:
        return {}

    def load_state(self, state: State) -> None:
        pass


class _Random(_KeepsNothing):
    """What rounds at random: the state is a count."""

    def __init__(self, size: int, key: int) -> None:
        self._size, self._key, self._sent = size, np.uint64(key), 0

    def _counter(self) -> int:
        self._sent += 1
        return self._sent - 1

    def state(self) -> State:
        return {"sent": self._sent}

    def load_state(self, state: State) -> None:
        self._sent = state["sent"]


class BFloat16(_Random):
    def encode(self, x: Tensor) -> Array:
        out = np.empty(self._size, np.uint16)
        _to_bf16(x.detach().numpy().view(np.uint32), out, self._key, self._counter())
        return out.view(np.uint8)

    def decode(self, message: Array) -> Tensor:
        return torch.from_numpy(message).view(torch.bfloat16).float()


class Int8(_Random):
    def encode(self, x: Tensor) -> Array:
        blocks = -(-self._size // BLOCK)
        out = np.empty(4 * blocks + self._size, np.uint8)
        scales, levels = out[: 4 * blocks].view(np.float32), out[4 * blocks :].view(np.int8)
        _to_int8(x.detach().numpy(), scales, levels, self._key, self._counter())
        return out

    def decode(self, message: Array) -> Tensor:
        blocks = -(-self._size // BLOCK)
        out = np.empty(self._size, np.float32)
        _from_int8(message[: 4 * blocks].view(np.float32), message[4 * blocks :].view(np.int8), out)
        return torch.from_numpy(out)


class TopK:
    def __init__(self, size: int, part: float, momentum: float = 0.0) -> None:
        self._size, self._count, self._momentum = size, max(1, math.ceil(size * part)), momentum
        self.residual = torch.zeros(size)
        self._velocity = torch.zeros(size if momentum else 0)
        self._before = self.residual.clone(), self._velocity.clone()  # the last vector

    def encode(self, x: Tensor) -> Array:
        for before, now in zip(self._before, (self.residual, self._velocity), strict=True):
            before.copy_(now)
        if self._momentum:
            x = self._velocity.mul_(self._momentum).add_(x)
        self.residual.add_(x)
        chosen = self.residual.abs().topk(self._count, sorted=False).indices
        out = np.empty(8 * self._count, np.uint8)
        out[: 4 * self._count].view(np.int32)[:] = chosen.numpy()
        out[4 * self._count :].view(np.float32)[:] = self.residual[chosen].numpy()
        self.residual[chosen] = 0.0
        return out

    def decode(self, message: Array) -> Tensor:
        out = torch.zeros(self._size)
        index = torch.from_numpy(message[: 4 * self._count].view(np.int32).astype(np.int64))
        out[index] = torch.from_numpy(message[4 * self._count :].view(np.float32))
        return out

    def take_back(self) -> None:
        residual, velocity = self._before
        self.residual.copy_(residual)
        self._velocity.copy_(velocity)

    def forget(self) -> None:
        self.residual.zero_()
        self._velocity.zero_()

    def state(self) -> State:
        return {"residual": self.residual, "velocity": self._velocity}

    def load_state(self, state: State) -> None:
        self.residual.copy_(state["residual"])
        self._velocity.copy_(state["velocity"])


# --- kernels: a random number, a rounding, in one pass ----------------------------------------------------------------


@kernel
def _to_bf16(bits: Array, out: Array, key: np.uint64, counter: int) -> None:
    for i in range(len(bits)):
        b = bits[i]
        if (b >> np.uint32(23)) & np.uint32(255) != np.uint32(255):  # infinity and NaN stay what they are
            b = b + np.uint32(uniform(key, counter, i) * 65536.0)
        out[i] = np.uint16(b >> np.uint32(16))


@kernel
def _to_int8(x: Array, scales: Array, levels: Array, key: np.uint64, counter: int) -> None:
    for block in range(len(scales)):
        begin, end = block * 256, min(block * 256 + 256, len(x))
        largest = np.float32(0.0)
        for i in range(begin, end):
            largest = max(largest, abs(x[i]))
        scale = largest / np.float32(127.0)
        scales[block] = scale
        for i in range(begin, end):
            if scale == np.float32(0.0):
                levels[i] = 0
                continue
            level = np.floor(np.float64(x[i]) / np.float64(scale) + uniform(key, counter, i))
            levels[i] = np.int8(min(127.0, max(-127.0, level)))


@kernel
def _from_int8(scales: Array, levels: Array, out: Array) -> None:
    for i in range(len(out)):
        out[i] = scales[i // 256] * np.float32(levels[i])
