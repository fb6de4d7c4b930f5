"""One run on one machine: a worker goes round by round; here is everything that happens between its rounds."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

import torch

from qfleet import machine, rng
from qfleet.acting import placement
from qfleet.config import Config, ConfigError, dump_yaml, rewrite_yaml
from qfleet.envs import Envs
from qfleet.learner import Flat, Learned
from qfleet.runtime import evaluation
from qfleet.runtime.checkpoint import Checkpoints, set_aside
from qfleet.runtime.evaluation import Evaluation
from qfleet.runtime.evaluator import Evaluator, Stuck
from qfleet.runtime.failing import ERRORS, Failing, exited, out_of_memory
from qfleet.runtime.metrics import Metrics, Window
from qfleet.runtime.progress import Progress
from qfleet.runtime.setup import lock, prepare, versions
from qfleet.runtime.team import Alone
from qfleet.runtime.worker import EXPLODED, Worker
from qfleet.types import State

AGAIN = 1.0  # seconds in which a second signal is an echo of the first
EVALUATION_SHARE = 4  # an evaluation beside the training has this part of the cores: its threads spin while they wait
PLATEAU = 3  # evaluations without a new best before lr_schedule=plateau halves the learning rate


class Leading(Protocol):
    """The team, for the one that leads it."""

    size: int
    stopping: bool
    lr_scale: float

    def stop(self) -> None: ...


class Crew(Protocol):
    """What goes from round to round: a worker, or all learners of a cluster together. See Worker."""

    config: Config
    device: torch.device
    envs: Envs
    threads: int

    @property
    def team(self) -> Leading: ...
    @property
    def failure(self) -> Exception | None: ...
    @property
    def steps(self) -> int: ...
    @property
    def over(self) -> bool: ...
    def summary(self) -> list[str]: ...
    def build(self) -> None: ...
    def start(self) -> None: ...
    def round(self) -> Learned | None: ...
    def lend(self) -> AbstractContextManager[Flat]: ...
    def settle(self) -> Learned | None: ...
    def exploded(self) -> bool: ...
    def note(self) -> str: ...
    def values(self) -> dict[str, float]: ...
    def waiting(self) -> float | None: ...
    def awaited(self) -> str: ...
    def kill(self) -> None: ...
    def clock(self) -> dict[str, float]: ...
    def save(self, checkpoints: Checkpoints, more: State, stuck: bool = False) -> None: ...
    def load(self, checkpoints: Checkpoints) -> State: ...
    def close(self) -> None: ...


class Trainer:
    """The loop over a worker's rounds. `resume` goes on from the newest checkpoint in run_dir."""

    def __init__(
        self,
        config: Config,
        run_dir: Path,
        progress: Progress,
        resume: bool = False,
        make: Callable[[Config], Crew] = lambda config: Worker(config, Alone()),
    ) -> None:
        self.run_dir, self.progress = run_dir, progress
        self._open = contextlib.ExitStack()  # what must be closed, in reverse order, whatever happens
        self.new = False  # we made the folder, and hold its lock
        try:
            self.worker = make(config)
            self.team = self.worker.team
            self._open.callback(self.worker.close)
            self._make(config, resume)
        except BaseException as e:
            self._open.close()
            if self.new:  # a run that never began leaves nothing behind
                shutil.rmtree(run_dir, ignore_errors=True)
            if isinstance(e, KeyboardInterrupt):
                e.add_note("The last checkpoint is unchanged." if resume else "The run had not begun yet.")
            if isinstance(e, torch.OutOfMemoryError):
                raise ConfigError(out_of_memory(config, e)) from None
            raise

    def _make(self, given: Config, resume: bool) -> None:
        """Everything but the environments, which may be processes that must not outlive a failure here."""
        run_dir, progress, worker = self.run_dir, self.progress, self.worker
        self.config = config = worker.config
        absent = not run_dir.exists()
        if not resume:
            prepare(run_dir)
        self._open.enter_context(lock(run_dir))
        self.new = absent
        if not resume and (run_dir / "config.yaml").exists():
            aside = set_aside(run_dir)
            progress.message(
                f"{run_dir} held a run that ended before its first checkpoint: this one begins anew, in its place"
                + ("" if aside is None else f". The weights it left are in {aside}")
            )
        for line in worker.summary():
            progress.message(line)
        if given.learner.compile == "on" and config.learner.compile == "off":
            progress.message("  note          no C++ compiler here (g++ or clang++): learner.compile is off")
        worker.build()
        self.checkpoints = Checkpoints(run_dir, config.runtime.keep)
        # What the rounds leave behind.
        self.best: float | None = None
        self.evaluations_since_best = 0
        self.window = Window(worker.clock)
        self._before = 0.0  # seconds of earlier incarnations
        self.evaluator = self._make_evaluator(beside=worker.device.type == "cuda" or self.team.size > 1)
        self._evaluation_due = False  # a signal cut it short: it comes first in the resumed run
        self.stop_reason = ""
        self.signal: int | None = None
        self.begun, self.between = False, True  # rounds
        self.failing = Failing(self)
        self._open.callback(self.failing.unwatch)
        position = self._load() if resume else None
        if resume:
            rewrite_yaml(given, run_dir / "config.yaml")  # a resume may change a few settings
            progress.message(f"  resumed       from the checkpoint at step {worker.steps:,}")
        self._evaluations_begun = worker.steps // (config.runtime.eval_every or 1)
        if not resume:
            worker.start()
            dump_yaml(config, run_dir / "config.yaml", versions(config))
        self.evaluator.ready()
        worker.settle()  # what was queued outside of its streams
        self._began = time.perf_counter()
        self.metrics = Metrics(run_dir, position)
        self._open.callback(self.metrics.close)
        self.window.begin()
        self.begun = True

    # --- the loop --------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Train until total_steps, an early stop or a signal; each of these leaves a checkpoint."""
        try:
            previous = catch_signals(self._signalled)
            try:
                self._run()
            finally:
                for number, handler in previous.items():
                    signal.signal(number, handler)
        except BaseException as e:
            self.failing.close(e, self.close)
            raise
        self.failing.close(None, self.close)

    def _run(self) -> None:
        if self.worker.over:
            self.stop_reason = "total_steps"  # a finished run, resumed
        try:
            if self._evaluation_due:
                self._evaluate(self.worker.steps, last=bool(self.stop_reason))
            while not self.worker.over:
                before, self.between = self.worker.steps, False
                learned = self.worker.round()
                self.between = True
                self._between_rounds(before, self.worker.steps, learned)
            # It may have come to its end while a checkpoint was written.
            if not self.stop_reason and self.worker.steps >= self.config.total_steps:
                self._between_rounds(self.worker.steps, self.worker.steps, self.worker.settle())
            if not self.stop_reason:  # another learner of the team was told to
                self.stop_reason, self.signal = "signal", signal.SIGTERM
            self.save()
        except Stuck as e:
            self.failing.stuck(str(e))
        except ERRORS as e:
            error = self.failing.failed(exited(e) if isinstance(e, SystemExit) else e)
            if error is e:
                raise
            raise error from error.__cause__
        if self.worker.failure is not None:
            self.worker.failure.add_note(self.failing.saved)
            raise self.worker.failure

    def close(self) -> None:
        self._open.close()

    def _stop(self, reason: str) -> None:
        self.stop_reason = reason
        self.team.stop()

    # --- between rounds ------------------------------------------------------------------------------------------

    def _between_rounds(self, before: int, step: int, learned: Learned | None) -> None:
        c = self.config.runtime
        while note := self.worker.note():
            self.progress.message(f"  note          {note}")
        finished = step >= self.config.total_steps
        self._account(learned)
        if finished:
            self._account(self.worker.settle())
        if crossed(before, step, c.log_every) or finished:
            self._log(step)
        if finished:
            self._stop("total_steps")
        self._evaluate(step, last=finished)
        if self.signal is not None:
            self.progress.message(f"stopping at step {step:,}: a checkpoint is written, to go on from")
            self._stop("signal")
        if crossed(before, step, c.checkpoint_every):
            self.save()

    def _account(self, learned: Learned | None) -> None:
        if learned is not None:
            self.window.add(learned)
            if not learned.loss_sum < EXPLODED * learned.updates:
                self.failing.diverged(self.worker.steps)

    def _log(self, step: int) -> None:
        values = self.worker.values()
        values |= self.window.close(self.config.learner.batch_size)
        values["pipeline/lag"] = self.config.runtime.lag
        self.metrics.write(step, values)
        self.progress.update(step, values)

    def _make_evaluator(self, beside: bool) -> Evaluator:
        config, spec = self.config, self.worker.envs.spec
        seed, episodes = rng.derive(config.seed, "evaluation environments"), config.runtime.eval_episodes
        cores = min(self.worker.threads, machine.cores())
        threads = max(1, cores // EVALUATION_SHARE) if beside else self.worker.threads
        device = placement.choose(config, spec, evaluation.num_envs(episodes), self.worker.device)
        evaluator = Evaluator(
            placement.untrained(config, spec, device),
            lambda: evaluation.make_envs(config.env, episodes, seed, threads),
            episodes,
            beside=beside,
            stop=lambda: self.signal is not None,
            patience=config.runtime.watchdog,
        )
        self._open.callback(evaluator.close)
        return evaluator

    def _evaluate(self, step: int, last: bool) -> None:
        """See what became of an evaluation begun earlier; begin one if it is time. The last one is waited for."""
        began = time.perf_counter()
        self._take_evaluation(wait=last)
        number = step // (self.config.runtime.eval_every or step + 1)
        due = self._evaluation_due or (number > self._evaluations_begun and not self.stop_reason)
        if last or (due and not self.evaluator.busy):
            self._evaluations_begun, self._evaluation_due = number, False
            with self.worker.lend() as parameters:
                self.evaluator.start(parameters, rng.derive(self.config.seed, f"evaluation {step}"), step)
            self._take_evaluation(wait=last)
        if isinstance(self.worker, Worker):  # which stands still meanwhile: learners on Ray go on
            self.window.leave_out(time.perf_counter() - began)

    def _take_evaluation(self, wait: bool) -> None:
        if self.evaluator.busy:
            if result := self.evaluator.result(wait):
                self._judge(result)
            elif not self.evaluator.busy:  # a signal stopped it
                self._evaluation_due = True

    def _judge(self, result: Evaluation) -> None:
        """What follows from an evaluation."""
        c = self.config.runtime
        better = self.best is None or result.mean_return > self.best
        if better or result.mean_return == self.best:  # of equals, the newest is kept
            self.best = result.mean_return
            self.checkpoints.save_best(
                result.step, asdict(self.worker.envs.spec), self.evaluator.policy.net.state_dict()
            )
        if better:
            self.evaluations_since_best = 0
        else:
            self.evaluations_since_best += 1
            if self.config.learner.lr_schedule == "plateau" and self.evaluations_since_best % PLATEAU == 0:
                self.team.lr_scale *= 0.5
                self.progress.message(f"no new best in {PLATEAU} evaluations: learning rate × {self.team.lr_scale:g}")
        values = {
            "eval/mean_reward": result.mean_return,
            "eval/std_reward": result.std_return,
            "eval/best_mean_reward": self.best or 0.0,
        }
        self.metrics.write(result.step, values)
        self.progress.update(self.worker.steps, {**values, "eval/step": result.step})
        if c.stop_at is not None and result.mean_return >= c.stop_at:
            self._stop("stop_at")
        elif c.patience and self.evaluations_since_best >= c.patience:
            self._stop("patience")

    # --- stopping and resuming -----------------------------------------------------------------------------------

    def _signalled(self, number: int) -> None:
        self.signal = number

    def save(self, stuck: bool = False) -> None:
        self._account(self.worker.settle())
        if self.worker.exploded():
            self.failing.diverged(self.worker.steps)
        self.worker.save(self.checkpoints, self._remembered(), stuck)

    def _remembered(self) -> State:
        return {
            "best": self.best,
            "evaluations_since_best": self.evaluations_since_best,
            "evaluation_due": self._evaluation_due or self.evaluator.busy,
            "window": self.window.state(),
            "metrics_bytes": self.metrics.position(),
            "seconds": self.seconds,
        }

    def _load(self) -> int:
        """-> the length metrics.jsonl had at the checkpoint."""
        state = self.worker.load(self.checkpoints)
        self.best, self.evaluations_since_best = state["best"], state["evaluations_since_best"]
        self._evaluation_due = state["evaluation_due"]
        self.window.load_state(state["window"])
        self._before = state["seconds"]
        return int(state["metrics_bytes"])

    @property
    def seconds(self) -> float:
        """Wall time of the run so far, over all its incarnations."""
        return self._before + time.perf_counter() - self._began


def catch_signals(caught: Callable[[int], None]) -> dict[int, Any]:
    """First SIGINT or SIGTERM: finish the round, checkpoint, leave. The second: leave at once. -> the handlers of before.

    Under a launcher Ctrl-C comes twice: from the terminal, and from the launcher."""
    if threading.current_thread() is not threading.main_thread():
        return {}
    first: float | None = None

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal first
        if first is None:
            first = time.monotonic()
            caught(number)
        elif time.monotonic() - first > AGAIN:
            os._exit(128 + number)

    return {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}


def crossed(before: int, after: int, every: int) -> bool:
    """Did the count pass a multiple of `every` (0: never)?"""
    return every > 0 and before // every < after // every
