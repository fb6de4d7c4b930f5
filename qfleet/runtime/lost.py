"""Processes on Ray that are lost, or fail: what is said of it, and when it is of no use to replace them."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from typing import Any

from qfleet.runtime.team import TeamError
from qfleet.sync.wire import Gone

AGAIN = 3  # times that a process is killed for want of memory, or in a row before it did anything: it will be again
WITH_MACHINE = "ended with its machine"


class Remote(Exception):
    """The traceback of another process."""


def reason(error: Exception) -> str:
    """The last line of an actor's traceback."""
    return (str(error).strip().splitlines() or [type(error).__name__])[-1]


def said(error: Exception) -> str:
    """Its type and first line; and the last one, where the lines between are a traceback of yet another process."""
    lines = str(error).strip().splitlines() or [""]
    nested = "Traceback (most recent call last)" in str(error)
    return f"{type(error).__name__}: {lines[0]}{f' {lines[-1]}' if nested else ''}"


def failure(what: str, error: Exception) -> TeamError:
    """Of the code in an actor. Its traceback is the cause, where it is of use: an error of ours says what to do."""
    why, cause = reason(error), getattr(error, "cause", None)
    ours = why.startswith("qfleet.")
    if isinstance(cause, Exception):
        ours, why = type(cause).__module__.startswith("qfleet."), said(cause)
    failed = TeamError(f"{what}: {why}")
    failed.__cause__ = None if ours else error
    return failed


@contextlib.contextmanager
def unless_lost(ray: Any) -> Iterator[list[str]]:
    """Ask processes that may be lost, or their machines: then there is no answer, but a reason. What fails in a process itself is an error."""
    why: list[str] = []
    try:
        yield why
    except ray.exceptions.RayTaskError as e:
        if not isinstance(e.cause, Gone):  # which is another process that is lost
            raise
        why.append(str(e.cause))
    except ray.exceptions.RayError as e:
        why.append(reason(e))


class Losses:
    """Counts those that are the process's own fault."""

    def __init__(self, ray: Any) -> None:
        self._ray = ray
        self._starved: Counter[str] = Counter()
        self._vain: Counter[str] = Counter()  # in a row

    def how(self, who: str, error: Exception) -> str:
        """What happened to it, as Ray says. Raises TeamError when it happened too often."""
        text = str(error)
        # A call that was going on fails with the first; who asks later only finds the process dead, for this reason.
        if not isinstance(error, self._ray.exceptions.OutOfMemoryError) and "NODE_OUT_OF_MEMORY" not in text:
            return WITH_MACHINE if "its node has died" in text else "ended"
        self._starved[who] += 1
        if (times := self._starved[who]) >= AGAIN:
            raise TeamError(
                f"{who} was killed {times} times because its machine has no memory left ({text.strip().splitlines()[0]}) "
                "Lower --replay.capacity or --env.num-envs, have fewer learners on a machine, or add memory."
            )
        return "was killed because its machine has no memory left"

    def in_vain(self, who: str, what: str) -> None:
        """It was made, and lost before it did anything. Raises TeamError when that happened too often."""
        self._vain[who] += what != WITH_MACHINE
        if (times := self._vain[who]) >= AGAIN:
            raise TeamError(
                f"{who} was lost {times} times in a row before its first round: the last time it {what}. See whether one learner runs on that machine, without Ray; "
                "if its environments need long to begin, raise --sync.heartbeat or --runtime.watchdog."
            )

    def worked(self, who: str) -> None:
        del self._vain[who]
