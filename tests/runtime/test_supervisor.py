"""What the supervisor of learners on Ray does about those that are lost while they are made."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from onray import trained

import qfleet
from qfleet.runtime import checkpoint
from qfleet.runtime.cluster import Fleet
from qfleet.runtime.progress import Progress
from qfleet.runtime.team import TeamError


def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """-> what the run says, from now on."""
    texts, message = list[str](), Progress.message

    def heard(self: Progress, text: str) -> None:
        texts.append(text)
        message(self, text)

    monkeypatch.setattr(Progress, "message", heard)
    return texts


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
