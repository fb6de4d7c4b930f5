"""Seconds from the start of the process until an evaluation of 475 on CartPole: our default recipe against the zoo's.

Both evaluate 20 greedy episodes every 1,000 steps, 20 environments at once, and stop at the first mean of 475. Ours is the whole
process, `qfleet train`, from exec to exit: imports, the final evaluation on fresh episodes and the checkpoint included. For
Stable-Baselines3 the clock stops at the evaluation.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from common import child, median, record

LIMIT = 200_000  # steps after which a run counts as failed


def theirs(seed: int) -> None:
    from stable_baselines3 import DQN
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.evaluation import evaluate_policy

    class Stop(BaseCallback):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.envs = make_vec_env("CartPole-v1", 20, seed=seed + 1000)
            self.reached = False

        def _on_step(self) -> bool:
            if self.num_timesteps % 1000 == 0:
                mean, _ = evaluate_policy(self.model, self.envs, n_eval_episodes=20, warn=False)
                self.reached = bool(mean >= 475)
            return not self.reached

    model = DQN(
        "MlpPolicy", "CartPole-v1", learning_rate=2.3e-3, batch_size=64, buffer_size=100_000, learning_starts=1000, gamma=0.99,
        target_update_interval=10, train_freq=256, gradient_steps=128, exploration_fraction=8_000 / LIMIT, exploration_final_eps=0.04,
        policy_kwargs={"net_arch": [256, 256]}, seed=seed, device="cpu",
    )  # fmt: skip
    stop = Stop()
    model.learn(LIMIT, callback=stop)
    print(json.dumps({"reached": stop.reached, "steps": model.num_timesteps, "clock": time.time()}))


def ours(seed: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable,
            "-m",
            "qfleet",
            "train",
            "CartPole-v1",
            "--seed",
            str(seed),
            "--run-dir",
            folder + "/run",
        ]
        command += ["--runtime.eval-every", "1000", "--runtime.eval-episodes", "20", "--runtime.stop-at", "475"]
        began = time.time()
        subprocess.run(command, check=True, capture_output=True)
        seconds = time.time() - began
        rows = [json.loads(line) for line in Path(folder, "run/metrics.jsonl").read_text().splitlines()]
        evals = [r for r in rows if "eval/mean_reward" in r]
    return {"reached": evals[-1]["eval/mean_reward"] >= 475, "steps": evals[-1]["step"], "seconds": seconds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--sb3", type=int, metavar="SEED", help="one Stable-Baselines3 run in this process")
    args = parser.parse_args()
    if args.sb3 is not None:
        theirs(args.sb3)
        return
    runs: dict[str, list[dict[str, float]]] = {"sb3": [], "qfleet": []}
    for seed in range(1, args.seeds + 1):
        began = time.time()
        peer = child(__file__, "--sb3", str(seed))
        peer["seconds"] = peer.pop("clock") - began
        runs["sb3"].append(peer)
        runs["qfleet"].append(ours(seed))
        for name, values in runs.items():
            print(
                f"seed {seed}  {name:8s} {values[-1]['seconds']:7.1f} s  {values[-1]['steps']:7.0f} steps  reached {values[-1]['reached']}",
                flush=True,
            )
    a, b = (median([r["seconds"] if r["reached"] else float("inf") for r in runs[n]]) for n in ("qfleet", "sb3"))
    print(f"median   qfleet {a:.1f} s, sb3 {b:.1f} s: 1/{b / a:.1f}")
    record("cartpole_time", {**runs, "ratio_of_medians": round(b / a, 2)})


if __name__ == "__main__":
    main()
