"""BundleTask: runs the bundles of a task, as its consumers ask for them.

Reads in order and reads at least once have such tasks.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import threading
from collections.abc import Iterable, Iterator

from ...storage.thread_pool import ThreadPool
from ..delivery import BundleRun, BundlesOutput, OutputCancelled
from ..delivery.bundles import MAX_RUNS
from ..errors import ForebayError, PipelineError, status_of
from ..pipelines import Run, SplitRange
from ..proto import forebay_pb2 as pb
from ..stopwatch import Stopwatch
from .task_pipeline import BundleSource
from .tasks import TaskDependencies, WorkerTask

log = logging.getLogger(__name__)

LOOK_S = 1.0
"""How long the task's thread waits at a time for a bundle to run."""


MOST_REPORTED = 10_000
"""Of one job, in one heartbeat."""


class BundleReports:
    """The checksums and lengths of bundles that a worker has run, until it has told the dispatcher.
    Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._found: dict[int, list[tuple[int, int, int]]] = {}  # by job: see `add`

    def add(self, job_id: int, bundle: int, checksum: int, length: int) -> None:
        with self._lock:
            self._found.setdefault(job_id, []).append((bundle, checksum, length))

    def take(self) -> list[pb.BundleChecksums]:
        """What to report now: at most MOST_REPORTED of each job."""
        with self._lock:
            taken = {job_id: found[:MOST_REPORTED] for job_id, found in self._found.items()}
            rest = {job_id: found[MOST_REPORTED:] for job_id, found in self._found.items()}
            self._found = {job_id: found for job_id, found in rest.items() if found}
        return [
            pb.BundleChecksums(
                job_id=job_id,
                bundles=[bundle for bundle, _, _ in found],
                checksums=[checksum for _, checksum, _ in found],
                lengths=[length for _, _, length in found],
            )
            for job_id, found in taken.items()
        ]

    def put_back(self, taken: Iterable[pb.BundleChecksums]) -> None:
        """The report did not arrive."""
        with self._lock:
            for report in taken:
                of_each = zip(report.bundles, report.checksums, report.lengths, strict=True)
                self._found[report.job_id] = [*of_each, *self._found.get(report.job_id, [])]

    def forget(self) -> None:
        """Another journal: its jobs have the ids of others."""
        with self._lock:
            self._found.clear()


class BundleTask(WorkerTask):
    """A task of a read in bundles.

    It runs as many bundles at a time as there are processors, or processes of a Python function,
    and one more that nobody needs yet. Others wait for their readers. It neither completes nor
    loses anything: any worker makes its elements again. When its worker drains, consumers go on at
    other workers. It is never parked, as it ends with its consumers.
    """

    output: BundlesOutput

    def __init__(
        self, task: pb.Task, output: BundlesOutput, needs: TaskDependencies, reports: BundleReports
    ) -> None:
        """`reports` collects what is told of its bundles."""
        super().__init__(task, output, needs)
        output.on_trace = self.pipeline.spans.begin
        self._reports = reports
        # Once: in a run's thread, `task.order` was another object than a message (protobuf 6.33).
        self._bundles, self._seed = task.order.bundles, task.order.seed
        self._sources: list[BundleSource] = []
        self._live: dict[Run, None] = {}  # of bundles
        self._put = self._put_bytes = 0  # elements; their bytes
        self._lock = threading.Lock()  # guards these
        self._open = Stopwatch()  # while bundles can be run

    def cancel(self) -> None:
        super().cancel()
        self._cancel_live()

    def _cancel_live(self) -> None:
        with self._lock:
            live = list(self._live)
        for made in live:
            made.cancel()

    def counts(self) -> dict[str, float]:
        # Of the seconds that its pipeline was open, each counts by the share of runs that worked.
        working_s = self.output.busy_s
        idle_s = max(0.0, self._open.seconds - working_s)
        times = {"working": working_s, "backpressured": idle_s}
        return {"elements": self._put, "bytes": self._put_bytes, **times}

    # -- its threads ---------------------------------------------------------------------------

    def _run(self) -> None:
        self._runs = ThreadPool(2 * MAX_RUNS, f"{self._thread.name}-run")
        try:
            super()._run()
        finally:
            self._cancel_live()  # the output has ended
            self._runs.shutdown(cancel_futures=True)
            self.pipeline.spans.end()
            self.pipeline.close()

    def _work(self) -> None:
        with self._needs.starting:
            self._sources, at_once = self.pipeline.open_bundles()
        self.output.compression = self.pipeline.definition.compression
        with self._open:
            while True:
                if (run := self.output.next_run(at_once, LOOK_S)) is None:
                    continue
                try:
                    self._runs.submit(self._produce, run)
                except RuntimeError as error:
                    self._fail(
                        run,
                        "RESOURCE_EXHAUSTED",
                        f"the worker has no thread for bundle {run.number} beside those of the "
                        f"other bundles that are open ({error}): read with a smaller cycle_length "
                        "or from more workers, or raise the host's or container's limit of threads",
                    )

    def _produce(self, run: BundleRun) -> None:
        try:
            with self._begin(run) as made:
                blocks = made.blocks()
                try:
                    for block in blocks:
                        if block.bundle != run.number:  # of a mixture's source
                            block = dataclasses.replace(block, bundle=run.number)
                        run.put(block)
                        self.pipeline.spans.end(block.count)
                        with self._lock:
                            self._put += block.count
                            self._put_bytes += block.values_bytes
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
    def _begin(self, run: BundleRun) -> Iterator[Run]:
        """The pipeline's run of the bundle, which `cancel` cancels."""
        epoch, bundle = divmod(run.number, self._bundles)
        source = next(each for each in reversed(self._sources) if each.first <= bundle)
        own = bundle - source.first
        first = own * source.bundle_splits
        count = min(source.bundle_splits, source.splits - first)
        splits = SplitRange(first, count, pass_number=epoch)
        number = epoch * source.bundles + own  # as if the source were read by itself
        made = source.pipeline.bundle(splits, number=number, seed=self._seed, start=run.start)
        with self._lock:
            self._live[made] = None
        try:
            if self.output.ended:  # before `cancel` could see it
                made.cancel()
            yield made
        finally:
            with self._lock:
                del self._live[made]

    def _fail(self, run: BundleRun, code: str, message: str) -> None:
        try:
            run.fail(code, message)
            self._errors.add(self.task, code, message, for_good=False)
        except OutputCancelled:
            pass
