"""Calls of a parameter server over TCP: a small header, then arrays as they lie in memory.

    request   u32 header bytes, u64 payload bytes | {"method", "args", "sizes"} | arrays, one after the other
    answer    the same with {"reply", "sizes"}, or {"error"}

Ray would carry these calls, too; but a small push takes it 1.5 ms and the gradient of a Nature network 6 to 11, where this takes
0.2 and 2 to 4 (benchmarks/results/wire.jsonl). A connection begins with a token, which only the run's own actors know.

| who              | waits for                    | unblocked by                                                         |
|------------------|------------------------------|----------------------------------------------------------------------|
| `Connection`     | the answer                   | the server, or an error when it is gone                              |
| server, per peer | the next request             | the peer; ends when it closes                                        |
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import socket
import struct
import threading
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, TypeVar

import numpy as np

from qfleet.types import Array

HEADER = struct.Struct("<IQ")
BUFFER = 4 << 20  # of a socket
CONNECT = 25.0  # seconds for a machine to take a connection
T = TypeVar("T")
Address = tuple[str, int]
Answer = tuple[Any, Sequence[Array]]  # what can be written as JSON, and arrays


class WireError(RuntimeError):
    """The other side refused the call."""


class Gone(WireError):
    """The other side does not answer any more."""


class Unreachable(WireError):
    """The other side answers others, as far as one can see, but not this process."""


def _pack(header: dict[str, Any], arrays: Sequence[Array]) -> bytes:
    text = json.dumps({**header, "sizes": [array.nbytes for array in arrays]}).encode()
    return HEADER.pack(len(text), sum(array.nbytes for array in arrays)) + text


def _unpack(header: dict[str, Any], payload: Array) -> list[Array]:
    edges = np.cumsum([0, *header["sizes"]])
    return [payload[a:b] for a, b in itertools.pairwise(edges)]


def _tune(sock: socket.socket) -> None:
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # a machine that vanishes is found, too
    # The last one: also while something that was sent is not acknowledged.
    for name, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3), ("TCP_USER_TIMEOUT", 25_000)):
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    for which in (socket.SO_RCVBUF, socket.SO_SNDBUF):
        sock.setsockopt(socket.SOL_SOCKET, which, BUFFER)


# --- the caller ---------------------------------------------------------------------------------------------------------


class Connection:
    """One call at a time: `connection(method, args, arrays)` sends it, `receive` waits for the answer."""

    def __init__(self, address: Address, token: str, timeout: float | None = None) -> None:
        self.sent = 0  # bytes
        try:
            self._sock = socket.create_connection(address, timeout=timeout or CONNECT)
        except OSError as e:
            raise Gone(f"no server answers at {address[0]}:{address[1]} ({e.strerror or e})") from None
        self._sock.settimeout(timeout)
        _tune(self._sock)
        try:
            self("hello", [token]).receive()
        except Gone as e:
            self.close()
            raise Gone(f"no server answers at {address[0]}:{address[1]}: {e}") from None
        except BaseException:
            self.close()
            raise

    def __call__(self, method: str, args: Sequence[Any] = (), arrays: Sequence[Array] = ()) -> Connection:
        head = _pack({"method": method, "args": list(args)}, arrays)
        self.sent += len(head) + sum(array.nbytes for array in arrays)
        try:
            self._sock.sendall(head)
            for array in arrays:
                self._sock.sendall(array.data)
        except OSError as e:
            raise Gone(f"the server is gone ({e.strerror or e})") from None
        return self

    def receive(self) -> Answer:
        size, payload_size = HEADER.unpack(self._read(HEADER.size).data)
        header = json.loads(self._read(size).tobytes())
        payload = self._read(payload_size)
        if "error" in header:
            raise WireError(header["error"])
        return header["reply"], _unpack(header, payload)

    def _read(self, size: int) -> Array:
        out = np.empty(size, np.uint8)
        got, view = 0, out.data
        while got < size:
            try:
                more = self._sock.recv_into(view[got:], size - got, socket.MSG_WAITALL)
            except OSError as e:
                raise Gone(f"the server is gone ({e.strerror or e})") from None
            if more == 0:
                raise Gone("the server is gone (it closed the connection)")
            got += more
        return out

    def close(self) -> None:
        """Also while another thread waits for an answer, which then fails."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()


# --- the server ---------------------------------------------------------------------------------------------------------

Handler = Callable[[list[Any], list[Array]], Awaitable[Answer]]


class Listener:
    """Answers calls with `handlers`, in the running event loop."""

    def __init__(self, handlers: dict[str, Handler], token: str, host: str = "") -> None:
        self._handlers, self._token = handlers, token
        self._sock = socket.create_server((host, 0), backlog=128)
        self._sock.setblocking(False)
        self.port: int = self._sock.getsockname()[1]
        self._tasks: set[asyncio.Task[None]] = set()
        asyncio.get_running_loop().add_reader(self._sock, self._accept)

    def _accept(self) -> None:
        """No coroutine: one that is cancelled loses what it has just accepted, and the other side would wait for ever."""
        try:
            peer, _ = self._sock.accept()
        except OSError:  # it has gone already
            return
        peer.setblocking(False)
        task = asyncio.create_task(self._serve(peer))
        self._tasks.add(task)

        def ended(task: asyncio.Task[None]) -> None:
            self._tasks.discard(task)
            peer.close()  # also if it never began

        task.add_done_callback(ended)

    async def _serve(self, peer: socket.socket) -> None:
        loop, known = asyncio.get_running_loop(), False
        try:
            _tune(peer)
            while True:
                size, payload_size = HEADER.unpack((await _read(loop, peer, HEADER.size)).data)
                if not known and payload_size + size > 4096:
                    return
                header = json.loads((await _read(loop, peer, size)).tobytes())
                payload = await _read(loop, peer, payload_size)
                method, args = header["method"], header["args"]
                if method == "hello":
                    known = args == [self._token]
                if not known:
                    await loop.sock_sendall(peer, _pack({"error": "this server belongs to another run"}, []))
                    return
                await self._answer(loop, peer, method, args, _unpack(header, payload))
        except (EOFError, OSError):
            return

    async def _answer(
        self, loop: asyncio.AbstractEventLoop, peer: socket.socket, method: str, args: list[Any], arrays: list[Array]
    ) -> None:
        try:
            reply, out = (None, ()) if method == "hello" else await self._handlers[method](args, arrays)
        except Exception as e:  # the caller shall know; the server goes on
            await loop.sock_sendall(peer, _pack({"error": f"{type(e).__name__}: {e}"}, []))
            return
        await loop.sock_sendall(peer, _pack({"reply": reply}, out))
        for array in out:
            await loop.sock_sendall(peer, memoryview(array.data).cast("B"))

    async def close(self) -> None:
        if self._sock.fileno() >= 0:
            asyncio.get_running_loop().remove_reader(self._sock)
            self._sock.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


class Peer:
    """A server's calls of another one, in order, whose answers nobody waits for. `lost` is called when it does not answer, or refuses."""

    def __init__(self, address: Address, token: str, lost: Callable[[], object]) -> None:
        self._queue: asyncio.Queue[bytes] = asyncio.Queue()
        self._queue.put_nowait(_pack({"method": "hello", "args": [token]}, []))
        self.task = asyncio.create_task(self._send(address))
        self.task.add_done_callback(lambda task: task.cancelled() or (task.exception(), lost()))

    def __call__(self, method: str, args: Sequence[Any]) -> None:
        self._queue.put_nowait(_pack({"method": method, "args": list(args)}, []))

    async def _send(self, address: Address) -> None:
        loop = asyncio.get_running_loop()
        with socket.socket() as sock:
            sock.setblocking(False)
            await loop.sock_connect(sock, address)
            _tune(sock)
            while True:
                await loop.sock_sendall(sock, await self._queue.get())
                size, payload_size = HEADER.unpack((await _read(loop, sock, HEADER.size)).data)
                header = json.loads((await _read(loop, sock, size + payload_size)).tobytes())
                if "error" in header:
                    raise WireError(header["error"])


class Loop:
    """An event loop on a thread of its own."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="event loop", daemon=True)
        self._thread.start()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """From any other thread."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    def close(self) -> None:
        async def end() -> None:
            left = asyncio.all_tasks() - {asyncio.current_task()}
            for task in left:
                task.cancel()
            await asyncio.gather(*left, return_exceptions=True)

        self.run(end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def _read(loop: asyncio.AbstractEventLoop, peer: socket.socket, size: int) -> Array:
    out = np.empty(size, np.uint8)
    view, got = out.data, 0
    while got < size:
        more = await loop.sock_recv_into(peer, view[got:])
        if more == 0:
            raise EOFError
        got += more
    return out
