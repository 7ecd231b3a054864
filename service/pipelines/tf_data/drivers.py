"""Threads that drive pipelines: each is in one call that stays in C++.

The driver of a long run works for that run, and ends with it. One of bundles works for one run
after another: a request with the bundle's range and the handles of its queues goes through a queue
as well, so between two bundles nothing is made but iterators.

A long run ends with its pipeline, which closes the run's queue at its end, when TensorFlow has
dropped the user's iterators. The call itself may return much later: the thread that tunes
parallelism and buffers is told to end before it can see that it shall (TensorFlow 2.21's
`Model::OptimizeLoop`: the callback of a cancellation wakes it, the cancellation shows afterwards).
If it sleeps on then it does so to its next round, and the call waits for it: rounds are twice as
long each time, up to a minute apart. Nothing of a pipeline that came to its end is left in that
time. One that was cancelled is waited for a little, and then left: what its step may use, the run's
queues among it, is freed when that ends. That a pipeline has failed is known only then, too.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any

import numpy as np
import tensorflow as tf

from ...errors import PipelineError
from .feeds import LoadedGraph
from .op_libraries import explained
from .queues import OwnedQueue
from .traces import STOP, BundleTrace, RunTrace

UNWIND_S = 1.0  # for a cancelled pipeline to end at its next element, or by its feed

Tensor = Any


class Driver:
    """A thread in a step of TensorFlow's."""

    def __init__(self, drive: Callable[[OwnedQueue], None], queue: OwnedQueue) -> None:
        """`drive(stop)` is the step; when it ends, `queue` is closed.

        An operation that fails cancels all others of its step. The step waits for something in
        `stop` while the pipeline runs, so closing it cancels the pipeline. TensorFlow's
        CancellationManager would hold Python's global lock while it waits for the pipeline's
        locks; and who has one of these may wait for Python.
        """
        self.error: PipelineError | None = None  # set before the queue is closed
        self.queue = queue
        self._drive = drive
        self._stop = OwnedQueue(STOP)
        self._ended: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, name="forebay-pipeline", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Wait a little until it has ended, which its queues, or its feed, have been closed for."""
        # Here, where waiting for a lock of the pipeline's holds up nobody else; and late:
        # a function call that returns while TensorFlow cancels waits for that, with its locks.
        if not wait([self._ended], UNWIND_S).done:
            self._stop.close()
        if wait([self._ended], UNWIND_S).done:
            self._thread.join()

    def when_ended(self, callback: Callable[[], None]) -> None:
        """Call this once the step has ended, from the driver's thread; at once if it has."""
        self._ended.add_done_callback(lambda _: callback())

    @property
    def has_ended(self) -> bool:
        return self._ended.done()

    def join(self, timeout_s: float) -> None:
        self._thread.join(timeout_s)

    def _run(self) -> None:
        try:
            self._drive(self._stop)
        except tf.errors.OpError as error:
            self.error = pipeline_error(error)
        except Exception as error:  # noqa: BLE001 - a message of TensorFlow's that is no UTF-8, say
            self.error = PipelineError("UNKNOWN", f"the pipeline failed: {error!r}")
        finally:
            self._ended.set_result(None)
            self.queue.close()
            self._stop.release()


class LongRun:
    """Drives one run of a loaded graph."""

    def __init__(self, trace: RunTrace, loaded: LoadedGraph, release: Callable[[], None]) -> None:
        self._trace = trace
        self._loaded = loaded
        self._variant = loaded.variant
        self._release = release
        self._driver: Driver | None = None

    def begin(self, queues: list[OwnedQueue]) -> Driver:
        handles = [queue.handle for queue in queues]

        def drive(stop: OwnedQueue) -> None:
            self._trace.drive(self._variant, stop.handle, stop.handle, *handles)

        self._driver = Driver(drive, queues[0])
        return self._driver

    def end(self, driver: Driver, *, complete: bool) -> None:
        if not complete:  # else its pipeline has ended
            self._loaded.cancel()
            driver.end()
        self._variant = None

    def release(self) -> None:
        if self._driver is None:
            self._release()
        else:
            self._driver.when_ended(self._release)

    def join(self, timeout_s: float) -> None:
        """Wait until what it held in TensorFlow is released, or until it takes too long."""
        if self._driver is not None:
            self._driver.join(timeout_s)


class BundleDriver(Driver):
    """Drives the bundles that it is asked for."""

    def __init__(self, trace: BundleTrace, queue: OwnedQueue) -> None:
        self._requests = trace.make_requests()

        def drive(stop: OwnedQueue) -> None:
            trace.drive(stop.handle, stop.handle, self._requests.handle)

        super().__init__(drive, queue)

    def ask(self, numbers: list[int], queues: list[OwnedQueue]) -> None:
        """Only when it has nothing to do."""
        self.queue = queues[0]
        handles = [queue.handle for queue in queues]
        self._requests.enqueue([np.array(numbers, np.int64), *handles])
        if self.has_ended:  # before it knew of this queue
            self.queue.close()

    def end(self) -> None:
        self._requests.close()
        super().end()
        self.when_ended(self._requests.release)


class Drivers:
    """The drivers of a pipeline's bundles: as many as run at the same time. Thread-safe."""

    def __init__(self, trace: BundleTrace) -> None:
        self._trace = trace
        self._lock = threading.Lock()
        self._idle: list[BundleDriver] = []
        self._begun: list[BundleDriver] = []  # all whose steps may not have ended
        self._closed = False

    def take(self, queues: list[OwnedQueue]) -> BundleDriver:
        with self._lock:
            if self._idle:
                return self._idle.pop()
        driver = BundleDriver(self._trace, queues[0])
        with self._lock:
            self._begun = [begun for begun in self._begun if not begun.has_ended] + [driver]
        return driver

    def give_back(self, driver: BundleDriver) -> None:
        """Which has done its bundle."""
        with self._lock:
            if not self._closed:
                self._idle.append(driver)
                return
        driver.end()

    def close(self) -> None:
        """End those that are idle, and the others when they are given back. Idempotent."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for driver in idle:
            driver.end()

    def when_ended(self, callback: Callable[[], None]) -> None:
        """Call this once the steps of all have ended; only when nobody takes any more."""
        if self._begun:
            self._begun.pop().when_ended(lambda: self.when_ended(callback))
        else:
            callback()


class DrivenBundle:
    """Drives one bundle."""

    def __init__(self, drivers: Drivers, numbers: list[int], release: Callable[[], None]) -> None:
        """`numbers` are those of a request: BundleTrace.make_requests."""
        self._drivers = drivers
        self._numbers = numbers
        self.release = release
        self._driver: BundleDriver | None = None

    def begin(self, queues: list[OwnedQueue]) -> Driver:
        self._driver = self._drivers.take(queues)
        self._driver.ask(self._numbers, queues)
        return self._driver

    def end(self, driver: Driver, *, complete: bool) -> None:
        assert self._driver is driver
        if complete:
            self._drivers.give_back(self._driver)
        else:
            driver.end()


def pipeline_error(error: Any) -> PipelineError:
    """TensorFlow's error with its code's canonical name."""
    code = next((name for name, number in _CODES if number == error.error_code), "UNKNOWN")
    return PipelineError(code, explained(_TRACE.sub("", str(error.message))))


# Where in *our* program TensorFlow's nodes come from, which tells nobody anything.
_TRACE = re.compile(
    r"^Graph execution error:\n\nDetected at node .*\n"
    r"(<stack traces unavailable>\n|(  File .*\n\n?)+)+"
    r"|\n\t \[\[.*"
    r"|\{\{function_node [^}]*\}\} ?"
)

_CODES = [
    (name, value)
    for name, value in vars(tf.errors).items()
    if name.isupper() and isinstance(value, int)
]
