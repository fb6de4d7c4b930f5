"""Exact snapshots of environments, without pickle.

An environment with `get_state` and `set_state` speaks for itself (and for whatever it wraps). For the modules in
`PLAIN`, which were read for this, the instance attributes are the whole state: numbers, strings, arrays, containers of
these and random generators. Nothing else is guessed at: an environment that is not known to be complete has no snapshot.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import gymnasium as gym
import numpy as np
from gymnasium.envs.registration import EnvSpec

if TYPE_CHECKING:
    from qfleet.types import State

PLAIN = ("gymnasium.envs.classic_control", "gymnasium.envs.toy_text", "minatar")
WRAPPERS = ("gymnasium.wrappers",)
CONSTANT = (gym.Space, EnvSpec)  # attributes of these types are made by the constructor and never change


class NoSnapshot(Exception):
    """Why an environment has no exact state; reads on from the environment's name."""


class Layer(NamedTuple):
    """One object whose attributes (or whose get_state) are part of an environment's state."""

    obj: Any
    own: bool  # has get_state and set_state


def snapshot(env: Any) -> State:
    """The state of a single or vector environment and its wrappers, as {"layers": JSON, "arrays": {...}}."""
    encoder = _Encoder()
    layers = [encoder.value(obj.get_state()) if own else encoder.attributes(obj) for obj, own in _layers(env)]
    return {"layers": layers, "arrays": encoder.arrays}


def restore(env: Any, state: State) -> None:
    """Put a snapshot into an environment made in the same way."""
    decoder = _Decoder(state["arrays"])
    layers = _layers(env)
    if len(layers) != len(state["layers"]):
        raise ValueError(f"the saved state has {len(state['layers'])} layers of wrappers, {env} has {len(layers)}")
    for (obj, own), node in zip(layers, state["layers"], strict=True):
        if own:
            obj.set_state(decoder.value(node))
        else:
            decoder.attributes(obj, node)


def obstacle(env: Any) -> str:
    """Why `snapshot` would fail, judged by types alone, so that it can be said before the run; "" if nothing does."""
    try:
        _layers(env)
    except NoSnapshot as e:
        return str(e)
    return ""


def _layers(env: Any) -> list[Layer]:
    """From the outermost wrapper inwards, as far as states must be saved one by one."""
    layers = []
    while True:
        cls = type(env)
        own = hasattr(cls, "get_state") and hasattr(cls, "set_state")
        wrapper = isinstance(env, gym.Wrapper | gym.vector.VectorWrapper)
        if not own and not _from(cls, WRAPPERS if wrapper else PLAIN):
            raise NoSnapshot(f"has no get_state/set_state ({cls.__module__}.{cls.__qualname__})")
        layers.append(Layer(env, own))
        if own or not wrapper:
            return layers
        env = env.env


def _from(cls: type, modules: tuple[str, ...]) -> bool:
    return any(cls.__module__ == m or cls.__module__.startswith(m + ".") for m in modules)


class _Encoder:
    """Values to JSON; arrays go to the side and are referred to by number.

    Containers, arrays and generators are numbered in the order they are met, so that one reached twice stays one object:
    MinAtar's game and its wrapper draw from the same generator.
    """

    def __init__(self) -> None:
        self.arrays: dict[str, Any] = {}
        self._seen: dict[int, int] = {}
        self._alive: list[Any] = []  # keeps ids from being reused

    def attributes(self, obj: Any) -> dict[str, Any]:
        skip = ("env", "metadata") if isinstance(obj, gym.Wrapper | gym.vector.VectorWrapper) else ("metadata",)
        kept = {k: v for k, v in vars(obj).items() if k not in skip and not isinstance(v, CONSTANT)}
        return {name: self._object(v) if _from(type(v), PLAIN) else self.value(v) for name, v in kept.items()}

    def _object(self, v: Any) -> Any:
        """An object held by an attribute is restored in place, in the one the constructor made."""
        return {"ref": self._seen[id(v)]} if self._number(v) else {"object": self.attributes(v)}

    def _number(self, v: Any) -> bool:
        """Whether v was met before; it has a number afterwards."""
        if id(v) in self._seen:
            return True
        self._seen[id(v)] = len(self._seen)
        self._alive.append(v)
        return False

    def value(self, v: Any) -> Any:
        if v is None or type(v) in (bool, int, float, str):
            return v
        if type(v) is tuple:
            return {"tuple": [self.value(x) for x in v]}
        if isinstance(v, np.generic) and v.dtype.kind in "biufU":
            return {"scalar": v.dtype.str, "is": v.item()}
        if self._number(v):
            return {"ref": self._seen[id(v)]}
        if type(v) is list:
            return {"list": [self.value(x) for x in v]}
        if type(v) is dict:
            return {"dict": [[self.value(k), self.value(x)] for k, x in v.items()]}
        if type(v) is np.ndarray and v.dtype.kind in "biufS":
            return {"ndarray": self._store(v), "dtype": v.dtype.str, "shape": list(v.shape)}
        if isinstance(v, np.random.Generator):
            return {"generator": self.value(v.bit_generator.state)}
        if isinstance(v, np.random.RandomState):
            return {"random_state": self.value(v.get_state(legacy=False))}
        raise NoSnapshot(
            f"keeps a {type(v).__module__}.{type(v).__qualname__} in its state, which cannot be saved exactly"
        )

    def _store(self, v: Any) -> str:
        key = str(len(self.arrays))
        # Byte strings (the maps of toy text) become plain bytes: not every array format knows them.
        self.arrays[key] = np.frombuffer(v.tobytes(), np.uint8) if v.dtype.kind == "S" else v.copy()
        return key


class _Decoder:
    """The inverse of `_Encoder`, numbering objects in the same order."""

    def __init__(self, arrays: dict[str, Any]) -> None:
        self._arrays = arrays
        self._made: list[Any] = []

    def attributes(self, obj: Any, node: dict[str, Any]) -> None:
        for name, value in node.items():
            if type(value) is dict and "object" in value:
                self._made.append(getattr(obj, name))
                self.attributes(getattr(obj, name), value["object"])
            else:
                setattr(obj, name, self.value(value))

    def value(self, node: Any) -> Any:
        if type(node) is not dict:
            return node
        if "tuple" in node:
            return tuple(self.value(x) for x in node["tuple"])
        if "scalar" in node:
            return np.dtype(node["scalar"]).type(node["is"])
        if "ref" in node:
            return self._made[node["ref"]]
        return self._mutable(node)

    def _mutable(self, node: dict[str, Any]) -> Any:
        at = len(self._made)
        self._made.append(None)
        if "list" in node:
            made: Any = [self.value(x) for x in node["list"]]
        elif "dict" in node:
            made = {self.value(k): self.value(x) for k, x in node["dict"]}
        elif "ndarray" in node:
            data = np.ascontiguousarray(self._arrays[node["ndarray"]])
            made = data.view(node["dtype"]).reshape(node["shape"]).copy()
        elif "generator" in node:
            state = self.value(node["generator"])
            bits = getattr(np.random, state["bit_generator"])()
            bits.state = state
            made = np.random.Generator(bits)
        else:
            made = np.random.RandomState()
            made.set_state(self.value(node["random_state"]))
        self._made[at] = made
        return made
