"""A trained network as a function from observations to actions."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from qfleet.config import Config
from qfleet.device import Captured, Mark, pinned
from qfleet.networks import QNetwork
from qfleet.types import Array, Spec


class Policy:
    """Greedy in the network's action values: `policy.act(obs)`.

    Observations are NumPy arrays [B, *spec.input_shape] in the stored dtype (a frame stack comes first, oldest
    frame first). One observation without the leading B is accepted too and gives one integer.
    """

    def __init__(self, net: QNetwork, config: Config, spec: Spec, device: torch.device | str = "cpu") -> None:
        self.net, self.config, self.spec, self.device = net, config, spec, torch.device(device)

    def act(self, obs: Array) -> Array:
        """Greedy actions [B] int64 (or one integer for a single observation)."""
        obs = np.asarray(obs)
        single = obs.shape == self.spec.input_shape
        if not single and obs.shape[1:] != self.spec.input_shape:
            raise ValueError(
                f"observations have shape {obs.shape}; this policy takes {self.spec.input_shape} for one or "
                f"(B, {', '.join(map(str, self.spec.input_shape))}) for many."
            )
        action = self.q(obs[None] if single else obs).argmax(1).cpu().numpy()
        return action[0] if single else action

    def q(self, obs: Array, noise: Tensor | None = None) -> Tensor:
        """Action values [B, A]. `noise` [1 or B, noise_size] explores with noisy layers; None uses their means."""
        x = torch.from_numpy(np.ascontiguousarray(obs, dtype=self.spec.obs_dtype))
        return self.values(x.to(self.device, non_blocking=True), noise)

    @torch.inference_mode()
    def values(self, obs: Tensor, noise: Tensor | None = None) -> Tensor:
        """`q` of what is on the device."""
        return self.net.q(obs, noise)


class Recorded:
    """A policy for a fixed number of observations, from main memory and back in one launch where the device can."""

    def __init__(self, policy: Policy, batch: int) -> None:
        spec, device = policy.spec, policy.device
        self.config, self._net = policy.config, policy.net
        self._obs = pinned((batch, *spec.input_shape), spec.torch_dtype, device)
        self._action = pinned((batch,), torch.int64, device)
        self._there = torch.zeros_like(self._obs, device=device)
        self._run, self._done = Captured(self._once, (), device, urgent=True), Mark(device, soon=True)

    @torch.no_grad()
    def _once(self) -> None:
        self._there.copy_(self._obs, non_blocking=True)
        self._action.copy_(self._net.q(self._there).argmax(1), non_blocking=True)

    def act(self, obs: Array) -> Array:
        """Greedy actions [B]; the array is reused by the next call."""
        self._obs.copy_(torch.from_numpy(obs))
        self._run()
        self._done.record()
        self._done.wait()
        actions: Array = self._action.numpy()
        return actions
