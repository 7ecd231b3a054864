"""What a package needs that brings a format of files (docs/formats.md); its tests: `.contract`."""

from __future__ import annotations

from ..blocks import Block, Component
from ..errors import InvalidArgument
from ..pipelines.files.byte_sources import ByteSource
from ..pipelines.files.formats import (
    Damaged,
    Facts,
    Format,
    Ints,
    Node,
    Options,
    RandomAccessFile,
    RecordFile,
    dict_of,
    of_rows,
    read_at,
    texts,
)

__all__ = [
    "Block", "ByteSource", "Component", "Damaged", "Facts", "Format", "Ints", "InvalidArgument",
    "Node", "Options", "RandomAccessFile", "RecordFile", "dict_of", "of_rows", "read_at", "texts",
]  # fmt: skip
