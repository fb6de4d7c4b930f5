"""What the supervisor of learners on Ray does about old or exploded parameters, missing parts of a checkpoint, and learners that are lost while they are made."""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from onray import trained
from ray import exceptions

import qfleet
from qfleet.config import Config, override
from qfleet.runtime import checkpoint
from qfleet.runtime.cluster import Fleet, Saving
from qfleet.runtime.failing import TrainingError
from qfleet.runtime.progress import Progress
from qfleet.runtime.team import TeamError
from qfleet.sync.shard import Copy, Position


def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """-> what the run says, from now on."""
    texts, message = list[str](), Progress.message

    def heard(self: Progress, text: str) -> None:
        texts.append(text)
        message(self, text)

    monkeypatch.setattr(Progress, "message", heard)
    return texts


# --- old parameters ------------------------------------------------------------------------------------------------------


class Slow:
    """Of Ray, as much as parameters by all-reduce need: calls that are answered when `ready` says so."""

    exceptions = exceptions

    def __init__(self, ready: Callable[[str], bool]) -> None:
        self._ready = ready

    def wait(self, refs: list[str], num_returns: int = 1, timeout: float = 0.0) -> tuple[list[str], list[str]]:
        done = [ref for ref in refs if self._ready(ref)]
        return done, [ref for ref in refs if ref not in done]

    def get(self, ref: str, timeout: float | None = None) -> Any:
        if not self._ready(ref):
            raise exceptions.GetTimeoutError
        return 7 if ref == "version" else copy_of(7)


def copy_of(version: int) -> Copy:
    params = np.full(4, version, np.float32)
    return Copy(Position(version, 0, 0.0, {}), params, params)


def fleet_of_one(ready: Callable[[str], bool], heartbeat: float) -> tuple[Fleet, list[int]]:
    """-> it, with parameters of before the first update; and how often its learner was looked after."""
    fleet, looked, hub = object.__new__(Fleet), list[int](), SimpleNamespace(live={0: 0}, parts=lambda *of: ([0], []))
    fleet._ray, fleet._newest, fleet._versions, fleet.servers, fleet._notes = Slow(ready), copy_of(0), {0: 6}, None, []
    fleet._learners = [SimpleNamespace(**{n: SimpleNamespace(remote=lambda n=n: n) for n in ("version", "copy")})]
    fleet.config = override(Config(), {"sync.heartbeat": heartbeat})
    fleet._meeting, fleet.flat = SimpleNamespace(at_hub=lambda what: what(hub)), SimpleNamespace(data=torch.zeros(4))  # type: ignore[assignment]
    fleet._look_after = lambda: looked.append(0)  # type: ignore[method-assign]
    fleet.steps, fleet.failure = 100, None
    return fleet, looked


@pytest.mark.parametrize("late", ["version", "copy"])
def test_parameters_of_a_learner_that_answers_late_are_waited_for(late: str) -> None:
    """It waits in an update for another one; meanwhile both are looked after."""
    fleet, looked = fleet_of_one(lambda call: call != late or len(looked) > 3, heartbeat=60.0)
    with fleet.lend() as flat:
        assert (flat.data == 7.0).all()
    assert len(looked) == 4 and not fleet.note()


def test_old_parameters_are_told_and_not_saved(tmp_path: Path) -> None:
    fleet, _ = fleet_of_one(lambda call: call == "version", heartbeat=1e-3)
    with fleet.lend() as flat:
        assert (flat.data == 0.0).all()
    old = "no learner gave its newest parameters within 0.002 s: those after 0 updates are older than theirs"
    assert fleet.note() == f"step 100: {old}"
    checkpoints = checkpoint.Checkpoints(tmp_path, 2)
    fleet._any_part = lambda *of: True  # type: ignore[method-assign]
    fleet._saving = Saving(100, {0: 0}, checkpoints, {})
    with pytest.raises(TeamError, match=rf"checkpoint at step 100 could not be completed: {old}.* raise --sync.heart"):
        fleet._complete()
    assert not checkpoints.dir.exists()


@pytest.mark.timeout(100)
def test_a_resumed_run_by_all_reduce_evaluates_what_it_has_learned(
    ray: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also before learners have loaded their parts."""
    run = trained(tmp_path / "run", "sync", 1500, sync__transport="allreduce")
    model = checkpoint.read((run.dir / "checkpoints/last").resolve())[0]["learner"]["model"]
    load, found = Fleet.load, list[bool]()

    def loaded(self: Fleet, *args: Any) -> Any:
        state = load(self, *args)
        with self.lend():
            found.append(all((self._net.state_dict()[name].numpy() == value).all() for name, value in model.items()))
        return state

    monkeypatch.setattr(Fleet, "load", loaded)
    monkeypatch.setattr(Fleet, "_run", lambda self: None)  # they have only just been asked for
    monkeypatch.setattr(Fleet, "round", lambda self: self.team.stop())
    monkeypatch.setattr(Fleet, "save", lambda self, *args: None)
    qfleet.train(resume=run.dir, total_steps=3000, progress=False)
    assert found == [True]


# --- exploded parameters ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("mode", "transport"), [("sync", "allreduce"), ("async", "server")])
def test_parameters_that_explode_before_a_checkpoint_is_complete_are_not_saved(
    ray: None, mode: str, transport: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one before stays as it is, with all that belongs to it."""
    complete, pull, completing = Fleet._complete, Fleet._pull, list[int]()

    def completed(self: Fleet) -> None:
        assert self._saving is not None
        completing.append(self._saving.step)
        complete(self)

    def pulled(self: Fleet) -> str:
        old = pull(self)
        if len(completing) == 2:
            self.flat.data.fill_(torch.nan)
        return old

    with monkeypatch.context() as m:
        m.setattr(Fleet, "_complete", completed)
        m.setattr(Fleet, "_pull", pulled)
        with pytest.raises(TrainingError, match="the loss exploded") as failed:
            trained(tmp_path / "run", mode, 10**6, sync__transport=transport, runtime__checkpoint_every=1000)
    (folder,) = (tmp_path / "run/checkpoints").glob("step_*")
    assert folder.name == f"step_{completing[0]:09d}" and f"The last good checkpoint is {folder}." in str(failed.value)
    run = qfleet.train(resume=tmp_path / "run", total_steps=completing[1] + 1000, progress=False)
    assert run.stop_reason == "total_steps"
    assert checkpoint.read((run.dir / "checkpoints/last").resolve())[0]["cluster"]["incarnations"] == [0, 0]


# --- checkpoints without parts ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("every", [1000, 0])
def test_a_checkpoint_without_parts_does_not_take_the_place_of_one_that_has_them(
    ray: None, every: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All learners are lost when the last one has been asked for. Where there is none before, parameters alone are better than nothing."""
    texts, save = said(monkeypatch), Fleet.save

    def lost(self: Fleet, *args: Any, **kwargs: Any) -> None:
        if self.over:
            for learner in self._learners:
                self._ray.kill(learner)
        save(self, *args, **kwargs)

    with monkeypatch.context() as m:
        m.setattr(Fleet, "save", lost)
        run = trained(tmp_path / "run", "sync", 3000, runtime__checkpoint_every=every)
    assert run.stop_reason == "total_steps"
    folder = (run.dir / "checkpoints/last").resolve()
    state, _ = checkpoint.read(folder)
    about = [text for text in texts if "no learner is left that saved its part" in text]
    if not every:
        assert state["step"] >= 3000 and not about and not state["cluster"]["parts"]
        return
    assert state["step"] < 3000 and sorted(state["cluster"]["parts"]) == [0, 1]
    assert len(about) == 1 and f"the one at step {state['step']:,}, which has parts, stays the newest" in about[0]
    more = qfleet.train(resume=run.dir, progress=False)
    assert more.stop_reason == "total_steps" and more.metrics[-1]["step"] >= 3000
    assert checkpoint.read((run.dir / "checkpoints/last").resolve())[0]["cluster"]["incarnations"] == [0, 0]


# --- while learners are made -----------------------------------------------------------------------------------------------


def struck(monkeypatch: pytest.MonkeyPatch, number: int, times: int = 1) -> None:
    """Learner 1 gets a signal when it has joined, before all are known to be made."""
    run, new = Fleet._run, Fleet._new_learner
    left = [number] * times

    def strike(self: Fleet) -> None:
        os.kill(self._ray.get(self._learners[1].pid.remote()), left.pop())

    def hit(self: Fleet) -> None:
        strike(self)
        run(self)

    def again(self: Fleet, rank: int, *args: Any, **kwargs: Any) -> None:
        new(self, rank, *args, **kwargs)
        if 0 < len(left) < times:
            strike(self)

    monkeypatch.setattr(Fleet, "_run", hit)
    monkeypatch.setattr(Fleet, "_new_learner", again)


@pytest.mark.timeout(100)
@pytest.mark.parametrize(("mode", "number"), [("sync", signal.SIGKILL), ("async", signal.SIGSTOP)])
def test_a_learner_that_is_lost_while_it_is_made_is_made_again(
    ray: None, mode: str, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in a resumed run, where the new one goes on from that one's part."""
    texts = said(monkeypatch)
    what = "ended" if number == signal.SIGKILL else "gave no sign of life for 2 s"
    with monkeypatch.context() as m:
        struck(m, number)
        run = trained(tmp_path / "run", mode, 2000, sync__heartbeat=2.0)
    about = f"  note          learner 1 {what} while it was made: a new one takes its place"
    assert run.stop_reason == "total_steps" and [text for text in texts if "takes its place" in text] == [about]
    if number == signal.SIGSTOP:
        return
    with monkeypatch.context() as m:
        struck(m, number)
        run = qfleet.train(resume=run.dir, total_steps=4000, progress=False)
    assert run.stop_reason == "total_steps" and [text for text in texts if "takes its place" in text] == [about] * 2
    state, _ = checkpoint.read((run.dir / "checkpoints/last").resolve())
    hub = state["cluster"]["hub"]
    assert state["cluster"]["incarnations"] == [0, 0]
    assert hub["gone"] == 0 and hub["total"] == sum(hub["steps"].values()) >= 4000


def test_who_is_lost_again_and_again_while_it_is_made_ends_the_run(
    ray: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    struck(monkeypatch, signal.SIGKILL, times=3)
    with pytest.raises(TeamError, match="learner 1 was lost 3 times in a row before its first round: the last time it ended"):  # fmt: skip
        trained(tmp_path / "run", "sync", 2000)
    assert not (tmp_path / "run").exists()
