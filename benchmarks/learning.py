"""Learning on the tasks the README claims, several seeds each: curves as pictures, figures as a line of results.

    python benchmarks/learning.py                      every task below
    python benchmarks/learning.py CartPole-v1 --seeds 5 --recipe rainbow

Reported per seed: the evaluation at the last step ("last"), and the best checkpoint on fresh episodes ("best").
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import tempfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from common import RESULTS, median, record

# env, recipe, the bar that the issue sets for the return
TASKS = [
    ("CartPole-v1", None, 475.0),
    ("Acrobot-v1", None, -90.0),
    ("MountainCar-v0", None, -115.0),
    ("LunarLander-v3", None, 200.0),
    ("MinAtar/Breakout-v1", None, 8.0),
    ("MinAtar/Freeway-v1", None, 45.0),
]


def one(job: tuple[str, str | None, int, str, dict[str, Any]]) -> dict[str, Any]:
    env, recipe, seed, folder, overrides = job
    os.environ["OMP_NUM_THREADS"] = "1"
    import qfleet

    with contextlib.redirect_stdout(io.StringIO()):
        run = qfleet.train(
            env, recipe=recipe, seed=seed, run_dir=Path(folder) / f"s{seed}", progress=False, overrides=overrides
        )
    evals = [(int(r["step"]), r["eval/mean_reward"]) for r in run.metrics if "eval/mean_reward" in r]
    assert run.evaluation is not None
    return {
        "seed": seed,
        "recipe": run.config.recipe,
        "steps": evals[-1][0],
        "last": round(evals[-1][1], 2),
        "best": round(run.evaluation.mean_return, 2),
        "seconds": round(run.seconds, 1),
        "curve": [[s, round(v, 2)] for s, v in evals],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("env", nargs="?")
    parser.add_argument("--recipe", nargs="*", default=[None])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--set", nargs="*", default=[], metavar="PATH=VALUE", help="override settings")
    args = parser.parse_args()
    overrides = {"learner.threads": 1, "runtime.schedule": "serial", **dict(item.split("=", 1) for item in args.set)}
    for env, _, bar in [t for t in TASKS if args.env in (None, t[0])]:
        for recipe in args.recipe:
            with (
                tempfile.TemporaryDirectory() as folder,
                ProcessPoolExecutor(args.processes, max_tasks_per_child=1) as pool,
            ):
                jobs = [(env, recipe, seed, folder, overrides) for seed in range(1, args.seeds + 1)]
                runs = list(pool.map(one, jobs))
                name = runs[0]["recipe"]
                picture = RESULTS / f"learning_{env.replace('/', '-')}_{name}.png"
                from qfleet.plot import plot

                plot(sorted(Path(folder).iterdir()), picture)
            last, best = [r["last"] for r in runs], [r["best"] for r in runs]
            print(
                f"{env:22s} {name:11s} bar {bar:g}  best {best}  last {last}  median seconds {median([r['seconds'] for r in runs]):.0f}",
                flush=True,
            )
            record(
                "learning",
                {
                    "env": env,
                    "recipe": name,
                    "bar": bar,
                    "median_best": median(best),
                    "median_last": median(last),
                    "all_best_reach_bar": min(best) >= bar,
                    "runs": runs,
                },
            )


if __name__ == "__main__":
    main()
