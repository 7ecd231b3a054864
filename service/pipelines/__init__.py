"""Pipelines: from a dataset's definition and splits to blocks of elements.

Each kind of dataset has a package of its own here. Workers come in by this module, and the
dispatcher, which runs none of them, by `definitions`.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

from ...journal.proto import events_pb2 as ev
from ..blocks import Block
from ..errors import FailedPrecondition, InvalidArgument, Unimplemented
from ..metrics import Totals
from ..proto import tf_service_pb2 as tf
from .splits import PARTS, MaySkip, Shard, SkipReport, SplitFeed, SplitRange

if TYPE_CHECKING:
    from .python.nursery import Nurseries

__all__ = [
    "PARTS",
    "Chunk",
    "MaySkip",
    "Pipeline",
    "PythonRules",
    "Run",
    "Shard",
    "SkipReport",
    "SplitFeed",
    "SplitRange",
    "chunk_opener",
    "forget_idle",
    "has_tensorflow",
    "hide_gpus",
    "load",
    "nurseries",
    "open_pipeline",
    "open_saved",
    "processes_of",
    "response_maker",
    "warm_up",
]


class PythonRules(NamedTuple):
    """How a worker runs Python datasets."""

    allowed: bool = True
    processes: int = 0  # of a run, at most; 0: one for each core
    where: str = "here"  # the worker's address, for people
    may_skip: MaySkip | None = None  # None: as many splits as were registered, in each run
    totals: Totals | None = None  # to which is added what users' code counts in a long run
    nurseries: Nurseries | None = None  # where its processes come from; None: this process's own

    @property
    def width(self) -> int:
        """As many processes has a run."""
        return self.processes or len(os.sched_getaffinity(0))


class Run(Protocol):
    """One run of a pipeline."""

    def blocks(self) -> Iterator[Block]:
        """The blocks, in the pipeline's order; to be called once. Raises PipelineError.

        When it has ended, or is closed, nobody asks its feed any more, unless it was cancelled and
        its pipeline takes long to notice, and what it held is free, or will be soon; so it is to be
        read, too, if the run was cancelled before.
        """
        ...

    def cancel(self) -> None:
        """End `blocks` soon, from any thread. Idempotent."""
        ...


class Pipeline(Protocol):
    """A dataset as this worker can run it. Thread-safe.

    Runs, of both kinds, may run at the same time; they do not wait for each other, and nothing
    happens in one before its `blocks` is read. The tests have a contract that every kind keeps.
    """

    def run(self, feed: SplitFeed | None) -> Run:
        """One long run, in which the splits of `feed` mix; None where splits are not leased.

        Raises InvalidArgument or a subclass, Unimplemented if its splits cannot be divided, and
        PipelineError.
        """
        ...

    def bundle(self, splits: SplitRange, *, number: int, seed: int, start: int = 0) -> Run:
        """The bundle `number`: these splits on an iterator of their own, from element `start` on.

        The same splits, number and seed give the same elements, on any worker, at any time,
        whatever else runs; what the pipeline draws differs by number and by seed. A batch, a
        shuffle, a cache or a take of the pipeline's works within the bundle. Its blocks
        say the bundle, and the index in it of their first element, which is `start` for the
        first; there is none if the bundle has no more elements than `start`. What lies before
        `start` is computed again if it cannot be skipped.

        Raises as `run` does; Unimplemented names the node of what means nothing in a bundle.
        """
        ...

    def close(self) -> None:
        """Free what runs have in common, when the last of them is over. Idempotent."""
        ...


class Chunk(Protocol):
    """A file that elements are written to. Its methods raise PipelineError."""

    elements: int
    bytes: int  # of them

    def write(self, block: Block) -> None:
        """Append a block's elements."""
        ...

    def close(self) -> None:
        """Hand all of it to the system, which has it on disk some time later."""
        ...


def hide_gpus() -> None:
    """From this process, which is none of the user's, as pipelines compute on the CPU; and have
    TensorFlow log nothing but errors. To be called before `load`."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")


def has_tensorflow() -> bool:
    """Whether it is installed: registered graphs need it."""
    return importlib.util.find_spec("tensorflow") is not None


def load(op_libraries: Sequence[str] = ()) -> None:
    """Import what pipelines need, so that the first task does not wait for it; and what their
    custom ops are in. The process may be the user's: its environment stays as it is.

    Without TensorFlow only Python datasets can be opened. Raises InvalidArgument for a library that
    cannot be loaded.
    """
    if not has_tensorflow():
        if op_libraries:
            raise InvalidArgument(f"{op_libraries} cannot be loaded: there is no TensorFlow here")
        return
    from .tf_data import op_libraries as libraries
    from .tf_data import pipeline, stock_elements  # noqa: F401

    libraries.number_functions_apart()
    libraries.load_op_libraries(op_libraries)


def warm_up() -> None:
    """Run a pipeline, for what TensorFlow does but once in a process, 0.1 s of work, so that the
    first task does not wait for that either. To be called after `load`."""
    from .tf_data.pipeline import warm_up

    warm_up()


def nurseries() -> Nurseries:
    """Where a worker's Python datasets have their processes from; to be closed."""
    from .python.nursery import Nurseries

    return Nurseries()


def forget_idle() -> None:
    """Free what is kept in this process for pipelines that may be opened again. To be called after
    `load`; pipelines that are open are not concerned."""
    if not has_tensorflow():
        return
    from .tf_data import pipeline

    pipeline.TRACES.forget_idle()


def processes_of(definition: ev.DatasetDefinition, graph: bytes, python: PythonRules) -> int:
    """How many a long run has, each of which works on a range; 0: it works on one in this one."""
    if not definition.HasField("python_function"):
        return 0
    from ..proto.python_pb2 import PythonDataset
    from .python.stored import is_built

    return 1 if is_built(PythonDataset.FromString(graph)) else python.width


def open_pipeline(
    definition: ev.DatasetDefinition,
    graph: bytes,
    shard: Shard | None = None,
    python: PythonRules = PythonRules(),  # noqa: B008 - a constant
) -> Pipeline:
    """The pipeline of a dataset, whose graph, or function, was registered with this definition; of
    a `shard` of it, for long runs without a feed.

    Raises Unimplemented if this worker does not know its kind, InvalidArgument if the dataset does
    not say what is to be sharded, FailedPrecondition if it shall not, or cannot, run its Python.
    """
    if (opener := _OPENERS.get(definition.WhichOneof("kind"))) is None:
        raise Unimplemented(
            f"this worker cannot run datasets of kind {definition.WhichOneof('kind')}; "
            "run workers of the version that registered it"
        )
    return opener(definition, graph, shard, python)


def _open_graph(
    definition: ev.DatasetDefinition, graph: bytes, shard: Shard | None, _: PythonRules
) -> Pipeline:
    if not has_tensorflow():
        raise FailedPrecondition(
            "this worker cannot run the dataset, which is tf.data's, as there is no TensorFlow on "
            "its host: install forebay[tensorflow] there"
        )
    from .tf_data.element_specs import decode_metadata, without_extension_types
    from .tf_data.pipeline import TfDataPipeline

    if shard is not None:
        from .tf_data.sharding import sharded

        graph = sharded(graph, shard)
    metadata = decode_metadata(definition)
    if metadata.raw:
        return TfDataPipeline(graph, definition.sources)
    spec = without_extension_types(metadata.element_spec)
    return TfDataPipeline(
        graph, definition.sources, element_spec=spec, compressed=metadata.compressed
    )


def _open_python(
    definition: ev.DatasetDefinition, stored: bytes, shard: Shard | None, rules: PythonRules
) -> Pipeline:
    if not rules.allowed:
        raise FailedPrecondition(
            f"worker {rules.where} runs no Python datasets, which are code of whoever registered "
            "them: start it with --allow-python, if all who reach the dispatcher may run code "
            "there; only one that is on a loopback address, as its dispatcher is, needs not be told"
        )
    if shard is not None:
        raise InvalidArgument(
            "a Python dataset is divided by its splits: read it with ShardingPolicy.DYNAMIC, or OFF"
        )
    from .python.nursery import HERE
    from .python.pipeline import PythonPipeline

    return PythonPipeline(
        stored, definition.sources, definition.structure,
        processes=rules.width, where=rules.where, may_skip=rules.may_skip,
        totals=rules.totals, nurseries=rules.nurseries or HERE,
    )  # fmt: skip


_OPENERS: dict[str | None, Callable[..., Pipeline]] = {
    "tf_data_graph": _open_graph,
    "python_function": _open_python,
}
"""By the definition's kind."""


def open_saved(graph: bytes, sources: Sequence[ev.SplitSource]) -> Pipeline:
    """The pipeline of a dataset that is saved, for bundles: elements are what its graph yields.

    Raises as `open_pipeline`.
    """
    from .tf_data.pipeline import TfDataPipeline

    return TfDataPipeline(graph, sources)


def chunk_opener(graph: bytes, compression: str) -> Callable[[str], Chunk]:
    """Opens chunks of a save for what `open_saved` yields, by their paths."""
    from .tf_data import chunks

    return chunks.chunk_opener(graph, compression)


def response_maker(definition: ev.DatasetDefinition) -> Callable[[Block], tf.GetElementResponse]:
    """Makes of a block of one element the answer that tf.data service's own clients want.

    Raises Unimplemented without TensorFlow.
    """
    if not has_tensorflow():
        raise Unimplemented(
            "this worker cannot answer tf.data service's own clients, as there is no TensorFlow on "
            "its host: read with Forebay's, or install forebay[tensorflow] there"
        )
    from .tf_data import stock_elements

    return stock_elements.response_maker(definition)
