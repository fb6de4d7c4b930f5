"""Learners and parameter servers as Ray actors; this process supervises them.

    this process: Trainer ── Fleet ──┬─ hub        on a thread: who is there, how far they are, what they should do
      (log, evaluate, stop, repair)  ├─ servers    shards of the parameters (qfleet.sync.server)
                                     └─ learners   each a Worker: environments, replay, learner

| who        | waits for                                  | unblocked by        |
|------------|--------------------------------------------|---------------------|
| supervisor | news at the hub, at most PATIENCE seconds  | any report, or time |

A learner that is lost is replaced. When a server is lost, all servers pause; survivors come to the newest version any of them
has; a new one begins with the freshest copy of its part that a learner has, and with the optimiser's state of its last
snapshot; then everybody connects anew. Learners repeat the calls that failed; pushes that are in a version already are not
applied again.

Who waits inside the actors: runtime.actors, runtime.hub. Shutdown: the hub says stop, learners end after their round and wait for
the final checkpoint, `close` kills what is left.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch._C._distributed_c10d import TCPStore

from qfleet import envs, rng
from qfleet.config import Config, ConfigError, override
from qfleet.learner import Flat, Learned, Learner
from qfleet.runtime import checkpoint
from qfleet.runtime.actors import LearnerActor, ServerActor, part_of
from qfleet.runtime.checkpoint import Checkpoints
from qfleet.runtime.hub import Hub, Meeting
from qfleet.runtime.member import added
from qfleet.runtime.setup import summary
from qfleet.runtime.team import TeamError, check_division
from qfleet.runtime.worker import EXPLODED
from qfleet.sync.client import Client
from qfleet.sync.shard import Copy, Position, ranges
from qfleet.sync.traffic import COUNTS, rates
from qfleet.sync.wire import Address
from qfleet.types import State

PATIENCE = 1.0  # seconds in which the supervisor looks after the others even if there is no news
SNAPSHOT = 5.0  # seconds between two copies of the servers' states
REPAIRS = 10  # attempts
EACH = ("samples_per_second", "mb_per_second", "wait", "staleness", "rejected")  # metrics of every learner
SECONDS = ("env", "act", "learn", "transfer", "wait", "sync/wait")  # on a learner's clock


class Fleet:
    """All of them together, as the trainer sees a worker."""

    server: type[ServerActor] = ServerActor

    def __init__(self, config: Config) -> None:
        try:
            import ray
        except ImportError:
            raise ConfigError(
                f"learners is {config.learners}, which needs Ray: pip install 'qfleet[ray]'. (Or start them with torchrun, see docs/sync.md.)"
            ) from None
        self._ray = ray
        self._open = contextlib.ExitStack()
        self.device, self.threads = torch.device("cpu"), os.cpu_count() or 1
        check(config)
        transport = "server" if config.sync.transport == "auto" else config.sync.transport
        self.config = config = override(config, {"sync.transport": transport, "device": "cpu"})
        self._shards = config.sync.servers if transport == "server" else 0
        self._theirs = override(config, {"run_dir": str(Path(config.run_dir).absolute())})
        sample = envs.make(config.env, seed=rng.derive(config.seed, "sample"), num_envs=1, threads=1)
        self._open.callback(sample.close)
        self.envs = sample
        self.steps = 0
        self.team = Orderer(self)
        self._clocks: dict[int, dict[str, float]] = {}
        self._ended: list[dict[str, float]] = []  # clocks of learners that were replaced
        self._updates = 0  # of all learners
        self.told: list[int] = []  # who reported last
        self._unread: Learned | None = None  # what was told while a checkpoint was written
        self._saved, self._final = 0, False  # step of the newest checkpoint; it is the last one
        self._notes: list[str] = []
        self._values: dict[int, dict[str, float]] = {}
        self._then: dict[int, dict[str, float]] = {}  # clocks at the last line of metrics

    def summary(self) -> list[str]:
        c = self.config
        servers = f"with {self._shards} server{'s' if self._shards > 1 else ''}" if self._shards else "by all-reduce"
        return [
            *summary(c, self.envs, "cpu"),
            f"  learners      {c.learners} on Ray {servers}, sync {c.sync.mode}, codec {c.sync.codec}",
        ]

    # --- making ------------------------------------------------------------------------------------------------------

    def build(self) -> None:
        ray, config = self._ray, self.config
        self._join_ray()
        first = Learner(config, self.envs.spec, self.device)
        self._net, self.flat = first.net, first.flat
        initial = first.flat.data.numpy().copy()
        self._newest = Copy(Position(-1, -1, 0.0, {}), initial, initial)
        self._token = secrets.token_hex(16)
        self._meeting = Meeting(self._theirs, self._token)
        self._open.callback(self._meeting.close)
        self._ranges = ranges(len(initial), self._shards) if self._shards else []
        spread = {"num_cpus": 1, "scheduling_strategy": "SPREAD"}
        self._make_server = ray.remote(**spread)(self.server).remote
        self._make_learner = ray.remote(max_concurrency=2, **spread)(LearnerActor).remote
        self._incarnations = [0] * config.learners
        self._learners: list[Any] = [None] * config.learners
        self._running: dict[Any, int] = {}  # what ends with a learner -> its rank
        self._servers = [
            self._make_server(self._theirs, i, initial[r], self._token) for i, r in enumerate(self._ranges)
        ]
        self._serving = {server.serve.remote(): i for i, server in enumerate(self._servers)}
        self._snapshots: list[State] = [{} for _ in self._servers]
        self._asked: dict[Any, int] = {}  # snapshots on their way -> the server's number
        self._open.callback(self._kill_all)
        self._address = str(ray.util.get_node_ip_address())
        self._client: Client | None = None
        if self._shards:
            self._connect()
            self._client = Client(config, -1, 0, len(initial), self._find, self._token)
            self._open.callback(self._client.close)
        else:
            self._store = TCPStore(self._address, 0, is_master=True, wait_for_workers=False)
        self._looked = self._asked_at = time.monotonic()

    def _join_ray(self) -> None:
        """One that is given, or that this process has joined already, or a local one of our own."""
        ray, needed = self._ray, self.config.learners + self._shards
        address = self.config.address or os.environ.get("RAY_ADDRESS", "")
        if not ray.is_initialized():
            quiet = {"include_dashboard": None if address else False, "log_to_driver": False, "logging_level": "ERROR"}
            there = {"address": address} if address else {"num_cpus": max(os.cpu_count() or 1, needed + 1)}
            try:
                ray.init(**there, **quiet)
            except ConnectionError as e:
                raise ConfigError(f"no Ray cluster at {address!r}: {str(e).splitlines()[0]}") from None
            self._open.callback(ray.shutdown)
        found = ray.cluster_resources().get("CPU", 0)
        if found < needed:
            raise ConfigError(
                f"{self.config.learners} learners and {self._shards} servers take a CPU each ({needed}), but the Ray cluster has {found:g}: add machines, or ask for fewer."
            )
        machines = sum(node["Alive"] for node in ray.nodes())
        self._here = -(-self.config.learners // machines)  # learners on one machine

    def _connect(self) -> None:
        """Servers listen; the first one knows the others; the hub knows all."""
        others = self._ray.get([server.listen.remote([]) for server in self._servers[1:]])
        self._addresses = [self._ray.get(self._servers[0].listen.remote(others)), *others]
        self._epoch = self._at_hub(lambda hub: hub.moved(self._addresses))

    def _find(self, epoch: int) -> tuple[int, list[Address]]:
        """As a client of the servers myself: those that fail are repaired."""
        if epoch >= self._epoch:
            self._repair()
        return self._epoch, self._addresses

    def _at_hub(self, what: Callable[[Hub], Any]) -> Any:
        async def inside() -> Any:
            return what(self._meeting.hub)

        return self._meeting.call(inside())

    def _new_learner(self, rank: int, late: bool = False, resume: int = 0) -> None:
        hub = (self._address, self._meeting.port)
        store = (self._address, 0 if self._shards else self._store.port)
        self._learners[rank] = self._make_learner(
            self._theirs, rank, self._incarnations[rank], late, hub, store, self._token, self._here, resume
        )

    def _run(self) -> None:
        """Learners begin when all of them are made."""
        try:
            self._ray.get([learner.ready.remote() for learner in self._learners])
        except self._ray.exceptions.RayActorError as e:
            raise TeamError(f"a learner could not be made: {str(e).strip().splitlines()[-1]}") from None
        self._running = {learner.run.remote(): rank for rank, learner in enumerate(self._learners)}

    def start(self) -> None:
        for rank in range(self.config.learners):
            self._new_learner(rank)
        self._run()

    def _kill_all(self) -> None:
        for actor in [*self._learners, *self._servers]:
            if actor is not None:
                self._ray.kill(actor)

    # --- rounds --------------------------------------------------------------------------------------------------------

    @property
    def over(self) -> bool:
        return self.team.stopping or self.steps >= self.config.total_steps

    def round(self) -> Learned | None:
        """Whatever was reported since the last time."""
        learned, self._unread = added(self._unread, self._news(PATIENCE)), None
        self._look_after()
        return added(learned, self.settle()) if self.over else learned

    def settle(self) -> Learned | None:
        """At the end, when all learners have come to theirs: what they said last."""
        learned: Learned | None = None
        while self.over and not set(self._running.values()) <= self._at_hub(lambda hub: set(hub.ended)):
            learned = added(learned, self._news(PATIENCE))
            self._look_after()
        return learned

    def _news(self, seconds: float) -> Learned | None:
        learned: Learned | None = None
        self.steps, told = self._meeting.call(self._meeting.hub.news(seconds))
        self.told = [report.rank for report in told]
        for report in told:
            if report.incarnation != self._incarnations[report.rank]:
                continue
            if report.clock:
                self._values[report.rank] = report.values
                self._clocks[report.rank] = report.clock
            learned = added(learned, report.learned)
        self._updates += 0 if learned is None else learned.updates
        return learned

    # --- what is lost is replaced -----------------------------------------------------------------------------------------

    def _look_after(self) -> None:
        """Replace who died or gives no sign of life. A learner that failed by itself would fail again: it ends the run."""
        ray = self._ray
        if self._shards and (ray.wait(list(self._serving), timeout=0)[0] or self._at_hub(lambda hub: hub.complaints)):
            self._repair()
        ended, _ = (
            ray.wait(list(self._running), num_returns=len(self._running), timeout=0) if self._running else ([], [])
        )
        for ref in ended:
            rank = self._running.pop(ref)
            try:
                ray.get(ref)
            except ray.exceptions.RayActorError:
                self._replace(rank, "ended")
            except ray.exceptions.RayTaskError as e:
                raise TeamError(f"learner {rank} failed: {type(e.cause).__name__}: {e.cause}") from None
        heartbeat = self.config.sync.heartbeat
        if time.monotonic() - self._looked > heartbeat / 4:
            self._looked = time.monotonic()
            for rank in self._at_hub(lambda hub: hub.silent(heartbeat)):
                self._replace(rank, f"gave no sign of life for {heartbeat:g} s")
            self._take_snapshots()

    def _replace(self, rank: int, what: str) -> None:
        self._ray.kill(self._learners[rank])
        self._at_hub(lambda hub: hub.leave(rank))
        if self._client is not None:
            self._client.leave(rank)
        if rank in self._clocks:
            self._ended.append(self._clocks.pop(rank))
        self._then.pop(rank, None)
        self._running = {ref: r for ref, r in self._running.items() if r != rank}
        self._incarnations[rank] += 1
        if not self.over:
            self._new_learner(rank, late=True)
            self._running[self._learners[rank].run.remote()] = rank
        then = "" if self.over else ": a new one takes its place"
        self._notes.append(f"learner {rank} {what} at step {self.steps:,}{then}")

    def _take_snapshots(self) -> None:
        """Of the servers' states, one after the other time, without waiting for them. A server that is silent is killed."""
        now, ray = time.monotonic(), self._ray
        done, late = ray.wait(list(self._asked), num_returns=len(self._asked), timeout=0) if self._asked else ([], [])
        for ref in done:
            with contextlib.suppress(ray.exceptions.RayActorError):
                self._snapshots[self._asked[ref]] = ray.get(ref)
        if late and now - self._asked_at > self.config.sync.heartbeat:
            for ref in late:
                ray.kill(self._servers[self._asked[ref]])
            late = []
        if not late and now - self._asked_at > SNAPSHOT:
            self._asked = {server.state.remote(): i for i, server in enumerate(self._servers)}
            self._asked_at = now

    def _repair(self) -> None:
        """See above."""
        ray, config, began = self._ray, self.config, time.monotonic()
        for _ in range(REPAIRS):
            try:
                lost = self._repair_once()
                break
            except ray.exceptions.RayActorError:  # another one, meanwhile
                continue
        else:
            raise TeamError(f"the servers were lost {REPAIRS} times in a row. {config.run_dir} has what was saved.")
        for what in lost:
            self._notes.append(f"{what}; all went on after {time.monotonic() - began:.1f} s")

    def _repair_once(self) -> list[str]:
        """-> what was lost."""
        ray, config, lost = self._ray, self.config, list[str]()
        paused: dict[int, Any] = {}
        for i, ref in enumerate([server.pause.remote() for server in self._servers]):
            with contextlib.suppress(ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError):
                paused[i] = ray.get(ref, timeout=config.sync.heartbeat)
        dead = [i for i in range(len(self._servers)) if i not in paused]
        if dead:
            copy = self._freshest()
            position, log = max(paused.values(), key=lambda p: p[0].version, default=(copy.position, []))
            members = self._members()
            for i in paused:
                ray.get(self._servers[i].catch_up.remote(log))
            for i in dead:
                ray.kill(self._servers[i])
                part, state = copy.part(self._ranges[i]), self._snapshots[i]
                made = self._servers[i] = self._make_server(self._theirs, i, part.params, self._token)
                ray.get(made.restore.remote(state, part, position, members))
                lost.append(
                    f"server {i} ended at step {self.steps:,} and was restarted: its parameters are those of version {copy.position.version:,} of {position.version:,}, "
                    f"the optimiser's state is of version {state.get('version', 0):,}"
                )
            self._serving = {server.serve.remote(): i for i, server in enumerate(self._servers)}
            self._asked = {}
        self._connect()
        return lost

    def _living(self, ask: Callable[[Any], Any]) -> dict[int, Any]:
        """The answers of those learners that give one at once."""
        asked = {ask(learner): rank for rank, learner in enumerate(self._learners) if learner is not None}
        done, _ = self._ray.wait(list(asked), num_returns=len(asked), timeout=PATIENCE) if asked else ([], [])
        answers = {}
        for ref in done:
            with contextlib.suppress(self._ray.exceptions.RayActorError):
                answers[asked[ref]] = self._ray.get(ref)
        return answers

    def _members(self) -> dict[int, int]:
        """Learners that take part in updates, and their incarnations."""
        joined = self._living(lambda learner: learner.joined.remote())
        return {rank: self._incarnations[rank] for rank in sorted(joined) if joined[rank]}

    def _freshest(self) -> Copy:
        """The newest parameters that a learner has, or this process."""
        if self._client is not None:
            self._newest = self._client.copy()
        versions = self._living(lambda learner: learner.version.remote())
        for rank in sorted(versions, key=lambda r: -versions[r]):
            if versions[rank] <= self._newest.position.version:
                break
            with contextlib.suppress(self._ray.exceptions.RayActorError):
                self._newest = self._ray.get(self._learners[rank].copy.remote())
                break
        return self._newest

    # --- what is seen of it ---------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def lend(self) -> Iterator[Flat]:
        self._pull()
        yield self.flat

    def _pull(self) -> None:
        """The newest parameters."""
        if self._client is not None:
            self.flat.data.copy_(self._client.newest())
        else:
            self.flat.data.copy_(torch.tensor(self._freshest().params))

    def exploded(self) -> bool:
        self._pull()
        return not bool(self.flat.data.abs().max() < EXPLODED)

    def note(self) -> str:
        return self._notes.pop(0) if self._notes else ""

    def values(self) -> dict[str, float]:
        """Means over the learners; episodes are counted together. And of each learner, what it did since the last time."""
        every = list(self._values.values())
        names = {name for values in every for name in values}
        values = {n: float(np.mean([v[n] for v in every if n in v])) for n in sorted(names)}
        values["rollout/episodes"] = sum(v.get("rollout/episodes", 0.0) for v in every)
        for rank, clock in sorted(self._clocks.items()):
            then, self._then[rank] = self._then.get(rank), clock
            if then is not None and clock["wall"] > then["wall"]:
                passed = {name: clock[name] - then[name] for name in clock}
                found = rates(passed, passed["wall"])
                values |= {f"learner_{rank}/{n}": found[f"sync/{n}"] for n in EACH if f"sync/{n}" in found}
        return values

    def waiting(self) -> float | None:
        return None

    def awaited(self) -> str:
        return ""

    def kill(self) -> None:
        self.close()

    def clock(self) -> dict[str, float]:
        """Counts of all learners; seconds are means over them, so that shares are shares of a learner's time."""
        every = [*self._ended, *self._clocks.values()]
        seconds = {n: sum(clock[n] for clock in every) / self.config.learners for n in SECONDS}
        counts = {n: sum(clock[n] for clock in every) for n in ("bytes", *COUNTS)}
        return {"wall": time.perf_counter(), "steps": self.steps, "updates": self._updates, **counts, **seconds}

    # --- checkpoints -------------------------------------------------------------------------------------------------------

    def save(self, checkpoints: Checkpoints, more: State, stuck: bool = False) -> None:
        """Learners stop after their round and save their parts; then this process saves the servers' states."""
        if self._final:
            return
        self._final, step = self.over, max(self.steps, self._saved + 1)
        self._saved = step
        self._at_hub(lambda hub: hub.save(step, final=self.over))
        present = self._at_hub(lambda hub: set(hub.live))
        while present & set(self._at_hub(lambda hub: hub.missing(step))) & set(self._running.values()):
            self._unread = added(self._unread, self._news(PATIENCE))
            self._look_after()
            if self.over and not self._final:  # meanwhile they came to their end
                self._final = True
                self._at_hub(lambda hub: hub.save(step, final=True))
        states = self._states()
        with self.lend():
            model = self._net.state_dict()
            about = {"servers": states, "hub": self._at_hub(lambda hub: hub.state()), "incarnations": self._incarnations, "updates": self._updates}  # fmt: skip
            checkpoints.save_state(
                step, {"spec": asdict(self.envs.spec), "learner": {"model": model}, "cluster": about, **more}
            )
        self._at_hub(lambda hub: hub.complete(step))

    def _states(self) -> list[State]:
        while True:
            try:
                states: list[State] = self._ray.get([server.state.remote() for server in self._servers])
                return states
            except self._ray.exceptions.RayActorError:
                self._repair()

    def load(self, checkpoints: Checkpoints) -> State:
        """Learners whose part of the newest checkpoint is missing begin anew, as if they had been lost."""
        folder = checkpoint.newest(checkpoints.dir)
        state, _ = checkpoint.read(folder)
        about, step = state["cluster"], int(state["step"])
        self._saved, self._incarnations, self._updates = step, about["incarnations"], about["updates"]
        self._ray.get([server.load.remote(s) for server, s in zip(self._servers, about["servers"], strict=True)])
        self._snapshots = about["servers"]
        present = [r for r in range(self.config.learners) if (part_of(self._theirs, r) / "checkpoints" / folder.name).exists()]  # fmt: skip
        self._at_hub(lambda hub: hub.load_state(about["hub"], present))
        self.team.lr_scale = about["hub"]["lr_scale"]
        self.steps = about["hub"]["total"]
        for rank in range(self.config.learners):
            if rank not in present:
                self._incarnations[rank] += 1
                self._notes.append(f"learner {rank} has no part of the checkpoint at step {step:,}: it begins anew")
            self._new_learner(rank, late=rank not in present, resume=step if rank in present else 0)
        self._run()
        return state

    def close(self) -> None:
        self._open.close()


def check(config: Config) -> None:
    """Can these learners work together on Ray?"""
    if config.sync.transport == "allreduce" and config.sync.balance:
        raise ConfigError(
            "sync.balance on Ray needs servers, which measure how fast everybody is: add --sync.transport server."
        )
    check_division(config, config.learners)


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
        self._fleet._at_hub(lambda hub: hub.order(stop=self.stopping, lr_scale=self._scale))
