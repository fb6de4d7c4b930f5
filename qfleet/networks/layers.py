"""Fully connected layers, plain and noisy, under one call: `layer(x, noise)`.

Noise is an argument, not a hidden state: the caller draws one tensor for a whole network (`draw_noise`,
`QNetwork.noise_size` numbers a sample) and every noisy layer takes its own slice of it. One row is one sample shared
by the batch (learning), as many rows as the batch is one sample per environment (acting), None is the mean network
(evaluation).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from qfleet import products, rng

SIGMA_0 = 0.5  # initial noise scale of factorised Gaussian noise (Fortunato et al., 2018)


def linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """`products.linear`, in the precision of x also where parameters are kept in a lower one."""
    if weight.dtype != torch.float32:
        weight, bias = weight.to(x.dtype), bias.to(x.dtype)
    return products.linear(x, weight, bias)


def draw_noise(key: int, counter: Tensor, size: int) -> Tensor:
    """Draws number `counter` [K] of the noise of a whole network, [K, size]: x = sign(z) * sqrt(|z|) of standard normals z."""
    z = rng.normal_torch(key, counter, size)
    return z.sign() * z.abs().sqrt_()


class Linear(nn.Linear):
    """nn.Linear that takes, and ignores, noise; torsos and heads need not know which kind they hold."""

    def forward(self, x: Tensor, noise: Tensor | None = None) -> Tensor:
        return linear(x, self.weight, self.bias)


class NoisyLinear(Linear):
    """Factorised Gaussian noise on weight and bias; reads `noise[:, offset : offset + in + out]`.

    The means are nn.Linear's own weight and bias: its default initialisation, U(-1/sqrt(in), 1/sqrt(in)), is the one
    the noisy-networks paper asks for.
    """

    def __init__(self, inputs: int, outputs: int, offset: int) -> None:
        super().__init__(inputs, outputs)
        self.noise_slice = slice(offset, offset + inputs + outputs)
        sigma = SIGMA_0 / math.sqrt(inputs)
        self.sigma_weight = nn.Parameter(torch.full((outputs, inputs), sigma))
        self.sigma_bias = nn.Parameter(torch.full((outputs,), sigma))

    def forward(self, x: Tensor, noise: Tensor | None = None) -> Tensor:
        mean = linear(x, self.weight, self.bias)
        if noise is None:
            return mean
        eps = noise[:, self.noise_slice].to(x.dtype)  # [1 or B, in + out]
        if x.dim() == 3:  # [B, T, in]: all T share their row's sample
            eps = eps.unsqueeze(1)
        eps_in, eps_out = eps[..., : self.in_features], eps[..., self.in_features :]
        # W = mu + sigma * outer(eps_out, eps_in), never formed: it would differ from row to row.
        return torch.addcmul(mean, linear(x * eps_in, self.sigma_weight, self.sigma_bias), eps_out)


class Linears:
    """Makes the layers of one network in order, and gives each noisy one the next slice of the noise."""

    def __init__(self, noisy: bool) -> None:
        self.noisy = noisy
        self.noise_size = 0

    def __call__(self, inputs: int, outputs: int) -> Linear:
        if not self.noisy:
            return Linear(inputs, outputs)
        layer = NoisyLinear(inputs, outputs, offset=self.noise_size)
        self.noise_size += inputs + outputs
        return layer
