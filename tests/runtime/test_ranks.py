"""Modes and codecs by all-reduce in whole runs: two processes as torchrun starts them, one after the other in the same two."""

import json
import multiprocessing
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from onray import SETTINGS
from test_team import newest, rows
from torch._C._distributed_c10d import TCPStore

import qfleet
from qfleet.config import from_dict
from qfleet.learner import Learner
from qfleet.runtime.checkpoint import read
from qfleet.runtime.train import Trainer
from qfleet.sync.balance import Work
from qfleet.sync.group import Group
from qfleet.types import Spec

MOMENTUM = {"learner.optimizer": "sgd", "learner.momentum": 0.9, "learner.lr": 1e-3}
LOCAL = {"sync.local_steps": 7}
RESUMED: dict[str, dict[str, Any]] = {
    "bf16": {"sync.codec": "bf16"},
    "int8": {"sync.codec": "int8"},
    "topk": {"sync.codec": "topk", **MOMENTUM},
    "localsgd": {"sync.mode": "localsgd", **LOCAL},
    "diloco": {"sync.mode": "diloco", "sync.codec": "int8", **LOCAL},
    "easgd": {"sync.mode": "easgd", "sync.transport": "allreduce", **LOCAL},
    "admm": {"sync.mode": "admm", **LOCAL},
}
DIVIDED: dict[str, dict[str, Any]] = {"weights": {"sync.weights": (3.0, 1.0)}, "balance": {"sync.balance": True}}
RUNS = [*RESUMED, *(f"{name}, {part}" for name in RESUMED for part in ("interrupted", "resumed")), *DIVIDED]


def trained(folder: Path, settings: dict[str, Any]) -> None:
    common = {k: v for k, v in SETTINGS.items() if k not in ("learners", "address")}
    more = {"runtime.checkpoint_every": 800, "runtime.eval_episodes": 1, "total_steps": 1200, "device": "cpu"}
    qfleet.train("CartPole-v1", recipe="dqn", seed=3, run_dir=folder, overrides=common | more | settings, progress=False)  # fmt: skip


def work(rank: int, ports: list[int], folder: Path) -> None:
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_USE_AGENT_STORE": "True"}  # fmt: skip
    save, agree, tell, samples = Trainer.save, Group.agree, Work.tell, list[int]()

    def signalled(self: Trainer, stuck: bool = False) -> None:
        """Soon after the first checkpoint, and so both stop after the same round."""
        save(self, stuck)
        self.signal = signal.SIGTERM

    def counted(self: Group, grad: torch.Tensor, count: int) -> None:
        samples.append(count)
        agree(self, grad, count)

    def told(self: Work) -> tuple[int, float]:
        """The second one needs three times as long for a sample."""
        count, _ = tell(self)
        return count, count * (1.0 + 2.0 * rank)

    Work.tell = told  # type: ignore[method-assign]
    Group.agree = counted  # type: ignore[method-assign]
    for run, port in zip(RUNS, ports, strict=True):
        os.environ["MASTER_PORT"] = str(port)
        name, _, part = run.partition(", ")
        Trainer.save = signalled if part == "interrupted" else save  # type: ignore[method-assign]
        if part == "resumed":
            qfleet.train(resume=folder / f"{name}, interrupted", progress=False)
        else:
            trained(folder / run, (RESUMED | DIVIDED)[name])
        (folder / f"{run}.{rank}.json").write_text(json.dumps(samples))
        samples.clear()


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of all runs."""
    folder = tmp_path_factory.mktemp("runs")
    stores = [TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) for _ in RUNS]  # as torchrun has one
    context = multiprocessing.get_context("spawn")
    ports = [store.port for store in stores]
    ranks = [context.Process(target=work, args=(rank, ports, folder)) for rank in range(2)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    assert [process.exitcode for process in ranks] == [0, 0]
    return folder


def samples_of(done: Path, run: str) -> list[list[int]]:
    """Behind every gradient, of both learners."""
    return [json.loads((done / f"{run}.{rank}.json").read_text()) for rank in range(2)]


def states(run: Path) -> list[dict[str, Any]]:
    """Of both learners, at the end."""
    return [newest(run), read((run / "learners/1/checkpoints/last").resolve())[0]]


def same(a: Any, b: Any) -> bool:
    """To the bit, whatever it is made of."""
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    return bool((torch.as_tensor(a) == torch.as_tensor(b)).all())


@pytest.mark.parametrize("name", RESUMED)
def test_resumed_it_goes_on_exactly(done: Path, name: str) -> None:
    """And so the same run twice has the same numbers."""
    part = done / f"{name}, interrupted"
    whole, before, after = (len(samples_of(done, run)[0]) for run in (name, part.name, f"{name}, resumed"))
    assert before + after == whole > 200 and before > 100 and before % 7  # between two exchanges
    assert rows(part) == rows(done / name)
    for ours, theirs in zip(states(part), states(done / name), strict=True):
        assert theirs["step"] >= 1200 and theirs["learner"]["updates"] == whole
        assert same(ours["learner"], theirs["learner"]) and same(ours["team"], theirs["team"])


@pytest.mark.parametrize("name", RESUMED)
def test_all_learners_end_with_the_same(done: Path, name: str) -> None:
    """Parameters; or, where each has its own, what they meet at, of which the target network is a copy."""
    first, second = states(done / name)
    config = from_dict(yaml.safe_load((done / name / "config.yaml").read_text()))
    initial = Learner(config, Spec(obs_shape=(4,), obs_dtype="float32", num_actions=2), torch.device("cpu")).net
    for tensor, before in zip(first["learner"]["target"].values(), initial.parameters(), strict=True):
        assert (torch.as_tensor(tensor) - before).abs().max() > 1e-3
    assert same(first["learner"]["target"], second["learner"]["target"])
    if "centre" in first["team"]:
        assert same(first["team"]["centre"], second["team"]["centre"])
    else:
        assert same(first["learner"]["model"], second["learner"]["model"])


def test_batches_are_divided_as_given(done: Path) -> None:
    counts = samples_of(done, "weights")
    assert [set(each) for each in counts] == [{24}, {8}] and len(counts[0]) == len(counts[1]) > 200
    first, second = states(done / "weights")
    assert first["step"] >= 1200 and same(first["learner"]["model"], second["learner"]["model"])


def test_batches_are_divided_by_measured_speed(done: Path) -> None:
    counts = list(zip(*samples_of(done, "balance"), strict=True))
    assert counts[0] == (16, 16) and counts[-1] == (24, 8) and len(counts) > 200
    assert all(first + second == 32 for first, second in counts)
    first, second = states(done / "balance")
    assert first["step"] >= 1200 and same(first["learner"]["model"], second["learner"]["model"])
