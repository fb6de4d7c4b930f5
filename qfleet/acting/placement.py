"""Where actions are computed: measured, not guessed.

A GPU answers a batch of any size in about the same time, most of which is the way there and back; a core answers small
networks and small batches sooner. Where one overtakes the other depends on the network, the batch and the machine.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import torch

from qfleet.acting.policy import Policy, Recorded

BUDGET = 0.1  # seconds of measuring on each device
LEAST = 3  # measurements


def seconds(policy: Policy, batch: int) -> float:
    """From observations in main memory to actions in main memory, as it will be done: recorded on a GPU, else on one core.

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


def choose(policy_on: Callable[[str], Policy], batch: int, gpu: str) -> str:
    """The device that answers a batch of this size sooner: `gpu` or cpu."""
    return gpu if seconds(policy_on(gpu), batch) <= seconds(policy_on("cpu"), batch) else "cpu"


def crossover(policy_on: Callable[[str], Policy], gpu: str) -> list[tuple[int, float, float]]:
    """(batch, seconds on one core, seconds on the GPU) for some numbers of environments."""
    here, there = policy_on("cpu"), policy_on(gpu)
    return [(batch, seconds(here, batch), seconds(there, batch)) for batch in (1, 8, 64, 512)]
