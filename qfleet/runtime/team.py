"""The learners of a run as one of them sees the others: how many there are, and when they meet.

| who    | waits for                                            | unblocked by                                              |
|--------|------------------------------------------------------|-----------------------------------------------------------|
| `meet` | all others, once a round (Alone: nobody)             | them, or an error: at once when one died, after           |
|        |                                                      | `patience` when it hangs                                  |
| agree  | as its transport says (qfleet.sync), in every update | the same                                                  |
| `wait` | all others, when a checkpoint is saved               | them, or an error when one died: the first learner comes  |
|        |                                                      | to the last one when its last evaluation is done          |

`Ranks`: processes that a launcher (torchrun, mpirun, Spark) started, each with its rank in the environment. They go through
their rounds together. Three groups: a learner's thread agrees on gradients while the main thread collects, and nobody knows
how long an evaluation takes.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from qfleet import __version__
from qfleet.config import Config, ConfigError, flatten, to_dict
from qfleet.learner import Learner
from qfleet.runtime.setup import kind_of
from qfleet.sync.allreduce import Cut, among_others
from qfleet.sync.balance import Balance, shares
from qfleet.sync.group import Group
from qfleet.sync.traffic import Traffic
from qfleet.types import State

PATIENCE = timedelta(seconds=60)  # for a rank that does not answer, beyond the watchdog's time for environments
FOREVER = timedelta(days=1)  # torch has no word for it
BEGIN = timedelta(minutes=6)  # in which all ranks are started

NEARLY = 0.05  # of all samples: as near as a learner's part must come to its weight

NONE = Traffic()  # of who is alone


class TeamError(RuntimeError):
    """Another learner ended, or does not answer."""


class Broken(RuntimeError):
    """Another learner of the group is gone: this update is given up, and due again in the next round."""


class Team(Protocol):
    rank: int
    size: int
    here: int  # learners on this machine
    local: int  # its number among those that share this machine's GPUs
    stopping: bool  # somebody wants to stop: everybody does, after the same round
    lr_scale: float  # on the learning rate, as the first learner says

    @property
    def traffic(self) -> Traffic: ...

    def attach(self, learner: Learner) -> None:
        """From now on the learner agrees with the others."""
        ...

    def enter(self, learner: Learner, own: int) -> bool:
        """Before updates, with its own steps so far: may it? One that joined a run that was going on takes part from then on."""
        ...

    def meet(self, steps: int) -> int:
        """After collecting, once a round: own steps so far -> those of all."""
        ...

    def counted(self, own: int, total: int) -> int:
        """The steps for which updates are due: those of all; or, where nobody waits for anybody, as if all were as fast."""
        ...

    def stop(self) -> None:
        """Ask everybody to stop at the next meeting."""
        ...

    def wait(self) -> bool:
        """Return when everybody is here; where nobody waits for anybody, at once. -> is everybody?"""
        ...

    def least(self, number: int) -> int:
        """The least of everybody's numbers."""
        ...

    def first(self, text: str) -> str:
        """The first learner's text."""
        ...

    def state(self) -> State: ...
    def load_state(self, state: State) -> None: ...


class Alone:
    rank, size, here, local, stopping, lr_scale = 0, 1, 1, 0, False, 1.0

    @property
    def traffic(self) -> Traffic:
        return NONE

    def attach(self, learner: Learner) -> None:
        pass

    def enter(self, learner: Learner, own: int) -> bool:
        return True

    def meet(self, steps: int) -> int:
        return steps

    def counted(self, own: int, total: int) -> int:
        return total

    def stop(self) -> None:
        self.stopping = True

    def wait(self) -> bool:
        return True

    def least(self, number: int) -> int:
        return number

    def first(self, text: str) -> str:
        return text

    def state(self) -> State:
        return {}

    def load_state(self, state: State) -> None:
        pass


class Launched(NamedTuple):
    """What a launcher says of a process."""

    rank: int
    size: int
    here: int  # processes on this machine
    local: int  # its number among them
    job: str = ""  # mpirun's name for all of them


def ranks() -> Launched | None:
    """None without a launcher."""
    for rank, size, here, local in (
        ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "LOCAL_RANK"),
        ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
        ("PMI_RANK", "PMI_SIZE", "MPI_LOCALNRANKS", "MPI_LOCALRANKID"),
    ):
        if rank in os.environ and size in os.environ:
            mine, count = int(os.environ[rank]), int(os.environ[size])
            together = int(os.environ.get(here, count))
            job = os.environ.get("PMIX_NAMESPACE", "") if rank.startswith("OMPI") else ""
            return Launched(mine, count, together, int(os.environ.get(local, mine % together)), job)
    return None


def attempt() -> int:
    """How often torchrun has started its processes again (--max-restarts)."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))


def command() -> str:
    """How learners are started like this one: `torchrun --nproc-per-node 2 -m qfleet`."""
    launched = ranks()
    if launched is None or launched.size == 1:
        return "qfleet"
    if "TORCHELASTIC_RUN_ID" in os.environ:
        return f"torchrun --nproc-per-node {launched.here} -m qfleet"
    return f"mpirun -np {launched.size} qfleet"


def patience(watchdog: float) -> timedelta:
    """How long others may take for a round, in which their environments may take as long as the watchdog lets them (0: for ever)."""
    return PATIENCE + timedelta(seconds=watchdog) if watchdog else FOREVER


@contextlib.contextmanager
def joined(config: Config) -> Iterator[Team]:
    """The team of this process: alone, or those that a launcher started with it."""
    found = ranks()
    if found is None or found.size == 1:
        yield Alone()
        return
    check(config, found.size)
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29500")
    limit = patience(config.runtime.watchdog)
    backend = "cpu:gloo,cuda:nccl" if own_gpus(config, found) else "gloo"
    with together():
        store = meeting_place(found)
        store.set_timeout(limit)  # NCCL looks into it when the first update comes
        # torchrun may keep its store when it starts ranks again; and those of another mpirun may find this one's.
        mine = PrefixStore(f"{found.job} attempt {attempt()}", store)
        dist.init_process_group(backend, store=mine, rank=found.rank, world_size=found.size, timeout=limit)
    try:
        yield Ranks(config, found)
    finally:
        dist.destroy_process_group()


def meeting_place(launched: Launched) -> Store:
    """Where ranks find each other: the first one makes it."""
    try:
        store: Store = next(rendezvous("env://", launched.rank, launched.size, timeout=BEGIN))[0]
        return store
    except dist.DistNetworkError as e:
        if "failed to listen" not in str(e):
            raise
        port = int(os.environ["MASTER_PORT"])
        why = "another program, or run, has it" if "EADDRINUSE" in str(e) else str(e)
        raise ConfigError(
            f"the learners cannot meet at port {port} of this machine ({why}): name a free one for all of them in the variable MASTER_PORT, as in `mpirun -x MASTER_PORT={port + 1} -np {launched.size} qfleet train ...`."
        ) from None


def own_gpus(config: Config, launched: Launched) -> bool:
    """Has every learner a GPU of its own? Only then can they send to each other directly."""
    return config.device in ("auto", "cuda") and dist.is_nccl_available() and torch.cuda.device_count() >= launched.here


def check(config: Config, size: int) -> None:
    """Can a launcher's processes do this together?"""
    if config.learners not in (1, size):
        raise ConfigError(
            f"learners is {config.learners}, but the launcher started {size} processes: leave --learners out, or resume with as many as there were."
        )
    if config.sync.over == "server":
        raise ConfigError(
            f"sync.mode {config.sync.mode} over a server is for learners on Ray (--learners {size}, without a launcher). Under one use sync, localsgd, diloco, admm, or easgd with --sync.transport allreduce."
        )
    if config.sync.backup:
        raise ConfigError(
            f"sync.backup is {config.sync.backup}, which needs a server: use learners on Ray (--learners {size}, without a launcher), or leave it out."
        )
    if config.sync.servers > 1:
        raise ConfigError(
            f"sync.servers is {config.sync.servers}, but a launcher's processes agree by all-reduce: leave it out, or use learners on Ray (--learners {size}, without a launcher)."
        )
    check_division(config, size)


def check_division(config: Config, size: int) -> None:
    """Can the work be divided among so many learners?"""
    config.check_updates(size)
    parts = size * config.runtime.groups
    if config.env.num_envs % parts:
        groups = f" with {config.runtime.groups} groups each" if config.runtime.groups > 1 else ""
        raise ConfigError(
            f"env.num_envs {config.env.num_envs} cannot be divided among {size} learners{groups}: use a multiple of {parts}, as in --env.num-envs {-(-config.env.num_envs // parts) * parts}."
        )
    if config.sync.weights and len(config.sync.weights) != size:
        raise ConfigError(f"sync.weights has {len(config.sync.weights)} numbers, but there are {size} learners.")
    if config.sync.weights:
        total, whole = config.learner.batch_size * size, sum(config.sync.weights)
        divided = shares(config.sync.weights, total)
        if any(abs(part / total - w / whole) > NEARLY for part, w in zip(divided, config.sync.weights, strict=True)):
            raise ConfigError(
                f"sync.weights {', '.join(f'{w:g}' for w in config.sync.weights)} cannot be had with {total} samples for all learners (they would have {', '.join(map(str, divided))}): raise --learner.batch-size."
            )
    recorded = kind_of(config.device) == "cuda" or config.runtime.schedule == "streams"
    if recorded and (config.sync.balance or config.sync.weights):
        raise ConfigError(
            "sync.balance and sync.weights change the size of batches, but on a GPU (and in the schedule streams) updates are recorded for one size: leave them out, or use --device cpu."
        )


@contextlib.contextmanager
def together() -> Iterator[None]:
    """Around what all ranks do at the same time: the error of whoever is left becomes one line."""
    try:
        with among_others():
            yield
    except Cut as e:
        raise lost(e) from None


def lost(why: Cut) -> TeamError:
    return TeamError(
        f"another learner of this run ended or does not answer ({why}). If it could, it said why. Go on with all of them: `{command()} train --resume RUN`."
    )


class Ranks:
    def __init__(self, config: Config, launched: Launched) -> None:
        self.rank, self.size, self.here, self.local, _ = launched
        self._on_device = own_gpus(config, launched)
        self.stopping, self.lr_scale, self._stop = False, 1.0, False
        self._config = config
        with together():
            self._control = dist.new_group(backend="gloo", timeout=patience(config.runtime.watchdog))
            self._unhurried = dist.new_group(backend="gloo", timeout=FOREVER)
            self._compare()
        balanced = config.sync.balance or config.sync.weights
        self._balance = Balance(config.learner.batch_size, config.sync.weights) if balanced else None
        self._group: Group | None = None
        self._learner: Learner | None = None

    @property
    def traffic(self) -> Traffic:
        return NONE if self._group is None else self._group.traffic

    def _compare(self) -> None:
        """All must have been started alike."""
        everybody: list[dict[str, Any]] = [{} for _ in range(self.size)]
        settings = flatten(to_dict(replace(self._config, run_dir="")))
        more = {"the version of qfleet": __version__, "a GPU of its own:": self._on_device}
        dist.all_gather_object(everybody, {**more, **settings}, group=self._control)
        for rank, its in enumerate(everybody):
            for name, value in everybody[0].items():
                if its[name] != value:
                    raise ConfigError(
                        f"learner {rank} has {name} {its[name]}, learner 0 has {value}: start all of them alike."
                    )

    def attach(self, learner: Learner) -> None:
        common = learner.flat.data.cpu()
        with together():
            dist.broadcast(common, 0)
        learner.flat.data.copy_(common)
        learner.target.copy_(learner.flat)
        self._learner, self._group = learner, Group(self._config, learner, self._on_device)
        for rank in range(self.size):
            self.traffic.told(rank, 0, 0.0)
        learner.sync = self._agree
        self._divide()

    def _agree(self, grad: Tensor, samples: int) -> None:
        assert self._group is not None
        try:
            self._group.agree(grad, samples)
        except Cut as e:  # all else that fails in an update is this learner's own error
            raise lost(e) from None

    def enter(self, learner: Learner, own: int) -> bool:
        return True

    def meet(self, steps: int) -> int:
        everybody = torch.zeros(3 + 3 * self.size, dtype=torch.float64)
        everybody[:3] = torch.tensor([steps, self._stop, self.lr_scale if self.rank == 0 else 0.0])
        if self._group is not None:
            mine = (*self._group.work.tell(), self.traffic.seconds)
            everybody[3 + 3 * self.rank : 6 + 3 * self.rank] = torch.tensor(mine, dtype=torch.float64)
        with together():
            dist.all_reduce(everybody, group=self._control)
        total, stops, self.lr_scale, *told = everybody.tolist()
        for rank in range(self.size if self._group is not None else 0):
            samples, worked, waited = told[3 * rank : 3 * rank + 3]
            self.traffic.told(rank, samples, waited)
            if self._balance is not None:
                self._balance.saw(rank, samples, worked)
        self._divide()
        self.stopping = stops > 0
        return int(total)

    def _divide(self) -> None:
        """Batches in proportion to speed."""
        if self._balance is not None and self._learner is not None:
            self._learner.batch_size = self._balance.share(self.rank, range(self.size))

    def counted(self, own: int, total: int) -> int:
        return total

    def stop(self) -> None:
        self._stop = True

    def wait(self) -> bool:
        with together():
            dist.barrier(group=self._unhurried)
        return True

    def least(self, number: int) -> int:
        least = torch.tensor([number])
        with together():
            dist.all_reduce(least, dist.ReduceOp.MIN, group=self._control)
        return int(least)

    def first(self, text: str) -> str:
        texts = [text]
        with together():
            dist.broadcast_object_list(texts, 0, group=self._control)
        return texts[0]

    def state(self) -> State:
        state = {} if self._group is None else self._group.state()
        return state | ({} if self._balance is None else {"balance": self._balance.state()})

    def load_state(self, state: State) -> None:
        if self._group is not None:
            self._group.load_state(state)
        if self._balance is not None:
            self._balance.load_state(state["balance"])
