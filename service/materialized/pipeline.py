"""The Beam pipeline: a Create of shards' numbers, and a ParDo that writes each shard."""

from __future__ import annotations

import os
import uuid
from collections.abc import Sequence

import apache_beam as beam
import google_crc32c
from apache_beam.options.pipeline_options import PipelineOptions
from apache_beam.runners.portability.portable_runner import PortableRunner
from apache_beam.runners.runner import PipelineState
from google.protobuf.message import DecodeError

from ...storage.errors import Corrupt
from ...storage.tfrecord import frame
from .. import pipelines
from ..errors import FailedPrecondition, ForebayError, InvalidArgument, PipelineError
from ..pipelines.definitions import fingerprint
from ..pipelines.splits import SplitRange
from ..proto import forebay_pb2 as pb
from . import files
from .layout import Plan, read_plan, shards_in
from .records import Records, elements_of

UNLISTED = {"DaskRunner": "apache_beam.runners.dask.dask_runner.DaskRunner"}
"""Runners that Beam 2.77 finds only by their full names."""

FAILED = "failed to write shard "
"""The mark of our own message within a runner's error."""


def pipeline_of(runner: str, options: Sequence[str]) -> beam.Pipeline:
    """An empty pipeline with this runner and these options. Raises InvalidArgument."""
    flags = _flags(runner, options)
    parsed = PipelineOptions(flags)
    try:
        pipeline = beam.Pipeline(options=parsed)  # imports the runner's own options
    except (ValueError, ImportError) as error:
        others = ", ".join(UNLISTED)
        raise InvalidArgument(
            f"the runner of {flags} cannot be used: {error} (besides what Beam lists: {others})"
        ) from error
    if not isinstance(pipeline.runner, PortableRunner):  # its job server knows which there are
        known = parsed.get_all_options(retain_unknown_options=False)
        given = parsed.get_all_options(retain_unknown_options=True)
        if unknown := sorted(n for n in given if given[n] is not None and n not in known):
            raise InvalidArgument(
                f"neither Forebay nor Beam, for {flags[0]}, knows the option --{unknown[0]}: see "
                "forebay materialize --help, and what Beam says of the runner"
            )
    return pipeline


def _flags(runner: str, options: Sequence[str]) -> list[str]:
    name = runner.lower().removesuffix("runner") + "runner"  # as Beam finds those that it lists
    runner = next((known for known in UNLISTED if known.lower() == name), runner)
    flags = [f"--runner={UNLISTED.get(runner, runner)}", *options]
    for option in options:
        if not option.startswith("-"):
            raise InvalidArgument(
                f"{option!r} is no option: write the runner's as --name=value, each as one word"
            )
    names = {flag.partition("=")[0] for flag in flags}
    if "--runner" in {option.partition("=")[0] for option in options}:
        raise InvalidArgument("--runner is given among the options: give it as `runner`")
    if runner == "DaskRunner" and not names & {"--dask_partition_size", "--dask_npartitions"}:
        flags.append("--dask_partition_size=1")  # else up to 128 shards are one worker's
    return flags


def write_shards(pipeline: beam.Pipeline, write: WriteShard, numbers: Sequence[int]) -> None:
    """Run the pipeline, and wait for its end. Raises PipelineError."""
    _ = pipeline | "bundles" >> beam.Create(numbers) | "shards" >> beam.ParDo(write)
    advice = "what is complete stays; the same command does what is missing"
    name = type(pipeline.runner).__name__
    client = None
    try:
        result = pipeline.run()
        client = getattr(result, "client", None)  # Dask's, which else keeps looking for its cluster
        state = result.wait_until_finish()
    except Exception as error:
        _, mark, said = str(error).rpartition(FAILED)
        last = (str(error).strip() or repr(error)).splitlines()[-1].strip()
        raise PipelineError(
            "ABORTED", f"{name} failed ({advice}): {(mark + said).strip() or last}"
        ) from error
    finally:
        if client is not None:
            client.close()
    if state not in (PipelineState.DONE, None):
        raise PipelineError("ABORTED", f"{name} ended with {state}: its log says why ({advice})")


class WriteShard(beam.DoFn):  # type: ignore[misc]
    """Writes the bundles with these numbers as shards; the directory has all it needs to know."""

    def __init__(self, directory: str, op_libraries: Sequence[str] = ()) -> None:
        self._directory = directory
        self._op_libraries = op_libraries
        self._caller = os.uname().nodename, os.getpid()
        self.name = uuid.uuid4().hex[:8]  # the prefix of this run's unpublished files

    def setup(self) -> None:
        """Raises FailedPrecondition without a plan, Corrupt, and what opening a pipeline raises."""
        node = os.uname().nodename
        if (plan := read_plan(self._directory)) is None:
            raise FailedPrecondition(
                f"{self._directory} has no plan, as it is seen on {node}: the runner's workers "
                "must see it under this name"
            )
        dataset = _read_dataset(self._directory, plan)
        if dataset.definition.HasField("tf_data_graph"):
            if self._caller != (node, os.getpid()):  # the process is the runner's, not the user's
                pipelines.hide_gpus()
            pipelines.load(self._op_libraries)
        rules = pipelines.PythonRules(processes=1, where=node)
        opened = pipelines.open_pipeline(dataset.definition, dataset.graph, python=rules)
        self._opened = plan, opened

    def process(self, number: int) -> None:
        plan, _ = self._opened
        prefix = plan.prefix(number)
        if number not in shards_in(self._directory, plan, prefix=prefix).whole:
            self._write(number)

    def teardown(self) -> None:
        if hasattr(self, "_opened"):
            self._opened[1].close()
            del self._opened

    def _write(self, number: int) -> None:
        plan, pipeline = self._opened
        first, count = plan.bundle(number)
        run = pipeline.bundle(SplitRange(first, count, 0), number=number, seed=plan.seed)
        records = Records(plan.components)
        elements = size = checksum = 0
        try:
            with files.NewFile(self._directory, self.name) as new:
                for block in run.blocks():
                    for element in elements_of(block):
                        data = frame(records.encode(element))
                        new.write(data)
                        elements, size = elements + 1, size + len(data)
                        checksum = google_crc32c.extend(checksum, data)
                name = plan.shard_name(number, elements, size, checksum)
                new.publish(name)
        except Exception as error:
            said = str(error) if isinstance(error, ForebayError) else repr(error)
            # RuntimeError, because every runner can report it.
            raise RuntimeError(
                f"{FAILED}{number} (splits {first} to {first + count - 1}): {said}"
            ) from error


def _read_dataset(directory: str, plan: Plan) -> pb.GetDatasetResponse:
    """The materialized dataset. Raises NotFound, Unavailable, and Corrupt for another dataset."""
    path = f"{directory}/{plan.dataset_name}"
    try:
        dataset = pb.GetDatasetResponse.FromString(files.read(path))
        if fingerprint(dataset.definition, dataset.graph) == plan.fingerprint:
            return dataset
        why = "it is of another dataset than the plan"
    except (DecodeError, InvalidArgument) as error:
        why = str(error)
    raise Corrupt(
        f"{path} is damaged ({why}): run the same `forebay materialize` again, which mends it"
    )
