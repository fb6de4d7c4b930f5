"""Environments that stop answering are found and named; the run is saved and goes on when it is resumed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import qfleet

TOYS = str(Path(__file__).parents[1] / "envs")


@pytest.mark.parametrize(
    ("vectorize", "schedule", "groups", "eval_every", "named"),
    [
        ("subprocess", "pipelined", 2, 0, "environments 0 to 1) did not answer for 2 s"),
        ("inprocess", "serial", 1, 0, "4 environments did not answer for 2 s"),
        ("inprocess", "serial", 1, 100, "the evaluation's environments did not answer for 2 s"),
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
    (tmp_path / "hang").touch()
    monkeypatch.syspath_prepend(TOYS)
    command = [
        sys.executable, "-m", "qfleet", "train", "env_toys:Hanging-v0", "--recipe", "dqn", "--run-dir", str(tmp_path / "run"),
        "--env-kwargs", f"file={tmp_path / 'hang'}", "--env.vectorize", vectorize, "--num-envs", "4", "--runtime.groups", str(groups),
        "--runtime.schedule", schedule, "--runtime.lag", "1", "--total-steps", "1000", "--replay.min-steps", "50", "--runtime.watchdog", "2",
        "--runtime.emulator-threads", "2", "--learner.batch-size", "16", "--runtime.eval-every", str(eval_every), "--runtime.eval-episodes", "40",
    ]  # fmt: skip
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env=os.environ | {"PYTHONPATH": TOYS}, timeout=120
    )
    assert done.returncode == 1
    assert named in done.stderr and "Traceback" not in done.stderr and f"--resume {tmp_path / 'run'}" in done.stderr
    assert (tmp_path / "hang.found").exists()
    run = qfleet.train(resume=tmp_path / "run", progress=False)
    assert run.stop_reason == "total_steps" and run.metrics[-1]["step"] >= 1000
