"""How much memory there is, so that a replay that does not fit is refused before it is allocated."""

from __future__ import annotations

from pathlib import Path

import torch

from qfleet.config import Config, ConfigError

# Read by tests from a made-up tree.
MEMINFO = Path("/proc/meminfo")
PROCESS_CGROUP = Path("/proc/self/cgroup")
CGROUPS = Path("/sys/fs/cgroup")


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
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    limits = [limit for limit in (_machine(), *_containers()) if limit is not None]
    return min(limits, default=None)


def _machine() -> int | None:
    for line in _read(MEMINFO).splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def _containers() -> list[int | None]:
    """What each control group around this process leaves, version 2 and version 1."""
    limits = []
    for line in _read(PROCESS_CGROUP).splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers in ("", "memory"):
            root = CGROUPS / controllers
            group = root / path.strip("/")
            # Inside a container the path may name a folder of the host: then only the root is there.
            limits += [_left(folder) for folder in (group, *group.parents) if folder.is_relative_to(root)]
    return limits


def _left(folder: Path) -> int | None:
    for limit_name, used_name in (
        ("memory.max", "memory.current"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes"),
    ):
        limit, used = _read(folder / limit_name).strip(), _read(folder / used_name).strip()
        if limit.isdigit() and used.isdigit():
            # File pages not in use count as used, but are given back on demand.
            stat = dict(line.split() for line in _read(folder / "memory.stat").splitlines())
            return max(0, int(limit) - int(used) + int(stat.get("inactive_file", 0)))
    return None


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
