"""`register_dataset`, `from_dataset_id` and `distribute`, as in tf.data service.

Names, argument order, defaults and errors follow `tf.data.experimental.service` of TensorFlow 2.21
(its API documentation). To migrate, a program changes only the import.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from functools import partial
from typing import Any, Unpack

import numpy as np
import tensorflow as tf

from ..errors import InvalidArgument
from ..pipelines.kinds.graphs import serialized
from ..pipelines.tf_data.element_specs import check_element_spec, decode_metadata, plain
from . import lockstep, parameter_servers
from .options import (
    AT_LEAST_ONCE,
    IN_LOCKSTEP,
    CrossTrainerCache,
    OrderArguments,
    ReadArguments,
    ReadOptions,
    ShardingPolicy,
    read_options,
    refuse_at_least_once,
)
from .positions import OrderedRead
from .reader import Reader, name_of_job
from .registration import (
    COMPRESSIONS,
    Service,
    check_compression,
    checked,
    definition_of,
    registered,
    require_id,
)
from .tf_elements import NOTHING, dataset_of_blocks, number_of
from .tf_errors import raising_tensorflows
from .tf_position import take_position

Dataset = Any


class DatasetId(str):
    """The id of a registered dataset: a string that also has what callers of tf.data service ask
    its string tensor for. It is pickled as a plain string."""

    __slots__ = ()

    def numpy(self) -> bytes:
        return self.encode()

    @property
    def dtype(self) -> tf.DType:
        return tf.string

    @property
    def shape(self) -> tf.TensorShape:
        return tf.TensorShape([])

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        return str, (str(self),)


@plain
@raising_tensorflows()
def register_dataset(
    service: Service,
    dataset: Dataset,
    compression: str | None = "AUTO",
    dataset_id: str | None = None,
    *,
    splits: Any = None,
    verify: bool = False,
    **python: Any,
) -> str:
    """Register a dataset with the service and return its id, which `from_dataset_id` takes.

    Args:
      service: "grpc://host:port", "host:port", a (protocol, address) pair, or several
        addresses, comma-separated.
      dataset: one of these.

        - A `tf.data.Dataset`. Its graph is registered. Python functions in it (`py_function`,
          `from_generator`) do not work on workers.
        - A Python dataset: a function with `splits`, or one that `python_dataset` decorates.
        - A PCollection of a Beam pipeline that was built and not run: bounded reads with ParDos
          behind them. Each process of a worker calls `setup` once. Each split is a bundle.
        - The directory, as workers see it, that `materialize` wrote.

      compression: "AUTO" compresses blocks between hosts where they arrive sooner that way. None
        never compresses. "ZSTD" and "LZ4" compress on every connection over TCP or gRPC. "SNAPPY"
        compresses each element, for tf.data service's own clients.
      splits: of a function. A function with splits, and a PCollection, also take the keyword
        arguments of `python_dataset`. A PCollection of bounded sources, or of files for a
        ReadAllFrom…, also takes `split_bytes`, the approximate size of a split. TFRecord and
        compressed files cannot be divided. By default Beam chooses the size.
      verify: read a whole directory and check its checksums before registering it.
      dataset_id: the id to register under. An id that exists keeps its dataset if both have the
        same structure. If they differ otherwise, a warning says how, and that the old dataset is
        read. By default, equal datasets get the same id. Functions are equal if their pickles are
        equal. Give an id to functions that hold anything that differs by process.

    The id is a `str`, which also has the `numpy()`, `dtype` and `shape` of a string tensor, as
    callers of tf.data service use it. Within a `tf.function`, or a function of a dataset, each run
    registers the dataset. The id is a scalar string tensor then, and the addresses may be tensors.

    Raises ValueError (another structure under the same id, element types that cannot be sent,
    invalid arguments) and Unavailable. A directory also raises NotFound, FailedPrecondition if it
    is incomplete, and Corrupt, which names the missing or damaged shard. All of them are errors of
    `tf.errors` too.
    """
    check_compression(compression)
    if isinstance(dataset, str | os.PathLike) and isinstance(service, tf.data.Dataset):
        raise InvalidArgument(
            f"`service` is {service!r:.100}: the dispatcher's address comes before the dataset"
        )
    dataset = checked(dataset, splits, verify, python)
    require_id(dataset_id)
    if isinstance(dataset, tf.data.Dataset) and not tf.executing_eagerly():
        return _registered_in_graph(service, dataset, compression, dataset_id)
    request = definition_of(dataset, compression, verify=verify)
    return DatasetId(registered(service, request, dataset_id))


def _registered_in_graph(
    service: Service, dataset: Dataset, compression: str | None, dataset_id: str | None
) -> str:
    """The id, as a tensor: each run of the function registers the dataset."""
    if parameter_servers.are_there():
        address = parameter_servers.one_address(service)
        named: str = parameter_servers.theirs.register_dataset(
            address, dataset, parameter_servers.of_elements(compression), dataset_id
        )
        return named
    graph, cardinality, defined = serialized(dataset, compressed=compression == "SNAPPY")
    protocol, address = service if isinstance(service, tuple) else ("", service)

    def run(graph: bytes, cardinality: int, protocol: bytes, address: bytes) -> bytes:
        where = address.decode()
        request = defined(graph, int(cardinality))
        request.compression = COMPRESSIONS[compression]
        at = (protocol.decode(), where) if protocol else where
        return registered(at, request, dataset_id).encode()

    found: str = tf.ensure_shape(  # callers may treat the tensor as a string
        tf.numpy_function(run, [graph, cardinality, protocol, address], tf.string), []
    )
    return found


@plain
@raising_tensorflows()
def from_dataset_id(
    processing_mode: ShardingPolicy | str,
    service: Service,
    dataset_id: str,
    element_spec: Any = None,
    job_name: str | None = None,
    consumer_index: int | None = None,
    num_consumers: int | None = None,
    max_outstanding_requests: int | None = None,
    data_transfer_protocol: str | None = None,
    cross_trainer_cache: CrossTrainerCache | None = None,
    target_workers: str = "AUTO",
    *,
    add_position: bool = False,
    **options: Unpack[OrderArguments],
) -> Dataset:
    """A `tf.data.Dataset` that reads a registered dataset through the service.

    Args:
      processing_mode: a `ShardingPolicy`, "parallel_epochs" (OFF: each worker produces the
        whole dataset) or "distributed_epoch" (DYNAMIC: each split goes to one worker). FILE, DATA,
        FILE_OR_DATA and HINT divide the dataset among the dispatcher's fixed list of workers
        (`DispatcherConfig.worker_addresses`). Each shard is read to its end at least once. A
        restarted worker produces its shard from the start again. As in tf.data service, each
        worker orders the elements before it takes its share. If the order is random, elements
        arrive twice or never. So seed `shuffle`, `list_files` and `sample_from_datasets` before
        the point of division, and leave `deterministic=False` out there.
      service: as in `register_dataset`.
      dataset_id: what `register_dataset` returned. It may be a tensor of a `tf.function` if
        `element_spec` is given. The dataset's cardinality is unknown then.
      element_spec: of the registered dataset; by default the dispatcher is asked. Nesting and
        dtypes must equal the dataset's. Shapes may be less specific, or more specific if true.
      job_name: trainers that give the same name share one job. Each element goes to one of
        them. Each iteration over the returned dataset is the job's next epoch. Without a
        name, each iteration is a job of its own. The dataset of a named job has
        `AutoShardPolicy.OFF`, so that `tf.distribute` does not shard it again.
      consumer_index, num_consumers: a coordinated read of an infinite dataset, with a job_name.
        In each step, all `num_consumers` consumers, numbered from 0, read the same round of the
        same worker. A round is `num_consumers` consecutive elements, such as batches of one
        bucket. Give both arguments or neither.
      max_outstanding_requests: the maximum number of elements on their way to this reader or
        buffered in it, over all workers, and at least one per worker. By default, and with
        `tf.data.AUTOTUNE`, only their bytes are bounded.
      data_transfer_protocol: "local" (a worker in this process), "unix" (on this host), "tcp"
        or "grpc" (where only HTTP/2 passes). "AUTO" and None take the best one that reaches
        each worker.
      cross_trainer_cache: a `CrossTrainerCache` with this trainer's id, or tf.data service's own.
        Every trainer of the job reads all elements, and workers produce them once. The job needs a
        name. The dataset must be infinite, and can be iterated over once.
      target_workers: "ANY"; "LOCAL", workers in this process only; or "AUTO", all workers except
        those that are tagged COLOCATED and in another process. If the dispatcher's deployment_mode
        is COLOCATED, "AUTO" reads static shards like "LOCAL". Under DYNAMIC, a worker without
        readers takes no splits. Each static shard needs a reader. All readers of a job must give
        the same value.
      initial_epoch: how many epochs of a named job are over, for trainers that resume from a
        checkpoint. The first iteration is the next epoch, or the rest of it. If that epoch is over,
        the iteration is empty, as in tf.data service, and a warning says so. Not allowed with a
        cache, and of little use to a coordinated read: an infinite dataset has only one epoch.
      **options: as in `read`: `ordered`, with `batch_size` only in such a read, and
        `delivery="at_least_once"`, for which elements count as given once they are in this dataset.
      add_position: of an ordered read. Elements come in pairs (element, position): int64, the
        position behind the element's batch, or behind its step over all consumers. It goes through
        prefetch with the element. Save that of the last element that was used, for start_position.
        An `OrderedPosition` as start_position lets `tf.train.Checkpoint` save it.

    Each iteration over an ordered dataset that TensorFlow reads to its end is an epoch, and the
    next one is the next epoch. One that is left before begins again where it began, or at the
    `OrderedPosition`: what was fetched ahead may or may not have been used.

    Its cardinality is infinite or zero if the registered dataset's is. Otherwise it is unknown:
    others may share the job, and several workers may each produce the whole dataset.

    In a process that a `ParameterServerStrategy` connected to parameter servers, TensorFlow's own
    operations read, because its workers can run them. They take one address and their own protocol.

    Iterating survives restarts of the dispatcher, and new and dead workers. If the pipeline fails
    on a worker, an eager loop over this very dataset raises TensorFlow's error of the same code.
    For static sharding without a list of workers at the dispatcher, it raises NotFoundError. With
    further transformations, or in a graph, only INVALID_ARGUMENT, UNIMPLEMENTED and
    RESOURCE_EXHAUSTED keep their class. Other errors are UnknownError with the code in the message.

    Raises ValueError for invalid arguments, such as another dataset's element_spec, and NotFound
    for an unknown dataset. Raises Unimplemented, with the reason, for a dataset that
    processing_mode cannot split among workers. Each is an error of `tf.errors` too.
    """
    read = _Read(
        service,
        processing_mode,
        add_position,
        job_name=job_name,
        consumer_index=consumer_index,
        num_consumers=num_consumers,
        max_outstanding_requests=max_outstanding_requests,
        data_transfer_protocol=data_transfer_protocol,
        cross_trainer_cache=cross_trainer_cache,
        target_workers=target_workers,
        **options,
    )
    if parameter_servers.are_there():
        how = read.of_tensorflow()
        if element_spec is None and isinstance(dataset_id, str):  # TensorFlow's op needs it
            definition = read.reader(dataset_id).definition()
            element_spec = decode_metadata(definition).element_spec
        return parameter_servers.theirs.from_dataset_id(
            dataset_id=dataset_id, element_spec=element_spec, **how
        )
    return _read_as_dataset(read, dataset_id, element_spec)


class _Read:
    """How `from_dataset_id` or `distribute` reads. Raises InvalidArgument."""

    def __init__(
        self,
        service: Service,
        processing_mode: ShardingPolicy | str,
        add_position: bool,
        **arguments: Unpack[ReadArguments],
    ) -> None:
        self._service = service
        self.position = take_position(arguments, add_position=add_position)
        self.options = read_options(processing_mode, **arguments)
        ordered = self.options.ordered
        if ordered is not None:
            ordered.add_position = bool(add_position)
        elif add_position:
            raise InvalidArgument(
                "add_position=True: only an ordered read has positions; give ordered=True as well"
            )
        self.is_shared = self.options.job_name is not None or ordered is not None
        self.is_of_any_dataset = False  # the job's name alone identifies the job
        lockstep.warn_if_unshared(self.options.shared_name)

    def reader(self, dataset_id: str, options: ReadOptions | None = None) -> Reader:
        options = options or self.options
        name = options.job_name
        if name is None or not self.is_of_any_dataset:
            name = name_of_job(dataset_id, options.shared_name)
        return Reader(self._service, dataset_id, name, options)

    def of_tensorflow(self) -> dict[str, Any]:
        """The arguments by which TensorFlow's own operations read so. Raises InvalidArgument if
        they cannot."""
        if epoch := self.options.initial_epoch:
            raise InvalidArgument(
                f"initial_epoch={epoch}: beside parameter servers TensorFlow's own "
                "operations read, which begin with epoch 0; give each start a job_name of its own"
            )
        _require_no_order(self.options)
        return parameter_servers.arguments(self._service, self.options)


def _read_as_dataset(read: _Read, dataset_id: Any, element_spec: Any) -> Dataset:
    options = tf.data.Options()
    if read.is_shared:  # as in tf.data service: a shared job must not be sharded again
        options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    if tf.is_symbolic_tensor(dataset_id):
        _require_no_order(read.options)
        return _read_named_at_run_time(read, dataset_id, element_spec, options)
    dataset_id = _text(dataset_id)
    reader = read.reader(dataset_id)
    definition = reader.definition()
    metadata = decode_metadata(definition)
    if element_spec is None:
        element_spec = metadata.element_spec
    if element_spec is None:
        raise InvalidArgument(
            f"Failed to fetch element spec for dataset id {dataset_id} from tf.data service. If "
            "the dataset was registered in graph mode or inside a tf.function, the "
            "`element_spec` must be specified as an argument to `from_dataset_id`."
        )
    if metadata.element_spec is not None:
        check_element_spec(element_spec, metadata.element_spec)
    compressed = metadata.compressed and metadata.raw
    in_order = reader.options.ordered
    if in_order is not None and in_order.add_source:
        element_spec = element_spec, tf.TensorSpec([], tf.string)
    if in_order is not None and in_order.add_position:
        if compressed:
            raise InvalidArgument(
                f"add_position=True of dataset {dataset_id}, whose elements tf.data service's "
                "client compressed: leave it out, or register the dataset with forebay.service"
            )
        element_spec = element_spec, tf.TensorSpec([], tf.int64)
    blocks: Callable[[], Any] = partial(_blocks_of, reader)
    if in_order is not None:
        iterations = _InOrder(read, reader, in_order.copy())
        blocks = iterations.blocks
    dataset = dataset_of_blocks(
        blocks,
        element_spec,
        compressed=compressed,
        cardinality=_cardinality(metadata.cardinality, read.options.policy),
        options=options,
    )
    if _is_in_lockstep(reader):
        dataset.may_repeat = partial(lockstep.may_repeat, reader.name)
    if in_order is None or in_order.batch_size is None:
        return dataset
    # The reader leaves out the remainder, and with it all batches are whole.
    dataset = dataset.batch(in_order.batch_size, drop_remainder=in_order.drop_remainder)
    if in_order.add_position:
        dataset = dataset.map(plain(lambda element, positions: (element, positions[0])))
    return dataset


class _InOrder:
    """The iterations of an ordered dataset. Each has a copy of how far the last one came, because
    TensorFlow may have several open."""

    def __init__(self, read: _Read, reader: Reader, ordered: OrderedRead) -> None:
        """It begins at the position, if there is one. Raises FailedPrecondition if that is one in
        another read."""
        self._read, self._reader, self._next = read, reader, ordered
        self._position = read.position
        self._goes_on = False  # the last iteration was read to its end
        if self._position is not None:
            self._position.begin(ordered)

    def blocks(self) -> Iterator[Any]:
        """Those of the next epoch, or the rest of it."""
        begins = self._next
        ordered = begins.copy()
        # Behind another epoch, the position may lag: `repeat` opens an epoch ahead of the training.
        if self._position is not None and not self._goes_on:
            self._position.begin(ordered)
        self._goes_on = False
        options = replace(self._reader.options, ordered=ordered)
        reader = self._read.reader(self._reader.dataset_id, options)
        with closing(_blocks_of(reader)) as blocks:
            elements = 0
            for block in blocks:
                if self._position is not None and ordered.epoch is not None:
                    self._position.describe(ordered)
                elements += block.count
                ordered.given = elements // (ordered.batch_size or 1)
                yield block
        if (epoch := ordered.epoch) is not None and epoch.complete:
            epoch.over = True
            if self._position is not None:
                self._position.describe(ordered)
            if self._next is begins:  # else another iteration has come as far
                self._next, self._goes_on = ordered, True


def _read_named_at_run_time(
    read: _Read, dataset_id: Any, element_spec: Any, options: Any
) -> Dataset:
    """The dataset whose id is a tensor, known only when the function runs."""
    if element_spec is None:
        raise InvalidArgument("`element_spec` must be given where `dataset_id` is a function's")
    numbers: dict[str, int] = {}  # of block sources of shared jobs, by dataset id

    def opener(reader: Reader) -> Callable[[], Any]:
        def open_blocks() -> Any:
            metadata = decode_metadata(reader.definition())
            if metadata.element_spec is not None:
                check_element_spec(element_spec, metadata.element_spec)
            if metadata.compressed and metadata.raw:
                raise InvalidArgument(
                    f"the elements of dataset {reader.dataset_id} are compressed by tf.data "
                    "service's client: give its id as a string, and not as a function's tensor"
                )
            return _blocks_of(reader)

        return open_blocks

    def number(dataset_id: bytes) -> np.int64:
        name = dataset_id.decode()
        if not read.is_shared:
            return np.int64(number_of(opener(read.reader(name)), kept=False))
        with _naming:
            if name not in numbers:  # kept: each iteration is the shared job's next epoch
                numbers[name] = number_of(opener(read.reader(name)), kept=True)
            return np.int64(numbers[name])

    found = tf.numpy_function(number, [dataset_id], tf.int64)
    found.set_shape([])
    return dataset_of_blocks(found, element_spec, options=options)


_naming = threading.Lock()


def _is_in_lockstep(reader: Reader) -> bool:
    return reader.options.num_consumers is None and lockstep.find_peers() is not None


def _blocks_of(reader: Reader) -> Any:
    """The blocks of the reader's next epoch, in lockstep if a group reads them."""
    if not _is_in_lockstep(reader):
        return reader.iterate(NOTHING)
    if reader.options.claimed is not None:
        refuse_at_least_once(AT_LEAST_ONCE, IN_LOCKSTEP)
    ordered = reader.options.ordered
    size = 1 if ordered is None else ordered.batch_size or 1
    return lockstep.blocks_of(partial(reader.iterate, NOTHING), reader.name, size)


@plain
@raising_tensorflows()
def distribute(
    processing_mode: ShardingPolicy | str,
    service: Service,
    job_name: str | None = None,
    consumer_index: int | None = None,
    num_consumers: int | None = None,
    max_outstanding_requests: int | None = None,
    data_transfer_protocol: str | None = None,
    compression: str | None = "AUTO",
    cross_trainer_cache: CrossTrainerCache | None = None,
    target_workers: str = "AUTO",
    *,
    add_position: bool = False,
    **options: Unpack[OrderArguments],
) -> Callable[[Dataset], Dataset]:
    """For `dataset.apply`: register the dataset, and read it through the service.

    The arguments are those of `register_dataset` and `from_dataset_id`, but `job_name` alone
    identifies the job. Readers that give the same name share it, whatever their datasets, and read
    the dataset that came first. Iterating raises ValueError if that one has another element_spec.
    Applying the result raises what `register_dataset` and `from_dataset_id` raise.
    """
    read = _Read(
        service,
        processing_mode,
        add_position,
        job_name=job_name,
        consumer_index=consumer_index,
        num_consumers=num_consumers,
        max_outstanding_requests=max_outstanding_requests,
        data_transfer_protocol=data_transfer_protocol,
        cross_trainer_cache=cross_trainer_cache,
        target_workers=target_workers,
        **options,
    )
    read.is_of_any_dataset = True

    @plain
    @raising_tensorflows()
    def apply(dataset: Dataset) -> Dataset:
        if parameter_servers.are_there():
            compressed = parameter_servers.of_elements(compression)
            theirs = parameter_servers.theirs
            return dataset.apply(theirs.distribute(compression=compressed, **read.of_tensorflow()))
        dataset_id = register_dataset(service, dataset, compression)
        return _read_as_dataset(read, dataset_id, dataset.element_spec)

    return apply


def _require_no_order(options: ReadOptions) -> None:
    """Raises InvalidArgument for a read in bundles."""
    if options.order is not None:
        asked = f"delivery={AT_LEAST_ONCE!r}" if options.ordered is None else "ordered=True"
        raise InvalidArgument(
            f"{asked} is not for a dataset_id that is a function's tensor, nor beside "
            "parameter servers, where TensorFlow's own operations read: give the id as a string, "
            "or train with another strategy"
        )


def _cardinality(registered: int, policy: ShardingPolicy) -> int:
    """The cardinality of one reader's dataset, as in tf.data service.

    For a dataset with a SHARD_HINT, which is -1, TensorFlow computes a wrong cardinality: infinite
    for range(2), empty for range(24) and a skip.
    """
    if policy == ShardingPolicy.HINT:
        return int(tf.data.UNKNOWN_CARDINALITY)
    unsharded = policy in (ShardingPolicy.OFF, ShardingPolicy.DYNAMIC, ShardingPolicy.DATA)
    if registered == 0 or (registered == tf.data.INFINITE_CARDINALITY and unsharded):
        return registered
    return int(tf.data.UNKNOWN_CARDINALITY)


def _text(dataset_id: Any) -> str:
    """The id as str; tf.data service's `register_dataset` returns a string tensor."""
    if tf.is_tensor(dataset_id):
        dataset_id = dataset_id.numpy()
    return dataset_id.decode() if isinstance(dataset_id, bytes) else str(dataset_id)
