"""Runs of CartPole, as a rule, on a real, local Ray."""

import os
from pathlib import Path
from typing import Any

import pytest

import qfleet
from qfleet.runtime.cluster import Fleet

SETTINGS: dict[str, Any] = {
    "env.num_envs": 4, "network.hidden": (32, 32), "replay.min_steps": 200, "learner.batch_size": 16, "replay.samples_per_step": 8.0,
    "runtime.eval_every": 0, "runtime.eval_episodes": 2, "runtime.log_every": 500, "learners": 2,
}  # fmt: skip


def trained(folder: Path, mode: str, total_steps: int = 3000, env: str = "CartPole-v1", **more: Any) -> qfleet.Run:
    overrides = SETTINGS | {"sync.mode": mode} | {k.replace("__", "."): v for k, v in more.items()}
    return qfleet.train(
        env,
        recipe="dqn",
        seed=3,
        total_steps=total_steps,
        run_dir=folder,
        device="cpu",
        overrides=overrides,
        progress=False,
    )


Hit = tuple[str, int, int]  # "learner" or "server", its number, the signal


def disturbed(monkeypatch: pytest.MonkeyPatch, hits: list[Hit], at: int = 1000) -> list[str]:
    """Once that many steps are made, these processes get these signals. -> what the run says of it."""
    notes: list[str] = []
    news, note = Fleet._news, Fleet.note

    def disturb(self: Fleet, seconds: float) -> Any:
        learned = news(self, seconds)
        while self.steps > at and hits:
            kind, which, number = hits.pop()
            hit = (self._learners if kind == "learner" else self.servers.actors)[which]
            os.kill(self._ray.get(hit.pid.remote()), number)
        return learned

    def heard(self: Fleet) -> str:
        text = note(self)
        notes.extend([text] if text else [])
        return text

    monkeypatch.setattr(Fleet, "_news", disturb)
    monkeypatch.setattr(Fleet, "note", heard)
    return notes
