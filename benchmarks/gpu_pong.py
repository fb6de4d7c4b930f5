"""Pong on one GPU: steps per second while training, against the same environments with random actions in the same run.

    python benchmarks/gpu_pong.py [--cases double:8 double:32 rainbow:8] [--envs 256] [--groups 2]

A case is a recipe and its samples per step.

The limit is the best of several ways to step as many environments with nothing else going on (groups, threads, threads or
processes), before the training and after it. Training: Nature network, n = 3, batch 256, replay of 1M steps on the GPU, epsilon 0.1, after learning has begun.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from common import record


def emulator(num_envs: int, groups: int, threads: int, vectorize: str, seconds: float) -> float:
    """Steps per second with random actions."""
    from qfleet import envs
    from qfleet.config import EnvConfig

    config = EnvConfig(id="pong", num_envs=num_envs, vectorize=vectorize, sticky_actions=0.25)  # type: ignore[arg-type]
    made = envs.make_groups(config, seed=1, groups=groups, threads=threads)
    rng = np.random.default_rng(0)
    size = num_envs // groups
    actions = [rng.integers(0, 6, size) for _ in range(64)]
    for group in made:
        group.reset()
        group.send(actions[0])
    for _ in range(8):  # get going
        for group in made:
            group.recv()
            group.send(actions[1])
    began, ticks = time.perf_counter(), 0
    while (elapsed := time.perf_counter() - began) < seconds:
        ticks += 1
        for group in made:
            group.recv()
            group.send(actions[ticks % 64])
    for group in made:
        group.recv()
        group.close()
    return ticks * num_envs / elapsed


def training(settings: dict[str, Any], recipe: str, seconds: float, profile: bool) -> dict[str, float]:
    from qfleet.api import compose
    from qfleet.runtime.progress import Progress
    from qfleet.runtime.train import Trainer

    config = compose("pong", recipe, None, settings)
    profiler = cProfile.Profile()
    with tempfile.TemporaryDirectory() as folder, Progress(1, "", interactive=False) as progress:
        made = time.perf_counter()
        trainer = Trainer(config, Path(folder), progress)
        made = time.perf_counter() - made
        began = 0.0
        while not began or time.perf_counter() - began < seconds:
            if not began and trainer.worker.learner.updates > 200:
                trainer.worker.schedule.wait()
                began, marks = time.perf_counter(), trainer.worker.clock()
                if profile:
                    profiler.enable()
            trainer.worker.round()
        trainer.worker.schedule.wait()
        now = trainer.worker.clock()
        wall = time.perf_counter() - began
        profiler.disable()
        trainer.close()
    if profile:
        pstats.Stats(profiler).sort_stats("tottime").print_stats(25)
    rate = {name: (now[name] - marks[name]) / wall for name in now}
    return {
        "steps_per_second": rate["steps"],
        "updates_per_second": rate["updates"],
        "samples_per_second": rate["updates"] * config.learner.batch_size,
        "env_share": rate["env"],
        "act_share": rate["act"],
        "learner_busy": rate["learn"],
        "seconds_to_make": made,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="*", default=["double:8", "double:32", "rainbow:8"], metavar="RECIPE:SAMPLES")
    parser.add_argument("--envs", type=int, default=256)
    parser.add_argument("--groups", type=int, default=2)
    parser.add_argument("--threads", type=int, default=0, help="of the training; otherwise those of the best way")
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--quick", action="store_true", help="leave out the ways that take a minute to make")
    parser.add_argument("--profile", action="store_true", help="show what the main thread does (slower)")
    parser.add_argument("--set", nargs="*", default=[], metavar="PATH=VALUE")
    args = parser.parse_args()
    import os

    cores = os.cpu_count() or 1
    ways = [(args.groups, cores, "subprocess"), (args.groups, 2 * cores, "subprocess")]
    if not args.quick:
        ways += [(1, cores, "native"), (args.groups, cores, "native")]
    alone: dict[str, list[float]] = {}

    def measure(way: tuple[int, int, str]) -> None:
        groups, threads, kind = way
        got = emulator(args.envs, *way, 5.0)
        alone.setdefault(f"{groups} groups, {threads} threads, {kind}", []).append(got)
        print(f"emulator alone  {args.envs} in {groups} groups, {threads} {kind}: {got:,.0f} steps/s", flush=True)

    for way in ways:
        measure(way)
    best_way = max(ways, key=lambda way: alone[f"{way[0]} groups, {way[1]} threads, {way[2]}"][0])
    threads = args.threads or best_way[1]
    cases = [(recipe, float(samples)) for recipe, samples in (case.split(":") for case in args.cases)]
    trained = []
    for recipe, samples in cases:
        settings: dict[str, Any] = {
            "env.num_envs": args.envs, "runtime.groups": args.groups, "runtime.emulator_threads": threads, "device": "cuda",
            "replay.capacity": 1_000_000, "replay.min_steps": 20_000, "replay.samples_per_step": samples, "learner.batch_size": 256,
            "learner.n_step": 3, "runtime.steps_per_round": 4 * args.envs, "runtime.lag": 1, "total_steps": 100_000_000,
            "acting.epsilon_start": 0.1, "acting.epsilon_end": 0.1, **dict(item.split("=", 1) for item in args.set),
        }  # fmt: skip
        trained.append(training(settings, recipe, args.seconds, args.profile))
        print(
            f"training  {recipe}, {samples:g} samples per step: {trained[-1]['steps_per_second']:,.0f} steps/s",
            flush=True,
        )
    measure(best_way)  # nothing got slower meanwhile?
    best = max(rate for rates in alone.values() for rate in rates)
    for (recipe, samples), got in zip(cases, trained, strict=True):
        print(f"training  {recipe}, {samples:g} samples per step: {got['steps_per_second']:,.0f} steps/s = "
              f"{got['steps_per_second'] / best:.1%} of the best, {got['samples_per_second']:,.0f} samples/s  "
              + "  ".join(f"{k} {got[k]:.2f}" for k in ("env_share", "act_share", "learner_busy", "seconds_to_make")), flush=True)  # fmt: skip
        about = {
            "recipe": recipe,
            "samples_per_step": samples,
            "envs": args.envs,
            "groups": args.groups,
            "threads": threads,
            "alone": alone,
        }
        record("gpu_pong", {**about, "share": got["steps_per_second"] / best, **got})


if __name__ == "__main__":
    main()
