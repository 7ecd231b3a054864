"""The chunks of a distributed save as who loads it finds them, while it is being written too.

They are renamed into the directory `chunks` one by one; DONE or ERROR beside it says that no other
comes. TensorFlow's loader looks at both, and numbers what it finds, in the same order.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from typing import NamedTuple

from google.protobuf import text_format

from .errors import FailedPrecondition
from .proto import tf_service_pb2 as tf
from .save_files import CHUNKS, DONE, ERROR

_CHUNK = re.compile(r"chunk_(\d+)_(\d+)_(\d+|-1)")  # stream, number in it, elements or unknown


class Found(NamedTuple):
    """What was found in a save's directory."""

    names: list[str]  # chunks that were not known, as they shall be read
    complete: bool  # no other will come
    is_there: bool  # the directory


def chunk_path(path: str, name: str) -> str:
    """A chunk of the save at `path`, as TensorFlow's dispatcher puts the two together."""
    return f"{path.removesuffix('/')}/{CHUNKS}/{name}"


def look(path: str, known: Iterable[str]) -> Found:
    """What is in the directory of a save besides the chunks that are `known`: those that its
    streams began with first.

    Raises FailedPrecondition if the save failed, or the directory cannot be read, or has what is
    no save's.
    """
    try:
        # First: what is committed before DONE is written is found after it was seen.
        _require_no_error(path)
        complete = os.path.exists(f"{path}/{DONE}")
        try:
            there = set(os.listdir(f"{path}/{CHUNKS}"))
        except FileNotFoundError:
            return Found([], complete, os.path.isdir(path))
    except OSError as error:
        raise FailedPrecondition(
            f"the distributed save at {path} cannot be read: {error.strerror or error} "
            f"({error.filename or path}); its dispatcher, all workers and whoever loads it must "
            "be able to read the directory, under this name"
        ) from error
    places = {_place(path, name): name for name in there.difference(known) if not _is_hidden(name)}
    return Found([places[place] for place in sorted(places)], complete, True)


def _require_no_error(path: str) -> None:
    try:
        with open(f"{path}/{ERROR}", "rb") as file:
            said = file.read()
    except FileNotFoundError:
        return
    try:
        status = text_format.Parse(said, tf.StatusProto())
        why = f"{tf.Code.Name(status.code)}: {status.message}"
    except (text_format.ParseError, ValueError):
        why = repr(said.decode(errors="replace"))
    raise FailedPrecondition(f"the distributed save at {path} failed, and is not complete: {why}")


def _place(path: str, name: str) -> tuple[int, int, str]:
    match = _CHUNK.fullmatch(name)
    if match is None:
        raise FailedPrecondition(
            f"{chunk_path(path, name)} is no chunk of a distributed save, which are named "
            "chunk_<stream>_<number>_<elements>: move away what does not belong there"
        )
    return int(match[2]), int(match[1]), name


def _is_hidden(name: str) -> bool:
    """A file that is not finished, or one of the file system's own."""
    return name.endswith(".tmp") or name.startswith(".")
