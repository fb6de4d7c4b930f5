"""Sampling from a replay on the device: draw starts, fold their windows, gather their frames, keep the sum tree.

The same numbers as the torch code in qfleet.replay, in three or four launches instead of a hundred.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from qfleet.replay.device import LARGEST, Drawn, Rings
from qfleet.replay.priorities import EPSILON
from qfleet.replay.storage import END, FIRST, TERMINATED
from qfleet.rng import _GOLDEN, _MIX1, _MIX2, _signed

GOLDEN, MIX1, MIX2 = tl.constexpr(_GOLDEN), tl.constexpr(_MIX1), tl.constexpr(_MIX2)
F_TERMINATED, F_END, F_FIRST = tl.constexpr(TERMINATED), tl.constexpr(END), tl.constexpr(FIRST)


@triton.jit
def _random(key, counter, i):
    """rng.uniform: number i of draw `counter`, float64."""
    z = (i.to(tl.uint64) + (counter.to(tl.uint64) << 32)) * GOLDEN + key.to(tl.uint64)
    z = (z ^ (z >> 30)) * MIX1
    z = (z ^ (z >> 27)) * MIX2
    z = z ^ (z >> 31)
    return (z >> 11).to(tl.float64) * 1.1102230246251565e-16  # 2 ** -53


@triton.jit
def _stack(flags, frames, slot, at, inside, E, size, STACK: tl.constexpr):
    """Slots of the stack that ends at `slot`, to frames[at * STACK ...], oldest first; `size` is the frame of zeros."""
    same = slot >= 0
    tl.store(frames + at * STACK + STACK - 1, slot, mask=inside)
    for k in tl.static_range(1, STACK):
        same = same & ((tl.load(flags + slot, mask=inside, other=0) & F_FIRST) == 0)
        slot = (slot - E + size) % size
        tl.store(frames + at * STACK + STACK - 1 - k, tl.where(same, slot, size), mask=inside)


@triton.jit
def _fold(
    slot, i, inside, B, action, reward, flags, oldest, gamma, out_id, out_action, out_reward, out_discount, frames,
    E, T, clip, STEPS: tl.constexpr, STACK: tl.constexpr,
):  # fmt: skip
    """The n-step window that starts at each slot [BM] (int64), as sample i of B."""
    size = E.to(tl.int64) * T
    total = tl.zeros(slot.shape, tl.float32)
    length = tl.zeros(slot.shape, tl.int32)
    alive = slot >= 0
    terminated = slot < 0
    for k in tl.static_range(STEPS):
        at = (slot + k * E) % size
        f = tl.load(flags + at, mask=inside, other=0)
        r = tl.load(reward + at, mask=inside, other=0.0)
        r = tl.where(clip > 0, tl.minimum(tl.maximum(r, -clip), clip), r)
        total = tl.where(alive, total + r * tl.load(gamma + k), total)
        length += alive.to(tl.int32)
        terminated = terminated | (alive & ((f & F_TERMINATED) != 0))
        alive = alive & ((f & F_END) == 0)
    column = slot % E
    first = tl.load(oldest + column, mask=inside, other=0)
    row = first + (slot // E - first % T + T) % T
    tl.store(out_id + i, row * E + column, mask=inside)
    tl.store(out_action + i, tl.load(action + slot, mask=inside, other=0).to(tl.int64), mask=inside)
    tl.store(out_reward + i, total, mask=inside)
    tl.store(out_discount + i, tl.where(terminated, 0.0, tl.load(gamma + length, mask=inside, other=0.0)), mask=inside)
    _stack(flags, frames, slot, i, inside, E, size, STACK)
    _stack(flags, frames, (slot + length * E) % size, B + i, inside, E, size, STACK)


@triton.jit(do_not_specialize=["B", "E", "T"])
def _uniform(
    key, counter, ring, place, out_weight,
    action, reward, flags, oldest, gamma, out_id, out_action, out_reward, out_discount, frames, B, E, T, clip,
    COLUMNS: tl.constexpr, STEPS: tl.constexpr, STACK: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0) * BM + tl.arange(0, BM)
    inside = i < B
    starts = tl.load(place + 3 * E - 1)
    chosen = (_random(key, tl.load(counter), i) * starts.to(tl.float64)).to(tl.int64)
    # The column that holds it: as many lie before as have no more starts up to their end. One load, no search.
    e = tl.arange(0, COLUMNS)
    until = tl.load(place + 2 * E + e, mask=e < E, other=9223372036854775807)
    column = tl.sum((until[None, :] <= chosen[:, None]).to(tl.int64), 1)
    column = tl.minimum(column, (E - 1).to(tl.int64))
    at = tl.load(place + column, mask=inside, other=0) + chosen - tl.load(place + E + column, mask=inside, other=0)
    slot = tl.load(ring + at % T * E + column, mask=inside, other=0).to(tl.int64)
    tl.store(out_weight + i, tl.full((BM,), 1.0, tl.float32), mask=inside)
    _fold(
        slot, i, inside, B, action, reward, flags, oldest, gamma, out_id, out_action, out_reward, out_discount, frames,
        E, T, clip, STEPS, STACK,
    )  # fmt: skip


@triton.jit(do_not_specialize=["B", "E", "T"])
def _prioritized(
    key, counter, tree, offset, out_priority,
    action, reward, flags, oldest, gamma, out_id, out_action, out_reward, out_discount, frames, B, E, T, clip,
    LEVELS: tl.constexpr, STEPS: tl.constexpr, STACK: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0) * BM + tl.arange(0, BM)
    inside = i < B
    total = tl.load(tree + tl.load(offset + LEVELS - 1))
    x = (i.to(tl.float64) + _random(key, tl.load(counter), i)) / B.to(tl.float64) * total
    node = tl.zeros((BM,), tl.int64)
    for k in tl.static_range(1, LEVELS):
        at = tree + tl.load(offset + LEVELS - 1 - k) + node * 8
        c0, c1 = tl.load(at, mask=inside, other=0.0), tl.load(at + 1, mask=inside, other=0.0)
        c2, c3 = tl.load(at + 2, mask=inside, other=0.0), tl.load(at + 3, mask=inside, other=0.0)
        c4, c5 = tl.load(at + 4, mask=inside, other=0.0), tl.load(at + 5, mask=inside, other=0.0)
        c6, c7 = tl.load(at + 6, mask=inside, other=0.0), tl.load(at + 7, mask=inside, other=0.0)
        p0, p1, p2, p3 = c0 + c1, c2 + c3, c4 + c5, c6 + c7
        left, right = p0 + p1, p2 + p3
        go = (x >= left) & (right > 0)  # to the right only where something is: sums round
        x = tl.where(go, x - left, x)
        node = node * 8 + go.to(tl.int64) * 4
        left, right = tl.where(go, p2, p0), tl.where(go, p3, p1)
        c0, c1, c2, c3 = tl.where(go, c4, c0), tl.where(go, c5, c1), tl.where(go, c6, c2), tl.where(go, c7, c3)
        go = (x >= left) & (right > 0)
        x = tl.where(go, x - left, x)
        node += go.to(tl.int64) * 2
        left, right = tl.where(go, c2, c0), tl.where(go, c3, c1)
        go = (x >= left) & (right > 0)
        x = tl.where(go, x - left, x)
        node += go.to(tl.int64)
    tl.store(out_priority + i, tl.load(tree + node, mask=inside, other=0.0), mask=inside)
    _fold(
        node, i, inside, B, action, reward, flags, oldest, gamma, out_id, out_action, out_reward, out_discount, frames,
        E, T, clip, STEPS, STACK,
    )  # fmt: skip


@triton.jit(do_not_specialize=["B"])
def _weights(priority, beta, out_weight, B, BM: tl.constexpr):
    i = tl.arange(0, BM)
    p = tl.load(priority + i, mask=i < B, other=float("inf"))
    ratio = tl.where(i < B, tl.min(p, 0) / p, 1.0).to(tl.float32)
    tl.store(out_weight + i, tl.exp2(tl.log2(ratio) * tl.load(beta)), mask=i < B)


@triton.jit(do_not_specialize=["B", "E", "T"])
def _update(
    tree, offset, id, error, oldest, highest, B, E, T, alpha, epsilon, LEVELS: tl.constexpr, BM: tl.constexpr
):  # fmt: skip
    i = tl.arange(0, BM)
    inside = i < B
    size = E.to(tl.int64) * T
    row_id = tl.load(id + i, mask=inside, other=0)
    slot, column = row_id % size, row_id % E
    age = row_id // E - tl.load(oldest + column, mask=inside, other=0)
    e = tl.load(error + i, mask=inside, other=0.0)
    priority = tl.exp2(tl.log2(tl.abs(e) + epsilon) * alpha)
    taken = (
        inside & (age >= 0) & (age < T) & (tl.load(tree + slot, mask=inside, other=0.0) > 0) & (priority < float("inf"))
    )
    new = tl.where(taken, priority, 0.0).to(tl.float64)
    tl.debug_barrier()
    tl.store(tree + slot, tl.zeros((BM,), tl.float64), mask=taken)
    tl.debug_barrier()
    # Positive floats are ordered as their bits are: the highest wins where a slot stands twice.
    bits = (tree + slot).to(tl.pointer_type(tl.int64), bitcast=True)
    tl.atomic_max(bits, new.to(tl.int64, bitcast=True), mask=taken)
    tl.debug_barrier()
    node = slot
    for k in tl.static_range(1, LEVELS):
        node = node // 8
        at = tree + tl.load(offset + k - 1) + node * 8
        c0, c1 = tl.load(at, mask=taken, other=0.0), tl.load(at + 1, mask=taken, other=0.0)
        c2, c3 = tl.load(at + 2, mask=taken, other=0.0), tl.load(at + 3, mask=taken, other=0.0)
        c4, c5 = tl.load(at + 4, mask=taken, other=0.0), tl.load(at + 5, mask=taken, other=0.0)
        c6, c7 = tl.load(at + 6, mask=taken, other=0.0), tl.load(at + 7, mask=taken, other=0.0)
        total = ((c0 + c1) + (c2 + c3)) + ((c4 + c5) + (c6 + c7))
        tl.store(tree + tl.load(offset + k) + node, total, mask=taken)
        tl.debug_barrier()
    tl.store(highest, tl.maximum(tl.load(highest), tl.max(new, 0)))


@triton.jit
def _gather(obs, frames, out, WORDS: tl.constexpr, Q: tl.constexpr, STACK: tl.constexpr, BQ: tl.constexpr):
    # One program: a row of 4 x 4 blocks of one sample. Four neighbouring pixels are one 32-bit word of a frame, and
    # become four neighbouring channels. Bytes are whole numbers up to 255: exact in bf16.
    sample, y = tl.program_id(0), tl.program_id(1)
    x, word = tl.arange(0, BQ), tl.arange(0, 4 * STACK)
    slot = tl.load(frames + sample * STACK + word // 4)
    at = slot * WORDS + (y * 4 + word % 4) * Q
    pixels = tl.load(obs + at[None, :] + x[:, None], mask=(x < Q)[:, None], other=0)
    low = tl.join(pixels & 255, (pixels >> 8) & 255)
    high = tl.join((pixels >> 16) & 255, (pixels >> 24) & 255)
    channels = tl.reshape(tl.permute(tl.join(low, high), (0, 1, 3, 2)), (BQ, 16 * STACK))
    to = ((sample * tl.num_programs(1) + y) * Q + x)[:, None] * (16 * STACK) + tl.arange(0, 16 * STACK)[None, :]
    tl.store(out + to, channels.to(tl.float32).to(out.dtype.element_ty), mask=(x < Q)[:, None])


def uniform(key: int, counter: Tensor, ring: Tensor, place: Tensor, rings: Rings, out: Drawn, *, rows: int, clip: float, stack: int) -> None:  # fmt: skip
    """Batch `counter` [1] of uniform starts; ring and place as in replay.uniform."""
    batch, columns = len(out.action), len(rings.oldest)
    _uniform[(-(-batch // 32),)](
        _signed(key), counter, ring, place, out.weight, *rings, *out[:4], out.frames, batch, columns, rows, clip,
        COLUMNS=triton.next_power_of_2(columns), STEPS=len(rings.gamma) - 1, STACK=stack, BM=32, num_warps=4,
    )  # fmt: skip


def prioritized(key: int, counter: Tensor, tree: Tensor, offset: Tensor, beta: Tensor, priority: Tensor, rings: Rings, out: Drawn, *, rows: int, clip: float, stack: int) -> None:  # fmt: skip
    """Batch `counter` [1] in proportion to the priorities; tree as in replay.priorities, offset [levels] on the device.

    priority [B] float64 becomes those of the batch.
    """
    batch = len(out.action)
    assert batch <= LARGEST
    _prioritized[(-(-batch // 32),)](
        _signed(key), counter, tree, offset, priority, *rings, *out[:4], out.frames, batch, len(rings.oldest), rows, clip,
        LEVELS=len(offset), STEPS=len(rings.gamma) - 1, STACK=stack, BM=32, num_warps=1,
    )  # fmt: skip
    _weights[(1,)](priority, beta, out.weight, batch, BM=triton.next_power_of_2(batch), num_warps=8)


def update(tree: Tensor, offset: Tensor, id: Tensor, error: Tensor, oldest: Tensor, highest: Tensor, *, rows: int, alpha: float) -> None:  # fmt: skip
    """New priorities of sampled ids, as Priorities.update."""
    batch = len(id)
    assert batch <= LARGEST
    _update[(1,)](
        tree, offset, id, error, oldest, highest, batch, len(oldest), rows, alpha, EPSILON,
        LEVELS=len(offset), BM=triton.next_power_of_2(batch), num_warps=8 if batch > 256 else 4,
    )  # fmt: skip


def gather(obs: Tensor, frames: Tensor, out: Tensor, stack: int) -> None:
    """uint8 frames [., H, W] at slots [B * stack] -> out [B, H/4, W/4, 16 * stack]: space-to-depth, whole numbers 0..255."""
    height, width = obs.shape[1:]
    words = obs.view(torch.int32)
    _gather[(len(frames) // stack, height // 4)](
        words, frames, out, WORDS=height * width // 4, Q=width // 4, STACK=stack, BQ=triton.next_power_of_2(width // 4), num_warps=2
    )  # fmt: skip
