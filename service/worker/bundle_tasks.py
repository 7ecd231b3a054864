"""BundleTask: runs the bundles of a task, as its consumers ask for them.

Reads in order and reads at least once have such tasks.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

from ...journal.splits import source_size
from ..connections.dispatcher_client import DispatcherClient
from ..delivery import BundleRun, BundlesOutput, OutputCancelled, TaskFailed
from ..errors import ForebayError, PipelineError, status_of
from ..pipelines import Pipeline, Run, SplitRange
from ..proto import forebay_pb2 as pb
from ..stopwatch import Stopwatch
from .bundle_reports import BundleReports
from .observer import Observer, Undelivered
from .task_pipeline import Datasets, Pipelines, TaskPipeline
from .task_states import Ended, HandedOut, Instruction
from .tasks import end_after

log = logging.getLogger(__name__)

LOOK_S = 1.0
"""How long the task's thread waits at a time for a bundle to run."""

MAX_RUNS = 1 << 17
"""Bounds a task's threads. Each run of a bundle that is being read has one: most of them wait for
their readers, and an order may interleave tens of thousands of bundles (`cycle_length`)."""


class BundleTask:
    """A task of a read in bundles, in the place of a TaskRunner.

    It runs as many bundles at a time as there are processors; more have begun and wait for their
    readers. It neither completes nor loses anything: any worker makes its elements again. It is
    never parked, as it ends with its consumers.
    """

    is_parked = may_be_parked = False

    def __init__(
        self,
        task: pb.Task,
        dispatcher: DispatcherClient,
        output: BundlesOutput,
        starting: threading.Semaphore,
        pipelines: Pipelines,
        observer: Observer,
        report: Callable[[BundleTask, HandedOut | Ended], list[Instruction]],
        datasets: Datasets | None = None,
        *,
        reports: BundleReports,
    ) -> None:
        """The arguments are as of TaskRunner; `reports` collects what is told of its bundles."""
        self.task = task
        self.output = output
        self.pipeline = TaskPipeline(task, dispatcher, pipelines, observer, datasets)
        output.on_trace = self.pipeline.spans.begin
        self._starting = starting
        self._observer = observer
        self._report = report
        self._reports = reports
        self._splits = 0
        self._live: dict[Run, list[int]] = {}  # of bundles; elements and bytes, of its thread
        self._put = [0, 0]  # by runs that have ended
        self._lock = threading.Lock()  # guards these
        self._at_once = max(2, len(os.sched_getaffinity(0)))
        self._open = Stopwatch()  # while bundles can be run
        self._thread = threading.Thread(
            target=self._run, name=f"forebay-task-{task.task_id}", daemon=True
        )

    def start(self) -> None:
        self._thread.start()

    def cancel(self) -> None:
        """Stop running, also within an element. Never waits. Idempotent."""
        self.output.cancel()
        self.pipeline.cancel()
        self._cancel_live()

    def _cancel_live(self) -> None:
        with self._lock:
            live = list(self._live)
        for made in live:
            made.cancel()

    def join(self, timeout_s: float) -> bool:
        """Wait for the thread; whether it has ended. A thread that never started has."""
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def drain(self, give_up_s: float) -> None:
        """Consumers go on at other workers, and read here until then."""

    def counts(self) -> dict[str, float]:
        """What it has done so far: elements and bytes, and the seconds that its pipeline was open,
        of which each counts by the share of the runs that worked."""
        elements, size = map(sum, zip(self._put, *self._live.copy().values(), strict=True))
        working_s = self.output.busy_s
        idle_s = max(0.0, self._open.seconds - working_s)
        times = {"working": working_s, "backpressured": idle_s}
        return {"elements": elements, "bytes": size, **times}

    def undelivered(self, lacking: int = 0) -> Undelivered | None:
        """None: nothing is lost."""
        return None

    # -- parking, of which there is none -------------------------------------------------------

    def is_being_parked(self) -> bool:
        return False

    def park(self, opens: int, most_bytes: int) -> None:
        pass

    def resume(self) -> None:
        pass

    def cut(self) -> None:
        pass

    def shed(self) -> int:
        return 0

    def is_pass_over(self) -> bool | None:
        return False

    # -- its threads ---------------------------------------------------------------------------

    def _run(self) -> None:
        runs = ThreadPoolExecutor(MAX_RUNS, thread_name_prefix=f"{self._thread.name}-run")
        try:
            with self._starting:
                pipeline = self.pipeline.open_bundles()
            definition = self.pipeline.definition
            self._splits = min(map(source_size, definition.sources), default=0)
            self.output.compression = definition.compression
            with self._open:
                while True:
                    if (run := self.output.next_run(self._at_once, LOOK_S)) is not None:
                        runs.submit(self._produce, pipeline, run)
        except ForebayError as error:
            self._end(error)
        except BaseException as bug:  # consumers must not wait for ever
            self.output.fail("INTERNAL", f"the worker failed: {bug!r}")
            self._report(self, Ended(self.task.task_id))
            raise
        finally:
            self._cancel_live()  # the output has ended
            runs.shutdown(cancel_futures=True)
            self.pipeline.spans.end()
            self.pipeline.close()

    def _end(self, error: ForebayError) -> None:
        end = end_after(error, None)
        if isinstance(end, TaskFailed):
            self.output.fail(end.code, end.message)
            self._observer.failed(self.task, error)
        else:
            self.output.cancel()
        self._report(self, Ended(self.task.task_id))

    def _produce(self, pipeline: Pipeline, run: BundleRun) -> None:
        """Make a run's elements."""
        try:
            with self._begin(pipeline, run) as made:
                blocks = made.blocks()
                try:
                    for block in blocks:
                        run.put(block)
                        self.pipeline.spans.end(block.count)
                        put = self._live[made]
                        put[0] += block.count
                        put[1] += block.values_bytes
                    checksum = run.finish()
                    if checksum is not None:
                        self._reports.add(self.task.job_id, run.number, checksum, run.stop)
                except OutputCancelled:
                    made.cancel()
                    for _ in blocks:  # frees its resources
                        pass
                except BaseException:
                    made.cancel()
                    raise
        except OutputCancelled:
            pass
        except PipelineError as error:
            self._fail(run, error.code, error.message)
        except ForebayError as error:
            self._fail(run, status_of(error), str(error))
        except Exception as bug:
            self._fail(run, "INTERNAL", f"the worker failed: {bug!r}")
            log.exception("bundle %d of task %d failed", run.number, self.task.task_id)

    @contextlib.contextmanager
    def _begin(self, pipeline: Pipeline, run: BundleRun) -> Iterator[Run]:
        """The pipeline's run of the bundle, which `cancel` cancels."""
        order = self.task.order
        first = run.number % order.bundles * order.bundle_splits
        count = min(order.bundle_splits, self._splits - first)
        splits = SplitRange(first, count, pass_number=run.number // order.bundles)  # the epoch
        made = pipeline.bundle(splits, number=run.number, seed=order.seed, start=run.start)
        with self._lock:
            self._live[made] = [0, 0]
        try:
            if self.output.ended:  # before `cancel` could see it
                made.cancel()
            yield made
        finally:
            with self._lock:
                put = self._live.pop(made)
                self._put = [self._put[0] + put[0], self._put[1] + put[1]]

    @staticmethod
    def _fail(run: BundleRun, code: str, message: str) -> None:
        try:
            run.fail(code, message)
        except OutputCancelled:
            pass
