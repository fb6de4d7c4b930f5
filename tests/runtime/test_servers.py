"""Servers and the process that looks after them, without learners, on a real Ray."""

import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from onray import SETTINGS

from qfleet.config import Config, override
from qfleet.runtime.hub import Meeting
from qfleet.runtime.servers import Servers
from qfleet.sync import client
from qfleet.sync.wire import Address, Gone, Unreachable

INITIAL = np.arange(256, dtype=np.float32)


@pytest.fixture
def made(ray: None) -> Iterator[Callable[[], Servers]]:
    import ray as real

    real.init(address=SETTINGS["address"], log_to_driver=False, logging_level="ERROR")
    config = override(Config(), {"learners": 2, "sync.transport": "server", "sync.servers": 2, "sync.heartbeat": 2.0})
    meeting, there = Meeting(config, "token"), list[Servers]()

    def make() -> Servers:
        nobody = (lambda copy: copy, dict, lambda: None, lambda text: None)
        there.append(Servers(real, config, INITIAL, "token", meeting, *nobody))
        return there[-1]

    yield make
    for servers in there:
        servers.close()
    meeting.close()
    real.shutdown()


def test_servers_that_the_supervisor_never_reaches(
    made: Callable[[], Servers], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As behind a firewall: they answer by way of Ray."""

    def wall(address: Address, *about: Any) -> None:
        raise Gone(f"no server answers at {address[0]} (timed out)")

    monkeypatch.setattr(client, "Connection", wall)
    with pytest.raises(Unreachable, match=r"no server answers at .* \(timed out\), \d+ times in a row.*firewalls"):
        made()


def test_a_server_that_dies_before_the_supervisor_has_reached_it(
    made: Callable[[], Servers], monkeypatch: pytest.MonkeyPatch
) -> None:
    find, killed = Servers._find, list[int]()

    def kill(self: Servers, epoch: int, why: str) -> tuple[int, list[Address]]:
        if not killed:
            killed.append(self._ray.get(self.actors[0].pid.remote()))
            os.kill(killed[0], signal.SIGKILL)
            with pytest.raises(self._ray.exceptions.RayError):
                self._ray.get(self._serving[0])
        return find(self, epoch, why)

    monkeypatch.setattr(Servers, "_find", kill)
    servers = made()
    assert (servers.client.newest().numpy() == INITIAL).all()
    (note,) = servers.notes
    assert note.startswith("server 0 ended and was restarted: its parameters are those of version 0 of 0")


@pytest.mark.timeout(60)
def test_a_server_that_hangs_while_all_connect_anew(
    made: Callable[[], Servers], monkeypatch: pytest.MonkeyPatch
) -> None:
    servers, connect, hung = made(), Servers._connect, list[int]()

    def stop(self: Servers) -> None:
        if not hung:
            hung.append(self._ray.get(self.actors[1].pid.remote()))
            os.kill(hung[0], signal.SIGSTOP)
        connect(self)

    monkeypatch.setattr(Servers, "_connect", stop)
    servers.repair()
    assert (servers.client.newest().numpy() == INITIAL).all()
    (note,) = servers.notes
    assert note.startswith("server 1 did not answer and was restarted")
