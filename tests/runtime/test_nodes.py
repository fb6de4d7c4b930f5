"""Machines that leave a Ray cluster and join it while a run goes on: nodes of one CPU each, so every learner and server has its own."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import qfleet
from qfleet.runtime import checkpoint, cluster
from qfleet.runtime.cluster import Fleet


@pytest.fixture
def nodes() -> Iterator[Any]:
    os.environ["OMP_NUM_THREADS"] = "1"
    from ray.cluster_utils import Cluster

    soon = {"health_check_initial_delay_ms": 0, "health_check_period_ms": 500, "health_check_failure_threshold": 3}
    made = Cluster(True, head_node_args={"num_cpus": 1, "include_dashboard": False, "_system_config": soon})
    made.add_node(num_cpus=1)
    yield made
    made.shutdown()


def trained(address: str, folder: Path, transport: str) -> qfleet.Run:
    settings = {
        "env.num_envs": 4, "network.hidden": (32, 32), "replay.min_steps": 200, "learner.batch_size": 16, "replay.samples_per_step": 8.0,
        "runtime.eval_every": 0, "runtime.eval_episodes": 2, "runtime.log_every": 500, "learners": 2, "sync.transport": transport, "address": address,
    }  # fmt: skip
    return qfleet.train("CartPole-v1", recipe="dqn", seed=3, total_steps=10**9, run_dir=folder, device="cpu", overrides=settings, progress=False)  # fmt: skip


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def elsewhere(fleet: Fleet, nodes: Any) -> Any:
    """A node that holds a learner, but not this process."""
    learners = [parent(fleet._ray.get(learner.pid.remote())) for learner in fleet._learners]
    for node in nodes.worker_nodes:
        if node.all_processes["raylet"][0].process.pid in learners:
            return node
    raise AssertionError("all learners are on the first node")


@pytest.mark.parametrize(("transport", "back"), [("allreduce", False), ("server", True)])
def test_a_machine_leaves(nodes: Any, transport: str, back: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    """The other learner goes on alone, and the run can end so. With another machine, a new learner joins there."""
    if transport == "server":
        nodes.add_node(num_cpus=1)
    monkeypatch.setattr(cluster, "ROOM", 3.0)
    news, note, told = Fleet._news, Fleet.note, list[str]()
    todo: list[Callable[[Fleet], object]] = [lambda fleet: nodes.remove_node(elsewhere(fleet, nodes), allow_graceful=False)]  # fmt: skip

    def disturb(self: Fleet, seconds: float) -> Any:
        learned = news(self, seconds)
        if todo and self.steps > 1000:
            todo.pop()(self)
        elif back and self._absent and len(nodes.worker_nodes) < 1 + (transport == "server"):
            nodes.add_node(num_cpus=1)
        return learned

    def heard(self: Fleet) -> str:
        text = note(self)
        told.extend([text] if text else [])
        if ("has joined" if back else "no room for learner") in text:
            self.team.stop()
        return text

    monkeypatch.setattr(Fleet, "_news", disturb)
    monkeypatch.setattr(Fleet, "note", heard)
    run = trained(nodes.address, tmp_path / "run", transport)
    assert not todo and "takes its place" in told[0] and any("no room for learner" in text for text in told)
    assert any("has joined" in text for text in told) == back
    state, _ = checkpoint.read((run.dir / "checkpoints/last").resolve())
    assert min(state["cluster"]["incarnations"]) == 0  # the other learner was there all the time
    done = [row["train/n_updates"] for row in run.metrics if row["step"] > 2000 and "train/n_updates" in row]
    assert done[-1] > done[0]  # learning went on
