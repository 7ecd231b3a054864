"""The files that datasets are read from."""

from __future__ import annotations

import pathlib
import random

from ..storage.tfrecord import frame

RECORD_BYTES = 1024
RECORDS = 10_000


def records(directory: pathlib.Path) -> list[pathlib.Path]:
    """Where the TFRecord files of a row are."""
    return [directory / "records.tfrecord"]


def write_records(directory: pathlib.Path) -> None:
    """Random records of 1 KB; they are read again and again, from the page cache."""
    source = random.Random(0)
    (file,) = records(directory)
    file.write_bytes(b"".join(frame(source.randbytes(RECORD_BYTES)) for _ in range(RECORDS)))
