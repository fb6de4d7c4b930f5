"""One round, two ways: collect and update in turn, or at the same time.

                      main thread                                learner thread (pipelined)
    serial, lag 0     collect → store → learn
    serial, lag 1     collect → learn → store
    pipelined         ┌ collect (acting copy) ┐ join → store     ┌ learn on rows of earlier rounds ┐
                      └───────────────────────┘   → publish      └─────────────────────────────────┘

| who     | consumes                        | waits for                    | unblocked by           |
|---------|---------------------------------|------------------------------|------------------------|
| collect | acting parameters, environments | nothing                      |                        |
| learn   | replay rows, learner parameters | the start of the round       | main thread's submit   |
| join    | both results                    | the slower of the two        | the learner's future   |

Nothing is shared while both run: the collector stages its rows aside and acts with its own copy of the parameters; rows
enter the replay, and parameters reach the copy, only between rounds. So lag 1 gives the same numbers in both schedules.
Shutdown: `close` joins the thread; a round in flight is always finished first.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

from qfleet.types import Step

T = TypeVar("T")


class Serial:
    """Everything on the calling thread."""

    def __init__(self, lag: int, threads: int) -> None:
        self._lag = lag
        self.learn_seconds = self.wait_seconds = 0.0
        torch.set_num_threads(threads)

    def round(self, collect: Callable[[], Step], store: Callable[[Step], None], learn: Callable[[], T]) -> T:
        rows = collect()
        if self._lag == 0:
            store(rows)
        began = time.perf_counter()
        learned = learn()
        self.learn_seconds += time.perf_counter() - began
        if self._lag == 1:
            store(rows)
        return learned

    def close(self) -> None:
        pass


class Pipelined:
    """Learning on a thread of its own, while the calling thread steps the environments. Lag 1."""

    def __init__(self, threads: int) -> None:
        self._pool = ThreadPoolExecutor(1, "learner", initializer=torch.set_num_threads, initargs=(threads,))
        self.learn_seconds = self.wait_seconds = 0.0
        torch.set_num_threads(1)

    def round(self, collect: Callable[[], Step], store: Callable[[Step], None], learn: Callable[[], T]) -> T:
        future = self._pool.submit(self._timed, learn)
        try:
            rows = collect()
        finally:  # a failing environment must not leave the learner running behind our back
            began = time.perf_counter()
            learned = future.result()
            self.wait_seconds += time.perf_counter() - began
        store(rows)
        return learned

    def _timed(self, learn: Callable[[], T]) -> T:
        began = time.perf_counter()
        learned = learn()
        self.learn_seconds += time.perf_counter() - began
        return learned

    def close(self) -> None:
        self._pool.shutdown()
