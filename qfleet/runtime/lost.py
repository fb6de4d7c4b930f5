"""Processes on Ray that are lost: what is said of it, and when it is of no use to replace them."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from typing import Any

from qfleet.runtime.team import TeamError
from qfleet.sync.wire import Gone

STARVED = 3  # times that a process may be killed for want of memory, less one: it will be again


def reason(error: Exception) -> str:
    """The last line of an actor's traceback."""
    return (str(error).strip().splitlines() or [type(error).__name__])[-1]


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
    """Counts those for want of memory."""

    def __init__(self, ray: Any) -> None:
        self._ray = ray
        self._starved: Counter[str] = Counter()

    def how(self, who: str, error: Exception) -> str:
        """What happened to it, as Ray says. Raises TeamError when it happened too often."""
        text = str(error)
        # A call that was going on fails with the first; who asks later only finds the process dead, for this reason.
        if not isinstance(error, self._ray.exceptions.OutOfMemoryError) and "NODE_OUT_OF_MEMORY" not in text:
            return "ended"
        self._starved[who] += 1
        if (times := self._starved[who]) >= STARVED:
            raise TeamError(
                f"{who} was killed {times} times because its machine has no memory left ({text.strip().splitlines()[0]}) "
                "Lower --replay.capacity or --env.num-envs, have fewer learners on a machine, or add memory; --resume goes on from the last checkpoint."
            )
        return "was killed because its machine has no memory left"
