"""Evaluation beside training: a thread, environments and a copy of the network of its own.

| who       | waits for                                  | unblocked by                                                      |
|-----------|--------------------------------------------|-------------------------------------------------------------------|
| thread    | the copy of the parameters; then its games | the learner's queue; the environments                             |
| training  | nothing: it asks `result` between rounds   |                                                                   |
| `result`  | the thread, where the caller wants it (the | the thread, or `Stuck` when its games have not moved for          |
|           | last evaluation)                           | `patience` seconds: then the thread can only be left behind       |
| `ready`   | the environments to be made                | the thread                                                        |
| `close`   | the thread                                 | the thread, which looks at `stop` after every step                |

Twenty games of Atari take seconds, in which a GPU would otherwise train nothing. The result belongs to the step the copy
was made at, and the copy stays until the next `start`: it is what the best checkpoint saves. The environments are made at
once, while everything else starts, too.
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
    """The environments of an evaluation do not answer."""


class Background:
    """One evaluation at a time. `patience`: seconds that its environments may take for a step (0: for ever)."""

    def __init__(
        self,
        policy: Policy,
        make_envs: Callable[[], Envs],
        episodes: int,
        stop: Callable[[], bool] = lambda: False,
        patience: float = 0.0,
    ) -> None:
        self.policy, self._episodes, self._stop_asked = policy, episodes, stop
        self._patience, self._moved = patience, time.perf_counter()
        self._flat, self._copied = Flat(policy.net, policy.device), Mark(policy.device)
        self._queue = Queue(policy.device, urgent=True)
        self._stop = False
        self._pool = ThreadPoolExecutor(1, "evaluation")
        self._envs = self._pool.submit(make_envs)
        self._player = Recorded(policy, evaluation.num_envs(episodes))
        self._running: Future[Evaluation | None] | None = None

    @property
    def busy(self) -> bool:
        return self._running is not None

    def ready(self) -> None:
        """Return when the environments are made, which may take its time; raises what making them raised."""
        self._envs.result()

    @torch.no_grad()
    def start(self, parameters: Flat, seed: int, step: int) -> None:
        """Copy the parameters, in the current queue, and play with them."""
        assert not self.busy
        self._flat.copy_(parameters)
        self._copied.record()
        self._moved = time.perf_counter()
        self._running = self._pool.submit(self._play, seed, step)

    def result(self, wait: bool = False) -> Evaluation | None:
        """That of the evaluation that was started, once; None if it has none, or was stopped."""
        if self._running is None:
            return None
        while not self._running.done():
            if self._patience and time.perf_counter() - self._moved > self._patience:
                raise Stuck("the evaluation's environments")
            if not wait:
                return None
            futures.wait([self._running], timeout=0.25)
        result = self._running.result()
        self._running = None
        return result

    def _play(self, seed: int, step: int) -> Evaluation | None:
        envs = self._envs.result()
        self._copied.wait()
        with self._queue:
            return evaluation.play(self._player, envs, self._episodes, seed, step, self._ended)

    def _ended(self) -> bool:
        self._moved = time.perf_counter()
        return self._stop or self._stop_asked()

    def close(self) -> None:
        self._stop = True
        self._pool.shutdown()
        if self._envs.exception() is None:
            self._envs.result().close()
