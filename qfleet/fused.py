"""The update of a plain MLP written out by hand: the loss, its gradient and Adam without autograd, as numba kernels around
torch's matrix products. Imported only when it is used.

On a CPU a small network spends more time in autograd's bookkeeping and in the calls of small operations than in arithmetic:
for 256 x 256 and batch 64 a whole update takes 490 us here and took 710 us as torch operations, 360 of them in products. The
numbers are those of `losses.scalar_loss` with backward() and of torch.optim.Adam, up to the order of additions (tests compare).
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

from qfleet.jit import kernel, reordering
from qfleet.products import product
from qfleet.types import Array, Batch

SMALL_INPUT = 32  # up to this many inputs the first layer is faster as a kernel than as a matrix product
MANY_ACTIONS = 64  # beyond, the last layer would be better off as a matrix product
# The moments of units that died decay into denormal numbers, with which arithmetic is slow: they are cut off here.
TINY = np.float32(1e-35)
ZERO, HALF, ONE, TWO = (np.float32(x) for x in (0.0, 0.5, 1.0, 2.0))


class Mlp:
    """Linear-ReLU-...-Linear: `mlp(obs)` gives its values, without a gradient."""

    def __init__(self, linears: list[nn.Linear]) -> None:
        self.weights, self.biases = [m.weight.detach() for m in linears], [m.bias.detach() for m in linears]
        self.weight_arrays, self.bias_arrays = arrays(self.weights), arrays(self.biases)
        self.small = linears[0].in_features <= SMALL_INPUT
        self.allocate(0)

    @staticmethod
    def suits(linears: list[nn.Linear]) -> bool:
        return len(linears) >= 2 and linears[-1].out_features <= MANY_ACTIONS

    def allocate(self, rows: int) -> None:
        """Room for the outputs of the hidden layers."""
        self.rows = rows
        self.out = [torch.zeros(rows, len(w)) for w in self.weights[:-1]]
        self.out_arrays = arrays(self.out)

    def hidden(self, obs: Tensor) -> Array:
        """obs [B, I] -> the last hidden layer [B, H], its ReLU still to be applied."""
        if len(obs) != self.rows:
            self.allocate(len(obs))
        out = self.out
        if self.small:
            first_layer(obs.numpy(), self.weight_arrays[0], self.bias_arrays[0], self.out_arrays[0])
        else:
            product(obs, self.weights[0], self.biases[0], out[0])
        for i in range(1, len(out)):
            if i > 1 or not self.small:
                out[i - 1].relu_()
            product(out[i - 1], self.weights[i], self.biases[i], out[i])
        return self.out_arrays[-1]

    def __call__(self, obs: Tensor) -> Tensor:
        """[B, ...] -> q [B, A]."""
        q = torch.empty(len(obs), len(self.weights[-1]))
        last_layer(self.hidden(flat(obs)), self.weight_arrays[-1], self.bias_arrays[-1], q.numpy())
        return q


class MlpGradient(Mlp):
    """The gradient of the scalar DQN loss. The linears' `.grad` must already be bound to their buffers."""

    def __init__(self, linears: list[nn.Linear], kind: str) -> None:
        super().__init__(linears)
        self._huber = kind == "huber"
        grads = [(m.weight.grad, m.bias.grad) for m in linears]
        self._weight_grads = [w for w, _ in grads if w is not None]
        self._weight_grad_arrays = arrays(self._weight_grads)
        self._bias_grad_arrays = arrays([b for _, b in grads if b is not None])

    def allocate(self, rows: int) -> None:
        super().allocate(rows)
        self._delta = [torch.zeros_like(out) for out in self.out]  # the gradient at each hidden layer
        self._delta_arrays = arrays(self._delta)
        self._q, self._priority = torch.zeros(rows, len(self.weights[-1])), torch.zeros(rows)

    def gradient(self, batch: Batch, target: Tensor) -> tuple[Tensor, float, Tensor]:
        """-> priorities [B], loss, q [B, A], good until the next call; the gradient is in the linears' `.grad`."""
        obs = flat(batch.obs)
        top = self.hidden(obs)
        delta, delta_arrays = self._delta, self._delta_arrays
        loss = head(
            top, self.weight_arrays[-1], self.bias_arrays[-1],
            batch.action.numpy(), target.numpy(), batch.weight.numpy(), self._huber,
            self._q.numpy(), self._priority.numpy(),
            delta_arrays[-1], self._weight_grad_arrays[-1], self._bias_grad_arrays[-1],
        )  # fmt: skip
        for i in range(len(delta) - 1, -1, -1):
            relu_grad(delta_arrays[i], self.out_arrays[i], self._bias_grad_arrays[i])
            if i:
                product(delta[i].t(), self.out[i - 1].t(), None, self._weight_grads[i])
                product(delta[i], self.weights[i].t(), None, delta[i - 1])
        if self.small:
            first_grad(delta_arrays[0], obs.numpy(), self._weight_grad_arrays[0])
        else:
            product(delta[0].t(), obs.t(), None, self._weight_grads[0])
        return self._priority, loss, self._q


def arrays(tensors: list[Tensor]) -> list[Array]:
    return [x.numpy() for x in tensors]


def flat(obs: Tensor) -> Tensor:
    return (obs if obs.dim() == 2 else obs.flatten(1)).contiguous()


@reordering
def first_layer(x: Array, w: Array, b: Array, out: Array) -> None:
    """out = relu(x w' + b)."""
    rows, inputs = x.shape
    width = len(w)
    across = np.empty((inputs, width), np.float32)  # w transposed: the inner loops run along a row
    for k in range(inputs):
        for j in range(width):
            across[k, j] = w[j, k]
    for i in range(rows):
        y = out[i]
        for j in range(width):
            y[j] = b[j]
        for k in range(inputs):
            for j in range(width):
                y[j] += x[i, k] * across[k, j]
        for j in range(width):
            y[j] = ZERO if y[j] < ZERO else y[j]  # keeps what is no number


@reordering
def last_layer(h: Array, w: Array, b: Array, q: Array) -> None:
    """q = relu(h) w' + b."""
    for i in range(len(h)):
        x = h[i]
        for j in range(len(x)):
            x[j] = ZERO if x[j] < ZERO else x[j]
        for a in range(len(w)):
            y = ZERO
            for j in range(len(x)):
                y += x[j] * w[a, j]
            q[i, a] = y + b[a]


@reordering
def head(
    h: Array, w: Array, b: Array, action: Array, target: Array, weight: Array, huber: bool,
    q: Array, priority: Array, delta: Array, w_grad: Array, b_grad: Array,
) -> float:  # fmt: skip
    """`last_layer` and its way back; delta [B, H]: the gradient at h.

    -> loss = mean of weight * Huber (or squared) error of q[action].
    """
    rows, width = h.shape
    w_grad[:] = ZERO
    b_grad[:] = ZERO
    loss = 0.0
    last_layer(h, w, b, q)
    for i in range(rows):
        x, d = h[i], delta[i]
        a = action[i]
        error = q[i, a] - target[i]
        size = abs(error)
        priority[i] = size
        if not huber:
            each, slope = size * size, TWO * error
        elif size > ONE:
            each, slope = size - HALF, ONE if error > ZERO else -ONE
        else:  # also where it is no number
            each, slope = HALF * size * size, error
        loss += weight[i] * each
        slope *= weight[i] / np.float32(rows)
        b_grad[a] += slope
        for j in range(width):
            w_grad[a, j] += slope * x[j]
            d[j] = slope * w[a, j] if x[j] > ZERO else ZERO
    return float(loss / rows)


@kernel
def relu_grad(delta: Array, out: Array, b_grad: Array) -> None:
    """delta behind a ReLU -> before it, in place; its sum over the batch is the gradient of the bias."""
    b_grad[:] = ZERO
    for i in range(len(out)):
        d, y = delta[i], out[i]
        for j in range(len(y)):
            d[j] = d[j] if y[j] > ZERO else ZERO
            b_grad[j] += d[j]


@kernel
def first_grad(delta: Array, x: Array, w_grad: Array) -> None:
    """w_grad = delta' x."""
    inputs, width = x.shape[1], len(w_grad)
    across = np.zeros((inputs, width), np.float32)
    for i in range(len(delta)):
        for k in range(inputs):
            for j in range(width):
                across[k, j] += x[i, k] * delta[i, j]
    for k in range(inputs):
        for j in range(width):
            w_grad[j, k] = across[k, j]


@reordering
def adam(p: Array, m: Array, v: Array, step: Array, eps: float, clip: float, grad: Array, lr: float) -> None:
    """One step of Adam (beta 0.9, 0.999) on the gradient, scaled down to the norm `clip` (0: as it is)."""
    scale = ONE
    if clip > 0.0:
        square = ZERO
        for i in range(len(grad)):
            square += grad[i] * grad[i]
        scale = np.float32(min(1.0, clip / (np.sqrt(square) + 1e-6)))
    step[()] += ONE
    rate = np.float32(lr / (1.0 - 0.9 ** np.float64(step[()])))
    spread = np.float32(1.0 / np.sqrt(1.0 - 0.999 ** np.float64(step[()])))
    small, keep_m, keep_v = np.float32(eps), np.float32(0.9), np.float32(0.999)
    new_m, new_v = np.float32(0.1), np.float32(0.001)  # not 1 - float32(0.999), which is 0.00100005
    for i in range(len(p)):
        g = grad[i] * scale
        a, b = keep_m * m[i] + new_m * g, keep_v * v[i] + new_v * g * g
        m[i] = ZERO if abs(a) < TINY else a
        v[i] = ZERO if b < TINY else b
        p[i] -= rate * m[i] / (np.sqrt(v[i]) * spread + small)
