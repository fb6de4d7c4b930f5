"""Ray, before anything runs on it: can these learners work together there, is a cluster there, and has it enough for them?"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from typing import Any

from qfleet import machine
from qfleet.config import Config, ConfigError
from qfleet.runtime.team import TeamError, check_division

REACH = 10.0  # seconds for a cluster to take a connection
FAIR = {"worker_niceness": 0}  # Ray's 15 leaves learners a thirtieth of a core that another program uses


@contextlib.contextmanager
def joined(ray: Any, config: Config, servers: int) -> Iterator[tuple[float, int]]:
    """The cluster that is given, or that this process has joined already, or a local one of our own. -> GPUs of a learner, learners on a machine"""
    with contextlib.ExitStack() as opened:
        needed = config.learners + servers
        address = address_of(config)
        if not ray.is_initialized():
            quiet = {"include_dashboard": None if address else False, "log_to_driver": False, "logging_level": "ERROR"}
            ours = {"address": "local", "num_cpus": max(machine.cores(), needed + 1), "_system_config": FAIR}
            there = {"address": address} if address else ours
            try:
                ray.init(**there, **quiet)
            except ConnectionError as e:
                raise ConfigError(f"no Ray cluster at {address!r}: {str(e).splitlines()[0]}") from None
            except Exception as e:  # a plain one, where Ray's own processes did not start in time
                if address:
                    raise
                raise TeamError(
                    f"a local Ray did not start: {str(e).partition('. ')[0]}. Is the machine busy? Try again later; or start Ray by itself, `ray start --head`, and join it with --address auto."
                ) from e
            opened.callback(ray.shutdown)
        found = ray.cluster_resources().get("CPU", 0)
        if found < needed:
            raise ConfigError(
                f"{config.learners} learners and {servers} servers take a CPU each ({needed}), but the Ray cluster has {found:g}: add machines, or ask for fewer."
            )
        gpus = 0.0
        if config.device == "cuda":
            if not (there_are := ray.cluster_resources().get("GPU", 0)):
                raise ConfigError("device is 'cuda', but the Ray cluster has no GPU: use --device cpu.")
            gpus = 1 / -(-config.learners // there_are)  # learners may share one
        machines = sum(node["Alive"] for node in ray.nodes())
        yield gpus, -(-config.learners // machines)


def check(config: Config) -> None:
    """Can these learners work together on Ray?"""
    if config.sync.transport == "allreduce" and config.sync.balance:
        raise ConfigError(
            "sync.balance on Ray needs servers, which measure how fast everybody is: add --sync.transport server."
        )
    if config.sync.backup >= config.learners:
        raise ConfigError(
            f"sync.backup is {config.sync.backup}, but of {config.learners} learners at least one must be waited for: use {config.learners - 1} at most."
        )
    check_division(config, config.learners)
    if config.device not in ("auto", "cpu", "cuda"):
        raise ConfigError(f"device is {config.device!r}, but Ray gives every learner its GPU: use --device cuda.")


def address_of(config: Config) -> str:
    return config.address or os.environ.get("RAY_ADDRESS", "")


def reach(address: str) -> None:
    """Is anybody there? Ray itself would try for minutes."""
    if address in ("", "auto", "local") or "://" in address:
        return
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise ConfigError(f"address is {address!r}, but it must be the HOST:PORT of a Ray cluster, or auto.")
    try:
        socket.create_connection((host, int(port)), timeout=REACH).close()
    except OSError as e:
        raise ConfigError(
            f"no Ray cluster at {address!r} ({e.strerror or e}): start one there (`ray start --head`), or leave --address out."
        ) from None
