"""What differs between devices, in one place: which there are, streams, graphs, pinned memory. ROCm answers to the same calls as CUDA.

On the CPU everything here is the plain thing: one stream, calls instead of graphs, ordinary memory. (Only NCCL, sync/ and runtime/team.py, is elsewhere.)
"""

from __future__ import annotations

import contextlib
import gc
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from qfleet import machine

AMD = torch.version.hip is not None


class Gpu(NamedTuple):
    name: str
    bytes: int
    capability: str


def gpus() -> list[Gpu]:
    """Those that torch sees."""
    found = map(torch.cuda.get_device_properties, range(gpu_count()))
    return [Gpu(p.name, p.total_memory, f"{p.major}.{p.minor}") for p in found]


def gpu_count() -> int:
    return torch.cuda.device_count() if has_gpu() else 0


def has_gpu() -> bool:
    return bool(torch.cuda.is_available())


def has_bf16() -> bool:
    """Products of bf16 numbers by the GPU itself, not in float32."""
    return bool(torch.cuda.is_bf16_supported(including_emulation=False))


def build() -> str:
    """For which GPUs torch was built."""
    version = torch.version
    return f"ROCm {version.hip}" if AMD else f"CUDA {version.cuda}" if version.cuda else "CPU build"


def gpu(number: int | None = None) -> torch.device:
    """The one of that number, or the current one."""
    return torch.device("cuda", torch.cuda.current_device() if number is None else number)


def use(device: torch.device) -> None:
    """What does not say which GPU it means, means this one from now on, in this thread."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


def free_memory(device: torch.device) -> int | None:
    """Bytes that can still be allocated; None where the system does not say."""
    if device.type != "cuda":
        return machine.free_memory()
    gc.collect()  # an earlier run of this process is a cycle of objects
    torch.cuda.empty_cache()  # what it left counts as used
    return int(torch.cuda.mem_get_info(device)[0])


def reason(error: BaseException) -> str:
    """An error in one line. (Triton's compiler shows the code first: "at 17:14: ...", and says what is wrong with it last.)"""
    lines = [line for line in str(error).splitlines() if line.strip()] or [""]
    return f"{type(error).__name__}: {lines[-1 if lines[0].startswith('at ') else 0].strip()}".removesuffix(": ")


class Queue:
    """Work in order: `with queue:` puts what is called into it. On the CPU work is done at once."""

    def __init__(self, device: torch.device, urgent: bool = False) -> None:
        """What is in an urgent one goes first wherever the device has a choice."""
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device, priority=-1 if urgent else 0)  # type: ignore[no-untyped-call]
        self._inside: list[torch.cuda.StreamContext] = []

    def __enter__(self) -> None:
        if self._stream is not None:
            self._inside.append(torch.cuda.stream(self._stream))
            self._inside[-1].__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *error: object) -> None:
        if self._stream is not None:
            self._inside.pop().__exit__(*error)

    def wait_for(self, other: Queue) -> None:
        """What follows comes after what is in the other one now. The host does not wait."""
        if self._stream is not None and other._stream is not None:
            self._stream.wait_stream(other._stream)


class Mark:
    """A place in the current queue. Who waits for it sleeps, since the cores belong to the environments.

    `soon`: it will be passed within a millisecond, and being woken would take as long: who waits for it keeps looking.
    """

    def __init__(self, device: torch.device, soon: bool = False) -> None:
        self._device, self._time = device, 0.0
        self._event: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._event = torch.cuda.Event(enable_timing=True, blocking=not soon)  # type: ignore[no-untyped-call]

    def record(self) -> None:
        self._time = time.perf_counter()
        if self._event is not None:
            self._event.record(torch.cuda.current_stream(self._device))

    def wait(self) -> None:
        if self._event is not None:
            self._event.synchronize()

    def passed(self) -> bool:
        return self._event is None or bool(self._event.query())  # type: ignore[no-untyped-call]

    def seconds_since(self, other: Mark) -> float:
        """Both must have been passed."""
        if self._event is None or other._event is None:
            return self._time - other._time
        return float(other._event.elapsed_time(self._event)) / 1e3


class Spans:
    """How long the device was at work on certain parts: `with spans: ...`, as often as you like; `seconds` never waits."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._open: deque[tuple[Mark, Mark]] = deque()
        self._spare: list[tuple[Mark, Mark]] = []
        self._seconds = 0.0

    def __enter__(self) -> None:
        marks = self._spare.pop() if self._spare else (Mark(self._device), Mark(self._device))
        marks[0].record()
        self._open.append(marks)

    def __exit__(self, *error: object) -> None:
        self._open[-1][1].record()

    @property
    def seconds(self) -> float:
        """Of all parts that are known to be done."""
        while self._open and self._open[0][1].passed():
            began, ended = self._open.popleft()
            self._seconds += ended.seconds_since(began)
            self._spare.append((began, ended))
        return self._seconds


class Transfers(Spans):
    """What is copied from main memory to the device: how much, and how long it took the device. Nothing, where that is main memory, too."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.bytes = 0

    def copy(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
        """(there, here): here must be pinned, and stay as it is until the device has read it."""
        with self:
            for there, here in pairs:
                there.copy_(here, non_blocking=True)
                self.bytes += here.nbytes

    def send(self, tensors: Iterable[Tensor]) -> list[Tensor]:
        """The same on the device; those that are there already, as they are. The host goes on where they are pinned."""
        tensors = list(tensors)
        away = [tensor for tensor in tensors if tensor.device != self._device]
        if not away:
            return tensors
        self.bytes += sum(tensor.nbytes for tensor in away)
        with self:
            return [tensor.to(self._device, non_blocking=True) for tensor in tensors]


def pin_copy(tensor: Tensor, device: torch.device) -> Tensor:
    """A copy from which the device can copy by itself."""
    return tensor.pin_memory() if device.type == "cuda" else tensor


def pinned(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros in main memory from which the device can copy by itself."""
    zeros = torch.zeros(*shape, dtype=dtype)
    return zeros.pin_memory() if device.type == "cuda" else zeros


def pinned_array(shape: Sequence[int], dtype: str, device: torch.device) -> np.ndarray[Any, Any]:
    """The same as an array."""
    memory: np.ndarray[Any, Any] = pinned((math.prod(shape) * np.dtype(dtype).itemsize,), torch.uint8, device).numpy()
    return memory.view(dtype).reshape(shape)


def settle(device: torch.device) -> None:
    """Return when everything is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class Branches:
    """Independent parts of one captured function, side by side: `with branches(i): ...`, then `join()`.

    Each branch waits for what was queued before it was opened; `join` waits for all of them.
    """

    def __init__(self, device: torch.device, count: int) -> None:
        self._device = device
        self._streams: list[torch.cuda.Stream] = []
        if device.type == "cuda":
            self._streams = [torch.cuda.Stream(device) for _ in range(count)]  # type: ignore[no-untyped-call]
        self._open: set[int] = set()

    @contextlib.contextmanager
    def __call__(self, index: int) -> Iterator[None]:
        if not self._streams:
            yield
            return
        branch = self._streams[index]
        branch.wait_stream(torch.cuda.current_stream(self._device))
        self._open.add(index)
        with torch.cuda.stream(branch):
            yield

    def join(self) -> None:
        for index in self._open:
            torch.cuda.current_stream(self._device).wait_stream(self._streams[index])
        self._open.clear()


@contextlib.contextmanager
def tensor_cores() -> Iterator[None]:
    """Products of float32 numbers on tensor cores, for what is launched (or recorded) inside: 10 bits of each factor count.

    For networks in bf16, whose last layer gives float32: its weights and inputs have no more than 8.
    """
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


class Captured:
    """A function without arguments, whose queue of kernels is recorded once and then launched as one.

    `state`: tensors the function changes. They are put back after the trial runs that recording needs.
    `why_not` says why it could not be recorded (nothing is, on the CPU); then it is simply called. Errors of the function itself
    are raised.
    `urgent`: as in Queue; a graph keeps the priority it was recorded with.
    """

    def __init__(
        self, function: Callable[[], None], state: Iterable[Tensor], device: torch.device, urgent: bool = False
    ) -> None:
        self._function = function
        self._graph: torch.cuda.CUDAGraph | None = None
        self.why_not = ""
        if device.type != "cuda":
            return
        kept = [(tensor, tensor.clone()) for tensor in state]
        current = torch.cuda.current_stream(device)
        side = torch.cuda.Stream(device, priority=-1 if urgent else 0)  # type: ignore[no-untyped-call]
        side.wait_stream(current)
        try:
            with torch.cuda.stream(side):
                for _ in range(2):
                    function()
            current.wait_stream(side)
            self._record(side, current)
        finally:
            current.wait_stream(side)
            for tensor, copy in kept:
                tensor.copy_(copy)

    def _record(self, side: torch.cuda.Stream, current: torch.cuda.Stream) -> None:
        try:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local"):
                self._function()
            self._graph = graph
        except RuntimeError as e:  # whatever a library does that cannot be recorded: the run goes on without
            torch.cuda.set_stream(current)  # a failed recording leaves its own behind
            torch.cuda.synchronize(current.device)
            # The end of a recording fails, too, when something in it did.
            if out_of_memory := next((x for x in (e, e.__context__) if isinstance(x, torch.OutOfMemoryError)), None):
                raise out_of_memory from None
            self.why_not = reason(e)

    def __call__(self) -> None:
        if self._graph is None:
            self._function()
        else:
            self._graph.replay()


def pin(array: np.ndarray[Any, Any], device: torch.device) -> Callable[[], None] | None:
    """Make ordinary memory pinned, so that copies from it need not wait; -> what undoes it. None where it is refused."""
    if device.type != "cuda":
        return None
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    address = array.ctypes.data
    if int(runtime.cudaHostRegister(address, array.nbytes, 0)) == 0:
        return lambda: runtime.cudaHostUnregister(address)
    with contextlib.suppress(RuntimeError):
        torch.zeros(1, device=device)  # the failure is reported by whatever is launched next
    return None
