"""What a group's agreements cost, as metrics show it: in one process, with a clock that the test moves."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fleet import config_of

from qfleet.config import override
from qfleet.learner import Learner
from qfleet.sync.allreduce import Cut
from qfleet.sync.codecs import Int8
from qfleet.sync.group import Group
from qfleet.sync.traffic import rates
from qfleet.types import Spec


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/one", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("sync", "exchanges"), [({}, 4), ({"codec": "int8"}, 4), ({"mode": "diloco", "local_steps": 2}, 2)]
)
def test_only_time_with_the_others_is_waiting(
    sync: dict[str, Any], exchanges: int, alone: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0

    def takes(seconds: float, owner: Any, name: str) -> None:
        real = getattr(owner, name)

        def slow(*args: Any, **kwargs: Any) -> Any:
            nonlocal now
            now += seconds
            return real(*args, **kwargs)

        monkeypatch.setattr(owner, name, slow)

    config = override(config_of(), {f"sync.{name}": value for name, value in sync.items()})
    learner = Learner(config, Spec(obs_shape=(4,), obs_dtype="float32", num_actions=2), torch.device("cpu"))
    group = Group(config, learner)
    monkeypatch.setattr(time, "perf_counter", lambda: now)
    takes(100.0, learner, "optimize")
    takes(10.0, Int8, "encode")
    takes(10.0, Int8, "decode")
    takes(1.0, dist, "all_reduce")
    takes(1.0, dist, "all_gather")
    for _ in range(4):
        group.agree(torch.ones_like(learner.flat.data), 8)
    counts = group.traffic.counts()
    assert now >= 400.0 and counts["sync/wait"] == exchanges
    assert counts["sync/pushes"] == exchanges and counts["sync/samples"] == 32, "also those of updates on its own"
    assert counts["sync/bytes"] == 0 and "sync/compression" not in rates(counts, 1.0), "nobody else is in the group"


@pytest.mark.parametrize("by_another", [False, True])
@pytest.mark.parametrize("mode", ["sync", "localsgd"])
def test_what_was_sent_for_an_update_that_nobody_made_is_due_again(
    mode: str, by_another: bool, alone: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless another one made it, from whom all take over."""
    momentum = {"learner.momentum": 0.9} if mode == "sync" else {"sync.local_steps": 1}
    config = override(config_of(), {"sync.mode": mode, "sync.codec": "topk", "sync.topk": 0.1, **momentum})
    learner = Learner(config, Spec(obs_shape=(4,), obs_dtype="float32", num_actions=2), torch.device("cpu"))
    group, gather, broadcast = Group(config, learner), dist.all_gather, dist.broadcast
    grad = torch.linspace(-1.0, 2.0, len(learner.flat.data))

    def kept() -> dict[str, torch.Tensor]:
        return {name: value.clone() for name, value in group.state()["mean"].items()}

    def closed(*args: Any) -> None:
        raise RuntimeError("Connection closed by peer")

    def theirs(tensor: torch.Tensor, source: int) -> None:
        broadcast(tensor.add_(1.0), source)

    group.agree(grad.clone(), 8)
    before = kept()
    assert before["residual"].any()
    monkeypatch.setattr(dist, "all_gather", closed)
    with pytest.raises(Cut):
        group.agree(grad.clone(), 8)
    after = kept()
    assert not torch.equal(after["residual"], before["residual"])
    with pytest.raises(Cut):
        group.adopt()  # this group breaks, too
    monkeypatch.setattr(dist, "all_gather", gather)
    if by_another:
        monkeypatch.setattr(dist, "broadcast", theirs)
    group.adopt()
    expected = after if by_another else before
    assert all(torch.equal(value, expected[name]) for name, value in kept().items())
    group.adopt()  # a learner joins
    assert all(torch.equal(value, expected[name]) for name, value in kept().items())
