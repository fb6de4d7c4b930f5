"""Learners and servers on a real, local Ray."""

import asyncio
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import qfleet
from qfleet.config import Config, ConfigError, override
from qfleet.runtime import checkpoint
from qfleet.runtime.cluster import Fleet, check
from qfleet.runtime.hub import Hub, identity
from qfleet.runtime.servers import Servers
from qfleet.runtime.team import TeamError
from qfleet.runtime.train import Trainer

SETTINGS: dict[str, Any] = {
    "env.num_envs": 4, "network.hidden": (32, 32), "replay.min_steps": 200, "learner.batch_size": 16, "replay.samples_per_step": 8.0,
    "runtime.eval_every": 0, "runtime.eval_episodes": 2, "runtime.log_every": 500, "learners": 2,
}  # fmt: skip


@pytest.fixture(scope="module")
def ray() -> Iterator[None]:
    """A cluster of two nodes, on this machine: every run joins it."""
    os.environ["OMP_NUM_THREADS"] = "1"
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 4, "include_dashboard": False})
    cluster.add_node(num_cpus=4, include_dashboard=False)
    SETTINGS["address"] = cluster.address
    yield
    del SETTINGS["address"]
    cluster.shutdown()


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


@pytest.mark.parametrize(("mode", "schedule"), [("ssp", "streams"), ("diloco", "auto")])
def test_modes_train(ray: None, mode: str, schedule: str, tmp_path: Path) -> None:
    run = trained(tmp_path / "run", mode, sync__local_steps=4, runtime__schedule=schedule, runtime__lag=1)
    rows = [row for row in run.metrics if "train/loss" in row]
    assert rows[-1]["step"] >= 3000 and rows[-1]["train/loss"] < 100
    # Eight samples a step in batches of sixteen: what one learner does in an update, each of the two does.
    assert rows[-1]["train/n_updates"] == pytest.approx(2800 * 8 / 32, rel=0.15)
    assert run.evaluation is not None and run.stop_reason == "total_steps"
    both = rows[-1]["learner_0/samples_per_second"] + rows[-1]["learner_1/samples_per_second"]
    assert both == pytest.approx(rows[-1]["sync/samples_per_second"], rel=0.5)
    assert rows[-1]["sync/compression"] == pytest.approx(1.0, abs=0.1) and 0 <= rows[-1]["sync/wait"] < 1
    assert sum(value for name, value in rows[-1].items() if name.startswith("sync/stale_")) == pytest.approx(1.0)


def test_sync_is_the_same_with_any_number_of_servers(ray: None, tmp_path: Path) -> None:
    def numbers(run: qfleet.Run) -> list[Any]:
        return [(row["step"], row.get("eval/mean_reward")) for row in run.metrics if "eval/mean_reward" in row]

    runs = [trained(tmp_path / f"{i}", "sync", sync__servers=servers) for i, servers in enumerate((1, 2))]
    weights = [checkpoint.read((run.dir / "checkpoints/best").resolve())[0]["learner"]["model"] for run in runs]
    for other in weights[1:]:
        assert all((other[name] == value).all() for name, value in weights[0].items())
    assert numbers(runs[0]) == numbers(runs[1])


@pytest.mark.parametrize(
    ("mode", "codec", "transport"),
    [("sync", "int8", "server"), ("diloco", "fp32", "server"), ("sync", "powersgd", "allreduce")],
)
def test_resumed_it_goes_on_exactly(
    ray: None, mode: str, codec: str, transport: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped by a signal soon after the first checkpoint: two checkpoints of everybody's parts."""
    settings = {"sync__servers": 2, "sync__codec": codec, "sync__local_steps": 4, "sync__transport": transport}
    whole = trained(tmp_path / "whole", mode, **settings)
    save = Trainer._save

    def interrupted(self: Trainer, stuck: bool = False) -> None:
        save(self, stuck)
        self.signal = signal.SIGTERM

    with monkeypatch.context() as m:
        m.setattr(Trainer, "_save", interrupted)
        part = trained(tmp_path / "part", mode, **settings, runtime__checkpoint_every=1000)
    assert part.stop_reason == "signal" and len(list((part.dir / "checkpoints").glob("step_*"))) == 2
    resumed = qfleet.train(resume=part.dir, progress=False)
    states = [checkpoint.read((run.dir / "checkpoints/last").resolve())[0] for run in (whole, resumed)]
    weights = [state["learner"]["model"] for state in states]
    assert all((weights[0][name] == weights[1][name]).all() for name in weights[0])
    assert states[0]["step"] == states[1]["step"] and states[0]["cluster"]["hub"] == states[1]["cluster"]["hub"]


def test_a_learner_without_its_part_begins_anew(ray: None, tmp_path: Path) -> None:
    run = trained(tmp_path / "run", "async", total_steps=2000)
    shutil.rmtree(next((tmp_path / "run/learners/1/checkpoints").glob("step_*")))
    more = qfleet.train(resume=run.dir, total_steps=4000, progress=False)
    assert more.stop_reason == "total_steps" and more.metrics[-1]["step"] >= 4000
    state, _ = checkpoint.read((run.dir / "checkpoints/last").resolve())
    assert state["cluster"]["incarnations"] == [0, 1]


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


@pytest.mark.parametrize(
    ("mode", "number"), [("sync", signal.SIGKILL), ("async", signal.SIGSTOP), ("ssp", signal.SIGKILL)]
)
def test_a_learner_that_dies_or_hangs_is_replaced(
    ray: None, mode: str, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = disturbed(monkeypatch, [("learner", 1, number)])
    run = trained(tmp_path / "run", mode, sync__heartbeat=2.0, total_steps=20_000)
    assert len(told) == 1 and "learner 1" in told[0] and "takes its place" in told[0]
    assert ("no sign of life" in told[0]) == (number == signal.SIGSTOP)
    assert run.stop_reason == "total_steps" and run.metrics[-1]["step"] >= 20_000
    assert run.evaluation is not None


@pytest.mark.parametrize(
    ("mode", "number"), [("sync", signal.SIGKILL), ("diloco", signal.SIGSTOP), ("admm", signal.SIGKILL)]
)
def test_all_reduce_goes_on_with_the_survivors(
    ray: None, mode: str, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = disturbed(monkeypatch, [("learner", 1, number)])
    settings = {"sync__transport": "allreduce", "sync__heartbeat": 2.0, "sync__local_steps": 4, "env__num_envs": 6}
    run = trained(tmp_path / "run", mode, **settings, learners=3, total_steps=12_000)
    assert len(told) == 1 and "learner 1" in told[0] and "takes its place" in told[0]
    assert run.stop_reason == "total_steps" and run.metrics[-1]["step"] >= 12_000
    # No update is missing, and all have the same centre, or parameters.
    folder = (run.dir / "checkpoints/last").resolve().name
    parts = [
        checkpoint.read(run.dir / f"learners/{rank}/checkpoints/{folder}")[0]["learner"]
        for rank in range(3)
        if (run.dir / f"learners/{rank}/checkpoints/{folder}").exists()
    ]
    parts = [part for part in parts if part["updates"]]  # the new one may not have come to its first update
    assert len(parts) >= 2 and parts[0]["updates"] == pytest.approx((12_000 - 200) * 8 / (16 * 3), rel=0.02)
    kind = "model" if mode == "sync" else "target"
    for part in parts[1:]:
        assert part["updates"] == parts[0]["updates"]
        assert all((part[kind][name] == value).all() for name, value in parts[0][kind].items())


@pytest.mark.parametrize(
    ("mode", "servers", "hits"),
    [
        ("sync", 1, ["server 0"]),
        ("async", 2, ["server 0"]),
        ("sync", 2, ["server 1"]),
        ("diloco", 2, ["server 0", "server 1"]),
        ("ssp", 2, ["server 1", "learner 0"]),
    ],
)
def test_a_server_that_dies_is_restarted(
    ray: None, mode: str, servers: int, hits: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    victims: list[Hit] = [(hit.split()[0], int(hit.split()[1]), signal.SIGKILL) for hit in hits]
    told = disturbed(monkeypatch, victims)
    run = trained(tmp_path / "run", mode, sync__servers=servers, total_steps=6000)
    assert len(told) == len(hits)
    for hit in hits:
        text = next(text for text in told if hit in text)
        assert ("was restarted: its parameters are those of version" in text) == hit.startswith("server")
    assert run.stop_reason == "total_steps" and run.metrics[-1]["step"] >= 6000
    # The servers agree on the version, and on what is in it.
    state, _ = checkpoint.read((run.dir / "checkpoints/last").resolve())
    first, *others = state["cluster"]["servers"]
    assert all((s["version"], s["applied"]) == (first["version"], first["applied"]) for s in others)


def test_a_server_that_hangs_is_restarted(ray: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = disturbed(monkeypatch, [("server", 0, signal.SIGSTOP)])
    run = trained(tmp_path / "run", "sync", sync__servers=2, sync__heartbeat=2.0, total_steps=4000)
    assert len(told) == 1 and "server 0 ended and was restarted" in told[0]
    assert run.stop_reason == "total_steps" and run.metrics[-1]["step"] >= 4000


def test_a_server_that_dies_before_the_learners_are_made(
    ray: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Fleet._run

    def killed(self: Fleet) -> None:
        os.kill(self._ray.get(self.servers.actors[0].pid.remote()), signal.SIGKILL)
        run(self)

    monkeypatch.setattr(Fleet, "_run", killed)
    assert trained(tmp_path / "run", "sync", sync__servers=2).stop_reason == "total_steps"


def test_a_server_that_hangs_during_a_checkpoint(ray: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    states, hung = Servers.states, list[int]()

    def stopped(self: Servers) -> Any:
        if not hung:
            hung.append(self._ray.get(self.actors[1].pid.remote()))
            os.kill(hung[0], signal.SIGSTOP)
        return states(self)

    monkeypatch.setattr(Servers, "states", stopped)
    run = trained(tmp_path / "run", "sync", sync__servers=2, sync__heartbeat=2.0, runtime__checkpoint_every=1000)
    assert hung and run.stop_reason == "total_steps"


def test_a_second_server_dies_while_the_first_is_repaired(
    ray: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told, members, killed = disturbed(monkeypatch, [("server", 1, signal.SIGKILL)]), Fleet._members, list[int]()

    def kill(self: Fleet) -> Any:
        if not killed:
            killed.append(self._ray.get(self.servers.actors[0].pid.remote()))
            os.kill(killed[0], signal.SIGKILL)
        return members(self)

    monkeypatch.setattr(Fleet, "_members", kill)
    run = trained(tmp_path / "run", "sync", sync__servers=2, total_steps=6000)
    assert killed and run.stop_reason == "total_steps" and run.metrics[-1]["step"] >= 6000
    assert {word for text in told for word in ("server 0", "server 1") if word in text} == {"server 0", "server 1"}
    state, _ = checkpoint.read((run.dir / "checkpoints/last").resolve())
    first, other = state["cluster"]["servers"]
    assert first["version"] == other["version"] > 500  # nobody began from nothing


def test_a_repair_of_servers_that_are_well_loses_nothing(
    ray: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a connection that broke: what the first server was about to tell the other one is lost with it."""
    news, repairs = Fleet._news, list(range(20))

    def repaired(self: Fleet, seconds: float) -> Any:
        learned = news(self, seconds)
        if self.steps > 500 and repairs:
            repairs.pop()
            self.servers.repair()
        return learned

    monkeypatch.setattr(Fleet, "_news", repaired)
    run = trained(tmp_path / "run", "async", sync__servers=2, total_steps=6000)
    assert not repairs and run.stop_reason == "total_steps"
    state, _ = checkpoint.read((run.dir / "checkpoints/last").resolve())
    first, other = state["cluster"]["servers"]
    assert (first["version"], first["applied"]) == (other["version"], other["applied"])


@pytest.mark.parametrize("mode", ["sync", "diloco"])
def test_a_new_learner_that_has_not_learned_yet_has_no_part(
    ray: None, mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run ends before it has steps enough to learn from; the resumed run begins with another one in its place."""
    with monkeypatch.context() as m:
        told = disturbed(m, [("learner", 1, signal.SIGKILL)], at=6000)
        part = trained(tmp_path / "run", mode, 8000, replay__min_steps=6000, sync__local_steps=4)
    assert "learner 1" in told[0]
    state, _ = checkpoint.read((part.dir / "checkpoints/last").resolve())
    assert state["cluster"]["parts"] in ([0], [0, 1])
    assert not (part.dir / "learners/1/checkpoints" / (part.dir / "checkpoints/last").resolve().name).exists()
    more = qfleet.train(resume=part.dir, total_steps=12_000, progress=False)
    assert more.stop_reason == "total_steps" and 12_000 <= more.metrics[-1]["step"] < 13_000


def test_a_learner_lost_during_a_checkpoint(ray: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its successor is there before the others have saved their parts: nobody waits for a part of it."""
    save, news, stopped = Fleet.save, Fleet._news, list[int]()

    def disturbed_save(self: Fleet, *args: Any, **kwargs: Any) -> None:
        if not stopped:
            stopped.append(self._ray.get(self._learners[0].pid.remote()))
            os.kill(self._ray.get(self._learners[1].pid.remote()), signal.SIGKILL)
            os.kill(stopped[0], signal.SIGSTOP)
        save(self, *args, **kwargs)

    def continued(self: Fleet, seconds: float) -> Any:
        if stopped and self._meeting.at_hub(lambda hub: hub.live.get(1)) == 1:
            os.kill(stopped[0], signal.SIGCONT)
        return news(self, seconds)

    monkeypatch.setattr(Fleet, "save", disturbed_save)
    monkeypatch.setattr(Fleet, "_news", continued)
    run = trained(tmp_path / "run", "sync", 6000, runtime__checkpoint_every=2000, sync__heartbeat=60.0)
    assert stopped and run.stop_reason == "total_steps"


def test_a_learner_that_cannot_be_made_again_ends_the_run(
    ray: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    new = Fleet._new_learner

    def elsewhere(self: Fleet, rank: int, late: bool = False, resume: int = 0) -> None:
        if late:  # on a machine that does not share the file system
            self._theirs = override(self._theirs, {"run_dir": str(tmp_path / "nowhere")})
        new(self, rank, late, resume)

    monkeypatch.setattr(Fleet, "_new_learner", elsewhere)
    disturbed(monkeypatch, [("learner", 1, signal.SIGKILL)])
    with pytest.raises(TeamError, match=r"learner 1 could not be made: .*does not see the run directory"):
        trained(tmp_path / "run", "sync", 10**6)


def test_who_joins_takes_no_part_in_checkpoints_that_were_asked_for_before() -> None:
    async def check() -> None:
        config = Config()
        hub = Hub(config)
        await hub.join(0, 0, identity(config))
        await hub.join(1, 0, identity(config))
        asked = hub.save(500, final=False)
        assert asked == {0: 0, 1: 0} and hub.parts(500, asked) == ([], [0, 1])
        hub.leave(1)
        assert await hub.join(1, 1, identity(config)) == (0, 500)
        assert hub.parts(500, asked) == ([], [0])
        saving = asyncio.create_task(hub.saved(0, 500))
        await asyncio.sleep(0)
        assert hub.parts(500, asked) == ([0], [])
        hub.complete(500)
        await saving

    asyncio.run(check())


def test_bad_input(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be divided among 3 learners"):
        trained(tmp_path / "run", "sync", learners=3)
    with pytest.raises(ConfigError, match=r"sync\.balance on Ray needs servers"):
        trained(tmp_path / "run", "sync", sync__transport="allreduce", sync__balance=True)
    with pytest.raises(ConfigError, match="powersgd compresses whole matrices"):
        trained(tmp_path / "run", "sync", sync__codec="powersgd")
    with pytest.raises(ConfigError, match=r"sync\.servers is 200, but the 1,\d+ parameters .* into \d+ parts at most"):
        trained(tmp_path / "run", "sync", sync__servers=200)
    with pytest.raises(ConfigError, match=r"sync\.weights has 3 numbers, but there are 2 learners"):
        trained(tmp_path / "run", "sync", sync__weights=(1.0, 2.0, 3.0))
    with pytest.raises(ConfigError, match="updates are recorded for one size"):
        trained(tmp_path / "run", "sync", sync__balance=True, runtime__schedule="streams", runtime__lag=1)
    with pytest.raises(ConfigError, match="Ray gives every learner its GPU"):
        check(override(Config(), {"learners": 2, "device": "cuda:1"}))
    assert not (tmp_path / "run").exists()


def test_a_cluster_that_is_not_there_or_too_small(ray: None, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"take a CPU each \(11\), but the Ray cluster has 8"):
        trained(tmp_path / "run", "sync", learners=2, sync__servers=9)
    for address, what in (
        ("127.0.0.1:1", "no Ray cluster at '127.0.0.1:1' .Connection refused"),
        ("there", "HOST:PORT"),
    ):
        with pytest.raises(ConfigError, match=what):
            trained(tmp_path / "run", "sync", address=address)
    with pytest.raises(ConfigError, match="device is 'cuda', but the Ray cluster has no GPU"):
        trained(tmp_path / "run", "sync", device="cuda")
    assert not (tmp_path / "run").exists()


def test_a_learner_of_another_version_cannot_join() -> None:
    config = Config()

    async def join(identity: list[str]) -> tuple[int, int]:
        return await Hub(config).join(0, 0, identity)

    version, digest = identity(config)
    assert asyncio.run(join([version, digest])) == (0, 0)
    with pytest.raises(
        ValueError, match=f"learner 0 has qfleet 0.0.1, this run {version}: .* Install the same version"
    ):
        asyncio.run(join(["0.0.1", digest]))
    with pytest.raises(ValueError, match="learner 0 has config other"):
        asyncio.run(join([version, "other"]))
