"""Atari games through ale-py's C++ vector environment: preprocessing and stepping in its threads, no GIL.

Single 84×84 grey frames come out; the replay stacks them. Rewards are raw, a lost life is reported and resets nothing.
The published protocols differ most in sticky actions and in what a lost life does, so both are settings and both are noted.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from gymnasium.vector import AutoresetMode

from qfleet.config import ConfigError, EnvConfig
from qfleet.envs.base import Envs, EnvStep, empty_step, note_restart
from qfleet.envs.local import env_seeds

if TYPE_CHECKING:
    from qfleet.types import Array, State

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


class Atari(Envs):
    kind = "atari"

    def __init__(self, game: str, config: EnvConfig, num_envs: int, seed: int, threads: int) -> None:
        from qfleet.types import Spec

        self._vec = _build(game, config, num_envs, threads)
        assert self._vec.metadata["autoreset_mode"] == AutoresetMode.NEXT_STEP
        self.num_envs = num_envs
        self.spec = Spec(
            obs_shape=self._vec.single_observation_space.shape[1:],  # without the stack of 1
            obs_dtype="uint8",
            num_actions=int(self._vec.single_action_space.n),
            frame_stack=config.frame_stack,
        )
        sticky = f"sticky actions {config.sticky_actions:g}" if config.sticky_actions else "no sticky actions"
        lives = "a lost life stops the bootstrap" if config.life_loss else "lost lives are ignored"
        self.notes = [f"Atari {game}: {sticky}; {lives}; returns are of whole games, unclipped"]
        note_restart(self.notes, game, "has no get_state/set_state (ale-py's vector environment)")
        self._seed: int | None = seed
        self._life_loss = config.life_loss
        self._out = empty_step(num_envs, self.spec.obs_shape, "uint8")
        self._ended = np.zeros(num_envs, np.bool_)
        self._lives = np.zeros(num_envs, np.int32)

    def reset(self, seed: int | None = None) -> Array:
        start = self._seed if seed is None else seed
        self._seed = None
        obs, info = self._vec.reset(seed=None if start is None else np.array(env_seeds(start, self.num_envs)))
        self._lives[:] = info["lives"]
        self._ended.fill(False)
        frames: Array = obs[:, 0]
        return frames

    def step(self, actions: Array) -> EnvStep:
        obs, reward, terminated, truncated, info = self._vec.step(actions)  # obs [E, 1, 84, 84], a fresh array
        out, over = self._out, terminated | truncated
        out.reward[:], out.first[:] = reward, self._ended
        if self._life_loss:
            np.logical_and(info["lives"] < self._lives, ~(over | self._ended), out=out.life_lost)
            self._lives[:] = info["lives"]
        self._ended = over
        return out._replace(obs=obs[:, 0], terminated=terminated, truncated=truncated)

    def state(self) -> State | None:
        return None

    def load_state(self, state: State) -> None:
        raise ValueError("Atari environments have no state to load: reset them")

    def close(self) -> None:
        self._vec.ale = None  # ends the emulator threads, which otherwise spin until collected


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
            **{"frameskip": 4, "noop_max": 30, "max_num_frames_per_episode": 108_000, **config.kwargs},
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
