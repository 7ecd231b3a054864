"""What the dispatcher asks about a dataset's definition, in a process without TensorFlow."""

from __future__ import annotations

import hashlib
import json
import subprocess
from collections.abc import Iterable, Sequence

from ...journal.proto import events_pb2 as ev
from ..errors import InvalidArgument
from ..processes import forebay, tied
from ..proto import tf_service_pb2 as tf
from .tf_data import graphs
from .tf_data import split_sources as walks
from .tf_data.constants import TensorFacts
from .tf_data.graphs import Graph, InvalidGraph, sanitize
from .tf_data.seeds import nondeterministic
from .tf_data.source_walk import SourceWalk
from .tf_data.split_sources import Evaluate, require_splittable, split_sources

__all__ = [
    "Evaluate",
    "check_op_libraries",
    "compresses",
    "evaluate_in_subprocess",
    "fingerprint",
    "metadata_of",
    "nondeterministic",
    "require_bundles",
    "sanitize",
    "split_sources",
    "without_compression",
]


def fingerprint(definition: ev.DatasetDefinition, stored: bytes) -> str:
    """What equal datasets of this kind have in common of what is `stored`. Raises InvalidGraph."""
    if definition.HasField("python_function"):
        return hashlib.sha256(stored).hexdigest()
    return graphs.fingerprint(stored)


_MAGIC = (b"\x7fELF", b"\xcf\xfa\xed\xfe", b"\xca\xfe\xba\xbe")
"""What shared objects begin with: Linux', macOS', macOS' for several machines."""


def check_op_libraries(paths: Iterable[str]) -> None:
    """Raises InvalidArgument, naming the path, for what cannot be a library of custom ops. That
    TensorFlow loads it turns out when a graph is evaluated."""
    for path in paths:
        try:
            with open(path, "rb") as file:
                why = "" if file.read(4) in _MAGIC else "it is no shared object"
        except OSError as error:
            why = error.strerror or str(error)
        if why:
            raise InvalidArgument(
                f"the library of custom ops {path!r} cannot be loaded: {why}; give "
                "--load-op-library the path of a shared object that was built for the workers' "
                "TensorFlow"
            )


INFINITE_CARDINALITY, UNKNOWN_CARDINALITY = -1, -2  # as tf.data has them


def metadata_of(data: bytes) -> tf.DataServiceMetadata:
    """What a dataset's clients are told of it. Raises InvalidArgument."""
    try:
        return tf.DataServiceMetadata.FromString(data)
    except ValueError as error:
        raise InvalidArgument(f"the dataset's metadata does not parse: {error}") from error


def compresses(definition: ev.DatasetDefinition) -> bool:
    """Whether the dataset's graph compresses each element, at its end."""
    return metadata_of(definition.metadata).compression in (
        tf.DataServiceMetadata.COMPRESSION_SNAPPY,
        tf.DataServiceMetadata.COMPRESSION_FORCED_SNAPPY,
    )


def without_compression(
    definition: ev.DatasetDefinition, graph: bytes
) -> tuple[ev.DatasetDefinition, bytes]:
    """A dataset and its graph, if that is there, as if it had been registered uncompressed.

    Raises InvalidGraph.
    """
    metadata = metadata_of(definition.metadata)
    metadata.compression = tf.DataServiceMetadata.COMPRESSION_OFF
    plain = ev.DatasetDefinition()
    plain.CopyFrom(definition)
    plain.metadata = metadata.SerializeToString()
    return plain, graphs.without_compression(graph) if graph else b""


def require_bundles(
    graph: bytes, sources: Iterable[ev.SplitSource], *, as_parts: bool = False
) -> None:
    """Raises NotSplittable, naming the node, if a range of this dataset's splits cannot be run by
    itself; `as_parts`, or if the ranges' elements together are not the dataset's. `sources` are
    those that were registered. Raises InvalidGraph.
    """
    require_splittable(sources)
    parsed = Graph(graph)
    walks.require_bundles(SourceWalk(parsed))
    if as_parts:
        walks.require_parts(parsed)


def evaluate_in_subprocess(
    graph: bytes,
    names: Sequence[str],
    *,
    op_libraries: Sequence[str] = (),
    timeout_s: float = 120,
) -> list[TensorFacts]:
    """An `Evaluate` that runs TensorFlow in a process of its own, and waits for it.

    The process loads these libraries of custom ops.

    Raises InvalidGraph if the tensors cannot be computed there.
    """
    libraries = json.dumps(list(op_libraries))
    command = tied(forebay("pipelines.tf_data.evaluate", libraries, *names))
    try:
        done = subprocess.run(command, input=graph, capture_output=True, timeout=timeout_s)
    except subprocess.TimeoutExpired as error:
        raise InvalidGraph(
            f"the tensors {list(names)} of the graph were not computed within {timeout_s:g} s"
        ) from error
    if done.returncode:
        last = done.stderr.decode(errors="replace").strip().splitlines()[-1:]
        raise InvalidGraph(
            f"the tensors {list(names)} of the graph could not be computed: "
            f"{last[0] if last else f'exit code {done.returncode}'}"
        )
    return [TensorFacts(tuple(shape), value) for shape, value in json.loads(done.stdout)]
