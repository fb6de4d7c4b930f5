"""Uniform sampling: per column a ring of its starts, oldest first, and a draw over all of them that never waits."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from qfleet.replay.storage import Change
from qfleet.rng import uniform_torch
from qfleet.types import Array


class Uniform:
    """The starts of every column in order of age, as slots. Each ring holds up to T of them."""

    def __init__(self, rows: int, columns: int) -> None:
        assert rows * columns < 2**31
        self.rows, self.columns = rows, columns
        self.ring = torch.zeros(rows * columns, dtype=torch.int32)
        self._ring = self.ring.numpy()
        self._head = np.zeros(columns, dtype=np.int64)  # starts ever dropped
        self._tail = np.zeros(columns, dtype=np.int64)  # starts ever added
        # What `draw` reads, at fixed addresses: for every column the place of its oldest start in the ring, the number
        # of starts in the columns before it, and the number up to and including it.
        self.place = torch.zeros(3, columns, dtype=torch.int64)
        self._place = self.place.numpy()

    def apply(self, change: Change[Array]) -> None:
        columns = slice(change.left, change.right)
        self._head[columns] += np.count_nonzero(change.was_start, axis=0)
        row, column = np.nonzero(change.is_start)
        rank = change.is_start.cumsum(axis=0)[row, column] - 1  # among those added to the same column
        column_at = column + change.left
        place = (self._tail[column_at] + rank) % self.rows * self.columns + column_at
        slot = change.decided[row, column]
        self._ring[place] = slot
        self._tail[columns] += np.count_nonzero(change.is_start, axis=0)
        self._place[0] = self._head % self.rows
        np.cumsum(self._tail - self._head, out=self._place[2])
        self._place[1, 1:] = self._place[2, :-1]

    def draw(self, key: int, counter: Tensor, batch: int) -> Tensor:
        """Slots [K * batch] for updates `counter` [K]: start floor(x * number of starts), column after column."""
        return draw(self.ring, self.place, key, counter, batch, self.rows)

    def rebuild(self, is_start: Array, oldest: Tensor) -> None:
        """From the map of starts [T, E] and the oldest possible start of every column."""
        self._head[:] = self._tail[:] = 0
        column = np.arange(self.columns)
        by_age = (np.arange(self.rows)[:, None] + oldest.numpy()) % self.rows  # [T, E]
        nothing = np.zeros((0, self.columns), dtype=bool)
        self.apply(Change(0, self.columns, nothing, nothing, by_age * self.columns + column, is_start[by_age, column]))


def draw(ring: Tensor, place: Tensor, key: int, counter: Tensor, batch: int, rows: int) -> Tensor:
    """See Uniform.draw."""
    x = uniform_torch(key, counter, batch).flatten()
    oldest, before, until = place
    chosen = (x * until[-1:]).long()  # x < 1, so always below the number of starts
    column = torch.searchsorted(until, chosen, right=True).clamp(max=len(until) - 1)  # without starts: anything
    at = (oldest[column] + chosen - before[column]) % rows
    return ring[at * place.shape[1] + column].long()


def memory(rows: int, columns: int) -> int:
    return rows * columns * 4
