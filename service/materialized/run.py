"""`materialize`: writes a registered dataset's elements to files, by a Beam pipeline."""

from __future__ import annotations

import logging
import os
import uuid
from collections.abc import Sequence
from typing import Any

import apache_beam as beam
from apache_beam.options.pipeline_options import PipelineOptions
from apache_beam.runners.portability.portable_runner import JobServiceHandle, PortableRunner

from ...journal.splits import ENDLESS, source_size
from ...storage.errors import Corrupt
from .. import structure
from ..block_limits import TYPES
from ..connections.dispatcher_client import DispatcherClient
from ..errors import (
    FailedPrecondition,
    ForebayError,
    InvalidArgument,
    NotFound,
    Unimplemented,
)
from ..options import paths
from ..pipelines.definitions import (
    fingerprint,
    metadata_of,
    nondeterministic,
    require_bundles,
)
from ..pipelines.python.columns import fields_of
from ..pipelines.python.stored import is_built
from ..pipelines.splits import SplitRange
from ..proto import forebay_pb2 as pb
from ..proto.python_pb2 import PythonDataset
from . import files
from .formats import WRITERS
from .layout import (
    INDEX,
    PLAN,
    SHARD,
    ComponentSpec,
    Plan,
    ShardFile,
    encode_index,
    is_intact,
    read_index,
    read_plan,
    shards_among,
)
from .materializing import (
    FAILED,
    Materialized,
    UnknownOption,
    check_format,
    check_shards,
    require_all,
    run_to_its_end,
)
from .new_shard import NewShard
from .open_pipelines import close_idle, enter
from .records import names_of

log = logging.getLogger(__name__)

DEFAULT_SHARDS = 128
UNLISTED = {"DaskRunner": "apache_beam.runners.dask.dask_runner.DaskRunner"}
"""Runners that Beam 2.77 finds only by their full names."""

PATIENCE_S = 60.0
"""How long to retry an unreachable dispatcher."""


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
    load_op_library: str | Sequence[str] = (),
    verify: bool = False,
) -> Materialized:
    """Write the elements of a registered dataset to files, which can be registered in its place.

    It divides the dataset's splits into as many ranges as shards, and a Beam pipeline runs each,
    as a worker would. After a run was killed, an equal run writes only the shards that `output`
    lacks. Equal runs write equal bytes.

    Args:
      service: as in `read`. The runner's workers need not reach it.
      dataset_id: what `register_dataset` returned.
      output: a directory, local or in a store that Beam knows (`gs://`, `s3://`, `hdfs://` …). This
        process, the runner's workers and, later, Forebay's workers must see it under this name.
      format: "tfrecord", "arrayrecord" (`forebay[arrayrecord]`) or "parquet".
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
    flags = _flags(runner, options)
    _check(format, shards, seed)
    pipeline = _pipeline(flags)
    with DispatcherClient(service) as client:
        dataset = client.get_dataset(dataset_id, with_graph=True, patience_s=PATIENCE_S)
    wanted = _plan_of(dataset_id, dataset, format, shards, seed)
    plan = _begun(directory, wanted, shards)
    _keep(f"{directory}/{plan.dataset_name}", dataset.SerializeToString(deterministic=True))
    left_over = [*files.listed(directory, files.TEMPORARY)]  # of attempts that were killed
    there = _existing_shards(directory, plan, verify=verify)
    missing = [number for number in range(plan.shards) if number not in there]
    if missing:
        log.info("%d of %d shards are to be written", len(missing), plan.shards)
        try:
            write = WriteShard(directory, op_libraries)
            _run(pipeline, write, missing)
        finally:
            close_idle()
        left_over += files.listed(directory, f"{files.TEMPORARY}{write.name}")
        there = _existing_shards(directory, plan)
    require_all(directory, plan, there, "The same command does what is missing")
    _begun(directory, plan, plan.shards)  # a store may have let two runs begin at once
    _keep(f"{directory}/{INDEX}", encode_index(plan, there.values()))
    kept = {shard.file for shard in there.values()}
    superseded = [s.file for s in _shards(directory, plan)[0] if s.file not in kept]
    files.delete(f"{directory}/{name}" for name in (*superseded, *left_over))
    return Materialized(
        directory,
        sum(shard.elements for shard in there.values()),
        sum(shard.bytes for shard in there.values()),
        plan.shards,
        len(missing),
    )


def _check(format: str, shards: int | None, seed: int) -> None:  # noqa: A002
    check_format(format)
    if shards is not None:
        check_shards(shards)
    if not 0 <= seed < 2**63:
        raise InvalidArgument(f"seed={seed} must be from 0 to 2^63 − 1")


def _flags(runner: str, options: Sequence[str]) -> list[str]:
    name = runner.lower().removesuffix("runner") + "runner"  # as Beam finds those that it lists
    runner = next((known for known in UNLISTED if known.lower() == name), runner)
    flags = [f"--runner={UNLISTED.get(runner, runner)}", *options]
    for before, option in zip([" ", *options], options, strict=False):
        if not option.startswith("-"):
            instead = "--name=value" if "=" in before or before == " " else f"{before}={option}"
            raise InvalidArgument(
                f"{option!r} is no option: write the runner's as {instead}, each as one word"
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
        ComponentSpec(name, component.dtype.name, _shape_of(component))
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
    is_python = definition.HasField("python_function")
    if is_python and is_built(PythonDataset.FromString(dataset.graph)):
        why = "it is built by a function, in each process anew. Register a function of splits"
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


def _begun(directory: str, wanted: Plan, shards: int | None) -> Plan:
    """The plan in the directory; writes `wanted` if it has none. Raises FailedPrecondition if it
    has another plan."""
    plan = read_plan(directory)
    if plan is None:
        files.make(directory)
        path = f"{directory}/{PLAN}"
        files.write(path, wanted.encode(), replace=False)
        plan = Plan.decode(files.read(path), path)  # another run may have been faster
    _require_same(directory, plan, wanted, shards)
    return plan


def _keep(path: str, data: bytes) -> None:
    """Write the file, unless it has this content."""
    try:
        if files.read(path) == data:
            return
    except NotFound:
        pass
    files.write(path, data)


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


def shards_done(output: str | os.PathLike[str]) -> tuple[int, int] | None:
    """How many shards are there, and of how many, while `materialize` runs; None: no plan yet."""
    directory = files.checked(output)
    plan = read_plan(directory)
    if plan is None:
        return None
    return len({shard.number for shard in _shards(directory, plan)[0]}), plan.shards


def _existing_shards(directory: str, plan: Plan, *, verify: bool = False) -> dict[int, ShardFile]:
    """The existing shards, by number; deletes broken ones. Of several with one number, the one in
    the index counts, since somebody may have registered that."""
    shards, broken = _shards(directory, plan)
    if verify:
        broken += [shard.file for shard in shards if not is_intact(directory, shard)]
    for name in broken:
        log.warning("%s/%s is damaged, and is written again", directory, name)
    files.delete(f"{directory}/{name}" for name in broken)
    try:
        index = read_index(directory)
    except Corrupt:
        index = None
    listed = {*index.shards} if index is not None else set()
    found: dict[int, ShardFile] = {}
    for shard in sorted(shards, key=lambda shard: shard not in listed):
        if shard.file not in broken:
            found.setdefault(shard.number, shard)
    return found


def _shards(directory: str, plan: Plan) -> tuple[list[ShardFile], list[str]]:
    return shards_among(files.listed(directory, SHARD), plan)


def _pipeline(flags: list[str]) -> beam.Pipeline:
    """Raises InvalidArgument."""
    options = PipelineOptions(flags)
    try:
        pipeline = beam.Pipeline(options=options)  # imports the runner's own options
    except (ValueError, ImportError) as error:
        others = ", ".join(UNLISTED)
        raise InvalidArgument(
            f"the runner of {flags} cannot be used: {error} (besides what Beam lists: {others})"
        ) from error
    if isinstance(pipeline.runner, PortableRunner):
        _require_known_to_job_server(pipeline.runner)
        return pipeline
    known = options.get_all_options(retain_unknown_options=False)
    _require_known(options, {*known}, flags[0])
    return pipeline


def _require_known_to_job_server(runner: PortableRunner) -> None:
    """Make the runner refuse options that its job server does not know. The server may start only
    with the run. Beam silently drops unknown options, unless it retains all."""
    make_handle = runner.create_job_service_handle

    def create_job_service_handle(job_service: Any, options: PipelineOptions) -> JobServiceHandle:
        handle = make_handle(job_service, options)
        get_options = handle.get_pipeline_options

        def get_pipeline_options() -> Any:
            told = get_options()
            if not handle._retain_unknown_options:
                known = {name.split(":")[2] for name in told.fields}
                _require_known(options, known, "the job server")
            return told

        handle.get_pipeline_options = get_pipeline_options
        return handle

    runner.create_job_service_handle = create_job_service_handle


def _require_known(options: PipelineOptions, known: set[str], who: str) -> None:
    """Raises UnknownOption."""
    given = options.get_all_options(retain_unknown_options=True)
    if unknown := sorted(n for n, value in given.items() if value is not None and n not in known):
        raise UnknownOption(
            f"neither Forebay nor Beam, for {who}, knows the option --{unknown[0]}: see "
            "forebay materialize --help, and what Beam says of the runner"
        )


def _run(pipeline: beam.Pipeline, write: WriteShard, numbers: list[int]) -> None:
    """Raises PipelineError."""
    _ = pipeline | "bundles" >> beam.Create(numbers) | "shards" >> beam.ParDo(write)
    run_to_its_end(pipeline, "what is complete stays; the same command does what is missing")


class WriteShard(beam.DoFn):  # type: ignore[misc]
    """Writes the bundles with these numbers as shards; the directory has all it needs to know."""

    def __init__(self, directory: str, op_libraries: Sequence[str] = ()) -> None:
        self._directory = directory
        self._op_libraries = op_libraries
        self._caller = _this_process()
        self.name = uuid.uuid4().hex[:8]  # the prefix of this run's unpublished files

    def setup(self) -> None:
        own_process = self._caller != _this_process()
        self._entered = enter(self._directory, self._op_libraries, own_process=own_process)

    def process(self, number: int) -> None:
        plan = self._entered.plan
        there, _ = shards_among(files.listed(self._directory, plan.prefix(number)), plan)
        if not there:
            self._write(number)

    def teardown(self) -> None:
        if hasattr(self, "_entered"):
            self._entered.leave()
            del self._entered

    def _write(self, number: int) -> None:
        plan, pipeline = self._entered.plan, self._entered.pipeline
        first, count = plan.bundle(number)
        run = pipeline.bundle(SplitRange(first, count, 0), number=number, seed=plan.seed)
        new, elements = NewShard(self._directory, self.name, plan, number), 0
        try:
            writer = WRITERS[plan.format](new.write, plan.components)
            for block in run.blocks():
                writer.write(block)
                elements += block.count
            writer.close()
            new.publish(elements)
        except BaseException as error:
            new.discard()
            if not isinstance(error, Exception):
                raise
            said = str(error) if isinstance(error, ForebayError) else repr(error)
            # RuntimeError, because every runner can report it.
            raise RuntimeError(
                f"{FAILED}{number} (splits {first} to {first + count - 1}): {said}"
            ) from error


def _this_process() -> tuple[str, int]:
    return os.uname().nodename, os.getpid()
