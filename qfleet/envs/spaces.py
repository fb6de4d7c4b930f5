"""Gymnasium spaces to what a Q-network eats: an array of fixed shape in, one integer out."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from gymnasium import spaces
from gymnasium.spaces.utils import flatten, flatten_space

from qfleet.config import ConfigError

if TYPE_CHECKING:
    from qfleet.types import Array

MAX_ACTIONS = 100_000
WRAP = "Wrap the environment (gymnasium.ObservationWrapper or ActionWrapper), register the result, and pass module:Id."


@dataclass(frozen=True)
class Observations:
    """How one observation becomes one row. `encode` None: it is assigned as it is, with a cast to dtype."""

    shape: tuple[int, ...]
    dtype: str  # "uint8", "bool" or "float32"
    encode: Callable[[Any], Any] | None
    note: str = ""


@dataclass(frozen=True)
class Actions:
    """How actions [E] int64 in [0, count) become the environment's own."""

    count: int
    batch: Callable[[Array], Array]  # for a vector environment: [E] -> [E, ...]
    each: Callable[[Array], list[Any]]  # for single environments: [E] -> one action each


def observations(space: spaces.Space[Any], what: str) -> Observations:
    """The row format of an observation space, or a ConfigError for spaces without a fixed size."""
    if isinstance(space, spaces.Box):
        dtype = space.dtype.name if space.dtype in (np.uint8, np.bool_) else "float32"
        return Observations(space.shape or (1,), dtype, None if space.shape else np.atleast_1d)
    if isinstance(space, spaces.Discrete):
        count, start = int(space.n), int(space.start)

        def one_hot(state: Any) -> Array:
            row = np.zeros(count, np.float32)
            row[int(state) - start] = 1.0
            return row

        return Observations((count,), "float32", one_hot, f"{what}: the {count} discrete states are one-hot encoded")
    if not _numeric(space):
        raise ConfigError(
            f"{what} has the observation space {space}, of which not everything is numbers of a fixed count. Box, "
            f"Discrete, MultiBinary, MultiDiscrete, Dict and Tuple of these work; Text, Sequence and Graph do not. {WRAP}"
        )
    size = math.prod(flatten_space(space).shape)
    return Observations(
        (size,),
        "float32",
        lambda obs: flatten(space, obs),
        f"{what}: the {type(space).__name__} observation is flattened to {size} numbers",
    )


def _numeric(space: spaces.Space[Any]) -> bool:
    """Whether flattening gives a fixed count of meaningful numbers (gymnasium flattens texts, too: to character codes)."""
    if isinstance(space, spaces.Dict):
        return all(map(_numeric, space.values()))
    if isinstance(space, spaces.Tuple):
        return all(map(_numeric, space))
    return isinstance(space, spaces.Box | spaces.Discrete | spaces.MultiBinary | spaces.MultiDiscrete)


def actions(space: spaces.Space[Any], what: str) -> Actions:
    """The numbering of an action space, or a ConfigError if its actions cannot be numbered."""
    if isinstance(space, spaces.Discrete):
        start = int(space.start)
        if start == 0:
            # NumPy integers, as `space.sample` returns them: environments may rely on `.item()` or `.dtype`.
            return Actions(int(space.n), lambda a: a, list)
        return Actions(int(space.n), lambda a: a + start, lambda a: list(a + start))
    if isinstance(space, spaces.MultiDiscrete):
        sizes = [int(n) for n in space.nvec.ravel()]
        count = math.prod(sizes)
        if count > MAX_ACTIONS:
            raise ConfigError(
                f"{what} has the action space {space}: {count:,} combinations, more than the {MAX_ACTIONS:,} a Q-network "
                f"can have outputs for. Offer fewer with a wrapper. {WRAP}"
            )
        table = np.stack(np.unravel_index(np.arange(count), sizes), axis=-1)  # [count, dimensions]
        table = (table.reshape(count, *space.shape) + space.start).astype(space.dtype)
        return Actions(count, lambda a: table[a], lambda a: list(table[a]))
    raise ConfigError(
        f"{what} has the action space {space}, but DQN needs discrete actions (Discrete or MultiDiscrete). Offer a few "
        f"fixed actions with a wrapper, or train it with an algorithm for continuous control such as SAC or TD3. {WRAP}"
    )
