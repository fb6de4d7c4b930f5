"""The schedule of a GPU, run on the CPU: the same parts, uncaptured, give the numbers of the other schedules."""

import signal
import threading
from concurrent import futures
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from qfleet import kernels, networks, recipes, rng
from qfleet.acting.policy import Policy
from qfleet.api import load_policy
from qfleet.captured import CapturedLearner
from qfleet.config import Config, override
from qfleet.device import Captured
from qfleet.learner import Flat, Learner
from qfleet.replay import Replay
from qfleet.runtime import evaluation, metrics
from qfleet.runtime.evaluator import Evaluator, Stuck
from qfleet.runtime.progress import Progress
from qfleet.runtime.train import Trainer
from qfleet.runtime.worker import Worker
from qfleet.types import Spec

SMALL = {
    "env.num_envs": 4, "network.hidden": (32, 32), "network.atoms": 11, "replay.capacity": 2000, "replay.min_steps": 100,
    "learner.batch_size": 16, "runtime.steps_per_round": 16, "runtime.lag": 1, "runtime.log_every": 100, "total_steps": 1500,
    "learner.target_interval": 7, "runtime.eval_every": 0, "runtime.checkpoint_every": 0, "acting.epsilon_steps": 500, "device": "cpu",
}  # fmt: skip


def config_of(recipe: str, **settings: Any) -> Config:
    return override(recipes.make(recipe, "CartPole-v1"), SMALL | {k.replace("__", "."): v for k, v in settings.items()})


def rounds(config: Config, folder: Path, count: int) -> tuple[Worker, float]:
    """-> and the sum of all losses."""
    with Progress(1, "", silent=True) as progress:
        trainer = Trainer(config, folder, progress)
        told = [trainer.worker.round() for _ in range(count)]
        trainer.worker.schedule.wait()
        told.append(trainer.worker.learner.flush())
        trainer.close()
    return trainer.worker, sum(learned.loss_sum for learned in told if learned is not None)


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize(
    ("recipe", "settings"),
    [
        ("c51", {"learner__double": True, "learner__optimizer": "sgd"}),
        ("qr", {"learner__double": True, "learner__optimizer": "rmsprop"}),
        ("iqn", {"network__dueling": True, "network__atoms": 4, "learner__tau": 0.1, "learner__optimizer": "sgd"}),
        (
            "c51",
            {
                "learner__double": True,
                "network__noisy": True,
                "env__frame_stack": 2,
                "learner__n_step": 3,
                "learner__optimizer": "sgd",
            },
        ),
    ],
    ids=["c51", "qr", "iqn", "noisy stack"],
)
def test_streams_equal_pipelined(recipe: str, settings: dict[str, Any], groups: int, tmp_path: Path) -> None:
    """To the bit: the same draws, the same operations, at the same lag. (Not with Adam: its learning rate is a float32
    tensor here, and a Python number there.)"""
    config = config_of(recipe, runtime__groups=groups, **settings)
    plain, losses = rounds(override(config, {"runtime.schedule": "pipelined"}), tmp_path / "a", 60)
    ours, our_losses = rounds(override(config, {"runtime.schedule": "streams"}), tmp_path / "b", 60)
    assert our_losses == pytest.approx(losses, rel=1e-5) and losses > 0
    assert isinstance(ours.learner, CapturedLearner) and not isinstance(plain.learner, CapturedLearner)
    assert ours.learner.updates == plain.learner.updates > 50
    assert ours.collector.steps == plain.collector.steps
    assert torch.equal(ours.learner.flat.data, plain.learner.flat.data)
    assert torch.equal(ours.learner.target.data, plain.learner.target.data)
    assert ours.collector.episodes.state()["returns"] == plain.collector.episodes.state()["returns"]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="without a GPU there is one stream")
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("recipe", ["double", "rainbow"])
def test_the_streams_of_a_gpu_equal_one(recipe: str, groups: int, tmp_path: Path) -> None:
    """Whoever read or wrote too early would have other numbers than where everything is in one order."""
    more = {"network__hidden": (512, 512), "learner__batch_size": 128, "replay__samples_per_step": 64.0}
    config = config_of(recipe, runtime__groups=groups, device="cuda", acting__device="cuda", **more)
    plain, losses = rounds(override(config, {"runtime.schedule": "serial"}), tmp_path / "a", 60)
    ours, our_losses = rounds(override(config, {"runtime.schedule": "streams"}), tmp_path / "b", 60)
    assert isinstance(ours.learner, CapturedLearner) and isinstance(plain.learner, CapturedLearner)
    assert ours.learner.updates == plain.learner.updates > 200
    assert our_losses == losses > 0
    assert torch.equal(ours.learner.flat.data, plain.learner.flat.data)
    assert ours.collector.episodes.state()["returns"] == plain.collector.episodes.state()["returns"]


@pytest.mark.parametrize("recipe", ["munchausen", "per", "rainbow"])
def test_streams_are_close_where_kernels_round_otherwise(recipe: str, tmp_path: Path) -> None:
    """A hand-written MLP and numba's tree on one side, autograd and torch on the other: the first updates agree closely."""
    config = config_of(recipe)
    plain, _ = rounds(override(config, {"runtime.schedule": "pipelined"}), tmp_path / "a", 10)
    ours, _ = rounds(override(config, {"runtime.schedule": "streams"}), tmp_path / "b", 10)
    assert ours.learner.updates == plain.learner.updates > 4
    torch.testing.assert_close(ours.learner.flat.data, plain.learner.flat.data, rtol=1e-3, atol=1e-4)


class CompilationError(Exception):
    pass


def test_kernels_that_do_not_work_here_are_done_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU for which one of them does not compile: the run says why, and goes on with torch's operations."""
    config = config_of("per", runtime__schedule="streams")
    plain, losses = rounds(config, tmp_path / "a", 20)
    monkeypatch.setattr(kernels, "why_not", lambda device: "")
    on_device, asked = Replay.on_device, []

    def refused(self: Replay, batch: int, kernels: bool) -> Any:
        asked.append(kernels)
        if kernels:
            raise CompilationError("at 3:4:\n  tl.dot(x, y)\n  ^\nout of resources: shared memory")
        return on_device(self, batch, kernels)

    monkeypatch.setattr(Replay, "on_device", refused)
    ours, our_losses = rounds(config, tmp_path / "b", 20)
    assert asked == [True, False] and our_losses == losses > 0
    assert isinstance(ours.learner, CapturedLearner) and not ours.learner.kernels
    assert ours.learner._why_no_kernels == "CompilationError: out of resources: shared memory"
    assert torch.equal(ours.learner.flat.data, plain.learner.flat.data)


def test_an_error_without_kernels_is_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: Replay, batch: int, kernels: bool) -> Any:
        raise CompilationError("whatever")

    monkeypatch.setattr(Replay, "on_device", broken)
    with pytest.raises(CompilationError):
        rounds(config_of("per", runtime__schedule="streams"), tmp_path / "run", 1)


def test_what_is_slower_than_it_could_be_is_said() -> None:
    """Once each: no kernels, no recording, a replay elsewhere. (The notes of a GPU, which nobody asks for on the CPU.)"""
    config, spec = config_of("per"), Spec(obs_shape=(3,), obs_dtype="float32", num_actions=2)
    captured = CapturedLearner(config, spec, torch.device("cpu"), "CompilationError: no room")
    assert captured.notes() == []
    captured._step = Captured(lambda: None, (), torch.device("cpu"))
    captured._step.why_not = "RuntimeError: operation not permitted"
    captured.device = torch.device("cuda")
    recorded, kernels = captured.notes()
    assert "could not be recorded" in recorded and "(RuntimeError: operation not permitted)" in recorded
    assert "torch operations" in kernels and "(CompilationError: no room)" in kernels
    plain = Learner(config, spec, torch.device("cpu"))
    assert plain.notes() == []
    plain.device = torch.device("cuda")
    assert "replay is not on the GPU" in plain.notes()[0]


@pytest.mark.parametrize("recipe", recipes.NAMES)
def test_every_recipe_trains_with_streams_and_resumes(
    recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped and resumed in the middle, with steps in flight, it ends as if it had not been. (Where there is a GPU, on it.)"""
    device = "cuda" if torch.cuda.is_available() else "cpu"  # of both, not by measurement
    settings = {"total_steps": 600, "runtime__groups": 2, "runtime__checkpoint_every": 300}
    config = config_of(recipe, device=device, acting__device=device, runtime__schedule="streams", **settings)
    with Progress(1, "", silent=True) as progress:
        whole = Trainer(config, tmp_path / "whole", progress)
        whole.run()
        half = Trainer(config, tmp_path / "half", progress)
        between = half._between_rounds

        def interrupted(before: int, step: int, learned: Any) -> None:
            half.signal = signal.SIGTERM if step >= 300 else None
            between(before, step, learned)

        monkeypatch.setattr(half, "_between_rounds", interrupted)
        half.run()
        assert half.stop_reason == "signal"
        again = Trainer(config, tmp_path / "half", progress, resume=True)
        assert 300 <= again.worker.collector.steps < 400
        again.run()
    assert again.worker.learner.updates == whole.worker.learner.updates > 10
    assert torch.equal(again.worker.learner.flat.data, whole.worker.learner.flat.data)
    losses = [[r["train/loss"] for r in metrics.read(tmp_path / run) if "train/loss" in r] for run in ("whole", "half")]
    assert len(losses[0]) == 5 and losses[1] == pytest.approx(losses[0], rel=1e-9)  # of every update, once


def test_evaluation_beside_training(tmp_path: Path) -> None:
    """Its results are those of the parameters at the step it began; the best of them is what the checkpoint holds."""
    config = config_of("munchausen", total_steps=2500, runtime__eval_every=500, runtime__eval_episodes=4)
    with Progress(1, "", silent=True) as progress:
        trainer = Trainer(config, tmp_path / "run", progress)
        trainer.evaluator = background = trainer._make_evaluator(beside=True)
        began: dict[int, torch.Tensor] = {}
        start = background.start

        def remembered(parameters: Any, seed: int, step: int) -> None:
            began[step] = parameters.data.clone()
            start(parameters, seed, step)

        background.start = remembered  # type: ignore[method-assign]
        trainer.run()
    rows = [row for row in metrics.read(tmp_path / "run") if "eval/mean_reward" in row]
    steps = [int(row["step"]) for row in rows]
    assert len(began) >= 2 and set(began) <= set(steps) and steps[-1] == trainer.worker.collector.steps
    saved, _ = load_policy(tmp_path / "run")
    best = max(row["eval/mean_reward"] for row in rows)
    best_step = max(int(row["step"]) for row in rows if row["eval/mean_reward"] == best)
    expected = began.get(best_step, trainer.worker.learner.flat.data)
    assert torch.equal(Flat(saved.net, torch.device("cpu")).data, expected)
    for row in rows[:-1]:  # the same games again, after the fact
        flat = Flat(background.policy.net, torch.device("cpu"))
        flat.data.copy_(began[int(row["step"])])
        with evaluation.make_envs(config.env, 4, 1, 1) as games:
            seed = rng.derive(config.seed, f"evaluation {int(row['step'])}")
            again = evaluation.play(background.policy, games, 4, seed, 0)
        assert again is not None and again.mean_return == row["eval/mean_reward"]


def test_an_evaluation_beside_training_that_a_signal_stops_is_due_on_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of("dqn", total_steps=1500, runtime__eval_every=500, runtime__eval_episodes=2)
    with Progress(1, "", silent=True) as progress:
        trainer = Trainer(config, tmp_path / "run", progress)
        trainer.evaluator = trainer._make_evaluator(beside=True)

        def stopped(*args: Any) -> None:
            trainer.signal = signal.SIGTERM

        monkeypatch.setattr(evaluation, "play", stopped)
        between = trainer._between_rounds

        def waited(before: int, step: int, learned: Any) -> None:
            """The thread has ended, but nobody has asked for the result yet."""
            if trainer.evaluator._running is not None:
                futures.wait([trainer.evaluator._running])
            between(before, step, learned)

        monkeypatch.setattr(trainer, "_between_rounds", waited)
        trainer.run()
        assert trainer.stop_reason == "signal" and 500 <= trainer.worker.collector.steps < 700
        monkeypatch.undo()
        again = Trainer(config, tmp_path / "run", progress, resume=True)
        assert again._evaluation_due
        again.run()
    steps = [row["step"] for row in metrics.read(tmp_path / "run") if "eval/mean_reward" in row]
    assert steps[0] == trainer.worker.collector.steps


def test_an_evaluation_beside_training_that_hangs_is_found() -> None:
    hang = threading.Event()

    class Hanging:
        num_envs, frame_skip = 2, 1
        spec = Spec(obs_shape=(3,), obs_dtype="float32", num_actions=2)

        def reset(self, seed: int) -> Any:
            return np.zeros((2, 3), np.float32)

        def step(self, actions: Any) -> Any:
            hang.wait()
            raise RuntimeError("released")

        def close(self) -> None:
            pass

    config = config_of("dqn")
    net = networks.build(config, Hanging.spec)
    policy = Policy(net, config, Hanging.spec)
    background = Evaluator(policy, Hanging, 2, beside=True, patience=0.2)  # type: ignore[arg-type]
    background.ready()
    background.start(Flat(networks.build(config, Hanging.spec), torch.device("cpu")), 1, 0)
    with pytest.raises(Stuck, match="evaluation's environments"):
        background.result(wait=True)
    with pytest.raises(Stuck):  # it does not wait for ever, either
        background.close()
    hang.set()
    assert background._running is not None
    assert isinstance(background._running.exception(), RuntimeError)
    background.close()
    failing = Evaluator(policy, lambda: 1 / 0, 2, beside=True)  # type: ignore[arg-type, return-value]
    with pytest.raises(ZeroDivisionError):
        failing.ready()
    failing.close()
