"""The HTTP server of a dispatcher or a worker.

    GET /healthz   200 while the process answers
    GET /readyz    200 while it serves; else 503, and why not
    GET /metrics   for Prometheus; with credentials only for who has proved to be let in

A dispatcher runs it on its own event loop, so /healthz tells whether that loop answers. A worker
has it in a thread (`HttpThread`).
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol
from urllib.parse import urlsplit

from aiohttp import web
from aiohttp.http import HttpProcessingError

from ...storage.thread_pool import in_a_thread
from ..address_forms import in_brackets
from ..connections.admission import Admission, Identity, of_certificate
from ..connections.credentials import Credentials, is_loopback
from ..errors import AddressInUse, PermissionDenied, Unauthenticated
from ..rate_limited_log import RateLimitedLog
from .acceptor import HEAD_S, KEEPALIVE_S, Acceptor
from .exposition import encode
from .families import Measured

log = logging.getLogger(__name__)

STOP_S = 1.0
"""How long `close` waits for answers in progress."""

HEADERS = {"Cache-Control": "no-store", "Server": "Forebay", "X-Content-Type-Options": "nosniff"}


Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def refused_as_text(_: web.Request, status: int, error: Exception) -> web.Response:
    """Says in plain text why somebody is not let in."""
    headers = {"WWW-Authenticate": "Bearer", **HEADERS} if status == 401 else HEADERS
    return web.Response(status=status, text=f"{error}\n", headers=headers)


class HealthAndMetrics(Protocol):
    """What the port tells of."""

    def unhealthy(self) -> str:
        """Why the process does not work; "" if it does."""

    def unready(self) -> str:
        """Why it does not serve; "" if it does."""

    async def measured(self) -> Sequence[Measured]:
        """Its metrics."""


class _BadRequests(logging.LoggerAdapter[logging.Logger]):
    """aiohttp's log, with a line for a request that is not HTTP, where aiohttp has a traceback."""

    def __init__(self, logger: logging.Logger, rate_limited_log: RateLimitedLog) -> None:
        super().__init__(logger)
        self._rate_limited_log = rate_limited_log

    def log(self, level: int, msg: object, *args: object, exc_info: Any = None, **how: Any) -> None:
        """Among others, of TLS on a port without it, for which aiohttp has the level debug."""
        if not isinstance(exc_info, HttpProcessingError):
            super().log(level, msg, *args, exc_info=exc_info, **how)
            return
        said, host = " ".join(exc_info.message.split())[:200], args[-1] if args else "somebody"
        self._rate_limited_log.warn("a request of %s is not HTTP: %s", host, ascii(said))


MAX_BODY_BYTES = 64 << 10


class HttpServer:
    """Serves on one event loop: that of `start`."""

    def __init__(
        self,
        observed: HealthAndMetrics,
        credentials: Credentials | None,
        may_see: Callable[[Identity], None] | None = None,
    ) -> None:
        """`may_see` raises PermissionDenied for who may not see what `admitted` guards."""
        self._observed = observed
        self._credentials = credentials
        self._may_see = may_see
        self._admission = None if credentials is None else Admission(credentials)
        self._scrape: asyncio.Task[Sequence[Measured]] | None = None
        self.app = web.Application(middlewares=[self._asked], client_max_size=MAX_BODY_BYTES)
        self.app.router.add_get("/healthz", self._state(observed.unhealthy))
        self.app.router.add_get("/readyz", self._state(observed.unready))
        self.app.router.add_get("/metrics", self.admitted(self._metrics))
        self.rate_limited_log = RateLimitedLog(log)
        self._acceptor: Acceptor | None = None
        self._runner = web.AppRunner(
            self.app,
            access_log=None,
            keepalive_timeout=KEEPALIVE_S,
            shutdown_timeout=STOP_S,
            lingering_time=0,  # bodies are read whole, or not
            logger=_BadRequests(log, self.rate_limited_log),
        )
        self.address = ""
        self._is_loopback = False

    async def start(self, host: str, port: int) -> None:
        """Listen on host:port (0: any free port). Raises AddressInUse."""
        await self._runner.setup()
        assert self._runner.server is not None
        self._is_loopback = is_loopback(host) and self._credentials is None
        self._acceptor = Acceptor(self._runner.server, self._credentials, self.rate_limited_log)
        try:
            found = await self._acceptor.start(host.strip("[]"), port)
        except OSError as error:
            await self.close()
            why = "it is in use" if error.errno == errno.EADDRINUSE else error.strerror
            raise AddressInUse(
                f"--http-port: cannot listen on {host}:{port}: {why}; give each server of a host "
                "a port of its own, or 0 for any free one"
            ) from error
        self.address = f"{in_brackets(host)}:{found}"
        log.info("%s/metrics", self.url(self.address))

    def url(self, address: str) -> str:
        """Of its pages, for those who reach this host as that of HOST:PORT. Once it has started."""
        scheme = "http" if self._credentials is None else "https"
        return f"{scheme}://{address.rpartition(':')[0]}:{self.address.rpartition(':')[2]}"

    async def close(self) -> None:
        """Idempotent."""
        if self._acceptor is not None:
            await self._acceptor.close()
        await self._runner.cleanup()

    @web.middleware
    async def _asked(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        if self._is_loopback and not _is_this_host(request.host):
            # A page of that name may have made the name this host's, for what a browser sees here.
            return web.Response(status=421, text="this host has another name: say localhost\n")
        try:
            async with asyncio.timeout(HEAD_S):
                await request.read()
        except (ConnectionError, TimeoutError, web.RequestPayloadError) as error:
            why = str(error) or f"it did not arrive within {HEAD_S:.0f} s"
            self.rate_limited_log.warn("a request of %s was cut off: %s", request.remote, why)
            return web.Response(status=408, headers={"Connection": "close"})
        self.stays(request)
        return await handler(request)

    def admitted(
        self, handler: Handler, refused: Callable[[web.Request, int, Exception], web.Response]
        = refused_as_text,
    ) -> Handler:  # fmt: skip
        """The handler behind a check of the token or the certificate, and of what it may see.
        `refused` answers those that are not let in."""

        async def checked(request: web.Request) -> web.StreamResponse:
            try:
                self.admit(request)
            except Unauthenticated as error:
                if refused is refused_as_text:  # a browser may sign in
                    self.rate_limited_log.warn("refused a request of %s: %s", request.remote, error)
                return refused(request, 401, error)
            except PermissionDenied as error:
                self.rate_limited_log.warn("refused a request of %s: %s", request.remote, error)
                return refused(request, 403, error)
            return await handler(request)

        return checked

    @property
    def cookie(self) -> str:
        """By which a browser sends its pass: to all ports of a host, so it has the port's name."""
        return f"forebay_pass_{self.address.rpartition(':')[2]}"

    @property
    def asks_for_token(self) -> bool:
        return self._admission is not None and self._admission.asks_for_token

    def issue_pass(self, token: str, lasts_s: int) -> str:
        """A pass for a browser, which sends it as `cookie`. Raises Unauthenticated."""
        assert self._admission is not None
        return self._admission.issue_pass(token, int(time.time()) + lasts_s)

    def stays(self, request: web.Request) -> None:
        """Call now and then while an answer goes on: its connection is not cut."""
        if self._acceptor is not None:
            self._acceptor.asked(request.transport)

    def admit(self, request: web.Request) -> None:
        """Raises Unauthenticated and PermissionDenied."""
        if self._admission is None:
            return
        sent = request.headers.get("Authorization", "")
        shown = request.cookies.get(self.cookie)
        if self._admission.asks_for_token and shown and not sent:
            who = self._admission.of_pass(shown, int(time.time()))
        elif self._admission.asks_for_token:
            who = self._admission.of_metadata([("authorization", sent if sent.isascii() else "")])
        else:
            who = self._of_certificate(request)
        if self._may_see is not None:
            self._may_see(who)

    def _of_certificate(self, request: web.Request) -> Identity:
        """A certificate that was sent has been checked by TLS. Raises Unauthenticated."""
        transport = request.transport
        tls = None if transport is None else transport.get_extra_info("ssl_object")
        if tls is None or not (der := tls.getpeercert(binary_form=True)):
            raise Unauthenticated(
                "no certificate was sent: give the client one that this server's --tls-ca has "
                "signed, as Prometheus's tls_config has it"
            )
        return of_certificate(der)

    def _state(
        self, why_not: Callable[[], str]
    ) -> Callable[[web.Request], Awaitable[web.Response]]:
        async def answer(_: web.Request) -> web.Response:
            why = why_not()
            return web.Response(
                status=503 if why else 200, text=f"{why or 'ok'}\n", headers=HEADERS
            )

        return answer

    async def _metrics(self, request: web.Request) -> web.Response:
        # Scrapes at the same time share the work, and one that goes away does not end it.
        if self._scrape is None or self._scrape.done():
            self._scrape = asyncio.create_task(self._observed.measured(), name="forebay-scrape")
        samples = await asyncio.shield(self._scrape)
        accept = request.headers.get("Accept", "")
        text, content_type = await in_a_thread("forebay-scrape", encode, samples, accept)
        return web.Response(body=text, headers={"Content-Type": content_type, **HEADERS})


class HttpThread:
    """An HttpServer on an event loop of its own, in a thread."""

    def __init__(self, server: HttpServer) -> None:
        self._server = server
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="forebay-http", daemon=True
        )

    @property
    def address(self) -> str:
        return self._server.address

    def start(self, host: str, port: int) -> None:
        """Raises AddressInUse."""
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._server.start(host, port), self._loop).result()

    def stop(self) -> None:
        """Idempotent."""
        if self._loop.is_closed():
            return
        if self._thread.is_alive():
            asyncio.run_coroutine_threadsafe(self._end(), self._loop).result()
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
        self._loop.close()

    async def _end(self) -> None:
        await self._server.close()
        await self._loop.shutdown_default_executor()


def _is_this_host(host: str) -> bool:
    try:
        name = urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return False
    return is_loopback(name) or name == socket.gethostname().lower()
