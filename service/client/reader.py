"""`read`, which reads a registered dataset as NumPy without TensorFlow, and its iterations."""

from __future__ import annotations

import heapq
import itertools
import logging
import time
from collections.abc import Callable, Generator
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any, Unpack

from ...journal.datasets import content_fingerprint
from ...journal.proto import events_pb2 as ev
from ..blocks import Block
from ..connections.dispatcher_client import DispatcherClient
from ..errors import AlreadyExists, FailedPrecondition, InvalidArgument, Unavailable
from ..pipelines.definitions import UNKNOWN_CARDINALITY, compresses, metadata_of
from ..pipelines.tf_data.split_sources import require_splittable
from ..platforms import require
from ..proto import forebay_pb2 as pb
from ..transport import has_local_workers
from .batches import Layout, in_whole_batches, laid_out
from .consumer import Consumer
from .lockstep import must_stop
from .open_iterations import Taker, stopping
from .options import (
    DEFAULT_READ_OPTIONS,
    ReadArguments,
    ReadOptions,
    ShardingPolicy,
    TargetWorkers,
    read_options,
    take_batches,
)
from .positions import GROUP
from .progress import EpochIterator
from .saved_states import load, state_of

CREDIT_BYTES = 32 << 20
"""How far a worker may run ahead of a consumer."""


PATIENCE_S = 60.0
"""How long to retry a dispatcher that does not answer before reading begins."""

ASK_AGAIN_S = 1.0
"""How long one attempt to reach a dispatcher takes; in between, the caller may give up."""


GROUP_S = 20.0
"""How long a consumer of an ordered read waits for others that its group cannot have: from when
the dispatcher answers without a failure, since a new one needs time to learn who is gone."""

ASK_GROUP_S = 0.2

log = logging.getLogger(__name__)


@lru_cache(maxsize=1024)
def _read_by_name(service: str | tuple[str, str], name: str) -> set[str]:
    """The datasets that this process has read by a job_name of a service."""
    return set()


_Asked = Callable[[Callable[..., Any]], Generator[Block, None, Any]]
"""Of a request to make: its answer, once a dispatcher gives one (`Reader._answered`)."""


def fetch_dataset(
    service: str | tuple[str, str],
    dataset_id: str,
    job_name: str | None = None,
    known: pb.JournalPosition | None = None,
) -> pb.GetDatasetResponse:
    """The registered definition without the graph, and how many epochs of the job are over.

    `job_name` is the job's whole name. No dispatcher with another journal than the `known` one
    answers.

    Raises NotFound, Unavailable.
    """
    with DispatcherClient(service, known) as client:
        return client.get_dataset(
            dataset_id, with_graph=False, job_name=job_name, patience_s=PATIENCE_S
        )


class Reader:
    """Reads one dataset under one job: each iteration is the next epoch. Thread-safe.

    All readers that give a job's name share the job. Without a name, each iteration has a job of
    its own, so that readers are independent.
    """

    def __init__(
        self,
        service: str | tuple[str, str],
        dataset_id: str,
        job_name: str | None,  # the job's whole name
        options: ReadOptions = DEFAULT_READ_OPTIONS,
        *,
        expects_epoch: bool = True,
        credit_bytes: int = CREDIT_BYTES,
    ) -> None:
        """The first iteration of a named job follows its `initial_epoch`. If that epoch is over, a
        reader that `expects_epoch` logs a warning. A worker may run `credit_bytes` ahead of a
        consumer. Raises InvalidArgument for a cross-trainer cache without a job name.
        """
        require("reading elements", "CMSG_SPACE")
        if options.cache is not None and not job_name:
            raise InvalidArgument(
                "Cross-trainer caching requires named jobs. Got empty `job_name`."
            )
        self.service = service
        self.dataset_id = dataset_id
        self.name = job_name or dataset_id
        self._job_name = job_name
        self.options = options
        self._epochs = itertools.count(options.initial_epoch + 1)  # from 1, as stock clients count
        self._expected = options.initial_epoch + 1 if expects_epoch else None  # None once joined
        self._not_joined: list[int] = []  # a heap of epochs whose iteration ended before joining
        self._credit_bytes = credit_bytes
        self._known: pb.JournalPosition | None = None  # keeps all iterations on one journal
        self._warns = True  # once, if the job reads another dataset
        self.epochs_over = 0  # of the job, at the last `definition` call
        self.cardinality = UNKNOWN_CARDINALITY  # of the dataset, set by `definition`

    def definition(self) -> ev.DatasetDefinition:
        """The registered definition, without the graph.

        Raises NotFound, Unavailable, and NotSplittable if this policy cannot read the dataset. For
        a finite dataset, raises InvalidArgument with a cache, and FailedPrecondition for a
        coordinated read.
        """
        dataset = fetch_dataset(self.service, self.dataset_id, self._job_name, self._known)
        self.epochs_over = dataset.epochs_over
        definition = dataset.definition
        elements = dataset.elements if dataset.HasField("elements") else None
        if self.options.ordered is not None:
            self.options.ordered.dataset = content_fingerprint(definition)
            self.options.ordered.elements = elements
            self.options.ordered.mix(definition.mixture.sources)
            if self.options.ordered.add_source:
                definition.structure = self._with_source(definition)
        is_auto = self.options.targets == TargetWorkers.AUTO
        if dataset.colocated and self.options.is_static and is_auto:
            self.options = replace(self.options, targets=TargetWorkers.LOCAL)
        cardinality = self.cardinality = metadata_of(definition.metadata).cardinality
        if self.options.cache is not None and cardinality >= 0:
            raise InvalidArgument(
                "Cross-trainer caching requires the input dataset to be infinite. Got input "
                f"with cardinality {cardinality}"
            )
        is_dynamic = self.options.policy == ShardingPolicy.DYNAMIC
        if (is_dynamic or self.options.order) and not definition.HasField("mixture"):
            require_splittable(definition.sources, definition.unsplittable)
        if self.options.num_consumers is not None and cardinality >= 0:
            raise FailedPrecondition(
                "Round robin reads require that the input dataset has infinite cardinality, "
                f"but the dataset has cardinality {cardinality}. Consider adding a `.repeat()` "
                "transformation to the dataset."
            )
        if definition.HasField("python_function") and elements is not None:
            self.cardinality = elements
        return definition

    def _with_source(self, definition: ev.DatasetDefinition) -> str:
        """The structure of pairs of an element and its source's name."""
        if not definition.HasField("mixture"):
            raise InvalidArgument(
                f"add_source=True of dataset {self.dataset_id}, which is no mixture: leave it out"
            )
        element = structure_of(self.dataset_id, definition)
        return f'{{"tuple": [{element}, {{"tensor": "string", "shape": []}}]}}'

    def iterate(
        self, nothing: Block | None = None, taker: Taker | None = None
    ) -> Generator[Block, None, None]:
        """The blocks of the next epoch. Close the iterator to leave it early.

        `nothing`, if given, is yielded now and then while no block comes. A `taker` counts the
        elements that the trainer took of a block. Without one, whole blocks count as taken.
        """
        if must_stop(taker):
            log.warning(
                "this process is to stop: its iteration over dataset %s has no elements",
                self.dataset_id,
            )
            return
        if self.options.targets == TargetWorkers.LOCAL and not has_local_workers():
            what = "Local reads require"
            if self.options.is_static:
                what = f"Static sharding policy <{self.options.policy.name}> requires"
            raise InvalidArgument(
                f"{what} local tf.data workers, but no local worker is found. You need to run "
                "local tf.data service workers in your training workers."
            )
        dispatcher = DispatcherClient(self.service, known=self._known)
        consumer = None
        try:
            try:
                asked = partial(self._answered, dispatcher, nothing, taker)
                joined = yield from self._joined(dispatcher, asked)
            except _ToStop:
                return
            consumer = Consumer(
                dispatcher,
                joined,
                credit_bytes=self._credit_bytes,
                options=self.options,
                taker=taker,
            )
            if must_stop(taker) or (taker is not None and taker.is_left):
                consumer.leave()
            blocks = consumer.blocks(nothing)
            if (ordered := self.options.ordered) is not None and ordered.batch_size is not None:
                reading = consumer
                blocks = in_whole_batches(blocks, ordered.batch_size, lambda: reading.is_over)
            yield from blocks
        finally:
            if consumer is not None:
                consumer.close(0 if taker is None else taker.left())
            if consumer is None or consumer.is_ours():
                dispatcher.close()
                self._known = dispatcher.known

    def _joined(
        self, dispatcher: DispatcherClient, asked: _Asked
    ) -> Generator[Block, None, pb.JoinIterationResponse]:
        """Joins the job's next epoch. If that fails, the next iteration reads this epoch."""
        ordered = self.options.ordered
        # An ordered read has all its epochs in one iteration. Of a read at least once, each epoch
        # has its own order and random numbers, also without a name.
        has_epochs = bool(self._job_name) or self.options.claimed is not None
        epoch = self._next_epoch() if has_epochs and ordered is None else 0
        if self.options.cache is not None and epoch > 1:
            raise InvalidArgument(
                "Cross-trainer caching requires infinite datasets and disallows multiple "
                f"repetitions of the same dataset. Got repetition {epoch}"
            )
        job = pb.GetOrCreateJobRequest(
            dataset_id=self.dataset_id,
            job_name=self._job_name or "",
            sharding=self.options.policy.name,
            num_consumers=self.options.num_consumers,
            target_workers=self.options.targets,
            cross_trainer_cache=self.options.cache is not None,
            order=self.options.order,
            content="" if ordered is None else ordered.dataset,
            one_dataset=self._is_of_one_dataset(),
            within_bundles=self.options.within_bundles,
            schedules=True,
            schedule_of="" if ordered is None else ordered.schedule_of,
        )
        member = None if ordered is None else ordered.member
        index = None if self.options.num_consumers is None else self.options.consumer_index

        def ask(**how: Any) -> Generator[Block, None, pb.JoinIterationResponse]:
            request = pb.JoinIterationRequest(
                epoch=epoch, consumer_index=index, member=member, **how
            )
            call = partial(dispatcher.call_numbered, request, pb.JoinIterationResponse)
            answer: pb.JoinIterationResponse = yield from asked(call)
            return answer

        try:
            joined = yield from ask(job=job)
            for doubt in joined.doubts:
                log.warning("dataset %s: %s", self.dataset_id, doubt)
            if not joined.consumer_id:
                yield from self._require_same_elements(dispatcher, joined.dataset_id, asked)
                if self._warns:
                    log.warning(
                        "the job %r is of dataset %s, whose elements are read, and not those of "
                        "dataset %s: give the job another name to read these",
                        self._job_name, joined.dataset_id, self.dataset_id,
                    )  # fmt: skip
                    self._warns = False
                joined = yield from ask(job_id=joined.job_id)
            if epoch and epoch == self._expected:
                self._expected = None
                if joined.news.finished:
                    self._say_that_it_is_over(epoch)
            return joined
        except BaseException:
            if epoch:
                heapq.heappush(self._not_joined, epoch)
            raise

    def _is_of_one_dataset(self) -> bool:
        """Whether its user's job_name is of this dataset only: this process reads no other one by
        it. The name of a group that has none says nothing."""
        name = (self._job_name or GROUP).removeprefix(f"dataset_id=/{self.dataset_id}/")
        if name.startswith(GROUP):
            return False
        read = _read_by_name(self.service, name)
        read.add(self.dataset_id)
        return len(read) == 1

    def _say_that_it_is_over(self, epoch: int) -> None:
        over = max(epoch, self.epochs_over)
        log.warning(
            "epoch %d of the job %r is over, so this iteration has no elements: other trainers "
            "have read them, or this one before it was started again. initial_epoch=%d goes on "
            "behind the epochs that are over; another training needs another job_name",
            epoch - 1, (self._job_name or "").removeprefix(f"dataset_id=/{self.dataset_id}/"), over,
        )  # fmt: skip

    def _next_epoch(self) -> int:
        try:
            return heapq.heappop(self._not_joined)
        except IndexError:
            return next(self._epochs)

    def _require_same_elements(
        self, dispatcher: DispatcherClient, dataset_id: str, asked: _Asked
    ) -> Generator[Block, None, None]:
        definitions = []
        for each in (self.dataset_id, dataset_id):
            answer = yield from asked(partial(_dataset, dispatcher, each))
            definitions.append(answer.definition)
        mine, theirs = definitions
        if self.options.ordered is not None and (
            content_fingerprint(mine) != content_fingerprint(theirs)
        ):
            raise FailedPrecondition(
                f"the job {self._job_name!r} reads dataset {dataset_id}, which is another one than "
                f"dataset {self.dataset_id}, and a position in order holds for one of them only: "
                "give the job another name, or the same pipeline to all that share it"
            )
        if _arriving(mine) != _arriving(theirs):
            raise InvalidArgument(
                f"the job {self._job_name!r} is of dataset {dataset_id}, whose elements have "
                f"another element_spec or compression than those of dataset {self.dataset_id}: "
                "give the job another name, or the same pipeline to all that share it"
            )

    def _answered(
        self,
        dispatcher: DispatcherClient,
        nothing: Block | None,
        taker: Taker | None,
        ask: Callable[..., Any],
    ) -> Generator[Block, None, Any]:
        """Retries `ask` until a dispatcher answers, and returns the answer. Yields `nothing`, if
        given, after each attempt. Raises _ToStop."""
        asked = False
        waits = False
        begun_s = time.monotonic()
        while True:
            try:
                return ask(patience_s=ASK_AGAIN_S, again=asked)
            except AlreadyExists as error:  # a consumer that was just killed counts as there
                if time.monotonic() >= max(begun_s, dispatcher.failed_s) + GROUP_S:
                    raise
                if not waits:
                    log.warning("cannot begin to read dataset %s yet: %s", self.dataset_id, error)
                waits = True
                asked = False
                time.sleep(ASK_GROUP_S)
            except Unavailable as error:
                if not asked:
                    log.warning("cannot begin to read dataset %s yet: %s", self.dataset_id, error)
                asked = True
                if nothing is not None:
                    yield nothing
            if stopping.is_set() or (taker is not None and taker.is_left):
                raise _ToStop


class _ToStop(Exception):
    """The iteration must end before it has begun: this process stops, or a thread has closed it."""


def _dataset(
    dispatcher: DispatcherClient, dataset_id: str, *, patience_s: float | None, again: bool
) -> pb.GetDatasetResponse:
    return dispatcher.get_dataset(dataset_id, with_graph=False, patience_s=patience_s)


def name_of_job(dataset_id: str, job_name: str | None) -> str | None:
    """The whole name of a job that readers of a dataset id share, as tf.data service's clients
    build it."""
    return f"dataset_id=/{dataset_id}/{job_name}" if job_name else None


def _arriving(definition: ev.DatasetDefinition) -> tuple[bytes, bool]:
    """The format of elements: their spec, and whether each is compressed."""
    spec = metadata_of(definition.metadata).element_spec
    return spec, not definition.structure and compresses(definition)


def structure_of(dataset_id: str, definition: ev.DatasetDefinition) -> str:
    """How the elements are nested. Raises InvalidArgument if only TensorFlow can decode that."""
    if not definition.structure:
        raise InvalidArgument(
            f"dataset {dataset_id} was registered by tf.data service's client, which "
            "says how its elements are nested to TensorFlow only: register it with "
            "forebay.service.register_dataset, or read it with from_dataset_id"
        )
    return definition.structure


class ElementIterator(EpochIterator):
    """Iterates over the elements of one epoch; made by `read`. Threads that share it take turns.

    Elements are nested as they were registered: NumPy arrays and scalars (bytes for strings) in
    dicts, tuples and named tuples. Ragged and sparse tensors are named tuples of their parts
    (service/structure.py). Arrays are views of the received block: copy arrays that you keep for
    long. Arrays from a worker in this process are read-only, because its pipeline owns them.
    Raises PipelineError when the pipeline fails.
    """

    def __init__(
        self, reader: Reader, batch_size: int | None = None, *, drop_remainder: bool = False
    ) -> None:
        """An ordered read has its own `batch_size`."""
        layout = Layout(structure_of(reader.dataset_id, reader.definition()))
        give = partial(
            laid_out, layout=layout, batch_size=batch_size, drop_remainder=drop_remainder
        )
        super().__init__(lambda taker: reader.iterate(taker=taker), give)


class OrderedIterator(ElementIterator):
    """The elements or batches of an ordered read, to the end of its epoch; made by `read`.

    `state_dict` is the position behind what was given: save it with the model. Another iterator
    that loads it goes on there, with any number of consumers and workers. Behind an epoch's last
    element, but before its end was asked for, that is the empty rest of the epoch.
    """

    def __init__(self, reader: Reader) -> None:
        assert reader.options.ordered is not None
        super().__init__(reader, reader.options.ordered.batch_size)
        self._ordered = reader.options.ordered

    def __next__(self) -> Any:
        try:
            item = super().__next__()
        except StopIteration:
            self._ordered.finish()
            raise
        self._ordered.given += 1
        return item

    @property
    def position(self) -> int:
        """Elements of the training, over all consumers and epochs, before what comes next."""
        return self._ordered.position()

    def state_dict(self) -> dict[str, Any]:
        """The position as JSON of under 300 bytes, always with the same keys."""
        return state_of(self._ordered)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on at the state's position. Call it before the first element.

        Raises InvalidArgument for what is no state, and FailedPrecondition for the state of another
        dataset, order or global batch, or if elements were given.
        """
        if self._ordered.epoch is not None:
            raise FailedPrecondition(
                "load_state_dict() after the first element was asked for: call it on a new iterator"
            )
        load(self._ordered, state)


def read(
    service: str | tuple[str, str],
    dataset_id: str,
    *,
    processing_mode: ShardingPolicy | str = ShardingPolicy.OFF,
    **options: Unpack[ReadArguments],
) -> ElementIterator:
    """Read one epoch of a registered dataset, without TensorFlow.

    Args:
      service: "grpc://host:port", "host:port", a (protocol, address) pair, or several
        addresses, comma-separated.
      dataset_id: what `register_dataset` returned.
      processing_mode, consumer_index, num_consumers: as in `from_dataset_id`.
      max_outstanding_requests, data_transfer_protocol: as in `from_dataset_id`.
      cross_trainer_cache, target_workers: as in `from_dataset_id`.
      job_name: readers with the same name share one job. Each element goes to one of them, or
        with `cross_trainer_cache` to each trainer.
      initial_epoch: how many epochs of a named job are over. The next epoch is read, or the rest
        of it. By default the first epoch is read.
      batch_size: elements in a batch, which has one more dimension in front. By default elements
        come one by one. Batches are made here, of the elements that this reader gets; the last one
        may be smaller. A component whose shape was not registered in full is a list of arrays. Not
        with delivery="at_least_once".
      drop_remainder: leave out the last, smaller batch; of an ordered read, the last, smaller
        global batch of each epoch.
      ordered: read in one global order, dealt to the consumers in batches; an OrderedIterator.
        `consumer_index` and `num_consumers` say which batches are this consumer's: step s is the
        num_consumers batches of the order from s * num_consumers on.
      delivery: "at_most_once", or "at_least_once", not with `ordered`: no element is missing. If a
        trainer dies, others get again what it received after its last report; trainers report every
        second. It takes `seed`, `shuffle`, `bundle_splits` and `within_bundles`.
      seed, shuffle, cycle_length, block_length, bundle_splits: the order depends on these alone.
        `seed` is 0 by default. `shuffle` is True: each epoch has its own permutation of the
        bundles. `cycle_length` and `block_length` (1) are those of tf.data's `interleave`:
        `cycle_length` bundles are open, by default 16, or of a mixture 16 divided by its sources.
        The dispatcher chooses `bundle_splits`.
      within_bundles: read a dataset whose nodes count elements (`skip`, `take`, `scan` …), each
        bundle by itself.
      add_source: of a mixture, elements come in pairs (element, source): the source's name, as
        bytes; with `batch_size`, an array of them.
      start_position, start_step: where an ordered read begins, in elements over all epochs, or in
        global batches.

    Returns an iterator of elements, which is a context manager too. Raises ValueError for invalid
    arguments, and NotFound for an unknown dataset or static sharding without a list of workers.
    Raises Unimplemented, with the reason, for a dataset that processing_mode cannot split among
    workers.
    """
    batch_size, drop_remainder = take_batches(options)
    if batch_size is None and drop_remainder:
        raise InvalidArgument("drop_remainder=True is about batches: give batch_size, or leave it")
    read_as = read_options(processing_mode, **options)
    reader = Reader(service, dataset_id, name_of_job(dataset_id, read_as.shared_name), read_as)
    if read_as.ordered is not None:
        return OrderedIterator(reader)
    return ElementIterator(reader, batch_size, drop_remainder=drop_remainder)
