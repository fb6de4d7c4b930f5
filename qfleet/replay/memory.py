"""A replay that does not fit is refused before it is allocated."""

from __future__ import annotations

import torch

from qfleet.config import Config, ConfigError
from qfleet.device import free_memory


def check(config: Config, needed: int, device: torch.device) -> None:
    """Raise a ConfigError that names the flag when `needed` bytes are not there."""
    free = free_memory(device)
    if free is None or needed <= free:
        return
    capacity = config.replay.capacity
    fits = int(capacity * free / needed * 0.95)
    elsewhere = ", or move it with --replay.device cpu" if device.type == "cuda" else ""
    raise ConfigError(
        f"replay.capacity {capacity:,} needs {needed / 1e9:.2f} GB on {device.type}, but {free / 1e9:.2f} GB are "
        f"available: lower it, for example to --replay.capacity {fits}{elsewhere}."
    )
