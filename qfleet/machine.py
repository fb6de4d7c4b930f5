"""What of this machine the process may use: its scheduler and its control groups (containers) may leave it a part. And how to add to it."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

# Read by tests from a made-up tree.
CPUINFO = Path("/proc/cpuinfo")
MEMINFO = Path("/proc/meminfo")
PROCESS_CGROUP = Path("/proc/self/cgroup")
CGROUPS = Path("/sys/fs/cgroup")


def install(extra: str) -> str:
    """The command that adds an extra to the packages of this Python, whether or not the shell is in its environment."""
    found = Path(shutil.which("pip") or "")
    pip = "pip" if found.parent == Path(sys.executable).parent else f"{os.path.relpath(sys.executable)} -m pip"
    return f'{pip} install "qfleet[{extra}]"'


def cpu() -> dict[str, str]:
    """What the system says of the first processor; empty where it says nothing."""
    first = _read(CPUINFO).split("\n\n")[0]
    return {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in first.splitlines())}


def amd() -> bool:
    return cpu().get("vendor_id") == "AuthenticAMD"


# What glibc calls them, and what they are set to: up to these sizes it keeps what is freed, and all threads share it.
KEPT = {-3: 256 << 20, -1: 1 << 30, -8: 1}  # M_MMAP_THRESHOLD, M_TRIM_THRESHOLD (bytes); M_ARENA_MAX


@functools.cache
def keep_memory() -> None:
    """Memory that is freed stays with this process, to be used again. By default large pieces go back to the system, and each comes as fresh pages the
    next time, which must be cleared first: a quarter of the time of a Nature network's gradient of 400 samples."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:  # there is none without glibc
        for what, most in KEPT.items():
            mallopt(what, most)


def cores() -> int:
    """Those it may run on (taskset, Slurm), or fewer where a container has a quota of their time."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min([allowed, *map(int, _quotas())]))


def _quotas() -> Iterator[float]:
    """Cores' worth of time, of every control group that limits it."""
    for folder in _control_groups("cpu"):
        quota, period = _read(folder / "cpu.cfs_quota_us"), _read(folder / "cpu.cfs_period_us")  # version 1
        if not quota:
            quota, _, period = _read(folder / "cpu.max").partition(" ")
        with contextlib.suppress(ValueError, ZeroDivisionError):  # "max", or no file
            if (cores := float(quota) / float(period)) > 0:  # version 1 says -1 for no limit
                yield max(1.0, cores)


def free_memory() -> int | None:
    """Bytes of main memory that can still be allocated; None where the system does not say."""
    limits = [limit for limit in (_machine(), *map(_left, _control_groups("memory"))) if limit is not None]
    return min(limits, default=None)


def _machine() -> int | None:
    for line in _read(MEMINFO).splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def _left(folder: Path) -> int | None:
    for limit_name, used_name in (
        ("memory.max", "memory.current"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes"),
    ):
        limit, used = _read(folder / limit_name), _read(folder / used_name)
        if limit.isdigit() and used.isdigit():
            # File pages not in use count as used, but are given back on demand.
            stat = dict(line.split() for line in _read(folder / "memory.stat").splitlines())
            return max(0, int(limit) - int(used) + int(stat.get("inactive_file", 0)))
    return None


def _control_groups(controller: str) -> Iterator[Path]:
    """The folders of those around this process, version 2 and version 1."""
    for line in _read(PROCESS_CGROUP).splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers or controller in controllers.split(","):
            root = CGROUPS / controllers
            group = root / path.strip("/")
            # Inside a container the path may name a folder of the host: then only the root is there.
            yield from (folder for folder in (group, *group.parents) if folder.is_relative_to(root))


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
