"""Running tasks: from a dataset's graph and leased splits to blocks for the consumers."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial

from ...journal.datasets import stored
from ...journal.proto import events_pb2 as ev
from .. import malloc, pipelines
from ..connections.dispatcher_client import DispatcherClient
from ..delivery import BeginsAnew, OutputCancelled, Part, TaskFailed, TaskOutput, TaskUnknown
from ..errors import ForebayError, NotFound, PipelineError, Unavailable, status_of
from ..metrics import Totals
from ..pipelines import MaySkip, Pipeline, PythonRules, Run, Shard, SkipReport
from ..proto import forebay_pb2 as pb
from ..proto.metrics_pb2 import TaskMetrics
from .leases import HAND_BACK_S, LeaseFeed
from .observer import Observer, Undelivered
from .task_states import Complete, Ended, HandedOut, Instruction

log = logging.getLogger(__name__)

_runs = itertools.count(1)

KEPT_BYTES = 32 << 20
"""Size limit of the cache of fetched datasets and their graphs."""

UNWOUND_S = 1.0
"""An ended pipeline stays open this long while trainers read its last elements. Closing may block
in TensorFlow, and would delay the end of the task if trainers are fast."""


class Pipelines:
    """Opens the pipelines of a worker's tasks from the registered datasets."""

    _warm = False
    _fork_servers = PythonRules().fork_servers  # replaced by `load`
    python = PythonRules()

    def __init__(self, *, warm: bool = False) -> None:
        """`warm`: `load` also runs one pipeline; for a process that only runs a worker."""
        self._warm = warm

    def load(self, op_libraries: Sequence[str]) -> None:
        """Import the pipelines' libraries, so that the first task doesn't wait for it.

        Raises InvalidArgument.
        """
        pipelines.load(op_libraries)
        if self._warm:
            pipelines.warm_up()
        self._fork_servers = pipelines.fork_servers()

    def open(
        self,
        task: pb.Task,
        definition: ev.DatasetDefinition,
        graph: bytes,
        may_skip: MaySkip,
        totals: Totals,
    ) -> Pipeline:
        """Open the task's dataset or its shard. The dataset's own metrics are added to `totals`.
        Raises like `pipelines.open_pipeline`."""
        is_shard = task.num_shards > 0
        shard = Shard(task.sharding, task.shard, task.num_shards) if is_shard else None
        python = self.python._replace(
            may_skip=may_skip, totals=totals, fork_servers=self._fork_servers
        )
        return pipelines.open_pipeline(definition, graph, shard, python)

    def close(self) -> None:
        """End the processes of Python datasets; open no pipeline afterwards. Idempotent."""
        if self._fork_servers is not None:
            pipelines.forget_idle()
            self._fork_servers.close()


class Datasets:
    """An LRU cache of the dispatcher's dataset definitions and graphs. Thread-safe.

    A journal never reuses a graph's name, so name and dataset id identify the definition.
    """

    def __init__(self, dispatcher: DispatcherClient, most_bytes: int = KEPT_BYTES) -> None:
        self._dispatcher = dispatcher
        self._most_bytes = self._left_bytes = most_bytes
        self._lock = threading.Lock()
        self._kept: OrderedDict[tuple[str, str, str], pb.GetDatasetResponse] = OrderedDict()

    def of(self, task: pb.Task) -> pb.GetDatasetResponse:
        """The task's dataset with its graph. Raises like DispatcherClient.get_dataset."""
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
    """A Listener that counts a task's acknowledged and dropped elements."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._settled = 0

    def acknowledged(self, part: Part) -> None:
        with self._changed:
            self._settled += part.count
            self._changed.notify_all()

    dropped = acknowledged

    def wait(self, elements: int, timeout_s: float) -> bool:
        """Wait until the count reaches `elements`; False on timeout."""
        with self._changed:
            return self._changed.wait_for(lambda: self._settled >= elements, timeout_s)


class TaskRunner:
    """Runs one task in its own thread from start to completion.

    task_states.py decides the task's state. The runner reports events and obeys instructions.

    A task without consumers can be *parked* (idle.py chooses which): its pipeline and threads end.
    If the task leases splits, the pipeline first finishes the begun splits and returns the others,
    so nothing is lost; the output keeps its elements. Otherwise the pipeline later restarts from
    its first element. The task resumes when a consumer subscribes to its output.
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
        """`starting` bounds how many tasks load their graphs at a time. The task's thread reports
        events with `tell`, which returns instructions. With `arrivals`, which the output reports
        to, the task completes only once its elements are acknowledged or dropped.
        """
        self.task = task
        self._arrivals = arrivals
        self._put = 0  # elements
        self._skips = 0  # SkipSplit requests sent
        self._number = next(_runs)
        self._totals = Totals()
        self.output = output
        self.definition = ev.DatasetDefinition()  # set by `_open`
        self._dispatcher = dispatcher
        self._datasets = datasets or Datasets(dispatcher)
        self._starting = starting
        self._pipelines = pipelines
        self._observer = observer
        self._tell = tell
        self._cancelled = threading.Event()
        self._drain_by_s: float | None = None  # set once draining, monotonic clock
        self._pipeline: Pipeline | None = None
        self._pipeline_run: Run | None = None
        self._feed: LeaseFeed | None = None
        self._produced = False  # the output has all of the pipeline's elements
        self._given_up = False
        self._ended = False  # for good
        self._parking = threading.Lock()  # guards the next four fields
        self._park_after: int | None = None  # None, or park unless output.opens exceeds this
        self._parked = False
        self._most_bytes = 0
        self._parked_after = 0  # output.opens when it was parked last
        self._was_cut = False
        self._requests: list[int] = []  # last request number, by source
        self._where = pb.LeaseSplitsRequest(task_id=task.task_id)  # current pass, for a parked task
        self._thread = self._new_thread()

    def _new_thread(self) -> threading.Thread:
        return threading.Thread(
            target=self._run, name=f"forebay-task-{self.task.task_id}", daemon=True
        )

    def start(self) -> None:
        self._thread.start()

    @property
    def is_parked(self) -> bool:
        return self._parked

    def is_being_parked(self) -> bool:
        return self._park_after is not None

    @property
    def may_be_parked(self) -> bool:
        """Whether its thread runs. A coordinated read is never parked: it ends with its readers."""
        return self._thread.is_alive() and not self.task.num_consumers

    def park(self, opens: int, most_bytes: int) -> None:
        """Park soon, unless the output then counts more subscriptions than `opens`.

        The pipeline is cut once the unread output exceeds `most_bytes`. Never waits."""
        with self._parking:
            if self._parked or self._park_after == opens:
                return
            is_new = self._park_after is None
            if is_new and self._discards and not self.output.begin_anew(opens):
                return
            self._park_after, self._most_bytes = opens, most_bytes
            self.output.park(opens)
        if is_new:
            self._pause()

    @property
    def _discards(self) -> bool:
        """Whether parking drops the output's elements."""
        return not self.task.num_sources or self.task.cross_trainer_cache

    def _pause(self) -> None:
        if (feed := self._feed) is not None and not self.task.cross_trainer_cache:
            feed.pause()
        elif (run := self._pipeline_run) is not None:
            run.cancel()

    def cut(self) -> None:
        """Cancel a pipeline that is slow to park; elements of its begun splits are lost."""
        if self._park_after is not None and (run := self._pipeline_run) is not None:
            self._was_cut = True
            run.cancel()

    def resume(self) -> None:
        """Restart the thread if the task is parked. Never waits."""
        with self._parking:
            if not self._parked or self._cancelled.is_set():
                return
            self._parked = False
            self._thread = self._new_thread()
        try:
            self._thread.start()
        except (RuntimeError, MemoryError) as error:  # no thread available
            # The subscriber's thread holds locks of its carrier, so `output.fail` can't be called.
            log.warning("task %d cannot go on, and tries again: %s", self.task.task_id, error)
            self._parked = True  # IdleTasks resumes it

    def shed(self) -> int:
        """Drop the output of a parked task; return how many elements are lost. A task without
        leases makes its elements again, so it loses none."""
        leases = self.task.num_sources > 0
        with self._parking:
            if not self._parked:
                return 0
            self._parked = False
        elements = self.output.shed(after=self._parked_after, restart=not leases)
        if elements is not None:
            self._produced &= leases
        self._sleep()
        if elements is not None and self._produced:
            self.resume()  # to complete
        return elements if elements and leases else 0

    def _sleep(self) -> None:
        with self._parking:
            self._parked = True
        self.output.when_opened(self.resume, after=self._parked_after)

    def is_over_elsewhere(self) -> bool | None:
        """Whether no splits remain in a parked task's pass, so that it should resume and complete.
        None if no dispatcher answers."""
        if not self.task.num_sources or not self._parked or self._produced:
            return False
        try:
            answer = self._dispatcher.call(
                self._where,
                pb.LeaseSplitsResponse,
                timeout_s=2,
                patience_s=0,
                closed=self._cancelled,
            )
        except Unavailable:
            return None
        except ForebayError:  # the next heartbeat lists the task no more
            return False
        return answer.end_of_splits and not self.output.waiting_elements

    def metrics(self) -> TaskMetrics | None:
        """The metrics of the dataset's code; None if it recorded nothing."""
        totals = self._totals.told()
        if not totals.splits:
            return None
        iteration_id, task_id = self.task.iteration_id, self.task.task_id
        return TaskMetrics(
            iteration_id=iteration_id, task_id=task_id, run=self._number, totals=totals
        )

    def cancel(self) -> None:
        """Stop running and drop unsent elements. Idempotent."""
        self._cancelled.set()
        self.output.cancel()
        if (feed := self._feed) is not None:
            feed.close(wait=False)  # the task's thread waits, so this doesn't delay others
        if (run := self._pipeline_run) is not None:
            run.cancel()

    def drain(self, give_up_s: float) -> None:
        """Begin no further split, return unstarted ones, and deliver begun ones.

        The task does not complete: other workers continue the iteration. Splits not returned by
        `give_up_s` (monotonic clock) are lost.
        """
        self._drain_by_s = give_up_s
        self.output.forgo_handing_back()
        if (feed := self._feed) is not None:  # None once it is parked
            feed.drain(give_up_s)
        elif (run := self._pipeline_run) is not None:
            run.cancel()

    def undelivered(self, lacking: int = 0) -> Undelivered | None:
        """What would be lost if it were cancelled now, or None.

        `lacking` is the number of elements sent but not acknowledged.
        """
        elements = lacking + self.output.waiting_elements
        unfinished = self._pipeline_run is not None and not self.output.ended
        begun = feed.begun_last() if (feed := self._feed) is not None else []
        if not elements and not (unfinished and begun):
            return None
        return Undelivered(elements, unfinished, tuple(begun))

    def join(self, timeout_s: float) -> bool:
        """Wait for the thread; whether it has ended. A thread that never started has."""
        with self._parking:
            thread = self._thread
        if thread.ident is not None:
            thread.join(timeout_s)
        return not thread.is_alive()

    def _run(self) -> None:
        try:
            self._work()
        finally:
            if self._feed is not None:
                self._feed.close()
            self._close_pipeline()
        self._park_if_asked()

    def _park_if_asked(self) -> None:
        """The last step of the thread."""
        with self._parking:
            opens, self._park_after = self._park_after, None
            self.output.park(None)
            if opens is None or self._ended:
                return
        if self._feed is not None:
            self._has_given_up()
            self._requests, self._where = self._feed.requests, self._feed.where()
        self._feed = None
        self._was_cut = False
        self._parked_after = opens
        self._sleep()

    def _work(self) -> None:
        task_id = self.task.task_id
        try:
            if not self._produced and not self._produce():
                return
            data_over = self._is_data_over()
            if not self.output.wait_drained(UNWOUND_S):
                self._close_pipeline()
            while not self.output.wait_drained(timeout_s=60):  # for consumers, or for cancel()
                if self.is_being_parked():
                    return
            self._ended = True
            if self._arrivals is not None:
                while not (self._arrivals.wait(self._put, 1) or self._cancelled.is_set()):
                    pass  # elements in flight, or held by consumers that never return
            # If the dispatcher gave the task up, the pipeline's end doesn't mean that data ended.
            over = Ended(task_id) if self._has_given_up() else HandedOut(task_id, data_over)
            if Complete(task_id) in self._tell(self, over):
                self._dispatcher.call(
                    pb.CompleteTaskRequest(task_id=task_id, metrics=self.metrics()),
                    pb.CompleteTaskResponse,
                    closed=self._cancelled,
                )
        except ForebayError as error:
            self._end(error)
        except BaseException as bug:  # consumers must not wait for ever
            self.output.fail("INTERNAL", f"the worker failed: {bug!r}")
            self._ended = True
            self._tell(self, Ended(task_id))
            raise

    def _close_pipeline(self) -> None:
        """Free the graph and processes while the runner is kept for its output. Idempotent."""
        if self._pipeline is not None:
            self._pipeline.close()
        self._pipeline = self._pipeline_run = None
        malloc.give_back()

    def _end(self, error: ForebayError) -> None:
        self._ended = True
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
            when_read = partial(self.output.when_opened, after=self._parked_after)
            self._feed = LeaseFeed(
                self._dispatcher, task.task_id, sources, self._observer,
                processes, when_read, self._requests,
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
        except NotFound:  # the dispatcher gave the task up; elements may still be read
            if self._feed is not None:
                self._feed.given_up = True
            return True
        return answer.skipped

    def _produce(self) -> bool:
        """Run the pipeline. False if the task must park before the output is complete."""
        with self._starting:
            if self._cancelled.is_set():
                return True
            with self._parking:
                if self.is_being_parked():
                    return False
                self.output.restart()
            run = self._pipeline_run = self._open()
        # Repeat requests that arrived before the feed and the run existed.
        if self._cancelled.is_set():
            self.cancel()
        elif self._drain_by_s is not None:
            self.drain(self._drain_by_s)
        elif self.is_being_parked():
            self._pause()
        for block in run.blocks():
            try:
                self.output.put(block)
                self._put += block.count
            except BeginsAnew:
                continue  # drop the block; the run ends soon
            except BaseException:
                if self._feed is not None:
                    self._feed.close()  # closing the run waits for threads that ask for splits
                raise
            after = self._park_after
            is_unread = after is not None and self.output.opens <= after
            if is_unread and self.output.held_bytes > self._most_bytes:
                self.cut()
        if self._is_paused():
            return False
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
        try:
            self.output.finish()
        except BeginsAnew:  # `park` was called meanwhile
            return False
        self._produced = True
        return True

    def _is_paused(self) -> bool:
        """Whether the pipeline ended because of `park` and not with its data. If so, returns
        unstarted splits to the dispatcher."""
        if not self.is_being_parked() or not self._is_data_over():
            return False
        if self._feed is None:
            return True
        if not (self._feed.cut_short or self._was_cut or self.task.cross_trainer_cache):
            return False
        elements = self.output.waiting_elements
        lost = self._was_cut or self.task.cross_trainer_cache
        self._feed.drain(time.monotonic() + HAND_BACK_S)
        what = Undelivered(elements, lost, tuple(self._feed.begun_last()))
        self._observer.parked(self.task, what)
        return True

    def _has_given_up(self) -> bool:
        """Whether the dispatcher answered a request for splits with NotFound."""
        self._given_up |= self._feed is not None and self._feed.given_up
        return self._given_up

    def _is_data_over(self) -> bool:
        """Whether the pipeline ended with its data, and not because the task was stopped."""
        stopped = self._cancelled.is_set() or self._drain_by_s is not None
        return not stopped and not self._has_given_up()


def end_after(error: ForebayError, feed_failed: ForebayError | None) -> TaskFailed | TaskUnknown:
    """What consumers are told when a task ends with `error`. `feed_failed` is the error of its
    leases, if any.
    """
    match error:
        case PipelineError() if feed_failed is None:  # else it only passed on feed_failed
            return TaskFailed(error.code, error.message)
        case PipelineError() | NotFound() | Unavailable() | OutputCancelled():
            # The dispatcher gave the task up (its heartbeat will say so), or we are stopping.
            return TaskUnknown()
        case _:
            return TaskFailed(status_of(error), str(error))
