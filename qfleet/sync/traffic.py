"""What a learner's agreements with the others cost, counted."""

from __future__ import annotations

BUCKETS = (0, 1, 2, 4, 8)  # staleness of a push, in versions: from each of these up to the next
STALE = tuple(f"sync/stale_{low}" for low in BUCKETS)
COUNTS = ("sync/pushes", "sync/rejected", "sync/samples", "sync/bytes", "sync/plain_bytes", "sync/stale", *STALE)


class Traffic:
    def __init__(self) -> None:
        self._counts = dict.fromkeys(COUNTS, 0.0)
        self.seconds = 0.0  # that the learner waited
        self._each: dict[str, float] = {}  # of all learners, where they tell each other

    def pushed(self, samples: int, size: int, plain: int, staleness: int = 0, rejected: bool = False) -> None:
        """A vector that was sent. `size`: bytes that this took, `plain`: that it would have taken in fp32."""
        bucket = max((i for i, low in enumerate(BUCKETS) if staleness >= low), default=0)
        for name, value in zip(COUNTS, (1, rejected, samples, size, plain, staleness), strict=False):
            self._counts[name] += value
        self._counts[STALE[bucket]] += 1

    def told(self, learner: int, samples: float, seconds: float) -> None:
        """By a learner: samples since it last did, and for how many seconds it has waited so far."""
        name = f"learner_{learner}/samples"
        self._each[name] = self._each.get(name, 0.0) + samples
        self._each[f"learner_{learner}/wait"] = seconds

    def counts(self) -> dict[str, float]:
        """So far."""
        return self._counts | {"sync/wait": self.seconds} | self._each


def rates(passed: dict[str, float], wall: float) -> dict[str, float]:
    """What is written of a time: from how much was counted in it. Empty where nothing was pushed."""
    pushes = passed.get("sync/pushes", 0.0)
    if not pushes:
        return {}
    values = {
        "sync/pushes_per_second": pushes / wall,
        "sync/samples_per_second": passed["sync/samples"] / wall,
        "sync/mb_per_second": passed["sync/bytes"] / 1e6 / wall,
        "sync/wait": passed["sync/wait"] / wall,
        "sync/rejected": passed["sync/rejected"] / pushes,
        "sync/staleness": passed["sync/stale"] / pushes,
    }
    if passed["sync/bytes"]:  # not of a learner whose group has no other, for now
        values["sync/compression"] = passed["sync/plain_bytes"] / passed["sync/bytes"]
    for name, value in passed.items():
        if name.startswith("learner_"):
            values[name.replace("/samples", "/samples_per_second")] = value / wall
    return values | {name: passed[name] / pushes for name in STALE}
