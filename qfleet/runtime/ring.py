"""All-reduce among learners on a cluster: a group of torch.distributed that is made anew when a learner is lost or joins.

| who        | waits for                                   | unblocked by                                              |
|------------|---------------------------------------------|-----------------------------------------------------------|
| an update  | the same one of all others in the group     | them; when one dies, its connections break: the update is |
|            |                                             | given up everywhere. One that hangs is killed; where its  |
|            |                                             | machine is gone nothing breaks but by the time limit      |
| new group  | all its members                             | them, or its time limit: then it is as if one had died    |

The hub names the group with the orders of a round, so all its members make it after the same round. Then all take over the
parameters of whoever has made most updates; updates that were given up are due again (in local modes the next exchange
comes when it would have: the one that was given up is not made). Why a group broke is told with the next report; the hub counts how
often it does though everybody is there.
"""

from __future__ import annotations

import gc
import threading
from datetime import timedelta

import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, TCPStore

from qfleet.config import Config
from qfleet.device import settle
from qfleet.learner import Learner
from qfleet.runtime.hub import BROKEN, READY, WAITING
from qfleet.runtime.member import Member, Place
from qfleet.runtime.team import NONE, Broken
from qfleet.sync.allreduce import Cut, among_others
from qfleet.sync.balance import Balance
from qfleet.sync.group import Group
from qfleet.sync.shard import Copy, Position
from qfleet.sync.traffic import Traffic
from qfleet.types import State


class Ring(Member):
    """The team as a learner sees it that has no servers."""

    def __init__(self, config: Config, place: Place) -> None:
        super().__init__(config, place)
        self._store = place.store
        self._group: Group | None = None
        self._epoch, self._in_group = 0, False
        self._begun = False  # its own parameters are those it shall begin with
        self._loaded: State = {}
        self._whole = threading.Lock()  # parameters change while it is held
        self._learner: Learner | None = None

    @property
    def traffic(self) -> Traffic:
        return NONE if self._group is None else self._group.traffic

    @property
    def joined(self) -> bool:
        return self._in_group

    @property
    def version(self) -> int:
        return -1 if self._learner is None else self._learner.updates

    def attach(self, learner: Learner) -> None:
        self._learner, self.entered = learner, not self._late
        learner.sync = self._agree
        if weights := self._config.sync.weights:
            learner.batch_size = Balance(learner.batch_size, weights).share(self.rank, range(self.size))

    def _fit(self, steps: int) -> str:
        """A late one takes part when it has something to learn from."""
        if self._late and self._group is None and steps * self.size < self._config.first_update:
            return WAITING
        return BROKEN if self._epoch and not self._in_group else READY

    def meet(self, steps: int) -> int:
        """Nothing is being learned now."""
        total = super().meet(steps)
        if self.orders.epoch > self._epoch:
            self._epoch = self.orders.epoch
            self._leave_group()
            if self.rank in self.orders.members:
                self._make_group(list(self.orders.members))
        return total

    def enter(self, learner: Learner, own: int = 0) -> bool:
        return self._in_group

    def _agree(self, grad: Tensor, samples: int) -> None:
        assert self._group is not None
        try:
            with self._whole:
                self._group.agree(grad, samples)
        except Cut as e:
            self._leave_group(str(e))
            raise Broken(str(e)) from None

    def _make_group(self, members: list[int]) -> None:
        """It may fail like an update: then the hub hears of it, and names another one."""
        # Of updates, too: nobody who is silent for longer is still in the group, but its machine may not have told so.
        limit = timedelta(seconds=3 * self._config.sync.heartbeat)
        assert self._learner is not None
        try:
            with among_others():
                found = PrefixStore(f"group {self._epoch}", TCPStore(*self._store, timeout=limit))
                dist.init_process_group(
                    "gloo", store=found, rank=members.index(self.rank), world_size=len(members), timeout=limit
                )
            if self._group is None:
                self._group = Group(self._config, self._learner)
            if self._loaded:
                self._group.load_state(self._loaded)
                self._loaded, self._begun = {}, True
            with self._whole:
                self._group.adopt()
                if not self._begun:
                    self._group.begin()
            self._begun = self._in_group = self.entered = True
        except Cut as e:
            self._leave_group(str(e))

    def _leave_group(self, why: str = "") -> None:
        """Breaks the connections, so that others who wait for this one notice."""
        self._in_group, self._why = False, why
        if dist.is_initialized():
            dist.destroy_process_group()
            gc.collect()

    def copy(self) -> Copy:
        learner = self._learner
        assert learner is not None
        with self._whole:
            settle(learner.device)
            params, target = (flat.data.to("cpu", copy=True).numpy() for flat in (learner.flat, learner.target))
            return Copy(Position(learner.updates, 0, 0.0, {}), params, target)

    def state(self) -> State:
        return self._loaded if self._group is None else self._group.state()

    def load_state(self, state: State) -> None:
        """When there is a group again."""
        self._loaded = state

    def fail(self, what: str, trace: str) -> None:
        with self._whole:
            self._leave_group(what)  # the others may be waiting for it in an update
        super().fail(what, trace)

    def close(self) -> None:
        self._leave_group()
        super().close()
