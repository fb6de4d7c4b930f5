"""A replay that does not fit is refused before it is allocated."""

from __future__ import annotations

import gc

import torch

from qfleet import machine
from qfleet.config import Config, ConfigError


def check(config: Config, needed: int, device: torch.device) -> None:
    """Raise a ConfigError that names the flag when `needed` bytes are not there."""
    free = available(device)
    if free is None or needed <= free:
        return
    capacity = config.replay.capacity
    fits = int(capacity * free / needed * 0.95)
    elsewhere = ", or move it with --replay.device cpu" if device.type == "cuda" else ""
    raise ConfigError(
        f"replay.capacity {capacity:,} needs {needed / 1e9:.2f} GB on {device.type}, but {free / 1e9:.2f} GB are "
        f"available: lower it, for example to --replay.capacity {fits}{elsewhere}."
    )


def available(device: torch.device) -> int | None:
    """Bytes that can still be allocated on the device; None where the system does not say."""
    if device.type != "cuda":
        return machine.free_memory()
    gc.collect()  # an earlier run of this process is a cycle of objects
    torch.cuda.empty_cache()  # what it left counts as used
    return int(torch.cuda.mem_get_info(device)[0])
