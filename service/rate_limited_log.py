"""Warnings that a peer can provoke as often as it likes, limited in rate."""

from __future__ import annotations

import logging
import threading
import time

_SILENT_S = 60.0
MOST_KINDS = 1_000
"""Remembered at a time: peers may have a part in what a kind is."""


class RateLimitedLog:
    """Warnings of which each kind is logged once a minute, with how many were left out.

    Thread-safe.
    """

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._lock = threading.Lock()
        self._said: dict[str, tuple[float, int]] = {}  # when it was logged; how often not, since

    def warn(
        self,
        text: str,
        *args: object,
        kind: str = "",
        level: int = logging.WARNING,
        exc_info: BaseException | None = None,
    ) -> None:
        """Log `text` with its arguments. The kind is `text` and `kind`, such as who provoked it."""
        now, key = time.monotonic(), text + kind
        with self._lock:
            at, missed = self._said.get(key, (-_SILENT_S, 0))
            if now < at + _SILENT_S:
                self._said[key] = at, missed + 1
                return
            self._said.pop(key, None)
            self._said[key] = now, 0  # the latest last
            if len(self._said) > MOST_KINDS:
                del self._said[next(iter(self._said))]
        more = f" (and {missed} more of the kind)" if missed else ""
        self._log.log(level, text + more, *args, exc_info=exc_info)
