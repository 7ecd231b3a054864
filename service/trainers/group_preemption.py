"""Preemption of processes that train in lockstep: if one is told to stop, all stop together.

The process that is told tells the others. Each publishes how often `check()` was called and how
many elements its iterations gave, and pauses both until all have published. So all leave in the
same call, or their iterations end after the same element. No process exits before all have saved,
because its exit may end the others.
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

from ..client.lockstep import Peers, element_limits

log = logging.getLogger(__name__)

STOP, OVER = "stop", "over"

_numbers = itertools.count()


# The code to exit with through `os._exit`, if set. TensorFlow may crash in the normal teardown of a
# process in a cluster, which is no longer needed then.
_exit_code: int | None = None


# It acts only in a process that `exit_with` ends, which is a preempted one of a cluster. There
# it looks once through all objects: nobody else knows which files the program has left open.
# `os._exit` skips the atexit handlers that were registered earlier. Of these, `_end` replaces
# logging's, and open_iterations' has nothing left to do: its consumers are closed by then.
@atexit.register
def _end() -> None:
    if _exit_code is not None:
        logging.shutdown()
        if "multiprocessing.util" in sys.modules:
            sys.modules["multiprocessing.util"]._exit_function()  # ends its children
        for each in gc.get_objects():  # flush, so that the program's output is not lost
            # By its type: a proxy may raise for its class.
            if type(each) in (io.TextIOWrapper, io.BufferedWriter):
                with suppress(OSError, ValueError):
                    each.flush()
        os._exit(_exit_code)


def exit_with(code: int) -> NoReturn:
    """As sys.exit, but the exit code is final. Skips atexit handlers that were registered before
    this module was imported."""
    global _exit_code
    _exit_code = code
    sys.exit(code)


class StopAgreement:
    """Agreement between processes, for one `with` of a PreemptionHandler. All processes must enter
    these in the same order."""

    def __init__(self, others: Peers, told: Callable[[], None]) -> None:
        """A thread calls `told` when another process was told to stop."""
        self._others = others
        self._told = told
        self.key = f"forebay/preempted/{next(_numbers)}"
        element_limits.begin_agreement(self.key)
        self._changed = threading.Condition()  # guards what follows
        self._agreeing = False
        self._checks = 0
        self._leave_at: int | None = None  # the call of `check` in which all leave
        threading.Thread(target=self._listen, name="forebay-stop-agreement", daemon=True).start()

    def _listen(self) -> None:
        if self._others.receive(f"{self.key}/to/{self._others.me}", None) == STOP:
            self._told()

    def agree(self, timeout_s: float) -> None:
        """Agree with all processes on the call and the elements after which all stop. Does not wait
        longer than `timeout_s` for a process that does not answer."""
        give_up_s = time.monotonic() + timeout_s
        given = element_limits.pause()
        with self._changed:
            self._agreeing = True
            checks = self._checks
        try:
            for other in self._other_numbers():
                self._others.publish(f"{self.key}/to/{other}", STOP)
            self._publish("given", json.dumps([checks, given]))
            for other in self._other_numbers():
                answer = self._receive("given", other, give_up_s)
                if answer is None:
                    log.warning("process %d of this training has not heard of the stop", other)
                elif answer != OVER:
                    its_checks, its_given = json.loads(answer)
                    checks = max(checks, its_checks)
                    for name, number in its_given.items():
                        given[name] = max(given.get(name, 0), number)
        finally:
            element_limits.resume(given)
            with self._changed:
                self._leave_at = checks + 1
                self._agreeing = False
                self._changed.notify_all()

    def check(self) -> bool:
        """Whether all processes leave in this call. Waits while they agree on it."""
        with self._changed:
            self._changed.wait_for(lambda: not self._agreeing)
            self._checks += 1
            return self._leave_at is not None and self._checks >= self._leave_at

    def end_reading(self) -> None:
        """Iterations that begin later are empty."""
        element_limits.end_agreement(self.key)

    def wait_until_all_have_saved(self, timeout_s: float) -> None:
        """Waits until all have saved, or the timeout. The first process that exits ends the others'
        steps and this exchange."""
        give_up_s = time.monotonic() + timeout_s
        self._publish("saved", OVER)
        for other in self._other_numbers():
            if self._receive("saved", other, give_up_s) is None:
                log.warning("process %d of this training has not saved in time", other)
                return

    def close(self) -> None:
        """Tells the others not to wait for this process, because its program continues."""
        for what in ("given", "saved"):
            self._publish(what, OVER)
        self._others.publish(f"{self.key}/to/{self._others.me}", OVER)
        self.end_reading()
        element_limits.forget_limits()

    def _other_numbers(self) -> list[int]:
        return [number for number in range(self._others.number) if number != self._others.me]

    def _publish(self, what: str, text: str) -> None:
        self._others.publish(f"{self.key}/{what}/{self._others.me}", text)

    def _receive(self, what: str, other: int, give_up_s: float) -> str | None:
        left_s = max(0.0, give_up_s - time.monotonic())
        return self._others.receive(f"{self.key}/{what}/{other}", left_s)
