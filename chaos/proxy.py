"""TCP proxies that inject network faults: in front of dispatchers and of Redis."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import socket
import struct
import threading
from collections.abc import Callable, Coroutine
from typing import Any, Protocol

from .hosts import LOOPBACK, Host

CALL_TIMEOUT_S = 10.0
CHUNK_BYTES = 64 << 10
_RESET = struct.pack("ii", 1, 0)  # SO_LINGER: closing sends a reset


_SO_ATTACH_FILTER, _SO_DETACH_FILTER = 26, 27  # of Linux; Python has no names for them
_DROP = ctypes.create_string_buffer(struct.pack("HBBI", 0x06, 0, 0, 0))  # BPF: return 0 bytes


class _Socket(Protocol):
    def setsockopt(self, level: int, option: int, value: int | bytes, /) -> None: ...


def drop_packets(connection: _Socket) -> None:
    """Drop all packets to this socket, unacknowledged, as if the network were cut.

    On a listening socket, this drops connection requests, too. Raises OSError if the system cannot
    do it.
    """
    program = struct.pack("HL", 1, ctypes.addressof(_DROP))
    connection.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, program)


def keep_packets(connection: _Socket) -> None:
    """End `drop_packets`. The senders retransmit the dropped packets after a while."""
    connection.setsockopt(socket.SOL_SOCKET, _SO_DETACH_FILTER, 0)


class _Proxy:
    """One listening port, and the connections that came through it to a port of the same host."""

    def __init__(self, target_port: int, host: Host) -> None:
        self._target_port = target_port
        self._host = host
        self._connections: set[tuple[asyncio.StreamWriter, asyncio.StreamWriter]] = set()
        self._flows = asyncio.Event()
        self._flows.set()
        self._silenced: list[_Socket] = []
        self._timers: dict[str, asyncio.TimerHandle] = {}  # of disturbances that are not over

    async def listen(self) -> int:
        listening = self._host.socket()
        listening.bind((self._host.address, 0))
        self._server = await asyncio.start_server(self._accept, sock=listening)
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    async def cut(self, _: float) -> None:
        """Reset every connection. New ones are accepted at once."""
        self._reset_all()

    async def mute(self, seconds: float) -> None:
        """Pass requests on and drop the answers, for `seconds`; then reset every connection."""
        self._later("mute", seconds, self._reset_all)  # the streams are useless after lost bytes

    async def stall(self, seconds: float) -> None:
        """Keep the connections, accept new ones, and pass nothing on for `seconds`."""
        self._flows.clear()
        self._later("stall", seconds, self._flows.set)

    async def silence(self, seconds: float) -> None:
        """Silently drop every packet to the proxy for `seconds`: nobody can connect."""
        silenced: list[_Socket] = [self._server.sockets[0]]
        silenced += [end.get_extra_info("socket") for ends in self._connections for end in ends]
        self._flows.clear()  # also hold back the bytes that the proxy has already received
        for connection in silenced:
            drop_packets(connection)
        self._silenced += silenced
        self._later("silence", seconds, self._unsilence)

    def _later(self, what: str, seconds: float, end: Callable[[], object]) -> None:
        """End a disturbance in so many seconds, whenever it was to end before."""

        def over() -> None:
            del self._timers[what]
            end()

        if what in self._timers:
            self._timers[what].cancel()
        self._timers[what] = asyncio.get_running_loop().call_later(seconds, over)

    def _unsilence(self) -> None:
        self._flows.set()
        for connection in self._silenced:
            with contextlib.suppress(OSError):  # it is closed, or was silenced twice
                keep_packets(connection)
        self._silenced.clear()

    def _reset_all(self) -> None:
        for ends in list(self._connections):
            for end in ends:
                _reset(end)

    async def close(self) -> None:
        self._flows.set()
        self._server.close()
        self._reset_all()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            target = await self._connect()
        except OSError:  # nobody listens there now
            _reset(writer)
            return
        ends = (writer, target[1])
        self._connections.add(ends)
        try:
            await asyncio.gather(
                self._pass(reader, target[1]), self._pass(target[0], writer, answers=True)
            )
        except OSError:  # cut, by us or by an end
            pass
        finally:
            self._connections.discard(ends)
            for end in ends:
                _reset(end)

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        connection = self._host.socket()
        connection.setblocking(False)
        address = ("127.0.0.1", self._target_port)
        try:
            await asyncio.get_running_loop().sock_connect(connection, address)
            return await asyncio.open_connection(sock=connection)
        except OSError:
            connection.close()
            raise

    async def _pass(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, answers: bool = False
    ) -> None:
        while chunk := await reader.read(CHUNK_BYTES):
            await self._flows.wait()
            if answers and "mute" in self._timers:
                continue
            writer.write(chunk)
            await writer.drain()
        writer.write_eof()


def _reset(writer: asyncio.StreamWriter) -> None:
    connection: socket.socket = writer.get_extra_info("socket")
    with contextlib.suppress(OSError):  # it is closed
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
    writer.transport.abort()


DISTURBANCES = {
    "cut": _Proxy.cut,
    "mute": _Proxy.mute,
    "stall": _Proxy.stall,
    "silence": _Proxy.silence,
}


class Proxies:
    """Proxies by name, in their own thread. Each listens on its host only. Close it."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._proxies: dict[str, _Proxy] = {}
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="forebay-chaos-proxies", daemon=True
        )
        self._thread.start()

    def add(self, name: str, target_port: int, host: Host = LOOPBACK) -> int:
        """Add a proxy to a loopback port of the host; return the proxy's port. Connects only on
        use.
        """
        proxy = self._proxies[name] = _Proxy(target_port, host)
        port: int = self._call(proxy.listen())
        return port

    def disturb(self, name: str, action: str, seconds: float = 0.0) -> None:
        """Cut, mute, stall or silence the connections through the proxy: see `_Proxy`'s methods."""
        self._call(DISTURBANCES[action](self._proxies[name], seconds))

    def close(self) -> None:
        """End all connections and the thread. Idempotent."""
        if self._loop.is_closed():
            return
        for proxy in self._proxies.values():
            self._call(proxy.close())
        self._call(self._end_tasks())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _end_tasks(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _call(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(CALL_TIMEOUT_S)
