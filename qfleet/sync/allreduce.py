"""Agreement without a server: weighted means over all ranks of a torch.distributed group, the same bits on each of them.

| who          | waits for                        | unblocked by                                                   |
|--------------|----------------------------------|----------------------------------------------------------------|
| `mean`       | the same call of all other ranks | them, or an error: at once when one dies, after the group's    |
|              |                                  | timeout when one hangs                                         |

fp32 is one all-reduce of the vector, with the weight as its last number. Compressed messages cannot be added on the way: they
are gathered, and everybody adds them up in the order of the ranks. Low rank (PowerSGD) reduces two thin matrices instead.

Bytes are counted as a ring sends them, which Gloo is: of 4 MB the kernel's counters (`ss -ti`, bytes_sent) had 1.000, 1.334, 1.500 and
1.751 buffers for each of 2, 3, 4 and 8 ranks that reduce, and 1.000, 2.000, 3.004 and 7.001 for each that gathers. Gloo's headers, 0.3 to
4 kB an agreement, are not counted.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from qfleet import rng
from qfleet.config import SyncConfig
from qfleet.sync import codecs
from qfleet.sync.shard import Outer
from qfleet.types import Array, State


class Cut(RuntimeError):
    """The others cannot be reached (any more)."""


@contextlib.contextmanager
def among_others() -> Iterator[None]:
    """Around what the group does, and nothing else: an error there is Cut, in one line. torch has no type of its own for it."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as e:
        first = (str(e).splitlines() or [""])[0]
        raise Cut(re.sub(r"\[/\S*\]\s*", "", first).strip() or type(e).__name__) from None


def reduced(size: int) -> int:
    """Bytes that each rank sends to reduce so many: all parts but one, twice."""
    ranks = dist.get_world_size()
    return 2 * (ranks - 1) * size // ranks


def gathered(size: int) -> int:
    """Bytes that each rank sends to gather messages of so many: its own, or one that came, for every other rank."""
    return (dist.get_world_size() - 1) * size


class Used:
    """What a learner sent, and how long it was with the others: not the time to make its message, or to read theirs."""

    def __init__(self) -> None:
        self.bytes, self.seconds = 0, 0.0

    @contextlib.contextmanager
    def sending(self, size: int) -> Iterator[None]:
        began = time.perf_counter()
        try:
            with among_others():
                yield
        finally:
            self.seconds += time.perf_counter() - began
        self.bytes += size


class Mean(Protocol):
    used: Used

    def __call__(self, vector: Tensor, weight: float) -> Tensor: ...
    def common(self) -> list[Tensor]:
        """What must be the same on all ranks."""
        ...

    def take_back(self) -> None:
        """The last one was given up, by all: what was sent is due again."""
        ...

    def state(self) -> State: ...
    def load_state(self, state: State) -> None: ...


def make(
    sync: SyncConfig, places: Sequence[tuple[torch.Size, int]], size: int, seed: int, momentum: float = 0.0
) -> Mean:
    """The mean over the default group. `places`: shapes and offsets of the matrices in a vector of this size."""
    if sync.codec == "powersgd":
        return LowRank(places, size, sync.rank, seed)
    if sync.codec == "fp32":
        return Reduced()
    return Gathered(codecs.make(sync, size, seed, dist.get_rank(), momentum=momentum))


class Reduced:
    def __init__(self) -> None:
        self.used = Used()

    def __call__(self, vector: Tensor, weight: float) -> Tensor:
        buffer = torch.empty(len(vector) + 1, dtype=vector.dtype, device=vector.device)
        torch.mul(vector, weight, out=buffer[:-1])
        buffer[-1] = weight
        with self.used.sending(reduced(buffer.nbytes)):
            dist.all_reduce(buffer)
        return buffer[:-1].div_(buffer[-1].clone())

    def common(self) -> list[Tensor]:
        return []

    def take_back(self) -> None:
        pass

    def state(self) -> State:
        return {}

    def load_state(self, state: State) -> None:
        pass


class Gathered:
    def __init__(self, codec: codecs.Codec) -> None:
        self._codec = codec
        self.used = Used()

    def __call__(self, vector: Tensor, weight: float) -> Tensor:
        mine = np.concatenate((np.array([weight]).view(np.uint8), self._codec.encode(vector)))
        everybody = [torch.empty(len(mine), dtype=torch.uint8) for _ in range(dist.get_world_size())]
        with self.used.sending(gathered(len(mine))):
            dist.all_gather(everybody, torch.from_numpy(mine))
        messages: list[Array] = [message.numpy() for message in everybody]
        weights = [float(message[:8].view(np.float64)[0]) for message in messages]
        total = torch.zeros_like(vector)
        for message, w in zip(messages, weights, strict=True):
            total.add_(self._codec.decode(message[8:]), alpha=w / sum(weights))
        return total

    def common(self) -> list[Tensor]:
        return []

    def take_back(self) -> None:
        self._codec.take_back()

    def state(self) -> State:
        return self._codec.state()

    def load_state(self, state: State) -> None:
        self._codec.load_state(state)


class LowRank:
    """PowerSGD (Vogels, Karimireddy, Jaggi, 2019): every matrix by its product with a thin one; what that misses is kept for later.

    Vectors, and matrices that would not become smaller, are reduced as they are.
    """

    def __init__(self, places: Sequence[tuple[torch.Size, int]], size: int, rank: int, seed: int) -> None:
        self._size = size
        self._matrices: list[tuple[int, int, int]] = []  # offset, rows, columns
        for shape, at in places:
            rows, columns = shape[0], shape.numel() // max(1, shape[0])
            if len(shape) > 1 and rank * (rows + columns) < rows * columns:
                self._matrices.append((at, rows, columns))
        key = torch.Generator().manual_seed(rng.derive(seed, "low rank"))  # the same everywhere
        self._q = [torch.randn(columns, rank, generator=key) for _, _, columns in self._matrices]
        self.residual = torch.zeros(size)
        plain = torch.ones(size, dtype=torch.bool)
        for at, rows, columns in self._matrices:
            plain[at : at + rows * columns] = False
        self._plain = plain.nonzero().squeeze(1)
        self._reduce = Reduced()
        self.used = self._reduce.used

    def __call__(self, vector: Tensor, weight: float) -> Tensor:
        whole = vector + self.residual
        parts = [whole[at : at + rows * columns].view(rows, columns) for at, rows, columns in self._matrices]
        first = self._mean([m @ q for m, q in zip(parts, self._q, strict=True)] + [whole[self._plain]], weight)
        left = [torch.linalg.qr(p).Q for p in first[:-1]]
        self._q = self._mean([m.T @ p for m, p in zip(parts, left, strict=True)], weight)
        agreed = torch.zeros_like(vector)
        agreed[self._plain] = first[-1]
        self.residual.zero_()
        for (at, rows, columns), m, p, q in zip(self._matrices, parts, left, self._q, strict=True):
            agreed[at : at + rows * columns] = (p @ q.T).flatten()
            # What of my own matrix the agreed columns cannot say.
            self.residual[at : at + rows * columns] = (m - p @ (p.T @ m)).flatten()
        return agreed

    def _mean(self, parts: list[Tensor], weight: float) -> list[Tensor]:
        """Of many small tensors, in one message."""
        flat = self._reduce(torch.cat([p.flatten() for p in parts]), weight)
        return [f.view(p.shape) for f, p in zip(torch.split(flat, [p.numel() for p in parts]), parts, strict=True)]

    def common(self) -> list[Tensor]:
        return self._q

    def take_back(self) -> None:
        pass  # the residual changes with the agreement

    def state(self) -> State:
        return {"residual": self.residual, **{f"q{i}": q for i, q in enumerate(self._q)}}

    def load_state(self, state: State) -> None:
        self.residual.copy_(state["residual"])
        for i, q in enumerate(self._q):
            q.copy_(state[f"q{i}"])


class Centre:
    """Everybody's copy of the centre, moved by the same mean everywhere."""

    def __init__(self, sync: SyncConfig, mean: Callable[[Tensor, float], Tensor], initial: Tensor) -> None:
        self._mean, self._centre = mean, initial.clone()
        self._outer = Outer(sync, self._centre)
        self._sum = sync.mode == "easgd"  # of the moves, not their mean

    def newest(self) -> Tensor:
        return self._centre

    def exchange(self, move: Tensor, weight: float) -> Tensor:
        mean = self._mean(move, 1.0 if self._sum else weight)
        self._outer(mean, float(dist.get_world_size()) if self._sum else 1.0)
        return self._centre.clone()

    def common(self) -> list[Tensor]:
        return [self._centre, *self._outer.state().values()]

    def state(self) -> State:
        return {"centre": self._centre, "outer": self._outer.state()}

    def load_state(self, state: State) -> None:
        self._centre.copy_(state["centre"])
        self._outer.load_state(state["outer"])
