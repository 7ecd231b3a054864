"""The chunks of a distributed save as who loads it finds them, while it is being written too.

They are renamed into the directory `chunks` one by one; DONE or ERROR beside it says that no other
comes. TensorFlow's loader looks at both, and numbers what it finds, in the same order.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import time
from collections.abc import Iterable
from typing import NamedTuple

from google.protobuf import text_format

from .errors import FailedPrecondition
from .proto import tf_service_pb2 as tf
from .save_files import CHUNKS, DONE, ERROR

log = logging.getLogger(__name__)

_CHUNK = re.compile(r"chunk_(\d+)_(\d+)_(\d+|-1)")  # stream, number in it, elements or unknown


PAUSE_S, MAX_PAUSE_S = 0.01, 1.0
"""Between two looks at a directory; each is twice as long as the one before."""

MISSING_S = 60.0
"""How long a directory may be missing: network file systems show some late, or lose them."""

WAITING_S = 60.0
"""After so long without another chunk it is said who is waited for."""

_LASTING = frozenset({errno.EACCES, errno.EPERM, errno.ENOTDIR})
"""Errors that no waiting mends."""


class Found(NamedTuple):
    """What was found in a save's directory."""

    names: list[str]  # chunks that were not known, as they shall be read
    complete: bool  # no other will come
    missing: OSError | None  # why the directory cannot be looked into, which may pass


def chunk_path(path: str, name: str) -> str:
    """A chunk of the save at `path`, as TensorFlow's dispatcher puts the two together."""
    return f"{path.removesuffix('/')}/{CHUNKS}/{name}"


def look(path: str, known: Iterable[str]) -> Found:
    """What is in the directory of a save besides the chunks that are `known`: those that its
    streams began with first.

    Raises FailedPrecondition if the save failed, or the directory may not be read, or has what is
    no save's.
    """
    try:
        # First: what is committed before DONE is written is found after it was seen.
        _require_no_error(path)
        complete = os.path.exists(f"{path}/{DONE}")
        try:
            there = set(os.listdir(f"{path}/{CHUNKS}"))
        except FileNotFoundError:
            if not os.path.isdir(path):
                raise
            return Found([], complete, None)
    except OSError as error:
        if error.errno not in _LASTING:
            return Found([], False, error)
        raise FailedPrecondition(
            f"the distributed save at {path} cannot be read: {error.strerror or error} "
            f"({error.filename or path}); its dispatcher, all workers and whoever loads it must "
            "be able to read the directory, under this name"
        ) from error
    places = {_place(path, name): name for name in there.difference(known) if not _is_hidden(name)}
    return Found([places[place] for place in sorted(places)], complete, None)


class Search:
    """Looks at a save's directory again and again, until something is found. For one thread."""

    def __init__(self, path: str) -> None:
        self.pause_s = PAUSE_S  # before the next look
        self._path = path
        self._began_s = self._there_s = time.monotonic()
        self._said = False

    def look(self, known: Iterable[str]) -> Found:
        """As `look`; raises FailedPrecondition, too, if the directory has been missing for long."""
        self.pause_s = min(2 * self.pause_s, MAX_PAUSE_S)
        found, now_s = look(self._path, known), time.monotonic()
        if found.missing is None:
            self._there_s = now_s
        elif now_s - self._there_s > MISSING_S:
            raise FailedPrecondition(
                f"there is no distributed save at {self._path}, as it is seen here: "
                f"{found.missing.strerror or found.missing}, for {MISSING_S:g} s. Mount the "
                "directory on the hosts of the dispatcher and of all workers, under this name; or "
                "write it anew, if it was deleted"
            ) from found.missing
        is_waiting = not (found.names or found.complete) and now_s - self._began_s > WAITING_S
        if is_waiting and not self._said:
            self._said = True
            log.warning(
                "readers wait for the distributed save at %s: for %.0f s it has had no further "
                "chunk, and neither DONE nor ERROR says that it is over",
                self._path, now_s - self._began_s,
            )  # fmt: skip
        return found


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
