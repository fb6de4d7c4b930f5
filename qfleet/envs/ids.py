"""From the name a user types to a gymnasium spec, and from a spec to one environment."""

from __future__ import annotations

import difflib
import importlib
import os
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import gymnasium as gym
from gymnasium.envs.registration import EnvSpec

from qfleet import machine
from qfleet.config import ConfigError

MINATAR = tuple(f"MinAtar/{game}-v1" for game in ("Asterix", "Breakout", "Freeway", "Seaquest", "SpaceInvaders"))
ATARI_ENTRY_POINT = "ale_py.env:AtariEnv"


def find(id: str) -> EnvSpec:
    """The spec of a gymnasium id, `module:Id`, MinAtar id or Atari name; a ConfigError with suggestions otherwise."""
    module, _, name = id.rpartition(":")
    if module:
        import_module(module)
    if name not in gym.registry:
        if name.startswith("MinAtar/"):
            _register_minatar()
        else:
            name = _register_atari(name)
    if name not in gym.registry:
        raise ConfigError(
            f"there is no environment {id!r}.{_similar(name, module)} It can be any gymnasium id, module:Id for an environment "
            f"that `import module` registers, or an Atari game such as pong."
        )
    return gym.registry[name]


def atari_game(spec: EnvSpec) -> str | None:
    """The ROM of an Atari spec, whatever its version; None for every other spec."""
    return str(spec.kwargs["game"]) if spec.entry_point == ATARI_ENTRY_POINT else None


def build(spec: EnvSpec, kwargs: Mapping[str, Any]) -> gym.Env[Any, Any]:
    """One environment. Its passive checker stays off: it costs time each reset and warns about what is handled here."""
    with quiet(), explained(spec, kwargs):
        return gym.make(spec, disable_env_checker=True, **kwargs)


def import_module(module: str) -> None:
    """Import a user's module, from the working directory too (as `python -m` would; the qfleet script does not)."""
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.append(os.getcwd())
    try:
        importlib.import_module(module)
    except ModuleNotFoundError as e:
        raise ConfigError(
            f"cannot import {module!r}, named before the colon of env.id: {e}. Run from the folder that holds it, or "
            f"install it."
        ) from e


@contextmanager
def quiet() -> Iterator[None]:
    """No warnings while environments are imported and made: old versions, SWIG types, lowered precision of bounds."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@contextmanager
def explained(spec: EnvSpec, kwargs: Mapping[str, Any]) -> Iterator[None]:
    """Turn a missing package or a wrong keyword argument into a message that says what to do."""
    try:
        yield
    except (gym.error.DependencyNotInstalled, ImportError) as e:
        if isinstance(spec.entry_point, str) and spec.entry_point.startswith("gymnasium.envs.box2d"):
            raise ConfigError(f"{spec.id} needs Box2D, which is not installed: {machine.install('box2d')}") from e
        raise ConfigError(f"{spec.id} needs a package that is not installed: {e}. Install it.") from e
    except gym.error.Error as e:
        raise ConfigError(f"{spec.id} cannot be made: {e}") from e
    except TypeError as e:
        if kwargs and "keyword argument" in str(e):
            raise ConfigError(f"env.kwargs {dict(kwargs)} do not suit {spec.id}: {e}") from e
        raise


def _similar(name: str, module: str) -> str:
    """' Did you mean ...?', whatever the case of the letters; Atari games by their short names, those of `module` with it."""
    known = {atari_game(spec) or id for id, spec in gym.registry.items()} | set(MINATAR)
    by_lower = {id.lower(): id for id in sorted(known)}
    close = difflib.get_close_matches(name.lower(), by_lower, n=3)
    theirs = [id for id, spec in gym.registry.items() if module and str(spec.entry_point).startswith(module)]
    found = [f"{module}:{id}" if id in theirs else id for id in (by_lower[c] for c in close)]
    return f" Did you mean {' or '.join(found)}?" if found else ""


def _register_minatar() -> None:
    try:
        with quiet():
            import minatar.gym

            minatar.gym.register_envs()
    except ImportError as e:
        raise ConfigError(f"MinAtar is not installed: {machine.install('minatar')}") from e


def _register_atari(name: str) -> str:
    """Let ale-py register its games; 'pong', 'Pong' and 'space_invaders' become their newest id."""
    with quiet():
        import ale_py  # noqa: F401  (importing it registers)
    game = name.replace("_", "").lower()
    return next((i for i in gym.registry if i.startswith("ALE/") and i.lower() == f"ale/{game}-v5"), name)
