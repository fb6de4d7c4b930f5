"""CartPole with one learner whose gradients are applied some updates late: what staleness alone does to learning.

    python benchmarks/late_gradients.py [--late 0 1 2] [--seeds 6]

Double DQN as two learners in `async` see it: batches of half the size at half the learning rate, the target network every 16 updates instead of 8. The table has the best checkpoint on 20
fresh episodes, per seed.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

from common import record

import qfleet
from qfleet.learner import Learner

SETTINGS = {"learner.batch_size": 128, "learner.lr": 1e-3, "learner.target_interval": 16}


def one(late: int, seed: int) -> float:
    make = Learner.__init__

    def made(self: Learner, *args: Any) -> None:
        make(self, *args)
        waiting: list[Any] = []

        def sync(grad: Any, samples: int) -> None:
            waiting.append(grad.clone())
            if len(waiting) > late:
                self.apply(waiting.pop(0))
            else:
                self.updates += 1

        self.sync = sync

    Learner.__init__ = made  # type: ignore[assignment, method-assign]
    try:
        with tempfile.TemporaryDirectory() as folder:
            run = qfleet.train("CartPole-v1", recipe="double", seed=seed, run_dir=Path(folder) / "run", device="cpu", overrides=SETTINGS, progress=False)  # fmt: skip
            return qfleet.evaluate(run.dir, 20).mean_return
    finally:
        Learner.__init__ = make  # type: ignore[method-assign]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--late", type=int, nargs="*", default=[0, 1, 2])
    parser.add_argument("--seeds", type=int, default=6)
    args = parser.parse_args()
    for late in args.late:
        returns = [one(late, seed) for seed in range(1, args.seeds + 1)]
        solved = sum(r >= 475 for r in returns)
        print(f"| {late} | {', '.join(f'{r:.0f}' for r in returns)} | {solved} of {len(returns)} |", flush=True)
        record("late_gradients", {"late": late, "returns": returns, "solved": solved})


if __name__ == "__main__":
    main()
