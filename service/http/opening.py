"""Opens the HTTP port, if the extra `http` is installed."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from ..connections.admission import Identity
from ..connections.credentials import Credentials
from ..errors import InvalidArgument
from ..extras import needing
from ..options import ServerOptions

if TYPE_CHECKING:
    from .server import HealthAndMetrics, HttpServer, HttpThread

_EXTRA = "--http-port needs aiohttp, Jinja2 and prometheus-client", "http", InvalidArgument


async def open_http(
    observed: HealthAndMetrics,
    options: ServerOptions,
    credentials: Credentials | None,
    may_see: Callable[[Identity], None] | None = None,
    extend: Callable[[HttpServer], object] = lambda _: None,
) -> HttpServer | None:
    """A server on this event loop; None without --http-port. Raises AddressInUse, InvalidArgument.

    `credentials` are those of the server's other ports. `may_see` raises PermissionDenied for who
    may not see metrics. `extend` adds further pages.
    """
    if options.http_port < 0:
        return None
    with needing(*_EXTRA):
        from .server import HttpServer

        server = HttpServer(observed, credentials, may_see)
        extend(server)
    await server.start(options.host, options.http_port)
    return server


def open_http_thread(
    observed: HealthAndMetrics, options: ServerOptions, credentials: Credentials | None
) -> HttpThread | None:
    """The same, in a thread."""
    if options.http_port < 0:
        return None
    with needing(*_EXTRA):
        from .server import HttpServer, HttpThread
    thread = HttpThread(HttpServer(observed, credentials))
    try:
        thread.start(options.host, options.http_port)
    except BaseException:
        thread.stop()
        raise
    return thread
