"""Running tasks: from a dataset's graph and leased splits to blocks for the consumers."""

from __future__ import annotations

import itertools
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence

from ...journal.datasets import stored
from ...journal.proto import events_pb2 as ev
from .. import malloc, pipelines
from ..connections.dispatcher_client import DispatcherClient
from ..delivery import OutputCancelled, Part, TaskFailed, TaskOutput, TaskUnknown
from ..errors import ForebayError, NotFound, PipelineError, Unavailable, status_of
from ..metrics import Totals
from ..pipelines import MaySkip, Pipeline, PythonRules, Run, Shard, SkipReport
from ..proto import forebay_pb2 as pb
from ..proto.metrics_pb2 import TaskMetrics
from .leases import LeaseFeed
from .observer import Observer, Undelivered
from .task_states import Complete, Ended, HandedOut, Instruction

_runs = itertools.count(1)

KEPT_BYTES = 32 << 20
"""Of datasets that were fetched, with their graphs."""

UNWOUND_S = 1.0
"""If trainers have not taken all by then, a pipeline that has ended is closed before they have: not
at once, as it may wait for TensorFlow, and they for the task's end."""


class Pipelines:
    """Where a worker has its tasks' pipelines from: here, from what was registered."""

    _warm = False
    _nurseries = PythonRules().nurseries  # some of its own, once it has loaded
    python = PythonRules()

    def __init__(self, *, warm: bool = False) -> None:
        """`warm`: run one when they are loaded, for a process that does nothing else."""
        self._warm = warm

    def load(self, op_libraries: Sequence[str]) -> None:
        """Import what pipelines need, so that the first task does not wait for it.

        Raises InvalidArgument.
        """
        pipelines.load(op_libraries)
        if self._warm:
            pipelines.warm_up()
        self._nurseries = pipelines.nurseries()

    def open(
        self,
        task: pb.Task,
        definition: ev.DatasetDefinition,
        graph: bytes,
        may_skip: MaySkip,
        totals: Totals,
    ) -> Pipeline:
        """A task's dataset, or its shard of it; what its code counts is added to `totals`. Raises
        as `pipelines.open_pipeline`."""
        is_shard = task.num_shards > 0
        shard = Shard(task.sharding, task.shard, task.num_shards) if is_shard else None
        python = self.python._replace(may_skip=may_skip, totals=totals, nurseries=self._nurseries)
        return pipelines.open_pipeline(definition, graph, shard, python)

    def close(self) -> None:
        """No further task comes; nothing is left of those that Python datasets had. Idempotent."""
        if self._nurseries is not None:
            pipelines.forget_idle()
            self._nurseries.close()


class Datasets:
    """What the dispatcher has told of datasets, for the next tasks of the same. Thread-safe.

    A graph's name is used once in a journal, and says with the dataset's id which definition it is.
    """

    def __init__(self, dispatcher: DispatcherClient, most_bytes: int = KEPT_BYTES) -> None:
        self._dispatcher = dispatcher
        self._most_bytes = self._left_bytes = most_bytes
        self._lock = threading.Lock()
        self._kept: OrderedDict[tuple[str, str, str], pb.GetDatasetResponse] = OrderedDict()

    def of(self, task: pb.Task) -> pb.GetDatasetResponse:
        """A task's dataset, with its graph. Raises as DispatcherClient.get_dataset."""
        if not task.graph:
            return self._dispatcher.get_dataset(task.dataset_id, with_graph=True)
        name = (self._dispatcher.known.journal_id, task.dataset_id, task.graph)
        with self._lock:
            if name in self._kept:
                self._kept.move_to_end(name)
                return self._kept[name]
        dataset = self._dispatcher.get_dataset(task.dataset_id, with_graph=True)
        replaced = stored(dataset.definition).blob != task.graph  # meanwhile
        if not replaced and dataset.ByteSize() <= self._most_bytes:
            with self._lock:
                if name not in self._kept:
                    self._kept[name] = dataset
                    self._left_bytes -= dataset.ByteSize()
                while self._left_bytes < 0:
                    self._left_bytes += self._kept.popitem(last=False)[1].ByteSize()
        return dataset


class Arrivals:
    """How many of a task's elements have come to a consumer, or will come to none: a Listener."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._settled = 0

    def acknowledged(self, part: Part) -> None:
        with self._changed:
            self._settled += part.count
            self._changed.notify_all()

    dropped = acknowledged

    def wait(self, elements: int, timeout_s: float) -> bool:
        """Wait until it is so of that many; whether it is."""
        with self._changed:
            return self._changed.wait_for(lambda: self._settled >= elements, timeout_s)


class TaskRunner:
    """One task, run by a thread of its own from start to completion.

    What becomes of the task is decided in task_states.py: this tells how its thread fares, and
    does what it is told.
    """

    def __init__(
        self,
        task: pb.Task,
        dispatcher: DispatcherClient,
        output: TaskOutput,
        starting: threading.Semaphore,
        pipelines: Pipelines,
        observer: Observer,
        tell: Callable[[TaskRunner, HandedOut | Ended], list[Instruction]],
        arrivals: Arrivals | None = None,
        datasets: Datasets | None = None,
    ) -> None:
        """`starting` bounds how many tasks load their graphs at a time. `tell` is called by the
        task's thread, and answers with what that has yet to do. With `arrivals`, which the output
        reports to, the task is over only when its elements have arrived.
        """
        self.task = task
        self._arrivals = arrivals
        self._put = 0  # elements
        self._skips = 0  # requests to skip a split
        self._number = next(_runs)
        self._totals = Totals()
        self.output = output
        self.definition = ev.DatasetDefinition()  # once there is output
        self._dispatcher = dispatcher
        self._datasets = datasets or Datasets(dispatcher)
        self._starting = starting
        self._pipelines = pipelines
        self._observer = observer
        self._tell = tell
        self._cancelled = threading.Event()
        self._drain_by_s: float | None = None  # once it shall
        self._pipeline: Pipeline | None = None
        self._pipeline_run: Run | None = None
        self._feed: LeaseFeed | None = None
        self._thread = threading.Thread(
            target=self._run, name=f"forebay-task-{task.task_id}", daemon=True
        )

    def start(self) -> None:
        self._thread.start()

    def metrics(self) -> TaskMetrics | None:
        """What the dataset's code has counted; None if it has counted nothing."""
        totals = self._totals.told()
        if not totals.splits:
            return None
        iteration_id, task_id = self.task.iteration_id, self.task.task_id
        return TaskMetrics(
            iteration_id=iteration_id, task_id=task_id, run=self._number, totals=totals
        )

    def cancel(self) -> None:
        """Stop running and forget what was not sent. Idempotent."""
        self._cancelled.set()
        self.output.cancel()
        if self._feed is not None:
            self._feed.close(wait=False)  # the task's own thread does: others are to be cancelled
        if (run := self._pipeline_run) is not None:
            run.cancel()

    def drain(self, give_up_s: float) -> None:
        """Begin no further split, hand back those leased ahead, and deliver what was begun.

        The task does not complete: other workers go on with the iteration. What cannot be handed
        back by `give_up_s`, of the monotonic clock, is lost.
        """
        self._drain_by_s = give_up_s
        self.output.forgo_handing_back()
        if self._feed is not None:
            self._feed.drain(give_up_s)
        elif (run := self._pipeline_run) is not None:
            run.cancel()

    def undelivered(self, lacking: int = 0) -> Undelivered | None:
        """What is lost if it is cancelled now; None if nothing is.

        `lacking` elements were handed to consumers that have not said that they have them.
        """
        elements = lacking + self.output.waiting_elements
        unfinished = self._pipeline_run is not None and not self.output.ended
        begun = self._feed.begun_last() if self._feed is not None else []
        if not elements and not (unfinished and begun):
            return None
        return Undelivered(elements, unfinished, tuple(begun))

    def join(self, timeout_s: float) -> bool:
        """Wait for the thread to end; whether it has. One that could not be started has."""
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        task_id = self.task.task_id
        try:
            self._produce()
            data_over = self._is_data_over()
            if not self.output.wait_drained(UNWOUND_S):
                self._close_pipeline()
            while not self.output.wait_drained(timeout_s=60):
                pass  # for consumers, or for cancel()
            if self._arrivals is not None:
                while not (self._arrivals.wait(self._put, 1) or self._cancelled.is_set()):
                    pass  # for what is on its way, or for consumers that will not come again
            # Whose task the dispatcher lists no more, its end is not the data's.
            given_up = self._feed is not None and self._feed.given_up
            over = Ended(task_id) if given_up else HandedOut(task_id, data_over)
            if Complete(task_id) in self._tell(self, over):
                self._dispatcher.call(
                    pb.CompleteTaskRequest(task_id=task_id, metrics=self.metrics()),
                    pb.CompleteTaskResponse,
                    closed=self._cancelled,
                )
        except ForebayError as error:
            self._end(error)
        except BaseException as bug:  # whoever reads the task must not wait for ever
            self.output.fail("INTERNAL", f"the worker failed: {bug!r}")
            self._tell(self, Ended(task_id))
            raise
        finally:
            if self._feed is not None:
                self._feed.close()
            self._close_pipeline()

    def _close_pipeline(self) -> None:
        """We may be kept for our output, and it holds the graph, and processes. Idempotent."""
        if self._pipeline is not None:
            self._pipeline.close()
        self._pipeline = self._pipeline_run = None
        malloc.give_back()

    def _end(self, error: ForebayError) -> None:
        feed_failed = self._feed.failed if self._feed is not None else None
        end = end_after(error, feed_failed)
        if isinstance(end, TaskFailed):
            self.output.fail(end.code, end.message)
        else:
            self.output.cancel()
        if not self._cancelled.is_set():
            if isinstance(end, TaskFailed):
                self._observer.failed(self.task, error)
            else:
                self._observer.ended_early(self.task, feed_failed or error)
        self._tell(self, Ended(self.task.task_id))

    def _open(self) -> Run:
        task = self.task
        dataset = self._datasets.of(task)
        if task.num_sources:
            sources = dataset.definition.sources
            rules = self._pipelines.python
            processes = pipelines.processes_of(dataset.definition, dataset.graph, rules)
            self._feed = LeaseFeed(
                self._dispatcher, task.task_id, sources, self._observer,
                processes, self.output.when_opened,
            )  # fmt: skip
        self.definition = dataset.definition
        self.output.compression = dataset.definition.compression
        self._pipeline = self._pipelines.open(
            task, dataset.definition, dataset.graph, self._may_skip, self._totals
        )
        return self._pipeline.run(self._feed)

    def _may_skip(self, report: SkipReport) -> bool:
        self._skips += 1
        request = pb.SkipSplitRequest(
            request=ev.Request(number=self._skips),
            task_id=self.task.task_id,
            split=report.split,
            element=report.element,
            reason=report.reason,
            limit=report.limit,
        )
        try:
            answer = self._dispatcher.call(request, pb.SkipSplitResponse, closed=self._cancelled)
        except NotFound:  # it has given the task up: what was made may still be read
            if self._feed is not None:
                self._feed.given_up = True
            return True
        return answer.skipped

    def _produce(self) -> None:
        with self._starting:
            if self._cancelled.is_set():
                return
            run = self._pipeline_run = self._open()
        # Once more, if it came too early to find what it is about.
        if self._cancelled.is_set():
            self.cancel()
        elif self._drain_by_s is not None:
            self.drain(self._drain_by_s)
        for block in run.blocks():
            try:
                self.output.put(block)
                self._put += block.count
            except BaseException:
                if self._feed is not None:
                    self._feed.close()  # the run is closed now, which waits for who asks for splits
                raise
        if self.task.num_consumers and self._is_data_over():
            raise PipelineError(
                "FAILED_PRECONDITION",
                "Encountered end of sequence on a round-robin read iterator. Please ensure that "
                "the dataset used for round-robin reading has infinite cardinality, e.g. by adding "
                "a .repeat() transformation at the end.",
            )
        if self.task.cross_trainer_cache and self._is_data_over():
            raise PipelineError(
                "INVALID_ARGUMENT",
                "Cross-trainer caching requires the input dataset to be infinite. However, it "
                "reached the end of sequence.",
            )
        self.output.finish()

    def _is_data_over(self) -> bool:
        """Whether it was the data that ended, and not this task."""
        stopped = self._cancelled.is_set() or self._drain_by_s is not None
        return not stopped and not (self._feed is not None and self._feed.given_up)


def end_after(error: ForebayError, feed_failed: ForebayError | None) -> TaskFailed | TaskUnknown:
    """What consumers are told of a task that ended with `error`; `feed_failed` is why its splits
    did, if they did.
    """
    match error:
        case PipelineError() if feed_failed is None:  # else it has only passed that on
            return TaskFailed(error.code, error.message)
        case PipelineError() | NotFound() | Unavailable() | OutputCancelled():
            # The dispatcher gave the task up (its heartbeat will say so), or we are stopping.
            return TaskUnknown()
        case _:
            return TaskFailed(status_of(error), str(error))
