"""Learners and servers on a real, local Ray."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import qfleet
from qfleet.config import ConfigError
from qfleet.runtime import checkpoint

SETTINGS: dict[str, Any] = {
    "env.num_envs": 4, "network.hidden": (32, 32), "replay.min_steps": 200, "learner.batch_size": 16, "replay.samples_per_step": 8.0,
    "runtime.eval_every": 0, "runtime.eval_episodes": 2, "runtime.log_every": 500, "learners": 2,
}  # fmt: skip


@pytest.fixture(scope="module")
def ray() -> Iterator[None]:
    os.environ["OMP_NUM_THREADS"] = "1"
    import ray

    ray.init(num_cpus=8, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    yield
    ray.shutdown()


def trained(folder: Path, mode: str, total_steps: int = 3000, **more: Any) -> qfleet.Run:
    overrides = SETTINGS | {"sync.mode": mode} | {k.replace("__", "."): v for k, v in more.items()}
    return qfleet.train(
        "CartPole-v1",
        recipe="dqn",
        seed=3,
        total_steps=total_steps,
        run_dir=folder,
        device="cpu",
        overrides=overrides,
        progress=False,
    )


@pytest.mark.parametrize("mode", ["ssp", "diloco"])
def test_modes_train(ray: None, mode: str, tmp_path: Path) -> None:
    run = trained(tmp_path / "run", mode, sync__local_steps=4)
    rows = [row for row in run.metrics if "train/loss" in row]
    assert rows[-1]["step"] >= 3000 and rows[-1]["train/loss"] < 100
    # Eight samples a step in batches of sixteen: what one learner does in an update, each of the two does.
    assert rows[-1]["train/n_updates"] == pytest.approx(2800 * 8 / 32, rel=0.15)
    assert run.evaluation is not None and run.stop_reason == "total_steps"


def test_sync_is_the_same_with_any_number_of_servers(ray: None, tmp_path: Path) -> None:
    def numbers(run: qfleet.Run) -> list[Any]:
        return [(row["step"], row.get("eval/mean_reward")) for row in run.metrics if "eval/mean_reward" in row]

    runs = [trained(tmp_path / f"{i}", "sync", sync__servers=servers) for i, servers in enumerate((1, 2))]
    weights = [checkpoint.read((run.dir / "checkpoints/best").resolve())[0]["learner"]["model"] for run in runs]
    for other in weights[1:]:
        assert all((other[name] == value).all() for name, value in weights[0].items())
    assert numbers(runs[0]) == numbers(runs[1])


@pytest.mark.parametrize(
    ("mode", "number"), [("sync", signal.SIGKILL), ("async", signal.SIGSTOP), ("ssp", signal.SIGKILL)]
)
def test_a_learner_that_dies_or_hangs_is_replaced(
    ray: None, mode: str, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from qfleet.runtime.cluster import Fleet

    notes: list[str] = []
    news, note = Fleet._news, Fleet.note
    hit: list[int] = []

    def disturbed(self: Fleet, seconds: float) -> Any:
        learned = news(self, seconds)
        if self.steps > 1000 and not hit:
            hit.append(self._ray.get(self._learners[1].pid.remote()))
            os.kill(hit[0], number)
        return learned

    def heard(self: Fleet) -> str:
        notes.append(note(self))
        return notes[-1]

    monkeypatch.setattr(Fleet, "_news", disturbed)
    monkeypatch.setattr(Fleet, "note", heard)
    run = trained(tmp_path / "run", mode, sync__heartbeat=2.0, total_steps=20_000)
    told = [text for text in notes if text]
    assert len(told) == 1 and "learner 1" in told[0] and "takes its place" in told[0]
    assert ("no sign of life" in told[0]) == (number == signal.SIGSTOP)
    assert run.stop_reason == "total_steps" and run.metrics[-1]["step"] >= 20_000
    assert run.evaluation is not None


def test_bad_input(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be divided among 3 learners"):
        trained(tmp_path / "run", "sync", learners=3)
    with pytest.raises(ConfigError, match="use a launcher: torchrun --nproc-per-node 2"):
        trained(tmp_path / "run", "sync", sync__transport="allreduce")
    with pytest.raises(ConfigError, match="powersgd compresses whole matrices"):
        trained(tmp_path / "run", "sync", sync__codec="powersgd")
    assert not (tmp_path / "run").exists()
