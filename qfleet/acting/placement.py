"""Where actions are computed: measured, not guessed.

A GPU answers a batch of any size in about the same time, most of which is the way there and back; a core answers small
networks and small batches sooner. Where one overtakes the other depends on the network, the batch and the machine.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import torch

from qfleet import networks
from qfleet.acting.policy import Policy, Recorded
from qfleet.config import Config
from qfleet.types import Spec

BUDGET = 0.1  # seconds of measuring on each device
LEAST = 3  # measurements


def untrained(config: Config, spec: Spec, device: str) -> Policy:
    return Policy(networks.build(config, spec).to(device).eval(), config, spec, device)


def seconds(policy: Policy, batch: int) -> float:
    """From observations in main memory to actions in main memory: recorded on a GPU, else on one core.

    (The other cores belong to the environments.) The median of some tries.
    """
    rng = np.random.default_rng(0)
    obs = (rng.random((batch, *policy.spec.input_shape)) * 255).astype(policy.spec.obs_dtype)
    player = policy if policy.device.type == "cpu" else Recorded(policy, batch)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        player.act(obs)  # libraries are loaded and algorithms chosen
        return median_seconds(lambda: player.act(obs))
    finally:
        torch.set_num_threads(threads)


def median_seconds(once: Callable[[], object]) -> float:
    times: list[float] = []
    end = time.perf_counter() + BUDGET
    while len(times) < LEAST or time.perf_counter() < end:
        began = time.perf_counter()
        once()
        times.append(time.perf_counter() - began)
    return float(np.median(times))


def choose(config: Config, spec: Spec, batch: int, device: torch.device) -> str:
    """The device that answers a batch of this size sooner: this one or the CPU."""
    if device.type == "cpu":
        return "cpu"
    there, here = (seconds(untrained(config, spec, name), batch) for name in (str(device), "cpu"))
    return str(device) if there <= here else "cpu"


def crossover(config: Config, spec: Spec, gpu: str) -> list[tuple[int, float, float]]:
    """(batch, seconds on one core, seconds on the GPU) for some numbers of environments."""
    here, there = untrained(config, spec, "cpu"), untrained(config, spec, gpu)
    return [(batch, seconds(here, batch), seconds(there, batch)) for batch in (1, 8, 64, 512)]
