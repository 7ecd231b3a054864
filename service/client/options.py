"""Names and checks that clients share with tf.data service, without importing TensorFlow."""

from __future__ import annotations

import enum
import logging
from dataclasses import dataclass
from typing import Any

from ..connections.protocols import LOCAL, transfer_protocol
from ..delivery import AnyBlock, Cached, Order, Skips
from ..errors import InvalidArgument
from ..pipelines.splits import SHARD_HINT

log = logging.getLogger(__name__)

__all__ = ["SHARD_HINT", "CrossTrainerCache", "ShardingPolicy"]


class ShardingPolicy(enum.IntEnum):
    """How the dataset is divided among workers; the values are tf.data service's."""

    OFF = 0  # every worker produces the whole dataset
    DYNAMIC = 1  # workers lease splits as they need them: no element twice
    # Each of a fixed list of workers produces the part of its place, and once more if restarted.
    FILE = 2  # its share of the files
    DATA = 3  # its share of the elements
    FILE_OR_DATA = 4  # by FILE, or by DATA if the dataset reads no files
    HINT = 5  # its share of what comes to shard(SHARD_HINT, …)


class CrossTrainerCache:
    """Has a trainer read through a cache, which it shares with others that read the same job.

    Each element is produced once, and read by every trainer: by one of the readers that give the
    same `trainer_id`, and at most once. The fastest trainer drives the production. A worker keeps
    a window of what it has produced last (`WorkerConfig.cross_trainer_cache_size_bytes`): a new
    trainer begins with the oldest element there, and one that is slower than the window is long
    skips what has left it, which is said in the log, and counted in `skipped`.

    A trainer that is restarted goes on, under the same `trainer_id`, behind what workers had sent
    it; what was on its way is lost, like what it had received and not used. A restart of the
    dispatcher changes nothing. With a worker its cache is lost, and what it had begun; what comes
    in its place is new, for all trainers: under OFF, another copy of the dataset from its start.
    The cache of a job that nobody has read for the dispatcher's `job_gc_timeout_ms`
    (`dynamic_gc_timeout_ms` under DYNAMIC) is let go.

    Raises ValueError if `trainer_id` is empty.
    """

    def __init__(self, trainer_id: str) -> None:
        self.order = Cached(trainer_id)
        self.trainer_id = trainer_id
        self._skips = Skips()

    @property
    def skipped(self) -> int:
        """How many elements those who read with this object have not got so far, on all workers:
        they had left the cache before this trainer came to them.
        """
        return self._skips.elements

    def skip(self, elements: int) -> None:
        """So many more."""
        if self._skips.add(elements):
            log.warning(
                "trainer %r has skipped %d elements so far, which had left the cross-trainer "
                "cache: others are faster; a larger cross_trainer_cache_size_bytes of the workers "
                "lets them be further ahead", self.trainer_id, self.skipped,
            )  # fmt: skip


def sharding_policy(processing_mode: ShardingPolicy | str | int) -> ShardingPolicy:
    """The policy that a processing mode names. Raises ValueError for what names none.

    tf.data service's own `ShardingPolicy` members are taken as well.
    """
    if processing_mode == "parallel_epochs":
        return ShardingPolicy.OFF
    if processing_mode == "distributed_epoch":
        return ShardingPolicy.DYNAMIC
    if isinstance(processing_mode, enum.IntEnum):
        return ShardingPolicy(processing_mode.value)
    raise InvalidArgument(
        "tf.data service processing mode should be a "
        "`tf.data.experimental.service.ShardingPolicy`, "
        '`"parallel_epochs"`, or `"distributed_epoch"`. Got '
        f"{processing_mode!r}."
    )


def check_job_name(job_name: str | None) -> None:
    """Raises ValueError for a job name that is no non-empty string."""
    if job_name is None:
        return
    if not isinstance(job_name, str):
        raise InvalidArgument(
            "`job_name` must be a string, but `job_name` was of type "
            f"{type(job_name)}. job_name={job_name}"
        )
    if not job_name:
        raise InvalidArgument("`job_name` must not be empty")


def check_initial_epoch(initial_epoch: int, job_name: str | None, *, cached: bool) -> None:
    """Raises ValueError for what is no number of epochs, or those of a job without a name, or with
    a cache, which has but one."""
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
    """Which workers are read from; the values are TensorFlow's."""

    AUTO = 1  # all, but those that are tagged COLOCATED and in another process
    ANY = 2
    LOCAL = 3  # those in this process


@dataclass(frozen=True)
class ReadOptions:
    """How a consumer reads."""

    protocol: str | None = None  # of connections/protocols.py; None: the best that there is
    max_elements: int | None = None  # at a time on the way here, and here; None: any number
    targets: TargetWorkers = TargetWorkers.AUTO
    consumer_index: int = 0  # of the consumers of a coordinated read
    num_consumers: int | None = None  # None: it is none
    cache: CrossTrainerCache | None = None
    dynamic: bool = False  # whether tasks share splits, so that what one loses another makes
    hands_back: bool = False  # whether others are to get what this one does not take

    @property
    def order(self) -> Order:
        """What is asked of each task."""
        return AnyBlock(self.hands_back) if self.cache is None else self.cache.order


AS_EVER = ReadOptions()


def reading(
    *,
    job_name: str | None = None,
    consumer_index: int | None = None,
    num_consumers: int | None = None,
    max_outstanding_requests: int | None = None,
    data_transfer_protocol: str | None = None,
    cross_trainer_cache: CrossTrainerCache | None = None,
    target_workers: str = "AUTO",
) -> ReadOptions:
    """What these arguments of tf.data service's ask for.

    Raises ValueError for arguments that make no sense, Unimplemented for a later version's.
    """
    if (consumer_index is None) != (num_consumers is None):
        raise InvalidArgument(
            "Must either set both `consumer_index` and `num_consumers`, or neither. "
            f"consumer_index={consumer_index}, num_consumers={num_consumers}"
        )
    if num_consumers is not None:
        if job_name is None:
            raise InvalidArgument(
                "`job_name` must be set when setting `num_consumers`. num_consumers was set to "
                f"{num_consumers}."
            )
        if not (isinstance(num_consumers, int) and num_consumers > 0):
            raise InvalidArgument(f"num_consumers={num_consumers!r} must be a positive integer")
        if not (isinstance(consumer_index, int) and 0 <= consumer_index < num_consumers):
            raise InvalidArgument(
                f"consumer_index={consumer_index!r} must be from 0 to {num_consumers - 1}, as "
                f"num_consumers={num_consumers}"
            )
    if max_outstanding_requests is not None and not (
        isinstance(max_outstanding_requests, int) and max_outstanding_requests > 0
    ):
        raise InvalidArgument(
            f"max_outstanding_requests={max_outstanding_requests!r} must be a positive integer"
        )
    cache = _cache(cross_trainer_cache)
    if cache is not None and num_consumers is not None:
        raise InvalidArgument(
            "Cross-trainer caching does not support coordinated reads. Got number of coordinated "
            f"consumers: {num_consumers}"
        )
    protocol = transfer_protocol(data_transfer_protocol)
    if cache is not None and protocol == LOCAL:
        raise InvalidArgument(
            f"data_transfer_protocol={data_transfer_protocol!r} hands over what the cache keeps "
            "for other trainers: leave it out, and each gets memory of its own"
        )
    if str(target_workers).upper() not in TargetWorkers.__members__:
        raise InvalidArgument(
            f"target_workers={target_workers!r} must be one of {list(TargetWorkers.__members__)}"
        )
    return ReadOptions(
        protocol=protocol,
        max_elements=max_outstanding_requests,
        targets=TargetWorkers[str(target_workers).upper()],
        cache=cache,
        consumer_index=consumer_index or 0,
        num_consumers=num_consumers,
    )


def _cache(given: Any) -> CrossTrainerCache | None:
    """tf.data service's own `CrossTrainerCache` is taken as well."""
    if given is None or isinstance(given, CrossTrainerCache):
        return given
    if not hasattr(given, "trainer_id"):
        raise InvalidArgument(
            f"`cross_trainer_cache` must be a CrossTrainerCache, not {type(given)}"
        )
    return CrossTrainerCache(given.trainer_id)
