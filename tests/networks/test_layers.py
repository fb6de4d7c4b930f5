"""Noisy layers against the formula of the paper, written out weight by weight in float64."""

import math

import numpy as np
import torch
from torch import nn

from qfleet import rng
from qfleet.networks.layers import Linears, NoisyLinear, draw_noise


def reference(layer, x, noise):
    """Row by row, with the noisy weight matrix formed explicitly."""
    p = {name: value.detach().double().numpy() for name, value in layer.named_parameters()}
    n = layer.in_features
    rows = []
    for b in range(len(x)):
        eps = noise[b % len(noise), layer.noise_slice]
        weight = p["weight"] + p["sigma_weight"] * np.outer(eps[n:], eps[:n])
        bias = p["bias"] + p["sigma_bias"] * eps[n:]
        rows.append(x[b] @ weight.T + bias)
    return np.stack(rows)


def noisy(inputs=5, outputs=3, offset=2):
    layer = NoisyLinear(inputs, outputs, offset)
    with torch.no_grad():  # sigmas start all equal: make a mix-up of rows and columns visible
        layer.sigma_weight.normal_()
        layer.sigma_bias.normal_()
    return layer


def test_one_sample_for_the_batch_and_one_per_row():
    torch.manual_seed(0)
    layer, x = noisy(), torch.randn(4, 5)
    for rows in (1, 4):
        noise = torch.randn(rows, 12)
        expected = reference(layer, x.double().numpy(), noise.double().numpy())
        np.testing.assert_allclose(layer(x, noise).detach().numpy(), expected, rtol=1e-5, atol=1e-5)


def test_three_dimensional_input_shares_the_sample_of_its_row():
    torch.manual_seed(0)
    layer, x = noisy(), torch.randn(4, 6, 5)
    for rows in (1, 4):
        noise = torch.randn(rows, 12)
        each = torch.stack([layer(x[:, t], noise) for t in range(6)], dim=1)
        torch.testing.assert_close(layer(x, noise), each)


def test_without_noise_it_is_the_mean_layer_with_linear_initialisation():
    torch.manual_seed(3)
    layer = NoisyLinear(5, 3, 0)
    torch.manual_seed(3)
    plain = nn.Linear(5, 3)
    x = torch.randn(4, 5)
    assert torch.equal(layer(x), plain(x))
    assert torch.equal(layer.sigma_weight, torch.full((3, 5), 0.5 / math.sqrt(5)))
    assert torch.equal(layer.sigma_bias, torch.full((3,), 0.5 / math.sqrt(5)))


def test_sigma_learns():
    torch.manual_seed(0)
    layer, x, noise = noisy(), torch.randn(4, 5), torch.randn(1, 12)
    layer(x, noise).sum().backward()
    eps = noise[0, 2:10].double().numpy()
    x_sum = x.double().sum(0).numpy()
    np.testing.assert_allclose(
        layer.sigma_weight.grad.numpy(), np.outer(eps[5:], eps[:5] * x_sum), rtol=1e-4, atol=1e-6
    )
    np.testing.assert_allclose(layer.sigma_bias.grad.numpy(), 4 * eps[5:], rtol=1e-4)


def test_layers_take_consecutive_slices():
    linear = Linears(noisy=True)
    a, b = linear(5, 3), linear(3, 2)
    assert (a.noise_slice, b.noise_slice, linear.noise_size) == (slice(0, 8), slice(8, 13), 13)


def test_noise_is_the_signed_root_of_normals():
    counter = torch.tensor([3, 7])
    z = rng.normal_torch(5, counter, 40).numpy()
    np.testing.assert_allclose(draw_noise(5, counter, 40).numpy(), np.sign(z) * np.sqrt(np.abs(z)), rtol=1e-6)
