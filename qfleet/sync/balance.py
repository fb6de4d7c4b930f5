"""Batches in proportion to speed: the samples of a clock of all workers are divided so that all need the same time for them.

Speeds are measured: samples and seconds of every push, without the time it waited; or they are given (`sync.weights`). What is
given away by one is taken by the others: all batches together stay as many samples as there would be without.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager

MEMORY = 0.8  # of a mean over pushes
SETTLED = 0.1  # a batch changes when it should be larger or smaller by this part


def shares(weights: Sequence[float], total: int) -> list[int]:
    """Whole numbers, at least 1, that add up to `total` (at least as many as there are) in proportion to the weights."""
    exact = [weight / sum(weights) * total for weight in weights]
    parts = [max(1, int(x)) for x in exact]
    while (missing := total - sum(parts)) != 0:
        step = 1 if missing > 0 else -1
        able = [i for i in range(len(parts)) if step > 0 or parts[i] > 1]
        parts[max(able, key=lambda i: step * (exact[i] - parts[i]))] += step
    return parts


class Work:
    """What a learner did since the last time it was told: samples, and seconds without those in which it waited for others."""

    def __init__(self) -> None:
        self.samples, self.seconds = 0, 0.0
        self._back = 0.0  # when the last agreement was over

    @contextmanager
    def done(self, samples: int, began: float) -> Iterator[None]:
        """Around an agreement: before it, so many samples were looked at. `began`: not since before then."""
        self.seconds += time.perf_counter() - max(self._back, began)
        self.samples += samples
        yield
        self._back = time.perf_counter()

    def tell(self) -> tuple[int, float]:
        told = self.samples, self.seconds
        self.samples, self.seconds = 0, 0.0
        return told


class Balance:
    """`batch`: samples a worker has behind a push without balancing."""

    def __init__(self, batch: int, given: Sequence[float] = ()) -> None:
        self._batch = batch
        self._fixed = bool(given)
        self._speeds = dict(enumerate(given))  # samples a second
        self._shares: dict[int, int] = {}

    def saw(self, worker: int, samples: float, seconds: float) -> None:
        """What a worker did for a push."""
        if self._fixed or seconds <= 0.0:
            return
        speed = samples / seconds
        self._speeds[worker] = MEMORY * self._speeds.get(worker, speed) + (1.0 - MEMORY) * speed

    def share(self, worker: int, live: Collection[int]) -> int:
        """The batch of a live worker, now. All change together, so that the sum is right again after one clock."""
        ranks = sorted(self._speeds if self._fixed else live)
        if worker not in ranks or not all(rank in self._speeds for rank in ranks):
            return self._batch
        due = dict(zip(ranks, shares([self._speeds[r] for r in ranks], self._batch * len(ranks)), strict=True))
        now = self._shares
        if due.keys() != now.keys() or any(abs(due[r] - now[r]) > SETTLED * now[r] for r in ranks):
            self._shares = due
        return self._shares[worker]

    def state(self) -> list[list[float]]:
        return [[worker, speed] for worker, speed in self._speeds.items()]

    def load_state(self, state: list[list[float]]) -> None:
        self._speeds = {int(worker): speed for worker, speed in state}
