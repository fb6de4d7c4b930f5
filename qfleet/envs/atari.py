"""Atari games through ale-py's C++ vector environment: preprocessing and stepping in its threads, no GIL.

Making a game takes 0.13 s with the interpreter locked, so a few hundred of them are made, and stepped, by worker processes
(subprocess.py), each with a share of them and one thread: seconds instead of most of a minute, the same numbers.

Single 84×84 grey frames come out; the replay stacks them. Rewards are raw, a lost life is reported and resets nothing.
The published protocols differ most in sticky actions and in what a lost life does, so both are settings and both are noted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from gymnasium.vector import AutoresetMode

from qfleet.config import ConfigError, EnvConfig
from qfleet.envs.base import Envs, EnvStep, empty_step, note_restart
from qfleet.envs.local import env_seeds
from qfleet.envs.state import NoSnapshot

if TYPE_CHECKING:
    from qfleet.types import Array, Spec, State

FRAME_SKIP = 4
NO_STATE = "has no get_state/set_state (ale-py's vector environment)"

FIXED = {  # constructor arguments that are settled here, and the setting to use instead
    "stack_num": "env.frame_stack",
    "repeat_action_probability": "env.sticky_actions",
    "reward_clipping": "env.reward_clip",
    "episodic_life": "env.life_loss",
    "life_loss_info": "env.life_loss",
    "num_threads": "runtime.emulator_threads",
    "num_envs": "env.num_envs",
    "game": "env.id",
}


class Vector:
    """ale-py's vector environment, its results as an EnvStep. Knows nothing of torch: worker processes use it, too."""

    def __init__(self, game: str, config: EnvConfig, num_envs: int, threads: int) -> None:
        self._vec = _build(game, config, num_envs, threads)
        assert self._vec.metadata["autoreset_mode"] == AutoresetMode.NEXT_STEP
        self.num_envs = num_envs
        self.obs_shape: tuple[int, ...] = self._vec.single_observation_space.shape[1:]  # without the stack of 1
        self.num_actions = int(self._vec.single_action_space.n)
        self._life_loss = config.life_loss
        self._out = empty_step(num_envs, self.obs_shape, "uint8")
        self._ended = np.zeros(num_envs, np.bool_)
        self._lives = np.zeros(num_envs, np.int32)

    def reset(self, seeds: Sequence[int | None]) -> Array:
        obs, info = self._vec.reset(seed=None if seeds[0] is None else np.array(seeds))
        self._lives[:] = info["lives"]
        self._ended.fill(False)
        frames: Array = obs[:, 0]
        return frames

    def send(self, actions: Array) -> None:
        self._vec.send(actions)

    def recv(self) -> EnvStep:
        obs, reward, terminated, truncated, info = self._vec.recv()  # obs [E, 1, 84, 84], a fresh array
        out, over = self._out, terminated | truncated
        out.reward[:], out.first[:] = reward, self._ended
        if self._life_loss:
            np.logical_and(info["lives"] < self._lives, ~(over | self._ended), out=out.life_lost)
            self._lives[:] = info["lives"]
        self._ended = over
        return out._replace(obs=obs[:, 0], terminated=terminated, truncated=truncated)

    def close(self) -> None:
        self._vec.ale = None  # ends the emulator threads, which otherwise spin until collected


def spec_and_notes(game: str, config: EnvConfig, vector: Vector) -> tuple[Spec, list[str]]:
    from qfleet.types import Spec

    spec = Spec(
        obs_shape=vector.obs_shape, obs_dtype="uint8", num_actions=vector.num_actions, frame_stack=config.frame_stack
    )
    sticky = f"sticky actions {config.sticky_actions:g}" if config.sticky_actions else "no sticky actions"
    lives = "a lost life stops the bootstrap" if config.life_loss else "lost lives are ignored"
    notes = [f"Atari {game}: {sticky}; {lives}; returns are of whole games, unclipped"]
    note_restart(notes, game, NO_STATE)
    return spec, notes


class Atari(Envs):
    """All games in this process, stepped by ale-py's threads."""

    kind = "native"
    frame_skip = FRAME_SKIP

    def __init__(self, game: str, config: EnvConfig, seeds: Sequence[int], threads: int) -> None:
        self._vector = Vector(game, config, len(seeds), threads)
        self.num_envs, self.threads = len(seeds), threads
        self.spec, self.notes = spec_and_notes(game, config, self._vector)
        self._seeds: Sequence[int | None] = seeds

    def reset(self, seed: int | None = None) -> Array:
        seeds = self._seeds if seed is None else env_seeds(seed, self.num_envs)
        self._seeds = [None] * self.num_envs
        return self._vector.reset(seeds)

    def send(self, actions: Array) -> None:
        self._vector.send(actions)

    def recv(self) -> EnvStep:
        return self._vector.recv()

    def state(self) -> State | None:
        return None

    def load_state(self, state: State) -> None:
        raise ValueError("Atari environments have no state to load: reset them")

    def close(self) -> None:
        self._vector.close()


@dataclass(frozen=True)
class Maker:
    """What a worker process needs to make its share of the games."""

    game: str
    config: EnvConfig
    threads: int

    def build(self, out: EnvStep) -> Share:
        return Share(Vector(self.game, self.config, len(out.reward), self.threads), out)


class Share:
    """A worker's games, whose rows are written to shared memory."""

    def __init__(self, vector: Vector, out: EnvStep) -> None:
        self._vector, self._out = vector, out

    def reset(self, seeds: Sequence[int | None]) -> None:
        self._out.obs[:] = self._vector.reset(seeds)

    def step(self, actions: Array) -> None:
        self._vector.send(actions)
        for mine, new in zip(self._out, self._vector.recv(), strict=True):
            mine[...] = new

    def states(self) -> list[State]:
        raise NoSnapshot(NO_STATE)

    def load_states(self, saved: Sequence[State]) -> None:
        raise NoSnapshot(NO_STATE)

    def close(self) -> None:
        self._vector.close()


def _build(game: str, config: EnvConfig, num_envs: int, threads: int) -> Any:
    from ale_py.vector_env import AtariVectorEnv

    _check(config.kwargs)
    try:
        return AtariVectorEnv(
            game,
            num_envs,
            num_threads=threads,
            repeat_action_probability=config.sticky_actions,
            stack_num=1,
            reward_clipping=False,
            episodic_life=False,
            life_loss_info=False,
            **{"frameskip": FRAME_SKIP, "noop_max": 30, "max_num_frames_per_episode": 108_000, **config.kwargs},
        )
    except TypeError as e:
        if "keyword argument" not in str(e):
            raise
        raise ConfigError(f"env.kwargs {config.kwargs} do not suit Atari ({game}): {e}") from e


def _check(kwargs: Mapping[str, Any]) -> None:
    for name in kwargs:
        if name in FIXED:
            raise ConfigError(f"env.kwargs has {name!r}; for Atari set {FIXED[name]} instead")
        if name in ("autoreset_mode", "batch_size", "continuous"):
            raise ConfigError(f"env.kwargs has {name!r}, which qfleet needs at its default: leave it out")
