"""Numba kernels of prioritised replay on the CPU. Imported only when that is used: importing numba takes a while.

Every kernel computes the numbers of its torch counterpart (priorities.py, storage.py), to the bit; only the powers, taken
outside by NumPy or by torch, may differ in the last one. What makes them fast is that a whole batch moves through the
tree level by level: its memory accesses are independent, so they overlap, and the choice among children has no branch
to mispredict.

Constants are compiled in, and numba's cache looks at changes of this file only: who changes one that is imported here
must touch this file too.
"""

from __future__ import annotations

import numpy as np

from qfleet.jit import kernel
from qfleet.replay.priorities import FAN
from qfleet.replay.storage import END, FIRST, TERMINATED
from qfleet.rng import _GOLDEN, _MIX1, _MIX2
from qfleet.types import Array

assert FAN == 8  # written out in `add` and `draw`
GOLDEN, MIX1, MIX2 = np.uint64(_GOLDEN), np.uint64(_MIX1), np.uint64(_MIX2)


@kernel
def uniform(key: np.uint64, counter: int, i: int) -> float:
    """Number i of draw `counter`, as qfleet.rng.uniform."""
    z = (np.uint64(i) + (np.uint64(counter) << np.uint64(32))) * GOLDEN + key
    z = (z ^ (z >> np.uint64(30))) * MIX1
    z = (z ^ (z >> np.uint64(27))) * MIX2
    z = z ^ (z >> np.uint64(31))
    return np.float64(z >> np.uint64(11)) * 2.0**-53


@kernel
def add4(t: Array, i: int) -> float:
    return (t[i] + t[i + 1]) + (t[i + 2] + t[i + 3])  # type: ignore[no-any-return]


@kernel
def add(t: Array, i: int, width: int) -> float:
    """Sum of 1, 2, 4 or 8 neighbours, pair by pair: the sum of a node is that of its halves, to the bit."""
    if width == 8:
        return add4(t, i) + add4(t, i + 4)
    if width == 4:
        return add4(t, i)
    return t[i] + t[i + 1] if width == 2 else t[i]  # type: ignore[no-any-return]


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
                tree[offset[level] + parent] = add(tree, offset[level - 1] + parent * FAN, FAN)
                node[kept] = last = parent
                kept += 1
        length = kept


@kernel
def assign(tree: Array, offset: Array, slot: Array, priority: Array) -> None:
    for i in range(len(slot)):
        tree[slot[i]] = priority[i]
    refresh(tree, offset, slot)


@kernel
def update(tree: Array, offset: Array, size: int, id: Array, priority: Array, oldest: Array, highest: Array) -> None:
    slot = np.empty_like(id)
    which = np.empty_like(id)
    columns, taken = len(oldest), 0
    for i in range(len(id)):
        row, at = id[i] // columns, id[i] % size
        age = row - oldest[id[i] - row * columns]
        if 0 <= age < size // columns and tree[at] > 0 and np.isfinite(priority[i]):
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
            # Three choices between left and right, without a branch.
            left = x[i]
            at = offset[level] + node[i] * FAN
            pair, other = tree[at] + tree[at + 1], tree[at + 4] + tree[at + 5]
            half = pair + (tree[at + 2] + tree[at + 3])
            right = left >= half
            left = left - half if right else left
            pair = other if right else pair
            child = 4 if right else 0
            right = left >= pair
            left = left - pair if right else left
            child = child + 2 if right else child
            single = tree[at + child]
            right = left >= single
            left = left - single if right else left
            child = child + right
            if tree[at + child] == 0:  # sums rounded so that x lies behind everything
                child, left = choose(tree, at, x[i])
            x[i] = left
            node[i] = node[i] * FAN + child
    for i in range(batch):
        priority[i] = tree[slot[i]]


@kernel
def choose(tree: Array, at: int, x: float) -> tuple[int, float]:
    """The same choices, but to the right only where something is: (child, what is left of x)."""
    child, width = 0, FAN // 2
    while width > 0:
        left = add(tree, at + child, width)
        if x >= left and add(tree, at + child + width, width) > 0:
            x -= left
            child += width
        width //= 2
    return child, x


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
) -> None:
    """Storage.windows: fills ints with id, action, index and next_index, floats with reward and discount, end to end.

    gamma [n + 1]: powers of the discount factor.
    """
    batch, columns, size = len(slot), len(oldest), len(flags)
    id, action = ints[:batch], ints[batch : 2 * batch]
    index, next_index = ints[2 * batch : (2 + stack) * batch], ints[(2 + stack) * batch :]
    reward, discount = floats[:batch], floats[batch:]
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
        frames(slot[b], flags, columns, index, b * stack, stack)
        frames(next_slot[b], flags, columns, next_index, b * stack, stack)


@kernel
def frames(slot: int, flags: Array, columns: int, index: Array, begin: int, stack: int) -> None:
    """Storage._frames for one slot: fills index[begin : begin + stack]."""
    at = slot
    index[begin + stack - 1] = slot
    for i in range(begin + stack - 2, begin - 1, -1):
        if at == len(flags) or flags[at] & FIRST:
            at = len(flags)
        else:
            at -= columns
            if at < 0:
                at += len(flags)
        index[i] = at
