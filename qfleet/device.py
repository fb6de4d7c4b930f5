"""What differs between devices, in one place: streams, graphs, pinned memory. ROCm answers to the same calls as CUDA.

On the CPU everything here is the plain thing: one stream, calls instead of graphs, ordinary memory.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor


def triton_works() -> bool:
    """Is there a Triton to compile kernels with? (On the CPU: its interpreter, for tests.)"""
    try:
        import triton  # noqa: F401
    except ImportError:
        return False
    return True


def stream(device: torch.device, urgent: bool = False) -> torch.cuda.Stream:
    """A queue of work. What is in an urgent one goes first wherever the device has a choice."""
    return torch.cuda.Stream(device, priority=-1 if urgent else 0)  # type: ignore[no-untyped-call]


def event(timed: bool = False) -> torch.cuda.Event:
    """A mark in a queue. Who waits for it sleeps: the cores belong to the environments."""
    return torch.cuda.Event(enable_timing=timed, blocking=True)  # type: ignore[no-untyped-call]


class Branches:
    """Independent parts of one captured function, side by side: `with branches(i): ...`, then `join()`.

    Each branch waits for what was queued before it was opened; `join` waits for all of them.
    """

    def __init__(self, device: torch.device, count: int) -> None:
        self._streams = [stream(device) for _ in range(count)] if device.type == "cuda" else []
        self._open: set[int] = set()

    @contextlib.contextmanager
    def __call__(self, index: int) -> Iterator[None]:
        if not self._streams:
            yield
            return
        branch = self._streams[index]
        branch.wait_stream(torch.cuda.current_stream())
        self._open.add(index)
        with torch.cuda.stream(branch):
            yield

    def join(self) -> None:
        for index in self._open:
            torch.cuda.current_stream().wait_stream(self._streams[index])
        self._open.clear()


class Captured:
    """A function without arguments, whose queue of kernels is recorded once and then launched as one.

    `state`: tensors the function changes. They are put back after the trial runs that recording needs.
    `why_not` says why it could not be recorded; then it is simply called.
    """

    def __init__(self, function: Callable[[], None], state: Iterable[Tensor], device: torch.device) -> None:
        self._function = function
        self._graph: torch.cuda.CUDAGraph | None = None
        self.why_not = ""
        if device.type != "cuda":
            self.why_not = "graphs need a GPU"
            return
        kept = [(tensor, tensor.clone()) for tensor in state]
        try:
            self._record(device)
        except Exception as e:  # whatever a library does that cannot be recorded: the run goes on without
            torch.cuda.synchronize(device)
            self.why_not = f"{type(e).__name__}: {str(e).splitlines()[0] if str(e) else ''}"
            self._graph = None
        for tensor, copy in kept:
            tensor.copy_(copy)

    def _record(self, device: torch.device) -> None:
        side = stream(device)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                self._function()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=side):
            self._function()
        self._graph = graph

    def __call__(self) -> None:
        if self._graph is None:
            self._function()
        else:
            self._graph.replay()


def pin(array: np.ndarray[Any, Any]) -> Callable[[], None] | None:
    """Make ordinary memory pinned, so that copies from it need not wait; -> what undoes it. None where it is refused."""
    if not torch.cuda.is_available():
        return None
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    address = array.ctypes.data
    if int(runtime.cudaHostRegister(address, array.nbytes, 0)) == 0:
        return lambda: runtime.cudaHostUnregister(address)
    with contextlib.suppress(RuntimeError):
        torch.cuda.synchronize()  # the failure would be reported by whatever is called next
    return None
