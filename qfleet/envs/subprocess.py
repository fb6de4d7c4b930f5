"""Slow Python environments, stepped by worker processes.

    parent                         shared memory                        worker w (one per core)
    step: actions ───────────────▶ [E] actions
          one byte to each worker ─────────── socket ─────────────────▶ steps its slice [lo, hi)
          one byte from each      ◀────────── socket ────────────────── rows lo..hi are written
    returns views of it ◀───────── obs, reward, flags [E]

| who    | waits for                  | unblocked by                                                          |
|--------|----------------------------|-----------------------------------------------------------------------|
| worker | a byte on its socket       | a command, or the end of the stream when the parent closes or dies    |
| parent | a byte from worker 0, 1, … | an answer, or the end of the stream when the worker dies: RuntimeError |
| widow  | the end of the stream      | the parent when it closes or dies                                     |

Shutdown: the parent closes the sockets; a worker that reads the end of its stream closes its environments and exits. A worker still
busy after `PATIENCE` seconds is killed; if the parent was killed, too, the worker's own thread `widow` does that. So none outlives its
parent, but one that is stuck in foreign code which lets no other thread run.

Workers are fresh interpreters, not forks: a fork of a process with torch's (or a learner's) threads may inherit a lock
that nobody will release, and it would hold the sockets of its siblings open. multiprocessing's own fresh interpreters
import the user's main script again (and fail without an `if __name__ == "__main__"`) and start helper processes. These import
numpy and gymnasium but not torch: about 0.3 s, all at once. The shared memory has no name, so nothing is left behind.
"""

from __future__ import annotations

import itertools
import json
import math
import mmap
import os
import pickle
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

import numpy as np
from gymnasium.envs.registration import EnvSpec

from qfleet.envs import ids, spaces
from qfleet.envs import state as states
from qfleet.envs.base import Envs, EnvStep, note_restart
from qfleet.envs.local import Slice, env_seeds, in_order, numbered

if TYPE_CHECKING:
    from qfleet.types import Array, Spec, State

PATIENCE = 5.0
RESET, STEP, SAVE, LOAD = b"r", b"s", b"g", b"l"  # commands; all but STEP are followed by a pickled argument
DONE, ANSWER, FAILED = b".", b"=", b"!"  # replies; the last two are followed by a pickled value
BOOT = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from qfleet.envs.subprocess import serve; serve()"


class Share(Protocol):
    """A worker's environments, which write their rows of a step to shared memory."""

    def reset(self, seeds: Sequence[int | None]) -> None: ...
    def step(self, actions: Array) -> None: ...
    def states(self) -> list[State]: ...
    def load_states(self, saved: Sequence[State]) -> None: ...
    def close(self) -> None: ...


class Maker(Protocol):
    """Makes a worker's share; it travels to the worker pickled."""

    @property
    def threads(self) -> int: ...  # of a worker

    def build(self, out: EnvStep) -> Share: ...


@dataclass(frozen=True)
class GymMaker:
    """Any registered environment; `module` is imported first, to register it."""

    env_spec: EnvSpec
    kwargs: dict[str, Any]
    module: str
    threads: int = 1

    def build(self, out: EnvStep) -> Slice:
        if self.module:
            ids.import_module(self.module)
        envs = [ids.build(self.env_spec, self.kwargs) for _ in range(len(out.reward))]
        rows = spaces.observations(envs[0].observation_space, self.env_spec.id)
        return Slice(envs, rows, spaces.actions(envs[0].action_space, self.env_spec.id), out)


class Subprocess(Envs):
    """E environments divided evenly among worker processes."""

    kind = "subprocess"

    def __init__(
        self,
        name: str,
        spec: Spec,
        maker: Maker,
        seeds: Sequence[int],
        workers: int,
        notes: list[str],
        frame_skip: int = 1,
        wait: bool = True,
        nice: int = 0,
    ) -> None:
        """`wait`: for the workers to have made their environments; otherwise the first reset does. `nice`: their priority."""
        self.spec, self.num_envs, self.notes, self.frame_skip = spec, len(seeds), notes, frame_skip
        self._name = name
        self._seeds: Sequence[int | None] = seeds
        self._awaited, self._starting = 0, False
        workers = min(workers, self.num_envs)
        self.threads = workers * maker.threads
        edges = [self.num_envs * w // workers for w in range(workers + 1)]
        self._parts = [slice(lo, hi) for lo, hi in itertools.pairwise(edges)]
        self._sockets: list[Connection[Any, Any]] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        memory = _memory(_size(self.num_envs, spec.obs_shape, spec.obs_dtype))
        try:
            layout = (self.num_envs, spec.obs_shape, spec.obs_dtype)
            self.shared, self._actions, self._out = _views(memory, *layout)
            for part in self._parts:
                self._start((maker, part, layout, nice), memory)
            self._starting = True
            if wait:
                self._wait_for_start()
        except BaseException:
            self.close()
            raise
        finally:
            os.close(memory)

    def reset(self, seed: int | None = None) -> Array:
        seeds = self._seeds if seed is None else env_seeds(seed, self.num_envs)
        self._ask(RESET, [seeds[part] for part in self._parts])
        self._seeds = [None] * self.num_envs
        return self._out.obs

    def send(self, actions: Array) -> None:
        self._actions[:] = actions
        for worker in range(len(self._parts)):
            self._send(worker, STEP)

    def recv(self) -> EnvStep:
        for worker in range(len(self._parts)):
            self._receive(worker)
        return self._out

    def state(self) -> State | None:
        parts = self._ask(SAVE, [None] * len(self._parts))
        for saved in parts:
            if isinstance(saved, str):
                note_restart(self.notes, self._name, saved)
                return None
        return numbered([state for saved in parts for state in saved])

    def load_state(self, state: State) -> None:
        saved = in_order(state, self.num_envs)
        self._ask(LOAD, [saved[part] for part in self._parts])
        self._seeds = [None] * self.num_envs

    def close(self) -> None:
        for socket in self._sockets:
            socket.close()
        if self._starting:  # busy making environments: they would not see it
            self.kill()
        for process in self._processes:
            try:
                process.wait(PATIENCE)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._sockets, self._processes = [], []

    def kill(self) -> None:
        for process in self._processes:
            process.kill()

    def _start(self, job: tuple[Any, ...], memory: int) -> None:
        ours, theirs = Pipe()
        fds = (theirs.fileno(), memory)
        # Workers are the parallelism: their BLAS and OpenMP stay on one thread unless the user says otherwise.
        # A process group of their own keeps Ctrl-C for the parent, which finishes the step and saves.
        process = subprocess.Popen(
            [sys.executable, "-c", BOOT, json.dumps(sys.path), *map(str, fds)],
            pass_fds=fds,
            stdin=subprocess.DEVNULL,
            env={"OMP_NUM_THREADS": "1"} | os.environ,
            process_group=0,
        )
        self._processes.append(process)
        self._sockets.append(ours)
        theirs.close()
        self._send(len(self._sockets) - 1, b"", job)  # the first message needs no command

    def _wait_for_start(self) -> None:
        if self._starting:
            self._starting = False
            for worker in range(len(self._parts)):
                self._receive(worker)

    def _ask(self, command: bytes, arguments: Sequence[Any]) -> list[Any]:
        self._wait_for_start()
        for worker, argument in enumerate(arguments):
            self._send(worker, command, argument)
        return [self._receive(worker) for worker in range(len(arguments))]

    def _send(self, worker: int, command: bytes, *argument: Any) -> None:
        socket = self._sockets[worker]
        try:
            os.write(socket.fileno(), command)
            for value in argument:
                socket.send(value)
        except OSError:
            self._died(worker)

    def awaited(self) -> str:
        return self._label(self._awaited)

    def _receive(self, worker: int) -> Any:
        socket, self._awaited = self._sockets[worker], worker
        try:
            reply = os.read(socket.fileno(), 1)
            if reply == DONE:
                return None
            value = socket.recv()  # raises EOFError at the end of the stream
        except (EOFError, OSError):
            self._died(worker)
        if reply == FAILED:
            label = self._label(worker)
            self.close()
            raise RuntimeError(f"an environment failed in {label}:\n{value}")
        return value

    def _died(self, worker: int) -> NoReturn:
        process, label = self._processes[worker], self._label(worker)
        self.close()
        code = process.returncode
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        raise RuntimeError(f"{label} died with {how}; its own messages are above, if it had any")

    def _label(self, worker: int) -> str:
        part = self._parts[worker]
        return f"worker {worker} (process {self._processes[worker].pid}, environments {part.start} to {part.stop - 1})"


def obstacle(spec: EnvSpec) -> str:
    """Why a fresh process could not make this environment; "" if it can."""
    entry = spec.entry_point
    module = entry.split(":")[0] if isinstance(entry, str) else getattr(entry, "__module__", "")
    if module == "__main__":
        return "it is defined in the main script, which a worker process does not run: move it to a module"
    try:
        pickle.dumps(spec)
    except (pickle.PicklingError, AttributeError, TypeError) as e:
        return f"its registration cannot be sent to a worker process ({e}): register it with 'module:Class'"
    return ""


# --- shared memory: a 64-byte aligned field after the other -----------------------------------------------------


def _fields(num_envs: int, shape: tuple[int, ...], dtype: str) -> list[tuple[tuple[int, ...], str]]:
    one = (num_envs,)
    return [(one, "int64"), ((num_envs, *shape), dtype), (one, "float32"), *[(one, "bool")] * 4]


def _bytes(shape: tuple[int, ...], dtype: str) -> int:
    return -(-math.prod(shape) * np.dtype(dtype).itemsize // 64) * 64


def _size(num_envs: int, shape: tuple[int, ...], dtype: str) -> int:
    return sum(_bytes(*field) for field in _fields(num_envs, shape, dtype))


def _memory(size: int) -> int:
    """A descriptor of nameless memory: it goes when the last process that maps it ends."""
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("qfleet-envs")
    else:
        with tempfile.TemporaryFile() as file:
            fd = os.dup(file.fileno())
    os.truncate(fd, size)
    return fd


def _views(memory: int, num_envs: int, shape: tuple[int, ...], dtype: str) -> tuple[Array, Array, EnvStep]:
    """The shared memory as bytes; actions [E] and the rows of all environments, as arrays on it."""
    block = mmap.mmap(memory, _size(num_envs, shape, dtype))
    arrays, offset = [], 0
    for field in _fields(num_envs, shape, dtype):
        arrays.append(np.ndarray(*field, buffer=block, offset=offset))
        offset += _bytes(*field)
    return np.frombuffer(block, np.uint8), arrays[0], EnvStep(*arrays[1:])


# --- the worker ---------------------------------------------------------------------------------------------------


def serve() -> None:
    """A worker's whole life: make the slice, then answer commands until the stream ends."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # batch systems signal every process; the parent decides
    fds = [int(fd) for fd in sys.argv[2:]]
    for fd in fds:
        os.set_inheritable(fd, False)  # a simulator started by an environment must not keep the socket open
    socket, memory = Connection(fds[0]), fds[1]
    threading.Thread(target=_widow, args=(fds[0],), name="widow", daemon=True).start()
    with suppress(EOFError, ConnectionError):  # the parent is gone; what environments raise is caught before
        job = socket.recv()
        try:
            mine, actions = _join(job, memory)
        except Exception:
            return _reply(socket, FAILED, traceback.format_exc())
        _reply(socket, DONE)
        with closing(mine):
            while command := os.read(socket.fileno(), 1):
                argument = actions if command == STEP else socket.recv()
                try:
                    answer = _obey(mine, command, argument)
                except Exception:
                    return _reply(socket, FAILED, traceback.format_exc())
                _reply(socket, DONE if command == STEP else ANSWER, answer)


def _widow(fd: int) -> None:
    """End a process that its environments keep busy after the parent is gone."""
    gone = select.poll()
    gone.register(fd, getattr(select, "POLLRDHUP", 0))  # elsewhere than on Linux a hang-up is told anyway
    gone.poll()
    time.sleep(PATIENCE)
    os._exit(1)


def _join(job: tuple[Any, ...], memory: int) -> tuple[Share, Array]:
    maker, part, layout, nice = job
    os.nice(nice)
    _, actions, out = _views(memory, *layout)
    return maker.build(EnvStep(*(a[part] for a in out))), actions[part]


def _obey(mine: Share, command: bytes, argument: Any) -> Any:
    if command == STEP:
        return mine.step(argument)
    if command == RESET:
        return mine.reset(argument)
    if command == LOAD:
        return mine.load_states(argument)
    assert command == SAVE
    try:
        return mine.states()
    except states.NoSnapshot as e:
        return str(e)


def _reply(socket: Connection[Any, Any], kind: bytes, value: Any = None) -> None:
    os.write(socket.fileno(), kind)
    if kind != DONE:
        socket.send(value)
