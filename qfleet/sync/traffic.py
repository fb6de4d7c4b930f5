"""What a learner's agreements with the others cost, counted."""

from __future__ import annotations

BUCKETS = (0, 1, 2, 4, 8)  # staleness of a push, in versions: from each of these up to the next
STALE = tuple(f"sync/stale_{low}" for low in BUCKETS)
COUNTS = ("sync/pushes", "sync/rejected", "sync/samples", "sync/bytes", "sync/plain_bytes", "sync/stale", *STALE)


class Traffic:
    def __init__(self) -> None:
        self._counts = dict.fromkeys(COUNTS, 0.0)
        self.seconds = 0.0  # that the learner waited

    def pushed(self, samples: int, size: int, plain: int, staleness: int = 0, rejected: bool = False) -> None:
        """A vector that was sent. `size`: bytes of the message, `plain`: of the vector as it was."""
        bucket = max((i for i, low in enumerate(BUCKETS) if staleness >= low), default=0)
        for name, value in zip(COUNTS, (1, rejected, samples, size, plain, staleness), strict=False):
            self._counts[name] += value
        self._counts[STALE[bucket]] += 1

    def counts(self) -> dict[str, float]:
        """So far."""
        return self._counts | {"sync/wait": self.seconds}


def rates(passed: dict[str, float], wall: float) -> dict[str, float]:
    """What is written of a time: from how much was counted in it. Empty where nothing was pushed."""
    pushes = passed.get("sync/pushes", 0.0)
    if not pushes:
        return {}
    values = {
        "sync/pushes_per_second": pushes / wall,
        "sync/samples_per_second": passed["sync/samples"] / wall,
        "sync/mb_per_second": passed["sync/bytes"] / 1e6 / wall,
        "sync/compression": passed["sync/plain_bytes"] / passed["sync/bytes"],
        "sync/wait": passed["sync/wait"] / wall,
        "sync/rejected": passed["sync/rejected"] / pushes,
        "sync/staleness": passed["sync/stale"] / pushes,
    }
    return values | {name: passed[name] / pushes for name in STALE}
