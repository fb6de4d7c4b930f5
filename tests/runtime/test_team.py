"""Several learners, started as users start them: real processes of torchrun."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

import qfleet
from qfleet.api import all_have_begun
from qfleet.config import Config, ConfigError, override
from qfleet.learner import Learner
from qfleet.runtime import checkpoint, metrics, team
from qfleet.runtime.team import FOREVER, Alone, Launched, Ranks, TeamError, check, joined, together
from qfleet.types import Spec

SETTINGS = ["--num-envs", "4", "--total-steps", "3000", "--recipe", "dqn", "--seed", "3", "--device", "cpu",
            "--network.hidden", "32,32", "--replay.min-steps", "200", "--learner.batch-size", "16", "--runtime.eval-every", "0",
            "--runtime.eval-episodes", "2", "--replay.samples-per-step", "8", "--runtime.checkpoint-every", "1000", "--runtime.log-every", "500"]  # fmt: skip


MEET = ("--master-port", "0", "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0")


def launched(run: Path | str, *args: str, options: tuple[str, ...] = MEET) -> subprocess.Popen[str]:
    env = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")} | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", *options, "-m", "qfleet", "train", *args]  # fmt: skip
    if run:
        command += ["--run-dir", str(run)]
    return subprocess.Popen(command, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def trained(run: Path, *args: str) -> str:
    process = launched(run, "CartPole-v1", *SETTINGS, *args)
    out, _ = process.communicate(timeout=300)
    assert process.returncode == 0, out[-3000:]
    return out


def wait_for(process: subprocess.Popen[str], text: str) -> None:
    """Return when the process has printed it."""
    assert process.stdout is not None
    assert any(text in line for line in process.stdout)


def follower(process: subprocess.Popen[str]) -> int:
    """The process of rank 1."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    return next(int(pid) for pid in children if b"RANK=1" in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"))


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("localhost", 0))
        port: int = s.getsockname()[1]
        return port


def rows(run: Path) -> list[dict[str, Any]]:
    """What does not depend on time."""
    return [
        {k: v for k, v in row.items() if not k.startswith(("time", "pipeline", "sync", "learner"))}
        for row in metrics.read(run)
    ]


def newest(run: Path) -> dict[str, Any]:
    state, _ = checkpoint.read(checkpoint.newest(run / "checkpoints"))
    return state


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("team") / "run"
    out = trained(run)
    assert out.count("Trained after") == 1  # the first learner speaks for all
    return run


def test_learners_share_the_work_and_hold_the_same_parameters(whole: Path) -> None:
    first = newest(whole)
    second, _ = checkpoint.read(checkpoint.newest(whole / "learners/1/checkpoints"))
    for name, tensor in first["learner"]["model"].items():
        assert (tensor == second["learner"]["model"][name]).all(), name
    assert first["learner"]["updates"] == second["learner"]["updates"] > 10
    steps = [state["collector"]["steps"] for state in (first, second)]
    assert sum(steps) == first["step"] == second["step"] >= 3000 and min(steps) > 1400
    # Eight samples a step, in batches of sixteen for each of the two learners.
    assert first["learner"]["updates"] == (first["step"] - 200) * 8 // 32
    rates = [row["pipeline/samples_per_step"] for row in metrics.read(whole) if "pipeline/samples_per_step" in row]
    assert rates[-1] == pytest.approx(8, rel=0.05)
    episodes = [state["collector"]["episodes"]["returns"] for state in (first, second)]
    assert episodes[0] != episodes[1]  # other seeds


def test_every_learner_has_metrics_with_the_first(whole: Path) -> None:
    found = [row for row in metrics.read(whole) if "learner_1/wait" in row]
    assert len(found) > 2
    for row in found:
        assert row["learner_0/samples_per_second"] == row["learner_1/samples_per_second"] > 0  # in the same rounds
        assert all(0 < row[f"learner_{rank}/wait"] < 1 for rank in (0, 1))
    assert any(row["learner_0/wait"] != row["learner_1/wait"] for row in found)


def test_the_same_run_again_is_the_same(whole: Path, tmp_path: Path) -> None:
    trained(tmp_path / "again")
    assert rows(tmp_path / "again") == rows(whole)


def test_a_team_that_was_stopped_goes_on_exactly(whole: Path, tmp_path: Path) -> None:
    """SIGTERM to one of them stops both after the same round; resumed, they end as if nothing had happened."""
    run = tmp_path / "run"
    process = launched(run, "CartPole-v1", *SETTINGS)
    wait_for(process, "step 1,5")
    for _ in range(2):  # as Ctrl-C comes under a launcher
        os.kill(follower(process), signal.SIGTERM)
    out, _ = process.communicate(timeout=120)
    assert "torchrun --nproc-per-node 2 -m qfleet train --resume" in out
    stopped = newest(run)["step"]
    assert 1000 <= stopped < 3000
    with pytest.raises(
        ConfigError, match=r"go on likewise, as in `torchrun --nproc-per-node 2 -m qfleet train --resume"
    ):
        qfleet.train(resume=run)
    resumed = launched("", "--resume", str(run))
    out, _ = resumed.communicate(timeout=300)
    assert resumed.returncode == 0 and f"from the checkpoint at step {stopped:,}" in out, out[-3000:]
    assert rows(run) == rows(whole)
    ours, theirs = newest(run), newest(whole)
    assert all((ours["learner"]["model"][k] == v).all() for k, v in theirs["learner"]["model"].items())


def test_a_checkpoint_that_not_everybody_has_is_not_used(whole: Path, tmp_path: Path) -> None:
    """The follower was killed before it saved: both go on from the one before."""
    run = tmp_path / "run"
    process = launched(run, "CartPole-v1", *SETTINGS)
    process.communicate(timeout=300)
    folders = sorted((run / "learners/1/checkpoints").glob("step_*"))
    assert len(folders) == 2
    # As if the last save had been cut short before anybody gave up the one before: its segments are still there.
    manifest = json.loads((folders[0] / "manifest.json").read_text())
    for segment in manifest["replay"]:
        assert (run / "learners/1/checkpoints/replay" / segment["file"]).exists()
    shutil.rmtree(folders[1])
    resumed = launched("", "--resume", str(run))
    out, _ = resumed.communicate(timeout=300)
    assert resumed.returncode == 0, out[-3000:]
    assert rows(run) == rows(whole)


def test_a_run_that_was_killed_while_the_first_checkpoint_was_saved_begins_anew(whole: Path, tmp_path: Path) -> None:
    """The first learner had saved it, the other one had not. The weights that there were are kept."""
    run = tmp_path / "run"
    shutil.copytree(whole, run, symlinks=True)
    part = run / "learners/1/checkpoints"
    for saved in part.glob("step_*"):
        saved.rename(saved.with_name(saved.name + ".tmp"))
    resumed = launched("", "--resume", str(run))
    out, _ = resumed.communicate(timeout=300)
    assert resumed.returncode == 0 and "resumed" not in out, out[-3000:]
    assert f"begins anew, in its place. The weights it left are in {run / 'checkpoints.old'}" in " ".join(out.split())
    assert rows(run) == rows(whole)
    assert checkpoint.steps(part) and not list(part.glob("*.tmp"))
    assert [p.name for p in checkpoint.steps(run / "checkpoints.old")] == [p.name for p in checkpoint.steps(whole / "checkpoints")]  # fmt: skip


def test_a_learner_whose_part_is_gone_does_not_begin_anew(tmp_path: Path) -> None:
    """It had one, since its folder was made before the first round: what the others have shall not be given up for that."""

    class Second(Alone):
        rank = 1

    with pytest.raises(checkpoint.CheckpointError, match=r"not every learner has its part .*/learners' must hold"):
        all_have_begun(tmp_path, Second())
    (tmp_path / "learners/1/checkpoints/step_000000500.tmp").mkdir(parents=True)
    assert not all_have_begun(tmp_path, Second())
    (tmp_path / "learners/1/checkpoints/step_000001000").mkdir()
    assert all_have_begun(tmp_path, Second())


@pytest.mark.parametrize(
    "mode",
    [
        ["localsgd"],
        ["diloco"],
        ["admm"],
        ["easgd", "--sync.transport", "allreduce"],
        ["sync", "--sync.codec", "powersgd"],
    ],
)
def test_other_modes_train(mode: list[str], tmp_path: Path) -> None:
    trained(tmp_path / "run", "--sync", *mode, "--total-steps", "1200")
    state = newest(tmp_path / "run")
    assert state["learner"]["updates"] > 10
    assert all(torch.from_numpy(v).isfinite().all() for v in state["learner"]["model"].values())


def test_the_schedule_of_a_gpu_gives_the_same_numbers(tmp_path: Path) -> None:
    """Its parts, on the CPU: a gradient that ends with the agreement, queued by a thread."""
    for schedule in ("pipelined", "streams"):
        trained(tmp_path / schedule, "--recipe", "c51", "--learner.double", "--learner.optimizer", "sgd", "--total-steps", "1200",
                "--runtime.lag", "1", "--runtime.schedule", schedule)  # fmt: skip
    plain, ours = (newest(tmp_path / schedule)["learner"] for schedule in ("pipelined", "streams"))
    assert plain["updates"] == ours["updates"] > 100
    for what in ("model", "target"):
        assert all((ours[what][name] == value).all() for name, value in plain[what].items())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"sync.mode": "ssp"}, r"sync\.mode ssp over a server is for learners on Ray \(--learners 2"),
        ({"sync.backup": 1}, r"sync\.backup is 1, which needs a server: use learners on Ray \(--learners 2"),
        ({"sync.servers": 2}, r"sync\.servers is 2, but a launcher's processes agree by all-reduce"),
        ({"total_steps": 1100, "learner.batch_size": 500}, r"1,125 steps .*batch_size \* learners.*no update would"),
        ({"sync.mode": "localsgd", "total_steps": 1200}, r"are 12 updates of each learner, but in localsgd"),
        ({"learners": 3}, "learners is 3, but the launcher started 2 processes"),
        (
            {"env.num_envs": 6, "runtime.groups": 2},
            r"2 learners with 2 groups each: use a multiple of 4, .*num-envs 8\.",
        ),
    ],
)
def test_what_needs_ray_is_refused_under_a_launcher(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check(override(Config(), settings), 2)


def test_learners_that_were_not_started_alike_refuse(tmp_path: Path) -> None:
    """A launcher that gives the second one another learning rate."""
    script = tmp_path / "start.py"
    script.write_text(
        "import os, sys\nfrom qfleet.cli import main\n"
        "sys.exit(main(sys.argv[1:] + (['--learner.lr', '0.01'] if os.environ['RANK'] == '1' else [])))\n"
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(free_port()), str(script)]  # fmt: skip
    done = subprocess.run(
        [*command, "train", "CartPole-v1", *SETTINGS, "--run-dir", str(tmp_path / "run")],
        capture_output=True, text=True, timeout=120, check=False, env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode != 0 and "learner 1 has learner.lr 0.01, learner 0 has" in done.stdout + done.stderr
    assert not (tmp_path / "run").exists()


def test_a_learner_that_dies_ends_the_run(tmp_path: Path) -> None:
    run = tmp_path / "run"
    process = launched(run, "CartPole-v1", *SETTINGS, "--total-steps", "1000000", "--runtime.checkpoint-every", "0")
    wait_for(process, "step 1,5")
    os.kill(follower(process), signal.SIGKILL)
    process.communicate(timeout=120)
    assert process.returncode != 0
    assert list((run / "learners/1/checkpoints").iterdir()) == []  # it has not come to one: known from the folder


def test_torchrun_starts_them_again(whole: Path, tmp_path: Path) -> None:
    """With the same command: the run goes on from its last checkpoint, and ends as if nothing had happened."""
    options = ("--master-port", str(free_port()), "--max-restarts", "1")
    process = launched(tmp_path / "run", "CartPole-v1", *SETTINGS, options=options)
    wait_for(process, "step 1,5")
    os.kill(follower(process), signal.SIGKILL)
    out, _ = process.communicate(timeout=120)
    assert process.returncode == 0 and "Trained after" in out, out[-3000:]
    assert rows(tmp_path / "run") == rows(whole)


def test_mpirun_starts_learners_too(whole: Path, tmp_path: Path) -> None:
    """The same numbers: who started them does not matter."""
    programs = Path(sys.executable).parent
    allowed = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [programs / "mpirun", "-np", "2", "--oversubscribe", "-x", f"MASTER_PORT={free_port()}", sys.executable, "-m", "qfleet",
         "train", "CartPole-v1", *SETTINGS, "--run-dir", str(tmp_path / "run")],
        env=os.environ | allowed, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert rows(tmp_path / "run") == rows(whole)


@pytest.mark.skipif(shutil.which("java") is None, reason="Spark needs Java: apt install openjdk-17-jre-headless")
def test_spark_starts_learners_too(tmp_path: Path) -> None:
    example = Path(__file__).parents[2] / "examples/spark.py"
    for steps in (2000, 3000):  # the second goes on with the first
        done = subprocess.run(
            [sys.executable, example, "--run-dir", tmp_path / "run", "--total-steps", str(steps)],
            env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=300, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        assert f"{tmp_path / 'run'}: " in done.stdout
    assert "total_steps: 3000" in (tmp_path / "run/config.yaml").read_text()
    assert newest(tmp_path / "run")["step"] >= 3000 and (tmp_path / "run/learners/1/checkpoints/last").exists()


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--num-envs", "3"], "cannot be divided among 2 learners"),
        (["--learners", "3"], "the launcher started 2 processes"),
        (["--sync", "ssp"], "server"),
        (["--sync", "gossip"], "allowed: sync, async"),
    ],
)
def test_bad_input(args: list[str], message: str, tmp_path: Path) -> None:
    process = launched(tmp_path / "run", "CartPole-v1", *SETTINGS, *args)
    out, _ = process.communicate(timeout=120)
    assert process.returncode != 0 and message in out and not (tmp_path / "run").exists()


def test_memory_that_this_learner_cannot_get_is_no_matter_of_the_others() -> None:
    with pytest.raises(torch.OutOfMemoryError), together():
        raise torch.OutOfMemoryError("no memory")
    with pytest.raises(TeamError, match="another learner"), together():
        raise RuntimeError("Connection closed by peer")


def test_an_error_without_a_message_is_told_by_its_name() -> None:
    with pytest.raises(TeamError, match=r"does not answer \(RuntimeError\)"), together():
        raise RuntimeError


@pytest.fixture
def mpirun(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """As the first of two ranks that mpirun started."""
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    settings = {"RANK": 0, "SIZE": 2, "LOCAL_RANK": 0, "LOCAL_SIZE": 2}
    for name, value in settings.items():
        monkeypatch.setenv(f"OMPI_COMM_WORLD_{name}", str(value))
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    return monkeypatch


def test_a_port_that_is_taken_is_named(mpirun: pytest.MonkeyPatch) -> None:
    with socket.create_server(("", 0)) as other:
        port = other.getsockname()[1]
        mpirun.setenv("MASTER_PORT", str(port))
        what = rf"port {port} of this machine \(another program, or run, has it\): .* -x MASTER_PORT={port + 1} -np 2"
        with pytest.raises(ConfigError, match=what), joined(Config()):
            pass


def test_two_runs_of_mpirun_that_meet_at_one_port_stay_apart(mpirun: pytest.MonkeyPatch) -> None:
    """A rank of the second one may find the store of the first one."""
    store, places = HashStore(), list[Any]()

    def init(*args: Any, store: Any, **more: Any) -> None:
        places.append(store)
        raise RuntimeError("enough")

    mpirun.setattr(team, "rendezvous", lambda *args, **more: iter([(store, 0, 2)]))
    mpirun.setattr(dist, "init_process_group", init)
    mpirun.setenv("MASTER_PORT", "29500")
    for job in ("first", "second", "first"):
        mpirun.setenv("PMIX_NAMESPACE", job)
        with pytest.raises(TeamError, match="enough"), joined(Config()):
            pass
    first, second, again = places
    first.set("rank 1", "here")
    assert again.check(["rank 1"]) and not second.check(["rank 1"])


@pytest.fixture
def one_rank() -> Iterator[None]:
    """A group of a launcher with one process: this one."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_only_what_goes_to_the_others_is_blamed_on_them(one_rank: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """An update that fails by itself fails with its own error."""
    config = Config()
    learner = Learner(config, Spec(obs_shape=(4,), obs_dtype="float32", num_actions=2), torch.device("cpu"))
    Ranks(config, Launched(0, 1, 1, 0)).attach(learner)
    assert learner.sync is not None

    def misaligned(grad: torch.Tensor) -> None:
        raise RuntimeError("CUDA error: misaligned address")

    def closed(tensor: torch.Tensor) -> None:
        raise RuntimeError("[/pytorch/gloo/pair.cc:534] Connection closed by peer")

    with monkeypatch.context() as m:
        m.setattr(learner, "apply", misaligned)
        with pytest.raises(RuntimeError, match="CUDA error: misaligned address") as wrong:
            learner.sync(torch.zeros_like(learner.grad), 16)
    assert not isinstance(wrong.value, TeamError)
    monkeypatch.setattr(dist, "all_reduce", closed)
    with pytest.raises(TeamError, match=r"^another learner .* \(Connection closed by peer\)\. .*train --resume RUN"):
        learner.sync(torch.zeros_like(learner.grad), 16)


@pytest.mark.parametrize(("watchdog", "seconds"), [(0.0, FOREVER.total_seconds()), (300.0, 360.0), (7200.0, 7260.0)])
def test_others_are_waited_for_as_long_as_environments_may_take(
    watchdog: float, seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In every group, of updates and of rounds; for a checkpoint longer, since the first one comes to the last one after its evaluation."""
    limits, waited = list[timedelta](), list[int]()

    def init(*args: Any, timeout: timedelta, **more: Any) -> None:
        limits.append(timeout)

    def new(*, timeout: timedelta = timedelta(minutes=30), **more: Any) -> int:
        limits.append(timeout)
        return len(limits)

    def reduce(tensor: torch.Tensor, op: Any = None, *, group: int) -> None:
        waited.append(group)

    monkeypatch.setattr(team, "ranks", lambda: Launched(0, 2, 2, 0))
    monkeypatch.setattr(team, "rendezvous", lambda *args, **more: iter([(HashStore(), 0, 2)]))
    monkeypatch.setattr(dist, "init_process_group", init)
    monkeypatch.setattr(dist, "new_group", new)
    monkeypatch.setattr(dist, "destroy_process_group", lambda: None)
    monkeypatch.setattr(dist, "all_reduce", reduce)
    monkeypatch.setattr(dist, "barrier", lambda group: waited.append(group))
    monkeypatch.setattr(Ranks, "_compare", lambda self: None)
    with joined(override(Config(), {"runtime.watchdog": watchdog})) as found:
        found.meet(0)
        found.wait()
    updates, rounds, checkpoints = (limits[number - 1].total_seconds() for number in (1, *waited))
    assert updates == rounds == seconds
    assert checkpoints == FOREVER.total_seconds() >= 86_400
