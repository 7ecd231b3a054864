"""A task's pipeline: from the registered dataset and leased splits to blocks."""

from __future__ import annotations

import functools
import itertools
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import NamedTuple

from ...journal.datasets import stored
from ...journal.proto import events_pb2 as ev
from ...journal.splits import source_size
from .. import malloc, pipelines
from ..connections.dispatcher_client import DispatcherClient
from ..delivery import TaskOutput
from ..errors import ForebayError, NotFound, Unavailable
from ..pipelines import MaySkip, Pipeline, PythonRules, Run, Shard, SkipReport
from ..proto import forebay_pb2 as pb
from ..proto.metrics_pb2 import TaskMetrics
from ..tracing import MakeSpans
from ..user_metrics import Totals
from . import losses
from .lease_reports import LeaseReports
from .leases import HAND_BACK_S, LeaseFeed
from .losses import Undelivered

log = logging.getLogger(__name__)

_numbers = itertools.count(1)

KEPT_BYTES = 32 << 20
"""Size limit of the cache of fetched datasets and their graphs."""


class Pipelines:
    """Opens the pipelines of a worker's tasks from the registered datasets."""

    _warm = False
    _fork_servers = PythonRules().fork_servers  # replaced by `load`
    python = PythonRules()

    def __init__(self, *, warm: bool = False) -> None:
        """`warm`: `load` also runs one pipeline, and leaves Keras out; for a process that only runs
        a worker."""
        self._warm = warm

    def load(self, op_libraries: Sequence[str]) -> None:
        """Import the pipelines' libraries, so that the first task doesn't wait for it.

        Raises InvalidArgument.
        """
        if self._warm:
            with pipelines.without_keras():
                pipelines.load(op_libraries)
            pipelines.warm_up()
        else:
            pipelines.load(op_libraries)
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
            may_skip=may_skip, totals=totals, fork_servers=self._fork_servers,
            iteration=task.iteration_id,
        )  # fmt: skip
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


class BundleSource(NamedTuple):
    """A dataset that a read in bundles runs, and its bundles among those of an epoch."""

    pipeline: Pipeline
    first: int  # number of its first bundle
    bundles: int
    bundle_splits: int
    splits: int


class TaskPipeline:
    """The pipeline of one task: its dataset, its leases and its run.

    A task that parks closes its pipeline, and opens it again when it resumes. The task's thread
    opens and closes it; any thread may stop it.
    """

    def __init__(
        self,
        task: pb.Task,
        dispatcher: DispatcherClient,
        pipelines: Pipelines,
        datasets: Datasets | None = None,
        output: TaskOutput | None = None,
    ) -> None:
        """`output` gets the elements of a pipeline on leased splits."""
        self.definition = ev.DatasetDefinition()  # set by `open`
        self.cancelled = threading.Event()
        self.spans = MakeSpans(job=task.job_id, task=task.task_id)
        self._task = task
        self._dispatcher = dispatcher
        self._pipelines = pipelines
        self._datasets = datasets or Datasets(dispatcher)
        self._opened: list[Pipeline] = []
        self._run: Run | None = None
        self._feed: LeaseFeed | None = None
        self._given_up = False
        self._was_cut = False
        self._skipping = threading.Lock()
        self._skips = 0  # SkipSplit requests sent
        self._requests: list[int] = []  # last request number, by source
        self._pass_query = pb.LeaseSplitsRequest(task_id=task.task_id)  # for a parked task
        self._number = next(_numbers)
        self._totals = Totals()
        self._reports = LeaseReports(output)
        self._waited_s = 0.0, 0.0, 0.0  # of earlier feeds

    @property
    def waited_s(self) -> tuple[float, float, float]:
        """How long it waited for splits, for the task's first consumer, and for trainers to take
        elements, in all its runs."""
        feed, before = self._feed, self._waited_s
        if feed is None:
            return before
        no_split_s, unread_s = feed.waited_s
        return before[0] + no_split_s, before[1] + unread_s, before[2] + feed.held_back_s

    @property
    def given_up(self) -> bool:
        """Whether the dispatcher answered a request for splits with NotFound."""
        return self._given_up or (self._feed is not None and self._feed.given_up)

    @property
    def feed_failed(self) -> ForebayError | None:
        """The error of the task's leases, if any."""
        return None if self._feed is None else self._feed.failed

    def undelivered(self, elements: int, ended: bool) -> Undelivered | None:
        """What is lost if it stops now: `elements`, and more unless its output has `ended`."""
        unfinished = self._run is not None and not ended
        begun = feed.begun_last() if (feed := self._feed) is not None else []
        if not elements and not (unfinished and begun):
            return None
        return Undelivered(elements, unfinished, tuple(begun))

    def metrics(self) -> TaskMetrics | None:
        """The metrics of the dataset's code; None if it recorded nothing."""
        totals = self._totals.told()
        if not totals.splits:
            return None
        iteration_id, task_id = self._task.iteration_id, self._task.task_id
        return TaskMetrics(
            iteration_id=iteration_id, task_id=task_id, run=self._number, totals=totals
        )

    def open(self, when_read: Callable[[Callable[[], None]], None]) -> Run:
        """A new run. `when_read` registers a callback for the first consumer (leases.py)."""
        task = self._task
        dataset = self._datasets.of(task)
        self.definition = dataset.definition
        if task.num_sources:
            sources = dataset.definition.sources
            rules = self._pipelines.python
            processes = pipelines.processes_of(dataset.definition, dataset.graph, rules)
            self._feed = LeaseFeed(
                self._dispatcher, task.task_id, sources, processes, when_read,
                self._requests, self.spans.current, self._reports,
            )  # fmt: skip
        self._run = self._open(dataset).run(self._feed)
        self._reports.begin_run(self._run)
        return self._run

    def report(
        self, *, all_delivered: bool = False, completes: bool = False, dropped: int = 0
    ) -> None:
        """Report what trainers have taken, or that consumers have `all_delivered`, or elements that
        are `dropped` now. A task that `completes` only tells what was dropped."""
        if not self._task.num_sources:
            return
        request = pb.LeaseSplitsRequest()
        if all_delivered:
            self._reports.all_delivered(request)
        else:
            self._reports.add_to(request)
        request.dropped += dropped
        if request.dropped or request.lost or (request.ByteSize() and not completes):
            request.task_id = self._task.task_id
            answer = pb.LeaseSplitsResponse
            try:
                self._dispatcher.call(
                    request, answer, timeout_s=2, patience_s=0, closed=self.cancelled
                )
            except ForebayError as error:
                self._reports.restore(request)
                log.info("task %d could not report: %s", request.task_id, error)

    def open_bundles(self) -> tuple[list[BundleSource], int]:
        """What a read in bundles runs, a mixture's sources or the one dataset, and how many bundles
        it is worth to run at a time."""
        dataset, rules = self._datasets.of(self._task), self._pipelines.python
        self.definition, order = dataset.definition, self._task.order
        datasets, sizes = [dataset], [(order.bundles, order.bundle_splits)]
        if sources := dataset.definition.mixture.sources:
            named = (source.dataset_id for source in sources)
            datasets = [self._dispatcher.get_dataset(each, with_graph=True) for each in named]
            sizes = [*zip(order.source_bundles, order.source_bundle_splits, strict=True)]
        found, first_bundle, first_split, at_once = [], 0, 0, 1
        for each, (bundles, bundle_splits) in zip(datasets, sizes, strict=True):
            splits = min(map(source_size, each.definition.sources), default=0)
            may_skip = functools.partial(self._may_skip, first_split=first_split)
            pipeline = self._open(each, may_skip)
            found.append(BundleSource(pipeline, first_bundle, bundles, bundle_splits, splits))
            at_once = max(at_once, pipelines.bundles_at_once(each.definition, each.graph, rules))
            first_bundle, first_split = first_bundle + bundles, first_split + splits
        return found, at_once

    def _open(self, dataset: pb.GetDatasetResponse, may_skip: MaySkip | None = None) -> Pipeline:
        pipeline = self._pipelines.open(
            self._task, dataset.definition, dataset.graph, may_skip or self._may_skip, self._totals
        )
        self._opened.append(pipeline)
        return pipeline

    def _may_skip(self, report: SkipReport, first_split: int = 0) -> bool:
        request = pb.SkipSplitRequest(
            task_id=self._task.task_id,
            split=first_split + report.split,
            element=report.element,
            reason=report.reason,
            limit=report.limit,
            records=report.records,
        )
        try:
            with self._skipping:  # bundles ask side by side, and numbers must come in order
                self._skips += 1
                request.request.number = self._skips
                answer = self._dispatcher.call(request, pb.SkipSplitResponse, closed=self.cancelled)
        except NotFound:  # the dispatcher gave the task up; elements may still be read
            if self._feed is not None:
                self._feed.given_up = True
            return True
        return answer.skipped

    def cancel(self) -> None:
        """Stop soon. Never waits. Idempotent."""
        self.cancelled.set()
        if (feed := self._feed) is not None:
            feed.close(wait=False)  # the task's thread waits, so this doesn't delay others
        self._cancel_run()

    def drain(self, give_up_s: float) -> None:
        """Begin no further split, and return unstarted ones until `give_up_s` (monotonic clock).
        A pipeline without leases is cancelled."""
        if (feed := self._feed) is not None:
            feed.drain(give_up_s)
        else:
            self._cancel_run()

    def pause(self) -> None:
        """Begin no further split; a pipeline whose elements are made again later is cancelled.
        Never waits."""
        if (feed := self._feed) is not None and not self._task.cross_trainer_cache:
            feed.pause()
        else:
            self._cancel_run()

    def cut(self) -> None:
        """Cancel a pipeline that is slow to pause; elements of its begun splits are lost."""
        self._was_cut |= self._run is not None
        self._cancel_run()

    def _cancel_run(self) -> None:
        if (run := self._run) is not None:
            run.cancel()

    def hand_back(self, elements: int) -> bool:
        """Return the unstarted splits of a paused pipeline that has ended; False if it ended with
        its data. `elements` is how many the output has, for the log."""
        if self._feed is None:
            return True
        lost = self._was_cut or self._task.cross_trainer_cache
        if not (lost or self._feed.cut_short):
            return False
        self._feed.drain(time.monotonic() + HAND_BACK_S)
        begun = tuple(self._feed.begun_last())
        losses.parked(self._task, Undelivered(elements, lost, begun))
        return True

    def close_feed(self) -> None:
        """Stop leasing; wakes threads that wait for a lease. Idempotent."""
        if self._feed is not None:
            self._feed.close()

    def free(self) -> None:
        """Free the graph and processes of a run that has ended. Idempotent."""
        for pipeline in self._opened:
            pipeline.close()
        self._opened.clear()
        self._run = None
        self._reports.end_run()
        malloc.give_back()

    def close(self) -> None:
        """Close the feed, and free the rest. Idempotent."""
        self.close_feed()
        self.free()

    def park(self) -> None:
        """Keep of a closed pipeline what the next `open` needs."""
        if self._feed is not None:
            self._given_up = self.given_up
            self._requests, self._pass_query = self._feed.requests, self._feed.where()
        waited_s, self._feed = self.waited_s, None
        self._waited_s = waited_s
        self._was_cut = False

    def is_pass_over(self) -> bool | None:
        """Whether no splits remain in a parked pipeline's pass. None if no dispatcher answers."""
        try:
            answer = self._dispatcher.call(
                self._pass_query,
                pb.LeaseSplitsResponse,
                timeout_s=2,
                patience_s=0,
                closed=self.cancelled,
            )
        except Unavailable:
            return None
        except ForebayError:  # the next heartbeat lists the task no more
            return False
        return answer.end_of_splits
