"""When pushes become versions: bookkeeping alone, without arrays, time or processes, so that it can be tested by hand.

A worker pushes a vector (a gradient, or how far it moved); a policy decides which pushes become one commit, with what weights.
Whoever holds a part of the parameters carries out commits in their order, and so arrives at the same version as all others.

    offer(push) ─▶ accepted, pending      ─┐
                 ▶ rejected (late, stale)  ├─▶ commits ─▶ shards: Σ weight · part ─▶ optimiser ─▶ version
    tick(now), flush(), leave(worker)     ─┘
    ready(worker): may it begin its next clock?

| mode                          | a commit is made of                    | a worker goes on                                    |
|-------------------------------|----------------------------------------|-----------------------------------------------------|
| sync, localsgd, diloco, admm  | one push of all live workers but       | when the version of its clock is there              |
|                               | `backup`; later ones are late          |                                                     |
| async, easgd                  | every push                             | at once                                             |
| window                        | `window` pushes, or what came in       | at once                                             |
|                               | `window_ms`                            |                                                     |
| ssp                           | every push                             | when it is at most `staleness` clocks ahead of the  |
|                               |                                        | slowest live worker                                 |
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from qfleet.config import BARRIER_MODES, SyncConfig

UNKNOWN = "the worker has left: it must join again"
Key = tuple[int, int, int]  # worker, incarnation, sequence
SSP_BOUND = 16  # clocks, where sync.staleness does not say: a pause of some seconds on a CPU, of milliseconds on a GPU


class Push(NamedTuple):
    """What a worker says of a vector it pushes."""

    worker: int
    incarnation: int  # of the worker: a restarted one begins to count anew
    sequence: int  # its pushes, from 0
    base: int  # version of the parameters it was computed with
    samples: float  # behind it, or what else it should be weighted by
    lr: float  # that belongs to the worker's progress; 1 where a move is pushed, not a gradient

    @property
    def key(self) -> Key:
        return (self.worker, self.incarnation, self.sequence)


class Commit(NamedTuple):
    """Parameters of `version` - 1 become those of `version`: by the sum of the parts times their weights, at this learning rate."""

    version: int
    parts: tuple[tuple[Key, float], ...]
    lr: float
    freeze: bool  # these parameters become the target network's
    progress: float  # clocks of all workers that the commits up to this one amount to


class Outcome(NamedTuple):
    """What became of a push. `why_not` says why it was rejected; a push that was seen before changes nothing."""

    commits: list[Commit]
    why_not: str = ""
    staleness: int = 0  # versions between what the push was computed with and the newest, when it was offered
    seen_before: bool = False


def make(config: SyncConfig, batch_size: int, target_interval: int, workers: int) -> Policy:
    """The policy of a mode. `batch_size`: samples a worker usually has behind a push. `target_interval`: clocks."""
    if config.mode in BARRIER_MODES:
        return Barrier(target_interval, workers - config.backup if config.backup else None)
    if config.mode == "window":
        return Window(target_interval, config.window, config.window_ms / 1e3, batch_size)
    if config.mode == "easgd":
        return Each(target_interval)
    if config.mode == "ssp":
        bound = SSP_BOUND if config.staleness is None else config.staleness
        return Each(target_interval, batch_size, config.damping, bound=bound)
    return Each(target_interval, batch_size, config.damping, limit=config.staleness)


class Policy:
    """Who takes part, how many clocks each has made, and which pushes were seen: none is ever applied twice."""

    def __init__(self, target_interval: int) -> None:
        self.version = 0
        self.progress = 0.0
        self._interval = target_interval
        self.clocks: dict[int, int] = {}  # of live workers
        self._seen: dict[int, tuple[int, int]] = {}  # newest incarnation and sequence of every worker

    def restore(self, version: int, progress: float, applied: Mapping[int, tuple[int, int]]) -> None:
        """Go on from that version. `applied`: the newest incarnation and sequence of every worker that are in it."""
        self.version, self.progress, self._seen = version, progress, dict(applied)

    def join(self, worker: int, incarnation: int = 0) -> None:
        """It begins where the slowest is; a new incarnation makes the old one void."""
        newest, _ = self._seen.get(worker, (-1, -1))
        if incarnation < newest:
            raise ValueError(f"learner {worker} was replaced by a newer one: it cannot join")
        if newest < incarnation:
            self._seen[worker] = (incarnation, -1)
        others = [clock for w, clock in self.clocks.items() if w != worker]
        self.clocks[worker] = min(others, default=0)

    def leave(self, worker: int, successor: int = 0) -> list[Commit]:
        """It takes no part any more; what it pushed before stays. -> commits that waited for it alone. Incarnations before its
        `successor` are void: a process that was given up may live for a while, and join again."""
        self.clocks.pop(worker, None)
        if self._seen.get(worker, (-1, -1))[0] < successor:
            self._seen[worker] = (successor, -1)
        return []

    def tick(self, now: float) -> list[Commit]:
        return []

    def flush(self) -> list[Commit]:
        """For a checkpoint: pushes that nobody waits for become a commit now."""
        return []

    def drop(self) -> int:
        """Pushes that are not in a commit yet are void, and may be offered again. -> how many"""
        return 0

    def _unsee(self, pushes: Iterable[Push]) -> None:
        for push in pushes:
            incarnation, sequence = self._seen[push.worker]
            if incarnation == push.incarnation:
                self._seen[push.worker] = (incarnation, min(sequence, push.sequence - 1))

    def ready(self, worker: int) -> bool:
        return True

    def offer(self, push: Push, now: float = 0.0) -> Outcome:
        staleness = self.version - push.base
        incarnation, sequence = self._seen.get(push.worker, (-1, -1))
        if push.incarnation < incarnation:
            return Outcome([], "the worker was replaced by a newer one", staleness)
        if push.incarnation == incarnation and push.sequence <= sequence:
            return Outcome([], staleness=staleness, seen_before=True)
        if push.worker not in self.clocks:
            return Outcome([], UNKNOWN, staleness)
        self._seen[push.worker] = (push.incarnation, push.sequence)
        self.clocks[push.worker] += 1
        why_not = self._refuse(push, staleness)
        return Outcome([], why_not, staleness) if why_not else Outcome(self._take(push, now), "", staleness)

    def _refuse(self, push: Push, staleness: int) -> str:
        return ""

    def _take(self, push: Push, now: float) -> list[Commit]:
        raise NotImplementedError

    def _commit(self, pushes: list[Push], weights: list[float], lr: float, clocks: float) -> Commit:
        frozen = self._targets()
        self.version += 1
        self.progress += clocks
        parts = tuple((p.key, w) for p, w in zip(pushes, weights, strict=True))
        return Commit(self.version, parts, lr, self._targets() > frozen, self.progress)

    def _targets(self) -> int:
        """How often the target network was due so far. (Thirds do not add up to one.)"""
        return int((self.progress + 1e-9) // self._interval)

    def _mean(self, pushes: list[Push], scale: float = 1.0) -> Commit:
        """Of all of them, by their samples."""
        total = sum(p.samples for p in pushes)
        weights = [p.samples / total for p in pushes]
        return self._commit(pushes, weights, sum(w * p.lr for w, p in zip(weights, pushes, strict=True)) * scale, scale)


class Barrier(Policy):
    """One push of everybody, or as many as are `enough`. A push belongs to the clock that its base version begins."""

    def __init__(self, target_interval: int, enough: int | None = None) -> None:
        super().__init__(target_interval)
        self._enough, self._pending = enough, dict[int, Push]()

    def leave(self, worker: int, successor: int = 0) -> list[Commit]:
        super().leave(worker, successor)
        return self._if_complete()

    def ready(self, worker: int) -> bool:
        return worker not in self._pending

    def drop(self) -> int:
        dropped, self._pending = self._pending, {}
        self._unsee(dropped.values())
        return len(dropped)

    def _refuse(self, push: Push, staleness: int) -> str:
        return "it came after the commit of its clock" if staleness > 0 else ""

    def _take(self, push: Push, now: float) -> list[Commit]:
        self._pending[push.worker] = push
        return self._if_complete()

    def _if_complete(self) -> list[Commit]:
        """Those who left may have pushed before."""
        all_there = self.clocks.keys() <= self._pending.keys()
        if not self._pending or not (all_there or (self._enough is not None and len(self._pending) >= self._enough)):
            return []
        pushes = [self._pending[worker] for worker in sorted(self._pending)]  # in one order, whoever came first
        self._pending.clear()
        return [self._mean(pushes)]


class Each(Policy):
    """Every push is a commit.

    With a batch size it is a gradient: its learning rate is scaled by its share of the samples of a clock of all workers, so
    that one such clock amounts to one update of `sync`, and damped where it is staler than pushes usually are (as many versions
    as there are other workers). Without, it is a move that is simply added.
    """

    def __init__(
        self,
        target_interval: int,
        batch_size: int = 0,
        damping: str = "none",
        limit: int | None = None,
        bound: int | None = None,
    ) -> None:
        super().__init__(target_interval)
        self._batch, self._damping, self._limit, self._bound = batch_size, damping, limit, bound

    def ready(self, worker: int) -> bool:
        if self._bound is None or worker not in self.clocks:
            return True
        return self.clocks[worker] - min(self.clocks.values()) <= self._bound

    def _refuse(self, push: Push, staleness: int) -> str:
        if self._limit is not None and staleness > self._limit:
            return f"it is {staleness} versions old, more than sync.staleness allows ({self._limit})"
        return ""

    def _take(self, push: Push, now: float) -> list[Commit]:
        if not self._batch:
            return [self._commit([push], [1.0], push.lr, 1.0 / len(self.clocks))]
        share = push.samples / (self._batch * len(self.clocks))
        clocks_old = max(1.0, (self.version - push.base) / max(1, len(self.clocks) - 1))
        damped = {"none": 1.0, "inverse": 1.0 / clocks_old, "sqrt": clocks_old**-0.5}[self._damping]
        return [self._commit([push], [1.0], push.lr * share * damped, share)]


class Window(Policy):
    """So many pushes, or those of so many seconds. Fewer than a clock of all workers has count as the part of it they are."""

    def __init__(self, target_interval: int, count: int, seconds: float, batch_size: int) -> None:
        super().__init__(target_interval)
        self._count, self._seconds, self._batch = count, seconds, batch_size
        self._pending: list[Push] = []
        self._since = 0.0

    def tick(self, now: float) -> list[Commit]:
        return self._close() if self._pending and self._seconds and now - self._since >= self._seconds else []

    def flush(self) -> list[Commit]:
        return self._close() if self._pending else []

    def drop(self) -> int:
        dropped, self._pending = self._pending, []
        self._unsee(dropped)
        return len(dropped)

    def _take(self, push: Push, now: float) -> list[Commit]:
        if not self._pending:
            self._since = now
        self._pending.append(push)
        return self._close() if self._full() else self.tick(now)

    def leave(self, worker: int, successor: int = 0) -> list[Commit]:
        super().leave(worker, successor)
        return self._close() if self._pending and self._full() else []

    def _full(self) -> bool:
        return len(self._pending) >= (self._count or len(self.clocks))

    def _close(self) -> list[Commit]:
        pushes, self._pending = self._pending, []
        pushes.sort(key=lambda p: p.key)  # one order, whoever came first
        return [self._mean(pushes, min(1.0, sum(p.samples for p in pushes) / (self._batch * max(1, len(self.clocks)))))]
