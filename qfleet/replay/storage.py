"""The rings: every stream is stored once, and windows, stacks and next observations are gathered from its rows.

Each field is a ring of T rows and E columns, flattened: row t of column c lies at slot (t mod T) * E + c, so the row
below is E slots further, modulo T * E. Rows are numbered per column, from 0, for ever.

A row is a *start* when a whole n-step window can be gathered from it:
- the n rows below it are written, and the k - 1 rows above it (frame stack k) are not overwritten;
- no episode begins inside the window unless the window has ended before: `first` at row j needs a `terminated` row
  before j, or a `truncated` row before j - 1 (the row between them holds the observation to bootstrap from). So the row
  of a terminal observation is no start, nor is any row whose window would cross a restart.

What rows are starts is decided as they arrive: on the host (host.py), or on the device that holds the rings (device.py).
Sampling never has to wait to find out how much there is.
"""

from __future__ import annotations

from typing import Generic, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from qfleet.config import Config
from qfleet.device import Transfers
from qfleet.types import Array, Spec, State

TERMINATED, TRUNCATED, FIRST = 1, 2, 4  # bits of `flags`
END = TERMINATED | TRUNCATED
A = TypeVar("A", Array, Tensor)


class Change(NamedTuple, Generic[A]):
    """What new rows did to the starts of the columns [left, right): D x C rows fell out, M x C were decided."""

    left: int
    right: int
    dropped: A  # [D, C] int64: slots that are no starts any more
    was_start: A  # [D, C] bool: those that had been
    decided: A  # [M, C] int64: slots whose window is now complete
    is_start: A  # [M, C] bool: those that are starts


class Window(NamedTuple):
    """B windows, still without observations."""

    id: Tensor  # [B] int64
    action: Tensor  # [B] int64
    reward: Tensor  # [B] float32
    discount: Tensor  # [B] float32
    frames: Tensor  # [B * stack] int64: slots of the frames of obs, oldest first; `size` is the frame of zeros
    next_frames: Tensor  # [B * stack] int64: the same for next_obs


class Storage:
    """Rings of rows, and what is read from them. Writing is left to HostStorage and DeviceStorage."""

    def __init__(self, config: Config, spec: Spec, device: torch.device) -> None:
        self.columns, self.rows = shape(config)
        self.size = self.rows * self.columns
        self.n, self.stack = config.learner.n_step, spec.frame_stack
        assert self.rows > self.n + self.stack  # Config sees to it
        self.clip = config.env.reward_clip
        self.device, self.transfers = device, Transfers(device)
        self._input_shape = spec.input_shape
        self._gammas = [config.learner.gamma**i for i in range(self.n + 1)]
        self.gamma = torch.tensor(self._gammas, dtype=torch.float32, device=device)  # [n + 1]

        # One frame more than slots, of zeros: what a stack shows before the first frame of an episode. The large ring
        # is left untouched, so that it takes memory only as it fills.
        self.obs = torch.empty((self.size + 1, *spec.obs_shape), dtype=spec.torch_dtype, device=device)
        self.obs[-1].zero_()
        self.action = torch.zeros(self.size, dtype=action_dtype(spec), device=device)
        self.reward = torch.zeros(self.size, dtype=torch.float32, device=device)
        self.flags = torch.zeros(self.size, dtype=torch.uint8, device=device)
        self.count = torch.zeros(self.columns, dtype=torch.int64)  # [E] rows ever written; on the host
        self.oldest = torch.zeros(self.columns, dtype=torch.int64, device=device)  # [E] rows before it are no starts

    def first_start(self, count: int) -> int:
        """The oldest row that may be a start when `count` rows were written."""
        return 0 if count <= self.rows else count - self.rows + self.stack - 1

    def starts(self) -> Array:
        """[T, E] bool, on the host: which rows are starts."""
        raise NotImplementedError

    # --- reading -----------------------------------------------------------------------------------------------

    def windows(self, slot: Tensor) -> Window:
        """The windows that start at slots [B]."""
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
        discount = self.gamma[length].masked_fill(terminated, 0.0)
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
        return {"count": self.count.clone(), "is_start": torch.from_numpy(self.starts())}

    def load_state(self, state: State) -> None:
        is_start = np.asarray(state["is_start"])
        if is_start.shape != (self.rows, self.columns):
            raise ValueError(
                f"the checkpoint's replay has {is_start.shape} (rows, environments), this one {(self.rows, self.columns)}: "
                f"replay.capacity and env.num_envs must be the same."
            )
        self.count.copy_(torch.as_tensor(state["count"]))
        self.oldest.copy_(torch.tensor([self.first_start(count) for count in self.count.tolist()]))

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
