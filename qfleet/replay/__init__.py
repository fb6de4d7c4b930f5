"""Replay: streams in, batches out.

    rows ──▶ storage (rings; which rows are starts) ──starts──▶ uniform or priorities ──slots──▶ storage ──▶ Batch

`storage` keeps the rows and gathers windows, `uniform` and `priorities` decide which starts are drawn, `limiter` says
how often. `Replay` puts the first three together.
"""

from __future__ import annotations

import torch
from torch import Tensor

from qfleet.config import Config
from qfleet.device import Transfers
from qfleet.replay import memory, priorities, storage, uniform
from qfleet.replay.device import DeviceStorage, DeviceUniform, Sampler
from qfleet.replay.host import HostStorage
from qfleet.replay.limiter import Limiter
from qfleet.replay.priorities import Priorities
from qfleet.replay.uniform import Uniform
from qfleet.rng import key
from qfleet.types import Batch, Spec, State, Step

__all__ = ["Limiter", "Replay"]


class Replay:
    """Experience of `env.num_envs` streams, the newest `replay.capacity` rows of it.

    Sampling is a pure function of (seed, update, contents): there is no generator whose state could be lost.
    `on_host` chooses who decides which rows are starts: the host, or the device that holds the rings. None: the host for
    a replay in main memory.
    """

    def __init__(
        self,
        config: Config,
        spec: Spec,
        device: torch.device | str = "cpu",
        seed: int | None = None,
        on_host: bool | None = None,
    ) -> None:
        self.device = torch.device(device)
        self.check_memory(config, spec, self.device)
        host = self.device.type == "cpu" if on_host is None else on_host
        kernel = config.replay.prioritized and host
        columns, rows = storage.shape(config)
        self._storage: HostStorage | DeviceStorage
        self._storage = HostStorage(config, spec, kernel) if host else DeviceStorage(config, spec, self.device)
        self._sampler: Priorities | Uniform | DeviceUniform
        if config.replay.prioritized:
            self._sampler = Priorities(rows * columns, config.replay.alpha, self.device, kernel)
        else:
            self._sampler = Uniform(rows, columns) if host else DeviceUniform(rows, columns, self.device)
        self._batch_size = config.learner.batch_size
        self._key = key(config.seed if seed is None else seed, "replay")

    @staticmethod
    def check_memory(config: Config, spec: Spec, device: torch.device | str) -> None:
        """ConfigError if it would not fit."""
        memory.check(config, Replay.memory(config, spec), torch.device(device))

    @staticmethod
    def memory(config: Config, spec: Spec) -> int:
        """Bytes it will allocate."""
        columns, rows = storage.shape(config)
        sampler = priorities.memory(rows * columns) if config.replay.prioritized else uniform.memory(rows, columns)
        return storage.memory(config, spec) + sampler

    @property
    def num_starts(self) -> int:
        """Starts that can be drawn right now. (On a GPU this waits; `ready` does not.)"""
        return self._storage.num_starts

    @property
    def ready(self) -> bool:
        """Is there anything to sample?"""
        return self._storage.ready

    @property
    def rows(self) -> int:
        """Rows each column can hold."""
        return self._storage.rows

    @property
    def transfers(self) -> Transfers:
        """Of rows."""
        return self._storage.transfers

    def rows_within(self, size: int) -> int:
        """Rows of all columns together that take about `size` bytes; at least 1."""
        return max(1, size // (self.columns * (self._storage.obs[0].nbytes + 32)))

    @property
    def columns(self) -> int:
        return self._storage.columns

    @property
    def count(self) -> Tensor:
        """[E] int64, on the host: rows ever written to each column."""
        return self._storage.count

    def extend(self, rows: Step, column: int = 0) -> None:
        """Append complete rows [R, C] to the columns column..column+C-1, each at its own cursor."""
        for change in self._storage.extend(rows, column):
            self._sampler.apply(change)  # type: ignore[arg-type]  # both are of the host, or both of the device

    def sample(self, update: int, count: int = 1, beta: float = 1.0, size: int = 0) -> Batch:
        """The batches of updates update..update+count-1, one after the other: leading dimension count * size [batch_size].

        Uniform batches do not depend on how many are drawn at once. Priorities change with every update, so
        prioritised batches are drawn one by one.
        """
        if not self.ready:
            raise ValueError(
                "the replay holds no complete window to sample yet: collect more steps first (--replay.min-steps)."
            )
        size = size or self._batch_size
        if isinstance(self._sampler, Priorities):
            assert count == 1
            slot, weight = self._sampler.draw(self._key, update, size, beta)
        else:
            counter = torch.arange(update, update + count, device=self.device)
            slot = self._sampler.draw(self._key, counter, size)
            weight = torch.ones(len(slot), device=self.device)
        window = self._storage.windows(slot)
        return Batch(
            obs=self._storage.observations(window.frames),
            action=window.action,
            reward=window.reward,
            discount=window.discount,
            next_obs=self._storage.observations(window.next_frames),
            id=window.id,
            weight=weight,
        )

    def update_priorities(self, id: Tensor, priority: Tensor) -> None:
        """New |TD errors| [B] of sampled ids; ids whose rows were overwritten since are dropped. Uniform: nothing."""
        if isinstance(self._sampler, Priorities):
            self._sampler.update(id.to(self.device), priority.to(self.device), self._storage.oldest)

    def on_device(self, batch: int, kernels: bool) -> Sampler:
        """What draws batches on the device without ever waiting for it."""
        assert isinstance(self._storage, DeviceStorage) and not isinstance(self._sampler, Uniform)
        return Sampler(self._storage, self._sampler, self._key, batch, kernels)

    def state(self) -> State:
        """Everything but the rows."""
        state = self._storage.state()
        if isinstance(self._sampler, Priorities):
            state["priority"] = self._sampler.leaves.cpu().clone()
            state["highest"] = self._sampler.highest.cpu().clone()
        return state

    def load_state(self, state: State) -> None:
        """Afterwards `load_segment` every segment saved with it; then it samples what the original would."""
        self._storage.load_state(state)
        if isinstance(self._sampler, Priorities):
            self._sampler.load(torch.as_tensor(state["priority"]), torch.as_tensor(state["highest"]))
        else:
            self._sampler.rebuild(self._storage.starts(), self._storage.oldest)

    def segment(self, since: Tensor | None = None, until: Tensor | None = None) -> dict[str, Tensor]:
        """Rows numbered since[E] to until[E] - 1 that are still here (None: all), flattened, on the host."""
        return self._storage.segment(since, until)

    def load_segment(self, segment: dict[str, Tensor]) -> None:
        self._storage.load_segment(segment)
