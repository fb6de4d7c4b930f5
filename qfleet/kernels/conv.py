"""Convolutions of the Nature network as implicit matrix products, with what stands beside them fused in.

A kernel row of a convolution over [B, H, W, C] reads ROW = width * C neighbouring numbers, so the product runs over
plain runs of memory: no copy of patches is ever made. Weights are [N, kernel height, ROW], as a channels-last
nn.Conv2d weight lies in memory. These shapes have 32 or 64 output channels, where cuDNN picks kernels of half the
speed (benchmarks/results/gpu.md).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

import triton
import triton.language as tl
from torch import Tensor

from qfleet.kernels import AMD

STAGES = 2 if AMD else 3  # blocks that are on their way from memory at once
MOST_SPLITS = 128  # parts of a weight gradient, which are summed later, always in the same order


@dataclass(frozen=True)
class Shape:
    """One convolution. Square; height and width are multiples of the stride in `input_grad`."""

    H: int  # input side
    C: int  # input channels
    OUT: int  # output side
    S: int  # stride
    K: int  # kernel side
    N: int  # output channels

    @property
    def weights(self) -> int:
        return self.N * self.K * self.K * self.C


@triton.jit
def _forward(
    x, w, b, y, M, scale,
    H: tl.constexpr, C: tl.constexpr, OUT: tl.constexpr, S: tl.constexpr, K: tl.constexpr, N: tl.constexpr,
    BM: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    n, k = tl.arange(0, N), tl.arange(0, BK)
    inside = m < M
    place = m % (OUT * OUT)
    corner = ((m // (OUT * OUT) * H + place // OUT * S) * H + place % OUT * S) * C
    acc = tl.zeros((BM, N), tl.float32)
    for row in tl.static_range(K):
        for at in tl.static_range(0, K * C, BK):
            patch = tl.load(x + (corner + row * (H * C) + at)[:, None] + k[None, :], mask=inside[:, None], other=0.0)
            weight = tl.load(w + n[None, :] * (K * K * C) + (row * (K * C) + at + k)[:, None])
            acc = tl.dot(patch, weight, acc)
    acc = tl.maximum(acc * scale + tl.load(b + n)[None, :].to(tl.float32), 0.0)
    tl.store(y + m[:, None] * N + n[None, :], acc.to(y.dtype.element_ty), mask=inside[:, None])


@triton.jit
def _weight_grad(
    x, dy, y, part, bias_part, M, scale, stride, splits,
    H: tl.constexpr, C: tl.constexpr, OUT: tl.constexpr, S: tl.constexpr, K: tl.constexpr, N: tl.constexpr,
    MASKED: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    tile, split = tl.program_id(0), tl.program_id(1)
    row, at = tile // (K * C // BK), tile % (K * C // BK) * BK
    n, k = tl.arange(0, N), tl.arange(0, BK)
    acc = tl.zeros((BK, N), tl.float32)  # this way round: tensor cores want 64 rows at least
    bias = tl.zeros((N,), tl.float32)
    share = tl.cdiv(tl.cdiv(M, splits), BM) * BM
    for m0 in range(split * share, tl.minimum((split + 1) * share, M), BM):
        m = m0 + tl.arange(0, BM)
        inside = m < M
        place = m % (OUT * OUT)
        corner = ((m // (OUT * OUT) * H + place // OUT * S + row) * H + place % OUT * S) * C + at
        patch = tl.load(x + corner[:, None] + k[None, :], mask=inside[:, None], other=0.0)
        g = tl.load(dy + m[:, None] * N + n[None, :], mask=inside[:, None], other=0.0)
        if MASKED:
            g = tl.where(tl.load(y + m[:, None] * N + n[None, :], mask=inside[:, None], other=0.0) > 0, g, 0.0)
        acc = tl.dot(tl.trans(patch), g, acc)
        if tile == 0:
            bias += tl.sum(g.to(tl.float32), 0)
    tl.store(part + split * stride + n[None, :] * (K * K * C) + (row * (K * C) + at + k)[:, None], acc * scale)
    if tile == 0:
        tl.store(bias_part + split * stride + n, bias)


@triton.jit
def _input_grad(
    dy, y, w, x, dx, M,
    H: tl.constexpr, C: tl.constexpr, OUT: tl.constexpr, S: tl.constexpr, K: tl.constexpr, N: tl.constexpr,
    MASKED: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    # One row: a block of S x S input pixels, all of which are met by the same outputs, each through other kernel taps.
    Q: tl.constexpr = H // S
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    n, col = tl.arange(0, N), tl.arange(0, S * S * C)
    py, px, c = col // (S * C), col // C % S, col % C
    inside = m < M
    image, i, j = m // (Q * Q), m % (Q * Q) // Q, m % Q
    acc = tl.zeros((BM, S * S * C), tl.float32)
    for ty in tl.static_range(K // S):
        for tx in tl.static_range(K // S):
            oy, ox = i - ty, j - tx
            met = inside & (oy >= 0) & (oy < OUT) & (ox >= 0) & (ox < OUT)
            at = ((image * OUT + oy) * OUT + ox)[:, None] * N + n[None, :]
            g = tl.load(dy + at, mask=met[:, None], other=0.0)
            if MASKED:
                g = tl.where(tl.load(y + at, mask=met[:, None], other=0.0) > 0, g, 0.0)
            tap = (py + ty * S) * K + px + tx * S
            acc = tl.dot(g, tl.load(w + n[:, None] * (K * K * C) + (tap * C + c)[None, :]), acc)
    at = ((image * H + i * S) * H + j * S)[:, None] * C + ((py * H + px) * C + c)[None, :]
    acc = tl.where(tl.load(x + at, mask=inside[:, None], other=0.0) > 0, acc, 0.0)
    tl.store(dx + at, acc.to(dx.dtype.element_ty), mask=inside[:, None])


def forward(shape: Shape, x: Tensor, w: Tensor, b: Tensor, y: Tensor, scale: float = 1.0) -> None:
    """y [B, OUT, OUT, N] = relu(scale * conv(x [B, H, H, C], w) + b)."""
    m = len(x) * shape.OUT**2
    block, warps = (64, 4) if m < 1 << 15 else (128, 8)
    wide = 128 if shape.K * shape.C % 128 == 0 else 64
    _forward[(triton.cdiv(m, block),)](
        x, w, b, y, m, scale, **asdict(shape), BM=block, BK=wide, num_warps=warps, num_stages=STAGES
    )


def splits(shape: Shape, batch: int) -> int:
    """Parts in which a weight gradient is summed: enough to fill the GPU, each of some hundred rows."""
    return min(MOST_SPLITS, max(4, batch * shape.OUT**2 // 400))


def weight_grad(
    shape: Shape, x: Tensor, dy: Tensor, part: Tensor, bias_part: Tensor, y: Tensor | None = None, scale: float = 1.0
) -> None:
    """part [splits, N * K * K * C] and bias_part [splits, N] (views of the rows of one buffer): sums over shares of dy.

    `y`: the layer's output, where dy is still to be masked by the ReLU.
    """
    m = len(x) * shape.OUT**2
    wide = 128 if shape.K * shape.C == 128 and shape.N == 32 else 64
    _weight_grad[(shape.K * shape.K * shape.C // wide, len(part))](
        x, dy, dy if y is None else y, part, bias_part, m, scale, part.stride(0), len(part),
        **asdict(shape), MASKED=y is not None, BM=128, BK=wide, num_warps=4, num_stages=STAGES,
    )  # fmt: skip


def input_grad(shape: Shape, dy: Tensor, w: Tensor, x: Tensor, dx: Tensor, y: Tensor | None = None) -> None:
    """dx [B, H, H, C] = the gradient with respect to x, masked by x > 0 (x is the output of a ReLU); `y` as above."""
    m = len(x) * (shape.H // shape.S) ** 2
    block, warps = (64, 4) if m < 1 << 15 else (128, 8)
    _input_grad[(triton.cdiv(m, block),)](
        dy, dy if y is None else y, w, x, dx, m, **asdict(shape), MASKED=y is not None, BM=block, num_warps=warps, num_stages=STAGES
    )  # fmt: skip
