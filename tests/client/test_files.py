"""Registering files of records: what registration finds, leaves out, and refuses."""

from __future__ import annotations

import os
import pathlib
import tarfile
from collections.abc import Callable
from typing import Any

import pytest

from forebay.service.client import files as module
from forebay.service.client.files import register_files
from forebay.service.errors import InvalidArgument
from forebay.service.pipelines.files import record_index, tars, tfrecords
from forebay.service.pipelines.files.formats import Damaged
from forebay.service.pipelines.files.reading import FileRecords
from forebay.service.proto import forebay_pb2 as pb
from forebay.service.proto.python_pb2 import PythonDataset
from forebay.storage.errors import Corrupt
from forebay.storage.tfrecord import frame


@pytest.fixture
def register(monkeypatch: pytest.MonkeyPatch) -> Callable[..., FileRecords]:
    """`register_files`, and then what a worker has of it."""
    sent: list[pb.RegisterDatasetRequest] = []

    def keep(_: Any, request: pb.RegisterDatasetRequest) -> str:
        sent.append(request)
        return "id"

    monkeypatch.setattr(module, "registered", keep)

    def made(files: Any, **how: Any) -> FileRecords:
        assert register_files("nobody:1", files, **how) == "id"
        return FileRecords(PythonDataset.FromString(sent.pop().python))

    return made


Register = Callable[..., FileRecords]


def count_of(records: FileRecords) -> int:
    """Of the records that are read."""
    return sum(block.count for split in records.splits for block in records.blocks(split))


# An index.


def test_a_damaged_index_is_named_and_made_again(
    register: Register, tmp_path: pathlib.Path
) -> None:
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


def test_nothing_is_left_beside_an_index(register: Register, tmp_path: pathlib.Path) -> None:
    path = tmp_path / "train-0"
    path.write_bytes(frame(b"some"))
    index = tmp_path / "train-0.forebay-index"

    def walk(descriptor: int, size: int) -> Any:
        index.mkdir()  # so that no file can be renamed to it
        return tfrecords._walk(descriptor, size)

    with pytest.raises(InvalidArgument, match=f"the index {index} cannot be written"):
        record_index.made(str(path), {}, walk)
    assert {one.name for one in tmp_path.iterdir()} == {path.name, index.name}
    index.rmdir()
    (tmp_path / "train-0.0123456789abcdef.forebay-index").touch()  # as of a killed process
    for _ in range(2):
        assert count_of(register(tmp_path / "train-*")) == 1


def test_a_file_that_changes_while_its_index_is_made(
    register: Register, tmp_path: pathlib.Path
) -> None:
    """Its ends stay as they are, so only its time tells."""
    path = tmp_path / "a.tfrecord"
    ends = [frame(bytes(5000)), frame(bytes(5000))]
    path.write_bytes(b"".join([ends[0], frame(b"12"), frame(b"3456"), ends[1]]))
    os.utime(path, ns=(10**18, 10**18))

    def walk(descriptor: int, size: int) -> Any:
        found = tfrecords._walk(descriptor, size)
        path.write_bytes(b"".join([ends[0], frame(b"1234"), frame(b"56"), ends[1]]))
        return found

    record_index.made(str(path), {}, walk)
    assert count_of(register(path)) == 4


def test_samples_that_cannot_be_read_name_their_tar(
    register: Register, tmp_path: pathlib.Path
) -> None:
    path = tmp_path / "a.tar"
    for names, said in (
        (["a.x", "a.x"], "two members of one extension"),
        (["a.x", "b.y"], "write samples with the same extensions"),
    ):
        with tarfile.open(path, "w") as tar:
            for name in names:
                tar.addfile(tarfile.TarInfo(name))
        with pytest.raises(InvalidArgument, match=f"{path}: sample .*{said}"):
            register(path)


@pytest.mark.parametrize("size", [-1, -512, -1024, -(1 << 40)])
def test_a_member_of_a_negative_size_is_refused(
    register: Register, tmp_path: pathlib.Path, size: int
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
