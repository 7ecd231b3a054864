"""Where a storage in a directory keeps what.

FORMAT                               of what follows; a newer one is not touched
LOCK                                 held by the writer, and says who that is
TERM                                 the latest writer's term, and the log's end as it began
CONDEMNED                            why no writer may open it, if there is this file
segments/<first sequence>.tfrecord   the log
snapshots/<sequence>.snapshot        one TFRecord frame
blobs/<SHA-256>
cut/<number>/…                       what a repair moved aside
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import NamedTuple

from .errors import StorageUnusable

_SEGMENT = re.compile(r"(\d{20})\.tfrecord")
_SNAPSHOT = re.compile(r"(\d{20})\.snapshot")
_DIGEST = re.compile(r"[0-9a-f]{64}")


class Segment(NamedTuple):
    """A file of the log, named after the sequence of its first record."""

    first: int
    path: Path


class Layout:
    """The paths below a storage's directory. Listings are empty where nothing is yet."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.format = path / "FORMAT"
        self.lock = path / "LOCK"
        self.term = path / "TERM"
        self.condemned = path / "CONDEMNED"
        self.segments = path / "segments"
        self.snapshots = path / "snapshots"
        self.blobs = path / "blobs"
        self.cuts = path / "cut"

    def segment(self, first: int) -> Path:
        return self.segments / f"{first:020}.tfrecord"

    def snapshot(self, sequence: int) -> Path:
        return self.snapshots / f"{sequence:020}.snapshot"

    def blob(self, digest: str) -> Path | None:
        """None if that cannot be the name of a blob."""
        return self.blobs / digest if _DIGEST.fullmatch(digest) else None

    def list_segments(self) -> list[Segment]:
        """Ascending."""
        matches = _matches(self.segments, _SEGMENT)
        return [Segment(int(match[1]), self.segments / match[0]) for match in matches]

    def list_snapshots(self) -> list[int]:
        """Their sequences, ascending."""
        return [int(match[1]) for match in _matches(self.snapshots, _SNAPSHOT)]

    def list_blobs(self) -> list[Path]:
        return [self.blobs / match[0] for match in _matches(self.blobs, _DIGEST)]


def _matches(directory: Path, name: re.Pattern[str]) -> list[re.Match[str]]:
    try:
        names = sorted(os.listdir(directory))
    except FileNotFoundError:
        return []
    except OSError as error:
        raise StorageUnusable(f"{directory} cannot be read: {error.strerror}") from error
    return list(filter(None, map(name.fullmatch, names)))
