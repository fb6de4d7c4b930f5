"""Environments made for the tests; `env_toys:Name` imports this module, in worker processes too."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv


class Counter(gym.Env[Any, Any]):
    """Observes (episode, step, last action); pays 1 + action; terminates or truncates after `length` steps."""

    def __init__(self, length: int = 3, cut: bool = False, observed: Any = None, acted: Any = None) -> None:
        self.length, self.cut = length, cut
        self.observation_space = spaces.Box(-np.inf, np.inf, (3,), np.float64) if observed is None else observed
        self.action_space = spaces.Discrete(4) if acted is None else acted
        self.episode = self.t = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.episode, self.t = self.episode + 1, 0
        return self.see(-1), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        assert self.t < self.length, "stepped after the end"
        self.t += 1
        end = self.t == self.length
        return self.see(action), 1.0 + float(np.sum(action)), end and not self.cut, end and self.cut, {}

    def see(self, action: Any) -> Any:
        return np.array([self.episode, self.t, np.sum(action)])


class Saved(Counter):
    """A state of its own, with an array, a tuple and a random generator; noisy rewards show whether it is complete."""

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        obs, reward, *ends = super().step(action)
        return obs, reward + self.np_random.random(), *ends

    def get_state(self) -> dict[str, Any]:
        return {"at": (self.episode, self.t), "random": self.np_random, "unused": np.arange(3)}

    def set_state(self, state: dict[str, Any]) -> None:
        assert state["unused"].tolist() == [0, 1, 2]
        self.episode, self.t = state["at"]
        self.np_random = state["random"]


class Unsaveable(Saved):
    def get_state(self) -> dict[str, Any]:
        return {"bad": object()}


class Coded(Counter):
    """Observes what it is told to, and the action as it arrived."""

    def __init__(self, observed: Any, values: list[Any], acted: Any = None) -> None:
        super().__init__(length=10**9, observed=observed, acted=acted)
        self.values = values
        self.received: list[Any] = []

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.received.append(action)
        return super().step(action)

    def see(self, action: Any) -> Any:
        return self.values[self.t % len(self.values)]


class Trouble(Counter):
    """Action 1 raises, action 2 kills the process; the constructor fails on demand."""

    def __init__(self, broken: bool = False) -> None:
        super().__init__(length=10**9)
        if broken:
            raise OSError("no licence for the simulator")

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        if action == 1:
            raise ConnectionRefusedError("the simulator hung up")
        if action == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().step(action)


class WrongShape(Counter):
    def see(self, action: Any) -> Any:
        return np.zeros(1)


class Slow(Counter):
    """Slow enough for workers to pay."""

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        sum(i * i for i in range(20_000))
        return super().step(action)


def same_step(num_envs: int, autoreset_mode: AutoresetMode = AutoresetMode.SAME_STEP, **kwargs: Any) -> SyncVectorEnv:
    makers = [lambda i=i: Counter(length=3 + i, **kwargs) for i in range(num_envs)]
    return SyncVectorEnv(makers, autoreset_mode=autoreset_mode)


def stubborn(num_envs: int, **kwargs: Any) -> SyncVectorEnv:
    if "autoreset_mode" in kwargs:
        raise TypeError("stubborn() got an unexpected keyword argument 'autoreset_mode'")
    return same_step(num_envs, **kwargs)


class Odd(Exception):
    """Cannot be unpickled, and says more than it should on its last line."""

    def __init__(self, code: int, what: str) -> None:
        super().__init__(f"{what} ({code})")


class Hanging(Saved):
    """Never returns from a step (in its second episode), or from its first reset, or from telling its state, once the file it is told to look for
    exists, if it is the first to find it; or dies, exits, or raises."""

    def __init__(self, file: str, where: str = "step", end: str = "hang", keep: bool = False) -> None:
        super().__init__(length=50)
        self.file, self.where, self.end, self.keep = file, where, end, keep  # keep the file: all others will, too

    def hang(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.stat(self.file) if self.keep else os.rename(self.file, self.file + ".found")
            if self.end == "raise":
                raise ConnectionRefusedError("the simulator hung up")
            if self.end == "odd":
                raise Odd(7, "out of fuel")
            if self.end == "exit":
                sys.exit(3)
            if self.end == "die":
                os.kill(os.getpid(), signal.SIGKILL)
            os.write(1, b"it hangs\n")  # at once: others may say it at the same time
            threading.Event().wait()

    def reset(self, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        if self.where == "reset":
            self.hang()
        return super().reset(**kwargs)

    def get_state(self) -> dict[str, Any]:
        if self.where == "state":
            self.hang()
        return super().get_state()

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        if self.where == "step" and self.episode == 2 and self.t == 5:
            self.hang()
        return super().step(action)


def register() -> None:
    """Once, however often this module is imported under whatever name."""
    for cls in (Counter, Saved, Unsaveable, Coded, Trouble, WrongShape, Slow, Hanging):
        gym.register(f"{cls.__name__}-v0", f"env_toys:{cls.__name__}")
    gym.register("Limited-v0", "env_toys:Saved", max_episode_steps=4, kwargs={"length": 100})
    gym.register("SameStep-v0", "env_toys:Counter", vector_entry_point=same_step)
    gym.register("Stubborn-v0", "env_toys:Counter", vector_entry_point=stubborn)


if "Counter-v0" not in gym.registry:
    register()
