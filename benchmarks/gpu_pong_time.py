"""Seconds from the start of the command until Pong's greedy evaluation (20 episodes) is 18, on one GPU.

    python benchmarks/gpu_pong_time.py [--seeds 1 2 3] [--set PATH=VALUE ...] [--until-reached]

`reached` is when the command prints that evaluation, `whole` when it has ended: with the last checkpoint, which holds the
replay, and an evaluation on fresh episodes (with --until-reached it is killed before). Sticky actions 0.25 unless set otherwise.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import tempfile
import threading
import time
from typing import Any

from common import record, train_command

GOAL = 18.0


def one(seed: int, recipe: str, settings: list[str], limit: float, until_reached: bool) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        stop = ("--runtime.stop-at", str(GOAL), "--runtime.checkpoint-every", "0", "--runtime.eval-epsilon", "0")
        command = train_command("pong", recipe, folder, settings, "--seed", str(seed), *stop)
        reached: float | None = None
        step, newest, last = 0, float("-inf"), ""
        began = time.time()
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        assert process.stdout is not None
        timer = threading.Timer(limit, process.kill)
        timer.start()
        for line in process.stdout:
            last = line.strip() or last
            if found := re.search(r"step ([\d,]+)/.* eval (-?[\d.]+)", line):
                if float(found[2]) != newest:
                    print(f"  {time.time() - began:6.1f} s  {line.strip()[:110]}", flush=True)
                newest = float(found[2])
                if newest >= GOAL and reached is None:
                    reached, step = time.time() - began, int(found[1].replace(",", ""))
                    if until_reached:
                        process.kill()
        process.wait()
        timer.cancel()
        print(f"  {time.time() - began:6.1f} s  {last[:110]}", flush=True)
        return {"seed": seed, "reached": reached, "step": step, "whole": time.time() - began, "evaluation": newest}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="*", default=[1, 2, 3])
    parser.add_argument("--recipe", default="double")
    parser.add_argument("--limit", type=float, default=300.0, help="seconds")
    parser.add_argument("--until-reached", action="store_true", help="do not wait for the end of the command")
    parser.add_argument("--set", nargs="*", default=[], metavar="PATH=VALUE")
    args = parser.parse_args()
    runs = []
    for seed in args.seeds:
        runs.append(one(seed, args.recipe, args.set, args.limit, args.until_reached))
        print(f"seed {seed}: {runs[-1]}", flush=True)
    reached = [run["reached"] for run in runs if run["reached"] is not None]
    print(
        f"reached by {len(reached)} of {len(runs)}",
        f"after {', '.join(f'{r:.1f}' for r in reached)} s" if reached else "",
    )
    record("gpu_pong_time", {"recipe": args.recipe, "settings": args.set, "runs": runs})


if __name__ == "__main__":
    main()
