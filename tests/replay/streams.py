"""Random streams, and a reference replay in plain Python that thinks in episodes instead of rings and flags."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from qfleet.config import Config, EnvConfig, LearnerConfig, ReplayConfig, RuntimeConfig
from qfleet.types import Spec, Step

GAMMA = 0.9


def make_config(
    *,
    capacity: int = 160,
    columns: int = 4,
    n: int = 1,
    batch: int = 32,
    clip: float = 0.0,
    prioritized: bool = False,
    alpha: float = 0.5,
    seed: int = 1,
) -> Config:
    return Config(
        seed=seed,
        env=EnvConfig(num_envs=columns, reward_clip=clip),
        replay=ReplayConfig(capacity=capacity, prioritized=prioritized, alpha=alpha, min_steps=0),
        learner=LearnerConfig(n_step=n, gamma=GAMMA, batch_size=batch),
        runtime=RuntimeConfig(steps_per_round=1),
    )


def make_spec(stack: int = 1) -> Spec:
    return Spec(obs_shape=(2,), obs_dtype="float32", num_actions=6, frame_stack=stack)


class Row(NamedTuple):
    obs: tuple[float, float]
    action: int
    reward: float
    terminated: bool = False
    truncated: bool = False
    first: bool = False


def random_stream(rng: np.random.Generator, length: int, column: int) -> list[Row]:
    """Episodes of every kind, end to end; observations are (row, column + 1), so each is recognised and none is 0."""
    rows: list[Row] = []

    def add(**flags: bool) -> None:
        reward = float(np.float32(rng.normal() * 2))
        rows.append(Row((float(len(rows)), column + 1.0), int(rng.integers(6)), reward, **flags))

    while len(rows) < length:
        steps = int(rng.integers(1, 12))
        kind = rng.choice(["terminated", "truncated", "both", "restart", "no terminal row", "lost bootstrap"])
        for i in range(steps):
            last = i == steps - 1
            add(
                first=i == 0,
                terminated=(last and kind in ("terminated", "both", "no terminal row"))
                or (not last and rng.random() < 0.15),  # a lost life: the bootstrap stops, the episode goes on
                truncated=last and kind in ("truncated", "both", "lost bootstrap"),
            )
        if kind in ("terminated", "truncated", "both"):
            add()  # holds the terminal observation; its action was ignored
    return rows[:length]


def to_step(streams: list[list[Row]]) -> Step:
    """Equally long streams, one per column -> [R, C]."""
    columns = [[torch.tensor(np.array(field)) for field in zip(*stream, strict=True)] for stream in streams]
    obs, action, reward, terminated, truncated, first = (
        torch.stack(fields, 1) for fields in zip(*columns, strict=True)
    )
    return Step(obs.float(), action, reward.float(), terminated, truncated, first)


class Sample(NamedTuple):
    obs: np.ndarray
    action: int
    reward: float
    discount: float
    next_obs: np.ndarray


def reference(stream: list[Row], rows: int, n: int, stack: int, clip: float = 0.0) -> dict[int, Sample]:
    """All samples of one column after `stream` was written to a ring of `rows`: {row: Sample}."""
    if not stream:
        return {}
    begins = [t for t, row in enumerate(stream) if row.first or t == 0]
    oldest = 0 if len(stream) <= rows else len(stream) - rows + stack - 1
    samples = {}

    def stacked(t: int) -> np.ndarray:
        begin = max(b for b in begins if b <= t)
        frames = [stream[i].obs if i >= begin else (0.0, 0.0) for i in range(t - stack + 1, t + 1)]
        return np.array(frames if stack > 1 else frames[0], dtype=np.float32)

    for begin, end in zip(begins, [*begins[1:], len(stream)], strict=True):
        for start in range(begin, end):
            if start < oldest or start + n >= len(stream):
                continue
            total, t = 0.0, start
            while t < end:  # through the episode, until something stops the sum
                row = stream[t]
                total += GAMMA ** (t - start) * (float(np.clip(row.reward, -clip, clip)) if clip else row.reward)
                t += 1
                if row.terminated:
                    samples[start] = Sample(stacked(start), stream[start].action, total, 0.0, stacked(t))
                    break
                if row.truncated or t - start == n:
                    if t < end:  # the observation to bootstrap from is there
                        discount = GAMMA ** (t - start)
                        samples[start] = Sample(stacked(start), stream[start].action, total, discount, stacked(t))
                    break
    return samples
