"""Environments stepped one after the other in this process. A worker process runs the same `Slice` on its share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import gymnasium as gym
import numpy as np

from qfleet.envs import state as states
from qfleet.envs.base import Envs, EnvStep, empty_step, note_restart
from qfleet.envs.spaces import Actions, Observations

if TYPE_CHECKING:
    from qfleet.types import Array, Spec, State


class Slice:
    """Some environments and the rows they write; ends are remembered and reset in the next step."""

    def __init__(
        self, envs: Sequence[gym.Env[Any, Any]], observations: Observations, actions: Actions, out: EnvStep
    ) -> None:
        self.out = out
        self._envs, self._encode, self._each = envs, observations.encode, actions.each
        self._ended = [False] * len(envs)

    def reset(self, seeds: Sequence[int | None]) -> None:
        for i, seed in enumerate(seeds):
            self._start(i, seed)

    def step(self, actions: Array) -> None:
        """One step each: actions [E] int64, results in `out`. Flags are written only where they are set."""
        _, reward, terminated, truncated, first, _ = self.out
        rows, encode, ended = self.out.obs, self._encode, self._ended
        rewards: list[Any] = [0.0] * len(ended)
        terminated.fill(False)
        truncated.fill(False)
        first.fill(False)
        for i, action in enumerate(self._each(actions)):
            if ended[i]:
                self._start(i, None)
                first[i] = True
                continue
            obs, rewards[i], ends, cut, _ = self._envs[i].step(action)
            rows[i] = obs if encode is None else encode(obs)
            if ends or cut:
                terminated[i], truncated[i], ended[i] = ends, cut, True
        reward[:] = rewards

    def states(self) -> list[State]:
        """A snapshot per environment; raises NoSnapshot."""
        return [{"ended": e, **states.snapshot(env)} for e, env in zip(self._ended, self._envs, strict=True)]

    def load_states(self, saved: Sequence[State]) -> None:
        for i, (env, state) in enumerate(zip(self._envs, saved, strict=True)):
            states.restore(env, state)
            self._ended[i] = state["ended"]

    def close(self) -> None:
        for env in self._envs:
            env.close()

    def _start(self, i: int, seed: int | None) -> None:
        obs, _ = self._envs[i].reset(seed=seed)
        row = obs if self._encode is None else self._encode(obs)
        if np.shape(row) != self.out.obs.shape[1:]:  # assignment would broadcast it silently
            raise RuntimeError(
                f"{self._envs[i]} returned an observation of shape {np.shape(row)}, but its observation space says "
                f"{self.out.obs.shape[1:]}: correct the environment"
            )
        self.out.obs[i] = row
        self._ended[i] = False


class InProcess(Envs):
    """For environments too fast to be worth a message to another process."""

    kind = "inprocess"

    def __init__(
        self,
        name: str,
        spec: Spec,
        envs: Sequence[gym.Env[Any, Any]],
        seeds: Sequence[int],
        observations: Observations,
        actions: Actions,
        notes: list[str],
    ) -> None:
        self.spec, self.num_envs, self.notes = spec, len(envs), notes
        self._name = name
        self._seeds: Sequence[int | None] = seeds
        self._slice = Slice(envs, observations, actions, empty_step(len(envs), spec.obs_shape, spec.obs_dtype))

    def reset(self, seed: int | None = None) -> Array:
        self._slice.reset(self._seeds if seed is None else env_seeds(seed, self.num_envs))
        self._seeds = [None] * self.num_envs
        return self._slice.out.obs

    def send(self, actions: Array) -> None:
        self._slice.step(actions)

    def recv(self) -> EnvStep:
        return self._slice.out

    def state(self) -> State | None:
        try:
            return numbered(self._slice.states())
        except states.NoSnapshot as e:
            note_restart(self.notes, self._name, str(e))
            return None

    def load_state(self, state: State) -> None:
        self._slice.load_states(in_order(state, self.num_envs))
        self._seeds = [None] * self.num_envs

    def close(self) -> None:
        self._slice.close()


def env_seeds(seed: int, num_envs: int) -> list[int]:
    """One seed per environment, the same for every way of stepping them."""
    from qfleet import rng  # imports torch

    return [rng.derive(seed, f"environment {i}") for i in range(num_envs)]


def numbered(saved: Sequence[State]) -> State:
    """Environments by number: a State is nested dicts."""
    return {str(i): state for i, state in enumerate(saved)}


def in_order(state: State, num_envs: int) -> list[State]:
    """The inverse of `numbered`, or an error if the number of environments has changed."""
    if len(state) != num_envs:
        raise ValueError(f"the saved state is of {len(state)} environments, but there are {num_envs}: set env.num_envs")
    return [state[str(i)] for i in range(num_envs)]
