"""The writing side of a replay on a GPU: the rules of storage.py and uniform.py as tensor operations of fixed shapes.

The host never learns which rows are starts, so nothing waits: a round's rows are written, and its starts decided, by
operations that are only queued. Where a rule leaves a place empty (nothing fell out yet, a row is no start), the
operation goes to a place behind the last slot that nobody reads.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from qfleet.config import Config
from qfleet.replay.priorities import Priorities
from qfleet.replay.storage import FIRST, TERMINATED, TRUNCATED, Change, Storage
from qfleet.replay.uniform import draw
from qfleet.types import Array, Batch, Spec, State, Step

LARGEST = 2048  # batch that the kernels draw: one program holds a whole prioritised one


class DeviceStorage(Storage):
    """Rings whose starts are decided on their own device."""

    def __init__(self, config: Config, spec: Spec, device: torch.device) -> None:
        super().__init__(config, spec, device)
        self._written = torch.zeros_like(self.oldest)  # [E]: `count`, on the device
        self._is_start = torch.zeros(self.size + 1, dtype=torch.bool, device=device)
        self._ready = False

    @property
    def num_starts(self) -> int:
        return int(self._is_start[: self.size].sum())

    @property
    def ready(self) -> bool:
        """Waits for the device until there are starts, and never again."""
        self._ready = self._ready or self.num_starts > 0
        return self._ready

    def extend(self, rows: Step, column: int) -> Iterator[Change[Tensor]]:
        """As HostStorage.extend; rows may be on the host (pinned: nothing waits) or on the device."""
        length, width = rows.action.shape
        assert column >= 0 and column + width <= self.columns, (column, width, self.columns)
        obs, action, reward, *flags = self.transfers.send(rows)
        bits = flags[0] * TERMINATED | flags[1] * TRUNCATED | flags[2] * FIRST
        longest = self.rows - self.n - self.stack
        for top in range(0, length, longest):
            part = slice(top, top + longest)
            yield self._extend(obs[part], action[part], reward[part], bits[part].byte(), column)
            self.count[column : column + width] += min(longest, length - top)

    def _extend(self, obs: Tensor, action: Tensor, reward: Tensor, flags: Tensor, left: int) -> Change[Tensor]:
        """Rows [R, C] for columns left..left+C-1, each below its newest one."""
        length, width = action.shape
        column = torch.arange(left, left + width, device=self.device)
        count = self._written[left : left + width]
        down = torch.arange(length + max(self.n, self.stack), device=self.device).unsqueeze(1)

        row = count + down[:length]  # [R, C]
        slot = (row % self.rows * self.columns + column).flatten()
        flags = torch.where(row == 0, flags | FIRST, flags)  # nothing lies above row 0, whatever the environment says
        oldest, oldest_after = self._first_row(count), self._first_row(count + length)
        gone = oldest + down[: length + self.stack - 1]
        dropped = torch.where(gone < oldest_after, gone % self.rows * self.columns + column, self.size)
        was_start = self._is_start[dropped]
        self._is_start.index_fill_(0, dropped.flatten(), False)

        self.obs.index_copy_(0, slot, obs.flatten(0, 1))
        for ring, new in ((self.action, action), (self.reward, reward), (self.flags, flags)):
            ring.index_copy_(0, slot, new.flatten().to(ring.dtype))

        window = count - self.n + down[: length + self.n]  # rows whose windows are complete now, and n more
        at = window % self.rows * self.columns + column
        is_start = starts(self.flags[at], self.n) & (window[:length] >= 0)
        decided = torch.where(window[:length] >= 0, at[:length], self.size)
        self._is_start[decided] = is_start

        self._written[left : left + width] += length
        self.oldest[left : left + width] = oldest_after
        return Change(left, left + width, dropped, was_start, decided, is_start)

    def _first_row(self, count: Tensor) -> Tensor:
        """The oldest row that may be a start when `count` rows were written."""
        return torch.where(count <= self.rows, 0, count - self.rows + self.stack - 1)

    def starts(self) -> Array:
        starts: Array = self._is_start[: self.size].view(self.rows, self.columns).cpu().numpy()
        return starts

    def load_state(self, state: State) -> None:
        super().load_state(state)
        self._written.copy_(self.count)
        self._is_start[: self.size] = torch.as_tensor(state["is_start"]).flatten().to(self.device)
        self._ready = False


class DeviceUniform:
    """The starts of every column in order of age, as uniform.Uniform keeps them."""

    def __init__(self, rows: int, columns: int, device: torch.device) -> None:
        assert rows * columns < 2**31
        self.rows, self.columns = rows, columns
        self.ring = torch.zeros(rows * columns + 1, dtype=torch.int32, device=device)
        self._head = torch.zeros(columns, dtype=torch.int64, device=device)  # starts ever dropped
        self._tail = torch.zeros(columns, dtype=torch.int64, device=device)  # starts ever added
        self.place = torch.zeros(3, columns, dtype=torch.int64, device=device)

    def apply(self, change: Change[Tensor]) -> None:
        columns = slice(change.left, change.right)
        column = torch.arange(change.left, change.right, device=self.ring.device)
        self._head[columns] += change.was_start.sum(0)
        rank = change.is_start.cumsum(0) - 1  # among those added to the same column
        place = (self._tail[columns] + rank) % self.rows * self.columns + column
        self.ring[torch.where(change.is_start, place, self.rows * self.columns)] = change.decided.int()
        self._tail[columns] += change.is_start.sum(0)
        number = self._tail - self._head
        self.place[0] = self._head % self.rows
        torch.cumsum(number, 0, out=self.place[2])
        torch.sub(self.place[2], number, out=self.place[1])

    def draw(self, key: int, counter: Tensor, batch: int) -> Tensor:
        return draw(self.ring, self.place, key, counter, batch, self.rows)

    def rebuild(self, is_start: Array, oldest: Tensor) -> None:
        device = self.ring.device
        self._head.zero_()
        self._tail.zero_()
        column = torch.arange(self.columns, device=device)
        by_age = (torch.arange(self.rows, device=device).unsqueeze(1) + oldest) % self.rows  # [T, E]
        nothing = torch.zeros((0, self.columns), dtype=torch.bool, device=device)
        valid = torch.from_numpy(is_start).to(device)[by_age, column]
        self.apply(Change(0, self.columns, nothing, nothing, by_age * self.columns + column, valid))


class Drawn(NamedTuple):
    """A batch without its observations."""

    id: Tensor  # [B] int64
    action: Tensor  # [B] int64
    reward: Tensor  # [B] float32
    discount: Tensor  # [B] float32
    weight: Tensor  # [B] float32
    frames: Tensor  # [2 * B * stack] int64: slots of the frames of all obs, then of all next_obs


class Rings(NamedTuple):
    """What the kernels fold windows from."""

    action: Tensor
    reward: Tensor
    flags: Tensor
    oldest: Tensor
    gamma: Tensor


class Sampler:
    """Draws whose every changing part is a tensor, so that they can be captured: the same batches as Replay.sample.

    With `kernels` (Triton) a draw is one launch into buffers of its own; without, some hundred torch operations.
    """

    def __init__(
        self, storage: DeviceStorage, sampler: Priorities | DeviceUniform, key: int, batch: int, kernels: bool
    ) -> None:
        self._storage, self._sampler, self._key, self._batch = storage, sampler, key, batch
        self._kernels = kernels and batch <= LARGEST
        s = storage
        self._rings = Rings(s.action, s.reward, s.flags, s.oldest, s.gamma)
        ints, floats = torch.zeros(2, batch, dtype=torch.int64), torch.zeros(3, batch)
        frames = torch.zeros(2 * batch * s.stack, dtype=torch.int64)
        self._out = Drawn(*(t.to(s.device) for t in (*ints, *floats, frames)))
        offset = torch.from_numpy(sampler.offset) if isinstance(sampler, Priorities) else torch.zeros(0)
        self._offset = offset.to(s.device, torch.int64)
        self._priority = torch.zeros(batch, dtype=torch.float64, device=s.device)

    @property
    def changed(self) -> list[Tensor]:
        """What `update` changes."""
        p = self._sampler
        return [p.tree, p.highest] if isinstance(p, Priorities) else []

    def draw(self, counter: Tensor, beta: Tensor) -> Drawn:
        """The batch of update `counter` [1] int64, with importance weights to the power `beta` [1] float32."""
        if self._kernels:
            from qfleet.replay import device_kernels as sampling

            s, out = self._storage, (self._rings, self._out)
            if isinstance(self._sampler, Priorities):
                tree = (self._sampler.tree, self._offset, beta, self._priority)
                sampling.prioritized(self._key, counter, *tree, *out, rows=s.rows, clip=s.clip, stack=s.stack)
            else:
                starts = (self._sampler.ring, self._sampler.place)
                sampling.uniform(self._key, counter, *starts, *out, rows=s.rows, clip=s.clip, stack=s.stack)
            return self._out
        if isinstance(self._sampler, Priorities):
            slot, weight = self._sampler.draw_torch(self._key, counter, self._batch, beta)
        else:
            slot = self._sampler.draw(self._key, counter, self._batch)
            weight = torch.ones_like(slot, dtype=torch.float32)
        w = self._storage.windows(slot)
        return Drawn(w.id, w.action, w.reward, w.discount, weight, torch.cat((w.frames, w.next_frames)))

    def update(self, id: Tensor, error: Tensor) -> None:
        """New priorities; nothing for uniform sampling."""
        if not isinstance(self._sampler, Priorities):
            return
        if self._kernels:
            from qfleet.replay import device_kernels as sampling

            p, oldest = self._sampler, self._storage.oldest
            sampling.update(p.tree, self._offset, id, error, oldest, p.highest, rows=self._storage.rows, alpha=p.alpha)
        else:
            self._sampler.update(id, error, self._storage.oldest)

    @property
    def frames(self) -> Tensor:
        """All stored observations, and one of zeros: what `Drawn.frames` counts in."""
        return self._storage.obs

    def batch(self, drawn: Drawn) -> Batch:
        obs, next_obs = self._storage.observations(drawn.frames).chunk(2)
        return Batch(obs, drawn.action, drawn.reward, drawn.discount, next_obs, drawn.id, drawn.weight)


def starts(flags: Tensor, n: int) -> Tensor:
    """Which of the rows [M + n, C] are starts, as far as their flags say: [M, C]. As host.starts."""
    length = len(flags) - n
    valid = torch.ones((length, flags.shape[1]), dtype=torch.bool, device=flags.device)
    ended = torch.zeros_like(valid)
    for i in range(1, n + 1):
        ended = ended | ((flags[i - 1 : i - 1 + length] & TERMINATED) != 0)
        if i > 1:
            ended = ended | ((flags[i - 2 : i - 2 + length] & TRUNCATED) != 0)
        valid = valid & (((flags[i : i + length] & FIRST) == 0) | ended)
    return valid
