"""Learners and parameter servers as Ray actors; this process supervises them.

    this process: Trainer ── Fleet ──┬─ hub        on a thread: who is there, how far they are, what they should do
      (log, evaluate, stop, repair)  ├─ servers    shards of the parameters (qfleet.sync.server)
                                     └─ learners   each a Worker: environments, replay, learner

| who        | waits for                                  | unblocked by        |
|------------|--------------------------------------------|---------------------|
| supervisor | news at the hub, at most PATIENCE seconds  | any report, or time |

A learner that is lost is replaced; the others do not wait for the new one, which Ray may have no room for until a machine joins the
cluster. Servers are repaired (runtime.servers).

Who waits inside the actors: runtime.actors, runtime.hub. Shutdown: the hub says stop, learners end after their round and wait for
the final checkpoint, `close` kills what is left.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch._C._distributed_c10d import TCPStore

from qfleet import envs, machine, rng
from qfleet.config import Config, ConfigError, override
from qfleet.learner import ALIGN, Flat, Learned, Learner
from qfleet.runtime import checkpoint, resources, servers
from qfleet.runtime.actors import LearnerActor, part_of
from qfleet.runtime.checkpoint import Checkpoints
from qfleet.runtime.failing import Exploded
from qfleet.runtime.hub import Meeting
from qfleet.runtime.lost import Losses, Remote, failure, unless_lost
from qfleet.runtime.member import Place, added
from qfleet.runtime.servers import SPREAD, Servers, no_room
from qfleet.runtime.setup import kind_of, summary, team_line
from qfleet.runtime.team import TeamError
from qfleet.runtime.told import Told
from qfleet.runtime.worker import EXPLODED, tensors
from qfleet.sync.shard import Copy, Position
from qfleet.sync.wire import Gone
from qfleet.types import State

PATIENCE = 0.25  # seconds in which the supervisor looks after the others even if there is no news
BREAKS = 3  # of a group of learners in a row, though all are there: it will never do
ANSWER = 1.0  # seconds for a learner to say which version it has
FETCH = 2  # heartbeats for one to give its parameters: who holds it up is found before


class Saving(NamedTuple):
    """A checkpoint that was asked for."""

    step: int
    of: dict[int, int]  # learners, and their incarnations
    checkpoints: Checkpoints
    more: State


class Fleet:
    """All of them together, as the trainer sees a worker. `say` what cannot wait for the next round."""

    def __init__(self, config: Config, say: Callable[[str], None]) -> None:
        try:
            import ray
        except ImportError:
            raise ConfigError(
                f"learners is {config.learners}, which needs Ray: {machine.install('ray')}. (Or start them with torchrun, see docs/sync.md.)"
            ) from None
        self._ray, self._say, self._losses = ray, say, Losses(ray)
        self._open = contextlib.ExitStack()
        self.device, self.threads = torch.device("cpu"), machine.cores()
        resources.check(config)
        if not ray.is_initialized():
            resources.reach(resources.address_of(config))
        transport = "server" if config.sync.transport == "auto" else config.sync.transport
        self.config = config = override(config, {"sync.transport": transport, "device": kind_of(config.device)})
        self._shards = config.sync.servers if transport == "server" else 0  # servers
        self._theirs = override(config, {"run_dir": str(Path(config.run_dir).absolute())})
        sample = envs.make(config.env, seed=rng.derive(config.seed, "sample"), num_envs=1, threads=1)
        self._open.callback(sample.close)
        self.envs = sample
        self.steps = 0
        self.team = Orderer(self)
        self.told = Told(config.learners)
        self.reported: list[int] = []  # who did last
        self._unread: Learned | None = None  # what was told while a checkpoint was written
        self._saved = 0  # step of the newest checkpoint that was asked for
        self._final = False  # the last one is complete
        self._saving: Saving | None = None
        self._writing = False  # or it failed
        self._notes: list[str] = []
        self._expected: dict[int, float] = {}  # learners that will take the place of others -> since when
        self._breaks = 0  # of the learners' group, that were seen
        self._absent: set[int] = set()  # those that Ray seems to have no room for
        self._released: set[int] = set()  # those that waited for room, and do so again
        self.failure: Exception | None = None  # of a learner: it would fail again
        self._resuming: set[int] = set()  # learners that were given a part of a checkpoint, and have not reported since
        self._versions: dict[int, int] = {}  # that learners said they have

    def summary(self) -> list[str]:
        c = self.config
        servers = f"with {self._shards} server{'s' if self._shards > 1 else ''}" if self._shards else "by all-reduce"
        return [
            *summary(c, self.envs, c.device if c.replay.device == "auto" else c.replay.device),
            team_line(c, f"on Ray {servers}"),
        ]

    # --- making ------------------------------------------------------------------------------------------------------

    def build(self) -> None:
        ray, config = self._ray, self.config
        first = Learner(config, self.envs.spec, self.device)
        self._net, self.flat = first.net, first.flat
        initial = first.flat.data.numpy().copy()
        if self._shards > (most := len(initial) // ALIGN):
            raise ConfigError(
                f"sync.servers is {self._shards}, but the {len(initial):,} parameters of this network can be cut into {most:,} parts at most."
            )
        self._say("  starting      Ray and all of them: some seconds")
        self._gpus, self._here = self._open.enter_context(resources.joined(ray, config, self._shards))
        self._newest = Copy(Position(-1, -1, 0.0, {}), initial, initial)
        self._token = secrets.token_hex(16)
        self._meeting = Meeting(self._theirs, self._token)
        self._open.callback(self._meeting.close)
        self._make_learner = ray.remote(max_concurrency=2, num_gpus=self._gpus, **SPREAD)(LearnerActor).remote
        self._incarnations = [0] * config.learners
        self._learners: list[Any] = [None] * config.learners
        self._how_made = [(False, 0)] * config.learners  # the newest of each: late? resumed from which step?
        self._running: dict[Any, int] = {}  # what ends with a learner -> its rank
        self._open.callback(self._kill_learners)
        self._address = str(ray.util.get_node_ip_address())
        self.servers: Servers | None = None
        if self._shards:
            about = (initial, self._token, self._meeting)
            self.servers = Servers(ray, self._theirs, *about, self._freshest, self._members, self._make_room, self._say)
            self._open.callback(self.servers.close)
        else:
            self._store = TCPStore(self._address, 0, is_master=True, wait_for_workers=False)
        self._looked = time.monotonic()

    def _new_learner(self, rank: int, late: bool = False, resume: int = 0) -> None:
        hub = (self._address, self._meeting.port)
        store = (self._address, 0 if self._shards else self._store.port)
        place = Place(rank, self._incarnations[rank], late, hub, store, self._token, self._here)
        self._learners[rank] = self._make_learner(self._theirs, place, resume)
        self._how_made[rank] = late, resume

    def _run(self) -> None:
        """Learners begin when all of them are made. Who is lost before is made again."""
        making = {learner.ready.remote(): rank for rank, learner in enumerate(self._learners)}
        began, said, heartbeat = time.monotonic(), False, self.config.sync.heartbeat
        while making:
            made, _ = self._ray.wait(list(making), num_returns=len(making), timeout=PATIENCE)
            lost = self._meeting.at_hub(lambda hub: hub.ailing(heartbeat))
            for ref in made:
                if what := self._lost_while_made(ref, rank := making.pop(ref)):
                    lost[rank] = what
            for rank, what in lost.items():
                making = {ref: r for ref, r in making.items() if r != rank}
                making[self._make_again(rank, what)] = rank
            if self.servers is not None:
                self.servers.look_after(self._versions)
            if making and not said and time.monotonic() - began > servers.ROOM:
                said = True
                self._say(f"  note          {no_room(f'{len(making)} of the learners')}; all wait")
        self._running = {learner.run.remote(): rank for rank, learner in enumerate(self._learners)}

    def _lost_while_made(self, ref: Any, rank: int) -> str:
        """-> what happened to it, if it was lost. One that fails by itself would fail again: the run ends."""
        errors = self._ray.exceptions
        try:
            self._ray.get(ref)
        except errors.RayError as e:
            died = isinstance(e, errors.RayActorError) and not e.actor_init_failed
            if died or isinstance(e, errors.OutOfMemoryError):
                return self._losses.how(who(rank), e)
            failed = failure("a learner could not be made", e)
            raise failed from failed.__cause__
        return ""

    def _make_again(self, rank: int, what: str) -> Any:
        """In the place of one that has done nothing yet: as if that had never been, so with its part of a checkpoint -> what is there when it is made."""
        self._losses.in_vain(who(rank), what)
        self._ray.kill(self._learners[rank])
        self._meeting.at_hub(lambda hub: hub.live.pop(rank, None))
        self._new_learner(rank, *self._how_made[rank])
        self._say(f"  note          {who(rank)} {what} while it was made: a new one takes its place")
        return self._learners[rank].ready.remote()

    def start(self) -> None:
        for rank in range(self.config.learners):
            self._new_learner(rank)
        self._run()

    def _kill_learners(self) -> None:
        for learner in self._learners:
            if learner is not None:
                self._ray.kill(learner)

    # --- rounds --------------------------------------------------------------------------------------------------------

    @property
    def over(self) -> bool:
        return self.team.stopping or self.steps >= self.config.total_steps

    def round(self) -> Learned | None:
        """Whatever was reported since the last time."""
        learned, self._unread = added(self._unread, self._news(PATIENCE)), None
        self._look_after()
        if self._saving is not None and not self.over and self._all_saved():
            self._complete()
        return added(learned, self.settle()) if self.over else learned

    def settle(self) -> Learned | None:
        """At the end, when all learners that are there have come to theirs: what they said last."""
        self._check_stranded()
        learned: Learned | None = None
        while self.over and not self._meeting.at_hub(lambda hub: hub.live.keys() <= hub.ended):
            learned = added(learned, self._news(PATIENCE))
            self._look_after()
        return learned

    def _news(self, seconds: float) -> Learned | None:
        learned: Learned | None = None
        self.steps, reports = self._meeting.news(seconds)
        self.reported = [report.rank for report in reports]
        for report in reports:
            if report.incarnation != self._incarnations[report.rank]:
                continue
            self.told.add(report)
            if report.rank not in self._versions:
                self._losses.worked(who(report.rank))
            self._versions[report.rank] = report.version
            self._expected.pop(report.rank, None)
            self._resuming.discard(report.rank)
            if report.rank in self._absent:
                self._absent.remove(report.rank)
                self._notes.append(f"step {self.steps:,}: learner {report.rank} has joined")
            learned = added(learned, report.learned)
        return learned

    # --- what is lost is replaced -----------------------------------------------------------------------------------------

    def _look_after(self) -> None:
        """Replace who died, was disconnected, is stuck, or gives no sign of life. A learner that failed by itself would fail again: the run ends."""
        ray = self._ray
        if self.servers is not None:
            self.servers.look_after(self._versions)
        else:
            self._look_after_group()
        if failed := self._meeting.at_hub(lambda hub: hub.failed):
            rank, what, trace = failed
            error = TeamError(f"{who(rank)} failed: {what}")
            error.__cause__ = Remote(trace) if trace else None
            if self.failure is None and self.servers is not None:
                self.servers.client.leave(rank)  # where it cannot reach them itself, others would wait for it
            self._fail(error)
        ended, _ = (
            ray.wait(list(self._running), num_returns=len(self._running), timeout=0) if self._running else ([], [])
        )
        for ref in ended:
            rank = self._running.pop(ref)
            try:
                ray.get(ref)
            except ray.exceptions.RayTaskError as e:
                if isinstance(e.cause, Gone):
                    self._replace(rank, "was disconnected")
                else:
                    self._give_up(rank, failure(f"{who(rank)} failed", e))
            except ray.exceptions.UnserializableException as e:  # an error that cannot travel: its text did
                self._give_up(rank, failure(f"{who(rank)} failed", e))
            except ray.exceptions.RayError as e:
                if isinstance(e, ray.exceptions.RayActorError) and e.actor_init_failed:
                    self._give_up(rank, failure(f"{who(rank)} could not be made", e))
                else:
                    self._replace(rank, "ended", e)
        heartbeat = self.config.sync.heartbeat
        if time.monotonic() - self._looked > heartbeat / 4:
            self._looked = time.monotonic()
            live, ailing = self._meeting.at_hub(lambda hub: (set(hub.live), hub.ailing(heartbeat)))
            for rank, what in ailing.items():
                self._replace(rank, what)
            late = [r for r, since in self._expected.items() if time.monotonic() - since > servers.ROOM]
            for rank in set(late) - live:
                del self._expected[rank]
                self._absent.add(rank)
                self._notes.append(f"step {self.steps:,}: {no_room(who(rank))}; the others go on without it")

    def _look_after_group(self) -> None:
        """Learners that are all there, and cannot reach each other, would never learn anything."""
        breaks, why = self._meeting.at_hub(lambda hub: (hub.breaks, hub.why))
        if breaks >= BREAKS:
            raise TeamError(
                f"the learners could not form a group {breaks} times in a row ({why}). They connect to each other directly: the host name of every machine must stand for an address "
                "that the others reach (not 127.0.0.1 or 127.0.1.1; or GLOO_SOCKET_IFNAME, set for Ray's processes, names its network interface), and no firewall may be between them. "
                "Or let them agree by way of servers: --sync.transport server."
            )
        if breaks > self._breaks:
            self._notes.append(f"step {self.steps:,}: the group of learners broke ({why}): they make another one")
        self._breaks = breaks

    def _replace(self, rank: int, what: str, error: Exception | None = None) -> None:
        """`error`: what Ray says of its end."""
        if not self.over:
            try:
                what = what if error is None else self._losses.how(who(rank), error)
                if rank not in self._versions and rank not in self._released:
                    self._losses.in_vain(who(rank), what)
            except TeamError as hopeless:
                return self._give_up(rank, hopeless)
        self._remove(rank)
        if not self.over:
            self._new_learner(rank, late=True)
            self._running[self._learners[rank].run.remote()] = rank
            self._expected[rank] = time.monotonic()
        then = "" if self.over else ": a new one takes its place"
        if then and self._incarnations[rank] > 1:
            then += f" ({who(rank)} was lost {self._incarnations[rank]} times by now)"
        self._notes.append(f"step {self.steps:,}: {who(rank)} {what}{then}")

    def _fail(self, why: TeamError) -> None:
        """All come to their end, and save their parts, before the run fails."""
        if self.failure is None:
            self.failure = why
            self._say(f"  note          step {self.steps:,}: {why}; who can saves its part, and the run ends")
            self.team.stop()

    def _give_up(self, rank: int, why: TeamError) -> None:
        """A learner that could not save its part."""
        if rank in self._resuming:  # nor go on from it: the checkpoint stays as it is
            raise why
        self._fail(why)
        self._remove(rank)

    def _remove(self, rank: int) -> None:
        self._ray.kill(self._learners[rank])
        self._meeting.at_hub(lambda hub: hub.leave(rank))
        if self.servers is not None:
            self.servers.client.leave(rank, self._incarnations[rank] + 1)
        self.told.remove(rank)
        self._versions.pop(rank, None)
        self._running = {ref: r for ref, r in self._running.items() if r != rank}
        self._expected.pop(rank, None)
        self._released.discard(rank)
        self._resuming.discard(rank)
        self._incarnations[rank] += 1

    def _make_room(self) -> None:
        """A learner that waits for room shall not get that of a server that ended: it is asked for again, later."""
        live = self._meeting.at_hub(lambda hub: set(hub.live))
        self._released = {*self._expected, *self._absent} - live
        for rank in self._released:
            self._ray.kill(self._learners[rank])

    def _living(self, ask: Callable[[Any], Any]) -> dict[int, Any]:
        """The answers of those learners that give one at once."""
        live = self._meeting.at_hub(lambda hub: list(hub.live))
        asked = {ask(self._learners[rank]): rank for rank in live}
        done, _ = self._ray.wait(list(asked), num_returns=len(asked), timeout=ANSWER) if asked else ([], [])
        answers = {}
        for ref in done:
            with unless_lost(self._ray):
                answers[asked[ref]] = self._ray.get(ref)
        return answers

    def _members(self) -> dict[int, tuple[int, bool]]:
        """Of every learner: its incarnation, and does it take part in updates?"""
        joined = self._living(lambda learner: learner.joined.remote())
        return {rank: (number, bool(joined.get(rank))) for rank, number in enumerate(self._incarnations)}

    def _freshest(self, mine: Copy) -> Copy:
        """The newest parameters that a learner has, if they are newer than mine."""
        versions = self._living(lambda learner: learner.version.remote())
        for rank in sorted(versions, key=lambda r: -versions[r]):
            if versions[rank] <= mine.position.version:
                break
            # One that waits for another, which hangs, does not answer: see _look_after.
            with unless_lost(self._ray):
                found: Copy = self._ray.get(self._learners[rank].copy.remote(), timeout=ANSWER)
                return found
        return mine

    # --- what is seen of it ---------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def lend(self) -> Iterator[Flat]:
        self._look()
        yield self.flat

    def exploded(self) -> bool:
        self._look()
        return self._out_of_range()

    def _out_of_range(self) -> bool:
        return not bool(self.flat.data.abs().max() < EXPLODED)

    def _look(self) -> None:
        if old := self._pull():
            self._notes.append(f"step {self.steps:,}: {old}")

    def _pull(self) -> str:
        """The newest parameters -> what to say when there were none to be had."""
        if self.servers is not None:
            self.flat.data.copy_(self.servers.client.newest())
            return ""
        old = self._fetch()
        self.flat.data.copy_(torch.tensor(self._newest.params))
        return old

    def _fetch(self) -> str:
        """By all-reduce: parameters as new as those that learners have now. One that waits in an update for another gives them afterwards: meanwhile
        all are looked after, so that one that hangs is found, and is not waited for."""
        seconds = FETCH * self.config.sync.heartbeat
        until = time.monotonic() + seconds
        while True:
            versions = self._living(lambda learner: learner.version.remote())
            theirs = max([*self._versions.values(), *versions.values()], default=-1)
            if versions and self._newest.position.version < theirs:
                self._copy_from(max(versions, key=lambda rank: versions[rank]), until)
            mine = self._newest.position.version
            silent = not versions and self._meeting.at_hub(lambda hub: bool(hub.live))
            if mine >= theirs and not silent:
                return ""
            if time.monotonic() > until:
                return f"no learner gave its newest parameters within {seconds:g} s: those after {max(mine, 0):,} updates are older than theirs"
            self._look_after()

    def _copy_from(self, rank: int, until: float) -> None:
        asked, done = self._learners[rank].copy.remote(), list[Any]()
        while not done and time.monotonic() < until:
            done, _ = self._ray.wait([asked], timeout=PATIENCE)
            if not done:
                self._look_after()
        if done:
            with unless_lost(self._ray):
                self._newest = self._ray.get(asked)

    def note(self) -> str:
        if self.servers is not None:
            self._notes += [f"step {self.steps:,}: {note}" for note in self.servers.notes]
            self.servers.notes.clear()
        return self._notes.pop(0) if self._notes else ""

    def values(self) -> dict[str, float]:
        return self.told.values()

    def waiting(self) -> float | None:
        return None

    def awaited(self) -> str:
        return ""

    def kill(self) -> None:
        self.close()

    def clock(self) -> dict[str, float]:
        return self.told.clock(self.steps)

    # --- checkpoints -------------------------------------------------------------------------------------------------------

    def save(self, checkpoints: Checkpoints, more: State, stuck: bool = False) -> None:
        """Learners save their parts after their round; then this process saves the servers' states. Where learners do not wait for each other, they
        go on meanwhile, and so does this process (`round`), but at the end."""
        if self._final:
            return
        self._check_stranded()
        if self._saving is not None and not self.over:
            return  # the one before is not complete yet
        step = max(self.steps, self._saved + 1)
        self._saved = step
        asked = self._meeting.at_hub(lambda hub: hub.save(step, final=self.over))
        self._saving = Saving(step, asked, checkpoints, more)
        if not (self.config.sync.together or self.over):
            return
        ending = self.over
        while not self._all_saved():
            self._unread = added(self._unread, self._news(PATIENCE))
            self._look_after()
            if self.over and not ending:  # meanwhile they came to their end
                ending = True
                self._meeting.at_hub(lambda hub: hub.save(step, final=True))
        self._complete()
        self._final = ending

    def _check_stranded(self) -> None:
        """Something failed while a checkpoint was made: learners may be waiting for it, and will not come to their end."""
        if self._writing or (self._saving is not None and self.config.sync.together):
            raise TeamError("the one before could not be completed")

    def _all_saved(self) -> bool:
        """All of those that are still there."""
        assert self._saving is not None
        step, of, *_ = self._saving
        return not self._meeting.at_hub(lambda hub: hub.parts(step, of))[1]

    def _complete(self) -> None:
        """This process's part of a checkpoint comes last."""
        assert self._saving is not None
        step, of, checkpoints, more = self._saving
        parts, _ = self._meeting.at_hub(lambda hub: hub.parts(step, of))
        if not self._any_part(step, parts):
            if self.failure is not None:
                raise self.failure  # the checkpoint before has more
            if (before := step_of_newest(checkpoints.dir)) and self._any_part(before, range(self.config.learners)):
                self._say(
                    f"  note          step {self.steps:,}: no learner is left that saved its part of this checkpoint: the one at step {before:,}, which has parts, stays the newest"
                )
                return self._completed(step)
        self._writing = True
        states = [] if self.servers is None else self.servers.states()
        if old := self._pull():
            raise TeamError(f"the checkpoint at step {step:,} could not be completed: {old}. If they are many, or the network is slow, raise --sync.heartbeat.")  # fmt: skip
        if self._out_of_range():  # since it was asked for: the one before is the last good one, and stays whole
            raise Exploded("the parameters exploded")
        parts, _ = self._meeting.at_hub(lambda hub: hub.parts(step, of))  # somebody may have been lost meanwhile
        model = self._net.state_dict()
        about = {"servers": states, "hub": self._meeting.at_hub(lambda hub: hub.state(parts)), "incarnations": self._incarnations, "updates": self.told.updates, "version": self._newest.position.version, "parts": parts}  # fmt: skip
        checkpoints.save_state(
            step, {"spec": asdict(self.envs.spec), "learner": {"model": model}, "cluster": about, **more}
        )
        self._completed(step)

    def _completed(self, step: int) -> None:
        """Learners go on, and give up what they kept for the checkpoint before."""
        self._meeting.at_hub(lambda hub: hub.complete(step))
        self._saving, self._writing = None, False

    def _any_part(self, step: int, ranks: Iterable[int]) -> bool:
        return any(self._part(rank, step).exists() for rank in ranks)

    def _part(self, rank: int, step: int) -> Path:
        """A learner's part of a checkpoint."""
        return Checkpoints(part_of(self._theirs, rank), self.config.runtime.keep).folder(step)

    def load(self, checkpoints: Checkpoints) -> State:
        """Learners whose part of the newest checkpoint is missing begin anew, as if they had been lost."""
        folder = checkpoint.newest(checkpoints.dir)
        state, _ = checkpoint.read(folder)
        about, step = state["cluster"], int(state["step"])
        self._saved, self._incarnations, self.told.updates = step, about["incarnations"], about["updates"]
        if self.servers is not None:
            self.servers.load(about["servers"])
        else:  # learners that have not loaded their parts yet have nothing newer
            self._net.load_state_dict(tensors(state["learner"]["model"]))
            params = self.flat.data.numpy().copy()
            self._newest = Copy(Position(about.get("version", 0), 0, 0.0, {}), params, params)
        present = [r for r in about["parts"] if self._part(r, step).exists()]
        self._meeting.at_hub(lambda hub: hub.load_state(about["hub"], present))
        self.team.lr_scale = about["hub"]["lr_scale"]
        self.steps = about["hub"]["total"]
        for rank in range(self.config.learners):
            if rank not in present:
                self._incarnations[rank] += 1
                self._notes.append(f"learner {rank} has no part of the checkpoint at step {step:,}: it begins anew")
            self._new_learner(rank, late=rank not in present, resume=step if rank in present else 0)
        self._resuming = set(present)
        self._run()
        return state

    def close(self) -> None:
        self._open.close()


def step_of_newest(folder: Path) -> int:
    """Of the checkpoints there; 0: there is none."""
    saved = checkpoint.steps(folder)
    return int(saved[-1].name.removeprefix("step_")) if saved else 0


def who(rank: int) -> str:
    return f"learner {rank}"


class Orderer:
    """The team as the supervisor sees it: what it says, all do."""

    def __init__(self, fleet: Fleet) -> None:
        self.size = fleet.config.learners
        self._fleet, self.stopping, self._scale = fleet, False, 1.0

    @property
    def lr_scale(self) -> float:
        return self._scale

    @lr_scale.setter
    def lr_scale(self, value: float) -> None:
        self._scale = value
        self._order()

    def stop(self) -> None:
        self.stopping = True
        self._order()

    def _order(self) -> None:
        self._fleet._meeting.at_hub(lambda hub: hub.order(stop=self.stopping, lr_scale=self._scale))
