"""Priorities of all slots in a sum tree: prioritised sampling (Schaul et al. 2016, proportional).

The tree is eight wide, so the children of a node are one cache line, and flat: level 0 holds the priorities, every
node above the sum of its eight children, always in the same order of additions. Parents are computed from their
children and never incremented, so the tree is a function of its leaves: rebuilt from a checkpoint it is the same to
the bit. Rows that are no starts have priority 0, and a leaf of 0 is never drawn, however sums round.

There are two implementations of the same tree and the same draws: numba kernels for the CPU, where the cost of a call
counts, and torch operations for any device.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from qfleet.replay.storage import Change
from qfleet.rng import uniform_torch
from qfleet.types import Array

FAN = 8
EPSILON = 1e-6  # added to |TD error|: nothing becomes impossible to draw


class Priorities:
    """One priority per slot. `kernel`: numba, which needs the CPU; otherwise torch."""

    def __init__(self, size: int, alpha: float, device: torch.device, kernel: bool) -> None:
        sizes = level_sizes(size)
        self.size, self.alpha, self.device, self.kernel = size, alpha, device, kernel
        self.tree = torch.zeros(sum(sizes), dtype=torch.float64, device=device)
        self.levels = self.tree.split_with_sizes(sizes)
        self.leaves = self.levels[0][:size]
        self.offset = np.cumsum([0, *sizes[:-1]])
        # What new starts get: the highest priority so far, so that each is soon drawn once.
        self.highest = torch.ones(1, dtype=torch.float64, device=device)
        if kernel:
            self._tree, self._highest = self.tree.numpy(), self.highest.numpy()

    def apply(self, change: Change[Array] | Change[Tensor]) -> None:
        """New rows: whatever was overwritten is zeroed first, then new starts get the highest priority."""
        dropped, decided, is_start = map(torch.as_tensor, (change.dropped, change.decided, change.is_start))
        if len(dropped):
            self._assign(dropped.flatten(), torch.zeros(dropped.numel(), dtype=torch.float64, device=self.device))
        if len(decided):
            self._assign(decided.flatten(), is_start.flatten() * self.highest)

    def draw(self, key: int, update: int, batch: int, beta: float) -> tuple[Tensor, Tensor]:
        """Slots [B], ascending, one from each of B equal parts of the total, and their importance weights [B].

        The weights are (N * P) ** -beta over their maximum; N and the total of all priorities cancel.
        """
        if self.kernel:
            from qfleet.replay import kernels

            drawn, leaf = np.empty(batch, dtype=np.int64), np.empty(batch)
            kernels.draw(self._tree, self.offset, np.uint64(key), update, drawn, leaf)
            ratio = (leaf.min() / leaf).astype(np.float32)
            return torch.from_numpy(drawn), torch.from_numpy(ratio ** np.float32(beta))
        return self.draw_torch(key, torch.full((1,), update, device=self.device), batch, beta)

    def draw_torch(self, key: int, counter: Tensor, batch: int, beta: float | Tensor) -> tuple[Tensor, Tensor]:
        """The same with everything that changes, the update's number [1] and beta, on the device."""
        u = uniform_torch(key, counter, batch)[0]
        x = (torch.arange(batch, device=self.device) + u) / batch * self.levels[-1]
        node = torch.zeros(batch, dtype=torch.int64, device=self.device)
        for level in reversed(self.levels[:-1]):
            children = level.view(-1, FAN)[node]  # [B, 8]
            pairs = add_pairs(children)
            node = node * FAN
            child = torch.zeros_like(node)
            for sums in (add_pairs(pairs), pairs, children):
                left, right = sums.gather(1, child[:, None])[:, 0], sums.gather(1, child[:, None] + 1)[:, 0]
                # To the right only where something is: sums round, so x may lie behind the last leaf.
                go = (x >= left) & (right > 0)
                x = torch.where(go, x - left, x)
                child = (child + go) * 2
            node = node + child // 2
        priority = self.leaves[node]
        return node, (priority.min() / priority).float().pow(beta)

    def update(self, id: Tensor, error: Tensor, oldest: Tensor) -> None:
        """Priorities (|error| + epsilon) ** alpha for ids [B]; the highest wins where an id stands twice.

        Left as they are: ids of rows older than the `oldest` [E] start of their column (overwritten since they were
        sampled), ids that are no starts, and errors that are not finite (a NaN would spread to the root).
        """
        error = error.detach().float()
        if self.kernel:
            from qfleet.replay import kernels

            power = (np.abs(error.numpy()) + np.float32(EPSILON)) ** np.float32(self.alpha)
            kernels.update(self._tree, self.offset, self.size, id.numpy(), power, oldest.numpy(), self._highest)
            return
        priority = (error.abs() + EPSILON).pow_(self.alpha)
        columns = len(oldest)
        slot, age = id % self.size, id // columns - oldest[id % columns]
        taken = (age >= 0) & (age < self.size // columns) & (self.leaves[slot] > 0) & priority.isfinite()
        priority = torch.where(taken, priority, 0.0).double()
        # No host synchronisation: what is not taken goes to a leaf that belongs to no slot.
        slot = torch.where(taken, slot, self.size)
        self.levels[0].scatter_reduce_(0, slot, priority, "amax", include_self=False)
        self.levels[0][self.size :].zero_()
        self._refresh(slot)
        torch.maximum(self.highest, priority.max(), out=self.highest)

    def load(self, leaves: Tensor, highest: Tensor) -> None:
        self.leaves.copy_(leaves)
        self.highest.copy_(highest)
        for below, level in zip(self.levels, self.levels[1:], strict=False):
            sums = add_children(below.view(-1, FAN))
            level[: len(sums)] = sums

    def _assign(self, slot: Tensor, priority: Tensor) -> None:
        """Set leaves (no slot twice, but for the one that belongs to none) and everything above them."""
        if self.kernel:
            from qfleet.replay import kernels

            kernels.assign(self._tree, self.offset, slot.numpy(), priority.numpy())
            return
        self.levels[0][slot] = priority
        self._refresh(slot)

    def _refresh(self, node: Tensor) -> None:
        for below, level in zip(self.levels, self.levels[1:], strict=False):
            node = node // FAN
            level[node] = add_children(below.view(-1, FAN)[node])


def add_pairs(x: Tensor) -> Tensor:
    """[..., 2 n] -> [..., n]: sums of neighbours."""
    return x[..., ::2] + x[..., 1::2]


def add_children(children: Tensor) -> Tensor:
    """[..., 8] -> [...]: always the same order of additions, on every device."""
    return add_pairs(add_pairs(add_pairs(children)))[..., 0]


def level_sizes(size: int) -> list[int]:
    """Nodes per level, leaves first: one leaf more than slots (see `update`), each level filled up to whole nodes."""
    sizes, nodes = [], size + 1
    while nodes > 1:
        sizes.append(-(-nodes // FAN) * FAN)
        nodes = sizes[-1] // FAN
    return [*sizes, 1]


def memory(size: int) -> int:
    return 8 * sum(level_sizes(size))
