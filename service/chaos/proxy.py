"""TCP proxies that misbehave on demand: between a dispatcher and all who call it, and Redis."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import socket
import struct
import threading
from collections.abc import Coroutine
from typing import Any, Protocol

CALL_TIMEOUT_S = 10.0
CHUNK_BYTES = 64 << 10
_RESET = struct.pack("ii", 1, 0)  # SO_LINGER: closing sends a reset


_SO_ATTACH_FILTER, _SO_DETACH_FILTER = 26, 27  # of Linux; Python has no names for them
_DROP = ctypes.create_string_buffer(struct.pack("HBBI", 0x06, 0, 0, 0))  # BPF: return 0 bytes


class _Socket(Protocol):
    def setsockopt(self, level: int, option: int, value: int | bytes, /) -> None: ...


def drop_packets(connection: _Socket) -> None:
    """What comes for this socket vanishes, unacknowledged, as if the network were cut.

    On a listening socket, so does what would make a connection. Raises OSError if this system
    cannot.
    """
    program = struct.pack("HL", 1, ctypes.addressof(_DROP))
    connection.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, program)


def keep_packets(connection: _Socket) -> None:
    """The network is whole again; what vanished is sent again by its sender, in time."""
    connection.setsockopt(socket.SOL_SOCKET, _SO_DETACH_FILTER, 0)


class _Proxy:
    """One listening port, and the connections that came through it."""

    def __init__(self, target_port: int) -> None:
        self._target_port = target_port
        self._connections: set[tuple[asyncio.StreamWriter, asyncio.StreamWriter]] = set()
        self._flows = asyncio.Event()
        self._flows.set()
        self._resume: asyncio.TimerHandle | None = None
        self._mute: asyncio.TimerHandle | None = None
        self._silenced: list[_Socket] = []
        self._whole: asyncio.TimerHandle | None = None

    async def listen(self) -> int:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    async def cut(self) -> None:
        """Reset every connection. New ones are accepted at once."""
        self._reset_all()

    async def mute(self, seconds: float) -> None:
        """Pass questions on and lose the answers, for so long; then reset every connection."""
        if self._mute is not None:
            self._mute.cancel()
        self._mute = asyncio.get_running_loop().call_later(seconds, self._unmute)

    def _unmute(self) -> None:
        self._mute = None
        self._reset_all()  # what follows would make no sense without what was lost

    def _reset_all(self) -> None:
        for ends in list(self._connections):
            for end in ends:
                _reset(end)

    async def stall(self, seconds: float) -> None:
        """Keep the connections, accept new ones, and pass nothing on for so long."""
        self._flows.clear()
        if self._resume is not None:
            self._resume.cancel()
        self._resume = asyncio.get_running_loop().call_later(seconds, self._flows.set)

    async def silence(self, seconds: float) -> None:
        """Lose every packet to the proxy, for so long: nobody is told, and nobody can connect."""
        silenced: list[_Socket] = [self._server.sockets[0]]
        silenced += [end.get_extra_info("socket") for ends in self._connections for end in ends]
        self._flows.clear()  # what is in the proxy's own hands, and lost for as long
        for connection in silenced:
            drop_packets(connection)
        self._silenced += silenced
        if self._whole is not None:
            self._whole.cancel()
        self._whole = asyncio.get_running_loop().call_later(seconds, self._unsilence)

    def _unsilence(self) -> None:
        self._flows.set()
        for connection in self._silenced:
            with contextlib.suppress(OSError):  # it is closed, or was silenced twice
                keep_packets(connection)
        self._silenced.clear()

    async def close(self) -> None:
        self._flows.set()
        self._server.close()
        self._reset_all()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            target = await asyncio.open_connection("127.0.0.1", self._target_port)
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

    async def _pass(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, answers: bool = False
    ) -> None:
        while chunk := await reader.read(CHUNK_BYTES):
            await self._flows.wait()
            if answers and self._mute is not None:
                continue
            writer.write(chunk)
            await writer.drain()
        writer.write_eof()


def _reset(writer: asyncio.StreamWriter) -> None:
    connection: socket.socket = writer.get_extra_info("socket")
    with contextlib.suppress(OSError):  # it is closed
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
    writer.transport.abort()


class Proxies:
    """Proxies by name, in a thread of their own. Listens on loopback only. Close it."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._proxies: dict[str, _Proxy] = {}
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="forebay-chaos-proxies", daemon=True
        )
        self._thread.start()

    def add(self, name: str, target_port: int) -> int:
        """A proxy to a port of this machine, where somebody need not listen yet; its port."""
        proxy = self._proxies[name] = _Proxy(target_port)
        port: int = self._call(proxy.listen())
        return port

    def cut(self, name: str) -> None:
        """Reset every connection through the proxy."""
        self._call(self._proxies[name].cut())

    def mute(self, name: str, seconds: float) -> None:
        """Lose what comes back through the proxy, for so long; then reset every connection."""
        self._call(self._proxies[name].mute(seconds))

    def stall(self, name: str, seconds: float) -> None:
        """Hold back everything that passes through the proxy, for so long from now on."""
        self._call(self._proxies[name].stall(seconds))

    def silence(self, name: str, seconds: float) -> None:
        """Cut the network of the proxy for so long, silently: packets to it vanish."""
        self._call(self._proxies[name].silence(seconds))

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
