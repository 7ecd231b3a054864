"""Files of records, written and read by each format's own library, to compare with.

The MDS directory in tests/pipelines/mds was written by mosaicml-streaming 0.13.0, which wants
another NumPy: MDSWriter(columns={"a": "ndarray", "ad": "ndarray:int16", "af":
"ndarray:float32:2,3", "b": "bytes", "f": "float32", "i": "int", "j": "json", "p": "png", "s":
"str", "si": "str_int", "u": "uint8"}, size_limit=4096, hashes=["sha1"]) was given what
`mds_records` computes, and in "p" an image of 2 × 2 pixels.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import struct
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from array_record.python import array_record_module

from forebay.journal.proto import events_pb2 as ev
from forebay.service.pipelines import PythonRules, open_pipeline
from forebay.service.pipelines.files.reading import FileRecords
from forebay.service.proto import forebay_pb2 as pb
from forebay.service.proto.python_pb2 import PythonDataset
from forebay.service.structure import assemble

from .ordered_reads import as_bytes

FORMATS = ("arrayrecord", "tfrecord", "parquet", "arrow", "webdataset", "mds", "jsonl")
SUFFIX = {"arrayrecord": "array_record", "webdataset": "tar"}
MDS = Path(__file__).parent / "pipelines" / "mds"
MDS_RECORDS = 40
GROUP = 7  # rows of a Parquet file's row group


def flat(element: Any) -> bytes:
    """All of an element."""
    if isinstance(element, dict):
        return b"|".join(flat(element[name]) for name in sorted(element))
    if isinstance(element, np.ndarray) and element.dtype == object:
        return repr(element.tolist()).encode()
    return as_bytes(element)


Register = Callable[..., pb.RegisterDatasetRequest]


def opened(request: pb.RegisterDatasetRequest) -> FileRecords:
    return FileRecords(PythonDataset.FromString(request.python))


def definition_of(request: pb.RegisterDatasetRequest) -> ev.DatasetDefinition:
    definition = ev.DatasetDefinition(sources=request.sources, structure=request.structure)
    definition.python_function.SetInParent()
    return definition


@contextlib.contextmanager
def running(request: pb.RegisterDatasetRequest, **rules: Any) -> Iterator[Any]:
    """What a worker has of it, with these PythonRules."""
    given: dict[str, Any] = {"processes": 1, "where": "here:1"} | rules
    pipeline = open_pipeline(definition_of(request), request.python, python=PythonRules(**given))
    with contextlib.closing(pipeline):
        yield pipeline


def records(request: pb.RegisterDatasetRequest, split: int, start: int = 0) -> list[Any]:
    """The records of a split, as a child sends them."""
    build = assemble(request.structure)
    found: list[Any] = []
    with contextlib.closing(opened(request)) as files:
        for block in files.blocks(split, start):
            columns = [component.elements() for component in block.components]
            found += build(columns, block.count)
    return found


def all_records(request: pb.RegisterDatasetRequest) -> list[Any]:
    return [one for split in range(request.sources[0].count) for one in records(request, split)]


def elements(request: pb.RegisterDatasetRequest, split: int, start: int = 0) -> list[bytes]:
    """The records of a split, each as bytes."""
    return [*map(flat, records(request, split, start))]


def all_of(request: pb.RegisterDatasetRequest) -> list[bytes]:
    return [*map(flat, all_records(request))]


def pattern(format: str, directory: Path) -> str:  # noqa: A002
    if format == "mds":
        return str(directory / "mds")
    return str(directory / f"*.{SUFFIX.get(format, format)}")


def written(format: str, directory: Path, counts: Sequence[int]) -> list[Any]:  # noqa: A002
    """Writes files of so many records (of MDS, the directory), and returns the records, as the
    format's own library reads them."""
    if format == "mds":
        shutil.copytree(MDS, directory / "mds")
        return mds_records()
    found = []
    random = np.random.default_rng(len(counts))
    for number, count in enumerate(counts):
        path = str(directory / f"{number}.{SUFFIX.get(format, format)}")
        rows = [random.bytes(int(random.integers(0, 90))) for _ in range(count)]
        found += _WAYS[format](path, rows)
    return found


def write_array_record(path: str, rows: list[bytes], options: str) -> None:
    writer = array_record_module.ArrayRecordWriter(path, options)
    for row in rows:
        writer.write(row)
    writer.close()


def _array_records(path: str, rows: list[bytes]) -> list[Any]:
    write_array_record(path, rows, "group_size:4")
    reader = array_record_module.ArrayRecordReader(path)
    found: list[Any] = reader.read_all() if rows else []
    reader.close()
    return found


def _tfrecords(path: str, rows: list[bytes]) -> list[Any]:
    import tensorflow as tf

    with tf.io.TFRecordWriter(path) as writer:
        for row in rows:
            writer.write(row)
    return [*tf.data.TFRecordDataset(path).as_numpy_iterator()]


def _parquet(path: str, rows: list[bytes]) -> list[Any]:
    import pyarrow.parquet as pq

    pq.write_table(_table(rows), path, row_group_size=GROUP)
    return _rows(pq.read_table(path))


def _arrow(path: str, rows: list[bytes]) -> list[Any]:
    """A stream, or a compressed file."""
    import pyarrow as pa

    table = _table(rows)
    if len(rows) % 2:
        options = pa.ipc.IpcWriteOptions(compression="zstd")
        writer, reader = pa.ipc.new_file(path, table.schema, options=options), pa.ipc.open_file
    else:
        writer, reader = pa.ipc.new_stream(path, table.schema), pa.ipc.open_stream
    with writer:
        writer.write_table(table, max_chunksize=GROUP)
    with pa.OSFile(path) as file:
        return _rows(reader(file).read_all())


def _table(rows: list[bytes]) -> Any:
    import pyarrow as pa

    numbers, texts = [len(row) for row in rows], pa.list_(pa.string())
    return pa.table(
        {
            "bytes": pa.array(rows, pa.binary()),
            "text": pa.array([row.hex() for row in rows], pa.string()),
            "number": pa.array(numbers, pa.int32()),
            "float": pa.array([number / 7 for number in numbers], pa.float64()),
            "half": pa.array(np.array(numbers, np.float16)),
            "flag": pa.array([n % 2 == 0 for n in numbers], pa.bool_()),
            "time": pa.array(numbers, pa.timestamp("us")),
            "day": pa.array(numbers, pa.date32()),
            "list": pa.array([[*row] for row in rows], pa.list_(pa.uint8())),
            "texts": pa.array([[row.hex()] * (len(row) % 3) for row in rows], texts),
            "pair": pa.array([[n, n + 1] for n in numbers], pa.list_(pa.int64(), 2)),
            "kind": pa.array([str(n % 3) for n in numbers], pa.string()).dictionary_encode(),
            "fixed": pa.array([bytes([n, 0]) for n in numbers], pa.binary(2)),
        }
    )


def _rows(read: Any) -> list[Any]:
    """As Forebay has them."""
    import pyarrow as pa

    read = read.set_column(
        read.schema.get_field_index("time"), "time", read["time"].cast(pa.int64())
    )
    read = read.set_column(
        read.schema.get_field_index("day"), "day", read["day"].cast(pa.int32()).cast(pa.int64())
    )
    dtypes = {
        "number": np.int32, "float": np.float64, "half": np.float16, "flag": np.bool_,
        "time": np.int64, "day": np.int64, "list": np.uint8, "pair": np.int64, "texts": object,
    }  # fmt: skip
    return (
        [
            {
                name: np.array(_encoded(value), dtypes[name]) if name in dtypes else _encoded(value)
                for name, value in row.items()
            }
            for row in read.to_pylist()
        ]
        if read.num_rows
        else []
    )


def _encoded(value: Any) -> Any:
    if isinstance(value, list):
        return [*map(_encoded, value)]
    return value.encode() if isinstance(value, str) else value


def _webdataset(path: str, rows: list[bytes]) -> list[Any]:
    import webdataset

    with open(path, "wb") as file, webdataset.TarWriter(file) as writer:
        for number, row in enumerate(rows):
            name = f"{path.rpartition('/')[2]}/{'long' * (number % 40)}{number:03}"
            writer.write({"__key__": name, "bin": row, "Seg.txt": row.hex().encode()})
    tars = webdataset.tariterators
    with open(path, "rb") as stream:  # a WebDataset leaves it open
        members = tars.tar_file_expander([{"url": path, "stream": stream}])
        return [
            {"__key__": one["__key__"].encode(), "bin": one["bin"], "seg.txt": one["seg.txt"]}
            for one in tars.group_by_keys(members)
        ]


MEGATRON_DTYPES = {
    "uint8": 1, "int8": 2, "int16": 3, "int32": 4, "int64": 5, "float64": 6, "float32": 7,
    "uint16": 8,
}  # fmt: skip


def write_megatron(path: Path, sequences: list[Any], dtype: str) -> None:
    """As `_IndexWriter` of Megatron-LM's indexed_dataset.py writes it, a sequence a document."""
    path.with_suffix(".bin").write_bytes(
        b"".join(np.array(one, dtype).tobytes() for one in sequences)
    )
    lengths = [len(one) for one in sequences]
    pointers, at = [], 0
    for length in lengths:
        pointers.append(at)
        at += length * np.dtype(dtype).itemsize
    with open(path.with_suffix(".idx"), "wb") as index:
        index.write(b"MMIDIDX\x00\x00")
        index.write(struct.pack("<Q", 1))
        index.write(struct.pack("<B", MEGATRON_DTYPES[dtype]))
        index.write(struct.pack("<Q", len(lengths)))
        index.write(struct.pack("<Q", len(lengths) + 1))
        index.write(np.array(lengths, np.int32).tobytes())
        index.write(np.array(pointers, np.int64).tobytes())
        index.write(np.arange(len(lengths) + 1, dtype=np.int64).tobytes())


def some_sequences(count: int, dtype: str = "uint16") -> list[Any]:
    random = np.random.default_rng(count)
    return [random.integers(0, 100, random.integers(0, 9)).astype(dtype) for _ in range(count)]


def _json_lines(path: str, rows: list[bytes]) -> list[Any]:
    with open(path, "w", encoding="utf-8") as file:
        for row in rows:
            line = {"n": len(row), "f": len(row) / 7, "b": len(row) > 40, "list": [*row]}
            file.write(json.dumps({"text": row.hex() + "ä\n", **line}) + "\n")
    dtypes = {"n": np.int64, "f": np.float64, "b": np.bool_, "list": np.int64}
    with open(path, encoding="utf-8") as file:
        return [
            {
                name: np.array(value, dtypes[name]) if name in dtypes else value.encode()
                for name, value in json.loads(line).items()
            }
            for line in file
        ]


def mds_records() -> list[Any]:
    random = np.random.default_rng(0)
    return [
        {
            "a": np.arange(i + 1, dtype=np.int32).reshape(1, -1),
            "ad": np.arange(1 + i % 3, dtype=np.int16),
            "af": np.full((2, 3), i, np.float32),
            "b": random.bytes(i),
            "f": np.float32(i / 3),
            "i": np.int64(-i),
            "j": json.dumps({"n": i}).encode(),
            "s": f"text {i} ä".encode(),
            "si": str(10**20 + i).encode(),
            "u": np.uint8(i),
        }
        for i in range(MDS_RECORDS)
    ]


MDS_COLUMNS = ["a", "ad", "af", "b", "f", "i", "j", "s", "si", "u"]
"""All but the images, whose bytes are PNG's."""

_WAYS = {
    "arrayrecord": _array_records,
    "tfrecord": _tfrecords,
    "parquet": _parquet,
    "arrow": _arrow,
    "webdataset": _webdataset,
    "jsonl": _json_lines,
}
