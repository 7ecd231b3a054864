"""The files and directories of a storage on local files.

FORMAT                               the storage's format; newer formats are refused
LOCK                                 the writer locks it, and writes its own name into it
TERM                                 the latest writer's term
CONDEMNED                            if it exists: the reason why no writer may open the log
segments/<first sequence>.tfrecord   the log
snapshots/<sequence>.snapshot        one TFRecord frame
blobs/<SHA-256>[.<mark>]
cut/<number>/…                       files that a repair moved aside

An earlier version put LOCK, CONDEMNED, segments and snapshots into `takeover-<term>/` when a writer
displaced another one that might live. Of such directories, the log is in the one with the highest
term.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import NamedTuple

from ..errors import REPAIR, Corrupt, NewerFormat, StorageUnusable
from .durable import check_is_directory, check_is_file, unreadable

RESTORE = f"restore the segments from a backup, {REPAIR}"

FORMAT = 1

_MARKER = re.compile(rb"forebay storage (\d+)\n")
_SEGMENT = re.compile(r"(\d{20})\.tfrecord")
_SNAPSHOT = re.compile(r"(\d{20})\.snapshot")
_BLOB = re.compile(r"[0-9a-f]{64}(\.[0-9A-Za-z-]+)?")
_TAKEOVER = re.compile(r"takeover-(\d+)")


class Segment(NamedTuple):
    """A file of the log, named after the sequence of its first record."""

    first: int
    path: Path


class LogDirectory(NamedTuple):
    """Where the log lies."""

    path: Path
    term: int  # at least the latest writer's; 0: not known

    @property
    def lock(self) -> Path:
        return self.path / "LOCK"

    @property
    def condemned(self) -> Path:
        return self.path / "CONDEMNED"

    def why_condemned(self) -> str:
        """The reason in CONDEMNED; "" if the file does not exist. Raises Corrupt."""
        check_is_file(self.condemned)
        try:
            reason = self.condemned.read_text(errors="replace").strip("\0\n ")
        except FileNotFoundError:
            return ""
        return reason or f"acknowledged records are gone; which ones, is lost as well; {RESTORE}"

    @property
    def segments(self) -> Path:
        return self.path / "segments"

    @property
    def snapshots(self) -> Path:
        return self.path / "snapshots"

    def segment(self, first: int) -> Path:
        return self.segments / f"{first:020}.tfrecord"

    def snapshot(self, sequence: int) -> Path:
        return self.snapshots / f"{sequence:020}.snapshot"

    def list_segments(self) -> list[Segment]:
        """Ascending."""
        matches = _matches(self.segments, _SEGMENT)
        return sorted(Segment(int(match[1]), self.segments / match[0]) for match in matches)

    def list_snapshots(self) -> list[int]:
        """Their sequences, ascending."""
        return sorted(int(match[1]) for match in _matches(self.snapshots, _SNAPSHOT))


class StoragePaths:
    """The paths below a storage's directory. Listings of missing directories are empty."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.format = path / "FORMAT"
        self.term = path / "TERM"
        self.blobs = path / "blobs"
        self.cuts = path / "cut"

    def read_format(self) -> int:
        """The storage's format; 0 if it does not exist yet.

        Raises NewerFormat, Corrupt, StorageUnusable.
        """
        check_is_file(self.format)
        try:
            content = self.format.read_bytes()
        except FileNotFoundError:
            if not self.log().segments.is_dir():
                return 0
            if self.format.exists():
                return self.read_format()  # the storage was just created
            raise Corrupt(
                f"{self.format}: is missing; let its one line say 'forebay storage {FORMAT}'"
            ) from None
        except NotADirectoryError:
            raise StorageUnusable(f"{self.path} is not a directory; name one") from None
        except OSError as error:
            raise unreadable(self.format, error) from error
        if (marker := _MARKER.fullmatch(content)) is None or not int(marker[1]):
            raise Corrupt(
                f"{self.format}: byte 0: {content[:40]!r} is no format of Forebay's; let its one "
                f"line say 'forebay storage {FORMAT}'"
            )
        if int(marker[1]) > FORMAT:
            raise NewerFormat(
                f"{self.format} says format {int(marker[1])}, newer than {FORMAT}, the newest that "
                "this version knows; upgrade Forebay"
            )
        return int(marker[1])

    def blob(self, name: str) -> Path | None:
        """The blob's path; None if `name` cannot be the name of a blob."""
        return self.blobs / name if _BLOB.fullmatch(name) else None

    def list_blobs(self) -> list[Path]:
        return [self.blobs / match[0] for match in _matches(self.blobs, _BLOB)]

    def log(self) -> LogDirectory:
        """The log's directory."""
        terms = [int(match[1]) for match in _matches(self.path, _TAKEOVER)]
        if not terms:
            return LogDirectory(self.path, 0)
        return LogDirectory(self.path / f"takeover-{max(terms)}", max(terms))


def _matches(directory: Path, name: re.Pattern[str]) -> list[re.Match[str]]:
    try:
        names = os.listdir(directory)
    except FileNotFoundError:
        check_is_directory(directory)
        return []
    except NotADirectoryError:
        for path in (directory.parent, directory):
            check_is_directory(path)
        return []  # just moved away
    except OSError as error:
        raise StorageUnusable(f"{directory} cannot be read: {error.strerror}") from error
    return list(filter(None, map(name.fullmatch, names)))
