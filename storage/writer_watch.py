"""Watches a writer of a storage on a server: when may another one take its place?

The watcher measures by its own clock how long the writer's signs of life have stayed the same. Two
periods follow from the lease that the writer wrote down:

    query_ms    the writer answers no query that long after it sent its last sign of life
    lease_ms    it is displaced, whether it lives or not

Between the two it is displaced if its process seems to have ended: the server has none of its
connections, and its address refuses one. Each of these can be wrong. A server forgets its
connections when it restarts; a firewall rejects; a leader binds its port anew. So both are needed,
and both must have been otherwise before, in the same term. A mistake breaks no promise, since
nobody is displaced within `query_ms`, and the term fences appends.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from .base import Listens
from .server_log import Meta

log = logging.getLogger(__name__)


class WriterWatch:
    """The watch of one storage object. For one thread at a time."""

    def __init__(self, is_connected: Callable[[str], bool]) -> None:
        """`is_connected` tells whether the server has a connection of the writer with a token, or
        cannot say so.
        """
        self._is_connected = is_connected
        self._meta: Meta | None = None  # as it was looked at last
        self._since_s = 0.0  # when it was first seen so
        self._asked_s = 0.0  # when it was asked for last
        self._seen = ""  # the token of a writer that was connected and listened on
        self._look_at_s = 0.0  # when to look again for that

    @contextmanager
    def looking(self) -> Iterator[None]:
        """Wrap the request for the meta. If it fails, the watch begins anew."""
        self._asked_s = time.monotonic()
        try:
            yield
        except BaseException:
            self._meta = None
            raise

    def may_displace(self, meta: Meta, listens: Listens | None) -> bool:
        """Whether the writer that `meta` names may be displaced. Raises StorageUnavailable."""
        if meta != self._meta:
            self._meta, self._since_s = meta, time.monotonic()
        silent_ms = 1000 * (self._asked_s - self._since_s)
        if silent_ms >= meta.lease_ms:
            return True
        if listens is None:
            return False
        if meta.token != self._seen:
            self._see(meta, listens)
            return False
        if silent_ms < meta.query_ms or listens(meta.term) is not False:
            return False
        if self._is_connected(meta.token):
            return False
        log.info("%s seems to have ended: its address and connections are gone", meta.owner)
        return True

    def _see(self, meta: Meta, listens: Listens) -> None:
        now = time.monotonic()
        if now < self._look_at_s:
            return
        self._look_at_s = now + meta.query_ms / 1000  # the server may have many connections
        if listens(meta.term) and self._is_connected(meta.token):
            self._seen = meta.token
            log.info("%s is connected, and listens: its end would be noticed", meta.owner)
