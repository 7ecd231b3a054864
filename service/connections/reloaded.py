"""Files of a server's configuration that may change while it runs."""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from typing import Any, Generic, TypeVar

from ..errors import InvalidArgument
from ..platforms import at_fork

log = logging.getLogger(__name__)

CHECK_S = 1.0
"""How often the files are looked at, at most."""

Content = TypeVar("Content")

_all: weakref.WeakSet[Reloaded[Any]] = weakref.WeakSet()


class Reloaded(Generic[Content]):
    """What files held when they last could be used. Thread-safe."""

    def __init__(self, what: object, paths: Iterable[str], load: Callable[[], Content]) -> None:
        """`load` reads the files, and raises InvalidArgument if they cannot be used."""
        self._what = what
        self._paths = tuple(paths)
        self._load = load
        self.lock = threading.Lock()
        self._content: Content | None = None
        self._seen: Any = None  # the state of the files at the last attempt
        self._look_at = 0.0
        _all.add(self)

    def content(self) -> Content:
        """Read the files again if they have changed. If the new ones cannot be used, the old ones
        stay in force. Raises InvalidArgument if they could never be used."""
        with self.lock:
            now = time.monotonic()
            if self._content is not None and now < self._look_at:
                return self._content
            seen = self._state()
            if self._content is None or seen != self._seen:
                self._renew(seen)
            assert self._content is not None
            self._look_at = now + CHECK_S
            return self._content

    def _renew(self, seen: Any) -> None:
        try:
            content = self._load()
            if (now := self._state()) != seen:  # one of them is old, perhaps
                seen, content = now, self._load()
        except InvalidArgument as error:
            if self._content is None:
                raise
            log.warning(
                "%s: the files have changed, and the old stay in force: %s", self._what, error
            )
        else:
            if self._content is not None:
                log.info("%s: the new files are in force", self._what)
            self._content = content
        self._seen = seen

    def _state(self) -> Any:
        return [_state_of(path) for path in self._paths]


def _state_of(path: str) -> tuple[int, ...]:
    try:
        found = os.stat(path)
    except OSError:
        return ()
    return found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def _unlock_in_child() -> None:
    """Another thread may have held a lock when this process was forked."""
    for reloaded in list(_all):
        reloaded.lock = threading.Lock()


at_fork(after_in_child=_unlock_in_child)
