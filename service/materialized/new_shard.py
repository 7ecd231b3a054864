"""A shard that is being written, under a temporary name until it is complete."""

from __future__ import annotations

import google_crc32c

from . import files
from .layout import Plan


class NewShard:
    """A caller that does not publish it must discard it."""

    def __init__(self, directory: str, owner: str, plan: Plan, number: int) -> None:
        """Its temporary name begins with `owner`. Raises Unavailable."""
        self._file = files.NewFile(directory, owner)
        self._plan = plan
        self._number = number
        self._bytes = self._checksum = 0
        self._is_discarded = False

    def write(self, data: bytes) -> None:
        """Raises Unavailable. Does nothing after `discard`, since Arrow's writers end their file
        when they are freed."""
        if self._is_discarded:
            return
        self._file.write(data)
        self._bytes += len(data)
        self._checksum = google_crc32c.extend(self._checksum, data)

    def publish(self, elements: int) -> None:
        """Publish the complete shard with its number of elements. Raises Unavailable."""
        name = self._plan.shard_name(self._number, elements, self._bytes, self._checksum)
        self._file.publish(name, replace=False)

    def discard(self) -> None:
        self._is_discarded = True
        self._file.discard()
