"""Encodes a batch of records as one TFRecord frame, for files and servers alike.

A batch's bytes thus carry their checksum, format, term and place in the log.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from google.protobuf.message import DecodeError

from .base import Record
from .errors import NewerFormat
from .proto.segment_pb2 import Batch
from .tfrecord import frame

BATCH_FORMAT = 1


class UnfitBatch(Exception):
    """The bytes are not a batch, or not the next one. The message says which."""


def encode_batch(term: int, first_sequence: int, records: Sequence[bytes]) -> bytes:
    """Encode one or more records as a frame."""
    batch = Batch(format=BATCH_FORMAT, term=term, first_sequence=first_sequence, records=records)
    return frame(batch.SerializeToString())


def decode_batch(data: bytes, where: str) -> Batch:
    """Decode the batch in `data`, a frame's content.

    `where` begins the message of a NewerFormat. Raises UnfitBatch, NewerFormat.
    """
    try:
        batch = Batch.FromString(data)
    except DecodeError as error:
        raise UnfitBatch(f"holds no batch of records: {error}") from None
    if batch.format > BATCH_FORMAT:
        raise NewerFormat(
            f"{where}: format {batch.format} is newer than {BATCH_FORMAT}, the newest that this "
            "version knows; upgrade Forebay"
        )
    return batch


def check_follows(batch: Batch, sequence: int, term: int) -> None:
    """Check that the batch begins with record `sequence`, and that its term is at least `term`.

    Raises UnfitBatch.
    """
    count = len(batch.records)
    if batch.first_sequence != sequence or not count or not batch.format:
        what = f"{count} records from {batch.first_sequence}, format {batch.format}"
        raise UnfitBatch(f"{what}, where record {sequence} must follow")
    if batch.term < term:
        raise UnfitBatch(f"term {batch.term} comes after term {term}")


def records_above(batch: Batch, after: int) -> Iterator[Record]:
    """The batch's records with a sequence above `after`."""
    passed = max(0, after + 1 - batch.first_sequence)
    sequences = itertools.count(batch.first_sequence + passed)
    return map(Record, sequences, itertools.repeat(batch.term), batch.records[passed:])
