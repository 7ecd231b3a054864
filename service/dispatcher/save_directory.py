"""A save's directory: the file I/O, in the layout of TensorFlow's workers and readers.

All functions block, run in the dispatcher's threads (saves.py), and are idempotent.
"""

from __future__ import annotations

import errno
import logging
import os
import shutil
import struct
from collections.abc import Mapping, Sequence
from pathlib import PurePath

from google.protobuf import text_format

from ...journal.splits import split_value
from ...storage.tfrecord import frame
from ..core.saves import is_absolute
from ..core.state import EndedSave, Save
from ..errors import FailedPrecondition, InvalidArgument
from ..proto import tf_service_pb2 as tf
from ..save_files import (
    CHUNKS,
    DONE,
    ERROR,
    IDENTITY,
    METADATA,
    SPEC,
    graph_file,
    split_directory,
    stream_directory,
    write_whole,
)

log = logging.getLogger(__name__)

_CODES = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), "RESOURCE_EXHAUSTED"),
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), "PERMISSION_DENIED"),
}

# A split is a scalar int64 TensorProto: dtype 9, an empty shape, 8 bytes of tensor_content.
_split = struct.Struct("<6sq").pack
_SCALAR_INT64 = b"\x08\x09\x12\x00\x22\x08"


def split_tensor(value: int) -> bytes:
    """A split for TensorFlow's workers: a serialized TensorProto."""
    return _split(_SCALAR_INT64, value)


def split_files(save: Save, number: int, written: Sequence[int]) -> dict[str, int]:
    """The files of a stream's splits behind the first `written` of each source: splits by path."""
    stream = save.streams[number]
    if list(written) == [source.assigned for source in stream.sources]:
        return {}
    sources = save.definition.sources
    found = {}
    for index, (source, local) in enumerate(zip(stream.sources, written, strict=True)):
        stop = source.assigned
        for run in reversed(source.runs):
            start = stop - run.count
            for at in range(max(start, local), stop):
                directory = split_directory(save.path, number, index, run.pass_number)
                path = f"{directory}/split_{at}_{run.place + at - start}"
                found[path] = split_value(sources[index], run.first + at - start)
            if start <= local:
                break
            stop = start
    return found


def look_at(path: str) -> tuple[str, bool]:
    """The normalized path, and whether nothing is there.

    Raises InvalidArgument if it lies within the directory of another save.
    """
    if not is_absolute(path):
        return path, False
    path = os.path.normpath(path)
    for parent in map(str, PurePath(path).parents):
        if os.path.exists(f"{parent.rstrip('/')}/{METADATA}"):
            raise InvalidArgument(
                f"a dataset cannot be saved to {path}: another one was saved to {parent}, and this "
                "would lie among its files; save to another path"
            )
    return path, not os.path.lexists(path)


def prepare(path: str, metadata: tf.DistributedSnapshotMetadata, graph: bytes) -> None:
    """Create a directory with everything that a save has before its first stream."""
    os.makedirs(f"{path}/{CHUNKS}", exist_ok=True)
    os.makedirs(f"{path}/streams", exist_ok=True)
    write_whole(f"{path}/{IDENTITY}", path.encode())
    write_whole(f"{path}/{METADATA}", text_format.MessageToString(metadata).encode())
    write_whole(f"{path}/{SPEC}", metadata.element_spec)
    write_whole(graph_file(path), tf.DatasetDef(graph=graph).SerializeToString())


def remove(path: str) -> None:
    """Remove the directory if it exists; ignores errors."""
    shutil.rmtree(path, ignore_errors=True)


def place(prepared: str, path: str) -> None:
    """Rename the prepared directory, if not yet done. Raises OSError, also if neither exists."""
    if _has(path, prepared):
        return
    if not os.path.lexists(prepared):
        gone = "the save's directory is gone, or another one is there now"
        raise FileNotFoundError(errno.ENOENT, gone, path)
    os.rename(prepared, path)


def _has(path: str, prepared: str) -> bool:
    """Whether the directory at the path is the save that was prepared as `prepared`."""
    try:
        with open(f"{path}/{IDENTITY}", "rb") as file:
            return file.read() == prepared.encode()
    except (FileNotFoundError, NotADirectoryError):
        return False


def own(path: str, stream: int, sources: int, address: str) -> None:
    """Create a stream's directories and name its owner, for the worker that will write it."""
    for source in range(sources):
        os.makedirs(split_directory(path, stream, source, 0), exist_ok=True)
    write_whole(f"{stream_directory(path, stream)}/owner_worker", address.encode(), durable=False)


def write_splits(files: Mapping[str, int]) -> None:
    """Write the files that are missing or incomplete."""
    for path, value in files.items():
        data = frame(split_tensor(value))
        try:
            if os.stat(path).st_size == len(data):
                continue
        except FileNotFoundError:
            os.makedirs(os.path.dirname(path), exist_ok=True)
        write_whole(path, data, durable=False)


def update(
    prepared: str, path: str, owners: Mapping[int, str], sources: int, files: Mapping[str, int]
) -> None:
    """Write what a running save's directory lacks. Raises OSError."""
    place(prepared, path)
    for stream, address in owners.items():
        own(path, stream, sources, address)
    write_splits(files)


def seal(save: EndedSave) -> None:
    """Write how the save ended, if the directory at its path is that save."""
    path = save.path
    if os.path.lexists(save.prepared):
        remove(save.prepared)
    if not _has(path, save.prepared):
        if os.path.lexists(path):
            log.warning("what is at %s now is not the save that has ended, and is left alone", path)
    elif save.finished:
        if not os.path.exists(f"{path}/{DONE}"):
            write_whole(f"{path}/{DONE}", b"")
    # After a repair, the journal may lack the end of a save whose directory says "finished".
    elif not os.path.exists(f"{path}/{DONE}") and not os.path.exists(f"{path}/{ERROR}"):
        status = tf.StatusProto(code=save.failed, message=save.message)
        write_whole(f"{path}/{ERROR}", text_format.MessageToString(status).encode())


def cannot_write(path: str, error: OSError) -> FailedPrecondition:
    """The I/O error as an error for the client that saves."""
    return FailedPrecondition(
        f"a dataset cannot be saved to {path}: {error.strerror or error} "
        f"({error.filename or path}); give a path on a file system with enough space that the "
        "dispatcher and all workers may write to"
    )


def code_of(error: OSError) -> str:
    """The canonical status of a save that fails by this I/O error."""
    return _CODES.get(error.errno or 0, "FAILED_PRECONDITION")
