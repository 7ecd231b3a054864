"""`materialize`: a registered dataset's elements into files, by a Beam pipeline."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import apache_beam as beam
import google_crc32c
from apache_beam.options.pipeline_options import PipelineOptions
from apache_beam.runners.runner import PipelineState

from ...journal.splits import ENDLESS, source_size
from .. import pipelines, structure
from ..connections.dispatcher_client import DispatcherClient
from ..errors import (
    FailedPrecondition,
    ForebayError,
    InvalidArgument,
    PipelineError,
    Unimplemented,
)
from ..pipelines.definitions import (
    fingerprint,
    metadata_of,
    nondeterministic,
    require_bundles,
)
from ..pipelines.python.columns import fields_of
from ..pipelines.splits import SplitRange
from ..proto import forebay_pb2 as pb
from . import files
from .formats import WRITERS
from .layout import (
    DATASET,
    INDEX,
    PLAN,
    ComponentSpec,
    Plan,
    Shard,
    encode_index,
    is_intact,
    read_plan,
    shards_among,
)
from .opened import close_idle, enter
from .records import TYPES, names_of

log = logging.getLogger(__name__)

DEFAULT_SHARDS = 128
MAX_SHARDS = 99_999
UNLISTED = {"DaskRunner": "apache_beam.runners.dask.dask_runner.DaskRunner"}
"""Runners that Beam 2.77 knows by their full names only."""

FAILED = "failed to write shard "
"""What is looked for in a runner's message."""

PATIENCE_S = 60.0
"""How long a dispatcher is looked for."""


@dataclass(frozen=True)
class Materialized:
    """What a directory has once `materialize` is done."""

    directory: str
    elements: int
    bytes: int
    shards: int
    written: int  # of the shards, those that were missing or damaged


def materialize(
    service: str | tuple[str, str],
    dataset_id: str,
    output: str | os.PathLike[str],
    *,
    format: str = "tfrecord",  # noqa: A002 - what all writers call it
    shards: int | None = None,
    seed: int = 0,
    runner: str = "FnApiRunner",
    options: Sequence[str] = (),
    verify: bool = False,
) -> Materialized:
    """Write the elements of a registered dataset to files, to be registered in its place.

    The dataset's splits are divided into as many ranges as there are shards, and a Beam pipeline
    runs each, as a worker would. If there is something in `output` already, because an earlier
    run of the same was killed, only what is missing is done; equal runs write equal bytes.

    Args:
      service: as in `read`. The runner's workers need not reach it.
      dataset_id: what `register_dataset` returned.
      output: a directory, here or in a store that Beam knows (`gs://`, `s3://`, `hdfs://` …). This
        process, the runner's workers and, later, Forebay's workers see it under this name.
      format: "tfrecord", "arrayrecord" (`forebay[arrayrecord]`) or "parquet".
      shards: how many files, at most one for each split; by default up to 128.
      seed: of what the dataset draws, shuffles included.
      runner: one of Beam's, by its name.
      options: Beam's, as on a command line: "--direct_num_workers=4".
      verify: read all shards that are there first, and write damaged ones again.

    Raises NotFound, Unimplemented with the node for what cannot be run in parts (an endless
    dataset, `take`, what is different each time …), InvalidArgument, FailedPrecondition if the
    directory has something else, PipelineError with what the runner says, Unavailable.
    """
    directory = files.checked(output)
    flags = _flags(runner, options)
    _check(format, shards, seed)
    pipelines.load()  # before TensorFlow is imported in any other way
    client = DispatcherClient(service)
    try:
        dataset = client.get_dataset(dataset_id, with_graph=True, patience_s=PATIENCE_S)
    finally:
        client.close()
    wanted = _plan_of(dataset_id, dataset, format, shards, seed)
    plan = read_plan(directory)
    if plan is None:
        plan = wanted
        files.make(directory)
        if strange := [name for name in files.listed(directory) if name.startswith("shard-")]:
            raise FailedPrecondition(
                f"{directory} has {strange[0]}, but no plan of what it is a part of: give --output "
                "a new directory"
            )
        files.write(f"{directory}/{DATASET}", dataset.SerializeToString())
        files.write(f"{directory}/{PLAN}", plan.encode())
    else:
        _require_same(directory, plan, wanted, shards)
    there = _there(directory, plan, verify=verify)
    missing = [number for number in range(plan.shards) if number not in there]
    if missing:
        log.info("%d of %d shards are to be written", len(missing), plan.shards)
        try:
            _run(directory, missing, flags)
        finally:
            close_idle()
        there = _there(directory, plan)
    if left := [number for number in range(plan.shards) if number not in there]:
        raise PipelineError(
            "DATA_LOSS",
            f"the runner says that it is done, and {len(left)} of {plan.shards} shards are not in "
            f"{directory}, the first of them number {left[0]}: its workers must see the directory "
            "under this name. The same command does what is missing",
        )
    if missing or INDEX not in files.listed(directory):
        files.write(f"{directory}/{INDEX}", encode_index(plan, there.values()))
    names = [name for name in files.listed(directory) if name.startswith(files.TEMPORARY)]
    files.delete(f"{directory}/{name}" for name in names)  # of attempts that were killed
    return Materialized(
        directory,
        sum(shard.elements for shard in there.values()),
        sum(shard.bytes for shard in there.values()),
        plan.shards,
        len(missing),
    )


def _check(format: str, shards: int | None, seed: int) -> None:  # noqa: A002
    if format not in WRITERS:
        raise InvalidArgument(f"format={format!r} must be one of {[*WRITERS]}")
    if shards is not None and not 1 <= shards <= MAX_SHARDS:
        raise InvalidArgument(f"shards={shards} must be from 1 to {MAX_SHARDS}")
    if not 0 <= seed < 2**63:
        raise InvalidArgument(f"seed={seed} must be from 0 to 2^63 − 1")


def _flags(runner: str, options: Sequence[str]) -> list[str]:
    flags = [f"--runner={UNLISTED.get(runner, runner)}", *options]
    if strange := [option for option in options if not option.startswith("-")]:
        raise InvalidArgument(
            f"{strange[0]!r} is no option: write the runner's as --name=value, each as one word"
        )
    names = {flag.partition("=")[0] for flag in flags}
    if "--runner" in {option.partition("=")[0] for option in options}:
        raise InvalidArgument("--runner is given among the options: give it as `runner`")
    if runner == "DaskRunner" and not names & {"--dask_partition_size", "--dask_npartitions"}:
        flags.append("--dask_partition_size=1")  # else up to 128 shards are one worker's
    return flags


def _plan_of(
    dataset_id: str,
    dataset: pb.GetDatasetResponse,
    format: str,  # noqa: A002
    shards: int | None,
    seed: int,
) -> Plan:
    """Fills in the structure that tf.data service's own clients do not register."""
    from ..pipelines.tf_data.element_specs import (
        component_specs,
        decode_metadata,
        without_extension_types,
    )

    definition = dataset.definition
    spec = decode_metadata(definition).element_spec
    if spec is None:
        raise Unimplemented(
            f"dataset {dataset_id} was registered without its element_spec, so it is not known "
            "what its elements are: register it by forebay.service.register_dataset"
        )
    if not definition.structure:
        definition.structure = structure.encode(spec)
    components = [
        ComponentSpec(name, component.dtype.name, _shape_of(component))
        for name, component in zip(
            names_of(definition.structure),
            component_specs(without_extension_types(spec)),
            strict=True,
        )
    ]
    if odd := [c for c in components if c.dtype not in TYPES]:
        raise Unimplemented(
            f"component {odd[0].name} of the elements is of {odd[0].dtype}, which no file has: map "
            "the dataset to tensors of another dtype"
        )
    if format != "tfrecord":
        try:
            fields_of(definition.structure)
        except ValueError as error:
            raise Unimplemented(
                f"dataset {dataset_id} cannot be read from {format} files: {error}; or write them "
                "as tfrecord, which holds all"
            ) from error
    splits = _splits_of(dataset_id, dataset)
    return Plan(
        dataset_id=dataset_id,
        fingerprint=fingerprint(definition, dataset.graph),
        format=format,
        splits=splits,
        shards=max(1, min(splits, shards or DEFAULT_SHARDS)),
        seed=seed,
        structure=definition.structure,
        element_spec=metadata_of(definition.metadata).element_spec,
        components=components,
    )


def _shape_of(spec: Any) -> list[int | None] | None:
    return None if spec.shape.rank is None else spec.shape.as_list()


def _splits_of(dataset_id: str, dataset: pb.GetDatasetResponse) -> int:
    definition = dataset.definition
    why = definition.unsplittable
    try:
        if not why and definition.HasField("tf_data_graph"):
            require_bundles(dataset.graph, definition.sources, as_parts=True)
            if doubts := nondeterministic(dataset.graph):
                why = f"its elements may be others each time: {doubts[0]}"
    except Unimplemented as error:
        why = str(error)
    splits = min(map(source_size, definition.sources), default=ENDLESS)
    if not why and splits == ENDLESS:
        why = "its source has no end. Leave out repeat, and repeat what was materialized"
    if why:
        raise Unimplemented(f"dataset {dataset_id} cannot be materialized: {why}")
    return splits


def _require_same(directory: str, plan: Plan, wanted: Plan, shards: int | None) -> None:
    pairs = [
        ("dataset", plan.dataset_id, wanted.dataset_id),
        ("definition", plan.fingerprint, wanted.fingerprint),
        ("format", plan.format, wanted.format),
        ("seed", plan.seed, wanted.seed),
    ]
    if shards is not None:
        pairs.append(("shards", plan.shards, wanted.shards))
    for what, has, asked in pairs:
        if has != asked:
            raise FailedPrecondition(
                f"{directory} was begun with {what} {has}, and {asked} is asked for: give the "
                "same, or --output another directory"
            )


def _there(directory: str, plan: Plan, *, verify: bool = False) -> dict[int, Shard]:
    """The shards that need not be written; those that are broken are deleted."""
    found, broken = shards_among(files.listed(directory), plan)
    for shard in [*found.values()] if verify else []:
        if not is_intact(directory, shard):
            broken.append(shard.file)
            del found[shard.number]
    for name in broken:
        log.warning("%s/%s is damaged, and is written again", directory, name)
    files.delete(f"{directory}/{name}" for name in broken)
    return found


def _run(directory: str, numbers: list[int], flags: list[str]) -> None:
    """Raises PipelineError, InvalidArgument."""
    try:
        pipeline = beam.Pipeline(options=PipelineOptions(flags))
    except (ValueError, ImportError) as error:
        raise InvalidArgument(f"the runner of {flags} cannot be used: {error}") from error
    _ = pipeline | "bundles" >> beam.Create(numbers) | "shards" >> beam.ParDo(WriteShard(directory))
    try:
        state = pipeline.run().wait_until_finish()
    except (KeyboardInterrupt, SystemExit):
        raise
    except Exception as error:
        _, mark, said = str(error).rpartition(FAILED)
        last = (str(error).strip() or repr(error)).splitlines()[-1].strip()
        raise PipelineError(
            "ABORTED",
            f"{flags[0]} failed (what is complete stays; the same command does what is missing): "
            f"{(mark + said).strip() or last}",
        ) from error
    if state not in (PipelineState.DONE, None):
        raise PipelineError("ABORTED", f"{flags[0]} ended with {state}: its log says why")


class WriteShard(beam.DoFn):  # type: ignore[misc]
    """Bundles' numbers to shards in a directory, which has all that is to be known of them."""

    def __init__(self, directory: str) -> None:
        self._directory = directory

    def setup(self) -> None:
        self._opened = enter(self._directory)

    def process(self, number: int) -> Iterator[dict[str, Any]]:
        """Yields a line of the manifest, for people who look into the runner."""
        there, _ = shards_among(files.listed(self._directory), self._opened.plan)
        shard = there.get(number) or self._write(number)
        yield {"number": number, "elements": shard.elements, "bytes": shard.bytes,
               "crc32c": shard.crc32c, "file": shard.file}  # fmt: skip

    def teardown(self) -> None:
        if hasattr(self, "_opened"):
            self._opened.leave()
            del self._opened

    def _write(self, number: int) -> Shard:
        plan, pipeline = self._opened.plan, self._opened.pipeline
        first, count = plan.bundle(number)
        run = pipeline.bundle(SplitRange(first, count, 0), number=number, seed=plan.seed)
        new = files.NewFile(self._directory)
        size, checksum, elements = 0, 0, 0

        def write(data: bytes) -> None:
            nonlocal size, checksum
            new.file.write(data)
            size += len(data)
            checksum = google_crc32c.extend(checksum, data)

        try:
            writer = WRITERS[plan.format](write, plan.components)
            for block in run.blocks():
                writer.write(block)
                elements += block.count
            writer.close()
            name = plan.shard_name(number, elements, size, checksum)
            new.publish(name)
        except (ForebayError, OSError) as error:
            new.discard()
            # Of a class that every runner can tell of.
            raise RuntimeError(
                f"{FAILED}{number} (splits {first} to {first + count - 1}): {error}"
            ) from error
        return Shard(number, name, elements, size, f"{checksum:08x}")
