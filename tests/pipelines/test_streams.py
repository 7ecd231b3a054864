"""Files that are read from their begin: each has what its own reader, or Python's, makes of it."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import random
import shutil
import tarfile
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import zstandard

from forebay.service.errors import InvalidArgument
from forebay.service.pipelines.files import byte_sources, open_files, streams
from forebay.service.pipelines.files.formats import Damaged
from forebay.service.pipelines.files.manifest import decode
from forebay.service.pipelines.files.reading import FileRecords
from forebay.service.proto import forebay_pb2 as pb
from forebay.service.proto.python_pb2 import PythonDataset
from forebay.storage.errors import Corrupt
from forebay.storage.tfrecord import frame

from ..record_files import (
    MDS,
    MDS_COLUMNS,
    Register,
    all_of,
    elements,
    flat,
    mds_records,
    opened,
    records,
    written,
)

COUNTS = (23, 0, 5, 400)


def _zstd(data: bytes) -> bytes:
    return zstandard.ZstdCompressor(write_checksum=True).compress(data)


def _of_parts(compress: Callable[[bytes], bytes], between: bytes = b"") -> Callable[[bytes], bytes]:
    return lambda data: between.join([compress(data[:100]), compress(b""), compress(data[100:])])


SKIPPABLE = b"\x5e\x2a\x4d\x18\x03\0\0\0abc"
PACKED: dict[str, Callable[[bytes], bytes]] = {
    ".gz": gzip.compress,
    ".members.gz": _of_parts(gzip.compress),
    ".zst": _zstd,
    ".frames.zst": _of_parts(_zstd, SKIPPABLE),
    ".skippable.zst": lambda data: SKIPPABLE + _zstd(data),
}


def splits(request: pb.RegisterDatasetRequest) -> range:
    return range(request.sources[0].count)


def with_skips(request: pb.RegisterDatasetRequest) -> tuple[FileRecords, list[int]]:
    """The records, and a list of those that will have been left out of the first split."""
    left: list[int] = []

    def leave_out(_split: int, first: int, records: int, _why: str) -> bool:
        left.extend(range(first, first + records))
        return True

    return FileRecords(PythonDataset.FromString(request.python), leave_out), left


def pack(directory: Path, kind: str) -> list[Path]:
    """Compresses all files there."""
    found = []
    for path in sorted(directory.iterdir()):
        new = path.with_name(path.name + kind)
        new.write_bytes(PACKED[kind](path.read_bytes()))
        path.unlink()
        found.append(new)
    return found


@pytest.mark.parametrize("count", [True, False])
@pytest.mark.parametrize("kind", PACKED)
@pytest.mark.parametrize("format", ["jsonl", "tfrecord", "webdataset"])
def test_compressed_files_have_the_records_of_plain_ones(
    register: Register,
    tmp_path: Path,
    format: str,  # noqa: A002
    kind: str,
    count: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """From any place, in small blocks and in large ones."""
    expected = [*map(flat, written(format, tmp_path, COUNTS))]
    files = pack(tmp_path, kind)
    request = register([*map(str, files)], count=count, split_records=1)
    assert [*request.lengths] == ([23, 5, 400] if count else [])
    assert len(splits(request)) == 3
    assert all_of(request) == expected
    assert {path.name for path in tmp_path.iterdir()} == {path.name for path in files}
    for start in (0, 1, 17, 399):
        assert elements(request, 2, start) == expected[28 + start :]
    assert elements(request, 1, 5) == []
    monkeypatch.setattr(streams, "FIRST_BYTES", 64)
    monkeypatch.setattr(streams, "_MOST_RECORDS", 7)
    monkeypatch.setattr(streams, "_BACK_BYTES", 10)
    assert all_of(request) == expected
    files_of = opened(request)._ranges.files
    order = np.array([5, 6, 390, 7, 8, 0, 399])
    block = files_of[3].take(order)
    again = files_of[3].take(np.sort(order))
    assert (block.count, again.count) == (7, 7)
    with pytest.raises(InvalidArgument, match=r"is read from its begin\. Shuffle splits"):
        register([*map(str, files)], count=count, shuffle_records=True)


@pytest.mark.parametrize("format", ["jsonl", "tfrecord", "webdataset"])
def test_plain_files_need_not_be_counted(
    register: Register,
    tmp_path: Path,
    format: str,  # noqa: A002
) -> None:
    expected = [*map(flat, written(format, tmp_path, COUNTS))]
    before = sorted(tmp_path.iterdir())
    request = register(tmp_path, count=False)
    assert all_of(request) == expected
    assert sorted(tmp_path.iterdir()) == before  # without indices
    made = opened(request)
    assert made.seek(2, 300) == 0  # its number there would not be known
    with pytest.raises(InvalidArgument, match="Shuffle splits"):
        register(tmp_path, count=False, shuffle_records=True)


def test_what_cannot_go_uncounted(register: Register, tmp_path: Path) -> None:
    written("parquet", tmp_path, [3])
    with pytest.raises(InvalidArgument, match=r"count=False is for .*'jsonl'.* is 'parquet'"):
        register(tmp_path, count=False)
    with pytest.raises(InvalidArgument, match=r"count=False is for .* this is 'mds'"):
        register(MDS, count=False, columns=MDS_COLUMNS)


def test_each_uncounted_file_is_a_split_and_small_counted_ones_share_one(
    register: Register, tmp_path: Path
) -> None:
    for number in range(100):
        text = "".join(f"{number}-{line}\n" for line in range(number % 3))
        (tmp_path / f"{number:02}.txt.gz").write_bytes(gzip.compress(text.encode()))
    uncounted = register(tmp_path, format="lines", count=False)
    assert len(splits(uncounted)) == 66
    counted = register(tmp_path, format="lines", split_records=10)
    assert sum(counted.lengths) == 99
    assert [*counted.lengths] == [10, 11] * 4 + [10, 5]
    assert all_of(uncounted) == all_of(counted)
    assert len(all_of(uncounted)) == 99


def test_plain_and_compressed_files_together(register: Register, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"x": 1}\n' * 10)
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(b'{"x": 2.5}\n' * 10))
    (tmp_path / "c.jsonl").write_text('{"x": 3}\n' * 10)
    request = register(tmp_path, split_records=4)
    assert [*request.lengths] == [10, 10, 10]
    values = [one["x"] for split in splits(request) for one in records(request, split)]
    assert values == [1.0] * 10 + [2.5] * 10 + [3.0] * 10
    assert elements(request, 2, 7) == [flat({"x": np.float64(3)})] * 3


@pytest.mark.parametrize("kind", ["GZIP", "ZLIB"])
def test_tfrecords_are_those_of_tensorflow(register: Register, tmp_path: Path, kind: str) -> None:
    import tensorflow as tf

    path = str(tmp_path / "data.tfrecord-00000-of-00001")
    rows = [random.Random(number).randbytes(number * 7 % 300) for number in range(1000)]
    with tf.io.TFRecordWriter(path, options=tf.io.TFRecordOptions(compression_type=kind)) as writer:
        for row in rows:
            writer.write(row)
    read = [*tf.data.TFRecordDataset(path, compression_type=kind).as_numpy_iterator()]
    request = register(path)
    assert all_of(request) == read == rows
    assert decode(PythonDataset.FromString(request.python).files).format == "tfrecord"
    assert elements(request, 0, 999) == rows[999:]


def test_samples_are_those_of_webdataset(register: Register, tmp_path: Path) -> None:
    import webdataset

    path = tmp_path / "a.tar.gz"
    with webdataset.TarWriter(str(path), compress=True) as writer:
        for number in range(300):
            image = random.Random(number).randbytes(5000)
            writer.write({"__key__": f"d/{number:03}", "jpg": image, "cls": str(number % 7)})
    with gzip.open(path, "rb") as stream:
        members = webdataset.tariterators.tar_file_expander([{"url": "", "stream": stream}])
        expected = [
            {"__key__": one["__key__"].encode(), "jpg": one["jpg"], "cls": one["cls"]}
            for one in webdataset.tariterators.group_by_keys(members)
        ]
    shutil.copy(path, tmp_path / "b.tgz")
    (tmp_path / "c.tar.zst").write_bytes(_zstd(gzip.decompress(path.read_bytes())))
    for name in ("a.tar.gz", "b.tgz", "c.tar.zst"):
        for count in (True, False):
            request = register(tmp_path / name, count=count)
            assert all_of(request) == [*map(flat, expected)]
    assert len(splits(register(tmp_path))) == 3
    columns = {"image": ["png", "jpg"], "label": "cls"}
    request = register(tmp_path / "a.tar.gz", columns=columns)
    assert records(request, 0, 298)[1] == {"image": expected[299]["jpg"], "label": b"5"}


def test_samples_of_a_stream_that_lack_a_column(register: Register, tmp_path: Path) -> None:
    path = tmp_path / "a.tar.gz"
    with tarfile.open(path, "w:gz") as tar:
        for number in range(streams.SAMPLE_RECORDS + 10):
            tar.addfile(tarfile.TarInfo(f"{number:05}.x"))
            if number != streams.SAMPLE_RECORDS + 5:
                tar.addfile(tarfile.TarInfo(f"{number:05}.y"))
    with pytest.raises(InvalidArgument, match="sample '01005' has"):
        register(path)
    with pytest.raises(InvalidArgument, match="missing='skip' needs an index of it: give `fill`"):
        register(path, missing="skip")
    assert len(all_of(register(path, fill={"y": b""}))) == 1010
    request = register(path, count=False)
    with pytest.raises(Corrupt, match=r"record 1005 of .*it lacks \['y'\], which others have"):
        all_of(request)
    assert len(all_of(register(path, count=False, fill={"y": b""}))) == 1010


def _pack_mds(directory: Path, compression: str, *, all_shards: bool = True) -> None:
    """As MDSWriter(compression=…) writes."""
    shutil.copytree(MDS, directory, dirs_exist_ok=True)
    index = json.loads((directory / "index.json").read_text())
    compress = _zstd if compression.startswith("zstd") else gzip.compress
    for shard in index["shards"] if all_shards else index["shards"][:1]:
        raw = directory / shard["raw_data"]["basename"]
        data = compress(raw.read_bytes())
        name = f"{raw.name}.{compression.partition(':')[0]}"
        (directory / name).write_bytes(data)
        shard["compression"] = compression
        hashes = {"sha1": hashlib.sha1(data).hexdigest()}
        shard["zip_data"] = {"basename": name, "bytes": len(data), "hashes": hashes}
        raw.unlink()
    (directory / "index.json").write_text(json.dumps(index))


@pytest.mark.parametrize("compression", ["zstd", "zstd:7", "gz"])
@pytest.mark.parametrize("all_shards", [True, False])
def test_compressed_shards_of_mds(
    register: Register,
    tmp_path: Path,
    compression: str,
    all_shards: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    expected = [*map(flat, mds_records())]
    _pack_mds(tmp_path, compression, all_shards=all_shards)
    request = register(tmp_path, columns=MDS_COLUMNS, split_records=1)
    shards = json.loads((MDS / "index.json").read_text())["shards"]
    assert [*request.lengths] == [shard["samples"] for shard in shards]
    assert all_of(request) == expected
    monkeypatch.setattr(open_files, "MOST_HELD_BYTES", 5000)
    shuffled = register(tmp_path, columns=MDS_COLUMNS, shuffle_records=True, split_records=9)
    assert all_of(shuffled) != expected
    assert sorted(all_of(shuffled)) == sorted(expected)
    made = opened(shuffled)
    for split in made.splits:
        assert [*made.blocks(split)]
        files = made._ranges.files._open.values()
        assert sum(getattr(file, "held_bytes", 0) for file in files) <= 5000


def test_compressed_shards_are_bounded_and_checked(
    register: Register, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _pack_mds(tmp_path, "zstd")
    request = register(tmp_path, columns=MDS_COLUMNS)
    shard = next(iter(sorted(tmp_path.glob("*.zstd"))))
    whole = shard.read_bytes()
    for damaged in (whole[:-20], whole[:50] + b"\0" * 40 + whole[90:]):
        shard.write_bytes(damaged)
        with pytest.raises(Corrupt, match=r"00000\.mds\.zstd .*zstd data are (cut|damaged)"):
            register(tmp_path, columns=MDS_COLUMNS)
    shard.write_bytes(whole)
    monkeypatch.setattr("forebay.service.pipelines.files.mds.MOST_SHARD_BYTES", 1000)
    with pytest.raises(Corrupt, match="decompresses to more than 1000 bytes: split it"):
        all_of(request)


# Damage.


def _text(lines: int) -> bytes:
    return b"".join(
        b"%d %s\n" % (n, random.Random(n).randbytes(20).hex().encode()) for n in range(lines)
    )


@pytest.mark.parametrize("kind", [".gz", ".zst"])
def test_cut_files_are_named_wherever_they_are_cut(
    register: Register, tmp_path: Path, kind: str
) -> None:
    """But at the end of a member, or of a frame, where nothing shows it."""
    text = _text(30_000)
    first, second = PACKED[kind](text[:100]), PACKED[kind](text[100:])
    path = tmp_path / f"a.txt{kind}"
    sizes = [*range(20, len(first + second), 99_999), len(first) - 1, len(first) + 1]
    for size in [*sizes, len(first + second) - 1]:
        path.write_bytes((first + second)[:size])
        if size > len(first + second) // 2:
            request = register(path, format="lines", count=False)
            found = 0
            with pytest.raises(Corrupt, match=rf"{path} cannot be read from .* data are cut"):
                for block in opened(request).blocks(0):
                    found += block.count
            assert found > 10_000
        with pytest.raises(Corrupt, match=f"{path} cannot be registered .* data are cut"):
            register(path, format="lines")
    path.write_bytes(first)
    assert all_of(register(path, format="lines")) == text[:100].splitlines()


@pytest.mark.parametrize("kind", [".gz", ".zst"])
def test_damaged_data_end_the_read_also_where_records_are_skipped(
    register: Register, tmp_path: Path, kind: str
) -> None:
    """What follows cannot be read, and nobody knows how much that is."""
    path = tmp_path / f"a.txt{kind}"
    whole = bytearray(PACKED[kind](_text(100_000)))
    path.write_bytes(whole)
    requests = [
        register(path, format="lines", count=count, on_error="skip") for count in (False, True)
    ]
    middle = len(whole) // 2
    whole[middle : middle + 64] = bytes(64)
    path.write_bytes(whole)
    for request in requests:
        made, left = with_skips(request)
        for _ in range(2):  # also if it is tried again
            found = 0
            with pytest.raises(Corrupt, match=rf"{path} cannot be read from record \d+ on: its"):
                for block in made.blocks(0):
                    found += block.count
            assert 0 < found < 100_000
        assert left == []
    with pytest.raises(Corrupt, match="are damaged before byte"):
        register(path, format="lines")


def test_a_damaged_record_of_a_stream_is_left_out(register: Register, tmp_path: Path) -> None:
    """Only it, although the file is a stream."""
    rows = [bytes([number % 256]) * 50 for number in range(3000)]
    frames = [frame(row) for row in rows]
    for bad in (5, 1700, 1701, 2999):
        frames[bad] = frames[bad][:-1] + bytes([frames[bad][-1] ^ 1])
    path = tmp_path / "a.tfrecord.gz"
    path.write_bytes(gzip.compress(b"".join(frames)))
    for count in (True, False):
        request = register(path, count=count, on_error="skip")
        made, left = with_skips(request)
        found = [one for block in made.blocks(0) for one in block.components[0].elements()]
        assert left == [5, 1700, 1701, 2999]
        assert found == [row for number, row in enumerate(rows) if number not in left]
        with pytest.raises(Corrupt, match=f"record 5 of {path} cannot be read: its checksum"):
            all_of(register(path, count=count))


@pytest.mark.parametrize("behind", [b"", b"\0" * 700, b"garbage"])
def test_what_lies_behind_gzip_is_padding_or_damage(
    register: Register, tmp_path: Path, behind: bytes
) -> None:
    path = tmp_path / "a.txt.gz"
    path.write_bytes(gzip.compress(b"a\nb\n") + behind)
    if behind == b"garbage":
        with pytest.raises(gzip.BadGzipFile):
            gzip.decompress(path.read_bytes())
        with pytest.raises(Corrupt, match="gzip data are damaged"):
            register(path, format="lines")
    else:
        assert (
            all_of(register(path, format="lines"))
            == gzip.decompress(path.read_bytes()).splitlines()
        )


# Streams.


def _stream(tmp_path: Path, data: bytes, kind: str) -> streams.UnpackedFile:
    path = tmp_path / "file"
    path.write_bytes(data)
    return streams.UnpackedFile(byte_sources.opened_now(str(path), {}), kind)


def test_a_stream_reads_any_range_in_bounded_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "_BACK_BYTES", 1000)
    draws = random.Random(0)
    data = draws.randbytes(300_000)
    stream = _stream(tmp_path, gzip.compress(data), "gzip")
    for _ in range(200):
        start = draws.randrange(310_000)
        size = draws.randrange(5000)
        assert stream.read(start, size) == data[start : start + size]
    assert stream.size == len(data)
    largest = 0
    for at in range(0, len(data), 100):
        assert stream.read(at, 100) == data[at : at + 100]
        largest = max(largest, len(stream._data))
    assert largest < 20_000
    assert stream.reaches(len(data))
    assert not stream.reaches(len(data) + 1)
    stream.close()


def test_what_decompresses_to_very_much_comes_in_pieces(tmp_path: Path) -> None:
    size = 300 << 20
    for kind, data in (
        ("gzip", gzip.compress(bytes(size), 6)),
        ("zstd", zstandard.ZstdCompressor().compress(bytes(size))),
    ):
        stream = _stream(tmp_path, data, kind)
        pieces = [len(piece) for piece in stream._decompressed()]
        assert sum(pieces) == size
        assert max(pieces) <= 160 << 20
        stream.close()


def test_a_stream_of_zlib(tmp_path: Path) -> None:
    data = _text(5000)
    stream = _stream(tmp_path, zlib.compress(data), streams.compression(zlib.compress(data)))
    assert stream.kind == "zlib"
    file = io.BufferedReader(stream.file())
    assert file.read() == data
    stream.close()
    cut = _stream(tmp_path, zlib.compress(data)[:-3], "zlib")
    for _ in range(2):
        with pytest.raises(Damaged, match="its zlib data are cut"):
            cut.reaches(len(data) + 1)
    assert cut.read(0, len(data) + 9) == data
    cut.close()


def test_nothing_stays_open(register: Register, tmp_path: Path) -> None:
    written("webdataset", tmp_path, [30])
    (path,) = pack(tmp_path, ".gz")
    before = len(os.listdir("/proc/self/fd"))
    request = register(path)
    with pytest.raises(InvalidArgument, match="has no columns"):
        register(path, columns=["nothing"])
    made = opened(request)
    assert [*made.blocks(0)]
    made.close()
    assert len(os.listdir("/proc/self/fd")) == before
