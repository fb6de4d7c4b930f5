"""The parameter servers of a cluster, as the supervisor sees them: Ray actors that are watched, and repaired.

When one is lost, all pause; survivors come to the newest version any of them has; a new one begins with the freshest copy of
its part that a learner has, and with the optimiser's state of its last snapshot; then everybody connects anew. Learners repeat the
calls that failed; pushes that are in a version already are not applied again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from qfleet.config import BARRIER_MODES, Config
from qfleet.runtime.actors import ServerActor
from qfleet.runtime.hub import Meeting
from qfleet.runtime.lost import Losses, reason, unless_lost
from qfleet.runtime.team import TeamError
from qfleet.sync.client import Client
from qfleet.sync.shard import Copy, Position, position_in, ranges
from qfleet.sync.wire import CONNECT, Address
from qfleet.types import Array, State

SNAPSHOT = 5.0  # seconds between two copies of the servers' states
REPAIRS = 10  # attempts
ROOM = 20.0  # seconds for a new process to start; later, Ray may have no room for it
SILENT = "did not answer"
SPREAD = {"num_cpus": 1, "scheduling_strategy": "SPREAD"}


class Servers:
    """`freshest`: the newest parameters that a learner has, if they are newer than these. `members`: of every learner, its incarnation, and does
    it take part in updates? `make_room` for a new server, if the cluster is full. `say` at once what all wait for."""

    kind: type[ServerActor] = ServerActor

    def __init__(
        self,
        ray: Any,
        config: Config,
        initial: Array,
        token: str,
        meeting: Meeting,
        freshest: Callable[[Copy], Copy],
        members: Callable[[], Mapping[int, tuple[int, bool]]],
        make_room: Callable[[], None],
        say: Callable[[str], None],
    ) -> None:
        self._ray, self._config, self._token, self._meeting = ray, config, token, meeting
        self._freshest, self._members, self._make_room, self._say = freshest, members, make_room, say
        self._ranges = ranges(len(initial), config.sync.servers)
        self._make = ray.remote(**SPREAD)(self.kind).remote
        self.actors = [self._make(config, i, initial[r], token) for i, r in enumerate(self._ranges)]
        self._serving = [server.serve.remote() for server in self.actors]  # what ends with a server
        self._snapshots: list[State] = [{} for _ in self.actors]
        self._blank: set[int] = set()  # servers that were made anew and have nothing yet
        self._silent: set[int] = set()  # those that did not answer, and were killed for that
        self._asked: dict[Any, int] = {}  # snapshots on their way -> the server's number
        self._asked_at = time.monotonic()
        self._cuts = 0  # that were asked for
        self._said: dict[int, int] = {}  # versions that learners had when they were asked for
        self.notes: list[str] = []  # what the user should know
        self._losses = Losses(ray)
        # What this process has of the parameters. Its client connects at once, and servers that it cannot reach are repaired.
        self._copy: Callable[[], Copy] = lambda: Copy(Position(0, 0, 0.0, {}), initial, initial)
        try:
            self._until_made(self.actors)
            self._connect()
        except ray.exceptions.RayError as e:
            raise TeamError(f"a server could not be made: {reason(e)}") from None
        self.client = Client(config, -1, 0, len(initial), self._find, token, config.sync.heartbeat)
        self.client.newest()
        self._copy = self.client.copy

    def _connect(self) -> None:
        """They listen; the first one knows the others, and looks for them; the hub knows all."""
        ray, patience = self._ray, self._config.sync.heartbeat
        others = ray.get([server.listen.remote([]) for server in self.actors[1:]], timeout=patience)
        first = ray.get(self.actors[0].listen.remote(others), timeout=patience + (CONNECT if others else 0.0))
        self._addresses = [first, *others]
        self._epoch = self._meeting.at_hub(lambda hub: hub.moved(self._addresses))

    def _until_made(self, made: Sequence[Any]) -> None:
        """New servers, for which Ray may have no room for long: without them nobody can go on. Those that run have to answer in time."""
        refs = [server.pid.remote() for server in made]
        _, late = self._ray.wait(refs, num_returns=len(refs), timeout=ROOM)
        if late:
            self._say(f"  note          {no_room(f'{len(late)} of the servers')}; all wait")
        self._ray.get(refs)

    def _find(self, epoch: int, why: str) -> tuple[int, list[Address]]:
        """For this process's own client: servers that fail are repaired."""
        if epoch >= self._epoch:
            self.repair()
        return self._epoch, self._addresses

    # --- looking after them --------------------------------------------------------------------------------------------

    def look_after(self, versions: Mapping[int, int]) -> None:
        """`versions` that learners say they have."""
        ended, _ = self._ray.wait(self._serving, timeout=0)
        complaints, said = self._meeting.at_hub(lambda hub: hub.complained())
        self.notes += said
        if ended or complaints:
            self.repair()
        self._take_snapshots(versions)

    def _take_snapshots(self, versions: Mapping[int, int]) -> None:
        """Of their states, from time to time, without waiting for them. One that does not answer is killed."""
        now, ray, waited = time.monotonic(), self._ray, time.monotonic() - self._asked_at
        done, late = ray.wait(list(self._asked), num_returns=len(self._asked), timeout=0) if self._asked else ([], [])
        for ref in done:
            number = self._asked.pop(ref)
            with unless_lost(ray):
                self._keep(number, ray.get(ref))
        if late and waited > self._config.sync.heartbeat:
            for ref in late:
                self._silent.add(number := self._asked.pop(ref))
                ray.kill(self.actors[number])
        elif not late and waited > SNAPSHOT:
            ahead = [rank for rank, its in self._said.items() if its > self._snapshots[0].get("version", its)]
            self._asked = {server.state.remote(): i for i, server in enumerate(self.actors)}
            self._asked_at, self._said = now, dict(versions)
            self._let_go(ahead)

    def _keep(self, number: int, state: State) -> None:
        more = len(state["missing"]) - len(self._snapshots[number].get("missing", ()))
        self._snapshots[number] = state
        if more > 0:
            self.notes.append(
                f"server {number} did not have its part of {more} pushes: its parameters are without them"
            )

    def _let_go(self, ahead: Sequence[int]) -> None:
        """Servers that were restored may have an older version than a learner that has made all updates of its round: it waits for the others at the
        hub, and they for it at the servers. It is not waited for until it joins again."""
        for rank in ahead if self._config.sync.mode in BARRIER_MODES else ():
            self.client.leave(rank)
            self.notes.append(
                f"learner {rank} had a newer version than the servers, which were restored: it joins again"
            )

    def repair(self) -> None:
        began = time.monotonic()
        for _ in range(REPAIRS):
            with unless_lost(self._ray) as why:  # another one, meanwhile
                lost = self._repair()
                break
        else:
            raise self._hopeless(why)
        self.notes += [f"{what}; all went on after {time.monotonic() - began:.1f} s" for what in lost]

    def _hopeless(self, why: Sequence[str]) -> TeamError:
        return TeamError(
            f"the servers were lost {REPAIRS} times in a row ({why[-1]}). {self._config.run_dir} has what was saved."
        )

    def _how(self, server: int) -> str:
        """What happened to one that does not answer."""
        if server in self._silent:
            return SILENT
        try:
            self._ray.get(self._serving[server], timeout=0)
        except self._ray.exceptions.GetTimeoutError:
            return SILENT
        except self._ray.exceptions.RayError as e:
            return self._losses.how(f"server {server}", e)
        return "ended"

    def _repair(self) -> list[str]:
        """-> what was lost."""
        ray, lost, paused = self._ray, list[str](), dict[int, Any]()
        for i, ref in enumerate([server.pause.remote() for server in self.actors]):
            with unless_lost(ray):
                paused[i] = ray.get(ref, timeout=self._config.sync.heartbeat)
        paused = {i: known for i, known in paused.items() if i not in self._blank}
        dead = [i for i in range(len(self.actors)) if i not in paused]
        how = {i: self._how(i) for i in dead}
        self._silent.update(i for i in dead if how[i] == SILENT)  # should this repair fail, too
        for i in dead:
            ray.kill(self.actors[i])
        copy, members = (self._freshest(self._copy()), self._members()) if dead else (self._copy(), {})
        found: list[Any] = [(copy.position, []), *((position_in(state), []) for state in self._snapshots if state)]
        position, log = max(paused.values() or found, key=lambda known: known[0].version)
        if dead:
            self._make_room()
        for i in dead:
            self.actors[i] = self._make(self._config, i, copy.part(self._ranges[i]).params, self._token)
            self._serving[i] = self.actors[i].serve.remote()
            self._blank.add(i)
        for i in paused:  # what the first one was about to tell them is lost with its connections
            dropped = ray.get(self.actors[i].catch_up.remote(log, bool(dead)), timeout=self._config.sync.heartbeat)
            if dropped and self._config.sync.mode == "window":  # in other modes learners wait for them, and repeat them
                lost.append(f"up to {dropped} pushes that waited for their window were dropped")
        for i in dead:
            state = self._snapshots[i]
            part, saved = copy.part(self._ranges[i]), state.get("version", 0)
            self._until_made([self.actors[i]])
            restored = self.actors[i].restore.remote(state, part, position, members)
            newest = ray.get(restored, timeout=self._config.sync.heartbeat)
            self._blank.discard(i)
            self._silent.discard(i)
            lost.append(
                f"server {i} {how[i]} and was restarted: its parameters are those of version {newest:,} of {position.version:,}, "
                f"the optimiser's state is of version {saved:,}"
            )
        if dead:
            self._asked, self._said = {}, {}
        # Ray may give up a call of a server that lives, as when its machine was out of reach for a moment.
        over, _ = ray.wait(self._serving, num_returns=len(self._serving), timeout=0)
        for i in (self._serving.index(ref) for ref in over):
            self._serving[i] = self.actors[i].serve.remote()
        self._connect()
        return lost

    # --- checkpoints ---------------------------------------------------------------------------------------------------

    def states(self) -> list[State]:
        """All of the same version."""
        patience = self._config.sync.heartbeat
        for _ in range(REPAIRS):
            self._cuts += 1
            self.client.flush(self._cuts)
            with unless_lost(self._ray) as why:
                asked = [server.cut.remote(self._cuts) for server in self.actors]
                states: list[State] = self._ray.get(asked, timeout=patience)
                for number, state in enumerate(states):
                    self._keep(number, state)
                return states
            self.repair()
            patience *= 2  # they may be slow, not hung
        raise self._hopeless(why)

    def load(self, states: Sequence[State]) -> None:
        with unless_lost(self._ray) as why:
            self._ray.get([server.load.remote(state) for server, state in zip(self.actors, states, strict=True)])
        if why:
            raise TeamError(f"a server was lost before the run began: {why[0]}")
        self._snapshots = list(states)

    def close(self) -> None:
        self.client.close()
        for server in self.actors:
            self._ray.kill(server)


def no_room(who: str) -> str:
    return f"{who} did not start within {ROOM:g} s (is there a free CPU in the Ray cluster, and a GPU if they use one?)"
