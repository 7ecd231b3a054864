"""Chunks: files of elements, in the format of TensorFlow's distributed snapshots.

A chunk is a TFRecord file, perhaps compressed as a whole. Each element has one record, a
TensorProto, for each tensor that the graph yields.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import tensorflow as tf
from tensorflow.python.lib.io import _pywrap_record_io as record_io

from ...blocks import Block
from .constants import serialized
from .drivers import pipeline_error
from .graphs import Graph
from .imports import output_specs

Record = Callable[[Any], bytes]


class ChunkWriter:
    """Writes a file; close it. `close` does not fsync."""

    def __init__(self, path: str, compression: str, records: list[Record]) -> None:
        """Raises PipelineError with the file system's code, as all methods do."""
        self.elements = 0
        self.bytes = 0
        self._records = records
        options = record_io.RecordWriterOptions(compression)
        try:
            self._file = record_io.RecordWriter(path, options)
        except tf.errors.OpError as error:
            raise pipeline_error(error) from error

    def write(self, block: Block) -> None:
        """Append a block's elements."""
        tensors = [component.elements() for component in block.components]
        try:
            for element in zip(*tensors, strict=True):
                for record, tensor in zip(self._records, element, strict=True):
                    data = record(tensor)
                    self._file.write(data)
                    self.bytes += len(data)
        except tf.errors.OpError as error:
            raise pipeline_error(error) from error
        self.elements += block.count

    def close(self) -> None:
        """Write all of it to the operating system."""
        try:
            self._file.close()
        except tf.errors.OpError as error:
            raise pipeline_error(error) from error


def chunk_opener(graph: bytes, compression: str) -> Callable[[str], ChunkWriter]:
    """A function from a path to a new chunk of this graph's elements. Raises InvalidGraph."""
    records = [_record_of(spec) for spec in output_specs(Graph(graph).dataset)]
    return lambda path: ChunkWriter(path, compression, records)


def _record_of(spec: Any) -> Record:
    if spec.dtype == tf.variant:  # blocks hold variants serialized
        return bytes
    return functools.partial(serialized, spec.dtype.as_datatype_enum)
