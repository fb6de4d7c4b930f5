"""A user's own network: torch classes, functions, Keras models, and what is refused."""

import copy
import os
import warnings

os.environ["KERAS_BACKEND"] = "torch"  # read once, at Keras' first import

import keras
import pytest
import torch
from torch import nn

from qfleet.config import Config, ConfigError, NetworkConfig
from qfleet.networks import build
from qfleet.types import Spec

PIXELS = Spec(obs_shape=(2, 3), obs_dtype="uint8", num_actions=4)
VECTOR = Spec(obs_shape=(5,), obs_dtype="float32", num_actions=3)


class Mine(nn.Module):
    def __init__(self, input_shape, num_actions):
        super().__init__()
        self.linear = nn.Linear(input_shape[0] * input_shape[1], num_actions)

    def forward(self, x):
        assert x.dtype == torch.float32
        return self.linear(x.flatten(1))


def lazy(input_shape, num_actions):
    return nn.Sequential(nn.LazyLinear(7), nn.ReLU(), nn.LazyLinear(num_actions))


def keras_network(input_shape, num_actions):
    layers = keras.layers
    return keras.Sequential([layers.Dense(8, activation="relu"), layers.Dense(6), layers.Dense(num_actions)])


def flat_output(input_shape, num_actions):
    return nn.Linear(5, num_actions + 1)


def no_module(input_shape, num_actions):
    return "a network"


not_callable = 3


def make(name, spec, seed=0, **network):
    torch.manual_seed(seed)
    return build(Config(network=NetworkConfig(kind=f"{__name__}:{name}", **network)), spec)


def test_a_class_gets_scaled_floats():
    network = make("Mine", PIXELS)
    obs = torch.arange(12, dtype=torch.uint8).view(2, 2, 3)
    torch.manual_seed(0)
    linear = nn.Linear(6, 4)
    torch.testing.assert_close(network.q(obs), linear(obs.flatten(1) / 255.0))
    assert (network.dist, network.noise_size, network.num_actions, network.plain_mlp()) == ("scalar", 0, 4, None)


def test_a_function_with_lazy_layers():
    network = make("lazy", VECTOR)
    assert [tuple(p.shape) for p in network.parameters()] == [(7, 5), (7,), (3, 7), (3,)]


def test_a_keras_model_computes_learns_and_is_rebuilt_alike():
    network = make("keras_network", VECTOR, seed=1)
    x = torch.randn(4, 5, generator=torch.Generator().manual_seed(0))
    parameters = dict(network.named_parameters())
    shapes = [(5, 8), (8,), (8, 6), (6,), (6, 3), (3,)]  # Keras: [in, out], in the order of the layers
    assert [tuple(p.shape) for p in parameters.values()] == shapes

    def formula(w1, b1, w2, b2, w3, b3):
        return ((x @ w1 + b1).relu() @ w2 + b2) @ w3 + b3

    torch.testing.assert_close(network.q(x), formula(*parameters.values()))

    for _ in range(4):  # Keras numbers its layers on: names reach dense_10, which sorts before dense_9
        again = make("keras_network", VECTOR, seed=1)
        assert [n for n, _ in again.named_parameters()] == list(parameters)
        assert all(torch.equal(a, b) for a, b in zip(again.parameters(), parameters.values(), strict=True))
    assert list(network.state_dict()) == list(parameters)
    assert not torch.equal(make("keras_network", VECTOR, seed=2).q(x), network.q(x))

    # The learner moves all parameters into one buffer and steps that.
    flat = torch.cat([p.detach().flatten() for p in parameters.values()])
    parts = flat.split([p.numel() for p in parameters.values()])
    for p, part in zip(parameters.values(), parts, strict=True):
        p.data = part.view_as(p)
    copies = [p.detach().clone().requires_grad_() for p in parameters.values()]
    gradients = torch.autograd.grad(formula(*copies).pow(2).sum(), copies)
    network.q(x).pow(2).sum().backward()
    for p, gradient in zip(parameters.values(), gradients, strict=True):
        torch.testing.assert_close(p.grad, gradient)
    flat -= 0.01 * torch.cat([p.grad.flatten() for p in parameters.values()])
    stepped = [c - 0.01 * g for c, g in zip(copies, gradients, strict=True)]
    torch.testing.assert_close(network.q(x), formula(*stepped))


def test_a_copied_keras_model_is_independent_and_lists_its_own_parameters():
    network = make("keras_network", VECTOR)
    x = torch.ones(1, 5)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "__array__", DeprecationWarning)  # Keras with NumPy 2
        twin = copy.deepcopy(network)
    torch.testing.assert_close(twin.q(x), network.q(x))
    before = network.q(x).detach()
    for p in twin.parameters():
        p.data.zero_()
    assert torch.equal(twin.q(x), torch.zeros(1, 3)) and torch.equal(network.q(x), before)


@pytest.mark.parametrize("option", [{"dist": "c51"}, {"dueling": True}, {"noisy": True}])
def test_built_in_options_are_refused(option):
    with pytest.raises(ConfigError, match=f"{next(iter(option))}.*belongs to the built-in networks"):
        make("Mine", PIXELS, **option)


def test_wrong_results_are_refused():
    with pytest.raises(ConfigError, match=r"to \(2, 4\), but it must give one value per action: \(2, 3\)"):
        make("flat_output", VECTOR)
    with pytest.raises(ConfigError, match=r"returned str.*KERAS_BACKEND=torch"):
        make("no_module", VECTOR)


def test_wrong_names_are_refused(tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match=r"Did you mean .*keras_network"):
        make("keras_netwrk", VECTOR)
    with pytest.raises(ConfigError, match="no class or function 'not_callable'"):
        make("not_callable", VECTOR)
    with pytest.raises(ConfigError, match=r"no module 'nowhere_to_be_found'.*PYTHONPATH"):
        build(Config(network=NetworkConfig(kind="nowhere_to_be_found.networks:Net")), VECTOR)
    # A broken import inside the user's module is the user's bug, not a wrong name: it is shown as it is.
    (tmp_path / "user_network.py").write_text("import nowhere_to_be_found\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="nowhere_to_be_found"):
        build(Config(network=NetworkConfig(kind="user_network:Net")), VECTOR)
