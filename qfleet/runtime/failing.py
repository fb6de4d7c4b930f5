"""How a run that cannot go on comes to its end: what is saved, what is said, and what must not be left behind.

An error stops the training thread, which then saves (`failed`). Environments that hang stop it, too, and for good: the
watchdog's thread saves without them, and ends the process (`stuck`). See runtime.watchdog.
"""

from __future__ import annotations

import contextlib
import errno
import shutil
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, NoReturn

import torch

from qfleet.config import Config
from qfleet.runtime import checkpoint
from qfleet.runtime.evaluator import Stuck
from qfleet.runtime.team import TeamError, command
from qfleet.runtime.watchdog import Watchdog, end
from qfleet.runtime.worker import EXPLODED, Worker

if TYPE_CHECKING:
    from qfleet.runtime.train import Trainer

DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
ERRORS = (Exception, SystemExit)  # what environments, which are the user's code, may raise


class TrainingError(RuntimeError):
    """The run cannot go on: the loss exploded."""


class Exploded(Exception):
    """The parameters did, as they were about to be saved."""


class Failing:
    """What a trainer does when something fails."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer, self._run_dir, self._seconds = trainer, trainer.run_dir, trainer.config.runtime.watchdog
        self._watchdog = Watchdog(self._waiting, self._seconds, self._environments_stuck) if self._seconds else None

    def unwatch(self) -> None:
        if self._watchdog is not None:
            self._watchdog.close()

    # --- an error ----------------------------------------------------------------------------------------------------

    def failed(self, error: Exception) -> Exception:
        """-> what to raise for it, with what became of the run."""
        self.unwatch()  # it would save, too; what is asked of environments from now on is watched where it is asked
        if isinstance(error, Exploded):
            error = self._divergence(self._trainer.worker.steps)
        elif isinstance(error, torch.OutOfMemoryError):
            error = TrainingError(f"{out_of_memory(self._trainer.config, error)} {self._last_checkpoint()}")
        elif isinstance(error, OSError) and error.errno in DISK_FULL:
            hint = f"Make room and go on with `qfleet train --resume {self._run_dir}`."
            error = OSError(error.errno, f"{error.strerror}. The run stopped. {self._last_checkpoint()} {hint}")
        elif not isinstance(error, TrainingError):
            error.add_note(self._rescue(error))
        first = self._trainer.worker.failure
        if first is None or first is error:
            return error
        first.add_note(" ".join([f"Then this failed: {error}", *getattr(error, "__notes__", ())]))
        return first

    def diverged(self, step: int) -> NoReturn:
        raise self._divergence(step)

    def _divergence(self, step: int) -> TrainingError:
        return TrainingError(
            f"the loss exploded (it is no number, or above {EXPLODED:g}) at step {step:,}. {self._last_checkpoint()} Lower --learner.lr or set --learner.grad-clip; check that observations and rewards are finite numbers."
        )

    def close(self, failing: BaseException | None, close: Callable[[], None]) -> None:
        """What goes wrong now must not hide why the run fails."""
        try:
            close()
        except Stuck as e:  # a signal stopped the run before its evaluation had ended
            self._end(str(e), "" if failing is not None else self.saved, failing)
        except ERRORS as e:
            if failing is None:
                raise
            failing.add_note(f"Closing failed, too: {e}")

    def _rescue(self, error: Exception) -> str:
        """Save what can be saved when environments fail, most likely -> what became of it."""
        if isinstance(error, TeamError):  # others are lost, too
            return self._last_checkpoint()
        if self._one_of_several:  # the others do not know
            return f"{self._last_checkpoint()} Go on with `{command()} train --resume {self._run_dir}`."
        self._trainer.team.stop()  # learners on Ray come to their end, and save their parts there
        return self._save_what_answers(stuck=not self._trainer.between, failing=error)

    def _save_what_answers(self, stuck: bool, failing: Exception | None = None) -> str:
        """`stuck`: without the environments; they are left out, too, where they fail or hang while they are asked for their state
        -> what became of it. `failing`: why the run ends, if it is not that they hang."""
        try:
            if not stuck:
                try:
                    with self._watching(failing):
                        self._trainer.save()
                    return self.saved
                except ERRORS as e:
                    if isinstance(e, TrainingError) or not isinstance(self._trainer.worker, Worker):
                        raise
            self._trainer.save(stuck=True)
        except ERRORS as e:  # what has failed must be said, whatever fails now
            return f"Saving failed: {e}. {self._last_checkpoint()}"
        return self.saved

    def _watching(self, failing: Exception | None) -> AbstractContextManager[object]:
        """A watchdog for environments that are asked for their state when the run ends."""
        worker = self._trainer.worker

        def stuck() -> None:
            self._stuck(worker.awaited(), training=True, failing=failing)

        if not self._seconds:
            return contextlib.nullcontext()
        return contextlib.closing(Watchdog(worker.waiting, self._seconds, stuck))

    # --- environments that hang ----------------------------------------------------------------------------------------

    def _waiting(self) -> float | None:
        """Since when the training thread has been waiting for environments, of the training or of an evaluation."""
        waiting = self._trainer.worker.waiting()
        return self._trainer.evaluator.waiting if waiting is None else waiting

    def _environments_stuck(self) -> None:
        """Called by the watchdog, while the training thread waits for environments that do not answer."""
        awaited = self._trainer.worker.awaited()
        self._stuck(awaited or "the evaluation's environments", training=bool(awaited))

    def stuck(self, who: str) -> NoReturn:
        """The evaluation's environments, whose thread cannot be joined."""
        self.unwatch()
        self._stuck(who)

    def _stuck(self, who: str, training: bool = False, failing: Exception | None = None) -> NoReturn:
        """Save and end the process. `training`: without the environments of the training, which do not answer."""
        trainer, message = self._trainer, ""
        try:
            if not trainer.begun:
                if trainer.new:  # it leaves nothing behind
                    shutil.rmtree(self._run_dir, ignore_errors=True)
            elif self._one_of_several:
                message = self._last_checkpoint()
            else:
                trainer.team.stop()
                message = self._save_what_answers(stuck=training)
        finally:  # whatever fails here, the process must end, and say why
            self._end(who, message, failing)

    def _end(self, who: str, message: str, failing: BaseException | None) -> NoReturn:
        """End the process, and what would be left behind. `failing`: why the run had ended before."""
        trainer = self._trainer
        trainer.progress.close()
        trainer.worker.kill()
        trainer.evaluator.kill()
        if failing is not None:
            traceback.print_exception(failing)
        first = trainer.worker.failure
        before = "" if first is None else f" Before that, {first}."
        end(who, self._seconds, before + (message and f" {message}"))

    # --- what is said ----------------------------------------------------------------------------------------------------

    @property
    def _one_of_several(self) -> bool:
        """Under a launcher: the others would not save their parts."""
        return isinstance(self._trainer.worker, Worker) and self._trainer.team.size > 1

    @property
    def saved(self) -> str:
        return f"Everything else is saved: go on with `qfleet train --resume {self._run_dir}`."

    def _last_checkpoint(self) -> str:
        saved = checkpoint.steps(self._trainer.checkpoints.dir)
        return f"The last good checkpoint is {saved[-1]}." if saved else "There is no checkpoint yet."


def exited(error: SystemExit) -> RuntimeError:
    """Of an environment: it would end the program without a word."""
    code = "" if error.code is None else repr(error.code)
    why = RuntimeError(f"the environment called sys.exit({code}). Let it raise an error, or end the episode, instead.")
    why.__cause__ = error
    return why


def out_of_memory(config: Config, error: torch.OutOfMemoryError) -> str:
    return (
        f"the GPU has too little memory: {str(error).splitlines()[0].removeprefix('CUDA out of memory. ')} Lower --replay.capacity ({config.replay.capacity:,}), "
        f"--learner.batch-size ({config.learner.batch_size}) or --env.num-envs ({config.env.num_envs}), or keep the replay in main memory with --replay.device cpu."
    )
