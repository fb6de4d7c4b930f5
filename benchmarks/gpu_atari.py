"""An Atari game to 10M steps on one GPU: the learning curve beside published figures, and what memory does meanwhile.

    python benchmarks/gpu_atari.py breakout [--steps 10000000] [--recipe double] [--limit SECONDS] [--set PATH=VALUE ...]

Every five seconds: resident memory of the command and all its children, and the GPU's memory in use. The curve (evaluations
of 20 episodes, with 1 % random actions; and the training's own returns, of its last 100 episodes) and the memory go to benchmarks/results/gpu_atari_<game>_<recipe>.png, the figures to gpu_atari.jsonl.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from common import RESULTS, interruptible, record, train_command

# After 10M agent steps, no sticky actions (CleanRL's DQN and C51), and at 40M frames with sticky actions (Dopamine).
PUBLISHED = {
    "pong": {"CleanRL DQN, not sticky": 20.25, "CleanRL C51, not sticky": 19.5},
    "breakout": {"CleanRL DQN, not sticky": 367.0, "CleanRL C51, not sticky": 462.0, "Dopamine DQN, sticky": 100.0, "Dopamine C51, sticky": 222.0},
    "beam_rider": {"CleanRL DQN, not sticky": 6673.0, "CleanRL C51, not sticky": 9593.0},
}  # fmt: skip


def family(root: int) -> list[int]:
    """A process and all below it."""
    parents: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:  # it has ended
            continue
        parents.setdefault(int(fields[1]), []).append(int(stat.parent.name))
    found = [root]
    for pid in found:
        found += parents.get(pid, [])
    return found


def resident(pid: int) -> int:
    """Bytes; of memory that several processes share, the process's part of it (Pss)."""
    try:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 0


def on_gpu() -> int:
    """Bytes in use on the GPU, by whomever (this process has a context of half a GB there, too)."""
    import torch

    if not torch.cuda.is_available():
        return 0
    free, total = torch.cuda.mem_get_info()
    return int(total - free)


def watch(pid: int, stop: threading.Event, out: list[dict[str, float]]) -> None:
    began = time.time()
    while not stop.wait(5.0):
        host = sum(resident(p) for p in family(pid))
        out.append({"seconds": time.time() - began, "host": host, "gpu": on_gpu()})


def ended(process: subprocess.Popen[bytes], patience: float = 60.0) -> int:
    """Its exit status, when it has written its last checkpoint; killed if that takes too long."""
    try:
        return process.wait(patience)
    except (subprocess.TimeoutExpired, KeyboardInterrupt):
        process.kill()
        return process.wait()


def draw(
    game: str, recipe: str, curves: dict[str, list[tuple[int, float]]], memory: list[dict[str, float]], title: str
) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4))
    for name, curve in curves.items():
        left.plot([s / 1e6 for s, _ in curve], [r for _, r in curve], label=name)
    for number, (name, value) in enumerate(PUBLISHED.get(game, {}).items(), len(curves)):
        left.axhline(value, linestyle="--", linewidth=1, color=f"C{number}", label=f"{name}: {value:g}")
    left.set(xlabel="million steps", ylabel="return", title=title)
    left.legend(fontsize="small")
    right.plot([m["seconds"] for m in memory], [m["host"] / 1e9 for m in memory], label="main memory")
    right.plot([m["seconds"] for m in memory], [m["gpu"] / 1e9 for m in memory], label="GPU memory")
    right.set(xlabel="seconds", ylabel="GB", title="memory", ylim=(0, None))
    right.legend()
    figure.tight_layout()
    RESULTS.mkdir(exist_ok=True)
    figure.savefig(RESULTS / f"gpu_atari_{game}_{recipe}.png", dpi=80)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("game")
    parser.add_argument("--steps", type=int, default=10_000_000)
    parser.add_argument("--recipe", default="double")
    parser.add_argument("--limit", type=float, help="seconds after which the run is stopped")
    parser.add_argument("--set", nargs="*", default=[], metavar="PATH=VALUE")
    args = parser.parse_args()
    interruptible()
    with tempfile.TemporaryDirectory() as folder:
        more = ("--total-steps", str(args.steps), "--runtime.checkpoint-every", "0")
        command = train_command(args.game, args.recipe, folder, args.set, *more)
        began = time.time()
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        memory: list[dict[str, float]] = []
        stop = threading.Event()
        watching = threading.Thread(target=watch, args=(process.pid, stop, memory), daemon=True)
        watching.start()
        try:
            code = process.wait(args.limit)
        except (subprocess.TimeoutExpired, KeyboardInterrupt):
            process.terminate()
            code = ended(process)
        stop.set()
        watching.join()
        seconds = time.time() - began
        metrics = Path(folder, "run/metrics.jsonl")
        rows: list[dict[str, Any]] = (
            [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.exists() else []
        )
    curve, trained = (
        sorted((int(r["step"]), r[name]) for r in rows if name in r)
        for name in ("eval/mean_reward", "rollout/ep_rew_mean")
    )
    speed = [r["time/steps_per_second"] for r in rows if "time/steps_per_second" in r]
    record("gpu_atari", {"game": args.game, "recipe": args.recipe, "settings": args.set, "exit": code, "seconds": seconds, "curve": curve, "training": trained[::10], "memory": memory[::6]})  # fmt: skip
    print(f"{args.game}: exit {code}, {seconds:.0f} s, {sum(speed) / max(1, len(speed)):,.0f} steps/s")
    if not curve or len(memory) < 6:
        return
    third = memory[len(memory) // 3]
    grown = {k: memory[-2][k] - third[k] for k in ("host", "gpu")}
    draw(
        args.game,
        args.recipe,
        {"training": trained, "evaluation": curve},
        memory,
        f"{args.game}, {args.recipe}, {seconds / 60:.1f} minutes",
    )
    print(
        "training " + " ".join(f"{s / 1e6:.1f}M:{r:.0f}" for s, r in trained[:: max(1, len(trained) // 20)]),
        trained[-1],
    )
    print(
        f"last {curve[-1]}, best {max(r for _, r in curve):.1f}; curve "
        + " ".join(f"{s / 1e6:.1f}M:{r:.0f}" for s, r in curve)
    )
    print(
        "memory GB, every 30 s: " + " ".join(f"{m['host'] / 1e9:.2f}/{m['gpu'] / 1e9:.2f}" for m in memory[::6]),
        f"grown since a third: {grown}",
    )


if __name__ == "__main__":
    main()
