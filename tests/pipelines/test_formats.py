"""Formats of files: ours and one of another package pass the contract; what is said of others."""

from __future__ import annotations

import re
import subprocess
import sys
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import lance
import numpy as np
import pyarrow as pa
import pytest

from forebay.service.errors import FailedPrecondition, ForebayError, InvalidArgument
from forebay.service.formats.contract import FormatContract, elements_of
from forebay.service.pipelines.files.known_formats import FORMATS, GROUP
from forebay.service.pipelines.kinds.files import definition

from ..other_packages import install, install_page
from ..record_files import MDS_COLUMNS, Register, pattern, some_sequences, write_megatron, written


class OurFormat(FormatContract):
    def write(self, directory: Path, counts: Sequence[int]) -> tuple[str, list[Any]]:
        return pattern(self.format, directory), written(self.format, directory, counts)


class TestArrayRecord(OurFormat):
    format = "arrayrecord"


class TestParquet(OurFormat):
    format = "parquet"


class TestArrow(OurFormat):
    format = "arrow"


class TestTFRecord(OurFormat):
    format = "tfrecord"


class TestWebDataset(OurFormat):
    format = "webdataset"


class TestMDS(OurFormat):
    format = "mds"
    options: ClassVar = {"columns": MDS_COLUMNS}


class TestMegatron(OurFormat):
    format = "tokens"

    def write(self, directory: Path, counts: Sequence[int]) -> tuple[str, list[Any]]:
        found = []
        for number, count in enumerate(counts):
            found += (sequences := some_sequences(count))
            write_megatron(directory / str(number), sequences, "uint16")
        return str(directory / "*.bin"), found

    def test_files_say_of_which_format_they_are(self, written: tuple[Any, list[Any]]) -> None:
        """A name that ends in .bin does not."""
        with pytest.raises(InvalidArgument, match=r"0\.bin is of no format .* give format"):
            definition(written[0])


class TestNumPy(OurFormat):
    format = "tokens"

    def write(self, directory: Path, counts: Sequence[int]) -> tuple[str, list[Any]]:
        found: list[Any] = []
        for number, count in enumerate(counts):
            rows = np.random.default_rng(count).integers(0, 1 << 30, (count, 2, 3))
            np.save(directory / f"{number}.npy", rows)
            found += [*np.load(directory / f"{number}.npy")]
        return str(directory / "*.npy"), found


class TestWindows(OurFormat):
    format = "tokens"
    options: ClassVar = {"tokens": {"dtype": np.uint32, "window": 5}}

    def write(self, directory: Path, counts: Sequence[int]) -> tuple[str, list[Any]]:
        found: list[Any] = []
        for number, count in enumerate(counts):
            path = directory / f"{number}.bin"
            np.random.default_rng(count).integers(0, 9, 5 * count, np.uint32).tofile(path)
            found += [*np.fromfile(path, np.uint32).reshape(-1, 5)]
        return str(directory / "*.bin"), found


class TestDocuments(OurFormat):
    format = "tokens"
    options: ClassVar = {"tokens": {"dtype": "int16", "eod": 0}}

    def write(self, directory: Path, counts: Sequence[int]) -> tuple[str, list[Any]]:
        found = []
        for number, count in enumerate(counts):
            documents = [np.append(one + 1, 0) for one in some_sequences(count, "int16")]
            found += [one.astype(np.int16) for one in documents]
            (directory / f"{number}.bin").write_bytes(
                b"".join(one.astype(np.int16).tobytes() for one in documents)
            )
        return str(directory / "*.bin"), found


class TestLance(OurFormat):
    format = "lance"

    def write(self, directory: Path, counts: Sequence[int]) -> tuple[str, list[Any]]:
        rows = pa.table(
            {
                "n": range(sum(counts)),
                "text": [f"{number}" * (number % 9) for number in range(sum(counts))],
                "vector": pa.array(
                    [[number, 0.5] for number in range(sum(counts))], pa.list_(pa.float32(), 2)
                ),
            }
        )
        begin = 0
        for count in counts:
            lance.write_dataset(rows.slice(begin, count), directory, mode="append")
            begin += count
        return str(directory), [
            {
                "n": np.int64(row["n"]),
                "text": row["text"].encode(),
                "vector": np.array(row["vector"], np.float32),
            }
            for row in rows.to_pylist()
        ]


class TestJsonLines(OurFormat):
    format = "jsonl"


class TestLines(OurFormat):
    format = "lines"

    def write(self, directory: Path, counts: Sequence[int]) -> tuple[str, list[Any]]:
        found: list[Any] = []
        for number, count in enumerate(counts):
            lines = [b"%d" % line * (line % 5) for line in range(count)]
            (directory / f"{number}.txt").write_bytes(b"".join(line + b"\n" for line in lines))
            found += lines
        return str(directory / "*.txt"), found

    def test_files_say_of_which_format_they_are(self, written: tuple[Any, list[Any]]) -> None:
        """Anything may be text."""
        with pytest.raises(InvalidArgument, match="is of no format"):
            definition(written[0])

    def test_a_file_that_is_cut_is_named(self, written: tuple[Any, list[Any]]) -> None:
        """Text has no end: a line that is cut is a shorter one, and all others are there."""
        files, records = written
        path = Path(files.replace("*", "0"))
        whole = path.read_bytes()
        others = records[len(whole.splitlines()) :]
        for size in (len(whole) - 1, len(whole) // 2, 5):
            path.write_bytes(whole[:size])
            assert self.all_of(self.register(files)) == whole[:size].splitlines() + others


def test_all_of_ours_are_here() -> None:
    assert {one.format for one in OurFormat.__subclasses__()} == {*FORMATS}


def test_the_format_of_the_page_passes_the_contract(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_page(tmp_path, "formats.md", "forebay_fvecs")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout
    tests = [name for name in dir(FormatContract) if name.startswith("test_")]
    assert re.search(rf"{len(tests)} passed", done.stdout)


WRONG = """
import numpy as np
from forebay.service.formats import *

NODE = {{"tensor": "float32", "shape": [2]}}

class File(RandomAccessFile):
    def take(self, records):
        return Block(len(records), ({take},))

FORMAT = Format(
    ({suffix!r},), lambda begin: False, lambda source, options: {facts},
    lambda source, options: File(source, 8), options={options},
)
"""
ONE = "Component(np.ones((len(records), 2), 'float32'))"


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ({"options": ("colums", "fill")}, "has ['colums'], which are no options"),
        ({"suffix": "one"}, "has ['one'], which are no options that a format may have, or suffix"),
        ({"facts": "1 // 0"}, "cannot tell what {path} has: ZeroDivisionError: "),
        ({"facts": "None"}, "cannot tell what {path} has: TypeError: "),
        ({"facts": "Facts(2.5, NODE)"}, "has: TypeError: 'float' object"),
        ({"facts": "Facts(-1, NODE)"}, "ValueError: Facts(records=-1, "),
        ({"facts": "Facts(9, NODE, (0, 5))"}, "is not what a file has; mend that package"),
        ({"facts": "Facts(9, NODE | {'tensor': 'float33'})"}, "is not what a file has"),
        ({"facts": "Facts(9, NODE | {'shape': 2})"}, "is not what a file has"),
        ({"facts": "Facts(9, {'dict': [['b', NODE], ['a', NODE]]})"}, "is not what a file has"),
        (
            {"take": ONE.replace("2", "3", 1)},
            "of float32 in shapes [[3]], and they were registered",
        ),
        ({"take": f"*[{ONE}] * 2"}, "in 2 columns of [1, 1], where 0 to 1 were to come in 1:"),
    ],
)
def test_what_a_package_does_wrong_is_said_of_it(
    register: Register, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    how: dict[str, Any], said: str,
) -> None:  # fmt: skip
    name = f"wrong{zlib.crc32(f'{how}'.encode())}"
    given = {"options": (), "suffix": ".one", "facts": "Facts(np.int64(9), NODE)", "take": ONE}
    (tmp_path / f"{name}.py").write_text(WRONG.format(**given | how))
    install(tmp_path, "theirs", GROUP, {name: f"{name}:FORMAT"})
    monkeypatch.syspath_prepend(tmp_path)
    (path := tmp_path / "a.one").write_text("records")
    with pytest.raises(ForebayError) as error:
        elements_of(register(path, format=name), 0)
    assert f"format {name!r} of the package theirs " in str(error.value)
    assert said.format(path=path) in str(error.value)


def test_what_is_said_of_other_packages(
    register: Register,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    files, packages = tmp_path / "files", tmp_path / "packages"
    files.mkdir()
    packages.mkdir()
    (files / "a.one").write_text("no format of ours")
    monkeypatch.syspath_prepend(packages)

    def refusal(name: str | None) -> str:
        with pytest.raises((FailedPrecondition, InvalidArgument)) as error:
            register(files / "a.one", format=name)
        return str(error.value)

    assert "'webdataset'], or install the package that brings it" in refusal("one")
    install(packages, "ours_by_another", GROUP, {"parquet": "format_one:FORMAT"})
    written("parquet", files, [3])
    assert sum(register(files / "0.parquet").lengths) == 3
    install(packages, "first", GROUP, {"one": "format_one:FORMAT", "two": "format_two:FORMAT"})
    assert "'one', 'parquet', 'tfrecord', 'tokens', 'two', 'web" in refusal("three")
    said = refusal("one")
    assert (
        "format 'one': format_one:FORMAT of the package first cannot be loaded (ModuleNotFoundE"
        in said
    )
    assert "is of no format" in refusal(None) and said in caplog.text
    assert sum(register(files).lengths) == 3, "what others bring is not in the way of ours"
    (packages / "format_two.py").write_text("FORMAT = {}")
    assert "format_two:FORMAT of the package first is a dict, and no Format; mend" in refusal("two")
    install(packages, "second", GROUP, {"one": "format_other:FORMAT"})
    assert "several packages bring 'one': " in refusal("one")
