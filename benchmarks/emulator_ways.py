"""Pong with random actions: groups of games that take turns, against ale-py's asynchronous batches (whichever games are ready).

    python benchmarks/emulator_ways.py [--envs 64] [--threads 2] [--repeats 5] [--seconds 4]

In one process, one frame an observation; every measurement in a fresh process, in turn; medians. With groups a game has its step when
its turn comes; asynchronous batches have the games in the order in which they are done, which is another one every time.
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

import numpy as np
from common import child, median, record

from qfleet import machine

SETTINGS: dict[str, Any] = {"stack_num": 1, "reward_clipping": False, "repeat_action_probability": 0.25, "use_fire_reset": False}  # fmt: skip


def one(way: str, envs: int, threads: int, seconds: float) -> float:
    """`way`: groups:N or batches:N, N of which make all games; `threads` of each."""
    from ale_py import AtariVectorEnv

    kind, parts = way.split(":")
    size, random = envs // int(parts), np.random.default_rng(0)
    if kind == "groups":
        made = [AtariVectorEnv("pong", num_envs=size, num_threads=threads, **SETTINGS) for _ in range(int(parts))]
    else:
        threads *= int(parts)  # as many in all as the groups have
        made = [AtariVectorEnv("pong", num_envs=envs, batch_size=size, num_threads=threads, **SETTINGS)]
    for games in made:
        games.reset(seed=0)
        games.send(random.integers(0, 6, size))

    def run(seconds: float) -> float:
        steps, began = 0, time.perf_counter()
        while (passed := time.perf_counter() - began) < seconds:
            for games in made:
                games.recv()
                games.send(random.integers(0, 6, size))
                steps += size
        return steps / passed

    run(0.5)
    return run(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--envs", type=int, default=64)
    parser.add_argument("--threads", type=int, default=machine.cores())
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--ways", nargs="*", default=["groups:1", "groups:2", "groups:4", "batches:2", "batches:4"])
    parser.add_argument("--one", help="measure once in this process and print JSON")
    args = parser.parse_args()
    if args.one:
        print(json.dumps({"rate": one(args.one, args.envs, args.threads, args.seconds)}))
        return
    rates: dict[str, list[float]] = {way: [] for way in args.ways}
    about = ["--envs", str(args.envs), "--threads", str(args.threads), "--seconds", str(args.seconds)]
    for _ in range(args.repeats):
        for way, seen in rates.items():
            seen.append(child(__file__, "--one", way, *about)["rate"])
    for way, seen in rates.items():
        print(f"{way:12s} {median(seen):9,.0f} steps/s  ({min(seen):,.0f} to {max(seen):,.0f})")
    record("emulator_ways", {"envs": args.envs, "threads": args.threads, "steps_per_second": rates})


if __name__ == "__main__":
    main()
