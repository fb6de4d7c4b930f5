"""Environments that raise, die or hang: on Ray who did so is named, and nothing that can be saved is lost."""

import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from onray import disturbed, trained

import qfleet
from qfleet.acting.collector import Collector
from qfleet.cli import main
from qfleet.envs.local import InProcess
from qfleet.runtime import checkpoint, evaluation
from qfleet.runtime.evaluator import Evaluator, Stuck
from qfleet.runtime.metrics import Metrics
from qfleet.runtime.team import TeamError
from qfleet.runtime.train import Trainer
from qfleet.runtime.worker import Worker

TOYS = str(Path(__file__).parents[1] / "envs")
ALONE = ("env_toys:Hanging-v0", "--recipe", "dqn", "--num-envs", "4", "--total-steps", "1000", "--replay.min-steps", "50", "--learner.batch-size", "16",
         "--runtime.emulator-threads", "2", "--runtime.eval-every", "0", "--runtime.eval-episodes", "2", "--runtime.checkpoint-every", "0", "--device", "cpu")  # fmt: skip


def troubled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str, end: str, total_steps: int = 10**6, **more: Any) -> qfleet.Run:  # fmt: skip
    """A run on Ray, in which an environment that finds the file ends as it is told."""
    monkeypatch.chdir(TOYS)  # processes on Ray begin there, too
    (tmp_path / "file").touch()
    kwargs = {"file": str(tmp_path / "file"), "end": end, "where": more.pop("where", "step"), "keep": more.pop("keep", False)}  # fmt: skip
    settings = {"env__kwargs": kwargs, "runtime__checkpoint_every": 0} | more
    return trained(tmp_path / "run", mode, total_steps, "env_toys:Hanging-v0", **settings)


@pytest.mark.parametrize(("mode", "where"), [("sync", "step"), ("async", "step"), ("sync", "state")])
def test_one_of_several_learners_fails(
    ray: None, mode: str, where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:  # fmt: skip
    """The others save; the error says who, what, where, and how to go on; resumed, the run is finished. Also while a checkpoint is made."""
    with pytest.raises(TeamError, match=r"^learner \d failed: ConnectionRefusedError: the simulator hung up\n") as failed:  # fmt: skip
        troubled(tmp_path, monkeypatch, mode, "raise", where=where, env__vectorize="inprocess", runtime__checkpoint_every=1000 if where == "state" else 0)  # fmt: skip
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


def test_an_environment_that_calls_sys_exit_fails_on_ray(
    ray: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(TeamError, match=r"learner \d failed: RuntimeError: the environment called sys.exit\(3\)"):
        troubled(tmp_path, monkeypatch, "sync", "exit", env__vectorize="inprocess")
    state, _ = checkpoint.read((tmp_path / "run/checkpoints/last").resolve())
    assert sorted(state["cluster"]["parts"]) == [0, 1]


@pytest.mark.timeout(100)
def test_others_do_not_wait_in_an_update_for_one_whose_environments_failed(
    ray: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By all-reduce, where rounds begin with stepping environments. (Without a word they would wait for three heartbeats.)"""
    more = {"runtime__schedule": "serial", "runtime__lag": 1, "sync__transport": "allreduce", "sync__heartbeat": 60.0}
    with pytest.raises(TeamError, match=r"learner \d failed: ConnectionRefusedError"):
        troubled(tmp_path, monkeypatch, "sync", "raise", env__vectorize="inprocess", **more)
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
        troubled(tmp_path, monkeypatch, "async", end, where="reset", keep=True, env__vectorize=vectorize, runtime__watchdog=2.0)  # fmt: skip
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


def alone(tmp_path: Path, env: str = "CartPole-v1", **settings: Any) -> qfleet.Run:
    """A short run of one learner in this process."""
    values = {"env.num_envs": 4, "runtime.steps_per_round": 4, "replay.min_steps": 50, "learner.batch_size": 16, "network.hidden": (16,),
              "runtime.eval_every": 0, "runtime.eval_episodes": 2, "runtime.checkpoint_every": 0}  # fmt: skip
    values |= {name.replace("__", "."): value for name, value in settings.items()}
    run_dir = tmp_path / "run"
    return qfleet.train(env, recipe="dqn", total_steps=400, run_dir=run_dir, device="cpu", progress=False, overrides=values)  # fmt: skip


def saved(tmp_path: Path) -> str:
    return f"Everything else is saved: go on with `qfleet train --resume {tmp_path / 'run'}`."


@pytest.mark.parametrize("where", ["step in flight", "get_state"])
def test_an_environment_that_fails_while_a_checkpoint_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """The rest is saved without it."""
    monkeypatch.syspath_prepend(TOYS)
    if where == "step in flight":  # tick 56, which is in flight at the end of the fourth round
        (tmp_path / "file").touch()
        about = {"env__kwargs": {"file": str(tmp_path / "file"), "end": "raise"}, "env__vectorize": "subprocess", "runtime__groups": 2}  # fmt: skip
        with pytest.raises(RuntimeError, match="the simulator hung up") as failed:
            alone(tmp_path, "env_toys:Hanging-v0", **about, runtime__emulator_threads=2, runtime__steps_per_round=56, runtime__checkpoint_every=50)  # fmt: skip
    else:

        def state(self: InProcess) -> None:
            raise ConnectionRefusedError("the simulator hung up")

        monkeypatch.setattr(InProcess, "state", state)
        with pytest.raises(ConnectionRefusedError, match="the simulator hung up") as failed:
            alone(tmp_path, "env_toys:Saved-v0", env__vectorize="inprocess", runtime__checkpoint_every=100)
        monkeypatch.undo()
        monkeypatch.syspath_prepend(TOYS)
    assert failed.value.__notes__ == [saved(tmp_path)]
    state_, _ = checkpoint.read((tmp_path / "run/checkpoints/last").resolve())
    assert state_["collector"]["envs"] is None and state_["collector"]["ticks"] == (56 if where == "step in flight" else 33)  # fmt: skip
    assert qfleet.train(resume=tmp_path / "run", progress=False).stop_reason == "total_steps"


@pytest.mark.parametrize("where", ["step", "evaluation", "get_state"])
def test_an_environment_that_calls_sys_exit_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    monkeypatch.syspath_prepend(TOYS)
    (tmp_path / "file").touch()
    about: dict[str, Any] = {"env__kwargs": {"file": str(tmp_path / "file"), "end": "exit"}, "env__vectorize": "inprocess"}  # fmt: skip

    def leave(*args: Any) -> None:
        sys.exit(3)

    if where != "step":
        about["env__kwargs"]["file"] = str(tmp_path / "none")
        monkeypatch.setattr(*((evaluation, "play") if where == "evaluation" else (InProcess, "state")), leave)
    with pytest.raises(RuntimeError, match=r"the environment called sys.exit\(3\)\. Let it raise") as failed:
        alone(tmp_path, "env_toys:Hanging-v0", **about)
    assert isinstance(failed.value.__cause__, SystemExit) and failed.value.__notes__ == [saved(tmp_path)]
    state, _ = checkpoint.read((tmp_path / "run/checkpoints/last").resolve())
    assert (state["collector"]["envs"] is None) == (where != "evaluation")


class Ended(Exception):
    """The process would have."""


def test_an_environment_that_hangs_while_the_rest_is_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An evaluation has failed; then a step in flight is never answered. It is left out, and both are told."""
    answer, told = threading.Event(), []

    def play(*args: Any) -> Any:
        raise ConnectionRefusedError("the simulator hung up")

    def states(self: Collector) -> Any:
        with self._awaiting(0):
            assert answer.wait(30), "nobody looked after it"
        return []

    def end(*args: Any) -> None:
        told.append(args)
        answer.set()  # the process goes on, in this test

    monkeypatch.setattr(evaluation, "play", play)
    monkeypatch.setattr(Collector, "_states", states)
    monkeypatch.setattr("qfleet.runtime.failing.end", end)
    with pytest.raises(ConnectionRefusedError):
        alone(tmp_path, runtime__watchdog=0.2)
    assert told == [("4 environments", 0.2, f" {saved(tmp_path)}")]
    assert "ConnectionRefusedError: the simulator hung up" in capsys.readouterr().err
    assert checkpoint.read((tmp_path / "run/checkpoints/last").resolve())[0]["step"] >= 400


@pytest.mark.parametrize("fails", [False, True])
def test_an_evaluation_that_hangs_when_the_run_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], fails: bool
) -> None:
    """What was interrupted is saved, and says so; the terminal is given back, and no process left."""
    done: list[str] = []

    def close(self: Evaluator) -> None:
        raise Stuck("the evaluation's environments")

    def end(who: str, seconds: float, what_else: str = "") -> None:
        raise Ended(who + what_else)

    def between(self: Trainer, *args: Any) -> None:
        if fails:
            raise ConnectionRefusedError("the simulator hung up")
        monkeypatch.setattr(self.progress, "close", lambda: done.append("progress"))
        self.signal = signal.SIGTERM
        self._stop("signal")

    monkeypatch.setattr(Evaluator, "close", close)
    monkeypatch.setattr(Evaluator, "kill", lambda self: done.append("evaluator"))
    monkeypatch.setattr(Trainer, "_between_rounds", between)
    monkeypatch.setattr("qfleet.runtime.failing.end", end)
    with pytest.raises(Ended) as ended:
        alone(tmp_path)
    said = capsys.readouterr().err
    assert str(ended.value) == "the evaluation's environments" + (f" {saved(tmp_path)}" if not fails else "")
    assert done[:2] == (["evaluator"] if fails else ["progress", "evaluator"])
    assert (f"the simulator hung up\n{saved(tmp_path)}" in said) == fails


def test_what_fails_at_the_end_is_told_also_where_the_caller_handles_another_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed = Metrics.close

    def close(self: Metrics) -> None:
        closed(self)
        raise OSError("no space left")

    monkeypatch.setattr(Metrics, "close", close)
    try:
        raise KeyError("the caller's")
    except KeyError as mine:
        with pytest.raises(OSError, match="no space left"):
            alone(tmp_path)
        assert not hasattr(mine, "__notes__")


@pytest.mark.parametrize(("resumed", "note"), [(False, "The run had not begun yet."), (True, "The last checkpoint is unchanged.")])  # fmt: skip
def test_interrupted_before_the_first_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, resumed: bool, note: str
) -> None:
    def interrupted(*args: Any) -> None:
        raise KeyboardInterrupt

    if resumed:
        alone(tmp_path)
    monkeypatch.setattr(Worker, "load" if resumed else "start", interrupted)
    with pytest.raises(KeyboardInterrupt) as failed:
        qfleet.train(resume=tmp_path / "run", progress=False) if resumed else alone(tmp_path)
    assert failed.value.__notes__ == [note]


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
