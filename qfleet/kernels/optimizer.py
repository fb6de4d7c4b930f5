"""Gradient parts summed, clipped and applied by Adam, and the low-precision copy written: two kernels over one flat buffer."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE, BLOCK = 128, 4096  # numbers a program reduces: where they come in parts, and where not
LOG_BETA1, LOG_BETA2 = tl.constexpr(math.log2(0.9)), tl.constexpr(math.log2(0.999))


@triton.jit
def _reduce(
    grad, part, square, counter, loss_part, q_part, loss_sum, q_mean, size, stride, in_parts, batch,
    end1, end2, splits1, splits2, splits3,
    ROWS: tl.constexpr, LOSSES: tl.constexpr, LOSSES_POW2: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    tiles = tl.cdiv(in_parts, TILE)
    if pid < tiles:
        i, row = pid * TILE + tl.arange(0, TILE), tl.arange(0, ROWS)
        rows = tl.where(i < end1, splits1, tl.where(i < end2, splits2, splits3))
        used = (row[:, None] < rows[None, :]) & (i < in_parts)[None, :]
        g = tl.sum(tl.load(part + row[:, None] * stride + i[None, :], mask=used, other=0.0), 0)
        tl.store(grad + i, g, mask=i < in_parts)
        tl.store(square + pid, tl.sum(g * g, 0))
    else:
        j = in_parts + (pid - tiles) * BLOCK + tl.arange(0, BLOCK)
        rest = tl.load(grad + j, mask=j < size, other=0.0)
        tl.store(square + pid, tl.sum(rest * rest, 0))
    if pid == 0:
        tl.store(counter, tl.load(counter) + 1)
        k = tl.arange(0, LOSSES_POW2)
        loss = tl.sum(tl.load(loss_part + k, mask=k < LOSSES, other=0.0), 0)
        tl.store(loss_sum, tl.load(loss_sum) + loss.to(tl.float64))
        tl.store(q_mean, tl.sum(tl.load(q_part + k, mask=k < LOSSES, other=0.0), 0) / batch)


@triton.jit
def _squares(grad, square, size, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    g = tl.load(grad + i, mask=i < size, other=0.0).to(tl.float32)
    tl.store(square + tl.program_id(0), tl.sum(g * g, 0))


@triton.jit
def _adam(
    data, grad, m, v, low, square, counter, lr_at, size, clip, eps, decay,
    PARTS: tl.constexpr, PARTS_POW2: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = i < size
    p = tl.arange(0, PARTS_POW2)
    norm = tl.sqrt(tl.sum(tl.load(square + p, mask=p < PARTS, other=0.0), 0))
    step = tl.load(counter).to(tl.float64)
    lr = tl.load(lr_at)
    g = tl.load(grad + i, mask=inside, other=0.0).to(tl.float32)
    if clip > 0:
        g *= tl.minimum(1.0, clip / (norm + 1e-6))
    mm = tl.load(m + i, mask=inside, other=0.0)
    mm += (g - mm) * 0.1
    vv = 0.999 * tl.load(v + i, mask=inside, other=0.0) + 0.001 * g * g
    first = (1.0 - tl.exp2(step * LOG_BETA1)).to(tl.float32)  # 1 - 0.9 ** step
    second = (1.0 - tl.exp2(step * LOG_BETA2)).to(tl.float32)
    x = tl.load(data + i, mask=inside, other=0.0)
    x = x * (1.0 - lr * decay) - lr / first * mm / (tl.sqrt(vv) / tl.sqrt(second) + eps)
    tl.store(data + i, x, mask=inside)
    tl.store(m + i, mm, mask=inside)
    tl.store(v + i, vv, mask=inside)
    tl.store(low + i, x.to(low.dtype.element_ty), mask=inside)


@triton.jit
def _nothing(x):
    tl.store(x, tl.load(x))


def launch_nothing(device: torch.device) -> None:
    """Compile and launch a kernel; raises where that is not possible."""
    _nothing[(1,)](torch.zeros(1, device=device))


def programs(size: int, in_parts: int) -> int:
    """Length of `square`."""
    return -(-in_parts // TILE) + -(-(size - in_parts) // BLOCK)


def reduce(
    grad: Tensor, part: Tensor, ends: Sequence[int], splits: Sequence[int], square: Tensor, counter: Tensor,
    loss_part: Tensor, q_part: Tensor, loss_sum: Tensor, q_mean: Tensor, batch: int,
) -> None:  # fmt: skip
    """The first numbers of grad become the sums of part [rows, n] over its rows; square: sums of squares of grad.

    The numbers before ends[0] come in splits[0] rows, those before ends[1] in splits[1], the others in splits[2].
    And what closes an update: counter += 1, loss_sum += the loss, q_mean = the mean value of the actions taken.
    """
    size, (rows, in_parts), losses = grad.numel(), part.shape, len(loss_part)
    _reduce[(programs(size, in_parts),)](
        grad, part, square, counter, loss_part, q_part, loss_sum, q_mean, size, part.stride(0), in_parts, batch, *ends, *splits,
        ROWS=triton.next_power_of_2(rows), LOSSES=losses, LOSSES_POW2=triton.next_power_of_2(losses), TILE=TILE, BLOCK=BLOCK,
        num_warps=8,
    )  # fmt: skip


def squares(grad: Tensor, square: Tensor) -> None:
    """square [programs(size, 0)]: sums of squares of parts of grad, for `adam` to clip by."""
    _squares[(len(square),)](grad, square, grad.numel(), BLOCK=BLOCK, num_warps=4)


def adam(
    data: Tensor, grad: Tensor, m: Tensor, v: Tensor, low: Tensor, square: Tensor, counter: Tensor, lr: Tensor,
    *, clip: float, eps: float, decay: float,
) -> None:  # fmt: skip
    """torch.optim.Adam on one flat buffer after clipping by the global norm; `low` becomes the new parameters, rounded."""
    size, count = data.numel(), square.numel()
    _adam[(-(-size // 1024),)](
        data, grad, m, v, low, square, counter, lr, size, clip, eps, decay,
        PARTS=count, PARTS_POW2=triton.next_power_of_2(count), BLOCK=1024, num_warps=4,
    )  # fmt: skip
