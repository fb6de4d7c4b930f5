"""The team as a learner on a cluster sees it: it meets the others at the hub, and agrees with them by way of servers.

| who              | waits for                                       | unblocked by                                           |
|------------------|-------------------------------------------------|--------------------------------------------------------|
| a round          | the hub (runtime.hub)                           | see there                                              |
| a push           | as the policy says (qfleet.sync.server)         | others, or the supervisor, which removes the dead      |
| heartbeat        | its next turn                                   | time; it ends with the learner                         |
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple

from qfleet.config import Config
from qfleet.learner import Learned, Learner
from qfleet.runtime.hub import READY, Orders, Report, identity
from qfleet.runtime.team import Alone
from qfleet.sync.client import Client
from qfleet.sync.shard import Copy
from qfleet.sync.traffic import Traffic
from qfleet.sync.wire import Address, Connection
from qfleet.types import State


def added(a: Learned | None, b: Learned | None) -> Learned | None:
    """Both together; the mean value is the newer one's."""
    if a is None or b is None:
        return a or b
    return Learned(a.loss_sum + b.loss_sum, b.q_mean, a.updates + b.updates)


class Place(NamedTuple):
    """Where a learner stands in its cluster."""

    rank: int
    incarnation: int  # how many were there before it
    late: bool  # it takes the place of one that was lost, while others go on
    hub: Address
    store: Address  # where the members of a group that reduces find each other
    token: str
    here: int  # learners on a machine


class Member(Alone):
    """The team as a learner on the cluster sees it."""

    def __init__(self, config: Config, place: Place) -> None:
        self.rank, self.size, self.here = place.rank, config.learners, place.here
        self._config, self._incarnation, self._late = config, place.incarnation, place.late
        # Three of them, since one is used by one thread: this one's, the learner's, the heartbeat's.
        self._hub, self._directory, self._pulse = (Connection(place.hub, place.token) for _ in range(3))
        self._token = place.token
        self.client: Client | None = None
        self._finished = threading.Event()
        self._learned: Learned | None = None
        self._values: dict[str, float] = {}
        self._clock: dict[str, float] = {}
        self._pending = False  # an answer of the hub is on its way
        self._together = config.sync.together
        self._round, self._total = 0, 0
        self.stuck: Callable[[], str] = str  # what happened, when its environments do not answer
        # Steps of the checkpoint to take part in, of the one it is saving, and of the last one it did save.
        self.save_as = self.saving = self.saved_as = 0
        self.complete = 0  # step of the newest one that all have saved
        self.entered = False  # it has taken part in updates
        self._why = ""  # its group broke, or could not be made
        if not place.late:
            self.join()

    @property
    def traffic(self) -> Traffic:
        assert self.client is not None
        return self.client.traffic

    def join(self) -> None:
        """From now on the others wait for it, in modes in which they do; and it must give signs of life."""
        me = [self.rank, self._incarnation]
        (self._round, self.saved_as), _ = self._hub("join", [*me, identity(self._config)]).receive()
        seconds = self._config.sync.heartbeat / 4

        def beat() -> None:
            while not self._finished.wait(seconds):
                self._pulse("beat", [*me, self.stuck()]).receive()

        threading.Thread(target=beat, name="heartbeat", daemon=True).start()

    def _find(self, epoch: int, why: str) -> tuple[int, Sequence[Address]]:
        (newest, addresses), _ = self._directory("where", [self.rank, epoch, why]).receive()
        return newest, [(host, port) for host, port in addresses]

    def attach(self, learner: Learner) -> None:
        size = len(learner.flat.data)
        self.client = Client(self._config, self.rank, self._incarnation, size, self._find, self._token)
        if not self._late:
            self.enter(learner)
        else:  # to act with, until it enters
            learner.flat.data.copy_(self.client.newest())

    def enter(self, learner: Learner, own: int = 0) -> bool:
        """The first ones are there before anybody begins. A later one joins between two rounds of the others, at the hub, and
        takes part in updates from its first own: earlier, they would wait for it while it waits for them."""
        assert self.client is not None
        if not self.client.joined:
            if self._late and own * self.size < self._config.first_update:
                return False
            self.client.attach(learner)
            self.entered = True
        return True

    def tell(self, learned: Learned | None, values: dict[str, float], clock: dict[str, float]) -> None:
        """What the next report holds, besides the steps."""
        self._learned, self._values, self._clock = added(self._learned, learned), values, clock

    def _report(self, steps: int) -> Report:
        told = (self._learned, self._values, self._clock, self._fit(steps), self.version, self._why)
        self._round, self._learned = self._round + 1, None
        return Report(self.rank, self._incarnation, self._round - 1, steps, *told)

    def _fit(self, steps: int) -> str:
        """For a group of learners that reduce together."""
        return READY

    def meet(self, steps: int) -> int:
        self._hub("report", self._report(steps))
        # Where nobody waits for anybody, the answer to the report before is new enough.
        if self._together or self._pending:
            self._take_orders()
        self._pending = not self._together
        return max(self._total, steps)

    def _take_orders(self) -> None:
        self._pending = False
        answer, _ = self._hub.receive()
        self.orders = Orders(*answer)
        self._total, self.stopping, self.lr_scale, self.save_as = self.orders[:4]
        self.complete = self.orders.complete

    def counted(self, own: int, total: int) -> int:
        return total if self._together else own * self.size

    def last(self, steps: int) -> None:
        """It has come to its end, and nobody waits for it any more; returns when the final checkpoint is wanted."""
        if self._pending:
            self._take_orders()
        if self.client is not None and self.client.joined:
            self.client.leave()
            self.client.joined = False
        self.save_as, _ = self._hub("last", self._report(steps)).receive()

    def fail(self, what: str, trace: str) -> None:
        """It comes to its end because of an error; so shall the others."""
        if self._pending:
            self._take_orders()
        self._hub("fail", [self.rank, self._incarnation, what, trace]).receive()

    def wait(self) -> bool:
        """Its part of the checkpoint `saving` is saved. -> are those of the others?"""
        if self._pending:
            self._take_orders()
        complete, _ = self._hub("saved", [self.rank, self.saving]).receive()
        return bool(complete)

    @property
    def joined(self) -> bool:
        """Does it take part in updates?"""
        return self.client is not None and self.client.joined

    @property
    def version(self) -> int:
        """Of the parameters it has."""
        return -1 if self.client is None else self.client.version

    def copy(self) -> Copy:
        """Of the parameters, from any thread."""
        assert self.client is not None
        return self.client.copy()

    def state(self) -> State:
        assert self.client is not None
        return self.client.state()

    def load_state(self, state: State) -> None:
        assert self.client is not None
        self.client.load_state(state)

    def close(self) -> None:
        self._finished.set()
        if self.client is not None:
            self.client.close()
