"""Learners and servers that die or hang, on a real Ray."""

import asyncio
import errno
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from onray import Hit, disturbed, trained

import qfleet
from qfleet.config import override
from qfleet.runtime import checkpoint, cluster, servers
from qfleet.runtime.checkpoint import Checkpoints
from qfleet.runtime.cluster import Fleet
from qfleet.runtime.hub import Hub, Orders, Report
from qfleet.runtime.member import Place
from qfleet.runtime.servers import Servers
from qfleet.runtime.team import TeamError
from qfleet.types import State


@pytest.mark.parametrize(("mode", "number"), [("sync", signal.SIGKILL), ("async", signal.SIGSTOP)])
def test_a_learner_that_dies_or_hangs_is_replaced(
    ray: None, mode: str, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = disturbed(monkeypatch, [("learner", 1, number)])
    run = trained(tmp_path / "run", mode, sync__heartbeat=2.0, total_steps=20_000)
    assert len(told) == 1 and "learner 1" in told[0] and "takes its place" in told[0]
    assert ("no sign of life" in told[0]) == (number == signal.SIGSTOP)
    assert run.stop_reason == "total_steps" and run.metrics[-1]["step"] >= 20_000
    assert run.evaluation is not None


def test_a_learner_that_is_disconnected_is_replaced(ray: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hub closes the connection, as if it had broken on the way."""
    told, report, cut = disturbed(monkeypatch, []), Hub.report, list[Report]()

    async def broken(self: Hub, its: Report) -> Orders:
        if not cut and its.rank == 1 and its.steps > 500:
            cut.append(its)
            task = asyncio.current_task()
            assert task is not None
            task.cancel()
            await asyncio.sleep(0)
        return await report(self, its)

    monkeypatch.setattr(Hub, "report", broken)
    run = trained(tmp_path / "run", "sync", 6000)
    assert len(told) == 1 and "learner 1 was disconnected: a new one takes its place" in told[0]
    assert run.stop_reason == "total_steps" and run.metrics[-1]["step"] >= 6000


def starving(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray says of everybody who died that it was killed for want of memory. (It would choose whom to kill by itself.)"""
    import ray

    get = ray.get

    def got(*args: Any, **kwargs: Any) -> Any:
        try:
            return get(*args, **kwargs)
        except ray.exceptions.RayActorError:
            raise ray.exceptions.OutOfMemoryError(
                "The node is running low on memory.\nSee the documentation."
            ) from None

    monkeypatch.setattr(ray, "get", got)


def test_who_is_killed_for_memory_is_replaced(ray: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    starving(monkeypatch)
    told = disturbed(monkeypatch, [("server", 0, signal.SIGKILL), ("learner", 1, signal.SIGKILL)])
    run = trained(tmp_path / "run", "sync", 6000)
    for what in ("learner 1 was killed because its machine has no memory left: a new one takes its place",
                 "server 0 was killed because its machine has no memory left and was restarted"):  # fmt: skip
        assert any(what in text for text in told), told
    assert run.stop_reason == "total_steps" and run.metrics[-1]["step"] >= 6000


@pytest.mark.long
def test_a_learner_that_is_killed_for_memory_again_and_again_ends_the_run(
    ray: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    starving(monkeypatch)
    news, killed = Fleet._news, list[int]()

    def kill(self: Fleet, seconds: float) -> Any:
        learned = news(self, seconds)
        if self.steps > 500 and not self.over and self._incarnations[1] not in killed:
            pid = self._ray.get(self._learners[1].pid.remote())
            killed.append(self._incarnations[1])
            os.kill(pid, signal.SIGKILL)
        return learned

    monkeypatch.setattr(Fleet, "_news", kill)
    with pytest.raises(
        TeamError, match=r"learner 1 was killed 3 times .* \(The node is running low on memory\.\) Lower"
    ):
        trained(tmp_path / "run", "sync", 10**6)
    assert killed == [0, 1, 2]


@pytest.mark.parametrize(
    ("mode", "number"),
    [
        ("sync", signal.SIGKILL),
        pytest.param("diloco", signal.SIGSTOP, marks=pytest.mark.long),
        pytest.param("admm", signal.SIGKILL, marks=pytest.mark.long),
    ],
)
def test_all_reduce_goes_on_with_the_survivors(
    ray: None, mode: str, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = disturbed(monkeypatch, [("learner", 1, number)])
    settings = {"sync__transport": "allreduce", "sync__heartbeat": 2.0, "env__num_envs": 6}
    settings |= {} if mode == "sync" else {"sync__local_steps": 4}
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


@pytest.mark.long
def test_learners_that_cannot_form_a_group_end_the_run(
    ray: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They find each other at a port where nobody listens."""
    told = disturbed(monkeypatch, [])
    monkeypatch.setattr(cluster, "Place", lambda *args: Place(*args)._replace(store=("127.0.0.1", 1)))
    with pytest.raises(TeamError, match=r"could not form a group 3 times in a row \(learner \d: .*127\.0\.0\.1.*GLOO"):
        trained(tmp_path / "run", "sync", sync__transport="allreduce", sync__heartbeat=1.0)
    assert any("the group of learners broke (learner" in text for text in told)


@pytest.mark.parametrize(
    ("mode", "servers", "hits"),
    [
        ("sync", 1, ["server 0"]),
        ("sync", 2, ["server 1"]),
        ("diloco", 2, ["server 0", "server 1"]),
        pytest.param("ssp", 2, ["server 1", "learner 0"], marks=pytest.mark.long),
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


def test_parts_that_a_server_did_not_have_are_told() -> None:
    servers = object.__new__(Servers)  # as far as it keeps their states
    servers._snapshots, servers.notes = [{}, {"missing": [[0, 0, 1]]}], []
    servers._keep(0, {"missing": []})
    servers._keep(1, {"missing": [[0, 0, 1]]})
    assert not servers.notes
    servers._keep(1, {"missing": [[0, 0, 1], [0, 0, 7], [1, 0, 7]]})
    servers._keep(1, {"missing": [[0, 0, 1], [0, 0, 7], [1, 0, 7]]})
    assert servers.notes == ["server 1 did not have its part of 2 pushes: its parameters are without them"]


@pytest.mark.long
def test_a_server_that_hangs_is_restarted(ray: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = disturbed(monkeypatch, [("server", 0, signal.SIGSTOP)])
    run = trained(tmp_path / "run", "sync", sync__servers=2, sync__heartbeat=2.0, total_steps=4000)
    assert len(told) == 1 and "server 0 did not answer and was restarted" in told[0]
    assert run.stop_reason == "total_steps" and run.metrics[-1]["step"] >= 4000


@pytest.mark.long
def test_a_server_that_dies_before_the_learners_are_made(
    ray: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Fleet._run

    def killed(self: Fleet) -> None:
        os.kill(self._ray.get(self.servers.actors[0].pid.remote()), signal.SIGKILL)
        run(self)

    monkeypatch.setattr(Fleet, "_run", killed)
    assert trained(tmp_path / "run", "sync", sync__servers=2).stop_reason == "total_steps"


@pytest.mark.long
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


@pytest.mark.long
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


def test_a_learner_that_is_ahead_of_the_servers_joins_again(
    ray: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if the servers had been restored without a version that it has: nobody waits for it until then."""
    told, look_after = disturbed(monkeypatch, []), Servers.look_after

    def ahead(self: Servers, versions: Any) -> None:
        look_after(self, versions if told or not versions else {**versions, 0: 10**9})

    monkeypatch.setattr(Servers, "look_after", ahead)
    monkeypatch.setattr(servers, "SNAPSHOT", 0.2)
    run = trained(tmp_path / "run", "sync", total_steps=6000)
    assert run.stop_reason == "total_steps" and "learner 0 had a newer version" in told[0]
    state, _ = checkpoint.read((run.dir / "checkpoints/last").resolve())
    versions = {checkpoint.read((run.dir / f"learners/{r}/checkpoints/last").resolve())[0]["learner"]["updates"] for r in (0, 1)}  # fmt: skip
    assert versions == {state["cluster"]["servers"][0]["version"]}


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


@pytest.mark.long
def test_a_call_that_ray_gave_up_does_not_mean_that_the_server_is_lost(
    ray: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One repair is enough: nobody waits for that call any more."""
    news, repair, repairs, ended = Fleet._news, Servers.repair, list[int](), list[Any]()

    def end(self: Fleet, seconds: float) -> Any:
        learned = news(self, seconds)
        if self.steps > 500 and not ended:
            ended.append(self.servers.actors[0].pid.remote())
            self._ray.get(ended[0])
            self.servers._serving[0] = ended[0]
        return learned

    def counted(self: Servers) -> None:
        repairs.append(self._epoch)
        repair(self)

    monkeypatch.setattr(Fleet, "_news", end)
    monkeypatch.setattr(Servers, "repair", counted)
    run = trained(tmp_path / "run", "sync", sync__servers=2, total_steps=6000)
    assert run.stop_reason == "total_steps" and 1 <= len(repairs) < 10, repairs


def test_a_learner_that_cannot_reach_a_server_ends_the_run(
    ray: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As behind a firewall: others can. It connects anew after a repair, and cannot; its part is saved like those of the others."""
    told, news, where, walls = disturbed(monkeypatch, []), Fleet._news, Hub.where, list[str]()

    def wall(self: Fleet, seconds: float) -> Any:
        learned = news(self, seconds)
        if self.steps > 500 and not walls:
            walls.append("127.0.0.1")
            self.servers.repair()
        return learned

    async def behind(self: Hub, rank: int, epoch: int, *more: str) -> Any:
        newest, addresses = await where(self, rank, epoch, *more)
        return newest, [(wall, 1) for wall in walls] if rank == 1 and walls else addresses

    monkeypatch.setattr(Fleet, "_news", wall)
    monkeypatch.setattr(Hub, "where", behind)
    message = r"no server answers at 127\.0\.0\.1:1 \(Connection refused\)"
    with pytest.raises(TeamError, match=rf"learner 1 failed: Unreachable: {message}"):
        trained(tmp_path / "run", "sync", 10**6, sync__heartbeat=2.0)
    assert any("learner 1 cannot go on: no server answers at 127.0.0.1:1" in text for text in told)
    state, _ = checkpoint.read((tmp_path / "run/checkpoints/last").resolve())
    assert sorted(state["cluster"]["parts"]) == [0, 1]


def test_a_new_learner_that_has_not_learned_yet_has_no_part(
    ray: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run ends before it has steps enough to learn from; the resumed run begins with another one in its place."""
    with monkeypatch.context() as m:
        told = disturbed(m, [("learner", 1, signal.SIGKILL)], at=6000)
        part = trained(tmp_path / "run", "diloco", 8000, replay__min_steps=6000, sync__local_steps=4)
    assert "learner 1" in told[0]
    state, _ = checkpoint.read((part.dir / "checkpoints/last").resolve())
    assert state["cluster"]["parts"] in ([0], [0, 1])
    assert not (part.dir / "learners/1/checkpoints" / (part.dir / "checkpoints/last").resolve().name).exists()
    more = qfleet.train(resume=part.dir, total_steps=12_000, progress=False)
    assert more.stop_reason == "total_steps" and 12_000 <= more.metrics[-1]["step"] < 13_000


def test_a_learner_lost_during_a_checkpoint(ray: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is replaced before the others have saved their parts: nobody waits for a part of its successor, which joins later."""
    save, news, stopped = Fleet.save, Fleet._news, list[int]()

    def disturbed_save(self: Fleet, *args: Any, **kwargs: Any) -> None:
        if not stopped:
            stopped.append(self._ray.get(self._learners[0].pid.remote()))
            os.kill(self._ray.get(self._learners[1].pid.remote()), signal.SIGKILL)
            os.kill(stopped[0], signal.SIGSTOP)
        save(self, *args, **kwargs)

    def continued(self: Fleet, seconds: float) -> Any:
        if stopped and self._incarnations[1] == 1:
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


@pytest.mark.parametrize("mode", ["async", "window"])
def test_who_hangs_does_not_hold_up_the_others_at_a_checkpoint(
    ray: None, mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who has saved its part goes on; the checkpoint is complete when who hangs is given up, and the run goes on from it."""
    save, news, hung, reports = Fleet.save, Fleet._news, list[int](), list[int]()

    def disturbed_save(self: Fleet, *args: Any, **kwargs: Any) -> None:
        if not hung:
            hung.append(self._ray.get(self._learners[1].pid.remote()))
            os.kill(hung[0], signal.SIGSTOP)
        save(self, *args, **kwargs)

    def counted(self: Fleet, seconds: float) -> Any:
        learned = news(self, seconds)
        if hung and self._incarnations[1] == 0 and self._meeting.at_hub(lambda hub: 0 in hub._saved):
            reports.extend(rank for rank in self.reported if rank == 0)
        return learned

    with monkeypatch.context() as m:
        m.setattr(Fleet, "save", disturbed_save)
        m.setattr(Fleet, "_news", counted)
        run = trained(tmp_path / "run", mode, 20_000, runtime__checkpoint_every=5000, sync__heartbeat=2.0)
    assert hung and run.stop_reason == "total_steps"
    assert len(reports) > 10, reports  # rounds between its own part and the end of who hung
    state, _ = checkpoint.read((run.dir / "checkpoints/last").resolve())
    assert state["cluster"]["incarnations"] == [0, 1]
    more = qfleet.train(resume=run.dir, total_steps=22_000, progress=False)
    assert more.stop_reason == "total_steps" and more.metrics[-1]["step"] >= 22_000


def test_a_part_that_cannot_be_loaded_leaves_the_checkpoint_as_it_is(ray: None, tmp_path: Path) -> None:
    run = trained(tmp_path / "run", "sync")
    (rows,) = (run.dir / "learners/1/checkpoints/replay").iterdir()
    whole = rows.read_bytes()
    rows.write_bytes(whole[:-10])
    before = sorted(run.dir.glob("**/checkpoints/**/*"))
    with pytest.raises(TeamError, match=r"learner 1 failed: CheckpointError: .*damaged") as failed:
        qfleet.train(resume=run.dir, total_steps=6000, progress=False)
    folder = (run.dir / "checkpoints/last").resolve()
    assert failed.value.__notes__ == [f"The last good checkpoint is {run.dir / 'checkpoints' / folder.name}."]
    assert sorted(run.dir.glob("**/checkpoints/**/*")) == before
    rows.write_bytes(whole)
    more = qfleet.train(resume=run.dir, total_steps=6000, progress=False)
    assert more.stop_reason == "total_steps"
    state, _ = checkpoint.read((run.dir / "checkpoints/last").resolve())
    assert state["cluster"]["incarnations"] == [0, 0]


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("mode", "every"), [("sync", 1000), ("sync", 0), ("async", 1000)])
def test_a_checkpoint_that_cannot_be_written_is_not_taken_for_one(
    ray: None, mode: str, every: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk fails once, in the middle of the run or at its end. Whoever waits for the rest of that checkpoint is not waited for."""
    write, failures = Checkpoints.save_state, list[int]()

    def failing(self: Checkpoints, step: int, state: State) -> None:
        failures.append(step)
        if len(failures) == 1:
            raise OSError(errno.EIO, "Input/output error")
        write(self, step, state)

    monkeypatch.setattr(Checkpoints, "save_state", failing)
    with pytest.raises(OSError, match="Input/output error") as failed:
        trained(tmp_path / "run", mode, runtime__checkpoint_every=every)
    (note,) = failed.value.__notes__
    assert note == "Saving failed: the one before could not be completed. There is no checkpoint yet."
    assert len(failures) == 1
