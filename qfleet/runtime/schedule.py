"""One round, three ways: collect and update in turn, or at the same time, on a thread or on a GPU.

                      main thread                                learner thread (pipelined)
    serial, lag 0     collect → store → learn
    serial, lag 1     collect → learn → store
    pipelined         ┌ collect (acting copy) ┐ join → store     ┌ learn on rows of earlier rounds ┐
                      └───────────────────────┘   → publish      └─────────────────────────────────┘
    streams           the same with a GPU's stream instead of a thread: the main thread queues, at most a round ahead;
                      with several learners, who wait for each other in every update, a thread does

| who     | consumes                        | waits for                    | unblocked by           |
|---------|---------------------------------|------------------------------|------------------------|
| collect | acting parameters, environments | nothing                      |                        |
| learn   | replay rows, learner parameters | the start of the round       | main thread's submit   |
| join    | both results                    | the slower of the two        | the learner's future   |

Nothing is shared while both run: the collector stages its rows aside and acts with its own copy of the parameters; rows
enter the replay, and parameters reach the copy, only between rounds. So lag 1 gives the same numbers in both schedules.
On a GPU the streams wait for each other, not the host: the acting stream for the copy of the parameters (`publish`, queued
behind the round's updates), the learner stream for the staged rows. Staging buffers are two, used in turn.
Shutdown: `close` joins the thread, or the GPU; a round in flight is always finished first.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol, TypeVar

import torch

from qfleet.device import Queue, Spans, settle, use
from qfleet.types import Step

T = TypeVar("T")


class Schedule(Protocol):
    """`wait` returns when nothing is going on; `publishing` surrounds the copy of parameters for acting."""

    wait_seconds: float

    @property
    def learn_seconds(self) -> float: ...
    def round(self, collect: Callable[[], Step], store: Callable[[Step], None], learn: Callable[[], T]) -> T: ...
    def publishing(self) -> AbstractContextManager[object]: ...
    def wait(self) -> None: ...
    def close(self) -> None: ...


class Serial:
    """Everything on the calling thread, or queued by it in one order."""

    def __init__(self, device: torch.device, lag: int, threads: int) -> None:
        self._lag, self._spans = lag, Spans(device)
        self.wait_seconds = 0.0
        torch.set_num_threads(threads)

    def round(self, collect: Callable[[], Step], store: Callable[[Step], None], learn: Callable[[], T]) -> T:
        rows = collect()
        if self._lag == 0:
            store(rows)
        with self._spans:
            learned = learn()
        if self._lag == 1:
            store(rows)
        return learned

    @property
    def learn_seconds(self) -> float:
        return self._spans.seconds

    def publishing(self) -> AbstractContextManager[object]:
        return nullcontext()

    def wait(self) -> None:
        pass

    def close(self) -> None:
        pass


def learner_thread(device: torch.device, threads: int) -> ThreadPoolExecutor:
    def begin() -> None:
        use(device)
        torch.set_num_threads(threads)

    return ThreadPoolExecutor(1, "learner", initializer=begin)


class Pipelined:
    """Learning on a thread of its own, while the calling thread steps the environments. Lag 1."""

    def __init__(self, device: torch.device, threads: int) -> None:
        self._pool = learner_thread(device, threads)
        self.learn_seconds = self.wait_seconds = 0.0
        self._learning: Future[Any] | None = None
        torch.set_num_threads(1)

    def round(self, collect: Callable[[], Step], store: Callable[[Step], None], learn: Callable[[], T]) -> T:
        self._learning = future = self._pool.submit(self._timed, learn)
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

    def publishing(self) -> AbstractContextManager[object]:
        return nullcontext()

    def wait(self) -> None:
        if self._learning is not None:
            wait([self._learning])

    def close(self) -> None:
        self._pool.shutdown()


class Streams:
    """Learning is queued on the device, while the calling thread steps the environments. Lag 1."""

    def __init__(self, device: torch.device, threads: int) -> None:
        self._device = device
        self._learner, self._acting = Queue(device), Queue(device, urgent=True)
        self._spans = Spans(device)
        self.wait_seconds = 0.0
        self._threads = 1 if device.type == "cuda" else threads
        torch.set_num_threads(self._threads)

    def round(self, collect: Callable[[], Step], store: Callable[[Step], None], learn: Callable[[], T]) -> T:
        learned = self._queue(learn)
        with self._acting:
            rows = collect()
        self._keep(rows, store)
        return learned

    def _queue(self, learn: Callable[[], T]) -> T:
        with self._learner, self._spans:
            return learn()

    def _keep(self, rows: Step, store: Callable[[Step], None]) -> None:
        self._learner.wait_for(self._acting)
        with self._learner:
            store(rows)

    @contextmanager
    def publishing(self) -> Iterator[None]:
        """What acting read last has been read: the host has seen the actions."""
        with self._learner:
            yield
        self._acting.wait_for(self._learner)

    @property
    def learn_seconds(self) -> float:
        """Time in which the learner's stream was at work, as far as it is known."""
        return self._spans.seconds

    def wait(self) -> None:
        settle(self._device)

    def close(self) -> None:
        self.wait()


class Aside(Streams):
    """Where learning waits for other learners, a thread queues it."""

    def __init__(self, device: torch.device, threads: int) -> None:
        super().__init__(device, threads)
        self._pool = learner_thread(device, self._threads)

    def round(self, collect: Callable[[], Step], store: Callable[[Step], None], learn: Callable[[], T]) -> T:
        future = self._pool.submit(self._queue, learn)
        try:
            with self._acting:
                rows = collect()
        finally:
            began = time.perf_counter()
            learned = future.result()
            self.wait_seconds += time.perf_counter() - began
        self._keep(rows, store)
        return learned

    def close(self) -> None:
        self._pool.shutdown()
        super().close()
