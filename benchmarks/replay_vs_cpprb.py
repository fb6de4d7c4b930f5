"""Prioritised replay against cpprb's C++ PrioritizedReplayBuffer: sample, gather and priority update, per second.

    python benchmarks/replay_vs_cpprb.py                # needs cpprb
    python benchmarks/replay_vs_cpprb.py --atari-rss    # also: resident memory of 1M Atari steps (takes 7.1 GB)

Both hold the same number of vector transitions and use one thread. One iteration draws a batch with importance weights,
gathers it, and writes new priorities for it. The two take turns, so that a noisy machine disturbs both alike; medians
over the turns. cpprb is measured with observations stored twice (its default) and once (`next_of`); the faster
counts. A JSON line is appended to benchmarks/results/replay.jsonl.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from common import median, record

from qfleet.config import Config, EnvConfig, LearnerConfig, ReplayConfig
from qfleet.replay import Replay
from qfleet.types import Spec, Step

COLUMNS = 8
BETA = 0.4


def make_config(capacity: int, batch: int, n: int, prioritized: bool) -> Config:
    return Config(
        total_steps=10 * capacity,
        env=EnvConfig(num_envs=COLUMNS),
        replay=ReplayConfig(capacity=capacity, prioritized=prioritized),
        learner=LearnerConfig(batch_size=batch, n_step=n),
    )


def random_rows(rows: int, spec: Spec, generator: torch.Generator) -> Step:
    """Episodes of 200 steps, out of phase, each followed by the row of its terminal observation."""
    phase = (torch.arange(rows)[:, None] + torch.arange(COLUMNS) * 25) % 201
    shape = (rows, COLUMNS)
    obs = torch.randint(256, (*shape, *spec.obs_shape), generator=generator, dtype=torch.uint8)
    return Step(
        obs=obs if spec.obs_dtype == "uint8" else obs.float(),
        action=torch.randint(spec.num_actions, shape, generator=generator),
        reward=torch.rand(shape, generator=generator),
        terminated=phase == 199,
        truncated=torch.zeros(shape, dtype=torch.bool),
        first=phase == 0,
    )


def ours(capacity: int, batch: int, obs_dim: int, n: int, errors: np.ndarray) -> Callable[[int], None]:
    spec = Spec(obs_shape=(obs_dim,), obs_dtype="float32", num_actions=4)
    replay = Replay(make_config(capacity, batch, n, prioritized=True), spec)
    replay.extend(random_rows(capacity // COLUMNS, spec, torch.Generator().manual_seed(0)))
    ids = torch.arange(capacity // COLUMNS * COLUMNS)
    replay.update_priorities(ids, torch.rand(len(ids), generator=torch.Generator().manual_seed(1)))
    td_errors = torch.from_numpy(errors)

    def iteration(i: int) -> None:
        drawn = replay.sample(i, beta=BETA)
        replay.update_priorities(drawn.id, td_errors[i % len(td_errors)])

    return iteration


def cpprb(capacity: int, batch: int, obs_dim: int, next_of: bool, errors: np.ndarray) -> Callable[[int], None]:
    from cpprb import PrioritizedReplayBuffer

    fields = {"obs": {"shape": obs_dim}, "act": {"dtype": np.int64}, "rew": {}, "done": {}}
    if next_of:
        buffer = PrioritizedReplayBuffer(capacity, fields, alpha=0.5, next_of="obs")
    else:
        buffer = PrioritizedReplayBuffer(capacity, {**fields, "next_obs": {"shape": obs_dim}}, alpha=0.5)
    rng = np.random.default_rng(0)
    chunk = 10_000
    for _ in range(capacity // chunk):
        obs = rng.random((chunk + 1, obs_dim), dtype=np.float32)
        scalars = {"act": rng.integers(4, size=chunk), "rew": rng.random(chunk), "done": np.zeros(chunk)}
        buffer.add(obs=obs[:-1], next_obs=obs[1:], **scalars)
    buffer.update_priorities(np.arange(capacity), rng.random(capacity))

    def iteration(i: int) -> None:
        drawn = buffer.sample(batch, BETA)
        buffer.update_priorities(drawn["indexes"], errors[i % len(errors)])

    return iteration


def compare(args: argparse.Namespace) -> dict[str, float]:
    """Iterations per second of every contestant: medians over interleaved turns."""
    errors = np.random.default_rng(2).random((997, args.batch), dtype=np.float32)
    sizes = (args.capacity, args.batch, args.obs_dim)
    contestants = {
        "qfleet": ours(*sizes, 1, errors),
        "qfleet, n = 3": ours(*sizes, 3, errors),
        "cpprb": cpprb(*sizes, False, errors),
        "cpprb, next_of": cpprb(*sizes, True, errors),
    }
    rates: dict[str, list[float]] = {name: [] for name in contestants}
    for turn in range(args.turns + 1):
        for name, iteration in contestants.items():
            begin = time.perf_counter()
            for i in range(args.iterations):
                iteration(turn * args.iterations + i)
            if turn:  # the first turn compiles and warms up
                rates[name].append(args.iterations / (time.perf_counter() - begin))
    return {name: median(values) for name, values in rates.items()}


def resident() -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0]) * 1024


def atari_rss(capacity: int) -> dict[str, float]:
    """GB of resident memory that a replay full of Atari frames adds, and GB it announced."""
    spec = Spec(obs_shape=(84, 84), obs_dtype="uint8", num_actions=18, frame_stack=4)
    config = make_config(capacity, 32, 3, prioritized=False)
    rows = random_rows(1005, spec, torch.Generator().manual_seed(0))
    before = resident()
    replay = Replay(config, spec)
    while int(replay.count[0]) < capacity // COLUMNS + 5:  # past the wrap
        replay.extend(rows)
    replay.sample(0)
    return {"added_gb": (resident() - before) / 1e9, "announced_gb": Replay.memory(config, spec) / 1e9}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--capacity", type=int, default=1_000_000)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--obs-dim", type=int, default=8)
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--iterations", type=int, default=300, help="per turn and contestant")
    parser.add_argument("--atari-rss", action="store_true", help="also measure resident memory of Atari replay")
    args = parser.parse_args()
    torch.set_num_threads(1)

    result: dict[str, object] = {"capacity": args.capacity, "batch": args.batch, "obs_dim": args.obs_dim}
    if args.atari_rss:
        memory = atari_rss(args.capacity)
        added, announced = memory["added_gb"], memory["announced_gb"]
        print(f"{args.capacity:,} Atari steps: {added:.2f} GB resident, {announced:.2f} GB announced\n")
        result["atari_rss"] = memory

    rates = compare(args)
    best = max(rate for name, rate in rates.items() if name.startswith("cpprb"))
    print(f"{'sample + gather + update':<26}{'per second':>12}{'us each':>10}{'x best cpprb':>14}")
    for name, rate in rates.items():
        print(f"{name:<26}{rate:>12,.0f}{1e6 / rate:>10.0f}{rate / best:>14.2f}")
    record("replay", {**result, "per_second": rates, "ratio": rates["qfleet"] / best})


if __name__ == "__main__":
    main()
