"""Environments that stop answering are found and named; the run is saved and goes on when it is resumed."""

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import qfleet

TOYS = str(Path(__file__).parents[1] / "envs")


def hanging(tmp_path: Path, *words: str, launcher: tuple[str, ...] = ()) -> str:
    """Train where an environment hangs -> what is said about it. Nobody is left behind."""
    (tmp_path / "hang").touch()
    path = f"{TOYS}{os.pathsep}{tmp_path}"  # workers are told it on their command line
    done = subprocess.run(
        [sys.executable, "-m", *launcher, "qfleet", "train", *words], capture_output=True, text=True, check=False, env=os.environ | {"PYTHONPATH": path}, timeout=120
    )  # fmt: skip
    assert done.returncode == 1
    assert launcher or "Traceback" not in done.stderr  # torchrun ends with one of its own
    assert (tmp_path / "hang.found").exists()
    assert not [p for p in Path("/proc").glob("[0-9]*/cmdline") if str(tmp_path) in told(p)]
    return done.stderr


def told(cmdline: Path) -> str:
    try:
        return cmdline.read_text()
    except OSError:  # it has ended
        return ""


@pytest.mark.parametrize(
    ("vectorize", "schedule", "groups", "eval_every", "named"),
    [
        ("subprocess", "pipelined", 2, 0, "environments 0 to 1) did not answer for 8 s"),
        ("inprocess", "serial", 1, 0, "4 environments did not answer for 8 s"),
        ("subprocess", "serial", 1, 100, "the evaluation's environments did not answer for 8 s"),
    ],
)
def test_a_hanging_environment(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    vectorize: str,
    schedule: str,
    groups: int,
    eval_every: int,
    named: str,
) -> None:
    """It hangs in the second episode of the first environment that gets there: one of the evaluation's, if there is one early."""
    monkeypatch.syspath_prepend(TOYS)
    said = hanging(
        tmp_path, "env_toys:Hanging-v0", "--recipe", "dqn", "--run-dir", str(tmp_path / "run"),
        "--env-kwargs", f"file={tmp_path / 'hang'}", "--env.vectorize", vectorize, "--num-envs", "4", "--runtime.groups", str(groups),
        "--runtime.schedule", schedule, "--runtime.lag", "1", "--total-steps", "1000", "--replay.min-steps", "50", "--runtime.watchdog", "8",
        "--runtime.emulator-threads", "2", "--learner.batch-size", "16", "--runtime.eval-every", str(eval_every), "--runtime.eval-episodes", "40",
    )  # fmt: skip
    assert named in said and f"--resume {tmp_path / 'run'}" in said
    run = qfleet.train(resume=tmp_path / "run", progress=False)
    assert run.stop_reason == "total_steps" and run.metrics[-1]["step"] >= 1000


@pytest.mark.parametrize(
    ("vectorize", "seconds", "named"),
    [
        ("subprocess", "8", r"worker \d \(process \d+, environments"),
        ("inprocess", "3", "4 environments"),
        ("auto", "3", "env_toys:Hanging-v0, while it was made and tried,"),  # to see how fast it is
    ],
)
def test_an_environment_that_hangs_in_its_first_reset(tmp_path: Path, vectorize: str, seconds: str, named: str) -> None:
    """The run never began, and leaves nothing behind."""
    said = hanging(
        tmp_path, "env_toys:Hanging-v0", "--recipe", "dqn", "--run-dir", str(tmp_path / "run"), "--runtime.watchdog", seconds,
        "--env-kwargs", f"file={tmp_path / 'hang'}", "--env-kwargs", "where=reset", "--env.vectorize", vectorize, "--num-envs", "4",
        "--runtime.emulator-threads", "2",
    )  # fmt: skip
    assert re.search(named, said) and f"did not answer for {seconds} s" in said and "--resume" not in said
    assert not (tmp_path / "run").exists()


def test_one_of_several_learners_whose_environment_hangs(tmp_path: Path) -> None:
    """Whichever of the two it is, it says so, and the launcher ends both."""
    said = hanging(
        tmp_path, "env_toys:Hanging-v0", "--recipe", "dqn", "--run-dir", str(tmp_path / "run"), "--runtime.watchdog", "3",
        "--env-kwargs", f"file={tmp_path / 'hang'}", "--env.vectorize", "inprocess", "--num-envs", "4", "--replay.min-steps", "50",
        "--total-steps", "1000000", "--learner.batch-size", "16", "--runtime.eval-every", "0", "--device", "cpu",
        launcher=("torch.distributed.run", "--nproc-per-node", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", "-m"),
    )  # fmt: skip
    assert said.count("2 environments did not answer for 3 s") == 1


def test_an_environment_that_hangs_in_the_evaluation_at_the_end(tmp_path: Path) -> None:
    """Or in that of `qfleet eval`: what was trained is there."""
    run = tmp_path / "run"
    words = ("env_toys:Hanging-v0", "--recipe", "dqn", "--run-dir", str(run), "--env-kwargs", f"file={tmp_path / 'hang'}", "--env.vectorize",
             "subprocess", "--runtime.emulator-threads", "2", "--num-envs", "4", "--total-steps", "300", "--replay.min-steps", "50", "--learner.batch-size", "16",
             "--runtime.eval-episodes", "40", "--runtime.watchdog", "8", "--runtime.eval-every", "0")  # fmt: skip
    env = os.environ | {"PYTHONPATH": f"{TOYS}{os.pathsep}{tmp_path}"}
    subprocess.run([sys.executable, "-m", "qfleet", "train", *words], check=True, capture_output=True, env=env)
    said = hanging(tmp_path, "--resume", str(run))
    assert said.startswith("qfleet: error: the evaluation's environments did not answer for 8 s")
    policy = qfleet.load(run)
    assert policy.act(np.zeros((3, *policy.spec.input_shape), policy.spec.obs_dtype)).shape == (3,)
