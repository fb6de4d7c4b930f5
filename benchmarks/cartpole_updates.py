"""Updates per second on CartPole with the zoo's hyperparameters (256x256, batch 64), against Stable-Baselines3.

Both train the same way for the same number of steps, each in a fresh process, interleaved; the clock runs around training
alone (imports and construction excluded for both). Stable-Baselines3 counts target_update_interval in environment steps: with
train_freq 256 its target network is copied once before every burst of 128 updates, so ours is copied every 128 updates.
Threads: ours takes one, theirs the default (both cores), which is not slower for them than one.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path

from common import compare


def ours(steps: int) -> dict[str, float]:
    from qfleet.api import compose
    from qfleet.runtime.progress import Progress
    from qfleet.runtime.train import Trainer
    from qfleet.runtime.worker import Worker

    zoo = {
        "total_steps": steps,
        "network.hidden": (256, 256),
        "learner.lr": 2.3e-3,
        "learner.lr_schedule": "constant",
        "learner.tau": 1.0,
        "learner.adam_eps": 1e-8,
        "learner.batch_size": 64,
        "learner.n_step": 1,
        "learner.target_interval": 128,
        "learner.threads": 1,
        "replay.capacity": 100_000,
        "replay.min_steps": 1000,
        "replay.samples_per_step": 32.0,
        "acting.epsilon_steps": 8_000,
        "acting.epsilon_end": 0.04,
        "runtime.steps_per_round": 256,
        "runtime.eval_every": 0,
        "runtime.eval_episodes": 1,
        "runtime.checkpoint_every": 0,
    }
    config = compose("CartPole-v1", "dqn", None, zoo)
    with tempfile.TemporaryDirectory() as folder, Progress(steps, "", interactive=False) as progress:
        trainer = Trainer(config, Path(folder), progress)
        worker = trainer.worker
        assert isinstance(worker, Worker)
        began = time.perf_counter()
        trainer.run()
        seconds = time.perf_counter() - began
    return {
        "updates_per_second": worker.learner.updates / seconds,
        "steps_per_second": worker.collector.steps / seconds,
    }


def theirs(steps: int) -> dict[str, float]:
    from stable_baselines3 import DQN

    model = DQN(
        "MlpPolicy", "CartPole-v1", learning_rate=2.3e-3, batch_size=64, buffer_size=100_000, learning_starts=1000, gamma=0.99,
        target_update_interval=10, train_freq=256, gradient_steps=128, exploration_fraction=8_000 / steps, exploration_final_eps=0.04,
        policy_kwargs={"net_arch": [256, 256]}, seed=1, device="cpu",
    )  # fmt: skip
    began = time.perf_counter()
    model.learn(steps)
    seconds = time.perf_counter() - began
    return {"updates_per_second": model._n_updates / seconds, "steps_per_second": model.num_timesteps / seconds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=50_000)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--one", choices=["qfleet", "sb3"], help="measure once in this process and print JSON")
    args = parser.parse_args()
    if args.one:
        print(json.dumps((ours if args.one == "qfleet" else theirs)(args.steps)))
        return
    compare(__file__, "cartpole_updates", "updates_per_second", args.steps, args.repeats)


if __name__ == "__main__":
    main()
