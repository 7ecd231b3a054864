"""`materialize_pcollection`: writes the elements of a Beam pipeline with shuffles to files.

It extends the user's pipeline: it groups the elements' records by shard, and a ParDo writes each
shard. A record's shard, and its place there, follow from the record alone, so the runner's grouping
order does not matter.
"""

from __future__ import annotations

import hashlib
import os
import uuid
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import apache_beam as beam
import numpy as np
from apache_beam.transforms import trigger, window

from .. import structure
from ..errors import FailedPrecondition, InvalidArgument
from ..pipelines.python.columns import Flatten, Misfit, column_of, fields_of, read, write
from . import files
from .formats import WRITERS
from .layout import INDEX, PLAN, ComponentSpec, Plan, encode_index, read_plan, shards_among
from .materializing import (
    Materialized,
    check_format,
    check_shards,
    require_all,
    run_to_its_end,
)
from .new_shard import NewShard
from .records import Records, elements_of, names_of

DEFAULT_SHARDS = 16


def materialize_pcollection(
    pcollection: beam.PCollection,
    output: str | os.PathLike[str],
    *,
    element_spec: Any,
    format: str = "tfrecord",  # noqa: A002 - what all writers call it
    shards: int = DEFAULT_SHARDS,
) -> Materialized:
    """Run a Beam pipeline that was built but not run, and write its elements to files.
    `register_dataset` registers them like the files of `materialize`.

    This is for transforms that a Beam dataset on workers cannot have because they need a shuffle:
    GroupByKey, CoGroupByKey and combiners. The pipeline's own runner and options apply. A killed
    run must start again from the beginning.

    Args:
      pcollection: a bounded one; its whole pipeline runs. The pipeline must be deterministic, since
        a runner may run parts of it again. The elements of all its windows are written, without
        their windows and times.
      output: an empty or missing directory that no other run writes to, local or in a store that
        Beam knows. This process and the runner's workers must see it under this name.
      element_spec: of each element, as of a `tf.data.Dataset`: dense tensors of a known rank.
      format: as of `materialize`.
      shards: the number of files. An element's place follows from its contents. Each file's
        elements must fit into the memory of one of the runner's workers.

    Raises InvalidArgument, FailedPrecondition if the directory is not empty or another run writes
    to it, PipelineError with the runner's message, Unavailable.
    """
    directory = files.checked(output)
    check_format(format)
    check_shards(shards)
    if not isinstance(pcollection, beam.PCollection):
        raise InvalidArgument(f"{pcollection!r} is no PCollection, but {type(pcollection)}")
    if not pcollection.is_bounded:
        raise InvalidArgument(f"{pcollection!r} is unbounded: what is written to files has an end")
    plan = _plan(element_spec, format, shards)
    if files.listed(directory):
        raise FailedPrecondition(
            f"there is something in {directory}: what a pipeline computes with shuffles is written "
            "as a whole; delete the directory, if it is of a run that was killed, or give another"
        )
    writing = WriteByContents(directory, plan)
    _ = pcollection | f"forebay {writing.name}" >> writing
    files.make(directory)
    files.write(f"{directory}/{PLAN}", plan.encode(), replace=False)
    _require_own(directory, plan)
    run_to_its_end(pcollection.pipeline, "nothing is kept: delete the directory, and run it again")
    found, _ = shards_among(files.listed(directory), plan)
    there = {shard.number: shard for shard in reversed(found)}
    _require_own(directory, plan)  # a store may have let two runs begin at once
    require_all(directory, plan, there, "Delete the directory, and run it again")
    files.write(f"{directory}/{INDEX}", encode_index(plan, there.values()))
    kept = {shard.file for shard in there.values()}
    superseded = [shard.file for shard in found if shard.file not in kept]
    left_over = files.listed(directory, f"{files.TEMPORARY}{writing.name}")
    files.delete(f"{directory}/{name}" for name in (*superseded, *left_over))
    elements = sum(shard.elements for shard in there.values())
    size = sum(shard.bytes for shard in there.values())
    return Materialized(directory, elements, size, shards, shards)


def _require_own(directory: str, plan: Plan) -> None:
    """Raises FailedPrecondition if another run's plan is in the directory."""
    there = read_plan(directory)
    if there is None or there.fingerprint != plan.fingerprint:
        raise FailedPrecondition(
            f"another run writes to {directory}, or has deleted it: give each a directory of its "
            "own"
        )


def _plan(element_spec: Any, format: str, shards: int) -> Plan:  # noqa: A002
    """A unique plan, so that shards of different runs never mix. Raises InvalidArgument."""
    from ..pipelines.tf_data.element_specs import component_specs, encode_element_spec

    try:
        encoded = structure.encode(element_spec)
        fields, _ = fields_of(encoded)
        if not fields:
            raise ValueError("it has no tensor")
    except (ValueError, TypeError) as error:
        raise InvalidArgument(
            f"element_spec={element_spec!r} must be of dense tensors of a known rank, in dicts and "
            f"tuples: {error}"
        ) from error
    return Plan(
        dataset_id="",
        fingerprint=uuid.uuid4().hex,
        format=format,
        splits=shards,
        shards=shards,
        seed=0,
        structure=encoded,
        element_spec=encode_element_spec(element_spec),
        components=[
            ComponentSpec(name, component.dtype.name, component.shape.as_list())
            for name, component in zip(
                names_of(encoded), component_specs(element_spec), strict=True
            )
        ],
    )


class WriteByContents(beam.PTransform):  # type: ignore[misc]
    """Writes elements to a plan's shards, including empty shards."""

    def __init__(self, directory: str, plan: Plan) -> None:
        super().__init__()
        self._directory = directory
        self._plan = plan
        self.name = uuid.uuid4().hex[:8]  # the prefix of unpublished files

    def expand(self, elements: beam.PCollection) -> beam.PCollection:
        numbers = elements.pipeline | "shards" >> beam.Create([*range(self._plan.shards)])
        elements |= "without windows" >> beam.WindowInto(
            window.GlobalWindows(),
            trigger=trigger.DefaultTrigger(),
            accumulation_mode=trigger.AccumulationMode.DISCARDING,
        )
        grouped = {
            "records": elements | "records" >> beam.ParDo(_Encode(self._plan)),
            "shards": numbers | "all shards" >> beam.Map(lambda number: (number, None)),
        } | "by shard" >> beam.CoGroupByKey()
        return grouped | "write" >> beam.ParDo(_Write(self._directory, self._plan, self.name))


class _Encode(beam.DoFn):  # type: ignore[misc]
    """Maps an element to the number of its shard, and its record."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._flatten: Flatten | None = None

    def process(self, element: Any) -> Iterator[tuple[int, bytes]]:
        if self._flatten is None:
            self._fields, self._flatten = fields_of(self._plan.structure)
            self._records = Records(self._plan.components)
        leaves: list[Any] = []
        try:
            self._flatten(element, leaves)
            columns = [column_of(f, [leaf]) for f, leaf in zip(self._fields, leaves, strict=True)]
        except Misfit as misfit:
            raise ValueError(f"an element is not of element_spec: {misfit}") from None
        payload = np.empty(sum(column.size for column in columns), np.uint8)
        block = read(1, write(columns, payload), payload)
        (leaves,) = map(list, elements_of(block))
        record = self._records.encode(tuple(leaves))
        number = int.from_bytes(_digest(record)[:8], "little") % self._plan.shards
        yield number, record


class _Write(beam.DoFn):  # type: ignore[misc]
    def __init__(self, directory: str, plan: Plan, name: str) -> None:
        self._directory = directory
        self._plan = plan
        self._name = name
        self._written: set[int] = set()  # in this bundle

    def start_bundle(self) -> None:
        self._written.clear()

    def process(self, shard: tuple[int, Mapping[str, Iterable[Any]]]) -> None:
        number, grouped = shard
        if number in self._written:
            raise ValueError(
                f"the runner groups the elements of shard {number} more than once, and all "
                "groups but the first would be lost: report it, with the runner and its options"
            )
        self._written.add(number)
        there, _ = shards_among(
            files.listed(self._directory, self._plan.prefix(number)), self._plan
        )
        if there:  # from an earlier attempt
            return
        records = sorted(grouped["records"], key=lambda record: (_digest(record)[8:], record))
        new = NewShard(self._directory, self._name, self._plan, number)
        try:
            writer = WRITERS[self._plan.format](new.write, self._plan.components)
            writer.write_records(records)
            writer.close()
            new.publish(len(records))
        except BaseException:
            new.discard()
            raise


def _digest(record: bytes) -> bytes:
    return hashlib.sha256(record).digest()
