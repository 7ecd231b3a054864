"""Files of records: what is read of them, beside each format's own library, and bad files."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import re
import socket
import struct
import tarfile
import threading
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from forebay.service.blocks import Block
from forebay.service.errors import (
    FailedPrecondition,
    ForebayError,
    InvalidArgument,
    NotFound,
    PipelineError,
)
from forebay.service.order import permuted_many
from forebay.service.pipelines import SplitRange
from forebay.service.pipelines.definitions import difference, has_no_code
from forebay.service.pipelines.files import inspecting, open_files
from forebay.service.pipelines.files.formats import Facts
from forebay.service.pipelines.files.manifest import FileEntry, decode
from forebay.service.pipelines.files.reading import PAGE, FileRecords
from forebay.service.pipelines.kinds import file_inspector
from forebay.service.pipelines.kinds import files as module
from forebay.service.proto import forebay_pb2 as pb
from forebay.service.proto.python_pb2 import PythonDataset
from forebay.storage.errors import Corrupt
from forebay.storage.tfrecord import frame

from ..record_files import (
    GROUP,
    MDS,
    Register,
    all_of,
    definition_of,
    opened,
    pattern,
    running,
    write_array_record,
    written,
)

COUNTS = (23, 0, 5, 40)


def test_files_are_closed_where_too_many_are_open(
    register: Register, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    records = written("tfrecord", tmp_path, COUNTS)
    monkeypatch.setattr(open_files, "MOST_OPEN", 1)
    request = register(tmp_path, split_records=9, shuffle_records=True, seed=4)
    order = permuted_many(np.arange(len(records)), len(records), 4, 0)
    assert all_of(request) == [records[number] for number in order]


def test_splits_of_parquet_are_row_groups(register: Register, tmp_path: Path) -> None:
    written("parquet", tmp_path, [GROUP + 1, GROUP])
    where = pattern("parquet", tmp_path)
    assert [*register(where, split_records=1).lengths] == [GROUP, 1, GROUP]
    assert [*register(where, split_records=GROUP + 1).lengths] == [GROUP + 1, GROUP]
    assert [*register(where, split_records=5, shuffle_records=True).lengths] == [5, 5, 5]


def test_there_are_at_most_1024_splits_by_default(register: Register, tmp_path: Path) -> None:
    (tmp_path / "a.tfrecord").write_bytes(frame(b"") * 3000)
    assert [*register(tmp_path).lengths] == [47] * 63 + [39]
    (tmp_path / "b.tfrecord").write_bytes(frame(bytes(4 << 20)) * 9)
    assert len(register(tmp_path / "b.tfrecord").lengths) == 9
    many = module._cuts(Facts(10**6, {}), 10**12, None, whole=False)
    assert len(many) == 1024 + 1


def test_columns(register: Register, tmp_path: Path) -> None:
    for name in ("parquet", "webdataset"):
        written(name, tmp_path, [3])
    some = register(tmp_path / "0.parquet", columns=["text", "half"])
    assert some.structure == (
        '{"dict":[["half",{"tensor":"float16","shape":[]}],["text",{"tensor":"string","shape":[]}]]}'
    )
    with pytest.raises(InvalidArgument, match=r"0\.parquet has no columns \['x'\]: give some of"):
        register(tmp_path / "0.parquet", columns=["text", "x"])
    with pytest.raises(InvalidArgument, match=r"0\.tar has no columns .*'__key__', 'bin'"):
        register(tmp_path / "0.tar", columns=["cls"])
    with pytest.raises(InvalidArgument, match=r"shard\.00000\.mds has no columns"):
        register(MDS, columns=["nothing"])
    assert all_of(register(tmp_path / "0.tar", columns=["bin"])) != []


# A function over the records.


def test_a_function_is_mapped_over_records(register: Register, tmp_path: Path) -> None:
    records = written("tfrecord", tmp_path, [30])
    request = register(tmp_path, map=lambda record: {"size": len(record)}, split_records=10)
    assert request.structure == '{"dict":[["size",{"tensor":"int64","shape":[]}]]}'
    assert not has_no_code(request.python)
    made = opened(request)
    assert [*made(1)] == [{"size": len(record)} for record in records[10:20]]


@pytest.mark.parametrize("shuffled", [False, True])
def test_a_record_of_a_split_is_named(register: Register, tmp_path: Path, shuffled: bool) -> None:
    records = written("tfrecord", tmp_path, [5, 0, 25])
    request = register(tmp_path, map=_as_it_is, split_records=10, shuffle_records=shuffled, seed=7)
    made = opened(request)
    for split in made.splits:
        for element, record in enumerate(made(split)):
            named = re.fullmatch(r"record (\d+) of .*/(\d)\.tfrecord", made.place(split, element))
            assert named is not None
            assert records[int(named[1]) + (5 if named[2] == "2" else 0)] == record


def _as_it_is(record: bytes) -> bytes:
    return record


def test_an_error_of_a_mapped_function_names_the_record(register: Register, tmp_path: Path) -> None:
    (tmp_path / "a.tfrecord").write_bytes(frame(b"5") * 3)
    (tmp_path / "b.tfrecord").write_bytes(frame(b"6") + frame(b"x"))
    with pytest.raises(ValueError, match="invalid literal") as failed:
        register(tmp_path, map=int, split_records=10)
    assert failed.value.__notes__ == [f"`map` was called with record 1 of {tmp_path}/b.tfrecord"]


def test_a_mapped_function_draws_by_the_page(register: Register, tmp_path: Path) -> None:
    """So that a bundle that begins anywhere has the same elements."""
    written("tfrecord", tmp_path, [3 * PAGE])
    drawing = np.random.default_rng(1)

    def mapped(_: bytes) -> tuple[float, float]:
        return drawing.random(), np.random.random()

    request = register(tmp_path, map=mapped, one_to_one=True, split_records=1000)
    made = opened(request)

    def drawn(seed: str, start: int) -> list[Any]:
        made.seed_generators(seed)
        skipped = made.seek(0, start)
        assert start - PAGE < skipped <= start
        return [*made(0)][start - skipped :]

    first = drawn("5 0 0", 0)
    assert len({*first}) == 3 * PAGE
    for start in (1, PAGE, PAGE + 7, 3 * PAGE - 1):
        assert drawn("5 0 0", start) == first[start:]
    assert drawn("5 1 0", 0) != first != drawn("6 0 0", 0)


# What a worker runs.


def test_a_worker_that_runs_no_python_reads_files(register: Register, tmp_path: Path) -> None:
    records = written("arrayrecord", tmp_path, [30])
    request = register(tmp_path, split_records=7)
    with running(request, allowed=False, processes=2) as pipeline:
        found = [
            text
            for block in pipeline.bundle(SplitRange(1, 3, 0), number=1, seed=2, start=3).blocks()
            for text in block.components[0].elements()
        ]
        assert found == records[10:28]
        everything = [
            text for block in pipeline.run(None).blocks() for text in block.components[0].elements()
        ]
        assert sorted(everything) == sorted(records)
    with (
        pytest.raises(FailedPrecondition, match="runs no Python datasets"),
        running(register(tmp_path, map=len), allowed=False),
    ):
        pass


def test_each_epoch_and_each_iteration_has_another_order(
    register: Register, tmp_path: Path
) -> None:
    records = written("tfrecord", tmp_path, [50])
    request = register(tmp_path, shuffle_records=True, split_records=10)

    def bundles(epoch: int, seed: int = 3) -> list[bytes]:
        made = opened(request)
        found: list[bytes] = []
        for split in range(5):
            made.seed_generators(f"{seed} {5 * epoch + split} {epoch}")
            for block in made.blocks(split):
                found += block.components[0].elements()
        return found

    orders = [bundles(0), bundles(1), bundles(0, seed=4)]
    for iteration in (1, 2):
        stored = request.python + PythonDataset(iteration=iteration).SerializeToString()
        made = FileRecords(PythonDataset.FromString(stored))
        orders.append(
            [
                text
                for split in range(5)
                for block in made.blocks(split)
                for text in block.components[0].elements()
            ]
        )
    for order in orders:
        assert sorted(order) == sorted(records)
    assert len({*map(tuple, orders)}) == len(orders)
    assert bundles(1) == orders[1]


# Files that change.


def test_changed_and_removed_files_are_named_where_they_are_read(
    register: Register, tmp_path: Path
) -> None:
    written("tfrecord", tmp_path, [5, 5])
    request = register(tmp_path)
    changed = tmp_path / "1.tfrecord"
    before = changed.read_bytes()
    changed.write_bytes(before + frame(b"more"))
    with pytest.raises(
        FailedPrecondition,
        match=rf"{changed} has {len(before) + 20} bytes with fingerprint \w{{8}}, and had "
        rf"{len(before)} bytes with fingerprint \w{{8}} when it was registered: .* anew",
    ):
        all_of(request)
    changed.write_bytes(before[:-5] + bytes([before[-5] ^ 1]) + before[-4:])  # of the same size
    with pytest.raises(FailedPrecondition, match=f"{len(before)} bytes with .*, and had"):
        all_of(request)
    changed.unlink()
    with pytest.raises(FailedPrecondition, match=rf"{changed} cannot be read .No such file"):
        all_of(request)


def test_what_differs_is_named_where_files_are_registered_again(
    register: Register, tmp_path: Path
) -> None:
    written("tfrecord", tmp_path, [5, 5, 5])
    first = register(tmp_path)
    assert register(tmp_path).python == first.python
    (tmp_path / "0.tfrecord").unlink()
    (tmp_path / "1.tfrecord").write_bytes(frame(b"other"))
    (tmp_path / "3.tfrecord").write_bytes(frame(b"new"))
    second = register(tmp_path)
    said = difference(definition_of(first), first.python, definition_of(second), second.python)
    for what in ("0.tfrecord was removed, with", "1.tfrecord has 21 bytes", "3.tfrecord was added"):
        assert what in said
    assert "2.tfrecord" not in said
    third = register(tmp_path, split_records=3)
    said = difference(definition_of(second), second.python, definition_of(third), third.python)
    assert said == "way of reading the same files"


# Bad files.


def test_a_cut_file_is_named_with_its_record(register: Register, tmp_path: Path) -> None:
    """The contract of formats has that the file is."""
    written("tfrecord", tmp_path, [9])
    path = tmp_path / "0.tfrecord"
    path.write_bytes(path.read_bytes()[:-7])
    with pytest.raises(
        Corrupt, match=r"record 8, at byte \d+, is cut: .* truncate it to \d+ bytes"
    ):
        register(path)
    (tmp_path / "mds").mkdir()
    for name in os.listdir(MDS):
        (tmp_path / "mds" / name).write_bytes((MDS / name).read_bytes())
    shard = tmp_path / "mds" / "shard.00002.mds"
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(Corrupt, match=f"{shard} .*says {shard.stat().st_size + 1}: it is cut"):
        register(tmp_path / "mds")


def test_a_damaged_record_is_named(register: Register, tmp_path: Path) -> None:
    """Its place is behind what a fingerprint sees."""
    rows = [bytes([number]) * 1000 for number in range(60)]
    tfrecords = tmp_path / "a.tfrecord"
    tfrecords.write_bytes(b"".join(map(frame, rows)))
    request = register(tfrecords, split_records=50)
    _damage(tfrecords, 31 * 1016 + 500)
    for shuffled in (False, True):
        request = register(tfrecords, split_records=60, shuffle_records=shuffled)
        with pytest.raises(Corrupt, match=f"record 31 of {tfrecords} cannot be read: its checksum"):
            all_of(request)
    path = tmp_path / "a.array_record"
    write_array_record(str(path), rows, "group_size:1,uncompressed")
    request = register(path, split_records=60)
    _damage(path, path.read_bytes().index(rows[31]) + 500)
    with pytest.raises(Corrupt, match=f"record 31 of {path} cannot be read"):
        all_of(request)


def _damage(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def test_an_index_that_is_missing_is_named(register: Register, tmp_path: Path) -> None:
    written("tfrecord", tmp_path, [5])
    elsewhere = tmp_path / "indices"
    request = register(tmp_path / "0.tfrecord", index_dir=elsewhere)
    assert not (tmp_path / "0.tfrecord.forebay-index").exists()
    (index,) = elsewhere.rglob("*.forebay-index")
    assert len(all_of(request)) == 5
    index.unlink()
    with pytest.raises(Corrupt, match=f"its index {index} is not there.*register the files again"):
        all_of(request)


@pytest.mark.parametrize("name", ["0.tfrecord", "0.tfrecord.forebay-index"])
def test_a_pipe_in_a_files_place_is_not_waited_for(
    register: Register, tmp_path: Path, name: str
) -> None:
    written("tfrecord", tmp_path, [5])
    request = register(tmp_path / "0.tfrecord")
    (tmp_path / name).unlink()
    os.mkfifo(tmp_path / name)
    for use in (lambda: all_of(request), lambda: register(tmp_path / "0.tfrecord")):
        with pytest.raises(ForebayError, match=r"is no regular file|is no file") as refused:
            use()
        assert name in str(refused.value)


@pytest.mark.parametrize("format", ["tfrecord", "webdataset"])
@pytest.mark.parametrize("how", ["index cut", "file cut", "index wrong"])
def test_what_is_cut_while_it_is_read_is_an_error(
    register: Register,
    tmp_path: Path,
    format: str,  # noqa: A002
    how: str,
) -> None:
    """It ended the process with SIGBUS where it was mapped."""
    written(format, tmp_path, [200])
    (path,) = tmp_path.iterdir()
    request = register(path, split_records=100)
    index = Path(f"{path}.forebay-index")
    read = opened(request)
    next(read.blocks(0))
    if how == "index wrong":  # whoever may write it makes its checksum, too
        data = bytearray(index.read_bytes())
        data[40 + 8 : 40 + 16] = struct.pack("<Q", 1 << 40)
        data[32:36] = google_crc32c.value(bytes(data[40:])).to_bytes(4, "little")
        index.write_bytes(data)
        read = opened(request)
    else:
        os.truncate(index if how == "index cut" else path, 100)
    with pytest.raises(ForebayError, match=r"cut|file ends|wrong") as raised:
        for split in (0, 1):
            for block in read.blocks(split):
                assert block.count
    assert str(index if how == "index cut" else path) in str(raised.value)


def test_files_that_are_read_as_a_whole_are_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[FileEntry] = []
    monkeypatch.setattr(file_inspector._Process, "ask", lambda _, entry: asked.append(entry))
    monkeypatch.setattr(file_inspector._Process, "answer", lambda _: Facts(0, {}))
    files = [FileEntry(f"s3://none/{number}", 1 << 30, "", 0) for number in range(99)]
    for of, nulls, most in (
        ("parquet", "raise", 64), ("parquet", "drop", 8), ("arrow", "raise", 8),
        ("arrayrecord", "raise", 8), ("tfrecord", "raise", 8),
    ):  # fmt: skip
        asked.clear()
        with contextlib.closing(file_inspector._looked_at(of, {"nulls": nulls}, files)) as looked:
            assert next(looked) == (files[0], Facts(0, {}))
        assert asked == files[:most], of


def test_a_registration_that_ends_early_ends_who_looks_at_its_files(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    failed: list[threading.ExceptHookArgs] = []
    monkeypatch.setattr(threading, "excepthook", failed.append)
    ours, theirs = socket.socketpair()
    child = threading.Thread(target=inspecting.serve, args=[theirs])
    child.start()
    with contextlib.closing(Connection(ours.detach())) as channel:
        inspecting.send(channel, ["tfrecord", {}])
        assert inspecting.received(channel) == "begun"
        inspecting.send(channel, ["/none", 0, "", 0])
        assert inspecting.received(channel)[0] == "error"
        (answering,) = (one for one in threading.enumerate() if one.name == "forebay-answer")
        with socket.socket(fileno=os.dup(channel.fileno())) as same:
            same.shutdown(socket.SHUT_RD)  # nobody reads the next answer
        inspecting.send(channel, ["/none", 0, "", 0])
        answering.join()
    child.join()
    assert not failed


def test_a_file_that_ends_its_reader_does_not_end_who_registers_it(
    register: Register, tmp_path: Path
) -> None:
    """Arrow aborts on it: a bit of the metadata has a column of strings be one of floats."""
    good, bad = tmp_path / "0.parquet", tmp_path / "1.parquet"
    pq.write_table(pa.table({"s": ["x", "yy", "z"] * 100}), good)
    strings, floats = b"\x1c\x15\x0c\x19", b"\x1c\x15\x08\x19"  # in Thrift
    assert strings in good.read_bytes()
    bad.write_bytes(good.read_bytes().replace(strings, floats))
    with pytest.raises(Corrupt, match=f"{bad} cannot be .* ended .it was killed by SIGABRT"):
        register(tmp_path)
    assert sum(register(good).lengths) == 300


def test_the_end_of_a_reading_process_names_the_file(register: Register, tmp_path: Path) -> None:
    def end(record: bytes) -> int:
        if record == b"bad":
            os.abort()
        return len(record)

    for name, record in (("0", b"good"), ("1", b"bad")):
        (tmp_path / f"{name}.tfrecord").write_bytes(frame(record))
    request = register(tmp_path, map=end, element_spec=("int64", ()), split_records=1)
    with (
        running(request) as pipeline,
        pytest.raises(PipelineError, match=r"killed by SIGABRT, after it read .*/1\.tfrecord"),
    ):
        assert len([*pipeline.run(None).blocks()]) == 1


@pytest.mark.parametrize("name", ["../secret.mds", "/etc/secret.mds", "a/../../secret.mds", ".."])
def test_an_index_json_leads_nowhere_else(register: Register, tmp_path: Path, name: str) -> None:
    written("mds", tmp_path, [])
    index = tmp_path / "mds" / "index.json"
    about = json.loads(index.read_text())
    about["shards"][0]["raw_data"]["basename"] = name
    index.write_text(json.dumps(about))
    with pytest.raises(
        InvalidArgument, match=r"index\.json has shards \[.*not below its directory"
    ):
        register(tmp_path / "mds")


def test_an_index_is_used_again_unless_the_file_has_another_time(
    register: Register, tmp_path: Path
) -> None:
    """Also if neither its size nor its ends tell that it was changed."""
    path, index = tmp_path / "a.tfrecord", tmp_path / "a.tfrecord.forebay-index"
    first = [bytes(5000), b"12", b"3456", bytes(5000)]
    second = [bytes(5000), b"1234", b"56", bytes(5000)]
    path.write_bytes(b"".join(map(frame, first)))
    request = register(path)
    written = index.stat().st_mtime_ns
    inode = index.stat().st_ino
    for changed in (written, written + 5, written - 5):
        os.utime(index, ns=(changed, changed))
        register(path)
        assert (index.stat().st_ino, index.stat().st_mtime_ns) == (inode, written)
    for rows, changed in ((second, written + 1), (first, written - 1)):  # as of a backup
        path.write_bytes(b"".join(map(frame, rows)))
        os.utime(path, ns=(changed, changed))
        if rows is second:
            with pytest.raises(Corrupt, match=r"record 1 of .* its index .*: register it again"):
                all_of(request)
        assert all_of(register(path)) == rows


def test_an_index_json_of_others_is_left_alone_if_the_format_is_given(
    register: Register, tmp_path: Path
) -> None:
    written("webdataset", tmp_path, [3])
    (tmp_path / "index.json").write_text('{"shardlist": []}')
    with pytest.raises(InvalidArgument, match=r"index\.json is no index of MDS.*give `format`"):
        register(tmp_path)
    assert sum(register(tmp_path, format="webdataset").lengths) == 3


def test_a_damaged_header_of_a_tar_is_no_end(register: Register, tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    with tarfile.open(path, "w") as tar:
        for name in ("__meta__/a.x", "nodot", "dir.d/a.tar.gz", "dir.d/b.tar.gz"):
            tar.addfile(tarfile.TarInfo(name))
    assert [*register(path).lengths] == [1, 1]
    _damage(path, 512 + 150)  # the checksum of a header, at which tarfile would end
    with pytest.raises(Corrupt, match="behind byte 512 it is no tar file"):
        register(path)


def test_compression_that_cannot_be_read_is_named(register: Register, tmp_path: Path) -> None:
    index = json.loads((MDS / "index.json").read_text())
    index["shards"][1] |= {"compression": "snappy", "zip_data": {"basename": "x", "bytes": 1}}
    (tmp_path / "index.json").write_text(json.dumps(index))
    with pytest.raises(InvalidArgument, match=r"shards compressed by \['snappy'\]: write"):
        register(tmp_path)
    (tmp_path / "a.tfrecord").write_bytes(b"\x1f\x8b" + bytes(100))
    with pytest.raises(Corrupt, match="has no whole header: the file is cut, damaged"):
        register(tmp_path / "a.tfrecord")


def test_bad_arguments(register: Register, tmp_path: Path) -> None:
    (tmp_path / "a.tfrecord").write_bytes(frame(b"x"))
    (tmp_path / "b.bin").write_bytes(b"what is it")
    (tmp_path / "empty.tfrecord").touch()
    cases: list[tuple[Any, dict[str, Any], type[ForebayError], str]] = [
        ("nothing/*.x", {}, NotFound, r"'nothing/\*\.x': nothing/ has \[\]$"),
        ("a.tfrecord", {"format": "avro"}, InvalidArgument, "format='avro' must be one of"),
        ("b.bin", {}, InvalidArgument, r"b\.bin is of no format"),
        ("empty.tfrecord", {}, InvalidArgument, "have no records"),
        ("a.tfrecord", {"columns": ["x"]}, InvalidArgument, r"columns=\['x'\] is for \['parquet'"),
        ("a.tfrecord", {"columns": "x"}, InvalidArgument, "columns='x' must be a list"),
        ("a.tfrecord", {"fill": {"x": 1}}, InvalidArgument, "fill=.* is for"),
        ("a.tfrecord", {"split_records": 0}, InvalidArgument, "split_records=0: give an integer"),
        ("a.tfrecord", {"packages": ["numpy"]}, InvalidArgument, "are for `map`"),
        ("a.tfrecord", {"packages": "numpy"}, InvalidArgument, "packages='numpy' must be a list"),
        ("a.tfrecord", {"columns": ()}, InvalidArgument, r"columns=\(\) must be a list"),
        ("a.tfrecord", {"columns": [1, "a"]}, InvalidArgument, r"columns=\[1, 'a'\] must be"),
        ("a.tfrecord", {"columns": 3}, InvalidArgument, "columns=3 must be a list"),
        ("a.tfrecord", {"fill": [1]}, InvalidArgument, r"fill=\[1\] must be a dict"),
        ("a.tfrecord", {"fill": {1: 2}}, InvalidArgument, r"fill=\{1: 2\} must be a dict"),
        ("a.tfrecord", {"format": ["mds"]}, InvalidArgument, r"format=\['mds'\] must be one of"),
        ("a.tfrecord", {"map": "len"}, InvalidArgument, "map='len': give a function of a record"),
        ("a.tfrecord", {"index_dir": 1}, InvalidArgument, "index_dir=1: give the path of a dir"),
        (["a.tfrecord", "*.tfrecord"], {}, InvalidArgument, r"a\.tfrecord'\] are given more than"),
        ("a.tfrecord", {"format": "parquet"}, Corrupt, "cannot be registered as parquet"),
    ]
    for files, how, error, said in cases:
        paths = [str(tmp_path / one) for one in ([files] if isinstance(files, str) else files)]
        if error is NotFound:
            paths = files
        with pytest.raises(error, match=said):
            register(paths, **how)
    for files, said in (
        (None, "files=None: give a pattern, a file, a directory"),
        (5, "files=5: give"),
        (b"a.tfrecord", "files=b'a.tfrecord': give"),
        ([tmp_path / "a.tfrecord", 5], "files has 5, which is no path: give"),
        ([b"a.tfrecord"], "files has b'a.tfrecord', which is no path"),
    ):
        with pytest.raises(InvalidArgument, match=said):
            register(files)
    assert decode(PythonDataset.FromString(register(tmp_path).python).files).format == "tfrecord"
    (tmp_path / os.fsdecode(b"\xff.tfrecord")).write_bytes(frame(b"x"))
    for files in (tmp_path, f"{tmp_path}/*.tfrecord"):
        with pytest.raises(InvalidArgument, match=r"udcff\.tfrecord' has bytes that are no UTF-8"):
            register(files)


# Files that lie, or break, where they are read.


def _mds(path: Path, encodings: dict[str, str], rows: list[list[bytes]]) -> None:
    """A shard whose columns have no fixed sizes."""
    about = {
        "column_names": [*encodings],
        "column_encodings": [*encodings.values()],
        "column_sizes": [None] * len(encodings),
    }
    head = json.dumps(about).encode()
    samples = [struct.pack(f"<{len(row)}I", *map(len, row)) + b"".join(row) for row in rows]
    begin = 4 * (len(rows) + 2) + len(head)
    offsets = np.cumsum([begin, *map(len, samples)]).astype("<u4").tobytes()
    path.write_bytes(struct.pack("<I", len(rows)) + offsets + head + b"".join(samples))


def _ndarray(values: Any) -> bytes:
    array = np.array(values)
    code = {"int32": 33, "float32": 34, "float64": 66}[array.dtype.name]
    return (
        bytes([code, array.ndim << 2 | 2])
        + struct.pack(f"<{array.ndim}I", *array.shape)
        + array.tobytes()
    )


@pytest.mark.parametrize("shuffled", [False, True])
def test_arrays_of_another_dtype_or_rank_are_never_cast(
    register: Register, tmp_path: Path, shuffled: bool
) -> None:
    ints = [[_ndarray(np.array([1, 2], np.int32))]] * 2
    for others in (np.array([1.5, 1.75], np.float32), np.array([[1, 2]], np.int32)):
        _mds(tmp_path / "0.mds", {"a": "ndarray"}, ints)
        _mds(tmp_path / "1.mds", {"a": "ndarray"}, [ints[0], [_ndarray(others)]])
        request = register(
            [tmp_path / "0.mds", tmp_path / "1.mds"], format="mds", shuffle_records=shuffled
        )
        with pytest.raises(ForebayError, match=r"1\.mds .*(float32|\[\[1, 2\]\])"):
            all_of(request)


def test_a_split_that_is_had_computes_nothing_again(register: Register, tmp_path: Path) -> None:
    written("tfrecord", tmp_path, [PAGE + 9])
    made = opened(register(tmp_path, split_records=1000, map=len, one_to_one=True))
    made.seed_generators("1 0 0")
    assert made.seek(0, PAGE + 20) == PAGE + 9
    assert [*made(0)] == []


def blocks_of(request: pb.RegisterDatasetRequest) -> list[Block]:
    return [*opened(request).blocks(0)]


@pytest.mark.parametrize("shuffled", [False, True])
def test_a_damaged_page_is_named_with_the_records_of_its_row_group(
    register: Register, tmp_path: Path, shuffled: bool
) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(
        pa.table({"x": np.arange(40_000)}),
        path,
        row_group_size=10_000,
        use_dictionary=False,
        compression="NONE",
        write_page_checksum=True,
    )
    request = register(path, shuffle_records=shuffled, split_records=40_000)
    _damage(path, path.read_bytes().index(np.arange(25_000, 25_009).tobytes()))
    with pytest.raises(Corrupt, match=f"a record from 20000 to 29999 of {path} cannot be read"):
        all_of(request)


def test_what_the_system_refuses_is_no_damage(register: Register, tmp_path: Path) -> None:
    written("tfrecord", tmp_path, [9])
    made = opened(register(tmp_path))
    assert [*made.blocks(0)]
    with open("/proc/self/mem", "rb") as unreadable:
        file = made._ranges.files[0]
        os.dup2(unreadable.fileno(), file.source._descriptor)  # type: ignore[attr-defined]
        with pytest.raises(FailedPrecondition, match=r"0\.tfrecord cannot be read: .*Input/output"):
            [*made.blocks(0)]


@pytest.mark.parametrize("shuffled", [False, True])
def test_blocks_of_parquet_are_bounded(register: Register, tmp_path: Path, shuffled: bool) -> None:
    """Also of strings that are equal, which a file has once, and of names with a dot."""
    path = tmp_path / "a.parquet"
    texts = [str(number % 3) * 4000 for number in range(20_000)]
    column = pa.array(texts)
    for text in (column, column.dictionary_encode(), pa.array([[one] for one in texts])):
        pq.write_table(pa.table({"a.b": text, "n": np.arange(20_000)}), path)
        request = register(path, shuffle_records=shuffled, split_records=20_000)
        blocks = blocks_of(request)
        assert max(block.payload_bytes for block in blocks) <= 20 << 20
        numbers = np.concatenate([block.components[1].values for block in blocks])
        if shuffled:
            assert numbers.tolist() == permuted_many(np.arange(20_000), 20_000, 0, 0).tolist()
        else:
            assert numbers.tolist() == [*range(20_000)]
        at = 0
        for block in blocks:
            (first,) = [next(block.components[0].elements())]
            assert np.ravel(first)[0] == texts[numbers[at]].encode()
            at += block.count


def test_an_mds_header_is_not_trusted(register: Register, tmp_path: Path) -> None:
    """Each is named, and nothing stays open."""
    path = tmp_path / "a.mds"
    gc.collect()  # what earlier tests have left open
    before = len(os.listdir("/proc/self/fd"))

    def refused(error: type[ForebayError], said: str, data: bytes | None = None) -> None:
        if data is not None:
            path.write_bytes(data)
        with pytest.raises(error, match=f"{path}.*{said}"):
            register(path)
        assert len(os.listdir("/proc/self/fd")) == before

    refused(Corrupt, "8 bytes, and says 4294967295 samples", struct.pack("<II", 2**32 - 1, 8))
    refused(Corrupt, "ends 4 bytes before", b"")
    _mds(path, {"a": "pkl"}, [[b"x"]])
    refused(InvalidArgument, "column 'a' in encoding 'pkl'")
    _mds(path, {"a": "ndarray:int16:x"}, [[b"x"]])
    refused(Corrupt, "no MDS shard .*'x'")
    _mds(path, {"a": "ndarray:what"}, [[b"x"]])
    refused(Corrupt, "an array of 'what'")
    for shape in ("-1,4", f"{1 << 62}", ",".join("1" * 32)):
        _mds(path, {"a": f"ndarray:int16:{shape}"}, [[b"xxxx"]])
        refused(Corrupt, f"an array of shape '{shape}'")
    for sample in (b"", b"\x07\x08", b"\x21\xff\xff", _ndarray([1.0])[:-1]):
        _mds(path, {"a": "ndarray"}, [[sample]])
        refused(Corrupt, "(no MDS shard|column 'a' has)")
    _mds(path, {"a": "ndarray", "b": "str"}, [[b"x", b"y"]])
    whole = path.read_bytes()
    for old, new in (
        (b"[null, null]", b"[null]      "),
        (b"[null, null]", b"[-999, -999]"),
        (b"[null, null]", b'["8888", 1] '),
        (b'["a", "b"]', b"[     {}] "),
        (b'["a", "b"]', b"[[8], [8]]"),
        (b'"column_sizes"', b'"column_what_"'),
        (b'{"column', b'["column'),
    ):
        assert old in whole
        refused(Corrupt, "(no MDS shard|it has a column)", whole.replace(old, new))
    back = struct.pack("<I", struct.unpack_from("<I", whole, 8)[0] - 1)
    refused(Corrupt, "says", whole[:8] + back + whole[12:])
    _mds(path, {"a": "str"}, [[b"x"], [b"y"]])
    whole = path.read_bytes()
    refused(Corrupt, "do not follow", whole[:8] + struct.pack("<I", 2**31) + whole[12:])
