"""What every kind of environment vector gives to the collector: `Envs` and the `EnvStep` its `step` returns."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING, NamedTuple, Protocol, Self

import numpy as np

if TYPE_CHECKING:  # qfleet.types imports torch; worker processes import this package and should not wait for that
    from qfleet.types import Array, Spec, State


class EnvStep(NamedTuple):
    """One vector step of E environments.

    The arrays belong to the environments and are overwritten by the next `step` or `reset`: copy what must stay.
    Every kind resets in the next step: after an end, the action is ignored and the row holds the first observation of
    the new episode with reward 0 and `first` set.
    """

    obs: Array  # [E, *obs_shape]
    reward: Array  # [E] float32, never clipped
    terminated: Array  # [E] bool
    truncated: Array  # [E] bool
    first: Array  # [E] bool: obs is the first of an episode; the action was ignored
    life_lost: Array  # [E] bool: a life was lost and the game goes on (Atari with env.life_loss only)


class Envs(Protocol):
    """E environments of one kind, stepped together. Close it, or use it as a context manager."""

    spec: Spec
    num_envs: int
    kind: str  # "native", "inprocess" or "subprocess"
    notes: list[str]  # what the user should know: conversions made, what a resume cannot restore
    frame_skip: int = 1  # frames of the game in one step
    threads: int = 1  # that step them, in this process or in workers
    shared: Array | None = (
        None  # the block of memory that holds every array of a step, where there is one: it can be pinned
    )

    def reset(self, seed: int | None = None) -> Array:
        """Start an episode everywhere; obs [E, *obs_shape].

        The first reset seeds the environments with the seed given to `make`, later ones let their random numbers go
        on; `seed` seeds them anew (an evaluation that must not depend on the ones before it).
        """
        ...

    def step(self, actions: Array) -> EnvStep:
        """Apply actions [E] int64, each in [0, num_actions)."""
        self.send(actions)
        return self.recv()

    def send(self, actions: Array) -> None:
        """Begin a step, and return while it goes on where that is possible. `recv` belongs to it, and nothing between."""
        ...

    def recv(self) -> EnvStep:
        """What the step begun by `send` gave."""
        ...

    def state(self) -> State | None:
        """An exact snapshot to continue from, or None if it cannot be had (then `notes` says why)."""
        ...

    def load_state(self, state: State) -> None:
        """Continue from a snapshot, in environments made with the same config and number."""
        ...

    def awaited(self) -> str:
        """Who has not answered yet, when a step takes too long."""
        return f"{self.num_envs} environments"

    def close(self) -> None: ...

    def kill(self) -> None:
        """End what would outlive this process because it is stuck."""
        return

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def empty_step(num_envs: int, obs_shape: tuple[int, ...], obs_dtype: str) -> EnvStep:
    """Zeroed arrays to step into."""
    flags = [np.zeros(num_envs, np.bool_) for _ in range(4)]
    return EnvStep(np.zeros((num_envs, *obs_shape), obs_dtype), np.zeros(num_envs, np.float32), *flags)


def note_restart(notes: list[str], what: str, why: str) -> None:
    """Add, once, the line a resume prints when `state` is None."""
    line = f"episodes in flight restart on resume: {what} {why}"
    if line not in notes:
        notes.append(line)
