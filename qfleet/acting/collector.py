"""Steps the environments with the current policy and turns what happens into complete replay rows.

Row t holds o_t, the action taken there, and the reward and flags that action produced; it is complete when o_{t+1}
has arrived. So the collector always holds one incomplete row: the newest observation and its `first` flag.
"""

from __future__ import annotations

import time
from collections import deque

import numpy as np
import torch

from qfleet import rng
from qfleet.acting.policy import Policy
from qfleet.config import ActingConfig, Config
from qfleet.envs import Envs
from qfleet.types import Array, Spec, State, Step

EPISODES_AVERAGED = 100


def epsilon(config: ActingConfig, step: int, num_envs: int) -> Array:
    """Epsilon of every environment at this step: linear decay, then the ladder."""
    done = min(1.0, step / config.epsilon_steps) if config.epsilon_steps else 1.0
    value = config.epsilon_start + (config.epsilon_end - config.epsilon_start) * done
    rung = np.arange(num_envs) / max(num_envs - 1, 1)
    return np.asarray(value ** (1.0 + config.ladder * rung))


class FrameStack:
    """The newest k observations of every environment, zeros before an episode's first. k = 1 costs nothing."""

    def __init__(self, spec: Spec, num_envs: int) -> None:
        self.frames = np.zeros((num_envs, spec.frame_stack, *spec.obs_shape), spec.obs_dtype)

    def push(self, obs: Array, first: Array) -> Array:
        """-> network input [E, *input_shape]. The array is reused by the next push."""
        if self.frames.shape[1] == 1:
            return obs
        self.frames[:, :-1] = self.frames[:, 1:]
        self.frames[first, :-1] = 0
        self.frames[:, -1] = obs
        return self.frames


class Episodes:
    """Returns and lengths of finished episodes, from raw rewards."""

    def __init__(self, num_envs: int) -> None:
        self.running = np.zeros(num_envs)
        self.length = np.zeros(num_envs, np.int64)
        self.returns: deque[float] = deque(maxlen=EPISODES_AVERAGED)
        self.lengths: deque[int] = deque(maxlen=EPISODES_AVERAGED)
        self.count = 0

    def add(self, reward: Array, counted: Array, ended: Array) -> None:
        self.running += reward
        self.length += counted
        if ended.any():
            for e in np.flatnonzero(ended):
                self.returns.append(float(self.running[e]))
                self.lengths.append(int(self.length[e]))
                self.count += 1
            self.running[ended] = 0
            self.length[ended] = 0

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


class Collector:
    """Environments, exploration and staging of rows. `steps` counts environment steps, `ticks` vector steps."""

    def __init__(self, config: Config, envs: Envs, policy: Policy) -> None:
        self.config, self.envs, self.policy = config, envs, policy
        n, spec, rows = envs.num_envs, envs.spec, config.rows_per_round
        self.steps = self.ticks = 0
        self.episodes = Episodes(n)
        self.env_seconds = self.act_seconds = 0.0
        self._explore_key, self._noise_key = rng.key(config.seed, "explore"), rng.key(config.seed, "acting noise")
        self._stack = FrameStack(spec, n)
        self._obs = np.zeros((rows, n, *spec.obs_shape), spec.obs_dtype)
        self._action = np.zeros((rows, n), np.int64)
        self._reward = np.zeros((rows, n), np.float32)
        self._terminated, self._truncated, self._first = (np.zeros((rows, n), np.bool_) for _ in range(3))
        self._now: Array = np.zeros((n, *spec.obs_shape), spec.obs_dtype)  # the incomplete row
        self._now_first: Array = np.ones(n, np.bool_)
        self._held, self._hold_left = np.zeros(n, np.int64), np.zeros(n, np.int64)  # exploring actions, steps to go

    def start(self, seed: int | None = None) -> None:
        self._now = self.envs.reset(seed).copy()
        self._now_first = np.ones(self.envs.num_envs, np.bool_)

    def collect(self) -> Step:
        """One round. The rows are views of a staging buffer that the next call overwrites."""
        n, acting, clock = self.envs.num_envs, self.config.acting, time.perf_counter
        noise = self._round_noise(n)
        for t in range(self.config.rows_per_round):
            began = clock()
            self._obs[t] = self._now
            self._first[t] = self._now_first
            action = self._act(self._stack.push(self._now, self._now_first), epsilon(acting, self.steps, n), noise)
            self._action[t] = action
            acted = clock()
            s = self.envs.step(action)
            self._now[...] = s.obs
            self._now_first = s.first.copy()
            self._reward[t] = s.reward
            np.logical_or(s.terminated, s.life_lost, out=self._terminated[t])
            self._truncated[t] = s.truncated
            counted = ~s.first
            self.episodes.add(s.reward, counted, s.terminated | s.truncated)
            self.steps += int(np.count_nonzero(counted))
            self.ticks += 1
            self.env_seconds += clock() - acted
            self.act_seconds += acted - began
        staged = (self._obs, self._action, self._reward, self._terminated, self._truncated, self._first)
        return Step(*map(torch.from_numpy, staged))

    def _act(self, inputs: Array, eps: Array, noise: torch.Tensor | None) -> Array:
        explore, action = self._explore(eps)
        if explore.all():
            return action
        greedy: Array = self.policy.q(inputs, noise).argmax(1).cpu().numpy()
        return np.where(explore, action, greedy)

    def _explore(self, eps: Array) -> tuple[Array, Array]:
        """-> which environments explore [E], and their actions [E].

        With `acting.hold` > 1 an environment that begins to explore holds its action for min(hold, floor(1 / u)) steps, but
        not beyond the episode (Dabney, Ostrovski, Barreto, *Temporally-extended epsilon-greedy exploration*, 2021).
        """
        n, hold = self.envs.num_envs, self.config.acting.hold
        u = rng.uniform(self._explore_key, self.ticks, 3 * n if hold > 1 else 2 * n)
        explore, action = u[:n] < eps, (u[n : 2 * n] * self.envs.spec.num_actions).astype(np.int64)
        if hold == 1:
            return explore, action
        self._hold_left[self._now_first] = 0
        begin = explore & (self._hold_left == 0)
        self._held[begin] = action[begin]
        self._hold_left[begin] = np.minimum(1.0 / (1.0 - u[2 * n :][begin]), hold)
        explore = self._hold_left > 0
        self._hold_left[explore] -= 1
        return explore, self._held.copy()

    def _round_noise(self, n: int) -> torch.Tensor | None:
        """Noisy layers: one sample per environment and round."""
        size = self.policy.net.noise_size
        if not size:
            return None
        counter = torch.arange(self.ticks * n, self.ticks * n + n)
        return rng.normal_torch(self._noise_key, counter, size).to(self.policy.device)

    def epsilon_mean(self) -> float:
        return float(epsilon(self.config.acting, self.steps, self.envs.num_envs).mean())

    def state(self) -> State:
        return {
            "steps": self.steps,
            "ticks": self.ticks,
            "episodes": self.episodes.state(),
            "envs": self.envs.state(),
            "now": self._now,
            "now_first": self._now_first,
            "stack": self._stack.frames,
            "held": self._held,
            "hold_left": self._hold_left,
        }

    def load_state(self, state: State) -> None:
        """Continue; where environments have no state to restore (their notes say so), new episodes begin."""
        self.steps, self.ticks = state["steps"], state["ticks"]
        self.episodes.load_state(state["episodes"], episodes_go_on=state["envs"] is not None)
        if state["envs"] is None:
            self.start(rng.derive(self.config.seed, f"resume {self.ticks}"))
            return
        self.envs.load_state(state["envs"])
        self._now[...] = state["now"]
        self._now_first = np.asarray(state["now_first"])
        self._stack.frames[...] = state["stack"]
        self._held[:], self._hold_left[:] = state["held"], state["hold_left"]
