"""Waiting for what another process does."""

from __future__ import annotations

import time
from collections.abc import Callable

from ..forks import Fork

LONGEST_S = 100.0
"""Below pytest's own limit, which does not say what was waited for."""


def until(what: str, reached: Callable[[], bool], *running: Fork) -> None:
    """Fails if one of the processes ends before, or it takes too long."""
    deadline = time.monotonic() + LONGEST_S
    while not reached():
        codes = [process.poll() for process in running]
        assert codes == [None] * len(running), f"ended with {codes} before there was {what}"
        assert time.monotonic() < deadline, f"after {LONGEST_S} s there was not yet {what}"
        time.sleep(0.01)
