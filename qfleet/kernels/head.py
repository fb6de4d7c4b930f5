"""The last layer of a scalar Q network with everything that follows it: targets, loss, and the gradient of its input.

Only the action taken has a gradient, so the layer's backward pass is one row of its weight per sample: it costs nothing
to do it here, where the weight is at hand.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from qfleet.kernels import AMD

BLOCK = 16  # samples of one program
PRECISE = tl.constexpr("ieee" if AMD else "tf32x3")  # how products of float32 are made


class Weights(NamedTuple):
    """A linear layer: weight [A, F] in the low precision, bias [A] float32."""

    weight: Tensor
    bias: Tensor


@triton.jit
def _values(
    h, w, b, row, inside, A: tl.constexpr, F: tl.constexpr, P: tl.constexpr, BM: tl.constexpr, BF: tl.constexpr
):
    """Action values [BM, P] of rows of h [., F]; columns beyond A are minus infinity."""
    a, f = tl.arange(0, P), tl.arange(0, BF)
    acc = tl.zeros((BM, P), tl.float32)
    for at in tl.static_range(0, F, BF):
        x = tl.load(h + row[:, None] * F + (at + f)[None, :], mask=inside[:, None], other=0.0)
        weight = tl.load(w + a[None, :] * F + (at + f)[:, None], mask=(a < A)[None, :], other=0.0)
        acc = tl.dot(x, weight, acc)
    acc += tl.load(b + a, mask=a < A, other=0.0)[None, :]
    return tl.where((a < A)[None, :], acc, float("-inf"))


@triton.jit
def _pick(q, action, P: tl.constexpr):
    """q[i, action[i]]."""
    return tl.sum(tl.where(tl.arange(0, P)[None, :] == action[:, None], q, 0.0), 1)


@triton.jit
def _logsumexp(q, temperature):
    top = tl.max(q, 1)
    return top + temperature * tl.log(tl.sum(tl.exp((q - top[:, None]) / temperature), 1))


@triton.jit
def _loss(
    h, target_h, w, b, target_w, target_b, action, reward, discount, weight,
    dh, g, priority, loss_part, q_part, B, alpha, temperature,
    A: tl.constexpr, F: tl.constexpr, P: tl.constexpr, BM: tl.constexpr, BF: tl.constexpr,
    DOUBLE: tl.constexpr, MUNCHAUSEN: tl.constexpr, HUBER: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0) * BM + tl.arange(0, BM)
    inside = i < B
    taken = tl.load(action + i, mask=inside, other=0).to(tl.int32)
    q = _pick(_values(h, w, b, i, inside, A, F, P, BM, BF), taken, P)
    r = tl.load(reward + i, mask=inside, other=0.0)
    # Rows B.. of `h` (double) and of `target_h` (munchausen: all; otherwise rows 0..) are those of the next observation.
    if MUNCHAUSEN:
        now = _values(target_h, target_w, target_b, i, inside, A, F, P, BM, BF)
        log_pi = _pick(now, taken, P) - _logsumexp(now, temperature)  # times the temperature
        r += alpha * tl.minimum(tl.maximum(log_pi, -1.0), 0.0)
        value = _logsumexp(_values(target_h, target_w, target_b, B + i, inside, A, F, P, BM, BF), temperature)
    else:
        after = _values(target_h, target_w, target_b, i, inside, A, F, P, BM, BF)
        if DOUBLE:
            best = tl.argmax(_values(h, w, b, B + i, inside, A, F, P, BM, BF), 1)
            value = _pick(after, best, P)
        else:
            value = tl.max(after, 1)
    error = q - (r + tl.load(discount + i, mask=inside, other=0.0) * value)
    size = tl.abs(error)
    importance = tl.load(weight + i, mask=inside, other=0.0) / B
    if HUBER:
        loss = tl.where(size < 1.0, 0.5 * error * error, size - 0.5)
        slope = tl.minimum(tl.maximum(error, -1.0), 1.0)
    else:
        loss = error * error
        slope = 2.0 * error
    slope *= importance
    tl.store(g + i, slope, mask=inside)
    tl.store(priority + i, size, mask=inside)
    tl.store(loss_part + tl.program_id(0), tl.sum(loss * importance, 0))
    tl.store(q_part + tl.program_id(0), tl.sum(tl.where(inside, q, 0.0), 0))
    f = tl.arange(0, BF)
    for at in tl.static_range(0, F, BF):
        x = tl.load(h + i[:, None] * F + (at + f)[None, :], mask=inside[:, None], other=0.0)
        row = tl.load(w + taken[:, None] * F + (at + f)[None, :], mask=inside[:, None], other=0.0).to(tl.float32)
        grad = tl.where(x > 0, slope[:, None] * row, 0.0)
        tl.store(dh + i[:, None] * F + (at + f)[None, :], grad.to(dh.dtype.element_ty), mask=inside[:, None])


@triton.jit
def _last_grad(
    h, dh, g, action, dw, db, dh_sum, B,
    A: tl.constexpr, F: tl.constexpr, P: tl.constexpr, BM: tl.constexpr, BF: tl.constexpr,
):  # fmt: skip
    a = tl.arange(0, P)
    f = tl.program_id(0) * BF + tl.arange(0, BF)
    acc = tl.zeros((P, BF), tl.float32)
    bias = tl.zeros((P,), tl.float32)
    total = tl.zeros((BF,), tl.float32)
    for m0 in range(0, B, BM):
        i = m0 + tl.arange(0, BM)
        inside = i < B
        slope = tl.load(g + i, mask=inside, other=0.0)
        taken = tl.load(action + i, mask=inside, other=0).to(tl.int32)
        at = i[:, None] * F + f[None, :]
        x = tl.load(h + at, mask=inside[:, None], other=0.0).to(tl.float32)
        hot = tl.where(a[:, None] == taken[None, :], slope[None, :], 0.0)
        acc = tl.dot(hot, x, acc, input_precision=PRECISE)
        bias += tl.sum(hot, 1)
        total += tl.sum(tl.load(dh + at, mask=inside[:, None], other=0.0).to(tl.float32), 0)
    tl.store(dw + a[:, None] * F + f[None, :], acc, mask=(a < A)[:, None])
    tl.store(dh_sum + f, total)
    if tl.program_id(0) == 0:
        tl.store(db + a, bias, mask=a < A)


@triton.jit
def _greedy(h, w, b, action, B, A: tl.constexpr, F: tl.constexpr, P: tl.constexpr, BM: tl.constexpr, BF: tl.constexpr):
    i = tl.program_id(0) * BM + tl.arange(0, BM)
    inside = i < B
    tl.store(
        action + i, tl.argmax(_values(h, w, b, i, inside, A, F, P, BM, BF), 1).to(action.dtype.element_ty), mask=inside
    )


def _sizes(layer: Weights) -> dict[str, int]:
    actions, features = layer.weight.shape
    return {"A": actions, "F": features, "P": max(16, triton.next_power_of_2(actions)), "BF": min(128, features)}


def parts(batch: int) -> int:
    """Length of `loss_part` and `q_part`."""
    return -(-batch // BLOCK)


def loss(
    h: Tensor, target_h: Tensor, layer: Weights, target: Weights,
    action: Tensor, reward: Tensor, discount: Tensor, weight: Tensor,
    dh: Tensor, g: Tensor, priority: Tensor, loss_part: Tensor, q_part: Tensor,
    *, double: bool, munchausen: bool, huber: bool, alpha: float, temperature: float,
) -> None:  # fmt: skip
    """From the features h [B or 2B, F] of both networks to dh [B, F], already masked by the ReLU before it, and g [B]."""
    batch = len(action)
    _loss[(parts(batch),)](
        h, target_h, *layer, *target, action, reward, discount, weight, dh, g, priority, loss_part, q_part,
        batch, alpha, temperature, **_sizes(layer), BM=BLOCK, DOUBLE=double, MUNCHAUSEN=munchausen, HUBER=huber, num_warps=4,
    )  # fmt: skip


def last_grad(h: Tensor, dh: Tensor, g: Tensor, action: Tensor, dw: Tensor, db: Tensor, dh_sum: Tensor) -> None:
    """Gradients of the last layer, dw [A, F] and db [A], and of the bias before it, dh_sum [F]."""
    actions, features = dw.shape
    sizes = {"A": actions, "F": features, "P": max(16, triton.next_power_of_2(actions))}
    block = 32 if features % 32 == 0 else 16
    _last_grad[(features // block,)](
        h, dh, g, action, dw, db, dh_sum, len(action), **sizes, BM=64, BF=block, num_warps=4
    )


def greedy(h: Tensor, layer: Weights, action: Tensor) -> None:
    """action [B] = the best one."""
    _greedy[(parts(len(action)),)](h, *layer, action, len(action), **_sizes(layer), BM=BLOCK, num_warps=4)
