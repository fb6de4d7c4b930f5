"""The convolutions of the Nature network for autograd: what recipes use whose update is not written by hand.

    pixels [B, 21, 21, 64] ─▶ conv1 ─▶ conv2 ─▶ conv3 ─▶ features [B, 3136]

Pixels are whole numbers from 0 to 255 after space-to-depth, as `replay.device_kernels.gather` writes them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from qfleet.kernels import conv
from qfleet.kernels.nature import CONV1, CONV2, CONV3, PIXEL
from qfleet.networks.encoders import Nature


class Encoder(nn.Module):
    """Takes the place of `networks.encoders.Nature` and uses its parameters, which have the precision of the pixels."""

    def __init__(self, plain: Nature) -> None:
        super().__init__()
        self.conv1, self.conv2, self.conv3 = plain.conv1, plain.conv2, plain.conv3

    def forward(self, x: Tensor, noise: Tensor | None = None, taus: Tensor | None = None) -> Tensor:
        parameters = (p for layer in (self.conv1, self.conv2, self.conv3) for p in (layer.weight, layer.bias))
        features: Tensor = _Features.apply(x, *parameters)
        return features


class _Features(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor, w3: Tensor, b3: Tensor) -> Tensor:
        a1, a2, a3 = (x.new_empty(len(x), s.OUT, s.OUT, s.N) for s in (CONV1, CONV2, CONV3))
        conv.forward(CONV1, x, w1, b1, a1, PIXEL)
        conv.forward(CONV2, a1, w2, b2, a2)
        conv.forward(CONV3, a2, w3, b3, a3)
        ctx.save_for_backward(x, a1, a2, a3, w2, w3)
        return a3.flatten(1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, a1, a2, a3, w2, w3 = ctx.saved_tensors
        da3 = grads[0].contiguous().view_as(a3)
        da2, da1 = torch.empty_like(a2), torch.empty_like(a1)
        third = _Parts(CONV3, x)
        conv.weight_grad(CONV3, a2, da3, third.weight, third.bias, y=a3)
        conv.input_grad(CONV3, da3, w3, a2, da2, y=a3)
        second = _Parts(CONV2, x)
        conv.weight_grad(CONV2, a1, da2, second.weight, second.bias)
        conv.input_grad(CONV2, da2, w2, a1, da1)
        first = _Parts(CONV1, x)
        conv.weight_grad(CONV1, x, da1, first.weight, first.bias, scale=PIXEL)
        return (None, *first.sums(), *second.sums(), *third.sums())


class _Parts:
    """The gradients of one layer's weight and bias, in parts that are summed in the end."""

    def __init__(self, shape: conv.Shape, x: Tensor) -> None:
        self._shape, self._dtype = shape, x.dtype
        rows = conv.splits(shape, len(x))
        self._all = torch.empty(rows, shape.weights + shape.N, device=x.device)
        self.weight, self.bias = self._all[:, : shape.weights], self._all[:, shape.weights :]

    def sums(self) -> tuple[Tensor, Tensor]:
        s, both = self._shape, self._all.sum(0).to(self._dtype)
        return both[: s.weights].view(s.N, s.K, s.K, s.C).permute(0, 3, 1, 2), both[s.weights :]
