"""Learners and servers on a real, local Ray."""

import asyncio
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from onray import trained

import qfleet
from qfleet.config import Config, ConfigError, override
from qfleet.runtime import checkpoint, resources
from qfleet.runtime.cluster import Fleet
from qfleet.runtime.hub import BROKEN, READY, Hub, Report, identity
from qfleet.runtime.metrics import Window
from qfleet.runtime.resources import check
from qfleet.runtime.team import TeamError
from qfleet.runtime.train import Trainer


@pytest.mark.parametrize(("mode", "schedule"), [("ssp", "streams"), ("diloco", "auto")])
def test_modes_train(ray: None, mode: str, schedule: str, tmp_path: Path) -> None:
    more = {"sync__local_steps": 4} if mode == "diloco" else {}
    run = trained(tmp_path / "run", mode, runtime__schedule=schedule, runtime__lag=1, **more)
    rows = [row for row in run.metrics if "train/loss" in row]
    assert rows[-1]["step"] >= 3000 and rows[-1]["train/loss"] < 100
    # Eight samples a step in batches of sixteen: what one learner does in an update, each of the two does.
    assert rows[-1]["train/n_updates"] == pytest.approx(2800 * 8 / 32, rel=0.15)
    assert run.evaluation is not None and run.stop_reason == "total_steps"
    both = rows[-1]["learner_0/samples_per_second"] + rows[-1]["learner_1/samples_per_second"]
    assert both == pytest.approx(rows[-1]["sync/samples_per_second"], rel=0.5)
    assert rows[-1]["sync/compression"] == pytest.approx(1.0, abs=0.1) and 0 <= rows[-1]["sync/wait"] < 1
    assert sum(value for name, value in rows[-1].items() if name.startswith("sync/stale_")) == pytest.approx(1.0)


@pytest.mark.parametrize("how", [{"sync__weights": (3.0, 1.0)}, {"sync__balance": True}])
def test_batches_are_divided(ray: None, how: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As given, or by what the server has measured: of all together as many samples as without."""
    values, fleets = Fleet.values, list[Fleet]()

    def noted(self: Fleet) -> dict[str, float]:
        fleets.append(self)
        return values(self)

    monkeypatch.setattr(Fleet, "values", noted)
    run = trained(tmp_path / "run", "sync", 1500, sync__transport="server", **how)
    assert run.stop_reason == "total_steps" and run.metrics[-1]["step"] >= 1500
    pushes, samples = (
        [fleets[-1].told.clocks[rank][f"sync/{name}"] for rank in range(2)] for name in ("pushes", "samples")
    )
    assert pushes[0] == pushes[1] > 100 and sum(samples) == 32 * pushes[0]
    if "sync__weights" in how:
        assert samples == [24 * pushes[0], 8 * pushes[0]]
    else:
        (server,) = checkpoint.read((run.dir / "checkpoints/last").resolve())[0]["cluster"]["servers"]
        assert {rank for rank, speed in server["balance"] if speed > 0} == {0, 1}


@pytest.mark.timeout(120)
@pytest.mark.parametrize("schedule", ["pipelined", "streams"])
def test_who_is_late_does_not_hold_up_the_others(ray: None, schedule: str, tmp_path: Path) -> None:
    """Three learners, and two are waited for: rounds end for all, whoever missed whose updates."""
    settings = {"learners": 3, "env__num_envs": 6, "sync__backup": 1, "runtime__schedule": schedule, "runtime__lag": 1}
    run = trained(tmp_path / "run", "sync", sync__transport="server", **settings)
    rows = [row for row in run.metrics if "train/loss" in row]
    assert run.stop_reason == "total_steps" and rows[-1]["step"] >= 3000
    assert rows[-1]["train/n_updates"] == pytest.approx(2800 * 8 / (16 * 3), rel=0.15)  # as many as with one learner


def test_a_ray_of_its_own_gives_learners_the_priority_of_this_process(tmp_path: Path) -> None:
    """As Ray does it, other programs would leave them nothing. (In a process of its own: this one has a cluster.)"""
    script = f"""
import os
from pathlib import Path
from onray import trained
from qfleet.runtime.cluster import Fleet

start = Fleet.start

def started(self):
    start(self)
    for each in (*self._learners, *self.servers.actors):
        print("nice", os.getpriority(os.PRIO_PROCESS, self._ray.get(each.pid.remote())))

Fleet.start = started
trained(Path({str(tmp_path)!r}) / "run", "sync", 500)
"""
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=Path(__file__).parent, capture_output=True, text=True, timeout=120, check=False
    )  # fmt: skip
    assert done.stdout.count(f"nice {os.getpriority(os.PRIO_PROCESS, 0)}") == 3, done.stdout + done.stderr


def test_sync_is_the_same_with_any_number_of_servers(ray: None, tmp_path: Path) -> None:
    def numbers(run: qfleet.Run) -> list[Any]:
        return [(row["step"], row.get("eval/mean_reward")) for row in run.metrics if "eval/mean_reward" in row]

    runs = [trained(tmp_path / f"{i}", "sync", sync__servers=servers) for i, servers in enumerate((1, 2))]
    weights = [checkpoint.read((run.dir / "checkpoints/best").resolve())[0]["learner"]["model"] for run in runs]
    for other in weights[1:]:
        assert all((other[name] == value).all() for name, value in weights[0].items())
    assert numbers(runs[0]) == numbers(runs[1])


@pytest.mark.parametrize("learners", [1, 2])
def test_rates_leave_out_the_time_of_evaluations_that_learners_stand_still_for(
    ray: None, learners: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those on Ray do not."""
    left_out: list[float] = []
    monkeypatch.setattr(Window, "leave_out", lambda self, seconds: left_out.append(seconds))
    run = trained(tmp_path / "run", "sync", 1500, learners=learners, runtime__eval_every=500)
    assert len([row for row in run.metrics if "eval/mean_reward" in row]) >= 3
    assert len(left_out) > 3 if learners == 1 else not left_out


def interrupted(monkeypatch: pytest.MonkeyPatch, folder: Path, mode: str, *steps: int, **settings: Any) -> qfleet.Run:
    """Trained, and stopped by a signal soon after the first checkpoint."""
    save = Trainer.save

    def signalled(self: Trainer, stuck: bool = False) -> None:
        save(self, stuck)
        self.signal = signal.SIGTERM

    with monkeypatch.context() as m:
        m.setattr(Trainer, "save", signalled)
        return trained(folder, mode, *steps, **settings, runtime__checkpoint_every=1000)


@pytest.mark.parametrize(
    ("mode", "codec", "transport"),
    [
        ("sync", "int8", "server"),
        ("diloco", "fp32", "server"),
        pytest.param("sync", "powersgd", "allreduce", marks=pytest.mark.long),
    ],
)
def test_resumed_it_goes_on_exactly(
    ray: None, mode: str, codec: str, transport: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped by a signal soon after the first checkpoint: two checkpoints of everybody's parts."""
    settings = {"sync__codec": codec, "sync__transport": transport}
    settings |= {"sync__servers": 2} if transport == "server" else {}
    settings |= {"sync__local_steps": 4} if mode == "diloco" else {}
    whole = trained(tmp_path / "whole", mode, **settings)
    part = interrupted(monkeypatch, tmp_path / "part", mode, **settings)
    assert part.stop_reason == "signal" and len(list((part.dir / "checkpoints").glob("step_*"))) == 2
    resumed = qfleet.train(resume=part.dir, progress=False)
    states = [checkpoint.read((run.dir / "checkpoints/last").resolve())[0] for run in (whole, resumed)]
    weights = [state["learner"]["model"] for state in states]
    assert all((weights[0][name] == weights[1][name]).all() for name in weights[0])
    assert states[0]["step"] == states[1]["step"] and states[0]["cluster"]["hub"] == states[1]["cluster"]["hub"]


@pytest.mark.long
@pytest.mark.parametrize("mode", ["async", "ssp", "window"])
def test_resumed_without_a_barrier_nothing_is_lost_or_applied_twice(
    ray: None, mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the servers have and what the learners pushed is compared at the checkpoint that is resumed and at the last one. (A learner goes on
    with the number of its next push: one that was applied twice, or never, would make them differ.)"""
    settings = {"sync__servers": 2, "learner__target_interval": 10, "sync__window": 3 if mode == "window" else 0}
    run = interrupted(monkeypatch, tmp_path / "run", mode, 4000, **settings)

    def newest() -> Any:
        folder = (run.dir / "checkpoints/last").resolve().name
        parts = [checkpoint.read(run.dir / f"learners/{rank}/checkpoints/{folder}")[0] for rank in range(2)]
        return checkpoint.read(run.dir / "checkpoints" / folder)[0]["cluster"]["servers"], parts

    states = [newest()]
    run = qfleet.train(resume=run.dir, progress=False)
    states.append(newest())
    assert run.stop_reason == "total_steps"
    for (first, second), parts in states:
        for name in ("version", "target_version", "progress", "applied", "missing"):
            assert first[name] == second[name]
        pushed = [part["team"]["sequence"] for part in parts]
        assert sorted(first["applied"]) == [[rank, 0, count - 1] for rank, count in enumerate(pushed)]
        assert not first["missing"] and pushed == [part["learner"]["updates"] for part in parts]
        if mode != "window":
            assert first["version"] == sum(pushed)
    assert states[1][0][0]["version"] > states[0][0][0]["version"] > 0


def test_a_learner_without_its_part_begins_anew(ray: None, tmp_path: Path) -> None:
    run = trained(tmp_path / "run", "async", total_steps=2000)
    shutil.rmtree(next((tmp_path / "run/learners/1/checkpoints").glob("step_*")))
    more = qfleet.train(resume=run.dir, total_steps=4000, progress=False)
    assert more.stop_reason == "total_steps" and more.metrics[-1]["step"] >= 4000
    state, _ = checkpoint.read((run.dir / "checkpoints/last").resolve())
    assert state["cluster"]["incarnations"] == [0, 1]


def test_who_joins_takes_no_part_in_checkpoints_that_were_asked_for_before() -> None:
    async def check() -> None:
        config = Config()
        hub = Hub(config)
        await hub.join(0, 0, identity(config))
        await hub.join(1, 0, identity(config))
        asked = hub.save(500, final=False)
        assert asked == {0: 0, 1: 0} and hub.parts(500, asked) == ([], [0, 1])
        hub.leave(1)
        joining = asyncio.create_task(hub.join(1, 1, identity(config)))
        saving = asyncio.create_task(hub.saved(0, 500))
        await asyncio.sleep(0)
        assert hub.parts(500, asked) == ([0], []) and not joining.done() and hub.live == {0: 0}
        hub.complete(500)
        await saving
        assert await joining == (0, 500) and hub.live == {0: 0, 1: 1}

    asyncio.run(check())


def test_a_group_is_made_anew_for_another_learner_of_the_same_rank() -> None:
    """Also where it is ready before the others have noticed."""

    async def check() -> None:
        config = Config()
        hub = Hub(config)

        async def reported(round: int, *incarnations: int) -> list[tuple[int, list[int]]]:
            reports = [Report(r, n, round, 10, None, {}, {}) for r, n in enumerate(incarnations)]
            orders = await asyncio.gather(*(hub.report(report) for report in reports))
            return [(each.epoch, list(each.members)) for each in orders]

        for rank in range(2):
            await hub.join(rank, 0, identity(config))
        assert await reported(0, 0, 0) == [(1, [0, 1])] * 2 == await reported(1, 0, 0)
        hub.leave(1)
        await hub.join(1, 1, identity(config))
        assert await reported(2, 0, 1) == [(2, [0, 1])] * 2 == await reported(3, 0, 1)

    asyncio.run(check())


def test_breaks_of_a_group_are_counted_while_nothing_is_learned() -> None:
    async def check() -> None:
        config = Config()
        hub = Hub(config)

        async def breaks(round: int, group: str, updates: int) -> int:
            reports = [Report(r, n, round, 10, None, {}, {}, group, updates, "timed out") for r, n in hub.live.items()]
            await asyncio.gather(*(hub.report(report) for report in reports))
            return hub.breaks

        for rank in range(2):
            await hub.join(rank, 0, identity(config))
        assert await breaks(0, READY, 0) == 0
        assert [await breaks(round, BROKEN, 0) for round in (1, 2)] == [1, 2] and hub.why == "learner 1: timed out"
        assert await breaks(3, BROKEN, 5) == 1  # some were made meanwhile
        assert await breaks(4, BROKEN, 5) == 2
        hub.leave(1)
        assert await breaks(5, BROKEN, 5) == 0  # one was lost: that is why
        assert await breaks(6, BROKEN, 5) == 1 and await breaks(7, READY, 5) == 0

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
    with pytest.raises(
        ConfigError, match=r"weights 9, 1 cannot be had with 4 samples for all learners \(they would have 3, 1\): raise"
    ):
        trained(tmp_path / "run", "sync", sync__weights=(9.0, 1.0), learner__batch_size=2)
    with pytest.raises(
        ConfigError, match=r"sync\.backup is 2, but of 2 learners at least one must be waited for: use 1"
    ):
        trained(tmp_path / "run", "sync", sync__backup=2)
    for mode, more in (("ssp", {}), ("admm", {}), ("sync", {"sync__transport": "allreduce"})):
        with pytest.raises(ConfigError, match=rf"sync\.backup is 1, but in {mode} by \w+ nobody can be left behind"):
            trained(tmp_path / "run", mode, sync__backup=1, **more)
    with pytest.raises(ConfigError, match="updates are recorded for one size"):
        trained(tmp_path / "run", "sync", sync__balance=True, runtime__schedule="streams", runtime__lag=1)
    with pytest.raises(ConfigError, match="Ray gives every learner its GPU"):
        check(override(Config(), {"learners": 2, "device": "cuda:1"}))
    assert not (tmp_path / "run").exists()


def test_without_ray_it_says_what_to_install(tmp_path: Path) -> None:
    script = "import sys; sys.modules['ray'] = None; from qfleet.cli import main; sys.exit(main(sys.argv[1:]))"
    done = subprocess.run(
        [sys.executable, "-c", script, "train", "CartPole-v1", "--learners", "2", "--run-dir", str(tmp_path / "run")],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode != 0 and "Traceback" not in done.stderr + done.stdout
    said = [line for line in (done.stderr + done.stdout).splitlines() if line.strip()]
    assert (
        len(said) == 1 and "learners is 2, which needs Ray: " in said[0] and 'pip install "qfleet[ray]". (Or' in said[0]
    )
    assert not (tmp_path / "run").exists()


def test_a_local_ray_that_does_not_start_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(**given: Any) -> None:
        raise Exception(
            "The current node timed out during startup. This could happen because some of the raylet failed"
        )

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    absent = SimpleNamespace(is_initialized=lambda: False, init=slow)
    config = override(Config(), {"learners": 2})
    with (
        pytest.raises(
            TeamError, match=r"Ray did not start: The current node timed out during startup\. Is the machine"
        ),
        resources.joined(absent, config, 1),
    ):
        pass


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
