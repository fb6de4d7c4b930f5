"""CartPole with several learners: every mode, every codec, three seeds; what it took.

    python benchmarks/sync_learning.py [--only NAME ...] [--seeds 3]

Columns: the best checkpoint on 20 fresh episodes and the evaluation at the end, per seed; medians of the seconds of training, of pushes (all learners), megabytes of all pushed messages
(headers included), and versions between a push and what it was computed with. The recipe munchausen with its own settings, but twice the steps: a gradient that is a version old needs them (docs/sync.md).
Its batch of 128 samples is divided among the learners.
"""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from common import check, median, record

MODES = ("sync", "async", "window", "ssp", "localsgd", "diloco", "easgd", "admm")
ROWS: dict[str, tuple[int, str, dict[str, Any]]] = {  # name -> learners, launcher, settings
    **{f"{mode}, 2": (2, "ray", {"sync.mode": mode}) for mode in MODES},
    **{f"sync {codec}, 2": (2, "ray", {"sync.mode": "sync", "sync.codec": codec}) for codec in ("bf16", "int8", "topk")},
    "allreduce, 2": (2, "torchrun", {"sync.mode": "sync"}),
    "allreduce powersgd, 2": (2, "torchrun", {"sync.mode": "sync", "sync.codec": "powersgd"}),
    "sync, 4": (4, "ray", {"sync.mode": "sync"}),
    "async, 4": (4, "ray", {"sync.mode": "async"}),
    "allreduce, 4": (4, "torchrun", {"sync.mode": "sync"}),
}  # fmt: skip


SOLVED = 475
MOST_BYTES = {"sync int8, 2": 0.27, "sync topk, 2": 0.025}  # a push's, as a part of fp32's


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def one(name: str, seed: int, folder: Path, extra: dict[str, Any]) -> dict[str, Any]:
    learners, launcher, settings = ROWS[name]
    settings = {"learner.batch_size": 128 // learners, "total_steps": 60_000, "device": "cpu", **settings, **extra}
    words = [w for path, value in settings.items() for w in (f"--{path.replace('_', '-')}", str(value))]
    task = ["CartPole-v1", "--recipe", "munchausen", "--seed", str(seed), "--run-dir", str(folder)]
    command = ["-m", "qfleet", "train", *task, *words]
    if launcher == "torchrun":
        command = ["-m", "torch.distributed.run", "--nproc-per-node", str(learners), "--master-port", str(free_port()), *command]  # fmt: skip
    else:
        command += ["--learners", str(learners)]
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, check=False, env=os.environ | {"OMP_NUM_THREADS": "1"})  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    from qfleet import evaluate
    from qfleet.runtime import metrics

    rows = metrics.read(folder)
    pushed = [row for row in rows if "sync/pushes" in row]
    evaluations = [row["eval/mean_reward"] for row in rows if "eval/mean_reward" in row]
    scale = learners if launcher == "torchrun" else 1  # the first learner's metrics are its own
    return {
        "seed": seed,
        "best": evaluate(folder, 20).mean_return,
        "last": evaluations[-1],
        "seconds": rows[-1]["time"],
        "pushes": pushed[-1]["sync/pushes"] * scale,
        "megabytes": pushed[-1]["sync/sent_mb"] * scale,
        "staleness": median([row["sync/staleness"] for row in pushed]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=list(ROWS))
    parser.add_argument("--seeds", type=int, nargs="*", default=[1, 2, 3])
    parser.add_argument("--set", nargs="*", default=[], metavar="PATH=VALUE")
    args = parser.parse_args()
    extra = dict(item.split("=", 1) for item in args.set)
    missed, pushed = list[str](), dict[str, float]()
    for name in args.only:
        runs = []
        for seed in args.seeds:
            with tempfile.TemporaryDirectory() as folder:
                runs.append(one(name, seed, Path(folder) / "run", extra))

        def of(what: str, runs: list[dict[str, Any]] = runs) -> str:
            return ", ".join(f"{run[what]:.0f}" for run in runs)

        middle = {k: median([run[k] for run in runs]) for k in ("seconds", "pushes", "megabytes", "staleness")}
        print(
            f"| {name} | {of('best')} | {of('last')} | {middle['seconds']:.0f} | "
            f"{middle['pushes']:,.0f} | {middle['megabytes']:,.1f} | {middle['staleness']:.2f} |",
            flush=True,
        )
        record("sync_learning", {"name": name, "settings": extra, "runs": runs})
        missed += [f"{name}, seed {run['seed']}: {run['best']:.0f} of {SOLVED}" for run in runs if run["best"] < SOLVED]
        pushed[name] = middle["megabytes"] / middle["pushes"]
    for name, most in MOST_BYTES.items():
        if name in pushed and "sync, 2" in pushed and (part := pushed[name] / pushed["sync, 2"]) > most:
            missed.append(f"{name}: {part:.3f} of the bytes of fp32, of {most}")
    check(missed)


if __name__ == "__main__":
    main()
