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

from common import interruptible, record, train_command

GOAL = 18.0
PAUSE = 5.0  # seconds until nothing of a run that was killed is left


def one(seed: int, recipe: str, settings: list[str], limit: float, until_reached: bool) -> dict[str, Any]:
    """What one run did, also where it was cut off."""
    with tempfile.TemporaryDirectory() as folder:
        stop = ("--runtime.stop-at", str(GOAL), "--runtime.checkpoint-every", "0", "--runtime.eval-epsilon", "0")
        command = train_command("pong", recipe, folder, settings, "--seed", str(seed), *stop)
        found: dict[str, Any] = {"seed": seed, "reached": None, "step": 0, "evaluation": None, "interrupted": False}
        last = ""
        began = time.time()
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        assert process.stdout is not None
        timer = threading.Timer(limit, process.kill)
        timer.daemon = True
        timer.start()
        try:
            for line in process.stdout:
                last = line.strip() or last
                # An evaluation that began earlier says when: eval 18.2 (at 750,000)
                seen = re.search(r"step ([\d,]+)/.* eval (-?[\d.]+)(?: \(at ([\d,]+)\))?", line)
                if seen is None or float(seen[2]) == found["evaluation"]:
                    continue
                found["evaluation"] = float(seen[2])
                print(f"  {time.time() - began:6.1f} s  {last[:110]}", flush=True)
                if found["evaluation"] >= GOAL and found["reached"] is None:
                    found["reached"], found["step"] = time.time() - began, int((seen[3] or seen[1]).replace(",", ""))
                    if until_reached:
                        process.kill()
        except KeyboardInterrupt:
            found["interrupted"] = True
            process.kill()
        process.wait()
        timer.cancel()
        found["whole"] = time.time() - began
        print(f"  {found['whole']:6.1f} s  {last[:110]}", flush=True)
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="*", default=[1, 2, 3])
    parser.add_argument("--recipe", default="double")
    parser.add_argument("--limit", type=float, default=300.0, help="seconds")
    parser.add_argument("--until-reached", action="store_true", help="do not wait for the end of the command")
    parser.add_argument("--set", nargs="*", default=[], metavar="PATH=VALUE")
    args = parser.parse_args()
    interruptible()
    reached = list[float]()
    for seed in args.seeds:
        run = one(seed, args.recipe, args.set, args.limit, args.until_reached)
        print(f"seed {seed}: {run}", flush=True)
        record("gpu_pong_time", {"recipe": args.recipe, "settings": args.set, **run})
        reached += [run["reached"]] if run["reached"] is not None else []
        if run["interrupted"]:
            break
        time.sleep(PAUSE)
    print(f"reached {len(reached)} times" + (f": after {', '.join(f'{r:.1f}' for r in reached)} s" if reached else ""))


if __name__ == "__main__":
    main()
