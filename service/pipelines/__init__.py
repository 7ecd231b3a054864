"""Pipelines: from a dataset's definition and splits to blocks of elements.

Each kind of dataset has a package of its own here. Workers import this module. The dispatcher,
which runs no pipelines, imports `definitions`.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

from ...journal.proto import events_pb2 as ev
from ...journal.splits import grows
from ...storage.extras import install
from ..blocks import Block
from ..errors import FailedPrecondition, InvalidArgument, Unimplemented
from ..proto import tf_service_pb2 as tf
from ..proto.python_pb2 import PythonDataset
from ..user_metrics import Totals
from .definitions import files_of, has_no_code
from .splits import PARTS as PARTS
from .splits import MaySkip as MaySkip
from .splits import Shard as Shard
from .splits import SkipReport as SkipReport
from .splits import SplitFeed as SplitFeed
from .splits import SplitRange as SplitRange
from .tf_data.data_roots import confined, require_below

if TYPE_CHECKING:
    from .python.fork_server import ForkServers


class PythonRules(NamedTuple):
    """How a worker runs Python datasets, and what it reads."""

    allowed: bool = True
    processes: int = 0  # of a run, at most; 0: one for each core
    where: str = "here"  # the worker's address, for messages
    may_skip: MaySkip | None = None  # None: each run may skip the registered limit
    totals: Totals | None = None  # collects users' metrics of long runs
    fork_servers: ForkServers | None = None  # None: this process's own
    iteration: int = 0  # what a long run shuffles records by
    cache: tuple[str, int] = ("", 0)  # of ranges of objects: the directory, and how many bytes
    data_roots: tuple[str, ...] = ()  # that graphs and files of records must lie below; (): none


FAR_READERS = 3  # times as many processes read an object store: they wait for its answers


class Run(Protocol):
    """One run of a pipeline."""

    needs: int
    """How many splits what it makes at a time takes, if it calls the feed's `SplitRange.made`. Else
    0."""

    most: int
    """How many elements a block may have; its reader may change it. A block of a Python dataset has
    any number of elements of one `SplitRange`."""

    @property
    def waiting(self) -> int:
        """How many elements are made and not yielded, as far as is known."""

    def blocks(self) -> Iterator[Block]:
        """The blocks, in the pipeline's order; call it once. Raises PipelineError.

        After its end or `close` no thread asks the feed, and resources are free or soon will be. A
        cancelled pipeline may be slow to notice. Read a cancelled run, too, to free its resources.
        """

    def cancel(self) -> None:
        """End `blocks` soon, from any thread. Idempotent."""


class Pipeline(Protocol):
    """A dataset that this worker can run. Thread-safe.

    Runs of both kinds may be concurrent and don't wait for each other. A run starts when its
    `blocks` is read. One contract suite in the tests covers every kind.
    """

    def run(self, feed: SplitFeed | None) -> Run:
        """One long run, in which the splits of `feed` mix. Without leases `feed` is None.

        Raises InvalidArgument or a subclass, Unimplemented if its splits cannot be divided, and
        PipelineError.
        """

    def bundle(self, splits: SplitRange, *, number: int, seed: int, start: int = 0) -> Run:
        """Bundle `number`: these splits on an iterator of their own, from element `start` on.

        The same splits, number and seed give the same elements, on any worker and at any time.
        The splits' pass is the epoch, by whose number records of files are shuffled.
        Random numbers of the pipeline differ by number and seed. Its batches, shuffles, caches and
        takes work within the bundle. Each block has the bundle's number and the index of its first
        element; the first block's is `start`. A bundle of at most `start` elements has no blocks.
        Elements before `start` are computed again if they can't be skipped.

        Raises like `run`. Unimplemented names a node that has no meaning in a bundle.
        """

    def close(self) -> None:
        """Free the runs' shared resources once the last run is over. Idempotent."""


class Chunk(Protocol):
    """A file that elements are written to. Its methods raise PipelineError."""

    elements: int
    bytes: int  # of them

    def write(self, block: Block) -> None:
        """Append a block's elements."""

    def close(self) -> None:
        """Write all of it to the operating system, without fsync."""


def hide_gpus() -> None:
    """Hide GPUs from this process, as pipelines compute on the CPU, and have TensorFlow log only
    errors. Call it before `load`, and never in a user's process."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")


def has_tensorflow() -> bool:
    """Whether TensorFlow is installed; registered graphs need it."""
    return importlib.util.find_spec("tensorflow") is not None


@contextlib.contextmanager
def without_keras() -> Iterator[None]:
    """TensorFlow, imported within this for the first time, does not import Keras, which graphs do
    not need, nor what Keras imports.

    Only for a process that runs no code of users: `import tensorflow.keras` fails there for good
    (`tf.keras` and `import keras` work), and no other thread may import Keras meanwhile.
    """
    hidden = {"keras", "tf_keras"} - sys.modules.keys()
    for name in hidden:
        sys.modules[name] = None  # type: ignore[assignment] # an ImportError, which it expects
    try:
        yield
    finally:
        for name in hidden:
            sys.modules.pop(name, None)


def load(op_libraries: Sequence[str] = ()) -> None:
    """Import the pipelines' libraries and custom ops, so that the first task doesn't wait for it.
    Leaves the environment unchanged, as the process may be the user's.

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
    """Run a pipeline, so that the first task doesn't wait for TensorFlow's one-time
    initialization, 0.1 s. Call it after `load`."""
    if not has_tensorflow():
        return
    from .tf_data.pipeline import warm_up

    warm_up()


def fork_servers() -> ForkServers:
    """The fork servers of a worker's Python datasets; close them."""
    from .python.fork_server import ForkServers

    return ForkServers()


def forget_idle() -> None:
    """Free what this process caches of closed pipelines. Call it after `load`. Open pipelines are
    unaffected."""
    if not has_tensorflow():
        return
    from .tf_data import pipeline

    pipeline.TRACES.forget_idle()


def bundles_at_once(definition: ev.DatasetDefinition, stored: bytes, python: PythonRules) -> int:
    """How many bundles it is worth to run at a time. Others may have begun, and wait."""
    return processes_of(definition, stored, python) or max(2, len(os.sched_getaffinity(0)))


def processes_of(definition: ev.DatasetDefinition, stored: bytes, python: PythonRules) -> int:
    """How many processes run a range, or a bundle, at a time; 0: it runs in this process."""
    if not definition.HasField("python_function"):
        return 0
    most = python.processes or len(os.sched_getaffinity(0))
    return most * (FAR_READERS if PythonDataset.FromString(stored).far else 1)


def open_pipeline(
    definition: ev.DatasetDefinition,
    graph: bytes,
    shard: Shard | None = None,
    python: PythonRules = PythonRules(),  # noqa: B008 - a constant
) -> Pipeline:
    """The pipeline of a registered dataset, or of a `shard` of it, for long runs without a feed.
    `graph` is the registered graph or Python function.

    Raises Unimplemented for an unknown kind, InvalidArgument if the dataset can't be sharded so,
    and FailedPrecondition if this worker may not, or cannot, run its Python.
    """
    match definition.WhichOneof("kind"):
        case "tf_data_graph":
            return _open_graph(definition, graph, shard, python)
        case "python_function":
            return _open_python(definition, graph, shard, python)
        case other:
            raise Unimplemented(
                f"this worker cannot run datasets of kind {other}; "
                "run workers of the version that registered it"
            )


def _open_graph(
    definition: ev.DatasetDefinition, graph: bytes, shard: Shard | None, rules: PythonRules
) -> Pipeline:
    if not has_tensorflow():
        raise FailedPrecondition(
            "this worker cannot run the dataset, which is tf.data's, as there is no TensorFlow on "
            f"its host: {install('tensorflow')} there"
        )
    from .tf_data.element_specs import decode_metadata, without_extension_types
    from .tf_data.pipeline import TfDataPipeline

    if rules.data_roots:
        graph = confined(graph, rules.data_roots)
        loaded = (source.saved_chunks.path for source in definition.sources if grows(source))
        require_below(loaded, rules.data_roots)
    metadata = decode_metadata(definition)
    layout = {}
    if not metadata.raw:
        spec = without_extension_types(metadata.element_spec)
        layout = {"element_spec": spec, "compressed": metadata.compressed}
    if shard is None:
        return TfDataPipeline(graph, definition.sources, **layout)
    from .tf_data.sharding import open_shard

    return open_shard(graph, shard, lambda part: TfDataPipeline(part, definition.sources, **layout))


def _open_python(
    definition: ev.DatasetDefinition, stored: bytes, shard: Shard | None, rules: PythonRules
) -> Pipeline:
    if not (rules.allowed or has_no_code(stored)):
        raise FailedPrecondition(
            f"worker {rules.where} runs no Python datasets, which are code of whoever registered "
            "them: start it with --allow-python, if all who reach the dispatcher may run code "
            "there; only one that is on a loopback address, as its dispatcher is, needs not be told"
        )
    if rules.data_roots and has_no_code(stored):
        require_below(files_of(stored), rules.data_roots)
    if shard is not None:
        raise InvalidArgument(
            "a Python dataset is divided by its splits: read it with ShardingPolicy.DYNAMIC, or OFF"
        )
    from .python.fork_server import HERE
    from .python.pipeline import PythonPipeline

    return PythonPipeline(
        stored, definition.sources, definition.structure,
        processes=processes_of(definition, stored, rules), where=rules.where,
        may_skip=rules.may_skip, totals=rules.totals, fork_servers=rules.fork_servers or HERE,
        iteration=rules.iteration, cache=rules.cache,
    )  # fmt: skip


def open_saved(
    graph: bytes, sources: Sequence[ev.SplitSource], data_roots: Sequence[str] = ()
) -> Pipeline:
    """The pipeline of a dataset that is being saved, for bundles of its graph's elements.

    Raises as `open_pipeline`.
    """
    from .tf_data.pipeline import TfDataPipeline

    return TfDataPipeline(confined(graph, data_roots) if data_roots else graph, sources)


def chunk_opener(graph: bytes, compression: str) -> Callable[[str], Chunk]:
    """A function from a path to a new chunk file for the elements of `open_saved`."""
    from .tf_data import chunks

    return chunks.chunk_opener(graph, compression)


def response_maker(definition: ev.DatasetDefinition) -> Callable[[Block], tf.GetElementResponse]:
    """A function that converts a block of one element to a response for stock tf.data clients.

    Raises Unimplemented without TensorFlow.
    """
    if not has_tensorflow():
        raise Unimplemented(
            "this worker cannot answer tf.data service's own clients, as there is no TensorFlow on "
            f"its host: read with Forebay's, or {install('tensorflow')} there"
        )
    from .tf_data import stock_elements

    return stock_elements.response_maker(definition)
