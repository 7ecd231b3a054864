"""`materialize`: writes a registered dataset's elements to files, by a Beam pipeline."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass

from ...journal.splits import source_size
from .. import structure
from ..block_limits import TYPES
from ..connections.dispatcher_client import DispatcherClient
from ..errors import FailedPrecondition, InvalidArgument, PipelineError, Unimplemented
from ..options import paths
from ..pipelines.definitions import fingerprint, indivisible, metadata_of
from ..proto import forebay_pb2 as pb
from . import files
from .layout import PLAN, ComponentSpec, Plan, read_plan, shards_in
from .pipeline import WriteShard, pipeline_of, write_shards
from .records import names_of

log = logging.getLogger(__name__)

DEFAULT_SHARDS, MAX_SHARDS = 128, 99_999

PATIENCE_S = 60.0
"""How long to retry an unreachable dispatcher."""


@dataclass(frozen=True)
class Materialized:
    """The result of `materialize`."""

    directory: str
    elements: int
    bytes: int
    shards: int
    written: int  # the number of shards that were missing or damaged


def materialize(
    service: str | tuple[str, str],
    dataset_id: str,
    output: str | os.PathLike[str],
    *,
    shards: int | None = None,
    seed: int = 0,
    runner: str = "FnApiRunner",
    options: Sequence[str] = (),
    load_op_library: str | Sequence[str] = (),
    verify: bool = False,
) -> Materialized:
    """Write the elements of a registered dataset to TFRecord files, which can be registered in its
    place.

    It divides the dataset's splits into as many ranges as shards, and a Beam pipeline runs each,
    as a worker would. After a run was killed, an equal run writes only the shards that `output`
    lacks. Equal runs write equal bytes.

    Args:
      service: as in `read`. The runner's workers need not reach it.
      dataset_id: what `register_dataset` returned.
      output: a directory, local or in a store that Beam knows (`gs://`, `s3://`, `hdfs://` …). This
        process, the runner's workers and, later, Forebay's workers must see it under this name.
      shards: the number of files, at most one for each split; by default up to 128.
      seed: of the dataset's random numbers, shuffles included.
      runner: the name of one of Beam's runners.
      options: Beam's, as on a command line: "--direct_num_workers=4".
      load_op_library: libraries with the custom ops of the dataset's graph, as paths on the
        runner's workers; comma-separated, or in a list.
      verify: first read all existing shards, and write damaged ones again.

    A graph runs on this process's devices only if the runner runs it in this process. No
    environment variable is set.

    Raises NotFound, Unimplemented with the node that cannot run in parts (an infinite dataset,
    `take`, a nondeterministic op …), InvalidArgument, FailedPrecondition if the directory has
    another plan, PipelineError with the runner's message, Unavailable.
    """
    directory = files.checked(output)
    op_libraries = paths(load_op_library)
    pipeline = pipeline_of(runner, options)
    if not (shards is None or 1 <= shards <= MAX_SHARDS):
        raise InvalidArgument(f"shards={shards} must be from 1 to {MAX_SHARDS}")
    if not 0 <= seed < 2**63:
        raise InvalidArgument(f"seed={seed} must be from 0 to 2^63 − 1")
    with DispatcherClient(service) as client:
        dataset = client.get_dataset(dataset_id, with_graph=True, patience_s=PATIENCE_S)
    wanted = _plan_of(dataset_id, dataset, shards, seed)
    plan = read_plan(directory) or _begun(directory, wanted)
    _require_same(directory, plan, wanted, shards)
    data = dataset.SerializeToString(deterministic=True)
    files.replace(f"{directory}/{plan.dataset_name}", data)
    left_over = [*files.listed(directory, files.TEMPORARY)]  # of attempts that were killed
    there = shards_in(directory, plan, verify=verify)
    for name in there.broken:
        log.warning("%s/%s is damaged, and is written again", directory, name)
    files.delete(f"{directory}/{name}" for name in there.broken)
    missing = [number for number in range(plan.shards) if number not in there.whole]
    if missing:
        log.info("%d of %d shards are to be written", len(missing), plan.shards)
        write = WriteShard(directory, op_libraries)
        write_shards(pipeline, write, missing)
        left_over += files.listed(directory, f"{files.TEMPORARY}{write.name}")
    return _finished(directory, plan, len(missing), left_over)


def _plan_of(
    dataset_id: str, dataset: pb.GetDatasetResponse, shards: int | None, seed: int
) -> Plan:
    """The plan for this dataset. Adds the structure, which tf.data service's clients leave out."""
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
        ComponentSpec(name, component.dtype.name)
        for name, component in zip(
            names_of(definition.structure),
            component_specs(without_extension_types(spec)),
            strict=True,
        )
    ]
    if odd := [c for c in components if c.dtype not in TYPES or c.dtype == "variant"]:
        raise Unimplemented(
            f"component {odd[0].name} of the elements is of {odd[0].dtype}, which no file has: map "
            "the dataset to tensors of another dtype"
        )
    splits = _splits_of(dataset_id, dataset)
    return Plan(
        dataset_id=str(dataset_id),  # an exact one, as it is written
        fingerprint=fingerprint(definition, dataset.graph),
        splits=splits,
        shards=max(1, min(splits, shards or DEFAULT_SHARDS)),
        seed=seed,
        structure=definition.structure,
        element_spec=metadata_of(definition.metadata).element_spec,
        components=components,
    )


def _splits_of(dataset_id: str, dataset: pb.GetDatasetResponse) -> int:
    definition = dataset.definition
    why = definition.unsplittable
    if definition.HasField("mixture"):
        why = "it is a mixture, which has no end: materialize its sources"
    if definition.HasField("tf_data_graph"):
        why = why or indivisible(dataset.graph, definition.sources)
    if why:
        raise Unimplemented(f"dataset {dataset_id} cannot be materialized: {why}")
    return min(map(source_size, definition.sources))


def _require_same(directory: str, plan: Plan, wanted: Plan, shards: int | None) -> None:
    pairs = [
        ("dataset", plan.dataset_id, wanted.dataset_id),
        ("definition", plan.fingerprint, wanted.fingerprint),
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


def shards_done(output: str | os.PathLike[str]) -> tuple[int, int] | None:
    """How many shards are there, and of how many, while `materialize` runs; None: no plan yet."""
    directory = files.checked(output)
    plan = read_plan(directory)
    if plan is None:
        return None
    return len(shards_in(directory, plan).whole), plan.shards


def _begun(directory: str, wanted: Plan) -> Plan:
    """Write the plan, unless another run was faster; returns the directory's plan."""
    files.make(directory)
    path = f"{directory}/{PLAN}"
    files.write(path, wanted.encode())
    return Plan.decode(files.read(path), path)


def _finished(directory: str, plan: Plan, written: int, left_over: Sequence[str]) -> Materialized:
    """Delete what is no shard of the dataset, once all shards are there. `left_over` are the names
    of unpublished files. Raises PipelineError if a shard is missing, FailedPrecondition if another
    run writes to the directory, Unavailable."""
    shards = shards_in(directory, plan)
    if missing := [number for number in range(plan.shards) if number not in shards.whole]:
        raise PipelineError(
            "DATA_LOSS",
            f"the runner says that it is done, and {len(missing)} of {plan.shards} shards are not "
            f"in {directory}, the first of them number {missing[0]}: its workers must see the "
            "directory under this name. The same command does what is missing",
        )
    if read_plan(directory) != plan:  # a store may have let two runs begin at once
        raise FailedPrecondition(
            f"another run writes to {directory}, or has deleted it: give each a directory of its "
            "own"
        )
    unused = (*shards.broken, *shards.others, *left_over)
    files.delete(f"{directory}/{name}" for name in unused)
    return Materialized(directory, shards.elements, shards.bytes, plan.shards, written)
