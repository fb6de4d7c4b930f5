"""Machines that leave a Ray cluster and join it while a run goes on: nodes of one CPU each, so every learner and server has its own."""

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import qfleet
from qfleet.runtime import checkpoint, servers
from qfleet.runtime.cluster import Fleet
from qfleet.runtime.progress import Progress
from qfleet.runtime.resources import FAIR


@pytest.fixture
def nodes() -> Iterator[Any]:
    os.environ["OMP_NUM_THREADS"] = "1"
    from ray.cluster_utils import Cluster

    soon = {"health_check_initial_delay_ms": 0, "health_check_period_ms": 500, "health_check_failure_threshold": 8}
    settings = {"num_cpus": 1, "include_dashboard": False, "_system_config": FAIR | soon}
    made = Cluster(True, head_node_args=settings)
    made.add_node(num_cpus=1)
    yield made
    made.shutdown()


def trained(address: str, folder: Path, transport: str, steps: int = 10**9) -> qfleet.Run:
    settings = {
        "env.num_envs": 4, "network.hidden": (32, 32), "replay.min_steps": 200, "learner.batch_size": 16, "replay.samples_per_step": 8.0,
        "runtime.eval_every": 0, "runtime.eval_episodes": 2, "runtime.log_every": 500, "learners": 2, "sync.transport": transport, "address": address,
    }  # fmt: skip
    return qfleet.train("CartPole-v1", recipe="dqn", seed=3, total_steps=steps, run_dir=folder, device="cpu", overrides=settings, progress=False)  # fmt: skip


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def elsewhere(fleet: Fleet, nodes: Any) -> Any:
    """A node that holds a learner, but not this process."""
    learners = [parent(fleet._ray.get(learner.pid.remote())) for learner in fleet._learners]
    for node in nodes.worker_nodes:
        if node.all_processes["raylet"][0].process.pid in learners:
            return node
    raise AssertionError("all learners are on the first node")


@pytest.mark.parametrize(
    ("transport", "back"), [("allreduce", False), pytest.param("server", True, marks=pytest.mark.long)]
)
def test_a_machine_leaves(nodes: Any, transport: str, back: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    """The other learner goes on alone, and the run can end so. With another machine, a new learner joins there."""
    if transport == "server":
        nodes.add_node(num_cpus=1)
    monkeypatch.setattr(servers, "ROOM", 3.0)
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
        if ("has joined" if back else "did not start within") in text:
            self.team.stop()
        return text

    monkeypatch.setattr(Fleet, "_news", disturb)
    monkeypatch.setattr(Fleet, "note", heard)
    run = trained(nodes.address, tmp_path / "run", transport)
    assert not todo and "takes its place" in told[0] and any("did not start within" in text for text in told)
    assert any("has joined" in text for text in told) == back
    state, _ = checkpoint.read((run.dir / "checkpoints/last").resolve())
    assert min(state["cluster"]["incarnations"]) == 0  # the other learner was there all the time
    done = [row["train/n_updates"] for row in run.metrics if row["step"] > 2000 and "train/n_updates" in row]
    assert done[-1] > done[0]  # learning went on


def leave_when(who: str, others: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The others give back what they take when the run says that it waits for learners, or servers: one, or on a slow machine several."""
    import ray

    message = Progress.message

    def listen(self: Progress, text: str) -> None:
        message(self, text)
        if f"of the {who} did not start within" in text and text.endswith("; all wait"):
            while others:
                ray.kill(others.pop())

    monkeypatch.setattr(Progress, "message", listen)


@pytest.fixture
def other(nodes: Any) -> Iterator[Any]:
    """Makes somebody else who takes a CPU, of three."""
    import ray

    class Other:
        def there(self) -> bool:
            return True

    nodes.add_node(num_cpus=1)
    ray.init(address=nodes.address, log_to_driver=False)
    yield ray.remote(num_cpus=1)(Other).remote
    ray.shutdown()


@pytest.mark.parametrize(("taken", "who"), [(1, "learners"), pytest.param(3, "servers", marks=pytest.mark.long)])  # fmt: skip
def test_a_full_cluster(nodes: Any, other: Any, taken: int, who: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    """Somebody else uses it: the run says what it waits for, and begins when it can."""
    import ray

    monkeypatch.setattr(servers, "ROOM", 3.0)
    others = [other() for _ in range(taken)]
    assert all(ray.get([each.there.remote() for each in others]))
    leave_when(who, others, monkeypatch)
    run = trained(nodes.address, tmp_path / "run", "server", 1000)
    assert not others
    assert run.metrics[-1]["step"] >= 1000


@pytest.mark.long
def test_a_server_without_room(nodes: Any, other: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody else gets the room of one that died."""
    import ray

    monkeypatch.setattr(servers, "ROOM", 3.0)
    news, todo, others = Fleet._news, [1000], list[Any]()

    def disturb(self: Fleet, seconds: float) -> Any:
        if todo and self.steps > todo[0] and self.servers is not None:
            todo.pop()
            os.kill(ray.get(self.servers.actors[0].pid.remote()), signal.SIGKILL)
            others.append(other())
            assert ray.get(others[0].there.remote())
        return news(self, seconds)

    monkeypatch.setattr(Fleet, "_news", disturb)
    leave_when("servers", others, monkeypatch)
    run = trained(nodes.address, tmp_path / "run", "server", 5000)
    assert not todo and not others
    assert run.metrics[-1]["step"] >= 5000
