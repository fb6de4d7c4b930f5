"""Finds environments that stop answering. The training thread is stuck in them, so the watchdog speaks and acts for it.

| who      | waits for                       | unblocked by                                                     |
|----------|---------------------------------|------------------------------------------------------------------|
| watchdog | the next look, every T / 4      | time, or `close`                                                 |

When a step has taken longer than `runtime.watchdog` seconds, the learner's round is finished, everything but the stuck
environments is saved, and the process ends with an error that names them. Nothing else could end it: a thread that is
stuck in foreign code cannot be interrupted.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import NoReturn


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


@contextlib.contextmanager
def watched(who: str, seconds: float, kill: Callable[[], None] = lambda: None) -> Iterator[Callable[[], None]]:
    """Where there is nothing to save yet, or any more: the process ends when what is done inside takes longer (0: never), or does not
    call what this gives in between. `kill` what would be left behind."""
    moved = time.perf_counter()

    def move() -> None:
        nonlocal moved
        moved = time.perf_counter()

    def stuck() -> None:
        kill()
        end(who, seconds)

    watchdog = Watchdog(lambda: moved, seconds, stuck) if seconds else None
    try:
        yield move
    finally:
        if watchdog is not None:
            watchdog.close()


def end(who: str, seconds: float, what_else: str = "") -> NoReturn:
    """End this process, of which a thread is stuck."""
    message = f"{who} did not answer for {seconds:g} s, and the run cannot go on.{what_else} (runtime.watchdog sets the time.)"
    print(f"qfleet: error: {message}", file=sys.stderr, flush=True)
    os._exit(1)
