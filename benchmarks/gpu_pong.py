"""Pong on one GPU: steps per second while training, against the same number of games with random actions.

    python benchmarks/gpu_pong.py [--cases double:8 double:32 rainbow:8] [--envs 512] [--repeats 5] [--alone 2:32 one:1:16] [--sb3 3]

A case is a recipe, its samples per step and, if given, groups and emulator threads (double:8:4:32); otherwise qfleet chooses them.
All are made first; then they run in turn, half a second and then a few seconds that count, while the others stand still, so that all see
the same machine. The limit: of the ways to step the games with nothing else going on (threads and groups; by worker processes, or "one": all
in one process, by ale-py's threads alone), the one with the best median.
Training: Nature network, n = 3, batch 256, replay of 1M steps on the GPU, epsilon 0.1, after learning has begun; without evaluations and
checkpoints. Stable-Baselines3, one environment, trains before all that, so many times (--sb3). Every turn is recorded at once; interrupted, it reports what it has.
"""

from __future__ import annotations

import argparse
import contextlib
import cProfile
import multiprocessing
import os
import pstats
import tempfile
import time
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
from common import ROOT, child, interruptible, median, record

from qfleet import envs, machine
from qfleet.api import compose
from qfleet.config import EnvConfig
from qfleet.runtime.progress import Progress
from qfleet.runtime.train import Trainer
from qfleet.runtime.worker import Worker

WARM = 0.5  # seconds


class Alone:
    """The emulator with random actions. `way`: worker processes, or all games in this one ("native")."""

    def __init__(
        self, num_envs: int, groups: int, threads: int, way: Literal["native", "subprocess"] = "subprocess"
    ) -> None:
        self.name = f"emulator alone, {groups} groups, {threads} threads"
        config = EnvConfig(id="pong", num_envs=num_envs, vectorize=way, sticky_actions=0.25)
        self._groups = envs.make_groups(config, seed=1, groups=groups, threads=threads, wait=False)
        self._num_envs = num_envs
        self._actions = [np.random.default_rng(i).integers(0, 6, num_envs // groups) for i in range(64)]

    def begin(self) -> None:
        """Games are made by worker processes, several contestants' at a time: this waits for them."""
        for group in self._groups:
            group.reset()

    def rate(self, seconds: float) -> dict[str, float]:
        for group in self._groups:
            group.send(self._actions[0])
        self._run(WARM)
        rate = self._run(seconds)
        for group in self._groups:
            group.recv()
        return {"steps_per_second": rate}

    def _run(self, seconds: float) -> float:
        ticks, began = 0, time.perf_counter()
        while (passed := time.perf_counter() - began) < seconds:
            ticks += 1
            for group in self._groups:
                group.recv()
                group.send(self._actions[ticks % 64])
        return ticks * self._num_envs / passed

    def close(self) -> None:
        for group in self._groups:
            group.close()


class Apart:
    """The same with all games in one process, which is not this one: making them holds the interpreter's lock."""

    def __init__(self, num_envs: int, groups: int, threads: int) -> None:
        self.name = f"emulator alone in one process, {groups} groups, {threads} threads"
        self._pipe, theirs = multiprocessing.Pipe()
        args = (theirs, num_envs, groups, threads)
        self._process = multiprocessing.get_context("spawn").Process(target=serve, args=args, daemon=True)
        self._process.start()

    def begin(self) -> None:
        self._pipe.recv()

    def rate(self, seconds: float) -> dict[str, float]:
        self._pipe.send(seconds)
        found: dict[str, float] = self._pipe.recv()
        return found

    def close(self) -> None:
        self._process.kill()


def serve(pipe: Any, num_envs: int, groups: int, threads: int) -> None:
    alone = Alone(num_envs, groups, threads, "native")
    alone.begin()
    pipe.send("ready")
    while True:
        pipe.send(alone.rate(pipe.recv()))


def alone(way: str, num_envs: int) -> Alone | Apart:
    """GROUPS:THREADS, or one:GROUPS:THREADS."""
    kind, *numbers = way.split(":") if way.startswith("one:") else ("", *way.split(":"))
    groups, threads = map(int, numbers)
    return (Apart if kind else Alone)(num_envs, groups, threads)


def busy(seconds: float) -> float:
    """Cores at work now, while all contestants should stand still."""

    def spent() -> tuple[int, int]:
        with open("/proc/stat") as stat:
            times = [int(x) for x in stat.readline().split()[1:9]]
        return sum(times), times[3] + times[4]

    before = spent()
    time.sleep(seconds)
    total, idle = (now - then for now, then in zip(spent(), before, strict=True))
    return (os.cpu_count() or 1) * (total - idle) / max(1, total)


class Training:
    def __init__(self, case: str, settings: dict[str, Any]) -> None:
        recipe, samples, *own = case.split(":")
        settings = {
            **settings,
            **dict(zip(("runtime.groups", "runtime.emulator_threads"), map(int, own), strict=False)),
        }
        config = compose("pong", recipe, None, {**settings, "replay.samples_per_step": float(samples)})
        self._batch = config.learner.batch_size
        self._folder = tempfile.TemporaryDirectory()
        self._progress = Progress(1, "", silent=True).__enter__()
        self._trainer = Trainer(config, Path(self._folder.name), self._progress)
        self._worker = cast(Worker, self._trainer.worker)
        about = f"{config.runtime.groups} groups, {self._worker.threads} threads"
        self.name = f"training {recipe}, {samples} samples per step, {about}"
        while self._worker.learner.updates <= 200:
            self._worker.round()
        self._worker.schedule.wait()

    def _run(self, seconds: float) -> None:
        began = time.perf_counter()
        while time.perf_counter() - began < seconds:
            self._worker.round()
        self._worker.schedule.wait()

    def rate(self, seconds: float) -> dict[str, float]:
        self._run(WARM)
        began, before = time.perf_counter(), self._worker.clock()
        self._run(seconds)
        now, wall = self._worker.clock(), time.perf_counter() - began
        rate = {name: (now[name] - before[name]) / wall for name in now}
        shares = {"env_share": rate["env"], "act_share": rate["act"], "learner_busy": rate["learn"]}
        return {"steps_per_second": rate["steps"], "samples_per_second": rate["updates"] * self._batch, **shares}

    def close(self) -> None:
        self._trainer.close()
        self._progress.__exit__(None, None, None)
        self._folder.cleanup()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="*", default=["double:8", "double:32", "rainbow:8"], metavar="RECIPE:SAMPLES")
    parser.add_argument("--envs", type=int, default=512)
    parser.add_argument(
        "--alone",
        nargs="*",
        metavar="[one:]GROUPS:THREADS",
        help="default: a few with as many threads as cores, or twice as many",
    )
    parser.add_argument("--sb3", type=int, default=0, help="measure Stable-Baselines3 so many times first")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--profile", action="store_true", help="show what the main thread does in the first case (slower)")  # fmt: skip
    parser.add_argument("--set", nargs="*", default=[], metavar="PATH=VALUE")
    args = parser.parse_args()
    interruptible()
    cores = machine.cores()
    settings: dict[str, Any] = {
        "env.num_envs": args.envs, "device": args.device, "replay.capacity": 1_000_000,
        "replay.min_steps": 20_000, "learner.batch_size": 256, "learner.n_step": 3, "runtime.steps_per_round": 4 * args.envs,
        "runtime.lag": 1, "total_steps": 100_000_000, "acting.epsilon_start": 0.1, "acting.epsilon_end": 0.1,
        **dict(item.split("=", 1) for item in args.set),
    }  # fmt: skip
    peer = [peer_rate(args.device) for _ in range(args.sb3)]
    began = time.perf_counter()
    ways = args.alone or [f"2:{2 * cores}", f"4:{2 * cores}", f"2:{cores}", f"one:1:{cores}"]
    limits = [alone(way, args.envs) for way in ways]
    trained = [Training(case, settings) for case in args.cases]
    for limit in limits:
        limit.begin()
    print(f"{args.envs} games each, made in {time.perf_counter() - began:.0f} s", flush=True)
    standing = busy(0.5)
    print(f"{standing:.1f} cores are busy while all stand still", flush=True)
    everybody: list[Alone | Apart | Training] = [*limits, *trained]
    if args.profile:
        with cProfile.Profile() as profiler:
            trained[0].rate(args.seconds)
        pstats.Stats(profiler).sort_stats("tottime").print_stats(25)
    rows: list[list[dict[str, float]]] = [[] for _ in everybody]
    with contextlib.suppress(KeyboardInterrupt):
        for k in range(args.repeats):
            order = range(len(everybody))
            for which in order if k % 2 == 0 else reversed(order):  # so nobody always follows the same one
                rows[which].append(everybody[which].rate(args.seconds))
                print(f"{everybody[which].name}: {rows[which][-1]['steps_per_second']:,.0f} steps/s", flush=True)
                record("gpu_pong_turns", {"what": everybody[which].name, "envs": args.envs, **rows[which][-1]})
    report(args, limits, [pair for pair in zip(everybody, rows, strict=True) if pair[1]], peer, standing)
    for who in everybody:
        who.close()


def report(args: Any, limits: list[Alone | Apart], seen: list[tuple[Any, Any]], peer: list[float], standing: float) -> None:  # fmt: skip
    """Medians of those who had a turn, and what part of the best way to step the games they are."""
    medians = {who.name: {name: median([row[name] for row in got]) for name in got[0]} for who, got in seen}
    alone = {who.name: medians[who.name]["steps_per_second"] for who in limits if who.name in medians}
    print(f"\nmedians of up to {args.repeats} × {args.seconds:g} s, {args.envs} games")
    for who, got in seen:
        found = dict(medians[who.name])
        text, about = f"{found['steps_per_second']:,.0f} steps/s", dict[str, Any]()
        if alone:
            about["share"] = found["steps_per_second"] / max(alone.values())
            text += f" = {about['share']:.1%} of the best alone"
        if peer and who not in limits:
            about["times_sb3"] = found["steps_per_second"] / median(peer)
            text += f", {about['times_sb3']:.1f} times Stable-Baselines3"
        more = "  ".join(f"{k} {v:.2f}" for k, v in found.items() if k != "steps_per_second")
        print(f"{who.name}: {text}  {more}")
        if who not in limits:
            rates = [row["steps_per_second"] for row in got]
            record("gpu_pong", {"what": who.name, "envs": args.envs, "alone": alone, "sb3": peer, "busy_standing": standing, "rates": rates, **about, **found})  # fmt: skip


def peer_rate(device: str) -> float:
    """Stable-Baselines3 on this machine, one environment, batch 32 every 4 steps: steps per second."""
    found = child(str(ROOT / "benchmarks/pong_steps.py"), "--one", "sb3", "--device", device)["steps_per_second"]
    print(f"Stable-Baselines3: {found:.1f} steps/s", flush=True)
    return float(found)


if __name__ == "__main__":
    main()
