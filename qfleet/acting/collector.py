"""Steps the environments with the current policy and turns what happens into complete replay rows.

Row t holds o_t, the action taken there, and the reward and flags that action produced; it is complete when o_{t+1}
has arrived. So the collector always holds one incomplete row: the newest observation and its `first` flag.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch

from qfleet import rng
from qfleet.acting.actor import Actor, columns_of
from qfleet.config import ActingConfig, Config
from qfleet.envs import Envs, EnvStep
from qfleet.envs.local import in_order, numbered
from qfleet.types import Array, State, Step

EPISODES_AVERAGED = 100


def epsilon(config: ActingConfig, step: int, num_envs: int) -> Array:
    """Epsilon of every environment at this step: linear decay, then the ladder."""
    done = min(1.0, step / config.epsilon_steps) if config.epsilon_steps else 1.0
    value = config.epsilon_start + (config.epsilon_end - config.epsilon_start) * done
    rung = np.arange(num_envs) / max(num_envs - 1, 1)
    return np.asarray(value ** (1.0 + config.ladder * rung))


class Episodes:
    """Returns and lengths of finished episodes, from raw rewards."""

    def __init__(self, num_envs: int) -> None:
        self.running = np.zeros(num_envs)
        self.length = np.zeros(num_envs, np.int64)
        self.returns: deque[float] = deque(maxlen=EPISODES_AVERAGED)
        self.lengths: deque[int] = deque(maxlen=EPISODES_AVERAGED)
        self.count = 0

    def add(self, columns: slice, reward: Array, counted: Array, ended: Array) -> None:
        running, length = self.running[columns], self.length[columns]
        running += reward
        length += counted
        if ended.any():
            for e in np.flatnonzero(ended):
                self.returns.append(float(running[e]))
                self.lengths.append(int(length[e]))
                self.count += 1
            running[ended] = 0
            length[ended] = 0

    def means(self) -> dict[str, float]:
        if not self.returns:
            return {}
        return {
            "rollout/ep_rew_mean": float(np.mean(self.returns)),
            "rollout/ep_len_mean": float(np.mean(self.lengths)),
        }

    def state(self) -> State:
        return {
            "running": self.running,
            "length": self.length,
            "returns": list(self.returns),
            "lengths": list(self.lengths),
            "count": self.count,
        }

    def load_state(self, state: State, episodes_go_on: bool) -> None:
        if episodes_go_on:
            self.running[:] = state["running"]
            self.length[:] = state["length"]
        self.returns.extend(state["returns"])
        self.lengths.extend(state["lengths"])
        self.count = state["count"]


class _Staging(NamedTuple):
    """All of a round's rows but the observations, [R, E] each, in the order of `Step`."""

    action: Array
    reward: Array
    terminated: Array
    truncated: Array
    first: Array


class Collector:
    """Environments, exploration and staging of rows. `steps` counts environment steps, `ticks` vector steps.

    One group: act, step, store, in turn. Several: while one group is acted for, the others are stepping, and at the end
    of a round every group has a step in flight; its row is the first of the next round.
    """

    def __init__(self, config: Config, groups: Sequence[Envs], actor: Actor, rank: int = 0, learners: int = 1) -> None:
        self.config, self.groups, self.actor = config, groups, actor
        self._rank, self._learners, self.others = rank, learners, 0  # others: steps of the other learners
        n, rows, spec = config.env.num_envs, config.rows_per_round, groups[0].spec
        self._columns = columns_of([envs.num_envs for envs in groups])
        self._ahead = len(groups) > 1  # steps stay in flight between rounds
        self._received: list[EnvStep | None] = [None] * len(groups)  # a step that a checkpoint had to wait for
        self.waiting: tuple[int, float] | None = None  # for which group, and since when
        self.steps = self.ticks = 0
        self.episodes = Episodes(n)
        self.env_seconds = self.act_seconds = 0.0
        self._num_actions = spec.num_actions
        self._explore_key = rng.key(config.seed, "explore")
        # Two of them in turn: the replay may still be reading one round's while the next is collected.
        self._staging = [
            _Staging(*(actor.buffer((rows, n), dtype) for dtype in ("int64", "float32", "bool", "bool", "bool")))
            for _ in range(2)
        ]
        self._sent = np.zeros(n, np.int64)  # actions of the incomplete row
        self._now_first: Array = np.ones(n, np.bool_)
        self._held, self._hold_left = np.zeros(n, np.int64), np.zeros(n, np.int64)  # exploring actions, steps to go

    def start(self, seed: int | None = None) -> None:
        """Begin episodes everywhere."""
        self._now_first.fill(True)
        self.actor.begin_round(self.ticks)
        for g, (envs, columns) in enumerate(zip(self.groups, self._columns, strict=True)):
            with self._awaiting(g):
                obs = envs.reset(None if seed is None else seed + g)
            self.actor.observe(g, obs, self._now_first[columns])
        if self._ahead:
            for g in range(len(self.groups)):
                self.actor.begin(g)
                self._begin(g, self.ticks)

    def collect(self) -> Step:
        """One round. The rows are views of staging buffers that the next call but one overwrites."""
        self.actor.begin_round(self.ticks)
        self._staging.reverse()
        into = self._staging[0]
        for t in range(self.config.rows_per_round):
            for g in range(len(self.groups)):
                if not self._ahead:  # with the parameters of this round
                    self.actor.begin(g)
                    self._begin(g, self.ticks)
                self._finish(g, t, into)
                if self._ahead:
                    self._begin(g, self.ticks + 1)
            self.ticks += 1
        return Step(self.actor.rows(), *map(torch.from_numpy, into))

    @contextlib.contextmanager
    def _awaiting(self, g: int) -> Iterator[None]:
        """Around whatever environments do that may take long. `_begin` and `_finish` write it out: they have no microsecond to spare."""
        self.waiting = (g, time.perf_counter())
        try:
            yield
        finally:
            self.waiting = None  # also for environments that fail

    def _begin(self, g: int, tick: int) -> None:
        """Choose the actions of a group and send them."""
        began, columns = time.perf_counter(), self._columns[g]
        explore, action = self._explore(columns, self._epsilon()[columns], tick)
        if explore.all():
            self.actor.settle(g)
        else:
            action = np.where(explore, action, self.actor.greedy(g))
        self._sent[columns] = action
        sent = time.perf_counter()
        self.act_seconds += sent - began
        self.waiting = (g, sent)
        try:
            self.groups[g].send(action)
        finally:
            self.waiting = None
        self.env_seconds += time.perf_counter() - sent

    def _finish(self, g: int, t: int, into: _Staging) -> None:
        """What the step in flight gave completes row t of a group."""
        began, c = time.perf_counter(), self._columns[g]
        self.waiting = (g, began)
        try:
            s, self._received[g] = self._received[g] or self.groups[g].recv(), None
        finally:
            self.waiting = None
        stepped = time.perf_counter()
        self.actor.stage(g, t)
        self.actor.observe(g, s.obs, s.first)
        if self._ahead:
            self.actor.begin(g)
        into.first[t, c] = self._now_first[c]
        into.action[t, c] = self._sent[c]
        into.reward[t, c] = s.reward
        np.logical_or(s.terminated, s.life_lost, out=into.terminated[t, c])
        into.truncated[t, c] = s.truncated
        self._now_first[c] = s.first
        counted = ~s.first
        self.episodes.add(c, s.reward, counted, s.terminated | s.truncated)
        self.steps += int(np.count_nonzero(counted))
        self.env_seconds += stepped - began
        self.act_seconds += time.perf_counter() - stepped

    def _explore(self, columns: slice, eps: Array, tick: int) -> tuple[Array, Array]:
        """-> which environments explore [C], and their actions [C].

        With `acting.hold` > 1 an environment that begins to explore holds its action for min(hold, floor(1 / u)) steps, but
        not beyond the episode (Dabney, Ostrovski, Barreto, *Temporally-extended epsilon-greedy exploration*, 2021).
        """
        n, hold = len(self._sent), self.config.acting.hold
        u = rng.uniform(self._explore_key, tick, 3 * n if hold > 1 else 2 * n).reshape(-1, n)[:, columns]
        explore, action = u[0] < eps, (u[1] * self._num_actions).astype(np.int64)
        if hold == 1:
            return explore, action
        held, left = self._held[columns], self._hold_left[columns]
        left[self._now_first[columns]] = 0
        begin = explore & (left == 0)
        held[begin] = action[begin]
        left[begin] = np.minimum(1.0 / (1.0 - u[2][begin]), hold)
        explore = left > 0
        left[explore] -= 1
        return explore, held.copy()

    def epsilon_mean(self) -> float:
        return float(self._epsilon().mean())

    def _epsilon(self) -> Array:
        """Of these environments, among those of all learners."""
        n = len(self._sent)
        everywhere = epsilon(self.config.acting, self.steps + self.others, n * self._learners)
        return everywhere[self._rank * n : (self._rank + 1) * n]

    def state(self, stuck: bool = False) -> State:
        """`stuck`: without the environments, which do not answer."""
        saved = [] if stuck else self._states()
        received = [s._asdict() for s in self._received if s is not None]
        return {
            "steps": self.steps,
            "ticks": self.ticks,
            "episodes": self.episodes.state(),
            "envs": numbered(saved) if len(saved) == len(self.groups) else None,
            "received": numbered(received),
            "sent": self._sent,
            "now_first": self._now_first,
            "actor": self.actor.state(),
            "held": self._held,
            "hold_left": self._hold_left,
        }

    def _states(self) -> list[State]:
        """Of the groups that have one."""
        if self._ahead:  # nothing may move while the environments are looked at
            for g, envs in enumerate(self.groups):
                if self._received[g] is None:
                    with self._awaiting(g):
                        self._received[g] = EnvStep(*(field.copy() for field in envs.recv()))
        saved = []
        for g, envs in enumerate(self.groups):
            with self._awaiting(g):
                saved.append(envs.state())
        return [state for state in saved if state is not None]

    def load_state(self, state: State) -> None:
        """Continue; where environments have no state to restore (their notes say so), new episodes begin."""
        self.steps, self.ticks = state["steps"], state["ticks"]
        self.episodes.load_state(state["episodes"], episodes_go_on=state["envs"] is not None)
        if state["envs"] is None:
            self.start(rng.derive(self.config.seed, f"resume {self.ticks}"))
            return
        for g, saved in enumerate(in_order(state["envs"], len(self.groups))):
            with self._awaiting(g):
                self.groups[g].load_state(saved)
        if self._ahead:
            self._received = [EnvStep(**s) for s in in_order(state["received"], len(self.groups))]
        self._sent[:] = state["sent"]
        self._now_first[:] = state["now_first"]
        self.actor.load_state(state["actor"])
        self._held[:], self._hold_left[:] = state["held"], state["hold_left"]
