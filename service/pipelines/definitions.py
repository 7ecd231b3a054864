"""Checks of dataset definitions for the dispatcher, which runs without TensorFlow."""

from __future__ import annotations

import hashlib
import json
import subprocess
from collections.abc import Iterable, Sequence

from google.protobuf.message import DecodeError

from ...journal.proto import events_pb2 as ev
from ...journal.splits import ENDLESS, source_size
from ..errors import InvalidArgument
from ..processes import forebay, tied
from ..proto import python_pb2
from ..proto import tf_service_pb2 as tf
from .files import manifest
from .tf_data import canonical
from .tf_data import split_sources as walks
from .tf_data.canonical import sanitize as sanitize
from .tf_data.constants import TensorFacts
from .tf_data.graphs import Graph, InvalidGraph
from .tf_data.graphs import graph_without_compression as graph_without_compression
from .tf_data.operations import forbidden as forbidden
from .tf_data.seeds import nondeterministic as nondeterministic
from .tf_data.source_walk import NotSplittable, SourceWalk
from .tf_data.split_sources import Evaluate as Evaluate
from .tf_data.split_sources import require_splittable
from .tf_data.split_sources import split_sources as split_sources


def fingerprint(definition: ev.DatasetDefinition, stored: bytes) -> str:
    """A hash that equal datasets of one kind have in common. Raises InvalidGraph."""
    if definition.HasField("mixture"):
        sources = [(s.name, s.share, s.content) for s in definition.mixture.sources]
        return hashlib.sha256(json.dumps(sources).encode()).hexdigest()
    if definition.HasField("python_function"):
        return hashlib.sha256(stored).hexdigest()
    return canonical.fingerprint(stored)


def has_no_code(stored: bytes) -> bool:
    """Whether a Python dataset has nothing to unpickle: it reads files of records."""
    try:
        dataset = python_pb2.PythonDataset.FromString(stored)
    except DecodeError:  # workers say so
        return False
    return bool(dataset.files) and not (dataset.function or dataset.splits)


def python_dataset_of(stored: bytes) -> python_pb2.PythonDataset:
    """Raises InvalidArgument if it is none, or its files are no manifest."""
    try:
        dataset = python_pb2.PythonDataset.FromString(stored)
        if dataset.files:
            for _ in manifest.decode(dataset.files).files:
                pass  # decoded
    except (DecodeError, ValueError, RecursionError) as error:
        raise InvalidArgument(
            f"the {len(stored)} bytes registered as a Python dataset do not parse: {error}"
        ) from error
    return dataset


def files_of(stored: bytes) -> list[str]:
    """The paths of a dataset that reads files of records, of the directory of their indexes, and
    the address of their store."""
    found = manifest.decode(python_pb2.PythonDataset.FromString(stored).files)
    others = found.options.get("index_dir"), found.options.get("storage", {}).get("endpoint")
    return [*(entry.path for entry in found.files), *(str(one) for one in others if one)]


MAX_BYTES = 1 << 30
"""Limit of a dataset's graph, or of its pickled function and splits. Registering one takes four
to seven times its size of the dispatcher's memory, so a smaller limit of that bounds it, too
(connections/requests.py)."""


def require_bytes(stored: bytes) -> None:
    """Raises InvalidArgument for a graph, or a Python dataset, of more than MAX_BYTES."""
    if len(stored) > MAX_BYTES:
        raise InvalidArgument(
            f"the dataset has {len(stored)} bytes, above {MAX_BYTES}: arrays that it was made of "
            "(from_tensor_slices, a function's variables, splits) are among them; write them to "
            "files, and let it read those"
        )


def difference(
    registered: ev.DatasetDefinition, stored: bytes, other: ev.DatasetDefinition, others: bytes
) -> str:
    """Which parts of two datasets differ, in words; empty if they are equal."""
    kind = registered.WhichOneof("kind")
    if kind != other.WhichOneof("kind"):
        return "kind"
    if kind == "mixture":
        return "" if registered.mixture.sources == other.mixture.sources else "sources"
    if kind != "python_function":
        try:
            return "" if canonical.fingerprint(stored) == canonical.fingerprint(others) else "graph"
        except InvalidGraph:
            return "graph"
    mine, theirs = map(python_pb2.PythonDataset.FromString, (stored, others))
    found = [p for p in ("function", "splits") if getattr(mine, p) != getattr(theirs, p)]
    if mine.files and theirs.files and mine.files != theirs.files:
        found.append(manifest.difference(mine.files, theirs.files))
    return " and ".join(found) or ("" if mine == theirs else "options")


_MAGIC = (b"\x7fELF", b"\xcf\xfa\xed\xfe", b"\xca\xfe\xba\xbe")
"""Magic numbers of shared objects: ELF, Mach-O, and Mach-O for several machines."""


def check_op_libraries(paths: Iterable[str]) -> None:
    """Raises InvalidArgument, naming the path, for a file that cannot be a library of custom ops.
    Whether TensorFlow can load it shows when a graph is evaluated."""
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


INFINITE_CARDINALITY, UNKNOWN_CARDINALITY = -1, -2  # tf.data's values


def metadata_of(data: bytes) -> tf.DataServiceMetadata:
    """The metadata that clients of a dataset get. Raises InvalidArgument."""
    try:
        return tf.DataServiceMetadata.FromString(data)
    except DecodeError as error:
        raise InvalidArgument(f"the dataset's metadata does not parse: {error}") from error


def encode_metadata(element_spec: bytes, cardinality: int, *, compressed: bool = False) -> bytes:
    """The metadata of a dataset; `compressed`: each element is, at the end of its graph."""
    kinds = tf.DataServiceMetadata
    return kinds(
        element_spec=element_spec,
        compression=kinds.COMPRESSION_FORCED_SNAPPY if compressed else kinds.COMPRESSION_OFF,
        cardinality=cardinality,
    ).SerializeToString()


def compresses(definition: ev.DatasetDefinition) -> bool:
    """Whether the dataset's graph compresses each element, at its end."""
    return metadata_of(definition.metadata).compression in (
        tf.DataServiceMetadata.COMPRESSION_SNAPPY,
        tf.DataServiceMetadata.COMPRESSION_FORCED_SNAPPY,
    )


def without_compression(definition: ev.DatasetDefinition) -> ev.DatasetDefinition:
    """The definition as if registered uncompressed. Its graph differs then."""
    metadata = metadata_of(definition.metadata)
    metadata.compression = tf.DataServiceMetadata.COMPRESSION_OFF
    plain = ev.DatasetDefinition()
    plain.CopyFrom(definition)
    plain.metadata = metadata.SerializeToString()
    return plain


def require_bundles(
    graph: bytes, sources: Iterable[ev.SplitSource], *, as_parts: bool = False
) -> None:
    """Raises NotSplittable, naming the node, if a range of this dataset's splits cannot run by
    itself, or, with `as_parts`, if the ranges' elements together are not the dataset's. `sources`
    are the registered ones. Raises InvalidGraph.
    """
    require_splittable(sources)
    parsed = Graph(graph)
    walks.require_bundles(SourceWalk(parsed))
    if as_parts:
        walks.require_parts(parsed)


def indivisible(graph: bytes, sources: Sequence[ev.SplitSource]) -> str:
    """Why a dataset cannot be written range by range of its splits: together these would not
    have its elements, or have others each time; "" if it can. Raises InvalidGraph."""
    try:
        require_bundles(graph, sources, as_parts=True)
    except NotSplittable as error:
        return str(error)
    if min(map(source_size, sources), default=ENDLESS) == ENDLESS:
        return "its source has no end"
    doubts = nondeterministic(graph)
    return f"its elements may be others each time: {doubts[0]}" if doubts else ""


def doubts_of(
    definition: ev.DatasetDefinition, stored: bytes, *, ordered: bool, within_bundles: bool = False
) -> list[str]:
    """What a reader of a registered dataset's bundles should know, in sentences. Raises
    NotSplittable, naming the node, if the dataset cannot be run bundle by bundle, or be read so in
    order, or, unless it may count `within_bundles`, if its elements depend on how it is cut."""
    if definition.HasField("python_function"):
        dataset = python_pb2.PythonDataset.FromString(stored)
        varies = dataset.varies or dataset.on_error == python_pb2.SKIP
        if ordered and varies and dataset.files and manifest.decode(dataset.files).shuffled:
            raise NotSplittable(
                "it cannot be read in order: each epoch shuffles all records, so those that are "
                "left out, or give several elements, would move what follows, by another place "
                "each time. Register it without shuffle_records (an ordered read permutes splits), "
                'or with one_to_one=True and without on_error="skip"; or read it with '
                'delivery="at_least_once"'
            )
        return []
    require_bundles(stored, definition.sources)
    begun_anew = list(walks.begun_anew(Graph(stored)))
    for counts, error in begun_anew:
        if counts and not within_bundles:
            raise NotSplittable(
                f"{error}, or within a function of flat_map; an ordered read may begin at a "
                "start_position. within_bundles=True reads it all the same, each bundle by itself"
            )
    return [
        *(
            f"its elements may not repeat: {why}, so its bundles may have other elements each "
            "time, and a read that notices it fails"
            for why in nondeterministic(stored)
        ),
        *(f"it is read bundle by bundle, and not as a whole: {error}" for _, error in begun_anew),
    ]


EVALUATE_S = 120


def evaluate_in_subprocess(
    graph: bytes, names: Sequence[str], *, op_libraries: Sequence[str] = ()
) -> list[TensorFacts]:
    """An `Evaluate` that runs TensorFlow in a separate process, and waits for it.

    The process loads these libraries of custom ops. Raises InvalidGraph if it cannot compute the
    tensors.
    """
    libraries = json.dumps(list(op_libraries))
    command = tied(forebay("service.pipelines.tf_data.evaluate", libraries, *names))
    try:
        done = subprocess.run(command, input=graph, capture_output=True, timeout=EVALUATE_S)
    except subprocess.TimeoutExpired as error:
        raise InvalidGraph(
            f"the tensors {list(names)} of the graph were not computed within {EVALUATE_S} s"
        ) from error
    if done.returncode:
        last = done.stderr.decode(errors="replace").strip().splitlines()[-1:]
        raise InvalidGraph(
            f"the tensors {list(names)} of the graph could not be computed: "
            f"{last[0] if last else f'exit code {done.returncode}'}"
        )
    return [TensorFacts(tuple(shape), value) for shape, value in json.loads(done.stdout)]
