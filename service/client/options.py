"""Names and checks that clients share with tf.data service, without importing TensorFlow."""

from __future__ import annotations

import difflib
import enum
import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, TypedDict, Unpack

import numpy as np

from ...journal.proto import events_pb2 as ev
from ..connections.protocols import LOCAL, transfer_protocol
from ..delivery import AnyBlock, Cached, ReadRequest, Skips
from ..errors import InvalidArgument
from ..pipelines.splits import SHARD_HINT
from ..shared import MapMemory
from .positions import ORDER, OrderedRead, check_index, checked, claimed_options, ordered_options

log = logging.getLogger(__name__)

AT_MOST_ONCE, AT_LEAST_ONCE = "at_most_once", "at_least_once"
"""Kinds of `delivery`."""

AUTOTUNE = -1
"""tf.data's value by which the caller leaves a number to the service."""

__all__ = ["SHARD_HINT", "CrossTrainerCache", "ShardingPolicy"]


class ShardingPolicy(enum.IntEnum):
    """How the dataset is divided among workers; the values are tf.data service's."""

    OFF = 0  # every worker produces the whole dataset
    DYNAMIC = 1  # workers lease splits as they need them: no element twice
    # Each of a fixed list of workers produces the share of its index, and again if restarted.
    FILE = 2  # a share of the files
    DATA = 3  # a share of the elements
    FILE_OR_DATA = 4  # by FILE, or by DATA if the dataset reads no files
    HINT = 5  # a share of the input of shard(SHARD_HINT, …)


class CrossTrainerCache:
    """A cache on the workers, through which all trainers of one job read.

    Workers produce each element once. Every trainer reads it at most once: readers that give the
    same `trainer_id` are one trainer. The fastest trainer drives the production. A worker caches
    the elements that it produced last (`WorkerConfig.cross_trainer_cache_size_bytes`). A new
    trainer starts with the oldest cached element. A trainer that falls behind skips the evicted
    elements; a warning reports them, and `skipped` counts them.

    A restarted trainer with the same `trainer_id` resumes behind what workers had sent it. Elements
    that were in flight, or received and not used, are lost. A restart of the dispatcher changes
    nothing. A lost worker's cache and unfinished work are lost. Its replacement produces new
    elements for all trainers: under OFF, another copy of the dataset from its start. The cache of a
    job is dropped once nobody has read the job for the dispatcher's `job_gc_timeout_ms`
    (`dynamic_gc_timeout_ms` under DYNAMIC).

    Raises ValueError if `trainer_id` is empty.
    """

    def __init__(self, trainer_id: str) -> None:
        self.read_request = Cached(trainer_id)
        self.trainer_id = trainer_id
        self._skips = Skips()

    @property
    def skipped(self) -> int:
        """How many elements this trainer missed so far, on all workers.

        They were evicted before the readers with this object reached them.
        """
        return self._skips.elements

    def skip(self, elements: int) -> None:
        """Counts skipped elements; logs a warning when the sum has about doubled."""
        if self._skips.add(elements):
            log.warning(
                "trainer %r has skipped %d elements so far, which had left the cross-trainer "
                "cache: others are faster; a larger cross_trainer_cache_size_bytes of the workers "
                "lets them be further ahead", self.trainer_id, self.skipped,
            )  # fmt: skip


def refuse_at_least_once(delivery: str | None, why: str) -> None:
    """Raises InvalidArgument for a read at least once."""
    if delivery == AT_LEAST_ONCE:
        raise InvalidArgument(
            f"delivery={AT_LEAST_ONCE!r} is not possible here: {why}; give ordered=True, which "
            "goes on exactly at the step that is restored, or read elements with service.read"
        )


def require_known(arguments: Mapping[str, Any], known: type[OrderArguments]) -> None:
    """Raises InvalidArgument for a name that is not among the known ones, with similar ones."""
    names = known.__annotations__
    if unknown := sorted(arguments.keys() - names.keys()):
        near = [match for name in unknown for match in difflib.get_close_matches(name, names, 1)]
        similar = f"; did you mean {', '.join(near)}?" if near else ""
        raise InvalidArgument(f"{', '.join(unknown)}: no such argument{similar}")


def refuse_consumer(arguments: Mapping[str, Any], why: str) -> None:
    """Raises InvalidArgument if the arguments say which consumer of how many reads."""
    for name in ("consumer_index", "num_consumers"):
        if name in arguments:
            raise InvalidArgument(f"{name}={arguments[name]!r}: leave it out, {why}")


IN_LOCKSTEP = (
    "these processes train in the same steps, so at an epoch's end one would wait for what the "
    "others have claimed, and they for its step"
)


def sharding_policy(processing_mode: ShardingPolicy | str | int) -> ShardingPolicy:
    """The policy that a processing mode names. Raises ValueError for an unknown mode.

    Accepts tf.data service's own `ShardingPolicy` members too.
    """
    if processing_mode == "parallel_epochs":
        return ShardingPolicy.OFF
    if processing_mode == "distributed_epoch":
        return ShardingPolicy.DYNAMIC
    if isinstance(processing_mode, enum.IntEnum):
        return ShardingPolicy(processing_mode.value)
    name = str(processing_mode).upper()
    hint = f" Give ShardingPolicy.{name}." if name in ShardingPolicy.__members__ else ""
    raise InvalidArgument(
        "tf.data service processing mode should be a "
        "`tf.data.experimental.service.ShardingPolicy`, "
        '`"parallel_epochs"`, or `"distributed_epoch"`. Got '
        f"{processing_mode!r}.{hint}"
    )


def check_job_name(job_name: str | None) -> None:
    """Raises ValueError for a job name that is empty or not a string."""
    if job_name is None:
        return
    if not isinstance(job_name, str):
        raise InvalidArgument(
            "`job_name` must be a string, but `job_name` was of type "
            f"{type(job_name)}. job_name={job_name}"
        )
    if not job_name:
        raise InvalidArgument("`job_name` must not be empty")


def _check_initial_epoch(initial_epoch: int, job_name: str | None, *, cached: bool) -> None:
    """Raises ValueError for an invalid number of epochs, and for one that isn't 0 without a job
    name or with a cache, which has only one epoch."""
    if isinstance(initial_epoch, bool) or not isinstance(initial_epoch, int) or initial_epoch < 0:
        raise InvalidArgument(f"initial_epoch={initial_epoch!r} must be an integer from 0 on")
    if initial_epoch and job_name is None:
        raise InvalidArgument(
            f"initial_epoch={initial_epoch} needs a job_name: without one, each iteration is a job "
            "of its own, which has no epochs before it"
        )
    if initial_epoch and cached:
        raise InvalidArgument(
            f"initial_epoch={initial_epoch} beside cross_trainer_cache: what is cached is one "
            "epoch without an end, so leave initial_epoch out"
        )


class TargetWorkers(enum.IntEnum):
    """Which workers a consumer reads from; the values are TensorFlow's."""

    AUTO = 1  # all except those that are tagged COLOCATED and in another process
    ANY = 2
    LOCAL = 3  # those in this process


@dataclass(frozen=True)
class ReadOptions:
    """How a consumer reads."""

    policy: ShardingPolicy = ShardingPolicy.OFF  # of a read in bundles always OFF
    job_name: str | None = None  # as the user gave it
    initial_epoch: int = 0  # so many epochs of the job are over before the first iteration
    protocol: str | None = None  # of connections/protocols.py; None: the best available
    max_elements: int | None = None  # in flight and buffered; None: unbounded
    targets: TargetWorkers = TargetWorkers.AUTO
    consumer_index: int = 0  # among the consumers of a coordinated read
    num_consumers: int | None = None  # None: not a coordinated read
    cache: CrossTrainerCache | None = None
    ordered: OrderedRead | None = None  # an ordered read; None: another one
    claimed: ev.OrderSpec | None = None  # of a read at least once; None: another one
    within_bundles: bool = False  # what counts elements may count within each bundle
    map_memory: MapMemory | None = None  # maps what workers share, as for Borrower

    @property
    def order(self) -> ev.OrderSpec | None:
        """Of a read in bundles, as a dispatcher is asked for it."""
        return self.claimed if self.ordered is None else self.ordered.spec

    @property
    def shared_name(self) -> str | None:
        """The job_name; a group that reads in order needs none."""
        return self.job_name or (None if self.ordered is None else self.ordered.group_name)

    @property
    def is_static(self) -> bool:
        return self.policy not in (ShardingPolicy.OFF, ShardingPolicy.DYNAMIC)

    @property
    def hands_back(self) -> bool:
        """Whether it tells workers what is taken, so that others get what is not."""
        others = self.num_consumers or self.cache or self.ordered or self.claimed
        return not (self.is_static or others)

    @property
    def read_request(self) -> ReadRequest:
        """The request that the consumer sends to each task."""
        return AnyBlock(self.hands_back) if self.cache is None else self.cache.read_request


DEFAULT_READ_OPTIONS = ReadOptions()


class OrderArguments(TypedDict, total=False):
    """Keyword arguments of every read, beside those of tf.data service. `read` describes them.

    All but `initial_epoch` are of reads in bundles; `batch_size` and `drop_remainder` are of all
    reads where the framework does not batch.
    """

    initial_epoch: int
    ordered: bool
    delivery: str
    seed: int
    shuffle: bool
    cycle_length: int
    block_length: int
    bundle_splits: int
    within_bundles: bool
    batch_size: int | None
    drop_remainder: bool
    start_position: Any  # an integer, or an object that keeps it
    start_step: int | None
    add_source: bool


class TrainingArguments(OrderArguments, total=False):
    """Those of a training's process, whose rank says which consumer it is."""

    job_name: str | None
    data_transfer_protocol: str | None
    target_workers: str


class ReadArguments(TrainingArguments, total=False):
    """All keyword arguments of `read` but processing_mode."""

    consumer_index: int | None
    num_consumers: int | None
    max_outstanding_requests: int | None
    cross_trainer_cache: CrossTrainerCache | None


def take_batches(arguments: OrderArguments) -> tuple[int | None, bool]:
    """The `batch_size`, and whether to drop the remainder. Takes them out of the arguments, unless
    it is a read in bundles, whose batches are part of its order. Raises InvalidArgument."""
    batch_size = arguments.get("batch_size")
    drop_remainder = arguments.get("drop_remainder", False)
    checked({"batch_size": batch_size})
    in_bundles = arguments.get("ordered") or arguments.get("delivery") == AT_LEAST_ONCE
    if batch_size is None or not in_bundles:
        arguments.pop("batch_size", None)
    if not drop_remainder or not in_bundles:
        arguments.pop("drop_remainder", None)
    return batch_size, drop_remainder


def read_options(
    processing_mode: ShardingPolicy | str = ShardingPolicy.OFF, **arguments: Unpack[ReadArguments]
) -> ReadOptions:
    """The options that these arguments of a read mean.

    Raises InvalidArgument, which names the argument that a mistyped one resembles, and
    Unimplemented for arguments of a later version.
    """
    require_known(arguments, ReadArguments)
    policy = sharding_policy(processing_mode)
    job_name = arguments.get("job_name")
    consumer_index, num_consumers = arguments.get("consumer_index"), arguments.get("num_consumers")
    max_outstanding_requests = arguments.get("max_outstanding_requests")
    data_transfer_protocol = arguments.get("data_transfer_protocol")
    cross_trainer_cache = arguments.get("cross_trainer_cache")
    target_workers = arguments.get("target_workers", TargetWorkers.AUTO.name)
    initial_epoch, ordered = arguments.get("initial_epoch", 0), arguments.get("ordered", False)
    delivery = arguments.get("delivery", AT_MOST_ONCE)
    order = {name: value for name, value in arguments.items() if name in ORDER}
    protocol, targets = transfer_protocol(data_transfer_protocol), _targets(target_workers)
    check_job_name(job_name)
    check_index(consumer_index, num_consumers)
    how = ReadOptions(
        policy=policy, job_name=job_name, initial_epoch=initial_epoch, protocol=protocol,
        targets=targets,
    )  # fmt: skip
    in_bundles = replace(
        how, policy=ShardingPolicy.OFF, within_bundles=bool(order.get("within_bundles"))
    )
    if delivery not in (AT_MOST_ONCE, AT_LEAST_ONCE):
        raise InvalidArgument(
            f"delivery={delivery!r} must be {AT_MOST_ONCE!r} or {AT_LEAST_ONCE!r}"
        )
    if delivery == AT_LEAST_ONCE:
        _check_in_bundles("a read at least once", policy, arguments)
        for name in ("ordered", "num_consumers"):
            if arguments.get(name):
                raise InvalidArgument(
                    f"{name}={arguments[name]} and delivery={AT_LEAST_ONCE!r}: give one of them. "
                    "An ordered read goes on exactly at the position that is restored; any number "
                    "of consumers that read at least once may come and go"
                )
        _check_initial_epoch(initial_epoch, job_name, cached=False)
        return replace(in_bundles, claimed=claimed_options(order))
    if not ordered and order:
        raise InvalidArgument(f"{', '.join(order)}: of an ordered read; give ordered=True as well")
    if ordered:
        _check_in_bundles("an ordered read", policy, arguments)
        if initial_epoch:
            raise InvalidArgument(
                f"an ordered read does not go with initial_epoch={initial_epoch}: give start_step "
                "or start_position instead"
            )
        return replace(in_bundles, ordered=ordered_options(order, consumer_index, num_consumers))
    if num_consumers is not None and job_name is None:
        raise InvalidArgument(
            "`job_name` must be set when setting `num_consumers`. num_consumers was set to "
            f"{num_consumers}."
        )
    bound: Any = max_outstanding_requests
    if bound == AUTOTUNE:
        bound = None
    if bound is not None and not (isinstance(bound, int | np.integer) and bound > 0):
        raise InvalidArgument(
            f"max_outstanding_requests={bound!r} must be a positive integer, or None or "
            "tf.data.AUTOTUNE for no bound but that of bytes"
        )
    cache = _cache(cross_trainer_cache)
    _check_initial_epoch(initial_epoch, job_name, cached=cache is not None)
    if cache is not None and num_consumers is not None:
        raise InvalidArgument(
            "Cross-trainer caching does not support coordinated reads. Got number of coordinated "
            f"consumers: {num_consumers}"
        )
    if cache is not None and protocol == LOCAL:
        raise InvalidArgument(
            f"data_transfer_protocol={data_transfer_protocol!r} hands over what the cache keeps "
            "for other trainers: leave it out, and each gets memory of its own"
        )
    return replace(
        how,
        max_elements=None if bound is None else int(bound),
        cache=cache,
        consumer_index=consumer_index or 0,
        num_consumers=num_consumers,
    )


def _check_in_bundles(read: str, policy: ShardingPolicy, arguments: ReadArguments) -> None:
    """Raises InvalidArgument for what a read in bundles does not go with."""
    bound = arguments.get("max_outstanding_requests")
    target_workers = arguments.get("target_workers")
    wrong = {
        f"processing_mode={policy.name}: give OFF or DYNAMIC, which mean the same for it": (
            policy not in (ShardingPolicy.OFF, ShardingPolicy.DYNAMIC)
        ),
        f"max_outstanding_requests={bound}: leave it out, as it asks for what comes next": (
            bound not in (None, AUTOTUNE)
        ),
        "cross_trainer_cache: leave it out; without a shared job_name each trainer reads all "
        "elements by itself": arguments.get("cross_trainer_cache") is not None,
        f"target_workers={target_workers!r}: leave it out, as any worker may have the next one": (
            str(target_workers).upper() == TargetWorkers.LOCAL.name
        ),
    }
    for what, is_given in wrong.items():
        if is_given:
            raise InvalidArgument(f"{read} does not go with {what}")


def _targets(given: str) -> TargetWorkers:
    if str(given).upper() not in TargetWorkers.__members__:
        raise InvalidArgument(
            f"target_workers={given!r} must be one of {list(TargetWorkers.__members__)}"
        )
    return TargetWorkers[str(given).upper()]


def _cache(given: Any) -> CrossTrainerCache | None:
    """Accepts tf.data service's own `CrossTrainerCache` too."""
    if given is None or isinstance(given, CrossTrainerCache):
        return given
    if not hasattr(given, "trainer_id"):
        raise InvalidArgument(
            f"`cross_trainer_cache` must be a CrossTrainerCache, not {type(given)}"
        )
    return CrossTrainerCache(given.trainer_id)
