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


class Watchdog:
    """Calls `stuck` once, from a thread of its own, when a step takes longer than `seconds`.

    `waiting` says since when (time.perf_counter) the training thread has been waiting for a step; None if it is not.
    """

    def __init__(self, waiting: Callable[[], float | None], seconds: float, stuck: Callable[[], None]) -> None:
        self._waiting, self._seconds, self._stuck = waiting, seconds, stuck
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while not self._closed.wait(self._seconds / 4):
            since = self._waiting()
            if since is not None and time.perf_counter() - since > self._seconds:
                self._stuck()
                return

    def close(self) -> None:
        self._closed.set()
        self._thread.join()
