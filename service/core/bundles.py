"""Bundles: what a job that is read in order, or at least once, has in place of leased splits.

A *bundle* is a fixed range of an epoch's splits. A job's *order* says how its bundles are read: in
one global order, or claimed one by one. The client computes where in an epoch a bundle stands, and
which worker runs it. The dispatcher completes the order when it creates the job: it chooses the
size and the number of the bundles.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import NamedTuple

from msgspec.structs import asdict

from ...journal.proto import events_pb2 as ev
from ...journal.splits import ENDLESS, grows, source_size
from ..errors import InvalidArgument, Unimplemented
from .state import BundleSpec, Dataset

MAX_BUNDLES = 1 << 20
"""The most bundles of an epoch: the state has a number for each, and so has every consumer."""

MAX_INTERLEAVED = 1 << 16

MIN_RANGE_BUNDLES, MAX_RANGE_BUNDLES = 64, 256
"""How many bundles an epoch of a range has by default, unless it is small: a split of a range is
one element."""

MIN_RANGE_BUNDLE = 64
"""How many splits of a range a bundle has at least by default, unless there were too few bundles:
each costs a worker some milliseconds."""

MAX_FILE_BUNDLES = 1024
"""The most bundles that an epoch of other sources has by default: a split may be a whole file."""


class Part(NamedTuple):
    """The bundles that a job has of one dataset: of its own, or of a source of its mixture."""

    dataset_id: str
    first: int  # the number of its first bundle, among those of an epoch of all parts
    bundles: int
    bundle_splits: int


def parts_of(dataset: Dataset, order: BundleSpec) -> list[Part]:
    """The job's parts, by the numbers of their bundles."""
    if not order.source_bundles:
        return [Part(dataset.dataset_id, 0, order.bundles, order.bundle_splits)]
    firsts = itertools.accumulate(order.source_bundles, initial=0)
    sources = dataset.outline.mixture.sources
    columns = (firsts, order.source_bundles, order.source_bundle_splits)
    return [Part(s.dataset_id, *row) for s, *row in zip(sources, *columns, strict=False)]


def complete_order(
    datasets: Mapping[str, Dataset], dataset: Dataset, asked: ev.OrderSpec
) -> ev.OrderSpec:
    """The order of a new job, with the size and the number of its bundles.

    Raises InvalidArgument, or Unimplemented for a dataset that has no bundles.
    """
    if not (sources := dataset.outline.mixture.sources):
        return _complete(dataset, asked)
    orders = [_complete(datasets[source.dataset_id], asked) for source in sources]
    order = ev.OrderSpec()
    order.CopyFrom(asked)
    order.source_bundles.extend(each.bundles for each in orders)
    order.source_bundle_splits.extend(each.bundle_splits for each in orders)
    if (bundles := sum(order.source_bundles)) > MAX_BUNDLES:
        splits = sum(splits_of(datasets[source.dataset_id]) for source in sources)
        raise InvalidArgument(
            f"the sources of mixture {dataset.dataset_id} have {bundles} bundles, and an ordered "
            f"read has at most {MAX_BUNDLES}: give "
            f"bundle_splits={-(-splits // (MAX_BUNDLES - len(sources)))} or more"
        )
    order.bundles = bundles
    return order


def _complete(dataset: Dataset, asked: ev.OrderSpec) -> ev.OrderSpec:
    for name in ("cycle_length", "block_length"):
        if not 1 <= (value := getattr(asked, name)) <= MAX_INTERLEAVED:
            raise InvalidArgument(f"{name}={value} must be from 1 to {MAX_INTERLEAVED}")
    if asked.bundle_splits < 0:
        raise InvalidArgument(
            f"bundle_splits={asked.bundle_splits} must be at least 1; or leave it out, and the "
            "dispatcher chooses"
        )
    splits = splits_of(dataset)
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


def splits_of(dataset: Dataset) -> int:
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
        least = min(MIN_RANGE_BUNDLE, -(-splits // MIN_RANGE_BUNDLES))
        return max(1, least, -(-splits // MAX_RANGE_BUNDLES))
    return max(1, -(-splits // MAX_FILE_BUNDLES))


def order_message(order: BundleSpec) -> ev.OrderSpec:
    """The order as events and messages have it."""
    return ev.OrderSpec(**asdict(order))


def is_same_order(order: BundleSpec | None, asked: ev.OrderSpec | None) -> bool:
    """Whether a job with this order is what a client asks for. `bundle_splits` 0 matches any."""
    if order is None or asked is None:
        return order is None and asked is None
    wanted = BundleSpec.of(asked)
    wanted.bundles, wanted.source_bundles = order.bundles, order.source_bundles
    wanted.source_bundle_splits = order.source_bundle_splits
    wanted.bundle_splits = wanted.bundle_splits or order.bundle_splits
    return wanted == order
