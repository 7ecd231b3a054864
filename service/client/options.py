"""Names and checks that clients share with tf.data service, without importing TensorFlow."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from ..connections.protocols import transfer_protocol
from ..errors import InvalidArgument, Unimplemented
from ..pipelines.splits import SHARD_HINT

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
    """Options of the cross-trainer cache. Raises ValueError if `trainer_id` is empty."""

    def __init__(self, trainer_id: str) -> None:
        if not trainer_id:
            raise InvalidArgument(
                "tf.data service cross-trainer cache requires a non-empty trainer ID."
            )
        self.trainer_id = trainer_id


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


AS_EVER = ReadOptions()


def reading(
    *,
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
    if max_outstanding_requests is not None and not (
        isinstance(max_outstanding_requests, int) and max_outstanding_requests > 0
    ):
        raise InvalidArgument(
            f"max_outstanding_requests={max_outstanding_requests!r} must be a positive integer"
        )
    for name, value in (
        ("num_consumers", num_consumers),
        ("cross_trainer_cache", cross_trainer_cache),
    ):
        if value is not None:
            raise Unimplemented(
                f"`{name}` is not in this version of Forebay's own client; leave it out, or read "
                "with tf.data service's client and workers, which work with this dispatcher"
            )
    if str(target_workers).upper() not in TargetWorkers.__members__:
        raise InvalidArgument(
            f"target_workers={target_workers!r} must be one of {list(TargetWorkers.__members__)}"
        )
    return ReadOptions(
        protocol=transfer_protocol(data_transfer_protocol),
        max_elements=max_outstanding_requests,
        targets=TargetWorkers[str(target_workers).upper()],
    )
