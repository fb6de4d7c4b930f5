"""Numba kernels of prioritised replay on the CPU. Imported only when that is used: importing numba takes a while.

Every kernel computes the numbers of its torch counterpart (priorities.py, storage.py), to the bit. What makes them
fast is that a whole batch moves through the tree level by level: its memory accesses are independent, so they
overlap, and the choice among children has no branch to mispredict.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import numpy as np
from numba import njit

from qfleet.replay.priorities import FAN
from qfleet.replay.storage import END, FIRST, TERMINATED
from qfleet.rng import _GOLDEN, _MIX1, _MIX2
from qfleet.types import Array

F = TypeVar("F", bound=Callable[..., object])

assert FAN == 8  # written out in add_children
GOLDEN, MIX1, MIX2 = np.uint64(_GOLDEN), np.uint64(_MIX1), np.uint64(_MIX2)


def kernel(function: F) -> F:
    """Compiled at its first call, without the interpreter lock, and cached on disk where a folder can be written."""
    try:
        compiled: F = njit(nogil=True, error_model="numpy", cache=True)(function)
    except RuntimeError:  # neither the package's folder nor the user's cache folder can be written
        compiled = njit(nogil=True, error_model="numpy")(function)
    return compiled


@kernel
def uniform(key: np.uint64, counter: int, i: int) -> float:
    """Number i of draw `counter`, as qfleet.rng.uniform."""
    z = (np.uint64(i) + (np.uint64(counter) << np.uint64(32))) * GOLDEN + key
    z = (z ^ (z >> np.uint64(30))) * MIX1
    z = (z ^ (z >> np.uint64(27))) * MIX2
    z = z ^ (z >> np.uint64(31))
    return np.float64(z >> np.uint64(11)) * 2.0**-53


@kernel
def add_children(tree: Array, at: int) -> float:
    t = tree[at : at + 8]
    return ((t[0] + t[4]) + (t[2] + t[6])) + ((t[1] + t[5]) + (t[3] + t[7]))  # type: ignore[no-any-return]


@kernel
def refresh(tree: Array, offset: Array, slot: Array) -> None:
    """Recompute everything above the leaves slot [B]. Neighbours in slot that share a parent cost one visit."""
    node = slot.copy()
    length = len(node)
    for level in range(1, len(offset)):
        kept, last = 0, -1
        for i in range(length):
            parent = node[i] // FAN
            if parent != last:
                tree[offset[level] + parent] = add_children(tree, offset[level - 1] + parent * FAN)
                node[kept] = last = parent
                kept += 1
        length = kept


@kernel
def assign(tree: Array, offset: Array, slot: Array, priority: Array) -> None:
    for i in range(len(slot)):
        tree[slot[i]] = priority[i]
    refresh(tree, offset, slot)


@kernel
def update(
    tree: Array, offset: Array, size: int, id: Array, priority: Array, oldest: Array, highest: Array
) -> None:
    slot = np.empty_like(id)
    which = np.empty_like(id)
    taken = 0
    for i in range(len(id)):
        row, at = id[i] // len(oldest), id[i] % size
        if row >= oldest[id[i] - row * len(oldest)] and tree[at] > 0 and np.isfinite(priority[i]):
            slot[taken], which[taken] = at, i
            taken += 1
    # The maximum of the new priorities of a slot, whatever its old one: from 0 on.
    for i in range(taken):
        tree[slot[i]] = 0.0
    for i in range(taken):
        new = np.float64(priority[which[i]])
        tree[slot[i]] = max(tree[slot[i]], new)
        highest[0] = max(highest[0], new)
    refresh(tree, offset, slot[:taken])


@kernel
def draw(tree: Array, offset: Array, key: np.uint64, counter: int, slot: Array, priority: Array) -> None:
    """Fills slot [B] and priority [B]."""
    batch = len(slot)
    x, node = priority, slot  # on the way down: what is left to walk, and how far we are
    total = tree[offset[-1]]
    for i in range(batch):
        x[i] = (i + uniform(key, counter, i)) / batch * total
        node[i] = 0
    for level in range(len(offset) - 2, -1, -1):
        for i in range(batch):
            first = offset[level] + node[i] * FAN
            left = x[i]
            passed, child, acc = 0.0, 0, 0.0
            for j in range(FAN):
                acc += tree[first + j]
                behind = acc <= left
                child += behind
                passed = acc if behind else passed
            if child == FAN:  # rounding put x behind all children: take the last one that is not 0
                child, passed = last_child(tree, first)
            x[i] = left - passed
            node[i] = node[i] * FAN + child
    for i in range(batch):
        priority[i] = tree[slot[i]]


@kernel
def last_child(tree: Array, first: int) -> tuple[int, float]:
    """The last child that adds to the sum, and the sum of those before it."""
    child, before, acc = 0, 0.0, 0.0
    for j in range(FAN):
        if acc + tree[first + j] > acc:
            child, before = j, acc
        acc += tree[first + j]
    return child, before


@kernel
def windows(
    slot: Array,
    action_ring: Array,
    reward_ring: Array,
    flags: Array,
    gamma: Array,
    oldest: Array,
    rows: int,
    clip: float,
    stack: int,
    ints: Array,
    floats: Array,
    index: Array,
) -> None:
    """Storage.windows; fills the last three, [2, B or B * stack] each. gamma [n + 1]: powers of the discount factor."""
    id, action, reward, discount = ints[0], ints[1], floats[0], floats[1]
    batch, columns, size = len(slot), len(oldest), len(flags)
    bound = np.float32(clip)
    for b in range(batch):
        action[b] = action_ring[slot[b]]
    for b in range(batch):
        at = slot[b] // columns
        column = slot[b] - at * columns
        row = oldest[column] + (at - oldest[column]) % rows
        id[b] = row * columns + column

    next_slot = slot.copy()
    ended = np.zeros(batch, dtype=np.bool_)
    reward[:] = 0
    for step in range(len(gamma) - 1):
        for b in range(batch):
            if not ended[b]:
                at = next_slot[b]
                raw = reward_ring[at]
                if clip > 0:
                    raw = min(max(raw, -bound), bound)
                reward[b] += raw * gamma[step]
                discount[b] = np.float32(0) if flags[at] & TERMINATED else gamma[step + 1]
                ended[b] = flags[at] & END
                at += columns
                next_slot[b] = at if at < size else at - size
    for b in range(batch):
        frames(slot[b], flags, columns, index[0, b * stack : (b + 1) * stack])
        frames(next_slot[b], flags, columns, index[1, b * stack : (b + 1) * stack])


@kernel
def frames(slot: int, flags: Array, columns: int, index: Array) -> None:
    """Storage._frames for one slot: fills index [stack]."""
    at = slot
    index[-1] = slot
    for i in range(len(index) - 2, -1, -1):
        if at == len(flags) or flags[at] & FIRST:
            at = len(flags)
        else:
            at -= columns
            if at < 0:
                at += len(flags)
        index[i] = at
