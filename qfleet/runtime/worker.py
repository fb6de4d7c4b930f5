"""One learner with its environments and its replay, going round by round. It does not know how many there are: its team does."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import numpy as np
import torch

from qfleet import envs, machine, networks, rng
from qfleet.acting import placement
from qfleet.acting.actor import Actor, HostActor
from qfleet.acting.collector import Collector
from qfleet.acting.device import DeviceActor
from qfleet.acting.policy import Policy
from qfleet.captured import Best, CapturedLearner
from qfleet.config import Config, override
from qfleet.device import reason, use
from qfleet.learner import Flat, Learned, Learner
from qfleet.replay import Limiter, Replay
from qfleet.runtime.checkpoint import Checkpoints
from qfleet.runtime.schedule import Aside, Pipelined, Schedule, Serial, Streams
from qfleet.runtime.setup import device_of, pick_device, resolve, summary, team_line
from qfleet.runtime.team import Broken, Team
from qfleet.runtime.watchdog import watched
from qfleet.types import Spec, State, Step

EXPLODED = 1e12  # a mean loss, or a parameter, above this, or no number at all, ends the run
BEHIND_GPU = 10  # niceness of environments: the thread that feeds the GPU, and evaluations, go first


class Worker:
    """Made in two steps: environments, and what depends on the machine; then (`build`) everything that takes memory.

    `config` is the run's, `own` this learner's part of it.
    """

    def __init__(self, config: Config, team: Team) -> None:
        self.team = team
        self.threads = config.runtime.emulator_threads or threads_for(config.runtime.groups, team.here)
        self._open = contextlib.ExitStack()  # what must be closed, in reverse order, whatever happens
        self._open.callback(torch.set_num_threads, torch.get_num_threads())
        own = share(config, team)
        name = pick_device(config.device)
        with watched(f"{own.env.id}, while it was made and tried,", config.runtime.watchdog):
            self.groups = envs.make_groups(
                own.env,
                seed=rng.derive(own.seed, "environments"),
                groups=own.runtime.groups,
                threads=self.threads,
                wait=False,  # they are made while the GPU wakes up and kernels are compiled
                nice=BEHIND_GPU if name != "cpu" else 0,
            )
        self.envs = self.groups[0]  # speaks for all where they are alike
        for group in self.groups:
            self._open.callback(group.close)
        try:
            self.device = device_of(name, team.local)
            use(self.device)
            self.replay_device = device_of(pick_device(config.replay.device, self.device), team.local)
            config = resolve(config, self.envs, self.device, self.replay_device)
            if config.acting.device == "auto":
                config = override(config, {"acting.device": self._place(config)})
            self.config, self.own = config, share(config, team)
            Replay.check_memory(self.own, self.envs.spec, self.replay_device)
        except BaseException:
            self.close()
            raise

    def _place(self, config: Config) -> str:
        """Where actions are computed, measured with the network and the number of environments in use."""
        chosen = placement.choose(config, self.envs.spec, self.envs.num_envs, self.device)
        return chosen if self.team.size == 1 else torch.device(chosen).type

    def build(self) -> None:
        config, own, spec = self.config, self.own, self.envs.spec
        on_device = config.runtime.schedule == "streams" or self.replay_device.type == "cuda"
        self.replay = Replay(own, spec, self.replay_device, seed=own.seed, on_host=not on_device)
        self.limiter = Limiter(config, self.team.size)
        self.stored_steps = 0  # of all learners
        self._make_schedule(own)
        self.learner: Learner
        if on_device and self.replay_device == self.device:
            self._make_captured(own, spec)
        else:
            self.learner = Learner(own, spec, self.device)
            self._make_actor(own, spec)
        self.team.attach(self.learner)
        self.learner.moved()
        self._notes = self.learner.notes()
        if why_not := self.collector.actor.why_not:
            self._notes.append(f"the choice of actions could not be recorded, and is launched kernel by kernel, which is slower ({why_not})")  # fmt: skip

    def _make_schedule(self, config: Config) -> None:
        self.schedule: Schedule
        schedule, threads = config.runtime.schedule, config.learner.threads
        if schedule == "streams":
            self.schedule = (Streams if self.team.size == 1 else Aside)(self.device, threads)
        elif schedule == "pipelined":
            self.schedule = Pipelined(self.device, threads)
        else:
            self.schedule = Serial(self.device, config.runtime.lag, threads)
        self._open.callback(self.schedule.close)

    def _make_captured(self, config: Config, spec: Spec, why_no_kernels: str = "") -> None:
        """Learner and actor on one device with the replay. Kernels that do not work here are found out by trying."""
        self.learner = learner = CapturedLearner(config, spec, self.device, why_no_kernels)
        failed = ""
        try:
            learner.prepare(self.replay)
            self._make_actor(config, spec)
        except torch.OutOfMemoryError:
            raise
        except Exception as e:  # one that the compiler refuses, or that this GPU has no room for, each in its own way
            if not learner.kernels:
                raise
            failed = reason(e)
        if failed:
            self._make_captured(config, spec, failed)

    def _make_actor(self, config: Config, spec: Spec) -> None:
        device, acting_device = self.device, device_of(pick_device(config.acting.device), self.team.local)
        captured = isinstance(self.learner, CapturedLearner)
        copied = captured or config.runtime.schedule == "pipelined" or acting_device != device
        net = networks.build(config, spec).to(acting_device).eval() if copied else self.learner.net
        self._acting_copy = Flat(net, acting_device) if copied else None
        sizes = [group.num_envs for group in self.groups]
        self._best: Best | None = None
        actor: Actor
        if isinstance(self.learner, CapturedLearner) and acting_device == device:
            self._best = Best(self.learner, net, sizes)
            on_device = DeviceActor(config, spec, self.groups, device, net.noise_size, self._best)
            self._open.callback(on_device.close)
            actor = on_device
        else:
            policy = Policy(net, config, spec, acting_device)
            actor = HostActor(config, spec, policy, sizes, self.replay.device)
        self.collector = Collector(config, self.groups, actor, self.team.rank, self.team.size)

    def summary(self) -> list[str]:
        """What is about to run, for people."""
        threads = sum(group.threads for group in self.groups)
        lines = summary(self.config, self.envs, str(self.replay_device), threads)
        return lines if self.team.size == 1 else [*lines, team_line(self.config, "by all-reduce")]

    # --- rounds ---------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin episodes everywhere."""
        self.publish()
        self.schedule.wait()
        self.collector.start()

    def round(self) -> Learned | None:
        self.publish()
        return self.schedule.round(self.collector.collect, self._store, self._learn)

    @property
    def steps(self) -> int:
        """Of all learners, as far as is known."""
        return self.collector.steps + self.collector.others

    @property
    def over(self) -> bool:
        """All learners come to the same answer after the same round."""
        return self.team.stopping or self.steps >= self.config.total_steps

    def _store(self, rows: Step) -> None:
        self.replay.extend(rows)
        self.stored_steps = self.team.meet(self.collector.steps)
        self.collector.others = self.stored_steps - self.collector.steps

    def _learn(self) -> Learned | None:
        own = self.stored_steps - self.collector.others
        if not self.replay.ready or not self.team.enter(self.learner, own):
            return None
        due = self.limiter.updates_due(self.team.counted(own, self.stored_steps), self.learner.updates)
        if due == 0:
            return None
        c, done = self.config.learner, min(1.0, self.stored_steps / self.config.total_steps)
        self.learner.lr = c.lr * self.team.lr_scale * lr_factor(c.lr_schedule, done)
        try:
            return self.learner.learn(self.replay, due, self._beta())
        except Broken:
            return None

    def _beta(self) -> float:
        c = self.config.replay
        done = min(1.0, self.stored_steps / (c.beta_steps or self.config.total_steps))
        return c.beta + (1.0 - c.beta) * done

    @torch.no_grad()
    def publish(self) -> None:
        """The learner's parameters reach the acting copy, if there is one."""
        if self._acting_copy is None:
            return
        began = time.perf_counter()
        with self.schedule.publishing():
            self._acting_copy.copy_(self.learner.flat)
            if self._best is not None:
                self._best.publish()
        if self._acting_copy.data.device != self.device:  # the host has waited for the updates before
            self.learner.wait_seconds += time.perf_counter() - began

    @contextlib.contextmanager
    def lend(self) -> Iterator[Flat]:
        """The learner's parameters, to be copied before the next round."""
        with self.schedule.publishing():
            yield self.learner.flat

    def settle(self) -> Learned | None:
        """Return when nothing is going on; -> what was done and not yet told."""
        self.schedule.wait()
        return self.learner.flush()

    @property
    def failure(self) -> Exception | None:
        """Why the run fails, though everything could be saved."""
        return None

    def exploded(self) -> bool:
        return not bool(self.learner.flat.data.abs().max() < EXPLODED)

    def note(self) -> str:
        """What the user should know about how it runs, once each."""
        return self._notes.pop(0) if self._notes else ""

    # --- what is seen of it ------------------------------------------------------------------------------------------

    def values(self) -> dict[str, float]:
        """Metrics of the moment."""
        values = self.collector.episodes.means()
        values["rollout/exploration_rate"] = self.collector.epsilon_mean()
        values["rollout/episodes"] = self.collector.episodes.count
        if self.envs.frame_skip > 1:
            values["rollout/frames"] = self.steps * self.envs.frame_skip
        values["train/lr"] = self.learner.lr
        values["train/n_updates"] = self.learner.updates
        return values

    def waiting(self) -> float | None:
        """Since when (time.perf_counter) it has been waiting for environments."""
        return None if self.collector.waiting is None else self.collector.waiting[1]

    def awaited(self) -> str:
        """Whom it is waiting for."""
        waiting = self.collector.waiting
        return "" if waiting is None else self.groups[waiting[0]].awaited()

    def kill(self) -> None:
        """End environments that do not answer."""
        for group in self.groups:
            group.kill()

    def clock(self) -> dict[str, float]:
        """Counts and seconds so far. `learn` is time of the device where the learner's work is only queued."""
        actor, traffic = self.collector.actor, self.team.traffic
        transfers = actor.transfers, self.learner.transfers, self.replay.transfers
        return {
            "wall": time.perf_counter(),
            "steps": self.steps,
            "updates": self.learner.updates * self.team.size,  # under a launcher all make as many
            "env": self.collector.env_seconds,
            "act": self.collector.act_seconds - actor.wait_seconds,
            "learn": self.schedule.learn_seconds - traffic.seconds,
            "transfer": sum(each.seconds for each in transfers),
            "wait": self.schedule.wait_seconds + self.learner.wait_seconds + actor.wait_seconds + traffic.seconds,
            "wait_actions": actor.wait_seconds,
            "bytes": sum(each.bytes for each in transfers),
            **traffic.counts(),
        }

    # --- checkpoints ------------------------------------------------------------------------------------------------------

    def save(self, checkpoints: Checkpoints, more: State, stuck: bool = False, step: int | None = None) -> None:
        """Between rounds, when nothing is queued; with what else is to be remembered. `step`: as the checkpoint of that step."""
        name = self.steps if step is None else step
        checkpoints.save(name, {**self.state(stuck), **more}, self.replay, self.team.wait)

    def load(self, checkpoints: Checkpoints, step: int | None = None) -> State:
        """-> the whole state, with what else was remembered. `step`: of that checkpoint, not of the newest."""
        state = checkpoints.load(self.replay, self.team.least if step is None else lambda newest: step)
        self.load_state(state)
        return state

    def state(self, stuck: bool = False) -> State:
        """`stuck`: without the environments, which do not answer."""
        return {
            "spec": asdict(self.envs.spec),
            "learner": self.learner.state(),
            "collector": self.collector.state(stuck),
            "stored_steps": self.stored_steps,
            "lr_scale": self.team.lr_scale,
            "team": self.team.state(),
        }

    def load_state(self, state: State) -> None:
        self.learner.load_state(tensors(state["learner"]))
        self.team.load_state(tensors(state.get("team", {})))
        self.stored_steps, self.team.lr_scale = state["stored_steps"], state["lr_scale"]
        self.schedule.wait()
        self.publish()  # where environments begin anew, their first actions are due at once
        self.schedule.wait()
        self.collector.load_state(state["collector"])
        self.collector.others = self.stored_steps - self.collector.steps

    def close(self) -> None:
        self._open.close()


def threads_for(groups: int, learners: int) -> int:
    """That step environments: one per core for one group, half as many for each of several (not all step at the same time)."""
    cores = max(1, machine.cores() // learners)
    return cores * max(2, groups) // 2


def share(config: Config, team: Team) -> Config:
    """A learner's part of what is counted over all of them."""
    if team.size == 1:
        return config
    return override(
        config,
        {
            "seed": config.seed if team.rank == 0 else rng.derive(config.seed, f"learner {team.rank}"),
            "env.num_envs": config.env.num_envs // team.size,
            "replay.capacity": config.replay.capacity // team.size,
            "runtime.steps_per_round": max(1, config.runtime.steps_per_round // team.size),
        },
    )


def lr_factor(schedule: str, done: float) -> float:
    if schedule == "linear":
        return 1.0 - done
    if schedule == "cosine":
        return 0.5 * (1.0 + math.cos(math.pi * done))
    return 1.0


def tensors(state: Any) -> Any:
    """NumPy leaves of a loaded state as tensors."""
    if isinstance(state, dict):
        return {k: tensors(v) for k, v in state.items()}
    if isinstance(state, list):
        return [tensors(v) for v in state]
    if not isinstance(state, np.ndarray):
        return state
    return torch.from_numpy(state if state.flags.writeable else state.copy())
