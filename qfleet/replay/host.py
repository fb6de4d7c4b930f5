"""The writing side of a replay in main memory: rows arrive as NumPy arrays, and NumPy decides which are starts."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from qfleet.config import Config
from qfleet.replay.storage import FIRST, TERMINATED, TRUNCATED, Change, Storage, Window, pack, to_host
from qfleet.types import Array, Spec, State, Step


class HostStorage(Storage):
    """Rings in main memory. `kernel` folds windows with numba instead of torch: same numbers, lower cost per call."""

    def __init__(self, config: Config, spec: Spec, kernel: bool = False) -> None:
        super().__init__(config, spec, torch.device("cpu"))
        self.num_starts = 0
        self.is_start = np.zeros((self.rows, self.columns), dtype=bool)
        # Views of the tensors. NumPy writes: small copies cost it less than torch.
        self._count, self._oldest = self.count.numpy(), self.oldest.numpy()
        self._flags = self.flags.numpy().reshape(self.rows, self.columns)
        rings = (self.obs[: self.size], self.action, self.reward)
        self._grids = [ring.numpy().reshape(self.rows, self.columns, *ring.shape[1:]) for ring in rings]
        self._kernel_rings: tuple[Array, Array, Array, Array, Array] | None = None
        if kernel:
            action, reward, flags, gamma = (x.numpy() for x in (self.action, self.reward, self.flags, self.gamma))
            self._kernel_rings = (action, reward, flags, gamma, self._oldest)

    @property
    def ready(self) -> bool:
        return self.num_starts > 0

    def extend(self, rows: Step, column: int) -> Iterator[Change[Array]]:
        """Write rows [R, C] below the newest ones of columns column..column+C-1; yields what became of the starts."""
        length, width = rows.action.shape
        assert column >= 0 and column + width <= self.columns, (column, width, self.columns)
        fields = [to_host(field) for field in (rows.obs, rows.action, rows.reward)]
        flags = pack(rows.terminated, rows.truncated, rows.first)
        # Longer than this and a row would be overwritten before its window was looked at.
        longest = self.rows - self.n - self.stack
        for top in range(0, length, longest):
            bottom = min(top + longest, length)
            counts = self._count[column : column + width].tolist()
            # Columns at the same pace (usually all) lie at the same rows: each run of them is one block to copy.
            left = 0
            for right in range(1, width + 1):
                if right == width or counts[right] != counts[left]:
                    block = [field[top:bottom, left:right] for field in fields]
                    yield self._extend(block, flags[top:bottom, left:right], column + left, counts[left])
                    left = right

    def _extend(self, fields: list[Array], flags: Array, left: int, count: int) -> Change[Array]:
        """Rows [R, C] for columns left..left+C-1, all of which hold `count` rows."""
        length, width = flags.shape
        right, end = left + width, count + length
        if count == 0:
            flags[0] |= FIRST  # nothing lies above row 0, whatever the environment says

        gone = np.arange(self.first_start(count), self.first_start(end)) % self.rows
        was_start = self.is_start[gone, left:right]
        self.is_start[gone, left:right] = False

        at = count % self.rows
        before_wrap = min(length, self.rows - at)
        for grid, new in zip(self._grids, fields, strict=True):
            grid[at : at + before_wrap, left:right] = new[:before_wrap]
            if before_wrap < length:
                grid[: length - before_wrap, left:right] = new[before_wrap:]

        lowest = max(0, count - self.n)
        window = np.arange(lowest, end) % self.rows
        written, decided = window[count - lowest :], window[: max(0, end - lowest - self.n)]
        self._flags[written, left:right] = flags
        is_start = starts(self._flags[window, left:right], self.n)
        self.is_start[decided, left:right] = is_start

        self._count[left:right] = end
        self._oldest[left:right] = self.first_start(end)
        self.num_starts += int(np.count_nonzero(is_start)) - int(np.count_nonzero(was_start))
        return Change(
            left, right, self._slots(gone, left, right), was_start, self._slots(decided, left, right), is_start
        )

    def _slots(self, rows: Array, left: int, right: int) -> Array:
        """Slots of ring rows [R] in columns left..right-1: [R, C]."""
        return (rows * self.columns)[:, None] + np.arange(left, right)

    def windows(self, slot: Tensor) -> Window:
        if self._kernel_rings is None:
            return super().windows(slot)
        from qfleet.replay import kernels

        batch, frames = len(slot), len(slot) * self.stack
        ints, floats = np.empty(2 * (batch + frames), dtype=np.int64), np.empty(2 * batch, dtype=np.float32)
        kernels.windows(slot.numpy(), *self._kernel_rings, self.rows, self.clip, self.stack, ints, floats)
        id, action, now, after = torch.from_numpy(ints).split_with_sizes([batch, batch, frames, frames])
        reward, discount = torch.from_numpy(floats).split_with_sizes([batch, batch])
        return Window(id, action, reward, discount, now, after)

    def starts(self) -> Array:
        return self.is_start.copy()

    def load_state(self, state: State) -> None:
        super().load_state(state)
        self.is_start[:] = np.asarray(state["is_start"])
        self.num_starts = int(np.count_nonzero(self.is_start))


def starts(flags: Array, n: int) -> Array:
    """Which of the rows [M + n, C] are starts, as far as their flags say: [M, C]. The last n only complete windows."""
    length = max(0, len(flags) - n)
    valid = np.ones((length, flags.shape[1]), dtype=bool)
    begins = (flags & FIRST) != 0
    if not begins.any():
        return valid
    ended = np.zeros_like(valid)
    for i in range(1, n + 1):
        ended |= (flags[i - 1 : i - 1 + length] & TERMINATED) != 0
        if i > 1:
            ended |= (flags[i - 2 : i - 2 + length] & TRUNCATED) != 0
        valid &= ~begins[i : i + length] | ended
    return valid
