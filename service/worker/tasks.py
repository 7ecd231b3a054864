"""The tasks of a worker. A TaskRunner runs a pipeline into its output, parks, and completes."""

from __future__ import annotations

import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from ..connections.dispatcher_client import DispatcherClient
from ..delivery import Listener, OutputCancelled, OutputReset, TaskFailed, TaskOutput, TaskUnknown
from ..errors import ForebayError, NotFound, PipelineError, Unavailable, status_of
from ..proto import forebay_pb2 as pb
from ..stopwatch import Stopwatch
from .losses import Undelivered
from .read_errors import ReadErrors
from .task_pipeline import Datasets, Pipelines, TaskPipeline
from .task_states import Complete, Ended, HandedOut, Instruction

log = logging.getLogger(__name__)

UNWOUND_S = 1.0
"""An ended pipeline stays open this long while trainers read its last elements. Closing may block
in TensorFlow, and would delay the end of the task if trainers are fast."""


REPORT_S = 1.0
"""How often an ended pipeline's task reports what trainers have taken."""


class DeliveryCounter(Listener):
    """Counts a task's acknowledged and dropped elements."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._settled = 0

    def acknowledged(self, elements: int) -> None:
        with self._changed:
            self._settled += elements
            self._changed.notify_all()

    dropped = acknowledged

    def wait(self, elements: int, timeout_s: float) -> bool:
        """Wait until the count reaches `elements`; False on timeout."""
        with self._changed:
            return self._changed.wait_for(lambda: self._settled >= elements, timeout_s)


class TaskDependencies(NamedTuple):
    """What a worker's tasks share."""

    dispatcher: DispatcherClient
    starting: threading.Semaphore  # bounds how many tasks load their graphs at a time
    pipelines: Pipelines
    report: Callable[[WorkerTask, HandedOut | Ended], list[Instruction]]
    """The task's thread reports events with it; returns instructions."""
    datasets: Datasets | None = None
    errors: ReadErrors | None = None


class WorkerTask(ABC):
    """One task of a worker, which makes its output's elements in a thread of its own.

    task_states.py decides the task's state. The thread reports events and obeys instructions. By
    default a task has nothing to lose or to return, and is never parked (idle.py).
    """

    is_parked = False

    def __init__(self, task: pb.Task, output: TaskOutput, needs: TaskDependencies) -> None:
        self.task = task
        self.output = output
        self.pipeline = TaskPipeline(
            task, needs.dispatcher, needs.pipelines, needs.datasets, output
        )
        self._needs = needs
        self._errors = needs.errors or ReadErrors()
        self._ended = False  # for good
        self._thread = self._new_thread()

    def _new_thread(self) -> threading.Thread:
        return threading.Thread(
            target=self._run, name=f"forebay-task-{self.task.task_id}", daemon=True
        )

    def start(self) -> None:
        self._thread.start()

    def cancel(self) -> None:
        """Stop running, also within an element, and drop unsent elements. Never waits.
        Idempotent."""
        self.pipeline.cancelled.set()
        self.output.cancel()
        self.pipeline.cancel()

    def fail(self, code: str, message: str) -> None:
        """Its consumers get this error, now and later, and the dispatcher hears of it."""
        if not self.pipeline.cancelled.is_set():
            self._errors.add(self.task, code, message, for_good=True)
        self.output.fail(code, message)

    def join(self, timeout_s: float) -> bool:
        """Wait for the thread; whether it has ended. A thread that never started has."""
        thread = self._thread
        if thread.ident is not None:
            thread.join(timeout_s)
        return not thread.is_alive()

    @abstractmethod
    def counts(self) -> dict[str, float]:
        """What it has done so far: elements, bytes, the seconds that its pipeline was open, by what
        that waited for, and how it gave memory to others."""

    def drain(self, give_up_s: float) -> None:  # noqa: B027
        """Begin no further split, and return unstarted ones until `give_up_s` (monotonic clock)."""

    def undelivered(self, lacking: int = 0) -> Undelivered | None:
        """What would be lost if it were cancelled now, or None.

        `lacking` is the number of elements sent but not acknowledged.
        """
        return None

    # -- parking -------------------------------------------------------------------------------

    @property
    def may_be_parked(self) -> bool:
        return False

    def is_being_parked(self) -> bool:
        return False

    def park(self, opens: int, most_bytes: int) -> None:  # noqa: B027
        """Park soon, unless the output then counts more subscriptions than `opens`.

        The pipeline is cut once the unread output exceeds `most_bytes`. Never waits."""

    def cut(self) -> None:  # noqa: B027
        """Cancel a pipeline that is slow to park; elements of its begun splits are lost."""

    def resume(self) -> None:  # noqa: B027
        """Restart the thread if the task is parked. Never waits."""

    def shed(self) -> int:
        """Drop the output of a parked task; return how many elements are lost. A task without
        leases makes its elements again, so it loses none."""
        return 0

    def is_pass_over(self) -> bool | None:
        """Whether no splits remain in a parked task's pass, so that it should resume and complete.
        None if no dispatcher answers."""
        return False

    # -- the thread ----------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._work()
        except ForebayError as error:
            self._end(error)
        except BaseException as bug:  # consumers must not wait for ever
            self.fail("INTERNAL", f"the worker failed: {bug!r}")
            self._ended = True
            self._needs.report(self, Ended(self.task.task_id))
            raise

    @abstractmethod
    def _work(self) -> None: ...

    def _end(self, error: ForebayError) -> None:
        self._ended = True
        feed_failed = self.pipeline.feed_failed
        end = end_after(error, feed_failed)
        if isinstance(end, TaskFailed):
            self.fail(end.code, end.message)
        else:
            self.output.cancel()
        if not self.pipeline.cancelled.is_set():
            if isinstance(end, TaskFailed):
                level = logging.WARNING if isinstance(error, PipelineError) else logging.ERROR
                log.log(level, "task %d failed: %s", self.task.task_id, error)
            else:  # the dispatcher gave it up, or is unreachable
                log.info("task %d ends early: %s", self.task.task_id, feed_failed or error)
        self._needs.report(self, Ended(self.task.task_id))


class TaskRunner(WorkerTask):
    """Runs one task from start to completion.

    A task without consumers can be *parked* (idle.py chooses which): its pipeline and threads end.
    If the task leases splits, the pipeline first finishes the begun splits and returns the others,
    so nothing is lost; the output keeps its elements. Otherwise the pipeline later restarts from
    its first element. The task resumes when a consumer subscribes to its output.
    """

    def __init__(
        self,
        task: pb.Task,
        output: TaskOutput,
        needs: TaskDependencies,
        counter: DeliveryCounter | None = None,
    ) -> None:
        """With `counter`, which the output reports to, the task completes only once its elements
        are acknowledged or dropped."""
        super().__init__(task, output, needs)
        output.on_trace = self._trace
        self._counter = counter
        self._put = self._put_bytes = 0  # elements; their bytes
        self._shed_elements = self._parks = 0  # by which it gave memory to others
        self._producing = Stopwatch()  # while its pipeline is open
        self._cancelled = self.pipeline.cancelled
        self._drain_by_s: float | None = None  # set once draining, monotonic clock
        self._produced = False  # the output has all of the pipeline's elements
        self._parking = threading.Lock()  # guards the next three fields and `is_parked`
        self._park_after: int | None = None  # None, or park unless output.opens exceeds this
        self._most_bytes = 0
        self._parked_after = 0  # output.opens when it was parked last
        # Whether parking drops the output's elements.
        self._discards = not task.num_sources or task.cross_trainer_cache

    def _trace(self, traceparent: str) -> None:
        if not self.output.waiting_elements:  # else nobody waits for the pipeline
            self.pipeline.spans.begin(traceparent)

    def is_being_parked(self) -> bool:
        return self._park_after is not None

    @property
    def may_be_parked(self) -> bool:
        """Whether its thread runs. A coordinated read is never parked: it ends with its readers."""
        return self._thread.is_alive() and not self.task.num_consumers

    def park(self, opens: int, most_bytes: int) -> None:
        with self._parking:
            if self.is_parked or self._park_after == opens:
                return
            is_new = self._park_after is None
            if is_new and self._discards and not self.output.reset(opens):
                return
            self._park_after, self._most_bytes = opens, most_bytes
            self.output.park(opens)
        if is_new:
            self.pipeline.pause()

    def cut(self) -> None:
        if self.is_being_parked():
            self.pipeline.cut()

    def resume(self) -> None:
        with self._parking:
            if not self.is_parked or self._cancelled.is_set():
                return
            self.is_parked = False
            self._thread = self._new_thread()
        try:
            self._thread.start()
        except (RuntimeError, MemoryError) as error:  # no thread available
            # The subscriber's thread holds locks of its carrier, so `output.fail` can't be called.
            log.warning("task %d cannot go on, and tries again: %s", self.task.task_id, error)
            self.is_parked = True  # IdleTasks resumes it

    def shed(self) -> int:
        leases = self.task.num_sources > 0
        with self._parking:
            if not self.is_parked:
                return 0
            self.is_parked = False
        elements = self.output.shed(after=self._parked_after, restart=not leases)
        if elements is not None:
            self._produced &= leases
            self._shed_elements += elements
        self._sleep()
        if elements is not None and self._produced:
            self.resume()  # to complete
        return elements if elements and leases else 0

    def _sleep(self) -> None:
        with self._parking:
            self.is_parked = True
        self.output.when_opened(self.resume, after=self._parked_after)

    def is_pass_over(self) -> bool | None:
        if not self.task.num_sources or not self.is_parked or self._produced:
            return False
        return self.pipeline.is_pass_over() and not self.output.waiting_elements

    def drain(self, give_up_s: float) -> None:
        """Begin no further split, return unstarted ones, and deliver begun ones.

        The task does not complete: other workers continue the iteration. Splits not returned by
        `give_up_s` (monotonic clock) are lost.
        """
        self._drain_by_s = give_up_s
        self.output.forgo_handing_back()
        self.pipeline.drain(give_up_s)

    def undelivered(self, lacking: int = 0) -> Undelivered | None:
        elements = lacking + self.output.waiting_elements
        return self.pipeline.undelivered(elements, self.output.ended)

    def counts(self) -> dict[str, float]:
        no_split_s, unread_s, held_back_s = self.pipeline.waited_s
        blocked_s = self.output.blocked.seconds + held_back_s
        waited_s = no_split_s + unread_s + blocked_s
        return {
            "elements": self._put,
            "bytes": self._put_bytes,
            "no_split": no_split_s,
            "unread": unread_s,
            "backpressured": blocked_s,
            "working": max(0.0, self._producing.seconds - waited_s),
            "shed_elements": self._shed_elements,
            "parked_tasks": self._parks,
        }

    def _run(self) -> None:
        try:
            super()._run()
        finally:
            self.pipeline.spans.end()
            self.pipeline.close()
        with self._parking:
            opens, self._park_after = self._park_after, None
            self.output.park(None)
            if opens is None or self._ended:
                return
        self.pipeline.park()
        self._parks += 1
        self._parked_after = opens
        self._sleep()

    def _work(self) -> None:
        task_id = self.task.task_id
        if not self._produced:
            with self._producing:
                produced = self._produce()
            if not produced:
                return
        data_over = self._is_data_over()
        if not self.output.wait_drained(UNWOUND_S):
            self.pipeline.free()
        while not self.output.wait_drained(REPORT_S):  # for consumers, or for cancel()
            if self.is_being_parked():
                return
            self.pipeline.report()
        self._ended = True
        if self._counter is not None:
            while not (self._counter.wait(self._put, 1) or self._cancelled.is_set()):
                pass  # elements in flight, or held by consumers that never return
        # If the dispatcher gave the task up, the pipeline's end doesn't mean that data ended.
        event = Ended(task_id) if self.pipeline.given_up else HandedOut(task_id, data_over)
        if Complete(task_id) in self._needs.report(self, event):
            self.pipeline.report(completes=True)
            self._needs.dispatcher.call(
                pb.CompleteTaskRequest(task_id=task_id, metrics=self.pipeline.metrics()),
                pb.CompleteTaskResponse,
                closed=self._cancelled,
            )

    def _produce(self) -> bool:
        """Run the pipeline. False if the task must park before the output is complete."""
        with self._needs.starting:
            if self._cancelled.is_set():
                return True
            with self._parking:
                if self.is_being_parked():
                    return False
                self.output.restart()
            run = self.pipeline.open(partial(self.output.when_opened, after=self._parked_after))
            self.output.compression = self.pipeline.definition.compression
        # Repeat requests that arrived before the feed and the run existed.
        if self._cancelled.is_set():
            self.cancel()
        elif self._drain_by_s is not None:
            self.drain(self._drain_by_s)
        elif self.is_being_parked():
            self.pipeline.pause()
        in_flight = self.output.in_flight
        for block in run.blocks():
            if in_flight is not None:
                run.most = max(1, in_flight.bound // 4)
            try:
                self.output.put(block)
                self.pipeline.spans.end(block.count)
                self._put += block.count
                self._put_bytes += block.values_bytes
            except OutputReset:
                continue  # drop the block; the run ends soon
            except BaseException:
                self.pipeline.close_feed()  # closing the run waits for threads that lease splits
                raise
            after = self._park_after
            is_unread = after is not None and self.output.opens <= after
            if is_unread and self.output.held_bytes > self._most_bytes:
                self.cut()
        is_paused = self.is_being_parked() and self._is_data_over()
        if is_paused and self.pipeline.hand_back(self.output.waiting_elements):
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
        except OutputReset:  # `park` was called meanwhile
            return False
        self._produced = True
        return True

    def _is_data_over(self) -> bool:
        """Whether the pipeline ended with its data, and not because the task was stopped."""
        stopped = self._cancelled.is_set() or self._drain_by_s is not None
        return not stopped and not self.pipeline.given_up


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
