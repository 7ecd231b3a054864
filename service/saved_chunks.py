"""Finds the chunks of a distributed save, for readers, also while the save is in progress.

Writers rename them into the directory `chunks` one by one; DONE or ERROR beside it means that no
others will come. TensorFlow's loader polls both, and numbers the chunks in the same order.
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
"""The pause between two polls of a directory; it doubles each time."""

MISSING_S = 60.0
"""How long a directory may be missing: network file systems may show it late, or lose it."""

WAITING_S = 60.0
"""After this time without a new chunk, a warning names the save that readers wait for."""

_LASTING = frozenset({errno.EACCES, errno.EPERM, errno.ENOTDIR})
"""Permanent errors, for which a retry is useless."""


class Found(NamedTuple):
    """The result of a poll of a save's directory."""

    names: list[str]  # new chunks, in reading order
    complete: bool  # no others will come
    missing: OSError | None  # the temporary error of reading the directory


def chunk_path(path: str, name: str) -> str:
    """The path of a chunk of the save at `path`, spelled as TensorFlow's dispatcher does."""
    return f"{path.removesuffix('/')}/{CHUNKS}/{name}"


def look(path: str, known: Iterable[str]) -> Found:
    """Poll a save's directory for chunks that are not `known`, in the order of their numbers within
    their streams.

    Raises FailedPrecondition if the save failed, or the directory is not readable, or has other
    files.
    """
    try:
        # Check DONE before listing: chunks are committed before DONE, so the list is complete.
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
    """Polls a save's directory. For one thread."""

    def __init__(self, path: str) -> None:
        self.pause_s = PAUSE_S  # before the next poll
        self._path = path
        self._began_s = self._there_s = time.monotonic()
        self._said = False

    def look(self, known: Iterable[str]) -> Found:
        """Like `look`; also raises FailedPrecondition if the directory has long been missing."""
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
    """Whether it is an unfinished file, or one of the file system's own."""
    return name.endswith(".tmp") or name.startswith(".")
