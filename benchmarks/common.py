"""What every benchmark shares: one record per result, with commit, hardware, date and command."""

from __future__ import annotations

import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = Path(os.environ.get("QFLEET_RESULTS") or ROOT / "benchmarks" / "results")


def cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def commit() -> str:
    """QFLEET_COMMIT names it where the code was copied without its repository."""

    def git(*args: str) -> str:
        return subprocess.run(
            ["git", "-C", str(ROOT), *args], capture_output=True, text=True, check=False
        ).stdout.strip()

    if name := os.environ.get("QFLEET_COMMIT"):
        return name
    return git("rev-parse", "--short", "HEAD") + (
        "+" if git("status", "--porcelain", "--", "qfleet", "benchmarks/*.py") else ""
    )


def interruptible() -> None:
    """SIGTERM ends a benchmark as Ctrl-C does: with a report of what it has."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)


def record(name: str, values: dict[str, Any]) -> None:
    """Append one line to benchmarks/results/<name>.jsonl, or to a file in the folder QFLEET_RESULTS."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    command = "python " + " ".join([os.path.relpath(sys.argv[0], ROOT), *sys.argv[1:]])
    about = {
        "date": time.strftime("%Y-%m-%d"),
        "commit": commit(),
        "cpu": cpu_model(),
        "cores": os.cpu_count(),
        "command": command,
    }
    with open(RESULTS / f"{name}.jsonl", "a") as f:
        f.write(json.dumps({**about, **values}) + "\n")


def check(missed: Sequence[str]) -> None:
    """End with an error when a bar is missed, after everything is recorded."""
    if missed:
        raise SystemExit("missed: " + "; ".join(missed))


def train_command(env: str, recipe: str, folder: str, settings: Sequence[str], *more: str) -> list[str]:
    """`qfleet train`, with settings given as PATH=VALUE."""
    command = [sys.executable, "-m", "qfleet", "train", env, "--recipe", recipe, "--run-dir", f"{folder}/run", *more]
    for setting in settings:
        path, _, value = setting.partition("=")
        command += [f"--{path.replace('_', '-')}", value]
    return command


def median(values: Sequence[float]) -> float:
    return float(statistics.median(values))


def compare(script: str, name: str, what: str, steps: int, repeats: int, peers: Sequence[str] = ("sb3",)) -> None:
    """The peers and qfleet in turn, each in a fresh process that prints {what: rate}; prints and records medians.

    The ratio is that to the fastest peer.
    """
    runs: dict[str, list[float]] = {which: [] for which in (*peers, "qfleet")}
    for _ in range(repeats):
        for which, values in runs.items():
            values.append(child(script, "--one", which, "--steps", str(steps))[what])
            print(f"{which:8s} {values[-1]:8.1f} {what}", flush=True)
    best = max(peers, key=lambda peer: median(runs[peer]))
    ratio = median(runs["qfleet"]) / median(runs[best])
    print(f"median   qfleet {median(runs['qfleet']):.1f}, {best} {median(runs[best]):.1f} {what}: {ratio:.2f} times")
    record(name, {**runs, "ratio_of_medians": round(ratio, 3)})


def child(script: str, *args: str) -> dict[str, Any]:
    """Run one measurement in a fresh process; its last line of output is a JSON object."""
    env = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"}
    done = subprocess.run(
        [sys.executable, script, *args], capture_output=True, text=True, cwd=ROOT, env=env, check=False
    )
    if done.returncode != 0:
        raise RuntimeError(f"{script} {' '.join(args)} failed:\n{done.stdout}\n{done.stderr}")
    result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return result
