"""Environments that raise, die or hang: on Ray who did so is named, and nothing that can be saved is lost."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from onray import disturbed, trained

import qfleet
from qfleet.cli import main
from qfleet.runtime import checkpoint, evaluation
from qfleet.runtime.team import TeamError

TOYS = str(Path(__file__).parents[1] / "envs")
ALONE = ("env_toys:Hanging-v0", "--recipe", "dqn", "--num-envs", "4", "--total-steps", "1000", "--replay.min-steps", "50", "--learner.batch-size", "16",
         "--runtime.emulator-threads", "2", "--runtime.eval-every", "0", "--runtime.eval-episodes", "2", "--runtime.checkpoint-every", "0", "--device", "cpu")  # fmt: skip


def troubled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str, end: str, total_steps: int = 10**6, **more: Any) -> qfleet.Run:  # fmt: skip
    """A run on Ray, in which an environment that finds the file ends as it is told."""
    monkeypatch.chdir(TOYS)  # processes on Ray begin there, too
    (tmp_path / "file").touch()
    kwargs = {"file": str(tmp_path / "file"), "end": end, "reset": more.pop("reset", False), "keep": more.pop("keep", False)}  # fmt: skip
    settings = {"env__kwargs": kwargs, "runtime__checkpoint_every": 0} | more
    return trained(tmp_path / "run", mode, total_steps, "env_toys:Hanging-v0", **settings)


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_one_of_several_learners_fails(
    ray: None, mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The others save; the error says who, what, where, and how to go on; resumed, the run is finished."""
    with pytest.raises(TeamError, match=r"^learner \d failed: ConnectionRefusedError: the simulator hung up\n") as failed:  # fmt: skip
        troubled(tmp_path, monkeypatch, mode, "raise", env__vectorize="inprocess")
    assert failed.value.__notes__ == [f"Everything else is saved: go on with `qfleet train --resume {tmp_path / 'run'}`."]  # fmt: skip
    assert "env_toys.py" in str(failed.value.__cause__) and "in hang" in str(failed.value.__cause__)
    state, _ = checkpoint.read((tmp_path / "run/checkpoints/last").resolve())
    assert sorted(state["cluster"]["parts"]) == [0, 1]
    (tmp_path / "file").touch()
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["train", "--resume", str(tmp_path / "run")]) == 1
    said = capsys.readouterr().err.splitlines()
    assert any("env_toys.py" in line for line in said[:-1]) and said[-1].startswith("qfleet: error: learner")
    assert "the simulator hung up. Everything else is saved: go on with" in said[-1]
    run = qfleet.train(resume=tmp_path / "run", total_steps=int(state["step"]) + 1500, progress=False)
    assert run.stop_reason == "total_steps" and run.metrics[-1]["step"] >= int(state["step"]) + 1500


def test_an_error_that_cannot_travel_is_told(ray: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TeamError, match=r"learner \d failed: .*out of fuel \(7\)") as failed:
        troubled(tmp_path, monkeypatch, "localsgd", "odd", env__vectorize="inprocess", sync__transport="allreduce", sync__local_steps=4)  # fmt: skip
    assert "in hang" in str(failed.value.__cause__)
    state, _ = checkpoint.read((tmp_path / "run/checkpoints/last").resolve())
    assert sorted(state["cluster"]["parts"]) == [0, 1]


def test_when_all_learners_fail_all_save_their_parts(
    ray: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(TeamError, match=r"^learner \d failed: ConnectionRefusedError") as failed:
        troubled(tmp_path, monkeypatch, "sync", "raise", keep=True, env__vectorize="inprocess")
    assert failed.value.__notes__ == [f"Everything else is saved: go on with `qfleet train --resume {tmp_path / 'run'}`."]  # fmt: skip
    state, _ = checkpoint.read((tmp_path / "run/checkpoints/last").resolve())
    assert sorted(state["cluster"]["parts"]) == [0, 1] and state["step"] > 200
    (tmp_path / "file").unlink()
    run = qfleet.train(resume=tmp_path / "run", total_steps=int(state["step"]) + 1500, progress=False)
    assert run.stop_reason == "total_steps"


@pytest.mark.parametrize(("end", "vectorize"), [("die", "inprocess"), ("hang", "subprocess")])
def test_who_is_lost_again_and_again_before_its_first_round_ends_the_run(
    ray: None, end: str, vectorize: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = disturbed(monkeypatch, [])
    what = "ended" if end == "die" else r"waited 2 s for worker \d \(process \d+, environments \d to \d\), in vain"
    with pytest.raises(TeamError, match=rf"learner \d was lost 3 times in a row before its first round: the last time it {what}\.") as failed:  # fmt: skip
        troubled(tmp_path, monkeypatch, "async", end, reset=True, keep=True, env__vectorize=vectorize, runtime__watchdog=2.0)  # fmt: skip
    assert failed.value.__notes__ == ["There is no checkpoint yet."]
    assert 2 <= sum("a new one takes its place" in text for text in told) <= 4
    assert not any("is there a free CPU" in text for text in told)


def test_an_environment_that_hangs_is_replaced_with_its_learner(
    ray: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = disturbed(monkeypatch, [])
    run = troubled(tmp_path, monkeypatch, "sync", "hang", 4000, env__vectorize="inprocess", runtime__watchdog=2.0, sync__heartbeat=2.0)  # fmt: skip
    assert len(told) == 1 and "waited 2 s for 2 environments, in vain: a new one takes its place" in told[0]
    assert run.stop_reason == "total_steps" and run.metrics[-1]["step"] >= 4000


# --- one learner ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("end", ["raise", "die"])
@pytest.mark.parametrize(("vectorize", "schedule"), [("subprocess", "pipelined"), ("inprocess", "serial")])
def test_an_environment_that_fails_does_not_lose_what_was_learned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str, vectorize: str, schedule: str
) -> None:
    if (end, vectorize) == ("die", "inprocess"):
        end = "hang up"  # there is no process of its own that could die
    monkeypatch.syspath_prepend(TOYS)
    monkeypatch.setenv("PYTHONPATH", TOYS)
    (tmp_path / "file").touch()
    about = ("--env-kwargs", f"file={tmp_path / 'file'}", "--env-kwargs", f"end={'raise' if end == 'hang up' else end}")
    words = [*ALONE, *about, "--env.vectorize", vectorize, "--runtime.schedule", schedule, "--runtime.lag", "1", "--run-dir", str(tmp_path / "run")]  # fmt: skip
    done = subprocess.run([sys.executable, "-m", "qfleet", "train", *words], capture_output=True, text=True, check=False)  # fmt: skip
    assert done.returncode == 1
    assert ("died with signal SIGKILL" if end == "die" else "the simulator hung up") in done.stderr
    assert f"Everything else is saved: go on with `qfleet train --resume {tmp_path / 'run'}`." in done.stderr
    before = checkpoint.read((tmp_path / "run/checkpoints/last").resolve())[0]
    assert 200 <= before["step"] < 1000 and before["learner"]["updates"] > 0
    run = qfleet.train(resume=tmp_path / "run", progress=False)
    assert run.stop_reason == "total_steps" and run.metrics[-1]["step"] >= 1000
    after = checkpoint.read((tmp_path / "run/checkpoints/last").resolve())[0]
    assert after["learner"]["updates"] > before["learner"]["updates"]


@pytest.mark.parametrize("learners", [1, 2])
def test_an_evaluation_that_fails_leaves_a_whole_checkpoint(
    ray: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, learners: int
) -> None:
    """Training environments are sound then."""

    def play(*args: Any) -> Any:
        raise ConnectionRefusedError("the simulator hung up")

    monkeypatch.setattr(evaluation, "play", play)
    with pytest.raises(ConnectionRefusedError) as failed:
        trained(tmp_path / "run", "sync", 10**6, learners=learners, runtime__eval_every=1000)
    assert failed.value.__notes__ == [f"Everything else is saved: go on with `qfleet train --resume {tmp_path / 'run'}`."]  # fmt: skip
    folder = (tmp_path / "run/checkpoints/last").resolve()
    state = checkpoint.read(folder)[0]
    if learners == 1:
        assert state["collector"]["envs"] is not None and state["evaluation_due"]
    else:
        assert sorted(state["cluster"]["parts"]) == [0, 1]
