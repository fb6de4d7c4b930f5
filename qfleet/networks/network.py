"""The Q network: a list of blocks, and what its raw output means."""

from __future__ import annotations

import torch
from torch import Tensor, nn

IQN_EVAL_TAUS = 32  # fixed fractions over which an implicit quantile network is averaged when it acts


def midpoints(n: int) -> Tensor:
    """Middles of n equal parts of [0, 1]: [1, n]. The fractions that a qr network's quantiles stand for."""
    return ((torch.arange(n) + 0.5) / n).unsqueeze(0)


class QNetwork(nn.Module):
    """`blocks` called in order, each as `block(x, noise, taus)`: encoder, torso, head (or one block of the user's).

    noise [1 or B, noise_size]: as `draw_noise` gives it, for the noisy layers; None: their means.
    taus [1 or B, T]: quantile fractions, read by implicit quantile heads only.
    """

    def __init__(
        self,
        blocks: list[nn.Module],
        *,
        num_actions: int,
        dist: str = "scalar",
        noise_size: int = 0,
        support: Tensor | None = None,
        taus: Tensor | None = None,
        plain: bool = False,
    ) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.num_actions = num_actions
        self.dist = dist
        self.noise_size = noise_size  # numbers in one noise sample; 0 = not noisy
        self._plain = plain
        self.support: Tensor | None  # [N]: returns that the atoms of a c51 network stand for
        self.register_buffer("support", support, persistent=False)
        self.taus: Tensor | None  # [1, N]: fixed fractions; of the quantiles (qr), or those q() averages over (iqn)
        self.register_buffer("taus", taus, persistent=False)

    def forward(self, obs: Tensor, noise: Tensor | None = None, taus: Tensor | None = None) -> Tensor:
        """Raw output: scalar [B, A]; c51 logits [B, A, N]; qr quantiles [B, A, N]; iqn quantiles [B, A, T]."""
        x = obs
        for block in self.blocks:
            x = block(x, noise, taus)
        return x

    def values(self, raw: Tensor) -> Tensor:
        """Expected return of every action from the raw output: [B, A]."""
        if self.dist == "scalar":
            return raw
        if self.dist == "c51":
            assert self.support is not None
            return raw.softmax(-1) @ self.support
        return raw.mean(-1)

    def q(self, obs: Tensor, noise: Tensor | None = None) -> Tensor:
        """Expected return of every action: [B, A]."""
        return self.values(self.forward(obs, noise, self.taus))

    def plain_mlp(self) -> list[nn.Linear] | None:
        """Its linears if the whole network is Linear-ReLU-...-Linear on float observations (flattened), else None."""
        return [m for m in self.modules() if isinstance(m, nn.Linear)] if self._plain else None
