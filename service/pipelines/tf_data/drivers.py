"""Threads that drive pipelines. Each is in one call, which stays in C++.

The driver of a long run works for that run and ends with it. A bundle driver serves one bundle
after another: a request, with the bundle's range and the handles of its queues, comes through a
queue too. So between two bundles TensorFlow makes only iterators. Starting a driver costs 30 to 120
ms of processor time: TensorFlow optimizes the dataset and prepares each function. A task needs a
driver for each open bundle, so idle drivers are kept for the dataset's next task.

A long run is over when its pipeline closes the run's queue, at its end. TensorFlow has dropped the
user's iterators by then, and nothing of the pipeline is left. The call itself may return much
later, because of the thread that tunes parallelism and buffers (TensorFlow 2.21's
`Model::OptimizeLoop`). A cancellation wakes that thread, but the thread may see the cancellation
only in its next round. Each round is twice as long as the one before, up to a minute, and the call
waits for it.

A driver waits a little for a cancelled pipeline and then leaves it. What its step may still use,
the run's queues among it, is freed when the step ends. A pipeline's failure also shows only when
the step ends.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from typing import Any

import numpy as np
import tensorflow as tf

from ...errors import PipelineError
from ..splits import SplitRange
from .feeds import LoadedGraph
from .queues import OwnedQueue
from .split_files import Begun
from .traces import STOP, BundleTrace, RunTrace

UNWIND_S = 1.0  # time for a cancelled pipeline to end at its next element, or by its feed
MAX_IDLE = 64
"""Drivers of a trace that are kept. A read opens 16 to 32 bundles at a time, unless it is told to
open more."""

Tensor = Any


class Driver:
    """A thread that runs one TensorFlow step."""

    def __init__(self, drive: Callable[[OwnedQueue], None], queue: OwnedQueue) -> None:
        """`drive(stop)` is the step; when it ends, `queue` is closed.

        An operation that fails cancels all others of its step. An operation of the step waits for
        something in `stop` while the pipeline runs, so closing `stop` cancels the pipeline.
        TensorFlow's CancellationManager could deadlock: it holds the GIL while it waits for the
        pipeline's locks, and a thread with such a lock may wait for the GIL.
        """
        self.error: PipelineError | None = None  # set before the queue is closed
        self.queue = queue
        self.stop = OwnedQueue(STOP)
        self.ended: Future[None] = Future()
        self._drive = drive
        self._thread = threading.Thread(target=self._run, name="forebay-pipeline", daemon=True)
        self._thread.start()

    def finish(self) -> None:
        """Have the step end once its pipeline has."""

    def when_ended(self, callback: Callable[[], None]) -> None:
        """Call this in the driver's thread once the step has ended; at once if it has."""
        self.ended.add_done_callback(lambda _: callback())

    def join(self, timeout_s: float | None = None) -> None:
        self._thread.join(timeout_s)

    def _run(self) -> None:
        try:
            self._drive(self.stop)
        except tf.errors.OpError as error:
            self.error = pipeline_error(error)
        except Exception as error:  # noqa: BLE001 - such as a message that is not UTF-8
            self.error = PipelineError("UNKNOWN", f"the pipeline failed: {error!r}")
        finally:
            self.ended.set_result(None)
            self.queue.close()
            self.stop.release()


def end(drivers: Sequence[Driver]) -> None:
    """Wait a little until the steps have ended. The caller has closed their queues or feeds."""
    for driver in drivers:
        driver.finish()
    # Close `stop` here, where waiting for a lock of the pipeline blocks nobody else. And late:
    # while TensorFlow cancels, a returning function call waits for that and holds its locks.
    for driver in _not_ended(drivers):
        driver.stop.close()
    left = _not_ended(drivers)
    for driver in drivers:
        if driver not in left:
            driver.join()


def _not_ended(drivers: Sequence[Driver]) -> list[Driver]:
    """In a little while."""
    wait([driver.ended for driver in drivers], UNWIND_S)
    return [driver for driver in drivers if not driver.ended.done()]


class LongRun:
    """Drives one run of a loaded graph.

    `per_element` is how many splits an element is of, if `passed` calls SplitRange.made, or 0.
    `passed` is told of yielded elements once their reader asks for more. `begun` says which splits'
    elements it may be making.
    """

    def __init__(self, trace: RunTrace, loaded: LoadedGraph, release: Callable[[], None]) -> None:
        self.trace = trace
        self._loaded = loaded
        self._variant = loaded.variant
        self._release = release
        self._driver: Driver | None = None
        self.per_element, self.passed, self.begun = loaded.per_element, loaded.passed, loaded.begun

    def begin(self, queues: list[OwnedQueue]) -> Driver:
        """Have a driver fill the queues. At the end of the pipeline it closes the first queue and
        uses none any more. Raises PipelineError."""
        handles = [queue.handle for queue in queues]

        def drive(stop: OwnedQueue) -> None:
            self.trace.drive(self._variant, stop.handle, stop.handle, *handles)

        self._driver = Driver(drive, queues[0])
        return self._driver

    def end(self, driver: Driver, *, complete: bool) -> None:
        """The run is over; `complete` if it was read to its end. If so, nobody uses its queues
        once this returns; otherwise once the driver has ended."""
        if not complete:  # else its pipeline has ended
            self._loaded.cancel()
            end([driver])
        self._variant = None

    def release(self) -> None:
        """Called once, last, even if the run never began."""
        if self._driver is None:
            self._release()
        else:
            self._driver.when_ended(self._release)

    def join(self, timeout_s: float) -> None:
        """Wait until TensorFlow's resources are released, or the timeout."""
        if self._driver is not None:
            self._driver.join(timeout_s)


class BundleDriver(Driver):
    """Drives one requested bundle after another."""

    def __init__(self, trace: BundleTrace, queue: OwnedQueue) -> None:
        self._requests = trace.make_requests()

        def drive(stop: OwnedQueue) -> None:
            trace.drive(stop.handle, stop.handle, self._requests.handle)

        super().__init__(drive, queue)

    def ask(self, numbers: list[int], queues: list[OwnedQueue]) -> None:
        """Request a bundle; only when the driver is idle."""
        self.queue = queues[0]
        handles = [queue.handle for queue in queues]
        self._requests.enqueue([np.array(numbers, np.int64), *handles])
        if self.ended.done():  # before this queue was registered for its end
            self.queue.close()

    def finish(self) -> None:
        self._requests.close()
        self.when_ended(self._requests.release)


class BundleDrivers:
    """A trace with its drivers, one for each concurrent bundle, whoever reads it. Thread-safe."""

    has_drivers = True

    def __init__(self, trace: BundleTrace) -> None:
        self.trace = trace
        self._lock = threading.Lock()
        self._idle: list[BundleDriver] = []
        self._begun: list[BundleDriver] = []  # all drivers whose steps may still run

    def take(self, queues: list[OwnedQueue]) -> BundleDriver:
        with self._lock:
            while self._idle:
                if not (driver := self._idle.pop()).ended.done():
                    return driver
                driver.finish()  # it has failed
        driver = BundleDriver(self.trace, queues[0])
        with self._lock:
            self._begun = [begun for begun in self._begun if not begun.ended.done()] + [driver]
        return driver

    def give_back(self, driver: BundleDriver) -> None:
        """Keep a driver that has finished its bundle, or end it if enough are idle."""
        with self._lock:
            if len(self._idle) < MAX_IDLE:
                self._idle.append(driver)
                return
        end([driver])

    def end_idle(self) -> None:
        """Wait a little until they have ended."""
        with self._lock:
            idle, self._idle = self._idle, []
        end(idle)

    def close(self) -> None:
        """Free TensorFlow's resources; if steps of cancelled bundles go on, when the last one ends.
        Nobody may read a bundle any more."""
        self.end_idle()
        self._close_when_ended()

    def _close_when_ended(self) -> None:
        self._begun = [begun for begun in self._begun if not begun.ended.done()]
        if self._begun:
            self._begun[0].when_ended(self._close_when_ended)
        else:
            self.trace.close()


class DrivenBundle:
    """Drives one bundle, as LongRun does a run."""

    per_element = 0

    def __init__(
        self, drivers: BundleDrivers, numbers: list[int], release: Callable[[], None]
    ) -> None:
        """`numbers` are a request's, as in BundleTrace.make_requests."""
        self._drivers = drivers
        self._numbers = numbers
        self.release = release
        self._driver: BundleDriver | None = None

    def passed(self, elements: int) -> None:
        pass

    def begun(self) -> Begun:
        first, count, *_ = self._numbers
        return {0: [SplitRange(first, count, 0)]}

    def begin(self, queues: list[OwnedQueue]) -> Driver:
        self._driver = self._drivers.take(queues)
        self._driver.ask(self._numbers, queues)
        return self._driver

    def end(self, driver: Driver, *, complete: bool) -> None:
        assert self._driver is driver
        if complete:
            self._drivers.give_back(self._driver)
        else:
            end([driver])


def pipeline_error(error: Any) -> PipelineError:
    """TensorFlow's error, with the canonical name of its code."""
    code = next((name for name, number in _CODES if number == error.error_code), "UNKNOWN")
    return PipelineError(code, _TRACE.sub("", str(error.message)))


# Stack frames of our program in TensorFlow's messages: useless to a reader.
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
