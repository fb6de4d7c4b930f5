"""Acting on a GPU: observations cross once, are stacked there, and only actions come back.

    environments' memory ──copy──▶ newest observations ─┬─▶ row t of the round (staged for the replay, on the device)
      (pinned)                                          └─▶ stack ─▶ network ─▶ best actions ──copy──▶ pinned ─▶ host

Everything is queued on the current stream. Only `greedy` and `settle` wait for it. Two staging buffers take turns, since
the replay copies a round's rows while the next one is being collected.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from qfleet import networks, rng
from qfleet.acting.actor import columns_of
from qfleet.config import Config
from qfleet.device import Captured, Mark, Transfers, pin, pinned, pinned_array
from qfleet.envs import Envs
from qfleet.types import Array, Spec, State


class _Group:
    """The buffers of one group of environments, and the graphs that stack its observations and act for it."""

    def __init__(self, spec: Spec, size: int, device: torch.device, best: Callable[[Tensor, Tensor], None]) -> None:
        self.now = torch.zeros(size, *spec.obs_shape, dtype=spec.torch_dtype, device=device)
        self.first = torch.zeros(size, dtype=torch.bool, device=device)
        self.stack = torch.zeros(size, spec.frame_stack, *spec.obs_shape, dtype=spec.torch_dtype, device=device)
        self.action = torch.zeros(size, dtype=torch.int64, device=device)
        self.host_obs = pinned((size, *spec.obs_shape), spec.torch_dtype, device)
        self.host_first = pinned((size,), torch.bool, device)
        self.host_action = pinned((size,), torch.int64, device)
        self.done = Mark(device, soon=True)
        self.push = Captured(self._join_stack, (self.stack,), device, urgent=True)
        self.act = Captured(lambda: self._choose(best), (), device, urgent=True)

    def _choose(self, best: Callable[[Tensor, Tensor], None]) -> None:
        best(self.stack, self.action)
        self.host_action.copy_(self.action, non_blocking=True)

    def _join_stack(self) -> None:
        """The newest observations join the stack; an episode's first one stands alone."""
        if self.stack.shape[1] > 1:
            keep = ~self.first.view(-1, *[1] * (self.stack.dim() - 1))
            self.stack[:, :-1] = self.stack[:, 1:] * keep
        self.stack[:, -1] = self.now


class DeviceActor:
    """`best(stack [C, *input_shape], noise [C, .] or None, action [C])` writes the greedy actions of a group."""

    def __init__(
        self,
        config: Config,
        spec: Spec,
        groups: Sequence[Envs],
        device: torch.device,
        noise_size: int,
        best: Callable[[int, Tensor, Tensor | None, Tensor], None],
    ) -> None:
        sizes = [envs.num_envs for envs in groups]
        n, self._columns = sum(sizes), columns_of(sizes)
        self._device = device
        self._noise_key = rng.key(config.seed, "acting noise")
        self._noise = torch.zeros(n, noise_size, device=device) if noise_size else None

        def best_of(group: int) -> Callable[[Tensor, Tensor], None]:
            noise = None if self._noise is None else self._noise[self._columns[group]]
            return lambda stack, action: best(group, stack.view(-1, *spec.input_shape), noise, action)

        self._groups = [_Group(spec, size, device, best_of(group)) for group, size in enumerate(sizes)]
        self._pinned = [pin(envs.shared, device) if envs.shared is not None else None for envs in groups]
        shape = (config.rows_per_round, n, *spec.obs_shape)
        self._staging = [torch.zeros(shape, dtype=spec.torch_dtype, device=device) for _ in range(2)]
        self._round = 0
        self.transfers = Transfers(device)
        self.wait_seconds = 0.0
        self.why_not = next((why for g in self._groups for why in (g.act.why_not, g.push.why_not) if why), "")

    def begin_round(self, tick: int) -> None:
        self._round += 1
        if self._noise is not None:
            n, size = self._noise.shape
            counter = torch.arange(tick * n, tick * n + n, device=self._device)
            self._noise.copy_(networks.draw_noise(self._noise_key, counter, size))

    def observe(self, group: int, obs: Array, first: Array) -> None:
        g = self._groups[group]
        source = torch.from_numpy(obs)
        if self._pinned[group] is None:
            source = g.host_obs.copy_(source)
        g.host_first.copy_(torch.from_numpy(first))
        self.transfers.copy([(g.now, source), (g.first, g.host_first)])
        g.push()

    def stage(self, group: int, t: int) -> None:
        self._staging[self._round % 2][t, self._columns[group]] = self._groups[group].now

    def begin(self, group: int) -> None:
        g = self._groups[group]
        g.act()
        g.done.record()

    def greedy(self, group: int) -> Array:
        self.settle(group)
        actions: Array = self._groups[group].host_action.numpy()
        return actions

    def settle(self, group: int) -> None:
        began = time.perf_counter()
        self._groups[group].done.wait()
        self.wait_seconds += time.perf_counter() - began

    def buffer(self, shape: tuple[int, ...], dtype: str) -> Array:
        return pinned_array(shape, dtype, self._device)

    def rows(self) -> Tensor:
        return self._staging[self._round % 2]

    def state(self) -> State:
        return {"stack": torch.cat([g.stack for g in self._groups]).cpu().numpy()}

    def load_state(self, state: State) -> None:
        for g, columns in zip(self._groups, self._columns, strict=True):
            g.stack.copy_(torch.from_numpy(np.asarray(state["stack"])[columns]))
            g.now.copy_(g.stack[:, -1])

    def close(self) -> None:
        """To be called before the environments are closed, whose memory is pinned."""
        for undo in self._pinned:
            if undo is not None:
                undo()
