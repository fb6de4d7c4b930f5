"""Whole runs: same seed twice, serial = pipelined, resume to the bit, signals, early stops, divergence."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import qfleet
from qfleet import envs, machine, recipes
from qfleet.config import ConfigError, override
from qfleet.runtime import checkpoint, evaluation
from qfleet.runtime.checkpoint import CheckpointError
from qfleet.runtime.failing import TrainingError
from qfleet.runtime.setup import lock, resolve, summary
from qfleet.runtime.train import crossed
from qfleet.runtime.worker import Worker, lr_factor, threads_for

SMALL = {
    "network.hidden": (32, 32),
    "replay.capacity": 1_500,  # wraps within a run
    "replay.min_steps": 200,
    "replay.samples_per_step": 4.0,
    "learner.batch_size": 16,
    "runtime.steps_per_round": 32,
    "runtime.log_every": 32,
    "runtime.eval_every": 1_000,
    "runtime.eval_episodes": 2,
    "runtime.checkpoint_every": 500,
}


def train(
    run_dir: Path, recipe: str = "dqn", steps: int = 2_000, env: str = "CartPole-v1", **overrides: Any
) -> qfleet.Run:
    values = SMALL | {k.replace("__", "."): v for k, v in overrides.items()}
    return qfleet.train(env, recipe=recipe, total_steps=steps, run_dir=run_dir, progress=False, overrides=values)


def numbers(run_dir: Path) -> list[dict[str, float]]:
    """metrics.jsonl without what depends on the clock."""
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if not k.startswith(("time", "pipeline/"))} for row in rows]


def weights(run_dir: Path) -> dict[str, Any]:
    state, _ = checkpoint.read(checkpoint.newest(run_dir / "checkpoints"))
    model: dict[str, Any] = state["learner"]["model"]
    return model


def same_weights(a: Path, b: Path) -> bool:
    x, y = weights(a), weights(b)
    return x.keys() == y.keys() and all((x[k] == y[k]).all() for k in x)


@pytest.mark.parametrize("recipe", ["dqn", "rainbow"])
def test_same_seed_same_metrics_other_seed_others(tmp_path: Path, recipe: str) -> None:
    train(tmp_path / "a", recipe)
    train(tmp_path / "b", recipe)
    train(tmp_path / "c", recipe, seed=2)
    assert numbers(tmp_path / "a") == numbers(tmp_path / "b")
    assert same_weights(tmp_path / "a", tmp_path / "b")
    assert numbers(tmp_path / "a") != numbers(tmp_path / "c")
    assert any("train/loss" in row for row in numbers(tmp_path / "a"))


@pytest.mark.parametrize("recipe", ["dqn", "per", "rainbow"])
def test_serial_and_pipelined_have_the_same_losses(tmp_path: Path, recipe: str) -> None:
    train(tmp_path / "serial", recipe, runtime__lag=1, runtime__schedule="serial")
    train(tmp_path / "pipelined", recipe, runtime__lag=1, runtime__schedule="pipelined")
    train(tmp_path / "lag0", recipe, runtime__lag=0)
    assert numbers(tmp_path / "serial") == numbers(tmp_path / "pipelined")
    assert same_weights(tmp_path / "serial", tmp_path / "pipelined")
    assert numbers(tmp_path / "serial") != numbers(tmp_path / "lag0")


KILLED = """
import os, sys, json
import qfleet.runtime.train as t
steps, args = int(sys.argv[1]), json.loads(sys.argv[2])
between = t.Trainer._between_rounds
def die(self, before, step, learned):
    if step >= steps:
        os.kill(os.getpid(), 9)
    between(self, before, step, learned)
t.Trainer._between_rounds = die
import qfleet
qfleet.train(progress=False, **args)
"""


def killed(steps: int, **args: Any) -> None:
    """A training process that is SIGKILLed after the round that reaches `steps`."""
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(steps), json.dumps(args)], capture_output=True, text=True, check=False
    )
    assert done.returncode == -signal.SIGKILL, done.stderr


@pytest.mark.parametrize("schedule", ["serial", "pipelined"])
@pytest.mark.parametrize(
    ("env", "recipe"), [("CartPole-v1", "rainbow"), ("MinAtar/Breakout-v1", "dqn"), ("CartPole-v1", "dqn")]
)
def test_killed_and_resumed_equals_uninterrupted(tmp_path: Path, schedule: str, env: str, recipe: str) -> None:
    overrides = {**SMALL, "runtime.schedule": schedule, "runtime.lag": 1, "env.num_envs": 4}
    common = {"env": env, "recipe": recipe, "total_steps": 2_000, "overrides": overrides}
    qfleet.train(**common, run_dir=tmp_path / "whole", progress=False)
    killed(777, **common, run_dir=str(tmp_path / "killed"))
    killed(1_650, resume=str(tmp_path / "killed"))
    qfleet.train(resume=tmp_path / "killed", progress=False)
    assert numbers(tmp_path / "killed") == numbers(tmp_path / "whole")
    assert same_weights(tmp_path / "killed", tmp_path / "whole")


def test_environments_without_state_start_new_episodes_and_say_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = {"env": "LunarLander-v3", "env__vectorize": "inprocess", "env__num_envs": 2, "runtime__lag": 0}
    train(tmp_path / "run", steps=800, **settings)
    capsys.readouterr()
    run = qfleet.train(resume=tmp_path / "run", total_steps=1_200)
    assert "episodes in flight restart" in capsys.readouterr().out
    assert run.metrics[-1]["step"] >= 1_200


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_checkpoints_and_exits_and_the_run_goes_on(tmp_path: Path, number: signal.Signals) -> None:
    flags = [
        "--runtime.log-every",
        "64",
        "--runtime.eval-every",
        "0",
        "--runtime.eval-episodes",
        "2",
        "--network.hidden",
        "16,16",
    ]
    command = [
        sys.executable,
        "-m",
        "qfleet",
        "train",
        "CartPole-v1",
        "--total-steps",
        "400000",
        "--run-dir",
        str(tmp_path / "run"),
        *flags,
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        while not process.stdout.readline().startswith("step "):  # until training has begun
            assert process.poll() is None
        process.send_signal(number)
        rest = process.stdout.read()
    assert process.returncode == 128 + number, rest
    assert "Traceback" not in rest and "--resume" in rest
    saved = checkpoint.newest(tmp_path / "run" / "checkpoints")
    step = int(saved.name.removeprefix("step_"))
    assert 0 < step < 400_000
    run = qfleet.train(resume=tmp_path / "run", total_steps=step + 500, progress=False)
    assert run.metrics[-1]["step"] >= step + 500 and not run.interrupted


def test_stop_at_and_patience(tmp_path: Path) -> None:
    run = train(tmp_path / "reached", runtime__stop_at=1.0)
    assert run.stop_reason == "stop_at" and run.metrics[-1]["step"] < 1_100
    run = train(tmp_path / "patience", steps=20_000, learner__lr=1e-9, runtime__patience=2, runtime__eval_every=300)
    assert run.stop_reason == "patience"
    evals = [r["eval/mean_reward"] for r in run.metrics if "eval/mean_reward" in r]
    assert max(evals) > max(evals[-2:])


def test_plateau_halves_the_learning_rate(tmp_path: Path) -> None:
    run = train(
        tmp_path / "run", steps=6_000, learner__lr=1e-9, learner__lr_schedule="plateau", runtime__eval_every=300
    )
    rates = [r["train/lr"] for r in run.metrics if "train/lr" in r]
    assert rates[0] == 1e-9 and min(rates) <= 5e-10


def test_divergence_stops_the_run_and_names_the_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match=r"the loss exploded .* at step .* checkpoint is .*step_"):
        train(
            tmp_path / "run",
            steps=20_000,
            learner__lr=1e30,
            learner__grad_clip=0.0,
            learner__optimizer="sgd",
            learner__loss="mse",
            replay__min_steps=600,
        )


@pytest.mark.parametrize("when", ["made", "running"])
def test_a_gpu_with_too_little_memory_says_how_much_and_which_flags(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    def full(self: Worker) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has 1.00 GiB free.\nMore.")

    monkeypatch.setattr(Worker, "build" if when == "made" else "round", full)
    with pytest.raises(ConfigError if when == "made" else TrainingError) as failed:
        train(tmp_path / "run", steps=500, replay__capacity=5000)
    said = str(failed.value)
    assert said.startswith(
        "the GPU has too little memory: Tried to allocate 2.00 GiB. GPU 0 has 1.00 GiB free. Lower --replay.capacity (5,000), "
    )
    assert "--replay.device cpu" in said and "More" not in said
    assert (tmp_path / "run").exists() == (when == "running")


def test_resume_refuses_what_would_change_the_run(tmp_path: Path) -> None:
    train(tmp_path / "run", steps=500)
    with pytest.raises(ConfigError, match=r"--resume cannot change learner.lr"):
        qfleet.train(resume=tmp_path / "run", overrides={"learner.lr": 1.0})
    with pytest.raises(ConfigError, match="leave them out"):
        qfleet.train("CartPole-v1", resume=tmp_path / "run")
    with pytest.raises(ConfigError, match="already holds a run"):
        train(tmp_path / "run")
    with pytest.raises(CheckpointError, match="no run directory"):
        qfleet.train(resume=tmp_path)


@pytest.mark.parametrize("name", ["model.safetensors", "state.safetensors", "state.json", "manifest.json"])
def test_a_truncated_checkpoint_is_refused_with_its_name(tmp_path: Path, name: str) -> None:
    train(tmp_path / "run", steps=600)
    file = checkpoint.newest(tmp_path / "run" / "checkpoints") / name
    os.truncate(file, file.stat().st_size // 2)
    with pytest.raises(CheckpointError, match=rf"damaged.*{name}"):
        qfleet.train(resume=tmp_path / "run", progress=False)


def test_truncated_replay_rows_are_refused(tmp_path: Path) -> None:
    train(tmp_path / "run", steps=600)
    rows = next((tmp_path / "run" / "checkpoints" / "replay").iterdir())
    data = bytearray(rows.read_bytes())
    data[-1] ^= 1
    rows.write_bytes(data)
    with pytest.raises(CheckpointError, match="checksum"):
        qfleet.train(resume=tmp_path / "run", progress=False)


FULL = """
import json, resource, sys
import qfleet
resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, 40_000))
qfleet.train(progress=False, **json.loads(sys.argv[1]))
"""


def test_a_full_disk_stops_with_the_reason_and_spares_the_last_checkpoint(tmp_path: Path) -> None:
    """RLIMIT_FSIZE stands in for the full disk: writing past it fails as writing to a full disk does."""
    train(tmp_path / "run", steps=500, replay__capacity=100_000)
    before = sorted(p.name for p in (tmp_path / "run" / "checkpoints").rglob("*"))
    args = json.dumps({"resume": str(tmp_path / "run"), "total_steps": 60_000})
    done = subprocess.run([sys.executable, "-c", FULL, args], capture_output=True, text=True, check=False)
    assert done.returncode != 0 and "File too large" in done.stderr
    after = sorted(p.name for p in (tmp_path / "run" / "checkpoints").rglob("*"))
    assert not [name for name in after if "tmp" in name]
    assert set(before) <= set(after) or checkpoint.read(checkpoint.newest(tmp_path / "run" / "checkpoints"))


def test_old_checkpoints_and_rows_are_pruned(tmp_path: Path) -> None:
    train(tmp_path / "run", steps=6_000, runtime__keep=2, runtime__eval_every=0)
    folder = tmp_path / "run" / "checkpoints"
    assert len(list(folder.glob("step_*"))) == 2
    rows = sum(p.stat().st_size for p in (folder / "replay").iterdir())
    assert rows < 1_500 * 60 * 2  # a ring of 1,500 rows of about 44 bytes, plus a segment that is partly overwritten
    assert (folder / "last").resolve() == checkpoint.newest(folder).resolve()


def test_a_run_that_cannot_begin_leaves_nothing_behind(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no images"):
        train(tmp_path / "run", network__kind="nature")
    assert not (tmp_path / "run").exists()
    (tmp_path / "mine").mkdir()
    with pytest.raises(ConfigError, match="no images"):
        train(tmp_path / "mine", network__kind="nature")
    assert (tmp_path / "mine").exists()


def test_resuming_a_complete_run_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(tmp_path / "run", steps=500)
    before = numbers(tmp_path / "run")
    qfleet.train(resume=tmp_path / "run")
    assert "this run is complete: it has made 5" in capsys.readouterr().out
    assert numbers(tmp_path / "run") == before


def test_api_run(tmp_path: Path) -> None:
    run = train(tmp_path / "run", steps=600)
    assert run.dir == tmp_path / "run" and run.stop_reason == "total_steps" and not run.interrupted
    again = run.evaluate(episodes=3, seed=5)
    assert again.episodes == 3 and again == qfleet.evaluate(tmp_path / "run", 3, seed=5)
    policy = qfleet.load(tmp_path / "run")
    obs = torch.randn(7, 4).numpy()
    assert (policy.act(obs) == run.policy.act(obs)).all() and policy.act(obs).shape == (7,)
    assert policy.act(obs[0]) == policy.act(obs)[0]
    with pytest.raises(ValueError, match=r"observations have shape \(7, 5\)"):
        policy.act(torch.randn(7, 5).numpy())
    assert run.metrics[0]["step"] > 0 and "rollout/exploration_rate" in run.metrics[0]


CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("lag", "threads", "cores", "expected"),
    [(0, 1, 8, "serial"), (1, 1, 1, "serial"), (1, 1, 2, "pipelined"), (1, 2, 2, "serial"), (1, 2, 4, "pipelined")],
)
def test_auto_overlaps_where_a_core_is_left_for_the_environments(
    lag: int, threads: int, cores: int, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "cores", lambda: cores)
    config = override(recipes.make("dqn", "CartPole-v1"), {"runtime.lag": lag, "learner.threads": threads})
    with envs.make(config.env, seed=1, threads=1) as made:
        assert resolve(config, made, CPU, CPU).runtime.schedule == expected


@pytest.mark.parametrize(
    ("device", "kind", "has_bf16", "expected"),
    [
        ("cuda:0", "auto", True, "bf16"),
        ("cuda:0", "auto", False, "fp32"),  # a GPU that would only emulate it
        ("cuda:0", "mine:Net", True, "fp32"),  # its last layer would be bf16, too
        ("cpu", "auto", True, "fp32"),
    ],
)
def test_precision_is_low_where_that_is_fast_and_right(
    device: str, kind: str, has_bf16: bool, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        torch.cuda, "is_bf16_supported", lambda including_emulation=True: has_bf16 or including_emulation
    )
    config = override(recipes.make("dqn", "CartPole-v1"), {"network.kind": kind})
    place = torch.device(device)
    with envs.make(config.env, seed=1, threads=1) as made:
        assert resolve(config, made, place, place).learner.precision == expected


def test_replay_and_learner_on_two_gpus_are_refused() -> None:
    config = override(recipes.make("dqn", "CartPole-v1"), {"replay.device": "cuda:1"})
    with envs.make(config.env, seed=1, threads=1) as made, pytest.raises(ConfigError, match="two GPUs"):
        resolve(config, made, torch.device("cuda:0"), torch.device("cuda:1"))


def test_small_helpers() -> None:
    assert crossed(9, 10, 10) and not crossed(10, 19, 10) and not crossed(0, 99, 0)
    assert (
        lr_factor("linear", 0.25) == 0.75
        and lr_factor("cosine", 0.5) == pytest.approx(0.5)
        and lr_factor("constant", 0.9) == 1.0
    )


def test_compile_without_a_compiler_runs_eager_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CXX", "no-such-compiler")
    run = qfleet.train(
        "CartPole-v1",
        recipe="c51",
        total_steps=400,
        run_dir=tmp_path / "run",
        overrides={**SMALL, "learner.compile": "on"},
    )
    assert "no C++ compiler" in capsys.readouterr().out
    assert run.config.learner.compile == "off" and any("train/loss" in row for row in run.metrics)


def test_two_processes_cannot_train_in_one_run_directory(tmp_path: Path) -> None:
    train(tmp_path / "run", steps=500)
    config = tmp_path / "run/config.yaml"
    before, held = config.read_text(), lock(tmp_path / "run")
    with held, pytest.raises(ConfigError, match="another process is training"):
        qfleet.train(resume=tmp_path / "run", total_steps=600, progress=False)
    assert config.read_text() == before
    qfleet.train(resume=tmp_path / "run", total_steps=600, progress=False)
    assert config.read_text() == before.replace("total_steps: 500", "total_steps: 600") != before


def test_a_folder_that_another_process_made_first_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both found no folder; the other one made it and locked it before us."""
    others = []

    def made_by_another(run_dir: Path) -> None:
        run_dir.mkdir()
        (run_dir / "metrics.jsonl").write_text("theirs")
        others.append(lock(run_dir))

    monkeypatch.setattr("qfleet.runtime.train.prepare", made_by_another)
    with pytest.raises(ConfigError, match="another process is training"):
        train(tmp_path / "run")
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == "theirs"
    others[0].close()


def test_killed_before_the_first_checkpoint_resumes_from_the_start(tmp_path: Path) -> None:
    common = {"env": "CartPole-v1", "recipe": "dqn", "total_steps": 600, "overrides": SMALL}
    qfleet.train(**common, run_dir=tmp_path / "whole", progress=False)
    killed(200, **common, run_dir=str(tmp_path / "killed"))
    qfleet.train(resume=tmp_path / "killed", progress=False)
    assert numbers(tmp_path / "killed") == numbers(tmp_path / "whole")


def test_an_evaluation_cut_short_by_a_signal_comes_first_on_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(tmp_path / "whole")
    play = evaluation.play

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        os.kill(os.getpid(), signal.SIGTERM)
        return play(*args, **kwargs)

    monkeypatch.setattr(evaluation, "play", interrupted)
    run = train(tmp_path / "cut")
    assert run.signal == signal.SIGTERM and run.evaluation is None
    assert not any("eval/mean_reward" in row for row in run.metrics)
    monkeypatch.undo()
    qfleet.train(resume=tmp_path / "cut", progress=False)
    assert numbers(tmp_path / "cut") == numbers(tmp_path / "whole")


def test_ties_do_not_count_as_progress(tmp_path: Path) -> None:
    run = train(tmp_path / "run", env="MountainCar-v0", steps=10_000, learner__lr=1e-9, runtime__patience=2)
    assert run.stop_reason == "patience" and run.metrics[-1]["step"] < 4_000


@pytest.mark.parametrize(
    ("groups", "learners", "expected"), [(1, 1, 16), (2, 1, 16), (3, 1, 24), (4, 1, 32), (4, 2, 16), (1, 32, 1)]
)
def test_every_group_of_several_has_threads_for_half_the_cores(
    groups: int, learners: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "cores", lambda: 16)
    assert threads_for(groups, learners) == expected


def test_the_header_tells_how_environments_are_stepped() -> None:
    config = override(recipes.make("dqn", "CartPole-v1"), {"env.num_envs": 4, "env.vectorize": "subprocess"})
    with envs.make(config.env, seed=1, threads=3) as made:
        assert "4 × CartPole-v1 (subprocess, 3 threads);" in summary(config, made, "cpu", made.threads)[0]
        assert "4 × CartPole-v1 (subprocess);" in summary(config, made, "cpu")[0]
