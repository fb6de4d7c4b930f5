"""Networks: encoder, torso, head as a list of blocks.

`build` makes the network that a config asks for. Parameters are made in the natural order with torch's default
initialisation and nothing else draws a random number before them, so a plain MLP made after `torch.manual_seed(s)` has
exactly the parameters of an `nn.Sequential` of `nn.Linear` made after the same call.
"""

from __future__ import annotations

import torch

from qfleet.config import Config, ConfigError
from qfleet.networks.custom import build_custom
from qfleet.networks.encoders import Flat, Grid, Image, Impala, Nature, image_of
from qfleet.networks.heads import Head, ImplicitHead, Torso
from qfleet.networks.layers import Linears, draw_noise
from qfleet.networks.network import IQN_EVAL_TAUS, QNetwork, midpoints
from qfleet.types import Spec

__all__ = ["QNetwork", "build", "draw_noise", "midpoints"]


def build(config: Config, spec: Spec) -> QNetwork:
    net = config.network
    if ":" in net.kind:
        return QNetwork([build_custom(net, spec)], num_actions=spec.num_actions)

    image = image_of(spec)
    kind = _auto(image) if net.kind == "auto" else net.kind
    encoder = _encoder(kind, image, spec)
    linear = Linears(net.noisy)
    # Dueling streams and implicit quantiles need a hidden layer of their own (without it they were no more than a linear
    # head written differently): the last width is theirs, as in the papers.
    own = net.dueling or net.dist == "iqn"
    widths, hidden = (net.hidden[:-1], net.hidden[-1]) if own and net.hidden else (net.hidden, None)
    torso = Torso(encoder.features, widths, linear, first_plain=kind == "mlp")
    head: Head | ImplicitHead
    if net.dist == "iqn":
        head = ImplicitHead(torso.features, hidden, spec.num_actions, net.dueling, linear)
    else:
        atoms = None if net.dist == "scalar" else net.atoms
        head = Head(torso.features, hidden, spec.num_actions, atoms, net.dueling, linear)
    return QNetwork(
        [encoder, torso, head],
        num_actions=spec.num_actions,
        dist=net.dist,
        noise_size=linear.noise_size,
        support=torch.linspace(net.v_min, net.v_max, net.atoms) if net.dist == "c51" else None,
        taus={"qr": midpoints(net.atoms), "iqn": midpoints(IQN_EVAL_TAUS)}.get(net.dist),
        plain=kind == "mlp" and net.dist == "scalar" and not own and not net.noisy and spec.obs_dtype == "float32",
    )


def _auto(image: Image | None) -> str:
    if image is None:
        return "mlp"
    if (image.height, image.width) == (84, 84) and image.order in ("HW", "CHW"):
        return "nature"
    return "grid" if max(image.height, image.width) <= 16 else "impala"


def _encoder(kind: str, image: Image | None, spec: Spec) -> Flat | Nature | Grid | Impala:
    if kind == "mlp":
        return Flat(spec)
    if image is None:
        raise ConfigError(
            f"network.kind is {kind!r}, but observations of shape {spec.obs_shape} ({spec.obs_dtype}) are no images: "
            f"use --network.kind mlp or auto."
        )
    if kind == "nature":
        return Nature(image)
    return Grid(image) if kind == "grid" else Impala(image)
