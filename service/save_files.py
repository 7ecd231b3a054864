"""The files of a save's directory, in TensorFlow's format of distributed snapshots. Stock workers
share the format, and `tf.data.Dataset.load` reads it, also while a save is in progress.

    <path>/snapshot.metadata                 DistributedSnapshotMetadata, as text
    <path>/dataset_spec.pb                   the element_spec in it
    <path>/dataset_def.proto                 the dataset's graph
    <path>/chunks/chunk_<stream>_<number>_<elements>       TFRecords, one a tensor: what load reads
    <path>/streams/stream_<stream>/owner_worker            the address of its worker
    <path>/streams/stream_<stream>/splits/source_<source>/repetition_<pass>/split_<local>_<global>
    <path>/streams/stream_<stream>/uncommitted_chunks/…    being written, to be renamed
    <path>/forebay_save                      the save that owns the directory; others ignore it
    <path>/DONE, ERROR                       how it ended; ERROR has a StatusProto, as text

Files appear atomically: they are written under another name, then renamed.
"""

from __future__ import annotations

import os
import uuid

CHUNKS = "chunks"
METADATA = "snapshot.metadata"
SPEC = "dataset_spec.pb"
DONE = "DONE"
ERROR = "ERROR"
IDENTITY = "forebay_save"


def graph_file(path: str) -> str:
    """The path of the saved dataset's DatasetDef."""
    return f"{path}/dataset_def.proto"


def stream_directory(path: str, stream: int) -> str:
    """The directory of a stream's files, except its committed chunks."""
    return f"{path}/streams/stream_{stream}"


def split_directory(path: str, stream: int, source: int, pass_number: int) -> str:
    """The directory of a stream's splits in one pass over a source."""
    directory = stream_directory(path, stream)
    return f"{directory}/splits/source_{source}/repetition_{pass_number}"


def uncommitted_directory(path: str, stream: int) -> str:
    """The directory in which a stream's chunks are written."""
    return f"{stream_directory(path, stream)}/uncommitted_chunks"


def chunk_file(path: str, stream: int, number: int, elements: int) -> str:
    """The path of a committed chunk."""
    return f"{path}/{CHUNKS}/chunk_{stream}_{number}_{elements}"


def write_whole(path: str, data: bytes, *, durable: bool = True) -> None:
    """Create or replace a file atomically; `durable`: it survives a crash of the host.

    Raises OSError.
    """
    unfinished = f"{path}__{uuid.uuid4().hex}.tmp"  # TensorFlow ignores this suffix
    try:
        with open(unfinished, "wb") as file:
            file.write(data)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        os.replace(unfinished, path)
    except OSError:
        if os.path.lexists(unfinished):
            os.unlink(unfinished)
        raise
    if durable:
        sync_directory(os.path.dirname(path))


def sync_directory(path: str) -> None:
    """Make the directory's entries durable. Raises OSError."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
