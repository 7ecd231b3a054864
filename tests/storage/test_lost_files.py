"""Files that somebody deleted or emptied are missed, whatever is left looks like."""

from __future__ import annotations

import pathlib

import pytest

from forebay.journal import verify
from forebay.storage import Corrupt, FileStorage


def write(directory: pathlib.Path, records: int) -> None:
    writer = FileStorage(directory).open_writer("test")
    for number in range(records):
        writer.append([b"%d" % number])
    writer.close()


@pytest.mark.parametrize("damage", ["delete", "empty", "halve"])
def test_a_log_that_is_shorter_than_when_the_last_term_began(
    tmp_path: pathlib.Path, damage: str
) -> None:
    write(tmp_path, 20)
    write(tmp_path, 1)
    (segment,) = (tmp_path / "segments").iterdir()
    if damage == "delete":
        segment.unlink()
    else:
        data = segment.read_bytes()
        segment.write_bytes(data[: len(data) // 2] if damage == "halve" else b"")
    with pytest.raises(Corrupt, match="held 20 when term 2 began"):
        FileStorage(tmp_path).open_writer("test")


def test_verify_misses_an_empty_log(tmp_path: pathlib.Path) -> None:
    write(tmp_path, 3)
    (segment,) = (tmp_path / "segments").iterdir()
    segment.write_bytes(b"")
    assert "no records" in verify(FileStorage(tmp_path)).problems[0].message
