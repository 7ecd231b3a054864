"""Writers and readers of shards, by format. A shard's bytes depend only on its elements, not on
their grouping into blocks.

TensorFlow reads TFRecord shards (registered.py). `ShardReader` reads the others: it is registered
as a Python dataset whose splits are the shards' paths.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from ...storage.errors import Corrupt
from ...storage.extras import install
from ...storage.tfrecord import frame
from ..blocks import Array, Block, numpy_dtype
from ..errors import FailedPrecondition
from ..structure import assemble
from . import files
from .layout import ComponentSpec
from .records import Records, elements_of, shapes_of

Write = Callable[[bytes], None]


class ShardWriter(Protocol):
    """Writes one shard."""

    def write(self, block: Block) -> None:
        """Append a block's elements."""

    def write_records(self, records: Iterable[bytes]) -> None:
        """Append elements, each as `Records` encodes it."""

    def close(self) -> None:
        """Write the remaining elements."""


class TFRecordWriter:
    """Writes a frame for each element, which tf.data.TFRecordDataset reads."""

    def __init__(self, write: Write, components: Sequence[ComponentSpec]) -> None:
        self._write = write
        self._records = Records(components)

    def write(self, block: Block) -> None:
        self.write_records(map(self._records.encode, elements_of(block)))

    def write_records(self, records: Iterable[bytes]) -> None:
        for record in records:
            self._write(frame(record))

    def close(self) -> None: ...


class ArrayRecordWriter:
    """Writes a record for each element; readers find it by its index."""

    def __init__(self, write: Write, components: Sequence[ComponentSpec]) -> None:
        self._write = write
        self._records = Records(components)
        self._folder = tempfile.TemporaryDirectory(prefix="forebay-")
        self._path = f"{self._folder.name}/shard"  # the library writes here only
        self._writer = _array_record().ArrayRecordWriter(self._path, "group_size:1")

    def write(self, block: Block) -> None:
        self.write_records(map(self._records.encode, elements_of(block)))

    def write_records(self, records: Iterable[bytes]) -> None:
        for record in records:
            self._writer.write(record)

    def close(self) -> None:
        self._writer.close()
        with self._folder, open(self._path, "rb") as file:
            while data := file.read(COPIED_BYTES):
                self._write(data)


def _array_record_columns(path: str, components: Sequence[ComponentSpec]) -> Iterator[Columns]:
    records = Records(components)
    with _local(path) as local:
        reader = _array_record().ArrayRecordReader(local)
        count = reader.num_records()
        for first in range(0, count, READ_RECORDS):
            stop = min(count, first + READ_RECORDS)
            elements = [records.decode(data) for data in reader.read(first, stop)]
            yield Columns(list(zip(*elements, strict=True)), len(elements))
        reader.close()


def _array_record() -> Any:
    try:
        from array_record.python import array_record_module
    except ImportError as error:
        raise FailedPrecondition(
            "ArrayRecord files need array_record, which is not installed here: "
            f"{install('arrayrecord')}"
        ) from error
    return array_record_module


class ParquetWriter:
    """Writes a column for each component: a value, or, for tensors of a rank above 0, the list of
    values. Tensors of varying shapes with a rank above 1 get another column for their shapes.
    Dtypes that Arrow lacks (bfloat16, complex64 …) are fixed-size binary."""

    def __init__(self, write: Write, components: Sequence[ComponentSpec]) -> None:
        import pyarrow.parquet

        self._components = components
        fields = []
        for component in components:
            kind = _arrow_type(component)
            fields.append((component.name, kind if component.shape == [] else _list_of(kind)))
            if _has_shapes(component):
                fields.append((shapes_of(component.name), _list_of(pyarrow.int64())))
        self._schema = pyarrow.schema(fields)
        self._sink = _Sink(write)
        self._writer = pyarrow.parquet.ParquetWriter(
            pyarrow.PythonFile(self._sink, mode="w"), self._schema, write_page_checksum=True
        )
        self._elements: list[Sequence[Any]] = []
        self._bytes = 0

    def write(self, block: Block) -> None:
        self._add(elements_of(block))

    def write_records(self, records: Iterable[bytes]) -> None:
        self._add(map(Records(self._components).decode, records))

    def _add(self, elements: Iterable[Sequence[Any]]) -> None:
        for element in elements:
            self._elements.append(element)
            self._bytes += sum(map(_size, element))
            if self._bytes >= ROW_GROUP_BYTES:
                self._flush()

    def close(self) -> None:
        self._flush()
        self._writer.close()

    def _flush(self) -> None:
        import pyarrow

        if not self._elements:
            return
        arrays = []
        for component, tensors in zip(
            self._components, zip(*self._elements, strict=True), strict=True
        ):
            values = _arrow_values(component, tensors)
            sizes = [np.size(tensor) for tensor in tensors]
            arrays.append(values if component.shape == [] else _lists(sizes, values))
            if _has_shapes(component):
                shapes = [np.shape(tensor) for tensor in tensors]
                flat = pyarrow.array([n for shape in shapes for n in shape], pyarrow.int64())
                arrays.append(_lists([len(shape) for shape in shapes], flat))
        table = pyarrow.Table.from_arrays(arrays, schema=self._schema)
        self._writer.write_table(table, row_group_size=len(self._elements))
        self._elements, self._bytes = [], 0


class _Sink:
    """A file object for Arrow."""

    closed = False

    def __init__(self, write: Write) -> None:
        self._write = write
        self._size = 0

    def write(self, data: Any) -> int:
        given = bytes(data)
        self._write(given)
        self._size += len(given)
        return len(given)

    def tell(self) -> int:
        return self._size

    def flush(self) -> None: ...
    def close(self) -> None: ...


def _parquet_columns(path: str, components: Sequence[ComponentSpec]) -> Iterator[Columns]:
    import pyarrow.parquet

    with files.open_file(path) as file:
        parquet = pyarrow.parquet.ParquetFile(file, page_checksum_verification=True)
        for number in range(parquet.num_row_groups):
            try:
                table = parquet.read_row_group(number)
            except OSError as error:
                why = " ".join(str(error).split())
                raise Corrupt(
                    f"shard {path} cannot be read ({why}): run the same `forebay materialize` "
                    "with --verify, which writes it again if it is damaged; or the pipeline that "
                    "computed it, into another directory",
                    path,
                ) from error
            columns: list[Iterable[Any]] = []
            for component in components:
                column = table.column(component.name).combine_chunks()
                if component.shape == []:
                    columns.append(_numpy_values(component, column))
                    continue
                values = _numpy_values(component, column.values)
                stops = column.offsets.to_numpy().tolist()
                tensors: Iterable[Any] = map(values.__getitem__, map(slice, stops, stops[1:]))
                if _has_shapes(component):
                    shapes = table.column(shapes_of(component.name)).to_pylist()
                    tensors = map(np.reshape, tensors, shapes)
                elif component.shape is not None and len(component.shape) > 1:
                    tensors = map(np.reshape, tensors, itertools.repeat(component.shape))
                columns.append(tensors)
            yield Columns(columns, table.num_rows)


def _arrow_type(component: ComponentSpec) -> Any:
    import pyarrow

    if component.dtype == "string":
        return pyarrow.large_binary()
    dtype = numpy_dtype(component.dtype)
    is_known = dtype.kind in "biuf" and dtype.isbuiltin == 1
    return pyarrow.from_numpy_dtype(dtype) if is_known else pyarrow.binary(dtype.itemsize)


def _arrow_values(component: ComponentSpec, tensors: Sequence[Any]) -> Any:
    import pyarrow

    kind = _arrow_type(component)
    if component.dtype == "string":
        strings = [
            text for t in tensors for text in ([t] if isinstance(t, bytes) else t.ravel().tolist())
        ]
        return pyarrow.array(strings, kind)
    flat = np.concatenate([np.ravel(tensor) for tensor in tensors])
    if pyarrow.types.is_fixed_size_binary(kind):
        return pyarrow.Array.from_buffers(
            kind, len(flat), [None, pyarrow.py_buffer(flat.tobytes())]
        )
    return pyarrow.array(flat, kind)


def _numpy_values(component: ComponentSpec, values: Any) -> Array:
    import pyarrow

    if component.dtype == "string":
        texts = np.empty(len(values), object)
        texts[:] = values.to_pylist()
        return texts
    dtype = numpy_dtype(component.dtype)
    if pyarrow.types.is_fixed_size_binary(values.type):
        data = np.frombuffer(values.buffers()[1] or b"", dtype)
        return data[values.offset : values.offset + len(values)]
    found: Array = values.to_numpy(zero_copy_only=False).astype(dtype, copy=False)
    return found


def _lists(sizes: Sequence[int], values: Any) -> Any:
    import pyarrow

    offsets = np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])
    return pyarrow.LargeListArray.from_arrays(pyarrow.array(offsets, pyarrow.int64()), values)


def _list_of(kind: Any) -> Any:
    import pyarrow

    return pyarrow.large_list(kind)


def _has_shapes(component: ComponentSpec) -> bool:
    shape = component.shape
    return shape is None or (len(shape) > 1 and None in shape)


def _size(tensor: Any) -> int:
    if isinstance(tensor, bytes):
        return len(tensor)
    return sum(map(len, tensor.flat)) if tensor.dtype == object else int(tensor.nbytes)


class Columns(NamedTuple):
    """Several elements, as each component's tensors."""

    tensors: Sequence[Iterable[Any]]
    elements: int


class ShardReader:
    """Reads the elements of the shard at a path: the function of a Python dataset."""

    def __init__(self, format: str, structure: str, components: Sequence[ComponentSpec]) -> None:  # noqa: A002
        self._format = format
        self._structure = structure
        self._components = [*components]

    def __call__(self, path: str) -> Iterator[Any]:
        build = assemble(self._structure)
        for tensors, count in _COLUMNS[self._format](path, self._components):
            yield from build(tensors, count)


@contextlib.contextmanager
def _local(path: str) -> Iterator[str]:
    """A local file with the content of `path`, for libraries that read only local files."""
    if not files.is_remote(path):
        yield path
        return
    with tempfile.NamedTemporaryFile(prefix="forebay-") as copy:
        with files.open_file(path) as file:
            shutil.copyfileobj(file, copy, COPIED_BYTES)
        copy.flush()
        yield os.fspath(copy.name)


COPIED_BYTES = 8 << 20
READ_RECORDS = 256
ROW_GROUP_BYTES = 32 << 20

_COLUMNS = {"arrayrecord": _array_record_columns, "parquet": _parquet_columns}

WRITERS: dict[str, Callable[[Write, Sequence[ComponentSpec]], ShardWriter]] = {
    "tfrecord": TFRecordWriter,
    "arrayrecord": ArrayRecordWriter,
    "parquet": ParquetWriter,
}
"""By format; each imports its library when it begins."""
