"""A trained network as a function from observations to actions."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from qfleet.config import Config
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

    @torch.inference_mode()
    def q(self, obs: Array, noise: Tensor | None = None) -> Tensor:
        """Action values [B, A]. `noise` [1 or B, noise_size] explores with noisy layers; None uses their means."""
        x = torch.from_numpy(np.ascontiguousarray(obs, dtype=self.spec.obs_dtype))
        return self.net.q(x.to(self.device, non_blocking=True), noise)
