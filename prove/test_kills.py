"""A run killed by SIGKILL at random moments, 20 times, and resumed each time, equals the run that nobody touched."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from qfleet.runtime import checkpoint

KILLS = 20
FLAGS = {
    "--network.hidden": "64,64",
    "--replay.capacity": "4000",
    "--replay.samples-per-step": "16",
    "--learner.batch-size": "32",
    "--runtime.log-every": "200",
    "--runtime.eval-every": "3000",
    "--runtime.eval-episodes": "4",
    "--runtime.checkpoint-every": "1000",
    "--runtime.lag": "1",
}


def start(*args: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "qfleet", "train", *args], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def finish(*args: str) -> None:
    process = start(*args)
    _, errors = process.communicate()
    assert process.returncode == 0, errors


def numbers(run: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if not k.startswith(("time", "pipeline/"))} for row in rows]


@pytest.mark.parametrize("schedule", ["serial", "pipelined"])
@pytest.mark.parametrize(("env", "recipe"), [("CartPole-v1", "dqn"), ("CartPole-v1", "rainbow")])
def test_twenty_kills_change_nothing(tmp_path: Path, schedule: str, env: str, recipe: str) -> None:
    flags = [word for pair in FLAGS.items() for word in pair] + ["--runtime.schedule", schedule]
    steps = "200000" if recipe == "dqn" else "30000"
    common = [env, "--recipe", recipe, "--total-steps", steps, *flags]
    finish(*common, "--run-dir", str(tmp_path / "whole"))

    moments = random.Random(f"{schedule} {recipe}")
    killed, run = 0, tmp_path / "killed"
    while killed < KILLS:
        process = (
            start("--resume", str(run)) if (run / "config.yaml").exists() else start(*common, "--run-dir", str(run))
        )
        assert process.stdout is not None
        while not process.stdout.readline().startswith("step ") and process.poll() is None:
            pass  # from its first line of progress on, any moment will do: also within a checkpoint
        timer = threading.Timer(moments.uniform(0.0, 1.0), process.send_signal, [signal.SIGKILL])
        timer.start()
        _, errors = process.communicate()
        timer.cancel()
        assert process.returncode in (0, -signal.SIGKILL), errors
        if process.returncode == 0:  # it came through before the timer did; make the run longer if this happens
            break
        killed += 1
    finish("--resume", str(run))
    assert killed == KILLS
    assert numbers(run) == numbers(tmp_path / "whole")
    a, b = (checkpoint.read(checkpoint.newest(r / "checkpoints"))[0] for r in (run, tmp_path / "whole"))
    assert all((a["learner"]["model"][k] == b["learner"]["model"][k]).all() for k in a["learner"]["model"])
    assert all((a["learner"]["optimizer"][k] == b["learner"]["optimizer"][k]).all() for k in ("m", "v", "step"))
