"""Evaluations of a run: episodes with a copy of the network and environments of their own.

Beside the training (a GPU: twenty games of Atari take seconds, in which it would otherwise train nothing) or in between, on
the training thread. The result belongs to the step the copy was made at, and the copy stays until the next `start`: it is
what the best checkpoint saves.

| who       | waits for                                  | unblocked by                                                      |
|-----------|--------------------------------------------|-------------------------------------------------------------------|
| thread    | the copy of the parameters; then its games | the learner's queue; the environments                             |
| training  | nothing: it asks `result` between rounds   |                                                                   |
| `result`  | the thread, where the caller wants it (the | the thread, or `Stuck` when its games have not moved for          |
|           | last evaluation)                           | `patience` seconds: then the thread can only be left behind       |
| `ready`   | the environments to be made                | the thread                                                        |
| `close`   | the thread                                 | the thread, which looks at `stop` after every step; or `Stuck`    |
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from qfleet.acting.policy import Policy, Recorded
from qfleet.device import Mark, Queue
from qfleet.envs import Envs
from qfleet.learner import Flat
from qfleet.runtime import evaluation
from qfleet.runtime.evaluation import Evaluation


class Stuck(RuntimeError):
    """The environments of an evaluation beside the training do not answer."""


class Evaluator:
    """One evaluation at a time. `patience`: seconds that its environments may take for a step (0: for ever).

    Beside the training, the environments are made at once, while everything else starts, too; else for the first evaluation.
    """

    def __init__(
        self,
        policy: Policy,
        make_envs: Callable[[], Envs],
        episodes: int,
        *,
        beside: bool,
        stop: Callable[[], bool] = lambda: False,
        patience: float = 0.0,
    ) -> None:
        self.policy, self._episodes, self._stop_asked = policy, episodes, stop
        self._patience, self._moved = patience, 0.0
        self._awaited: float | None = None
        self._flat, self._copied = Flat(policy.net, policy.device), Mark(policy.device)
        self._queue = Queue(policy.device, urgent=True)
        self._stop = False
        self._make_envs = make_envs
        self._envs: Envs | None = None
        self._pool = ThreadPoolExecutor(1, "evaluation") if beside else None
        self._making = self._pool.submit(self._games) if self._pool else None
        self._player = Recorded(policy, evaluation.num_envs(episodes))
        self._running: Future[Evaluation | None] | None = None

    @property
    def busy(self) -> bool:
        """It was started, and the result was not taken yet."""
        return self._running is not None

    @property
    def waiting(self) -> float | None:
        """Since when (time.perf_counter) the calling thread has been waiting: for a step of its evaluation, or in `ready`."""
        return (self._moved or None) if self._pool is None else self._awaited

    def ready(self) -> None:
        """Return when environments that are made beside are there; raises what making them raised."""
        if self._making is not None:
            self._awaited = time.perf_counter()
            try:
                self._making.result()
            finally:
                self._awaited = None

    @torch.no_grad()
    def start(self, parameters: Flat, seed: int, step: int) -> None:
        """Copy the parameters, in the current queue, and play with them."""
        assert not self.busy
        self._flat.copy_(parameters)
        self._copied.record()
        if self._pool is not None:
            self._running = self._pool.submit(self._play, seed, step)
        else:
            self._running = Future()
            try:
                self._running.set_result(self._play(seed, step))
            except BaseException as e:  # raised by `result`, as beside
                self._running.set_exception(e)

    def result(self, wait: bool = False) -> Evaluation | None:
        """That of the evaluation that was started, once; None if it has none yet, or was stopped (then it is not busy)."""
        if self._running is None:
            return None
        if not self._done(wait):
            return None
        result = self._running.result()
        self._running = None
        return result

    def _done(self, wait: bool) -> bool:
        assert self._running is not None
        while not self._running.done():
            if self._patience and self._moved and time.perf_counter() - self._moved > self._patience:
                raise Stuck("the evaluation's environments")
            if not wait:
                return False
            futures.wait([self._running], timeout=0.25)
        return True

    def _games(self) -> Envs:
        if self._envs is None:
            self._envs = self._make_envs()
        return self._envs

    def _play(self, seed: int, step: int) -> Evaluation | None:
        games = self._games()
        self._copied.wait()
        with self._queue:
            self._moved = time.perf_counter()
            try:
                return evaluation.play(self._player, games, self._episodes, seed, step, self._ended)
            finally:
                self._moved = 0.0

    def _ended(self) -> bool:
        self._moved = time.perf_counter()
        return self._stop or self._stop_asked()

    def kill(self) -> None:
        """End environments that do not answer."""
        if self._envs is not None:
            self._envs.kill()

    def close(self) -> None:
        self._stop = True
        if self._running is not None:
            self._done(wait=True)
        if self._pool is not None:
            self._pool.shutdown()
        if self._envs is not None:
            self._envs.close()
