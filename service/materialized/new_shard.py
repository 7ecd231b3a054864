"""A shard that is being written, under a temporary name until it is complete."""

from __future__ import annotations

from typing import Self

import google_crc32c

from ...storage.tfrecord import frame
from . import files
from .layout import Plan


class NewShard:
    """Takes records, and frames each as a TFRecord.

    A context manager: it publishes the shard at the end of its block, and discards it if the block
    raises.
    """

    def __init__(self, directory: str, owner: str, plan: Plan, number: int) -> None:
        """Its temporary name begins with `owner`. Raises Unavailable."""
        self._file = files.NewFile(directory, owner)
        self._plan = plan
        self._number = number
        self._elements = self._bytes = self._checksum = 0

    def add(self, record: bytes) -> None:
        """Append an element. Raises Unavailable."""
        data = frame(record)
        self._file.write(data)
        self._elements += 1
        self._bytes += len(data)
        self._checksum = google_crc32c.extend(self._checksum, data)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        with self._file:
            if kind is None:
                name = self._plan.shard_name(
                    self._number, self._elements, self._bytes, self._checksum
                )
                self._file.publish(name, replace=False)
