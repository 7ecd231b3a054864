"""The TLS of an HTTP port, which asyncio does, but for the alert of a handshake that fails.

asyncio closes the socket without sending it, so the peer would not know why.
"""

from __future__ import annotations

import ssl
from typing import Any


class HttpContext(ssl.SSLContext):
    """Keeps the alert of a handshake that fails, for `alert_of`."""

    def wrap_bio(
        self, incoming: ssl.MemoryBIO, outgoing: ssl.MemoryBIO, *args: Any, **how: Any
    ) -> ssl.SSLObject:
        made = super().wrap_bio(incoming, outgoing, *args, **how)
        assert isinstance(made, _HttpTls)
        made.outgoing = outgoing
        return made


class _HttpTls(ssl.SSLObject):
    outgoing: ssl.MemoryBIO

    def do_handshake(self) -> None:
        try:
            super().do_handshake()
        except ssl.SSLWantReadError:
            raise
        except ssl.SSLError as error:
            error.alert = self.outgoing.read()  # type: ignore[attr-defined]
            raise


HttpContext.sslobject_class = _HttpTls


def alert_of(error: ssl.SSLError) -> bytes:
    """What is to be sent to the peer, so that it knows why; perhaps nothing."""
    alert: bytes = getattr(error, "alert", b"")
    return alert
