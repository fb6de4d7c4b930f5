"""The serial run at lag 0 has the losses of a single-file DQN that imports nothing from qfleet."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

import qfleet

ORACLE = Path(__file__).parent.parent / "examples" / "dqn_single_file.py"


@pytest.fixture(scope="module")
def oracle() -> ModuleType:
    spec = importlib.util.spec_from_file_location("dqn_single_file", ORACLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_the_oracle_stands_alone() -> None:
    code = f"import sys, runpy; runpy.run_path({str(ORACLE)!r}); sys.exit('qfleet' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ORACLE.parent).returncode == 0
    assert len(ORACLE.read_text().splitlines()) <= 250


@pytest.mark.parametrize("n_step", [1, 3])
def test_serial_losses_equal_the_oracle(oracle: ModuleType, tmp_path: Path, n_step: int) -> None:
    """One update per round and one line of metrics per update: 500 losses, relative 1e-5."""
    s = oracle.Settings(n_step=n_step, steps_per_round=2, seed=3, epsilon_steps=1000, min_steps=200, capacity=600)
    expected = oracle.train(s, updates=500)
    run = qfleet.train(
        s.env,
        recipe="dqn",
        seed=s.seed,
        total_steps=1300,
        run_dir=tmp_path / "run",
        progress=False,
        overrides={
            "env.num_envs": 1,
            "env.vectorize": "inprocess",
            "network.hidden": s.hidden,
            "replay.capacity": s.capacity,
            "replay.min_steps": s.min_steps,
            "replay.samples_per_step": s.samples_per_step,
            "learner.batch_size": s.batch_size,
            "learner.lr": s.lr,
            "learner.lr_schedule": "constant",
            "learner.tau": 1.0,
            "learner.adam_eps": 1e-8,
            "learner.gamma": s.gamma,
            "learner.n_step": s.n_step,
            "learner.grad_clip": s.grad_clip,
            "learner.target_interval": s.target_interval,
            "acting.epsilon_start": s.epsilon_start,
            "acting.epsilon_end": s.epsilon_end,
            "acting.epsilon_steps": s.epsilon_steps,
            "runtime.steps_per_round": s.steps_per_round,
            "runtime.log_every": 1,
            "runtime.eval_every": 0,
            "runtime.eval_episodes": 1,
            "runtime.checkpoint_every": 0,
        },
    )
    losses = [row["train/loss"] for row in run.metrics if "train/loss" in row]
    assert len(losses) >= 500
    np.testing.assert_allclose(losses[:500], expected, rtol=1e-5)
