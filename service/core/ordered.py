"""Ordered reads: one global order of elements, dealt in batches to a group of consumers.

The order, the dealing, and which worker runs which bundle are the client's arithmetic. A *bundle*
is a fixed range of an epoch's splits. The dispatcher completes a job's order when it creates the
job, and checks who joins the group. The job has one iteration, which has all epochs.
"""

from __future__ import annotations

from collections.abc import Collection

from msgspec.structs import asdict

from ...journal.proto import events_pb2 as ev
from ...journal.splits import ENDLESS, grows, source_size
from ..errors import AlreadyExists, InvalidArgument, Unimplemented
from .state import Dataset, GroupMember, Iteration, Job, JobOrder, State

MAX_BUNDLES = 1 << 20
"""Of an epoch: the state has a number for each, and so has every consumer."""

MAX_INTERLEAVED = 1 << 16
MAX_CONSUMERS = 1 << 16

RANGE_BUNDLES, FEW_BUNDLES = 256, 64
"""The most bundles that an epoch of a range has by default, and the fewest unless it is small: a
split of a range is one element."""

RANGE_BUNDLE = 64
"""How many splits of a range a bundle has at least by default, unless there were too few bundles:
each costs a worker some milliseconds."""

FILE_BUNDLES = 1024
"""The same of other sources: one of their splits may be a whole file."""


def completed(dataset: Dataset, asked: ev.OrderSpec) -> ev.OrderSpec:
    """The order of a new job, with the size and the number of its bundles.

    Raises InvalidArgument, or Unimplemented for a dataset that has no bundles.
    """
    for name in ("cycle_length", "block_length"):
        if not 1 <= (value := getattr(asked, name)) <= MAX_INTERLEAVED:
            raise InvalidArgument(f"{name}={value} must be from 1 to {MAX_INTERLEAVED}")
    if asked.bundle_splits < 0:
        raise InvalidArgument(
            f"bundle_splits={asked.bundle_splits} must be at least 1; or leave it out, and the "
            "dispatcher chooses"
        )
    splits = _splits(dataset)
    bundle_splits = asked.bundle_splits or _bundle_splits(dataset, splits)
    bundles = -(-splits // bundle_splits)
    if bundles > MAX_BUNDLES:
        raise InvalidArgument(
            f"bundle_splits={bundle_splits} makes {bundles} bundles of the {splits} splits of "
            f"dataset {dataset.dataset_id}, and an epoch has at most {MAX_BUNDLES}: use "
            f"bundle_splits={-(-splits // MAX_BUNDLES)} or more"
        )
    order = ev.OrderSpec()
    order.CopyFrom(asked)
    order.bundle_splits, order.bundles = bundle_splits, bundles
    return order


def _splits(dataset: Dataset) -> int:
    """The number of splits of an epoch; of zipped sources, the shortest one's."""
    sources = dataset.outline.sources
    why = [dataset.outline.unsplittable, *(source.unleasable for source in sources)]
    why += [
        f"it is loaded from the distributed save at {source.saved_chunks.path}, whose chunks are "
        "found while it is read"
        for source in sources
        if grows(source)
    ]
    independent = sum(not source.HasField("leased_with") for source in sources)
    if independent != 1:
        why.append(f"it has {independent} sources of splits that are not zipped, and must have one")
    if reason := next(filter(None, why), None):
        raise Unimplemented(f"dataset {dataset.dataset_id} cannot be read in bundles: {reason}")
    splits = min(map(source_size, sources))
    if splits == ENDLESS:
        raise InvalidArgument(
            f"dataset {dataset.dataset_id} has no end, and cannot be read in bundles: use "
            "take(n), or remove repeat(): an ordered read, or one at least once, has epochs"
        )
    return splits


def _bundle_splits(dataset: Dataset, splits: int) -> int:
    """The default size of bundles."""
    is_range = all(source.HasField("arithmetic") for source in dataset.outline.sources)
    if is_range:
        least = min(RANGE_BUNDLE, -(-splits // FEW_BUNDLES))
        return max(1, least, -(-splits // RANGE_BUNDLES))
    return max(1, -(-splits // FILE_BUNDLES))


def order_of(spec: ev.OrderSpec) -> JobOrder:
    """As the state keeps it."""
    return JobOrder(**{field: getattr(spec, field) for field in JobOrder.__struct_fields__})


def order_spec(order: JobOrder) -> ev.OrderSpec:
    """As events and messages have it."""
    return ev.OrderSpec(**asdict(order))


def matches(order: JobOrder | None, asked: ev.OrderSpec | None) -> bool:
    """Whether a job with this order is what was asked for. `bundle_splits` 0 matches any."""
    if order is None or asked is None:
        return order is None and asked is None
    wanted = order_of(asked)
    wanted.bundles = order.bundles
    wanted.bundle_splits = wanted.bundle_splits or order.bundle_splits
    return wanted == order


def member_of(member: ev.GroupMember) -> GroupMember:
    """As the state keeps it."""
    return GroupMember(**{field: getattr(member, field) for field in GroupMember.__struct_fields__})


def check_member(job: Job, epoch: int, member: ev.GroupMember | None) -> None:
    """Raises InvalidArgument for a wrong member; an ordered job needs one, and others have none."""
    name = _name(job)
    if not job.is_ordered or member is None:
        if job.is_ordered:
            raise InvalidArgument(
                f"job {name} is read in order: say which consumer of which group joins, or use "
                "another job_name"
            )
        if member is not None:
            raise InvalidArgument(
                f"job {name} is not read in order: leave out consumer {member.index} of "
                f"{member.consumers}, or use another job_name"
            )
        return
    if epoch != 0:
        raise InvalidArgument(
            f"epoch {epoch} of job {name}: an ordered read has all its epochs in one iteration; "
            "join epoch 0"
        )
    if not 1 <= member.consumers <= MAX_CONSUMERS:
        raise InvalidArgument(
            f"a group of {member.consumers} consumers; it must have from 1 to {MAX_CONSUMERS}"
        )
    if not 0 <= member.index < member.consumers:
        raise InvalidArgument(
            f"consumer_index={member.index} is none of the {member.consumers} consumers of the "
            "group; the first one is 0"
        )
    for field in ("start_position", "batch_size"):
        if (value := getattr(member, field)) < 0:
            raise InvalidArgument(f"{field}={value} is negative; it is a number of elements")


def evicted(
    state: State, job: Job, iteration: Iteration, member: ev.GroupMember, gone: Collection[int]
) -> list[int]:
    """The gone consumers whose place in the group the new member takes.

    Raises AlreadyExists if a consumer of another group, or one with the same index, still reads.
    """
    found = []
    for consumer_id in sorted(iteration.consumers):
        other = state.consumers[consumer_id].member
        assert other is not None
        if other.consumers == member.consumers and other.index != member.index:
            continue
        if consumer_id not in gone:
            raise AlreadyExists(
                f"job {_name(job)} is being read by consumer {consumer_id}, which has "
                f"consumer_index={other.index} of a group of {other.consumers}, so consumer_index="
                f"{member.index} of {member.consumers} cannot join: wait until it is given up, "
                "give each consumer its own consumer_index, or use another job_name for another "
                "training"
            )
        found.append(consumer_id)
    return found


def _name(job: Job) -> str:
    return job.name or f"{job.job_id} (without a name)"
