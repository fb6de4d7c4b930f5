"""Steps per second on Pong, Nature CNN, batch 32 every 4 steps, 2 cores, against Stable-Baselines3.

Stable-Baselines3 steps one environment, as its zoo does for DQN, or eight (`sb3-8`: two updates after each vector step); ours
steps the recipe's eight. All run in fresh processes, interleaved, with learning from step 500 on, epsilon 0.1 (so that acting
costs what it costs in the long run), frames 84x84x4, uint8 replay. The clock covers the steps after learning has started.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path

from common import compare

START = 500


def ours(steps: int) -> dict[str, float]:
    from qfleet.api import compose
    from qfleet.runtime.progress import Progress
    from qfleet.runtime.train import Trainer
    from qfleet.runtime.worker import Worker

    settings = {
        "device": "cpu",
        "env.num_envs": 8,
        "total_steps": START + steps,
        "replay.capacity": 20_000,
        "replay.min_steps": START,
        "replay.samples_per_step": 8.0,
        "learner.batch_size": 32,
        "env.sticky_actions": 0.0,
        "learner.n_step": 1,
        "learner.target_interval": 1000,
        "acting.epsilon_start": 0.1,
        "acting.epsilon_end": 0.1,
    }
    config = compose("pong", "dqn", None, settings)
    with tempfile.TemporaryDirectory() as folder, Progress(steps, "", interactive=False) as progress:
        trainer = Trainer(config, Path(folder), progress)
        worker = trainer.worker
        assert isinstance(worker, Worker)
        began, first = 0.0, 0
        while worker.collector.steps < START + steps:
            if not began and worker.learner.updates:
                began, first, updates = (
                    time.perf_counter(),
                    worker.collector.steps,
                    worker.learner.updates,
                )
            worker.round()
        seconds = time.perf_counter() - began
        result = {
            "steps_per_second": (worker.collector.steps - first) / seconds,
            "updates_per_second": (worker.learner.updates - updates) / seconds,
        }
        trainer.close()
    return result


def theirs(steps: int, envs: int, device: str) -> dict[str, float]:
    import ale_py
    import gymnasium
    from stable_baselines3 import DQN
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.env_util import make_atari_env
    from stable_baselines3.common.vec_env import VecFrameStack

    gymnasium.register_envs(ale_py)

    class Clock(BaseCallback):  # type: ignore[misc]
        began, first, updates = 0.0, 0, 0

        def _on_step(self) -> bool:
            if not self.began and self.model._n_updates:
                self.began, self.first = time.perf_counter(), self.num_timesteps
                self.updates = self.model._n_updates
            return True

    env = VecFrameStack(make_atari_env("PongNoFrameskip-v4", envs, seed=1), 4)
    model = DQN(
        "CnnPolicy", env, learning_rate=1e-4, batch_size=32, buffer_size=20_000, learning_starts=START, target_update_interval=1000,
        train_freq=max(1, 4 // envs), gradient_steps=max(1, envs // 4), exploration_initial_eps=0.1, exploration_final_eps=0.1, seed=1, device=device,
    )  # fmt: skip
    clock = Clock()
    model.learn(START + steps, callback=clock)
    seconds = time.perf_counter() - clock.began
    return {
        "steps_per_second": (model.num_timesteps - clock.first) / seconds,
        "updates_per_second": (model._n_updates - clock.updates) / seconds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=3_000)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--one", choices=["qfleet", "sb3", "sb3-8"], help="measure once in this process and print JSON")
    parser.add_argument("--device", default="cpu", help="with --one sb3: where Stable-Baselines3 learns")
    args = parser.parse_args()
    if args.device != "cpu" and args.one not in ("sb3", "sb3-8"):
        parser.error("--device goes with --one sb3 or sb3-8: the comparison is one of CPUs")
    if args.one:
        envs = 8 if args.one == "sb3-8" else 1
        one = ours(args.steps) if args.one == "qfleet" else theirs(args.steps, envs, args.device)
        print(json.dumps(one))
        return
    compare(__file__, "pong_steps", "steps_per_second", args.steps, args.repeats, ("sb3", "sb3-8"))


if __name__ == "__main__":
    main()
