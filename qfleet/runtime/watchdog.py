"""Finds environments that stop answering. The training thread is stuck in them, so the watchdog speaks and acts for it.

| who      | waits for                       | unblocked by                                                     |
|----------|---------------------------------|------------------------------------------------------------------|
| watchdog | the next look, every T / 4      | time, or `close`                                                 |

When a step has taken longer than `runtime.watchdog` seconds, the learner's round is finished, everything but the stuck
environments is saved, and the process ends with an error that names them. Nothing else could end it: a thread that is
stuck in foreign code cannot be interrupted.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from qfleet.acting.collector import Collector


class Watchdog:
    """Calls `stuck(group)` once, from a thread of its own, when a step takes longer than `seconds`."""

    def __init__(self, collector: Collector, seconds: float, stuck: Callable[[int], None]) -> None:
        self._collector, self._seconds, self._stuck = collector, seconds, stuck
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while not self._closed.wait(self._seconds / 4):
            waiting = self._collector.waiting
            if waiting is not None and time.perf_counter() - waiting[1] > self._seconds:
                self._stuck(waiting[0])
                return

    def close(self) -> None:
        self._closed.set()
        self._thread.join()
