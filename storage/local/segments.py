"""Reads the log on files: segments of TFRecord frames, each frame one batch.

A segment is named after its first record's sequence, and ends where the next one begins. Only
the last one may be empty (made, and then a crash) or end in a torn frame.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ..batches import UnfitBatch, check_follows, decode_batch
from ..errors import REPAIR, Corrupt, Missing
from ..proto.segment_pb2 import Batch
from ..tfrecord import FRAME_BYTES, BrokenFrame, is_torn, read_frames
from .durable import check_is_file, unreadable
from .layout import Segment


class Position(NamedTuple):
    """A place between two batches."""

    segment: int  # its first sequence
    offset: int  # in the segment, bytes
    sequence: int  # of the next record
    term: int  # of the previous batch, 0 if unknown


class Scan:
    """One pass over the batches of adjoining segments, up to the log's last one."""

    def __init__(self, segments: Sequence[Segment], start: Position | None = None) -> None:
        """Begin at `start`, which is in the first segment; by default at that segment's start. A
        log without segments begins with record 1."""
        first = segments[0].first if segments else 1
        self.position = start or Position(first, 0, first, 0)  # after the last batch seen
        self.previous = self.position  # before that batch
        self.torn_bytes = 0  # known at the end
        self.inode: int | None = None  # of the segment read last
        self._segments = segments

    def __iter__(self) -> Iterator[Batch]:
        """Yield the batches in order. Raises Corrupt, NewerFormat, Missing (trimmed away)."""
        for segment in self._segments:
            if segment.first != self.position.segment:
                self._enter(segment)
            check_is_file(segment.path)
            try:
                fd = os.open(segment.path, os.O_RDONLY | os.O_CLOEXEC)
                try:
                    self.inode = os.fstat(fd).st_ino
                    yield from self._batches(segment, fd)
                finally:
                    os.close(fd)
            except FileNotFoundError:
                raise Missing(
                    f"{segment.path}: was trimmed while it was read; begin again after the trim"
                ) from None
            except OSError as error:
                raise unreadable(segment.path, error) from error

    def _enter(self, segment: Segment) -> None:
        expected = self.position.sequence
        if segment.first != expected:
            before = next(s for s in self._segments if s.first == self.position.segment)
            missing = segment.path.with_name(f"{expected:020}{segment.path.suffix}")
            cause = f"{before.path} holds no records"
            if before.first != expected:
                cause = f"{missing} is missing, or {before.path} is not whole"
            raise Corrupt(
                f"{segment.path}: begins with record {segment.first}, but {expected} is the next "
                f"in the log: {cause}; restore it from a backup, {REPAIR}"
            )
        self.position = self.position._replace(segment=segment.first, offset=0)

    def _batches(self, segment: Segment, fd: int) -> Iterator[Batch]:
        _, _, sequence, term = self.position
        try:
            for offset, data in read_frames(fd, self.position.offset):
                try:
                    batch = decode_batch(data, f"{segment.path}: byte {offset}")
                    check_follows(batch, sequence, term)
                except UnfitBatch as error:
                    raise _corrupt(segment, offset, str(error)) from None
                sequence += len(batch.records)
                term = batch.term
                self.previous = self.position
                self.position = Position(
                    segment.first, offset + FRAME_BYTES + len(data), sequence, term
                )
                yield batch
        except BrokenFrame as broken:
            if segment is not self._segments[-1]:
                raise _corrupt(segment, broken.offset, "no whole record follows") from None
            if not is_torn(broken.tail, broken.offset):
                raise _corrupt(
                    segment, broken.offset, "the checksum does not match, and no crash explains it"
                ) from None
            self.torn_bytes = len(broken.tail)


def _corrupt(segment: Segment, offset: int, what: str) -> Corrupt:
    return Corrupt(
        f"{segment.path}: byte {offset}: {what}; restore the file from a backup, {REPAIR}"
    )
