"""The rings: every stream is stored once, and windows, stacks and next observations are gathered from its rows.

Each field is a ring of T rows and E columns, flattened: row t of column c lies at slot (t mod T) * E + c, so the row
below is E slots further, modulo T * E. Rows are numbered per column, from 0, for ever.

A row is a *start* when a whole n-step window can be gathered from it:
- the n rows below it are written, and the k - 1 rows above it (frame stack k) are not overwritten;
- no episode begins inside the window unless the window has ended before: `first` at row j needs a `terminated` row
  before j, or a `truncated` row before j - 1 (the row between them holds the observation to bootstrap from). So the row
  of a terminal observation is no start, nor is any row whose window would cross a restart.

What rows are starts is decided on the host, where the flags come from, as rows arrive: sampling never has to wait
for the device to find out how much there is.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from qfleet.config import Config
from qfleet.types import Array, Spec, State, Step

TERMINATED, TRUNCATED, FIRST = 1, 2, 4  # bits of `flags`
END = TERMINATED | TRUNCATED


class Change(NamedTuple):
    """What new rows did to the starts of the columns [left, right): D x C rows fell out, M x C were decided."""

    left: int
    right: int
    dropped: Array  # [D, C] int64: slots that are no starts any more
    was_start: Array  # [D, C] bool: those that had been
    decided: Array  # [M, C] int64: slots whose window is now complete
    is_start: Array  # [M, C] bool: those that are starts


class Window(NamedTuple):
    """B windows, still without observations."""

    id: Tensor  # [B] int64
    action: Tensor  # [B] int64
    reward: Tensor  # [B] float32
    discount: Tensor  # [B] float32
    frames: Tensor  # [B * stack] int64: slots of the frames of obs, oldest first; `size` is the frame of zeros
    next_frames: Tensor  # [B * stack] int64: the same for next_obs


class Storage:
    """Rings of rows. `kernel` folds windows with numba instead of torch: same numbers, lower cost per call."""

    def __init__(self, config: Config, spec: Spec, device: torch.device, kernel: bool = False) -> None:
        self.columns, self.rows = shape(config)
        self.size = self.rows * self.columns
        self.n, self.stack = config.learner.n_step, spec.frame_stack
        assert self.rows > self.n + self.stack  # Config sees to it
        self.clip = config.env.reward_clip
        self.device, self.kernel = device, kernel
        self._input_shape = spec.input_shape
        self._gammas = [config.learner.gamma**i for i in range(self.n + 1)]
        self._gamma = torch.tensor(self._gammas, dtype=torch.float32, device=device)  # [n + 1]

        # One frame more than slots, of zeros: what a stack shows before the first frame of an episode. The large rings
        # are left untouched, so that they take memory only as they fill.
        self.obs = torch.empty((self.size + 1, *spec.obs_shape), dtype=spec.torch_dtype, device=device)
        self.obs[-1].zero_()
        self.action = torch.empty(self.size, dtype=action_dtype(spec), device=device)
        self.reward = torch.empty(self.size, dtype=torch.float32, device=device)
        self.flags = torch.zeros(self.size, dtype=torch.uint8, device=device)

        # Host side. On the CPU the NumPy arrays are views of the tensors.
        self.num_starts = 0
        self.count = torch.zeros(self.columns, dtype=torch.int64)  # [E] rows ever written
        self.oldest = torch.zeros(self.columns, dtype=torch.int64, device=device)  # [E] rows before it are no starts
        self.is_start = np.zeros((self.rows, self.columns), dtype=bool)
        self._count = self.count.numpy()
        self._oldest = to_host(self.oldest)
        self._flags = to_host(self.flags).reshape(self.rows, self.columns)
        # The rings as grids [T, E, ...] to write to. On the CPU NumPy writes: small copies cost it less than torch.
        rings = (self.obs[: self.size], self.action, self.reward)
        self._grids = [self._native(ring).reshape(self.rows, self.columns, *ring.shape[1:]) for ring in rings]

        self._kernel_rings: tuple[Array, Array, Array, Array, Array] | None = None
        if kernel:
            self._kernel_rings = (
                to_host(self.action),
                to_host(self.reward),
                to_host(self.flags),
                to_host(self._gamma),
                self._oldest,
            )

    def _native(self, x: Tensor) -> Any:
        return to_host(x) if self.device.type == "cpu" else x

    # --- writing -----------------------------------------------------------------------------------------------

    def extend(self, rows: Step, column: int) -> Iterator[Change]:
        """Write rows [R, C] below the newest ones of columns column..column+C-1; yields what became of the starts."""
        length, width = rows.action.shape
        assert column >= 0 and column + width <= self.columns, (column, width, self.columns)
        fields = [self._native(field) for field in (rows.obs, rows.action, rows.reward)]
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

    def _extend(self, fields: list[Any], flags: Array, left: int, count: int) -> Change:
        """Rows [R, C] for columns left..left+C-1, all of which hold `count` rows."""
        length, width = flags.shape
        right, end = left + width, count + length
        if count == 0:
            flags[0] |= FIRST  # nothing lies above row 0, whatever the environment says

        gone = np.arange(self._first_start(count), self._first_start(end)) % self.rows
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
        self._oldest[left:right] = self._first_start(end)
        self.num_starts += int(np.count_nonzero(is_start)) - int(np.count_nonzero(was_start))
        if self.device.type != "cpu":
            slots = torch.from_numpy(self._slots(written, left, right)).to(self.device)
            self.flags[slots] = torch.from_numpy(flags).to(self.device)
            self.oldest.copy_(torch.from_numpy(self._oldest))
        return Change(
            left, right, self._slots(gone, left, right), was_start, self._slots(decided, left, right), is_start
        )

    def _first_start(self, count: int) -> int:
        """The oldest row that may be a start when `count` rows were written."""
        return 0 if count <= self.rows else count - self.rows + self.stack - 1

    def _slots(self, rows: Array, left: int, right: int) -> Array:
        """Slots of ring rows [R] in columns left..right-1: [R, C]."""
        return (rows * self.columns)[:, None] + np.arange(left, right)

    # --- reading -----------------------------------------------------------------------------------------------

    def windows(self, slot: Tensor) -> Window:
        """The windows that start at slots [B]."""
        if self.kernel:
            return self._windows_kernel(slot)
        reward = torch.zeros(len(slot), dtype=torch.float32, device=self.device)
        alive = torch.ones(len(slot), dtype=torch.bool, device=self.device)  # no end so far
        terminated = torch.zeros_like(alive)
        length = torch.zeros_like(slot)
        at = slot
        for i in range(self.n):
            flags = self.flags[at]
            raw = self.reward[at]
            if self.clip:
                raw = raw.clamp(-self.clip, self.clip)
            reward = torch.where(alive, reward + raw * self._gammas[i], reward)
            length = length + alive
            terminated |= alive & ((flags & TERMINATED) != 0)
            alive = alive & ((flags & END) == 0)
            at = (at + self.columns) % self.size
        discount = self._gamma[length].masked_fill(terminated, 0.0)
        after = (slot + length * self.columns) % self.size
        return Window(
            self.ids(slot), self.action[slot].long(), reward, discount, self._frames(slot), self._frames(after)
        )

    def _frames(self, slot: Tensor) -> Tensor:
        """Slots of the stack that ends at slots [B], oldest frame first; nothing from before the last `first`."""
        if self.stack == 1:
            return slot
        frames, at = [slot], slot
        inside = torch.ones(len(slot), dtype=torch.bool, device=self.device)
        for _ in range(self.stack - 1):
            inside = inside & ((self.flags[at] & FIRST) == 0)
            at = (at - self.columns) % self.size
            frames.append(at.where(inside, self.size))
        return torch.stack(frames[::-1], dim=1).flatten()

    def _windows_kernel(self, slot: Tensor) -> Window:
        from qfleet.replay import kernels

        assert self._kernel_rings is not None
        batch, frames = len(slot), len(slot) * self.stack
        ints, floats = np.empty(2 * (batch + frames), dtype=np.int64), np.empty(2 * batch, dtype=np.float32)
        kernels.windows(slot.numpy(), *self._kernel_rings, self.rows, self.clip, self.stack, ints, floats)
        id, action, now, after = torch.from_numpy(ints).split_with_sizes([batch, batch, frames, frames])
        reward, discount = torch.from_numpy(floats).split_with_sizes([batch, batch])
        return Window(id, action, reward, discount, now, after)

    def observations(self, frames: Tensor) -> Tensor:
        """Observations [B, *input_shape] from slots [B * stack]."""
        return self.obs.index_select(0, frames).view(-1, *self._input_shape)

    def ids(self, slot: Tensor) -> Tensor:
        """row * E + column of starts: unlike the slot, never used twice."""
        column = slot % self.columns
        oldest = self.oldest[column]
        row = oldest + (slot // self.columns - oldest) % self.rows
        return row * self.columns + column

    # --- checkpoints -------------------------------------------------------------------------------------------

    def state(self) -> State:
        return {"count": self.count.clone(), "is_start": torch.from_numpy(self.is_start.copy())}

    def load_state(self, state: State) -> None:
        is_start = np.asarray(state["is_start"])
        if is_start.shape != self.is_start.shape:
            raise ValueError(
                f"the checkpoint's replay has {is_start.shape} (rows, environments), this one {self.is_start.shape}: "
                f"replay.capacity and env.num_envs must be the same."
            )
        self.is_start[:] = is_start
        self._count[:] = np.asarray(state["count"])
        self._oldest[:] = [self._first_start(count) for count in self._count.tolist()]
        self.oldest.copy_(torch.from_numpy(self._oldest))
        self.num_starts = int(np.count_nonzero(is_start))

    def segment(self, since: Tensor | None, until: Tensor | None = None) -> dict[str, Tensor]:
        """Rows still in the rings from `since` up to, not including, `until`, per column; on the host, flattened to N."""
        lowest = (self.count - self.rows).clamp(min=0)
        if since is not None:
            lowest = torch.maximum(lowest, since)
        lengths = ((self.count if until is None else until) - lowest).clamp(min=0)
        column = torch.arange(self.columns).repeat_interleave(lengths)
        within = torch.arange(len(column)) - (lengths.cumsum(0) - lengths)[column]
        row = lowest[column] + within
        slot = (row % self.rows * self.columns + column).to(self.device)
        flags = self.flags[slot].cpu()
        return {
            "row": row,
            "column": column,
            "obs": self.obs.index_select(0, slot).cpu(),
            "action": self.action[slot].cpu(),
            "reward": self.reward[slot].cpu(),
            "terminated": (flags & TERMINATED) != 0,
            "truncated": (flags & TRUNCATED) != 0,
            "first": (flags & FIRST) != 0,
        }

    def load_segment(self, segment: dict[str, Tensor]) -> None:
        """Put back the rows that `load_state`'s counts still hold; rows overwritten since are skipped."""
        row, column = segment["row"], segment["column"]
        if bool((row >= self.count[column]).any()):
            raise ValueError("a replay segment holds rows that its checkpoint does not know: load the state first.")
        if segment["obs"].shape[1:] != self.obs.shape[1:]:
            raise ValueError(
                f"a replay segment holds observations of shape {tuple(segment['obs'].shape[1:])}, "
                f"but this environment's have {tuple(self.obs.shape[1:])}."
            )
        kept = row >= self.count[column] - self.rows
        slot = (row % self.rows * self.columns + column)[kept]
        flags = pack(segment["terminated"], segment["truncated"], segment["first"])[kept.numpy()]
        self._flags.reshape(-1)[slot.numpy()] = flags
        slot = slot.to(self.device)
        self.flags[slot] = torch.from_numpy(flags).to(self.device)
        for ring, name in ((self.obs, "obs"), (self.action, "action"), (self.reward, "reward")):
            ring[slot] = segment[name][kept].to(ring)


def shape(config: Config) -> tuple[int, int]:
    """(columns, rows) of the rings."""
    return config.env.num_envs, config.replay.capacity // config.env.num_envs


def action_dtype(spec: Spec) -> torch.dtype:
    return torch.uint8 if spec.num_actions <= 256 else torch.int32


def memory(config: Config, spec: Spec) -> int:
    """Bytes of the rings, their flags and the map of starts."""
    columns, rows = shape(config)
    return rows * columns * (spec.obs_bytes + action_dtype(spec).itemsize + 4 + 1 + 1)


def to_host(x: Tensor) -> Array:
    """The tensor's own memory on the CPU, a copy otherwise."""
    return x.cpu().numpy()


def pack(terminated: Tensor, truncated: Tensor, first: Tensor) -> Array:
    """The three flags of every row as the bits of one byte."""
    a, b, c = (to_host(flag).view(np.uint8) for flag in (terminated, truncated, first))
    flags: Array = a * np.uint8(TERMINATED) | b * np.uint8(TRUNCATED) | c * np.uint8(FIRST)
    return flags


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
