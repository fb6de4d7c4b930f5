"""What the learners of a cluster told about themselves, put together for metrics."""

from __future__ import annotations

import time

import numpy as np

from qfleet.runtime.hub import Report
from qfleet.sync.traffic import COUNTS, rates

EACH = ("samples_per_second", "mb_per_second", "wait", "staleness", "rejected")  # metrics of every learner
SECONDS = ("env", "act", "learn", "transfer", "wait", "wait_actions", "sync/wait")  # on a learner's clock


class Told:
    def __init__(self, learners: int) -> None:
        self._learners = learners
        self.updates = 0  # of all
        self.clocks: dict[int, dict[str, float]] = {}
        self._values: dict[int, dict[str, float]] = {}
        self._then: dict[int, dict[str, float]] = {}  # clocks at the last line of metrics
        # Of learners that were replaced.
        self._ended: list[dict[str, float]] = []
        self._episodes = 0.0

    def add(self, report: Report) -> None:
        if report.clock:
            self._values[report.rank] = report.values
            self.clocks[report.rank] = report.clock
        if report.learned is not None:
            self.updates += report.learned.updates

    def remove(self, rank: int) -> None:
        if rank in self.clocks:
            self._ended.append(self.clocks.pop(rank))
        self._then.pop(rank, None)
        self._episodes += self._values.pop(rank, {}).get("rollout/episodes", 0.0)

    def values(self) -> dict[str, float]:
        """Means over the learners; episodes are counted together, updates are of who made most. And of each learner, what it did since the last time."""
        every = list(self._values.values())
        names = {name for values in every for name in values}
        values = {n: float(np.mean([v[n] for v in every if n in v])) for n in sorted(names)}
        if every:
            values["train/n_updates"] = max(v["train/n_updates"] for v in every)
        values["rollout/episodes"] = self._episodes + sum(v.get("rollout/episodes", 0.0) for v in every)
        for rank, clock in sorted(self.clocks.items()):
            then, self._then[rank] = self._then.get(rank), clock
            if then is not None and clock["wall"] > then["wall"]:
                passed = {name: clock[name] - then[name] for name in clock}
                found = rates(passed, passed["wall"])
                values |= {f"learner_{rank}/{n}": found[f"sync/{n}"] for n in EACH if f"sync/{n}" in found}
        return values

    def clock(self, steps: int) -> dict[str, float]:
        """Counts of all learners; seconds are means over them, so that shares are shares of a learner's time."""
        every = [*self._ended, *self.clocks.values()]
        seconds = {n: sum(clock[n] for clock in every) / self._learners for n in SECONDS}
        counts = {n: sum(clock[n] for clock in every) for n in ("bytes", *COUNTS)}
        return {"wall": time.perf_counter(), "steps": steps, "updates": self.updates, **counts, **seconds}
