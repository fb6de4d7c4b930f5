"""Torso and head: the fully connected part of a network, features [B, F] in, raw predictions out."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from qfleet.networks.layers import Linear, Linears

COSINES = 64  # size of the cosine embedding of a quantile fraction (Dabney et al., 2018)


class Torso(nn.Module):
    """Linear-ReLU for every width; without widths it hands its input on.

    `first_plain` keeps noise out of the first layer: with an MLP that layer stands for the encoder.
    """

    def __init__(self, features: int, widths: tuple[int, ...], linear: Linears, first_plain: bool) -> None:
        super().__init__()
        layers: list[Linear] = []
        for width in widths:
            layers.append(Linear(features, width) if first_plain and not layers else linear(features, width))
            features = width
        self.layers = nn.ModuleList(layers)
        self.features = features

    def forward(self, x: Tensor, noise: Tensor | None = None, taus: Tensor | None = None) -> Tensor:
        for layer in self.layers:
            x = torch.relu_(layer(x, noise))  # in place: a linear layer's backward does not read its output
        return x


class Stream(nn.Module):
    """The layers from torso features to one kind of output: hidden layer with ReLU if a width is given, then linear."""

    def __init__(self, features: int, hidden: int | None, outputs: int, linear: Linears) -> None:
        super().__init__()
        self.hidden = None if hidden is None else linear(features, hidden)
        self.out = linear(features if hidden is None else hidden, outputs)

    def forward(self, x: Tensor, noise: Tensor | None) -> Tensor:
        if self.hidden is not None:
            x = torch.relu_(self.hidden(x, noise))
        if x.dtype == torch.bfloat16:  # mixed precision: but values in full, or 20.00 and 20.06 were the same
            with torch.autocast(x.device.type, enabled=False):
                full: Tensor = self.out(x.float(), noise)
            return full
        y: Tensor = self.out(x, noise)
        return y


class Head(nn.Module):
    """Scalar, c51 and qr heads: `atoms` numbers per action (scalar: atoms is None), with or without dueling."""

    def __init__(
        self, features: int, hidden: int | None, num_actions: int, atoms: int | None, dueling: bool, linear: Linears
    ) -> None:
        super().__init__()
        self.num_actions = num_actions
        self.atoms = atoms
        outputs = 1 if atoms is None else atoms
        self.value = Stream(features, hidden, outputs, linear) if dueling else None
        self.advantage = Stream(features, hidden, num_actions * outputs, linear)

    def forward(self, x: Tensor, noise: Tensor | None = None, taus: Tensor | None = None) -> Tensor:
        out: Tensor = self.advantage(x, noise)  # [B, A] or [B, A * N]
        if self.atoms is not None:
            out = out.view(-1, self.num_actions, self.atoms)
        if self.value is not None:
            value: Tensor = self.value(x, noise)  # [B, 1] or [B, N]
            value = value if self.atoms is None else value.unsqueeze(1)
            out = value + out - out.mean(1, keepdim=True)
        return out


class ImplicitHead(nn.Module):
    """Implicit quantiles: the return of every action at any quantile fractions asked for (taus [1 or B, T]).

    Torso features are multiplied by an embedding of each fraction. The embedding is plain also in noisy networks: noise
    on it would act on the fraction asked for, not on the value.
    """

    def __init__(self, features: int, hidden: int | None, num_actions: int, dueling: bool, linear: Linears) -> None:
        super().__init__()
        self.embed = nn.Linear(COSINES, features)
        self.value = Stream(features, hidden, 1, linear) if dueling else None
        self.advantage = Stream(features, hidden, num_actions, linear)
        self.frequencies: Tensor
        self.register_buffer("frequencies", torch.pi * torch.arange(COSINES).float(), persistent=False)

    def forward(self, x: Tensor, noise: Tensor | None = None, taus: Tensor | None = None) -> Tensor:
        assert taus is not None, "an implicit quantile network needs taus"
        cosines = torch.cos(taus.unsqueeze(-1) * self.frequencies)  # [1 or B, T, 64]
        x = x.unsqueeze(1) * torch.relu_(self.embed(cosines.to(self.embed.weight.dtype)))  # [B, T, F]
        out: Tensor = self.advantage(x, noise)  # [B, T, A]
        if self.value is not None:
            out = self.value(x, noise) + out - out.mean(2, keepdim=True)
        return out.transpose(1, 2)
