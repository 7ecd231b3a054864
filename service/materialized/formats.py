"""Writers of shards, by format. The bytes follow from the elements, not from their blocks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from ...storage.tfrecord import frame
from ..blocks import Block
from .layout import ComponentSpec
from .records import Records, elements_of

Write = Callable[[bytes], None]


class Writer(Protocol):
    """Writes one shard."""

    def write(self, block: Block) -> None:
        """Append a block's elements."""
        ...

    def close(self) -> None:
        """Write what is left."""
        ...


class TFRecordWriter:
    """A frame for each element: what tf.data.TFRecordDataset reads."""

    def __init__(self, write: Write, components: Sequence[ComponentSpec]) -> None:
        self._write = write
        self._records = Records(components)

    def write(self, block: Block) -> None:
        encode, write = self._records.encode, self._write
        for element in elements_of(block):
            write(frame(encode(element)))

    def close(self) -> None: ...


WRITERS: dict[str, Callable[[Write, Sequence[ComponentSpec]], Writer]] = {
    "tfrecord": TFRecordWriter,
}
"""By format; whatever one of them needs is imported when it begins."""
