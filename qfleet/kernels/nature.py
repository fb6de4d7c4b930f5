"""One update of a Nature network with scalar outputs, as a sequence of kernels: no autograd, nothing allocated.

    draw ─▶ gather ─┬▶ online: conv1 conv2 conv3 fc ┬▶ loss ─▶ backward ─▶ reduce ─▶ Adam ─▶ parameters, their bf16 copy
                    └▶ target: conv1 conv2 conv3 fc ┘

Double DQN's two forward passes of the online network (on obs, and on next_obs to select) are one of twice the batch;
likewise Munchausen's two of the target network. Branches that do not depend on each other run side by side, which is
what small batches need to fill the GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from qfleet.config import Config
from qfleet.device import Branches
from qfleet.kernels import conv, head, optimizer
from qfleet.kernels.conv import Shape
from qfleet.replay import device_kernels as sampling
from qfleet.replay.device import Sampler

CONV1 = Shape(H=21, C=64, OUT=20, S=1, K=2, N=32)  # after space-to-depth
CONV2 = Shape(H=20, C=32, OUT=9, S=2, K=4, N=64)
CONV3 = Shape(H=9, C=64, OUT=7, S=1, K=3, N=64)
FEATURES = CONV3.OUT**2 * CONV3.N
PIXEL = 1 / 255


class Params(NamedTuple):
    """Views of one flat buffer, in its order. Convolution weights [N, K, K, C], linear ones [out, in]."""

    conv1: Tensor
    conv1_bias: Tensor
    conv2: Tensor
    conv2_bias: Tensor
    conv3: Tensor
    conv3_bias: Tensor
    fc: Tensor
    fc_bias: Tensor
    out: Tensor
    out_bias: Tensor

    @classmethod
    def of(cls, buffer: Tensor, places: Sequence[tuple[torch.Size, int]]) -> Params:
        """places: shape and offset of every parameter."""
        return cls(*(buffer[at : at + shape.numel()].view(_in_memory(shape)) for shape, at in places))


def _in_memory(shape: torch.Size) -> tuple[int, ...]:
    """Convolution weights [N, C, K, K] lie as [N, K, K, C]."""
    return (shape[0], *shape[2:], shape[1]) if len(shape) == 4 else tuple(shape)


class Forward:
    """Features [rows, F] of the last hidden layer, every layer's output in a buffer of its own."""

    def __init__(self, low: Params, bias: Params, rows: int) -> None:
        self.low, self.bias = low, bias

        def buffer(*shape: int) -> Tensor:
            return low.fc.new_zeros(rows, *shape)

        self.a1, self.a2, self.a3 = (buffer(s.OUT, s.OUT, s.N) for s in (CONV1, CONV2, CONV3))
        self.h = buffer(len(low.fc))
        self.last = head.Weights(low.out, bias.out_bias)

    def __call__(self, x: Tensor) -> None:
        """x [rows, 21, 21, 64]: pixels from 0 to 255, as `sampling.gather` writes them."""
        low, bias = self.low, self.bias
        conv.forward(CONV1, x, low.conv1, bias.conv1_bias, self.a1, PIXEL)
        conv.forward(CONV2, self.a1, low.conv2, bias.conv2_bias, self.a2)
        conv.forward(CONV3, self.a2, low.conv3, bias.conv3_bias, self.a3)
        torch._addmm_activation(low.fc_bias, self.a3.flatten(1), low.fc.t(), out=self.h)  # with ReLU


class Buffers(NamedTuple):
    """The learner's tensors that an update reads and writes; all flat ones have one layout."""

    data: Tensor  # float32 parameters
    low: Tensor  # the same in the precision of the products
    target: Tensor
    target_low: Tensor
    grad: Tensor
    m: Tensor
    v: Tensor
    counter: Tensor  # [1] int64: updates made
    lr: Tensor  # [1] float32
    beta: Tensor  # [1] float32
    loss_sum: Tensor  # [1] float64, over all updates
    q_mean: Tensor  # [1] float32, of the last


class Update:
    def __init__(
        self,
        config: Config,
        places: Sequence[tuple[torch.Size, int]],
        buffers: Buffers,
        source: Sampler,
        apply: bool = True,
    ) -> None:
        """`apply`: up to the new parameters; otherwise up to the gradient."""
        c, batch, device = config.learner, config.learner.batch_size, buffers.data.device
        self._c, self._b, self._source, self._batch, self._apply = c, buffers, source, batch, apply
        low, bias = Params.of(buffers.low, places), Params.of(buffers.data, places)
        target = Params.of(buffers.target_low, places), Params.of(buffers.target, places)
        self._low, self._grad = low, Params.of(buffers.grad, places)
        both = 2 * batch
        self._x = buffers.low.new_zeros(both, CONV1.H, CONV1.H, CONV1.C)
        self._online = Forward(low, bias, both if c.double else batch)
        self._target = Forward(*target, both if c.munchausen else batch)
        online, first = self._online, slice(batch)
        self._a1, self._a2, self._a3, self._h = (a[first] for a in (online.a1, online.a2, online.a3, online.h))
        self._da1, self._da2, self._da3, self._dh = map(torch.zeros_like, (self._a1, self._a2, self._a3, self._h))
        self._slope, self.priority = torch.zeros(2, batch, device=device)
        self._loss_part, self._q_part = torch.zeros(2, head.parts(batch), device=device)
        # Weight gradients of the convolutions, in parts; they come first in the flat buffer.
        self._splits = [conv.splits(shape, batch) for shape in (CONV1, CONV2, CONV3)]
        self._part = torch.zeros(max(self._splits), places[6][1], device=device)
        self._square = torch.zeros(optimizer.programs(buffers.data.numel(), self._part.shape[1]), device=device)
        self._branches = Branches(device, 3)
        self._places = places

    def __call__(self) -> None:
        c, b, branches = self._c, self._b, self._branches
        drawn = self._source.draw(b.counter, b.beta)
        x = self._x
        sampling.gather(self._source.frames, drawn.frames, x, 4)
        with branches(0):
            self._target(x if c.munchausen else x[self._batch :])
        self._online(x if c.double else x[: self._batch])
        branches.join()
        head.loss(
            self._online.h, self._target.h, self._online.last, self._target.last,
            drawn.action, drawn.reward, drawn.discount, drawn.weight,
            self._dh, self._slope, self.priority, self._loss_part, self._q_part,
            double=c.double, munchausen=c.munchausen, huber=c.loss == "huber", alpha=c.munchausen_alpha, temperature=c.munchausen_tau,
        )  # fmt: skip
        self._backward(drawn.action)
        with branches(0):
            self._source.update(drawn.id, self.priority)
        ends = [self._places[2][1], self._places[4][1]]
        optimizer.reduce(
            b.grad, self._part, ends, self._splits, self._square, b.counter,
            self._loss_part, self._q_part, b.loss_sum, b.q_mean, self._batch,
        )  # fmt: skip
        if self._apply:
            optimizer.adam(
                b.data, b.grad, b.m, b.v, b.low, self._square, b.counter, b.lr, clip=c.grad_clip, eps=c.adam_eps, decay=c.weight_decay
            )  # fmt: skip
        branches.join()

    def _backward(self, action: Tensor) -> None:
        g, low, branches = self._grad, self._low, self._branches
        a3, da3 = self._a3.flatten(1), self._da3.flatten(1)
        with branches(0):
            head.last_grad(self._h, self._dh, self._slope, action, g.out, g.out_bias, g.fc_bias)
            product(self._dh.t(), a3, g.fc)
        torch.mm(self._dh, low.fc, out=da3)
        with branches(1):
            conv.weight_grad(CONV3, self._a2, self._da3, *self._part_of(4), y=self._a3)
        conv.input_grad(CONV3, self._da3, low.conv3, self._a2, self._da2, y=self._a3)
        with branches(2):
            conv.weight_grad(CONV2, self._a1, self._da2, *self._part_of(2))
        conv.input_grad(CONV2, self._da2, low.conv2, self._a1, self._da1)
        conv.weight_grad(CONV1, self._x[: self._batch], self._da1, *self._part_of(0), scale=PIXEL)
        branches.join()

    def _part_of(self, index: int) -> tuple[Tensor, Tensor]:
        """Where the parts of a convolution's weight and bias gradients go."""
        (weight, w), (bias, b) = self._places[index : index + 2]
        rows = self._splits[index // 2]
        return self._part[:rows, w : w + weight.numel()], self._part[:rows, b : b + bias.numel()]


def product(a: Tensor, b: Tensor, out: Tensor) -> None:
    """out (float32) = a @ b, rounded to float32 only."""
    if a.dtype == out.dtype:
        torch.mm(a, b, out=out)
    else:
        torch.mm(a, b, out_dtype=torch.float32, out=out)
