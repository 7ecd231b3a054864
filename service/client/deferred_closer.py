"""Closes iterations that were dropped, in a thread of its own.

A dropped iterator is finalized wherever garbage is collected: in any thread, and within any lock
of ours, which closing needs too. Closing also makes calls that may take seconds. So a finalizer
only puts the iteration into a queue, which Python allows at any moment.
"""

from __future__ import annotations

import atexit
import logging
import os
import queue
import sys
import threading
from typing import Protocol

log = logging.getLogger(__name__)

LEFT_S = 5.0
"""How long a new iteration waits until dropped ones are left: it may be their successor."""


class Closable(Protocol):
    def close(self) -> None: ...


class DeferredCloser:
    """The queue and its thread, which each process has of its own."""

    def __init__(self) -> None:
        self._process = 0
        self._queue: queue.SimpleQueue[Closable | threading.Event] = queue.SimpleQueue()

    def start(self) -> None:
        """For `later`. Idempotent. If two threads start it at a time, both queues are emptied."""
        if self._process != os.getpid():
            iterations: queue.SimpleQueue[Closable | threading.Event] = queue.SimpleQueue()
            threading.Thread(
                target=self._run, args=(iterations,), name="forebay-leaving", daemon=True
            ).start()
            self._queue, self._process = iterations, os.getpid()
            atexit.register(self._wait_at_exit, os.getpid())
            processes = sys.modules.get("multiprocessing.process")
            if processes is not None and processes.parent_process() is not None:
                # Such as a DataLoader's worker: it ends by os._exit, and drops what it read before.
                sys.modules["multiprocessing.util"].Finalize(None, self.wait, exitpriority=0)

    def later(self, iteration: Closable) -> None:
        """Close it soon. For finalizers: takes no lock, and does not wait."""
        self._queue.put(iteration)

    def wait(self) -> None:
        """Wait until all that were dropped are closed, LEFT_S at most."""
        self.start()
        closed = threading.Event()
        self._queue.put(closed)
        closed.wait(LEFT_S)

    def _wait_at_exit(self, process: int) -> None:
        if process == os.getpid():  # not in a fork of it
            self.wait()

    @staticmethod
    def _run(iterations: queue.SimpleQueue[Closable | threading.Event]) -> None:
        while True:
            match iterations.get():
                case threading.Event() as closed:
                    closed.set()
                case iteration:
                    try:
                        iteration.close()
                    except Exception:
                        log.exception("an iteration that was dropped could not be left")
                    del iteration


deferred_closer = DeferredCloser()
