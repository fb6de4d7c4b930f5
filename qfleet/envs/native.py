"""Environments that come as one vector, with their own fast step (CartPole in NumPy, for instance)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import gymnasium as gym
import numpy as np
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import iterate

from qfleet.config import ConfigError
from qfleet.envs import state as states
from qfleet.envs.base import Envs, EnvStep, empty_step, note_restart
from qfleet.envs.ids import explained, quiet
from qfleet.envs.local import env_seeds
from qfleet.envs.spaces import Actions, Observations

if TYPE_CHECKING:
    from qfleet.types import Array, Spec, State


class WrongReset(ConfigError):
    """The vector environment resets in a way that loses observations and offers no other."""


def build(spec: EnvSpec, kwargs: Mapping[str, Any], num_envs: int) -> VectorEnv[Any, Any, Any]:
    """A vector environment that resets in the next step, or not at all (then `Native` resets it); raises WrongReset."""
    vec = _make(spec, kwargs, num_envs)
    mode = vec.metadata.get("autoreset_mode")
    if mode == AutoresetMode.SAME_STEP:  # the last observation of an episode would only be found in infos, if at all
        vec.close()
        try:
            vec = _make(spec, {**kwargs, "autoreset_mode": AutoresetMode.DISABLED}, num_envs)
        except ConfigError:
            raise WrongReset(
                f"the vector environment of {spec.id} resets in the same step and takes no autoreset_mode to stop that. "
                f"Use --env.vectorize inprocess or subprocess."
            ) from None
        mode = vec.metadata.get("autoreset_mode")
    if mode not in (AutoresetMode.NEXT_STEP, AutoresetMode.DISABLED):
        vec.close()
        raise WrongReset(
            f"the vector environment of {spec.id} says {mode!r} about how it resets (metadata['autoreset_mode']), but "
            f"NEXT_STEP or DISABLED is needed. Use --env.vectorize inprocess or subprocess."
        )
    return vec


def _make(spec: EnvSpec, kwargs: Mapping[str, Any], num_envs: int) -> VectorEnv[Any, Any, Any]:
    with quiet(), explained(spec, kwargs):
        return gym.make_vec(spec, num_envs, vectorization_mode="vector_entry_point", **kwargs)


class Native(Envs):
    kind = "native"

    def __init__(
        self,
        name: str,
        spec: Spec,
        vec: VectorEnv[Any, Any, Any],
        seed: int,
        observations: Observations,
        actions: Actions,
        notes: list[str],
    ) -> None:
        self.spec, self.num_envs, self.notes = spec, int(vec.num_envs), notes
        self._name, self._vec = name, vec
        self._seed: int | None = seed
        self._encode, self._batch = observations.encode, actions.batch
        self._resets_itself = vec.metadata["autoreset_mode"] == AutoresetMode.NEXT_STEP
        self._out = empty_step(self.num_envs, spec.obs_shape, spec.obs_dtype)
        self._ended = np.zeros(self.num_envs, np.bool_)

    def reset(self, seed: int | None = None) -> Array:
        start = self._seed if seed is None else seed
        self._seed = None
        # One generator serves the whole vector, so the first environment's seed stands for all.
        obs, _ = self._vec.reset(seed=None if start is None else env_seeds(start, 1)[0])
        self._write(self._out.obs, obs)
        self._ended.fill(False)
        return self._out.obs

    def recv(self) -> EnvStep:
        return self._out

    def send(self, actions: Array) -> None:
        out, over = self._out, self._ended
        manual = not self._resets_itself and bool(over.any())
        if manual:  # an ended environment must not be stepped, and the vector cannot leave one out
            self._vec.reset(options={"reset_mask": over.copy()})
        obs, reward, terminated, truncated, _ = self._vec.step(self._batch(actions))
        self._write(out.obs, obs)
        out.reward[:], out.terminated[:], out.truncated[:], out.first[:] = reward, terminated, truncated, over
        if manual:  # so its step is undone by a second reset
            self._restart(over)
        np.logical_or(out.terminated, out.truncated, out=self._ended)

    def state(self) -> State | None:
        try:
            return {"ended": self._ended.copy(), "vector": states.snapshot(self._vec)}
        except states.NoSnapshot as e:
            note_restart(self.notes, self._name, str(e))
            return None

    def load_state(self, state: State) -> None:
        if len(state["ended"]) != self.num_envs:
            raise ValueError(
                f"the saved state is of {len(state['ended'])} environments, but there are {self.num_envs}: set env.num_envs"
            )
        states.restore(self._vec, state["vector"])
        self._ended[:] = state["ended"]
        self._seed = None

    def close(self) -> None:
        self._vec.close()

    def _restart(self, over: Array) -> None:
        obs, _ = self._vec.reset(options={"reset_mask": over.copy()})
        fresh = np.empty_like(self._out.obs)
        self._write(fresh, obs)
        self._out.obs[over] = fresh[over]
        self._out.reward[over] = 0
        self._out.terminated[over] = False
        self._out.truncated[over] = False

    def _write(self, rows: Array, obs: Any) -> None:
        if self._encode is None:
            rows[...] = obs
        else:
            for i, one in enumerate(iterate(self._vec.observation_space, obs)):
                rows[i] = self._encode(one)
