"""Who holds the newest observations and chooses greedy actions for them: in main memory here, on a GPU in device.py."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from qfleet import networks, rng
from qfleet.acting.policy import Policy
from qfleet.config import Config
from qfleet.device import Transfers, pinned_array
from qfleet.types import Array, Spec, State

CPU = torch.device("cpu")


class Actor(Protocol):
    """Environments come in groups, which own neighbouring columns of a row."""

    wait_seconds: float  # in which the host waited for actions
    transfers: Transfers  # of observations
    why_not: str  # its work could not be recorded as a graph

    def begin_round(self, tick: int) -> None:
        """Noisy layers get new noise: one sample per environment and round."""
        ...

    def observe(self, group: int, obs: Array, first: Array) -> None:
        """The newest observations of a group [C, *obs_shape]; `first` [C]: those that begin an episode."""
        ...

    def stage(self, group: int, t: int) -> None:
        """They become row t of the round."""
        ...

    def begin(self, group: int) -> None:
        """Start to choose actions for them, where that can go on beside the host. `greedy` or `settle` follows."""
        ...

    def greedy(self, group: int) -> Array:
        """The best actions for them [C], as begun."""
        ...

    def settle(self, group: int) -> None:
        """Return when the arrays given to `observe` are not needed any more. (`greedy` does, too.)"""
        ...

    def buffer(self, shape: tuple[int, ...], dtype: str) -> Array:
        """Memory to stage what goes to the replay."""
        ...

    def rows(self) -> Tensor:
        """Observations of the round's rows [R, E, *obs_shape]."""
        ...

    def state(self) -> State: ...
    def load_state(self, state: State) -> None: ...


def columns_of(sizes: Sequence[int]) -> list[slice]:
    """The columns of every group."""
    edges = [sum(sizes[:i]) for i in range(len(sizes) + 1)]
    return [slice(lo, hi) for lo, hi in itertools.pairwise(edges)]


class FrameStack:
    """The newest k observations of some environments, oldest first, zeros before an episode's first."""

    def __init__(self, spec: Spec, num_envs: int) -> None:
        self.frames = np.zeros((num_envs, spec.frame_stack, *spec.obs_shape), spec.obs_dtype)
        self._input_shape = spec.input_shape

    def push(self, obs: Array, first: Array) -> Array:
        """-> network input [E, *input_shape]. The array is reused by the next push."""
        if self.frames.shape[1] > 1:
            self.frames[:, :-1] = self.frames[:, 1:]
            self.frames[first, :-1] = 0
        self.frames[:, -1] = obs
        return self.inputs()

    def inputs(self) -> Array:
        return self.frames.reshape(-1, *self._input_shape)


class HostActor:
    """Observations in main memory; the policy may compute wherever it likes, and the rows may go to any device."""

    def __init__(
        self,
        config: Config,
        spec: Spec,
        policy: Policy,
        sizes: Sequence[int],
        rows_to: torch.device = CPU,
    ) -> None:
        n, self._columns = sum(sizes), columns_of(sizes)
        self.wait_seconds = 0.0
        self.transfers = Transfers(policy.device)
        self.why_not = ""
        self._policy = policy
        self._noise_key = rng.key(config.seed, "acting noise")
        self._noise: Tensor | None = None
        # Two of them in turn, as in the collector: a device may still be reading one round's.
        self._rows_to = rows_to
        shape = (config.rows_per_round, n, *spec.obs_shape)
        self._staging = [self.buffer(shape, spec.obs_dtype) for _ in range(1 if rows_to == CPU else 2)]
        self._stacks = [FrameStack(spec, size) for size in sizes]

    def begin_round(self, tick: int) -> None:
        self._staging.reverse()
        size, n = self._policy.net.noise_size, self._staging[0].shape[1]
        if size:
            counter = torch.arange(tick * n, tick * n + n)
            self._noise = networks.draw_noise(self._noise_key, counter, size).to(self._policy.device)

    def observe(self, group: int, obs: Array, first: Array) -> None:
        self._stacks[group].push(obs, first)

    def stage(self, group: int, t: int) -> None:
        self._staging[0][t, self._columns[group]] = self._stacks[group].frames[:, -1]

    def begin(self, group: int) -> None:
        pass

    def greedy(self, group: int) -> Array:
        noise = None if self._noise is None else self._noise[self._columns[group]]
        (inputs,) = self.transfers.send([torch.from_numpy(self._stacks[group].inputs())])
        actions: Array = self._policy.values(inputs, noise).argmax(1).cpu().numpy()
        return actions

    def settle(self, group: int) -> None:
        pass

    def buffer(self, shape: tuple[int, ...], dtype: str) -> Array:
        return pinned_array(shape, dtype, self._rows_to)

    def rows(self) -> Tensor:
        return torch.from_numpy(self._staging[0])

    def state(self) -> State:
        return {"stack": np.concatenate([stack.frames for stack in self._stacks])}

    def load_state(self, state: State) -> None:
        for stack, columns in zip(self._stacks, self._columns, strict=True):
            stack.frames[...] = state["stack"][columns]
