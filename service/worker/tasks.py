"""Running tasks: from a dataset's graph and leased splits to blocks for the consumers."""

from __future__ import annotations

import logging
import threading

from ...journal.proto import events_pb2 as ev
from .. import malloc
from ..connections.dispatcher_client import DispatcherClient
from ..delivery import OutputCancelled, TaskOutput
from ..errors import ForebayError, NotFound, PipelineError, Unavailable, status_of
from ..pipelines import Executor, make_executor
from ..proto import forebay_pb2 as pb
from .leases import LeaseFeed

log = logging.getLogger(__name__)


class TaskRunner:
    """One task, run by a thread of its own from start to completion."""

    def __init__(
        self,
        task: pb.Task,
        dispatcher: DispatcherClient,
        output: TaskOutput,
        starting: threading.Semaphore,
    ) -> None:
        """`starting` bounds how many tasks load their graphs at a time."""
        self.task = task
        self.output = output
        self.definition = ev.DatasetDefinition()  # once there is output
        self.drained = threading.Event()  # everything was produced, and handed to consumers
        self._dispatcher = dispatcher
        self._starting = starting
        self._cancelled = threading.Event()
        self._draining = False
        self._drain_give_up_s = 0.0
        self._executor: Executor | None = None
        self._feed: LeaseFeed | None = None
        self._thread = threading.Thread(
            target=self._run, name=f"forebay-task-{task.task_id}", daemon=True
        )

    def start(self) -> None:
        self._thread.start()

    def cancel(self) -> None:
        """Stop running and forget what was not sent. Idempotent."""
        self._cancelled.set()
        self.output.cancel()
        if self._feed is not None:
            self._feed.close()
        executor = self._executor
        if executor is not None:
            executor.cancel()

    def drain(self, give_up_s: float) -> None:
        """Begin no further split, hand back those leased ahead, and deliver what was begun.

        The task does not complete: other workers go on with the iteration. What cannot be handed
        back by `give_up_s`, of the monotonic clock, is lost.
        """
        self._drain_give_up_s = give_up_s
        self._draining = True
        try:
            if self._feed is not None:
                self._feed.drain(give_up_s)
            elif (executor := self._executor) is not None:
                executor.cancel()
        except ForebayError as error:
            log.warning("task %d could not hand its splits back: %s", self.task.task_id, error)

    def undelivered(self, lacking: int) -> str:
        """What is lost if it is cancelled now, for people; empty if nothing is.

        `lacking` elements were handed to consumers that have not said that they have them.
        """
        elements = lacking + self.output.waiting_elements
        unfinished = self._executor is not None and not self.output.ended
        begun = self._feed.begun_last() if self._feed is not None else []
        if not elements and not (unfinished and begun):
            return ""
        finished = f"{elements} elements that are finished"
        rest = ", and what the pipeline is working on" if unfinished else ""
        return finished + rest + (f" (begun last: splits {', '.join(begun)})" if begun else "")

    def join(self, timeout_s: float) -> bool:
        """Wait for the thread to end; whether it has."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        task_id = self.task.task_id
        try:
            self._produce()
            while not self.output.wait_drained(timeout_s=60):
                pass  # for consumers, or for cancel()
            if not (self._cancelled.is_set() or self._draining or self._given_up()):
                self.drained.set()
                self._dispatcher.call(
                    pb.CompleteTaskRequest(task_id=task_id),
                    pb.CompleteTaskResponse,
                    closed=self._cancelled,
                )
        except PipelineError as error:
            feed_failed = self._feed.failed if self._feed is not None else None
            if feed_failed is not None:  # which the pipeline has only passed on
                self._end_early(feed_failed)
            elif not self._cancelled.is_set():
                log.warning("task %d failed: %s", task_id, error)
                self.output.fail(error.code, error.message)
        except (NotFound, Unavailable, OutputCancelled) as error:
            self._end_early(error)
        except ForebayError as error:
            log.error("task %d failed: %s", task_id, error)
            self.output.fail(status_of(error), str(error))
        except BaseException as error:  # a bug: whoever reads the task must not wait for ever
            self.output.fail("INTERNAL", f"the worker failed: {error!r}")
            raise
        finally:
            if self._feed is not None:
                self._feed.close()
            self._executor = None  # we may be kept for our output, and it holds the graph
            malloc.give_back()

    def _make_executor(self) -> Executor:
        task = self.task
        dataset = self._dispatcher.get_dataset(task.dataset_id, with_graph=True)
        if task.num_sources:
            self._feed = LeaseFeed(self._dispatcher, task.task_id, dataset.definition.sources)
        self.definition = dataset.definition
        self.output.compression = dataset.definition.compression
        return make_executor(dataset.definition, dataset.graph, self._feed)

    def _end_early(self, error: ForebayError) -> None:
        """The dispatcher gave the task up (its heartbeat will say so), or we are stopping."""
        if not self._cancelled.is_set():
            log.info("task %d ends early: %s", self.task.task_id, error)
        self.output.cancel()

    def _given_up(self) -> bool:
        """Whether the dispatcher lists the task no more, so that its end is not the data's."""
        return self._feed is not None and self._feed.given_up

    def _produce(self) -> None:
        with self._starting:
            if self._cancelled.is_set():
                return
            executor = self._executor = self._make_executor()
        # Once more, if it came too early to find what it is about.
        if self._cancelled.is_set():
            self.cancel()
        elif self._draining:
            self.drain(self._drain_give_up_s)
        for block in executor.blocks():
            self.output.put(block)
        self.output.finish()
