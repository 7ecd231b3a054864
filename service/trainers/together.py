"""What processes that train in step do when one is told to stop: all stop, between the same steps.

Whichever is told tells the others. Each says how often `check()` has been called and what its
iterations have given, holding both until all have said it. So all leave in the same call, or by an
end behind the same element; and none ends before all have saved, since it may take the others with
it.
"""

from __future__ import annotations

import atexit
import gc
import io
import itertools
import json
import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn

from ..client.same_end import Others, ends

log = logging.getLogger(__name__)

STOP, OVER = "stop", "over"

_numbers = itertools.count()


class _Exit:
    """What this process is to end with, once its last lines have run: TensorFlow may crash while
    it takes a cluster's process down, of which nothing is needed any more."""

    code: int | None = None


# What was registered before this would run after it, and does not; of ours, those are logging's and
# leaving's, whose consumers are closed by then.
@atexit.register
def _end() -> None:
    if _Exit.code is not None:
        logging.shutdown()
        if "multiprocessing.util" in sys.modules:
            sys.modules["multiprocessing.util"]._exit_function()  # ends its children
        for each in gc.get_objects():  # what the program has written is not lost
            if type(each) in (
                io.TextIOWrapper,
                io.BufferedWriter,
            ):  # a proxy may raise for its class
                with suppress(OSError, ValueError):
                    each.flush()
        os._exit(_Exit.code)


def exit_with(code: int) -> NoReturn:
    """As sys.exit does, but that nothing changes the code at last, and what was registered with
    atexit before this module was imported does not run."""
    _Exit.code = code
    sys.exit(code)


class Together:
    """One for each `with` of a PreemptionHandler, which come in one order in all processes."""

    def __init__(self, others: Others, told: Callable[[], None]) -> None:
        """`told` is called, in a thread of its own, when another process has been told to stop."""
        self._others = others
        self._told = told
        self._key = f"forebay/preempted/{next(_numbers)}"
        self._changed = threading.Condition()  # guards what follows
        self._agreeing = False
        self._checks = 0
        self._leave_at: int | None = None  # the call of `check` in which all leave
        threading.Thread(target=self._listen, name="forebay-together", daemon=True).start()

    def _listen(self) -> None:
        if self._others.hear(f"{self._key}/to/{self._others.me}", None) == STOP:
            self._told()

    def agree(self, timeout_s: float) -> None:
        """When, and behind which elements, all stop. Whoever does not answer is not waited for."""
        give_up_s = time.monotonic() + timeout_s
        given = ends.hold()
        with self._changed:
            self._agreeing = True
            checks = self._checks
        try:
            for other in self._each_other():
                self._others.say(f"{self._key}/to/{other}", STOP)
            self._say("given", json.dumps([checks, given]))
            for other in self._each_other():
                answer = self._hear("given", other, give_up_s)
                if answer is None:
                    log.warning("process %d of this training has not heard of the stop", other)
                elif answer != OVER:
                    its_checks, its_given = json.loads(answer)
                    checks = max(checks, its_checks)
                    for name, number in its_given.items():
                        given[name] = max(given.get(name, 0), number)
        finally:
            ends.let_go(given)
            with self._changed:
                self._leave_at = checks + 1
                self._agreeing = False
                self._changed.notify_all()

    def check(self) -> bool:
        """Whether all leave in this call. Waits while they agree on it."""
        with self._changed:
            self._changed.wait_for(lambda: not self._agreeing)
            self._checks += 1
            return self._leave_at is not None and self._checks >= self._leave_at

    def wait_until_all_have_saved(self, timeout_s: float) -> None:
        """Or go on: what they share, steps and what they say here, is over with the first that
        ends."""
        give_up_s = time.monotonic() + timeout_s
        self._say("saved", OVER)
        for other in self._each_other():
            if self._hear("saved", other, give_up_s) is None:
                log.warning("process %d of this training has not saved in time", other)
                return

    def close(self) -> None:
        """The program goes on: others need not wait for it."""
        for what in ("given", "saved"):
            self._say(what, OVER)
        self._others.say(f"{self._key}/to/{self._others.me}", OVER)
        ends.forget_limits()

    def _each_other(self) -> list[int]:
        return [number for number in range(self._others.number) if number != self._others.me]

    def _say(self, what: str, text: str) -> None:
        self._others.say(f"{self._key}/{what}/{self._others.me}", text)

    def _hear(self, what: str, other: int, give_up_s: float) -> str | None:
        left_s = max(0.0, give_up_s - time.monotonic())
        return self._others.hear(f"{self._key}/{what}/{other}", left_s)
