"""Accepts connections of the HTTP port: how many there may be, and for how long each.

aiohttp bounds neither, so this accepts connections itself, and hands them to it. A sweep ends
those that are late. What goes wrong with one is a line in the log, of each kind a line a minute.
"""

from __future__ import annotations

import asyncio
import dataclasses
import socket
import ssl
from collections.abc import Callable, Coroutine
from typing import Any

from ..connections.credentials import Credentials
from ..connections.tls_socket import explained
from ..rate_limited_log import RateLimitedLog

MOST = 256
"""Open connections. Each may cost 100 KB, most of it for TLS, and two descriptors until its
handshake is over."""

MOST_OF_ADDRESS = 32
"""Open connections of one address. Probes and scrapers have one or two; with a proxy or NAT before
them, all of a host share these. So a flood of one address leaves most places to others."""

HEAD_S = 10.0
"""How long a connection may take for the TLS handshake, and again for its first request's head."""

KEEPALIVE_S = 75.0
"""How long a connection stays open without a request after an answer."""

NEXT_S = KEEPALIVE_S + 15.0
"""How long it may take from one request to the next, the answer included."""

_TICK_S = 1.0
_BACKLOG = 128


@dataclasses.dataclass
class _Accepted:
    host: str
    sock: socket.socket
    deadline: float  # of the loop's clock
    transport: asyncio.Transport | None = None  # None during the TLS handshake


class Acceptor:
    """Accepts connections on one event loop, and ends those that are late."""

    def __init__(
        self,
        serve: Callable[[], asyncio.Protocol],
        credentials: Credentials | None,
        rate_limited_log: RateLimitedLog,
    ) -> None:
        """`serve` makes the protocol of a connection."""
        self._serve = serve
        self._credentials = credentials
        self._context = None if credentials is None else credentials.http_context()
        self._rate_limited_log = rate_limited_log
        self._open: dict[int, _Accepted] = {}  # by file descriptor
        self._listeners: list[socket.socket] = []
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self, host: str, port: int) -> int:
        """Listen, and return the port. Raises OSError."""
        loop = asyncio.get_running_loop()
        bound = await loop.create_server(self._serve, host, port, start_serving=False)
        self._listeners = [sock.dup() for sock in bound.sockets]
        bound.close()
        for listener in self._listeners:
            listener.setblocking(False)
            listener.listen(_BACKLOG)
        for listener in self._listeners:
            self._begin(self._accept(listener))
        self._begin(self._sweep())
        return int(self._listeners[0].getsockname()[1])

    async def close(self) -> None:
        """Accept no more, and end handshakes. Idempotent."""
        tasks = [*self._tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for connection in self._open.values():
            if connection.transport is None:
                connection.sock.close()
        for listener in self._listeners:
            listener.close()

    def asked(self, transport: asyncio.BaseTransport | None) -> None:
        """Call when a connection has sent a whole request."""
        sock = None if transport is None else transport.get_extra_info("socket")
        connection = None if sock is None else self._open.get(sock.fileno())
        if connection is not None:
            connection.deadline = asyncio.get_running_loop().time() + NEXT_S

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work, name="forebay-http-connection")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, address = await loop.sock_accept(listener)
            except OSError as error:  # such as no more file descriptors
                self._rate_limited_log.warn("cannot accept a connection: %s", error)
                await asyncio.sleep(_TICK_S)
                continue
            self._forget_closed()
            host = address[0]
            of_host = sum(other.host == host for other in self._open.values())
            if of_host >= MOST_OF_ADDRESS or len(self._open) >= MOST:
                sock.close()
                self._rate_limited_log.warn(
                    "closed a connection of %s: of %d open ones, of which %d may be of one "
                    "address, it has %d, and all together %d", host, MOST, MOST_OF_ADDRESS,
                    of_host, len(self._open),
                )  # fmt: skip
            else:
                connection = _Accepted(host, sock, loop.time() + HEAD_S)
                self._open[sock.fileno()] = connection
                self._begin(self._connect(connection))
            await asyncio.sleep(0)  # a flood leaves time to others

    async def _connect(self, connection: _Accepted) -> None:
        loop = asyncio.get_running_loop()
        try:
            connection.transport, _ = await loop.connect_accepted_socket(
                self._serve,
                connection.sock,
                ssl=self._context,
                ssl_handshake_timeout=None if self._context is None else HEAD_S,
            )
            connection.deadline = loop.time() + HEAD_S
        except OSError as error:  # TLS errors and timeouts are some
            connection.sock.close()
            why, kind = str(error) or "it hung up", type(error).__name__
            if self._credentials is not None and isinstance(error, ssl.SSLError):
                told = explained(error, connection.host, self._credentials, is_server=True)
                why, kind = str(told), told.kind
            self._rate_limited_log.warn(
                "cannot serve a connection of %s: %s", connection.host, why, kind=kind
            )

    async def _sweep(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(_TICK_S)
            self._forget_closed()
            now = loop.time()
            for connection in self._open.values():
                if connection.transport is not None and now > connection.deadline:
                    connection.transport.abort()
                    self._rate_limited_log.warn(
                        "cut a connection of %s: it sent no whole request for too long",
                        connection.host,
                    )

    def _forget_closed(self) -> None:
        self._open = {n: kept for n, kept in self._open.items() if kept.sock.fileno() >= 0}
