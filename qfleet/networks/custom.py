"""A user's own network: `--network.kind module:Class`.

`Class(input_shape, num_actions)` is called once and must give a torch.nn.Module that maps float32 observations
[B, *input_shape] (pixels already scaled to [0, 1]) to action values [B, num_actions]. A function that returns such a
module serves as well, and so does a Keras 3 model on the torch backend, which is a torch module:

    def network(input_shape, num_actions):
        return keras.Sequential([keras.Input(input_shape), keras.layers.Dense(64, "relu"), keras.layers.Dense(num_actions)])
"""

from __future__ import annotations

import copy
import importlib
import os
import random
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from qfleet.config import ConfigError, NetworkConfig, suggest
from qfleet.networks.encoders import to_float
from qfleet.types import Spec


class Custom(nn.Module):
    """The user's module as the one block of a network."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor, noise: Tensor | None = None, taus: Tensor | None = None) -> Tensor:
        y: Tensor = self.module(to_float(x))
        return y


class CustomKeras(nn.Module):
    """A Keras model as the one block of a network, with its trainable parameters listed in the order of its layers.

    Keras registers parameters twice, sorted by generated names (dense_10 before dense_9), so that names and order
    change from one build of the same model to the next. Therefore the model itself is kept out of torch's sight.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.unregistered = (model,)
        self.weights = nn.ParameterList([variable.value for variable in model.trainable_variables])

    def forward(self, x: Tensor, noise: Tensor | None = None, taus: Tensor | None = None) -> Tensor:
        y: Tensor = self.unregistered[0](to_float(x))
        return y

    def __deepcopy__(self, memo: dict[int, Any]) -> CustomKeras:
        """The copy lists the parameters of the copied model, which copying them one by one would not."""
        return CustomKeras(copy.deepcopy(self.unregistered[0], memo))


def build_custom(config: NetworkConfig, spec: Spec) -> Custom | CustomKeras:
    asked = [f"network.dist {config.dist}"] if config.dist != "scalar" else []
    asked += [f"network.{name}" for name in ("dueling", "noisy") if getattr(config, name)]
    if asked:
        raise ConfigError(
            f"network.kind is your own {config.kind!r}, which returns one value per action, but {' and '.join(asked)} is asked "
            f"for: that belongs to the built-in networks (auto, mlp, nature, impala, grid). Drop one of the two."
        )
    module = _seeded_call(_load(config.kind), spec)
    if not isinstance(module, nn.Module):
        raise ConfigError(
            f"network.kind {config.kind!r} returned {type(module).__name__}, but it must return a torch.nn.Module "
            f"(for a Keras model set the environment variable KERAS_BACKEND=torch)."
        )
    _check_output(module, config.kind, spec)
    return CustomKeras(module) if hasattr(module, "trainable_variables") else Custom(module)


def _load(kind: str) -> Callable[..., Any]:
    name, _, attribute = kind.partition(":")
    if os.getcwd() not in sys.path and "" not in sys.path:  # as `python -m` would; the qfleet script does not
        sys.path.append(os.getcwd())
    os.environ.setdefault("KERAS_BACKEND", "torch")  # read when a Keras model's module imports keras
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as e:
        if e.name is None or not f"{name}.".startswith(f"{e.name}."):
            raise  # the user's module was found; something that it imports was not
        raise ConfigError(
            f"network.kind is {kind!r}, but there is no module {e.name!r}: check the name, and that its folder is on PYTHONPATH."
        ) from None
    if not callable(getattr(module, attribute, None)):
        raise ConfigError(
            f"network.kind is {kind!r}, but {name} has no class or function {attribute!r}.{suggest(attribute, [k for k, v in vars(module).items() if callable(v) and k[0] != '_'])}"
        )
    made: Callable[..., Any] = getattr(module, attribute)
    return made


def _seeded_call(make: Callable[..., Any], spec: Spec) -> Any:
    """Keras draws the seeds of its initialisers from Python's `random`, so that follows torch's seed here."""
    state = random.getstate()
    random.seed(torch.initial_seed())
    try:
        return make(spec.input_shape, spec.num_actions)
    finally:
        random.setstate(state)


def _check_output(module: nn.Module, kind: str, spec: Spec) -> None:
    """One forward pass on zeros; it also makes the parameters of lazy layers and of unbuilt Keras models."""
    module.eval()
    with torch.no_grad():
        out = module(torch.zeros(2, *spec.input_shape))
    module.train()
    shape = tuple(out.shape) if isinstance(out, Tensor) else type(out).__name__
    if shape != (2, spec.num_actions):
        raise ConfigError(
            f"network.kind {kind!r} maps observations of shape {(2, *spec.input_shape)} to {shape}, but it must give one value "
            f"per action: {(2, spec.num_actions)}."
        )
