"""Registering files of records: what registration finds, leaves out, and refuses."""

from __future__ import annotations

import contextlib
import datetime
import io
import os
import shutil
import subprocess
import tarfile
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import braceexpand
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from forebay.service.errors import FailedPrecondition, InvalidArgument, NotFound
from forebay.service.pipelines.files import record_index, tars, tfrecords
from forebay.service.pipelines.files.byte_sources import ByteSource, opened_now
from forebay.service.pipelines.files.formats import Damaged, Facts
from forebay.service.pipelines.files.known_formats import FORMATS
from forebay.service.pipelines.files.manifest import FileEntry, Manifest, decode, difference
from forebay.service.pipelines.files.reading import FileRecords
from forebay.service.pipelines.kinds.file_paths import expanded
from forebay.service.pipelines.kinds.files import definition
from forebay.service.proto.python_pb2 import PythonDataset
from forebay.storage.errors import Corrupt
from forebay.storage.tfrecord import frame


@pytest.fixture
def register() -> Callable[..., FileRecords]:
    """What a worker has of registered files."""

    def made(files: Any, **how: Any) -> FileRecords:
        return FileRecords(PythonDataset.FromString(definition(files, **how).python))

    return made


Register = Callable[..., FileRecords]


def count_of(records: FileRecords) -> int:
    """Of the records that are read."""
    return sum(block.count for split in records.splits for block in records.blocks(split))


# An index.


def test_a_damaged_index_is_named_and_made_again(register: Register, tmp_path: Path) -> None:
    path = tmp_path / "a.tfrecord"
    path.write_bytes(frame(b"some") * 50)
    index = tmp_path / "a.tfrecord.forebay-index"
    records = register(path)
    whole = index.read_bytes()
    for damaged in (whole[:-80] + bytes(80), whole[:-1] + b"\1", whole[:40] + bytes(51 * 8)):
        index.write_bytes(damaged)
        with pytest.raises(Corrupt, match=f"its index {index} .*damaged.*register the files again"):
            count_of(records)
        assert count_of(register(path)) == 50
        assert index.read_bytes() == whole


def test_nothing_is_left_beside_an_index(register: Register, tmp_path: Path) -> None:
    path = tmp_path / "train-0"
    path.write_bytes(frame(b"some"))
    index = tmp_path / "train-0.forebay-index"

    class Blocked(tfrecords.Frames):
        def boundaries(self, source: ByteSource) -> Iterator[int]:
            index.mkdir()  # so that no file can be renamed to it
            return super().boundaries(source)

    with pytest.raises(InvalidArgument, match=f"the index {index} cannot be written"):
        record_index.counted(opened_now(str(path), {}), {}, Blocked())
    assert {one.name for one in tmp_path.iterdir()} == {path.name, index.name}
    index.rmdir()
    (tmp_path / "train-0.0123456789abcdef.forebay-index").touch()  # as of a killed process
    for _ in range(2):
        assert count_of(register(tmp_path / "train-*")) == 1


def test_a_file_that_changes_while_its_index_is_made(register: Register, tmp_path: Path) -> None:
    """Its ends stay as they are, so only its time tells."""
    path = tmp_path / "a.tfrecord"
    ends = [frame(bytes(5000)), frame(bytes(5000))]
    path.write_bytes(b"".join([ends[0], frame(b"12"), frame(b"3456"), ends[1]]))
    os.utime(path, ns=(10**18, 10**18))

    class Overtaken(tfrecords.Frames):
        def boundaries(self, source: ByteSource) -> Iterator[int]:
            yield from super().boundaries(source)
            path.write_bytes(b"".join([ends[0], frame(b"1234"), frame(b"56"), ends[1]]))

    record_index.counted(opened_now(str(path), {}), {}, Overtaken())
    assert count_of(register(path)) == 4


@pytest.mark.parametrize("size", [-1, -512, -1024, -(1 << 40)])
def test_a_member_of_a_negative_size_is_refused(
    register: Register, tmp_path: Path, size: int
) -> None:
    """tarfile would go round for ever. Also of a part of a file that was damaged later."""
    path = tmp_path / "a.tar"
    for names in (["a.x"], ["a.x", "b.x"]):
        with tarfile.open(path, "w") as tar:
            for name in names:
                tar.addfile(tarfile.TarInfo(name))
        last = tarfile.TarInfo(names[-1])
        last.size = size
        with open(path, "r+b") as file:
            file.seek(512 * (len(names) - 1))
            file.write(last.tobuf(tarfile.GNU_FORMAT))
        with pytest.raises(Corrupt, match=f"{path} .*has {size} bytes"):
            register(path)
        part = path.read_bytes()[512 * (len(names) - 1) :]
        with pytest.raises(Damaged, match=f"has {size} bytes"):
            [*tars._samples(iter([part]))]


# What is registered.


def test_a_file_that_is_written_while_it_is_registered(
    register: Register, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.tfrecord"
    path.write_bytes(frame(b"some"))
    tfrecord = FORMATS["tfrecord"]

    def slowly(of: ByteSource, options: Any) -> Facts:
        try:
            return tfrecord.inspect(of, options)
        finally:
            with path.open("ab") as file:
                file.write(written.pop(0))

    with monkeypatch.context() as meanwhile:
        meanwhile.setitem(FORMATS, "tfrecord", tfrecord._replace(inspect=slowly))
        more = frame(b"more")
        written = [more[:5], more[5:]]  # of which the second one is found cut
        while written:
            with pytest.raises(FailedPrecondition, match=f"{path} was changed while .*register ag"):
                register(path)
    assert count_of(register(path)) == 2


def test_a_directory_with_links(register: Register, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere" / "deep"
    elsewhere.mkdir(parents=True)
    (elsewhere / "a.tfrecord").write_bytes(frame(b"some") * 3)
    (elsewhere / "up").symlink_to(elsewhere.parent)
    data = tmp_path / "data"
    data.mkdir()
    (data / "b.tfrecord").write_bytes(frame(b"some"))
    (data / "_c.tfrecord").write_bytes(frame(b"some"))
    (data / "link").symlink_to(elsewhere)
    (data / "link2").symlink_to(elsewhere)
    (data / "self").symlink_to(data)
    assert count_of(register(data)) == 4
    (data / "d.tfrecord").symlink_to(data / "b.tfrecord")
    with pytest.raises(InvalidArgument, match=r"b\.tfrecord.*d\.tfrecord'\] are given more than"):
        register(data)
    (data / "d.tfrecord").unlink()
    (data / "d.tfrecord").symlink_to(data / "nothing")
    with pytest.raises(NotFound, match=r"d\.tfrecord cannot be read: No such file"):
        register(data)
    (data / "d.tfrecord").rename(data / "more")  # it may have been a directory
    with pytest.raises(NotFound, match=r"data/more cannot be read: No such file"):
        register(data)


def test_a_directory_that_cannot_be_read(register: Register, tmp_path: Path) -> None:
    """Its path is too long, which root cannot read, either."""
    (tmp_path / "b.tfrecord").write_bytes(frame(b"some"))
    folders = [os.open(tmp_path, os.O_RDONLY)]
    try:
        for _ in range(20):
            os.mkdir("d" * 250, dir_fd=folders[-1])
            folders.append(os.open("d" * 250, os.O_RDONLY, dir_fd=folders[-1]))
        with pytest.raises(FailedPrecondition, match="d cannot be read: File name too long"):
            register(tmp_path)
    finally:
        for folder in reversed(folders):
            with contextlib.suppress(OSError):
                os.rmdir("d" * 250, dir_fd=folder)
            os.close(folder)


def test_one_file_by_two_names_is_refused(register: Register, tmp_path: Path) -> None:
    (tmp_path / "a.tfrecord").write_bytes(frame(b"some"))
    os.link(tmp_path / "a.tfrecord", link := f"{tmp_path}/another")
    for other in f"{tmp_path}/./a.tfrecord", os.path.relpath(tmp_path / "a.tfrecord"), link:
        with pytest.raises(InvalidArgument, match="are given more than once: leave one out"):
            register([tmp_path / "a.tfrecord", other])


def test_a_file_url_is_a_path(register: Register, tmp_path: Path) -> None:
    (tmp_path / "a.tfrecord").write_bytes(frame(b"x"))
    assert count_of(register(f"file://{tmp_path}/*.tfrecord")) == 1


def test_braces_are_expanded_as_webdataset_does(register: Register, tmp_path: Path) -> None:
    for pattern in (
        "a{000..003}.tar", "{a,b}/{1..3}.x", "x{1..10..4}", "{10..7}", "{b,{1..2}}z", "{}", "{a}",
        "{-2..2}", "{01..3}", "{a,}b", "{{1..2}}", "{a{1..2}}", "{-01..1}", "{1..3..-2}",
    ):  # fmt: skip
        assert expanded(pattern) == [*braceexpand.braceexpand(pattern)]
    for number in (0, 1, 2, 4):
        (tmp_path / f"{number:03}.tfrecord").write_bytes(frame(b"x") * (number + 1))
    (tmp_path / "{0..9}.tfrecord").write_bytes(frame(b"x") * 100)
    assert count_of(register(f"{tmp_path}/{{002..000}}.tfrecord")) == 6
    assert count_of(register(f"{tmp_path}/00{{1,4}}.tf*")) == 7
    assert count_of(register(f"{tmp_path}/{{0..9}}.tfrecord")) == 100
    with pytest.raises(NotFound, match=r"'.*/003\.tfrecord': .* has \['00\d\.tfrecord"):
        register(f"{tmp_path}/{{000..004}}.tfrecord")
    with pytest.raises(InvalidArgument, match=r"is more than 262144 names"):
        register("{0..999}{0..999}.tar")


# Nulls of Parquet.


def test_values_that_fill_nulls(register: Register, tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    types = {
        "i": pa.int32(), "u": pa.uint64(), "f": pa.float32(), "b": pa.bool_(), "s": pa.string(),
        "y": pa.binary(), "t": pa.timestamp("us"), "d": pa.date32(), "k": pa.string(),
        "l": pa.list_(pa.uint8()), "p": pa.list_(pa.uint8(), 2), "n": pa.list_(pa.string()),
    }  # fmt: skip
    table = pa.table({name: pa.array([None, None], kind) for name, kind in types.items()})
    table = table.set_column(8, "k", table["k"].dictionary_encode())
    pq.write_table(table, path)
    fill = {
        "i": np.int32(-1), "u": np.uint8(7), "f": np.float32(0.5), "b": np.bool_(True),
        "s": np.str_("none"), "y": np.bytes_(b"\0x"), "t": 10**15, "d": 3, "k": "kind",
    }  # fmt: skip
    records = register(path, columns=[*fill], fill=fill)
    (block,) = records.blocks(0)
    found = dict(zip(sorted(fill), ([*one.elements()][1] for one in block.components), strict=True))
    assert found == fill | {"s": b"none", "k": b"kind"}
    assert count_of(register(path, columns=["f"], fill={"f": 0})) == 2
    wrong: dict[str, tuple[Any, ...]] = {
        "i": (1.5, np.float64(2), True, "1", 2**31, 2**70, None),
        "u": (-1,), "f": ("x", True), "b": (1,), "s": (1,), "y": (1,), "k": (1,),
        "t": (1.5, datetime.datetime.fromtimestamp(0, datetime.UTC), np.datetime64(0, "us")),
        "d": (datetime.date(2020, 1, 1),),
        "l": (b"ab", -1, 1.5, [1], np.zeros(1)), "p": (b"ab", 256, [1, 2]), "n": (1, ["ab"]),
    }  # fmt: skip
    for name, values in wrong.items():
        for value in values:
            with pytest.raises(InvalidArgument, match=f"fill=.*{name!r}: "):
                register(path, columns=[name], fill={name: value})


def test_the_warning_says_how_often_a_row_group_is_decoded(
    register: Register, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("a", "b", "c"):
        pq.write_table(pa.table({"x": range(20)}), tmp_path / f"{name}.parquet", row_group_size=10)
    register(tmp_path, shuffle_records=True, split_records=2)
    assert "decodes each row group up to 10 times" in caplog.text


# What two readers would understand differently.


def test_a_sparse_member_is_refused(tmp_path: Path, register: Register) -> None:
    with open(tmp_path / "a.bin", "wb") as file:
        file.truncate(1 << 20)
        file.write(b"x")
    subprocess.run(["tar", "-S", "-cf", "a.tar", "a.bin"], cwd=tmp_path, check=True)
    with pytest.raises(InvalidArgument, match=r"a.tar: member 'a.bin' is sparse.*without --sparse"):
        register(tmp_path / "a.tar")


def test_a_second_archive_behind_the_first_is_refused(tmp_path: Path, register: Register) -> None:
    whole = b""
    for name in "ab":
        with tarfile.open(tmp_path / "one.tar", "w") as tar:
            tar.addfile(tarfile.TarInfo(f"{name}.txt"))
        whole += (tmp_path / "one.tar").read_bytes()
    (tmp_path / "two.tar").write_bytes(whole)
    with pytest.raises(Corrupt, match="goes on behind the end of the archive"):
        register(tmp_path / "two.tar")


def test_an_index_of_another_tar_is_noticed_in_a_sample() -> None:
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as tar:
        tar.addfile(tarfile.TarInfo("a.txt"))
        tar.addfile(tarfile.TarInfo("b.txt"))
    with pytest.raises(Damaged, match="samples 'a' and 'b': the index is of another file"):
        list(tars._samples(iter([data.getvalue()])))


def test_files_of_different_times_are_named(tmp_path: Path, register: Register) -> None:
    for unit in ("us", "ms"):
        table = pa.table({"t": pa.array([1, 2], pa.timestamp(unit))})
        pq.write_table(table, tmp_path / f"{unit}.parquet")
    with pytest.raises(InvalidArgument, match=r"us.parquet .*\[us\].*\[ms\].*one type"):
        register(tmp_path)


def test_what_is_no_file_is_refused(tmp_path: Path, register: Register) -> None:
    os.mkfifo(tmp_path / "a.tfrecord")
    with pytest.raises(InvalidArgument, match=r"a.tfrecord' is no file"):
        register(tmp_path / "a.tfrecord")
    with pytest.raises(InvalidArgument, match=r"a.tfrecord' is no file"):
        register(tmp_path)
    (tmp_path / "a.tfrecord").unlink()
    with pytest.raises(NotFound, match=r"no files here whose names end in .*\.tfrecord"):
        register(tmp_path)


def test_a_directory_has_shards_and_what_indices_list(tmp_path: Path, register: Register) -> None:
    for number in range(2):
        name = tmp_path / f"x.tfrecord-0000{number}-of-00002"
        name.write_bytes(frame(b"record"))
    assert count_of(register(tmp_path)) == 2
    shutil.copytree(Path(__file__).parents[1] / "pipelines/mds", tmp_path / "mds/train")
    shutil.copy(tmp_path / "mds/train/shard.00000.mds", tmp_path / "mds/train/stray.mds")
    assert len(register(tmp_path / "mds")._manifest.files) == 4


def test_files_that_are_not_opened_take_little_memory() -> None:
    entries = [FileEntry(f"s3://a/{n}", n, f"ETag {n:032x}", 9, {"a": n}) for n in range(20_000)]
    stored = Manifest(format="parquet", files=entries, cuts=[0], structure="{}").encode()
    tracemalloc.start()
    found = decode(memoryview(stored))
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held < 12 * len(entries)
    assert [*found.files] == entries
    with pytest.raises(IndexError):
        found.files[-1]
    assert found.encode() == stored
    other = Manifest(format="parquet", files=entries[1:], cuts=[0], structure="{}").encode()
    assert difference(stored, other).startswith("list of files (s3://a/0 was removed, with 0 bytes")
