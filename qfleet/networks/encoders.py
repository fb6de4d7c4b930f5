"""Encoders: observations as stored (uint8, bool, float32) in, float features [B, F] out.

Pixels (every uint8) are scaled by 1/255, booleans are cast as they are. Convolutions run in channels-last memory, which
makes their backward pass a third faster on the CPU and is what tensor cores want on the GPU; only `Grid`, with its few
channels, is faster in the plain layout.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qfleet.config import ConfigError
from qfleet.types import Spec


class Image(NamedTuple):
    """How a network input [B, *input_shape] is read as an image of `channels` x `height` x `width`."""

    channels: int  # a stack of k images of c channels has k * c
    height: int
    width: int
    order: str  # axes after the batch: "HW", "CHW", "HWC", and "KCHW", "KHWC" for stacks of images with channels


def image_of(spec: Spec) -> Image | None:
    """The image in an observation, or None for a vector.

    Images are all three-dimensional observations and two-dimensional ones of pixels (uint8, bool): a float matrix is a
    table of features more often than a picture. Three dimensions are (H, W, C), or (C, H, W) if the first is the
    smallest.
    """
    shape, stack = spec.obs_shape, spec.frame_stack
    if len(shape) == 2 and spec.obs_dtype != "float32":
        return Image(stack, *shape, "HW" if stack == 1 else "CHW")
    if len(shape) != 3:
        return None
    if shape[0] < min(shape[1:]):
        return Image(*shape, "CHW") if stack == 1 else Image(stack * shape[0], *shape[1:], "KCHW")
    return Image(stack * shape[2], *shape[:2], "HWC" if stack == 1 else "KHWC")


def to_float(x: Tensor) -> Tensor:
    if x.dtype == torch.float32:
        return x
    return x.float().mul_(1 / 255) if x.dtype == torch.uint8 else x.float()


def to_nchw(x: Tensor, order: str) -> Tensor:
    """Any input order to [B, C, H, W], a view where possible."""
    if order == "HW":
        return x.unsqueeze(1)
    if order == "HWC":
        return x.permute(0, 3, 1, 2)
    if order == "KHWC":
        return x.permute(0, 2, 3, 1, 4).flatten(3).permute(0, 3, 1, 2)
    if order == "KCHW":
        return x.flatten(1, 2)
    assert order == "CHW", order
    return x


def pixels(x: Tensor, order: str, layout: torch.memory_format) -> Tensor:
    """Stored observations to float [B, C, H, W] in `layout`; bytes are reordered before they become four each."""
    return to_float(to_nchw(x, order).contiguous(memory_format=layout))


def channels_last_(module: nn.Module) -> None:
    """Lay convolution weights out as their inputs are, so that no call has to reorder them."""
    for p in module.parameters():
        if p.dim() == 4:
            p.data = p.data.contiguous(memory_format=torch.channels_last)


class Flat(nn.Module):
    """Vectors, and anything an MLP shall read: flattened."""

    def __init__(self, spec: Spec) -> None:
        super().__init__()
        self.features = math.prod(spec.input_shape)

    def forward(self, x: Tensor, noise: Tensor | None = None, taus: Tensor | None = None) -> Tensor:
        return to_float(x if x.dim() == 2 else x.flatten(1))


def space_to_depth(x: Tensor) -> Tensor:
    """uint8 [B, C, H, W] -> [B, 16C, H/4, W/4] in channels-last memory, channels ordered as by F.pixel_unshuffle.

    Four neighbouring pixels of a row stay neighbours, so they move as one 32-bit word: 3 to 4 times as fast.
    """
    b, c, h, w = x.shape
    words = x.contiguous().view(torch.int32).view(b, c, h // 4, 4, w // 4)
    return words.permute(0, 2, 4, 1, 3).reshape(b, h // 4, w // 4, 4 * c).view(torch.uint8).permute(0, 3, 1, 2)


def fold_weight(weight: Tensor) -> Tensor:
    """Weight of an 8x8 stride-4 convolution [O, C, 8, 8] -> of the equal 2x2 one after space-to-depth [O, 16C, 2, 2]."""
    return F.pixel_unshuffle(weight, 4)


def unfold_weight(weight: Tensor) -> Tensor:
    """The inverse of `fold_weight`, for export to a plain Nature CNN."""
    return F.pixel_shuffle(weight, 4)


class FoldedConv(nn.Module):
    """An 8x8 stride-4 convolution that reads its input after space-to-depth; starts as nn.Conv2d would."""

    def __init__(self, channels: int, out: int) -> None:
        super().__init__()
        plain = nn.Conv2d(channels, out, 8, stride=4)
        self.weight = nn.Parameter(fold_weight(plain.weight.detach()))
        self.bias = plain.bias

    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(x, self.weight, self.bias)


class Nature(nn.Module):
    """The CNN of Mnih et al. (2015), its first convolution re-parametrised exactly by space-to-depth.

    8x8 stride 4 over C channels is 2x2 stride 1 over the 16C channels of 4x4 blocks: the same numbers, but a shape
    that vector units and tensor cores like. It starts as the function that the plain layers would be.
    """

    def __init__(self, image: Image) -> None:
        super().__init__()
        if min(image.height, image.width) < 36:
            raise ConfigError(
                f"network.kind nature needs images of at least 36x36 pixels, but these have {image.height}x{image.width}: "
                f"use --network.kind grid or impala."
            )
        self.order = image.order
        self.rows, self.cols = image.height // 4 * 4, image.width // 4 * 4  # the plain stride leaves the rest out, too
        self.conv1 = FoldedConv(image.channels, 32)
        self.conv2 = nn.Conv2d(32, 64, 4, stride=2)
        self.conv3 = nn.Conv2d(64, 64, 3)
        channels_last_(self)
        side = [((n // 4 - 1) - 4) // 2 + 1 - 2 for n in (self.rows, self.cols)]
        self.features = 64 * side[0] * side[1]

    def forward(self, x: Tensor, noise: Tensor | None = None, taus: Tensor | None = None) -> Tensor:
        if x.dtype == torch.uint8 and self.order == "CHW":
            x = to_float(space_to_depth(x[..., : self.rows, : self.cols]))
        else:
            x = pixels(x, self.order, torch.channels_last)[..., : self.rows, : self.cols]
            x = F.pixel_unshuffle(x, 4)
        x = torch.relu_(self.conv1(x))  # [B, 32, 20, 20]
        x = torch.relu_(self.conv2(x))  # [B, 64, 9, 9]
        x = torch.relu_(self.conv3(x))  # [B, 64, 7, 7]
        return x.permute(0, 2, 3, 1).flatten(1)  # as they lie in memory: no copy


class Grid(nn.Module):
    """MinAtar's encoder (Young & Tian, 2019): one 3x3 convolution with 16 channels."""

    def __init__(self, image: Image) -> None:
        super().__init__()
        if min(image.height, image.width) < 3:
            raise ConfigError(
                f"network.kind grid needs grids of at least 3x3, but these have {image.height}x{image.width}: "
                f"use --network.kind mlp."
            )
        self.order = image.order
        self.conv = nn.Conv2d(image.channels, 16, 3)
        self.features = 16 * (image.height - 2) * (image.width - 2)

    def forward(self, x: Tensor, noise: Tensor | None = None, taus: Tensor | None = None) -> Tensor:
        return torch.relu_(self.conv(pixels(x, self.order, torch.contiguous_format))).flatten(1)


class Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.conv1(torch.relu(x))  # not in place: the skip connection needs x
        y = self.conv2(torch.relu_(y))
        return x + y


class Impala(nn.Module):
    """The ResNet of IMPALA (Espeholt et al., 2018): three stages of convolution, max-pool and two residual blocks."""

    def __init__(self, image: Image) -> None:
        super().__init__()
        self.order = image.order
        channels, height, width = image.channels, image.height, image.width
        stages: list[nn.Module] = []
        for out in (16, 32, 32):
            stages += [
                nn.Conv2d(channels, out, 3, padding=1),
                nn.MaxPool2d(3, 2, padding=1),
                Residual(out),
                Residual(out),
            ]
            channels, height, width = out, (height + 1) // 2, (width + 1) // 2
        self.stages = nn.Sequential(*stages)
        channels_last_(self)
        self.features = channels * height * width

    def forward(self, x: Tensor, noise: Tensor | None = None, taus: Tensor | None = None) -> Tensor:
        return torch.relu_(self.stages(pixels(x, self.order, torch.channels_last))).flatten(1)
