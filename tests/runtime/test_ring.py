"""A learner that reduces with others on a cluster: here alone, with a real hub, store and group, in one process."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from qfleet.config import Config, override
from qfleet.learner import Learner
from qfleet.runtime.hub import Meeting
from qfleet.runtime.member import Place
from qfleet.runtime.ring import Ring
from qfleet.runtime.team import Broken
from qfleet.types import Spec


@pytest.fixture
def ring() -> Iterator[Callable[..., tuple[Ring, Learner]]]:
    meetings, rings = list[Meeting](), list[Ring]()
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def make(mode: str, **more: Any) -> tuple[Ring, Learner]:
        config = override(
            Config(), {"sync.mode": mode, "sync.transport": "allreduce", "learners": 2, "env.num_envs": 2, **more}
        )
        meetings.append(Meeting(config, "token"))
        place = Place(0, 0, False, ("127.0.0.1", meetings[-1].port), ("127.0.0.1", store.port), "token", 1)
        learner = Learner(config, Spec(obs_shape=(4,), obs_dtype="float32", num_actions=2), torch.device("cpu"))
        rings.append(Ring(config, place))
        rings[-1].attach(learner)
        return rings[-1], learner

    yield make
    for each in rings:
        each.close()
        for connection in (each._hub, each._directory, each._pulse):
            connection.close()
    for meeting in meetings:
        meeting.close()


def test_who_lost_its_first_group_begins_with_the_parameters_of_the_second(
    ring: Callable[..., tuple[Ring, Learner]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not with its own, which nobody has trained."""
    made, learner = ring("diloco")
    failures = [RuntimeError("Connection closed by peer")]

    def broadcast(tensor: torch.Tensor, source: int) -> None:
        """As from another one, which dies the first time."""
        if failures:
            raise failures.pop()
        tensor.fill_(7.0)

    monkeypatch.setattr(dist, "broadcast", broadcast)
    made._make_group([0])
    assert not made.joined and not failures and not (learner.flat.data == 7.0).any()
    made._epoch += 1
    made._make_group([0])
    assert made.joined and (learner.flat.data == 7.0).all()


def test_only_a_connection_that_fails_breaks_the_group(
    ring: Callable[..., tuple[Ring, Learner]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other errors would come again in the next group: they end the learner."""
    made, learner = ring("sync")
    made._make_group([0])
    assert learner.sync is not None

    def misshapen(grad: torch.Tensor) -> None:
        raise RuntimeError("the sizes of tensors must match")

    def full(tensor: torch.Tensor) -> None:
        raise torch.OutOfMemoryError("no memory")

    def closed(tensor: torch.Tensor) -> None:
        raise RuntimeError("[/pytorch/gloo/pair.cc:534] Connection closed by peer")

    with monkeypatch.context() as m:
        m.setattr(learner, "apply", misshapen)
        with pytest.raises(RuntimeError, match="sizes") as wrong:
            learner.sync(torch.zeros_like(learner.grad), 16)
    assert not isinstance(wrong.value, Broken) and made.joined
    monkeypatch.setattr(dist, "all_reduce", full)
    with pytest.raises(torch.OutOfMemoryError):
        learner.sync(torch.zeros_like(learner.grad), 16)
    assert made.joined
    monkeypatch.setattr(dist, "all_reduce", closed)
    with pytest.raises(Broken):
        learner.sync(torch.zeros_like(learner.grad), 16)
    report = made._report(10)
    assert not made.joined and report.why == "Connection closed by peer"
