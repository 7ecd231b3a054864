"""JSON lines and lines of text, compared with Python's json and with bytes that are split."""

from __future__ import annotations

import gzip
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from forebay.service.errors import InvalidArgument
from forebay.service.pipelines.files import lines, streams
from forebay.service.pipelines.files.reading import FileRecords
from forebay.service.proto.python_pb2 import PythonDataset
from forebay.storage.errors import Corrupt
from forebay.storage.tfrecord import frame

from ..record_files import Register, all_records, flat


def texts_of(path: Path) -> list[bytes]:
    """Its lines by Python, which knows more ends of lines in text than in bytes."""
    data = path.read_bytes().removeprefix(b"\xef\xbb\xbf")
    return [line.removesuffix(b"\n").removesuffix(b"\r") for line in data.splitlines(keepends=True)]


EDGES = {
    "empty": b"",
    "one": b"a\n",
    "no newline at the end": b"a\nb",
    "only a newline": b"\n",
    "blank lines": b"\n\na\n \t\n\nb\n\n\n",
    "CRLF": b"a\r\n\r\nb\r\nc",
    "BOM": b"\xef\xbb\xbfa\nb\n",
    "only a BOM": b"\xef\xbb\xbf",
    "no UTF-8": b"\xff\xfe\n\x80\n\0\n",
    "of a window": b"x" * 63 + b"\n" + b"y" * 64 + b"\n" + b"z" * 65,
    "huge": b"a\n" + b"b" * (3 << 20) + b"\nc\n" + b" " * (2 << 20) + b"\nd\n",
}


@pytest.mark.parametrize("count", [True, False])
@pytest.mark.parametrize("kind", ["", ".gz"])
@pytest.mark.parametrize("edge", EDGES)
def test_lines_are_bytes_between_newlines(
    register: Register,
    tmp_path: Path,
    edge: str,
    kind: str,
    count: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain, path = tmp_path / "plain", tmp_path / f"a.log{kind}"
    plain.write_bytes(EDGES[edge])
    path.write_bytes(gzip.compress(EDGES[edge]) if kind else EDGES[edge])
    if edge in ("empty", "only a BOM"):
        with pytest.raises(InvalidArgument, match="have no records"):
            register(path, format="lines", count=count)
        return
    for window in (64, 1 << 20) if edge != "huge" else (1 << 20,):
        monkeypatch.setattr(lines, "_WINDOW_BYTES", window)
        request = register(path, format="lines", count=count, split_records=2)
        assert all_records(request) == texts_of(plain)
        for index in tmp_path.glob("*.forebay-index"):
            index.unlink()


@pytest.mark.parametrize("kind", ["", ".gz"])
@pytest.mark.parametrize("window", [1, 3, 64, 1 << 20])
def test_blank_lines_of_json_are_no_records_and_do_not_shift_numbers(
    register: Register, tmp_path: Path, kind: str, window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lines, "_WINDOW_BYTES", window)
    draws = random.Random(window)
    text, rows, numbers = b"\xef\xbb\xbf" * draws.randrange(2), [], list[int]()
    for number in range(1, 200):
        if draws.random() < 0.3:
            text += draws.choice([b"\n", b"  \t\n", b"\r\n", b" " * 70 + b"\n"])
            continue
        rows.append({"n": number})
        numbers.append(number)
        text += b" " * draws.randrange(3) + json.dumps(rows[-1]).encode()
        text += draws.choice([b"\n", b"\r\n", b" \n"])
    path = tmp_path / f"a.jsonl{kind}"
    pack = gzip.compress if kind else bytes
    path.write_bytes(pack(text))
    assert all_records(register(path, split_records=7)) == rows
    last = text.rstrip()
    path.write_bytes(pack(last))
    assert all_records(register(path)) == rows
    for bad in (0, 5, len(numbers) - 1):
        one = b'{"n": %d}' % numbers[bad]
        path.write_bytes(pack(text.replace(one, one[:-1])))
        with pytest.raises(Corrupt, match=f"line {numbers[bad]} is no JSON object"):
            register(path)
        request = register(path, on_error="skip", split_records=1000)
        made = FileRecords(PythonDataset.FromString(request.python))
        with pytest.raises(
            Corrupt, match=f"record {bad} of {path} cannot be read: line {numbers[bad]}: "
        ):
            [*made.blocks(0)]


DTYPES = {
    "int": np.int64, "float": np.float64, "bool": np.bool_, "a b.c-d": np.int64,
    "ints": np.int64, "floats": np.float64, "bools": np.bool_, "texts": object,
}  # fmt: skip


def as_tensors(row: dict[str, Any]) -> dict[str, Any]:
    def encoded(value: Any) -> Any:
        return value.encode() if isinstance(value, str) else value

    return {
        name: encoded(value)
        if name == "text"
        else np.array([*map(encoded, value)] if isinstance(value, list) else value, DTYPES[name])
        for name, value in row.items()
    }


def test_values_are_those_of_pythons_json(register: Register, tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {
            "int": draws.randrange(-(1 << 63), 1 << 63),
            "float": draws.uniform(-1e9, 1e9) if number % 3 else number,
            "bool": number % 2 == 0,
            "text": "".join(chr(draws.randrange(1, 0x800)) for _ in range(number)) + "\u2028😀",
            "ints": [*range(number % 4)],
            "floats": [0.5, 1, number][: number % 4],
            "texts": [str(number)] * (number % 3),
            "bools": [True, False],
            "a b.c-d": number,
        }
        for draws in [random.Random(7)]
        for number in range(60)
    ]
    for ascii_only in (True, False):
        path = tmp_path / f"{ascii_only}.jsonl"
        text = "".join(json.dumps(row, ensure_ascii=ascii_only) + "\n" for row in rows)
        path.write_text(text, encoding="utf-8")
        request = register(path)
        found = all_records(request)
        assert [*map(flat, found)] == [
            flat(as_tensors(json.loads(line))) for line in text.strip().split("\n")
        ]
        assert json.loads(request.structure)["dict"][2] == [
            "bools", {"tensor": "bool", "shape": [None]},
        ]  # fmt: skip
        one = found[3]
        assert one["floats"].dtype == np.float64
        assert (one["int"].dtype, one["float"].dtype) == (np.int64, np.float64)


def write(path: Path, *rows: Any) -> Path:
    path.write_text(
        "".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows)
    )
    return path


def test_columns_and_values_for_what_is_null_or_missing(register: Register, tmp_path: Path) -> None:
    path = write(
        tmp_path / "a.jsonl",
        {"x": 1, "t": "a", "l": [1, None], "odd": {"deep": 1}},
        {"x": None, "t": "b", "l": None},
        {"t": None, "l": []},
    )
    fill = {"x": -1, "t": "none", "l": 7}
    rows = [
        {"x": 1, "t": b"a", "l": [1, 7]},
        {"x": -1, "t": b"b", "l": []},
        {"x": -1, "t": b"none", "l": []},
    ]
    found = all_records(register(path, columns=["x", "t", "l"], fill=fill))
    assert [{**one, "l": one["l"].tolist()} for one in found] == rows
    for column, line, said in (
        ("x", 2, r"Expected `int`, got `null` - at `\$\.x`"),
        ("t", 3, r"Expected `str`, got `null` - at `\$\.t`"),
        ("l", 1, r"Expected `int`, got `null` - at `\$\.l\[1\]`"),
    ):
        with pytest.raises(InvalidArgument, match=f"{path}, line {line}: {said}.* give `fill`"):
            register(path, columns=[column])
    write(path, {"x": 1}, {"x": 2}, {"y": 1})
    with pytest.raises(InvalidArgument, match="line 3: Object missing required field `x`"):
        register(path, columns=["x"])
    with pytest.raises(InvalidArgument, match="line 1: Object missing required field `y`"):
        register(path, fill={"x": 1})
    assert all_records(register(path, fill={"y": 0.5, "x": 9, "z": b"\xff"}))[2] == {
        "x": 9, "y": 1.0, "z": b"\xff",
    }  # fmt: skip
    for options, said in (
        ({"columns": ["q"]}, r"has no columns \['q'\]: give some of \['x', 'y'\]"),
        ({"fill": {"x": "a", "y": 1}}, r"column 'x' of \['int64', 'string'\]"),
        ({"columns": {"x": "y"}}, "must be a list, as this is 'jsonl'"),
        ({"missing": "skip"}, r"missing='skip' is for \['webdataset'\], and this is 'jsonl'"),
    ):
        with pytest.raises(InvalidArgument, match=said):
            register(path, **options)


def test_values_that_are_no_tensor_are_named(register: Register, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    for value, said in (
        ({"a": 1}, r"column 'x' of \['int64', 'nested'\].* format='lines' with a `map`"),
        ([[1]], r"column 'x' of \['int64', 'nested'\] and lists in its first lines"),
        ("a", r"column 'x' of \['int64', 'string'\] in its first lines: read others"),
        (True, r"column 'x' of \['bool', 'int64'\]"),
        ([1], r"column 'x' of \['int64'\] and lists"),
        (1 << 63, r"line 2: Expected `int` <= 9223372036854775807 - at `\$\.x`"),
    ):
        write(path, {"x": 1}, {"x": value})
        with pytest.raises(InvalidArgument, match=said):
            register(path)
    for nothing in ("null", "[]"):
        write(path, f'{{"x": {nothing}, "y": 1}}')
        with pytest.raises(
            InvalidArgument, match=r"column 'x' of \[\] in .* give `fill` whose type"
        ):
            register(path)
        assert len(all_records(register(path, columns=["y"]))) == 1
    assert all_records(register(path, fill={"x": 0.5}))[0]["x"].dtype == np.float64
    for text in ("[1]", "5", "null", "{", '{"x": NaN}', '{"x": 1} {"x": 2}'):
        write(path, {"x": 1}, text)
        with pytest.raises(Corrupt, match="line 2 is no JSON object"):
            register(path)
    path.write_bytes(b'{"x": "a"}\n{"x": "\xff"}\n')
    with pytest.raises(Corrupt, match=r"line 2 is no JSON object: .*utf-8"):
        register(path)
    (tmp_path / "b.json").write_text('{\n  "x": 1\n}\n')
    with pytest.raises(Corrupt, match="line 1 is no JSON object"):
        register(tmp_path / "b.json")


def test_types_are_those_of_all_files(register: Register, tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl", {"x": 1, "l": [1]})
    write(tmp_path / "b.jsonl", {"x": 0.5, "l": [0.5, 1]})
    found = all_records(register(tmp_path))
    assert [one["x"] for one in found] == [1.0, 0.5]
    assert found[0]["l"].dtype == np.float64
    write(tmp_path / "c.jsonl", {"x": "1", "l": [1]})
    with pytest.raises(InvalidArgument, match=r"c\.jsonl has records of .*x: string\[\].*x: fl"):
        register(tmp_path)
    write(tmp_path / "c.jsonl", {"x": 1})
    with pytest.raises(
        InvalidArgument, match=r"c\.jsonl has records of \{x: int64\[\]\} without \['l'\]"
    ):
        register(tmp_path)


@pytest.mark.parametrize("kind", ["", ".gz"])
@pytest.mark.parametrize("count", [True, False])
def test_a_later_line_that_does_not_fit_is_named_or_left_out(
    register: Register, tmp_path: Path, kind: str, count: bool
) -> None:
    rows: list[Any] = [{"x": number, "t": "a"} for number in range(5000)]
    first = streams.SAMPLE_RECORDS
    bad = {
        first + 5: ({"x": 0.5, "t": "a"}, r"Expected `int`, got `float` - at `\$\.x`"),
        first + 6: ({"t": "a"}, "Object missing required field `x`"),
        4000: ('{"x": 1, "t"', "Input data was truncated"),
        4999: ({"x": 1, "t": [1]}, r"Expected `str`, got `array` - at `\$\.t`"),
    }
    pack = gzip.compress if kind else bytes
    path = tmp_path / f"a.jsonl{kind}"
    for number, (line, said) in bad.items():
        plain = write(tmp_path / "plain", *rows[:number], line, *rows[number + 1 :])
        path.write_bytes(pack(plain.read_bytes()))
        request = register(path, count=count)
        with pytest.raises(
            Corrupt, match=f"record {number} of {path} cannot be read: line {number + 1}: {said}"
        ):
            all_records(request)
    for number, (line, _) in bad.items():
        rows[number] = line
    path.write_bytes(pack(write(tmp_path / "plain", *rows).read_bytes()))
    request = register(path, count=count, on_error="skip", split_records=10_000)
    left: list[tuple[int, str]] = []

    def leave_out(_split: int, first: int, records: int, why: str) -> bool:
        assert records == 1
        left.append((first, why))
        return len(left) <= 4

    made = FileRecords(PythonDataset.FromString(request.python), leave_out)
    (xs,) = [np.concatenate([block.components[1].values for block in made.blocks(0)])]
    assert xs.tolist() == [number for number in range(5000) if number not in bad]
    assert [first for first, _ in left] == [*bad]
    assert all(f"line {first + 1}: " in why for first, why in left)


def test_a_function_parses_lines(register: Register, tmp_path: Path) -> None:
    """What JSON lines have no place for, such as nested values and NaN."""
    path = write(tmp_path / "a.jsonl", {"a": {"b": [float("nan"), 1]}}, {"a": {"b": [2]}})

    def parsed(line: bytes) -> float:
        return float(np.nansum(json.loads(line)["a"]["b"]))

    request = register(path, format="lines", map=parsed, split_records=2)
    made = FileRecords(PythonDataset.FromString(request.python))
    assert [*made(0)] == [1.0, 2.0]


def test_each_format_has_its_index(register: Register, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"x": 1}\n\n{"x": 2}\n')
    for index_dir in (None, tmp_path / "indices"):
        of_json = register(path, index_dir=index_dir)
        of_text = register(path, format="lines", index_dir=index_dir)
        assert all_records(of_json) == [{"x": 1}, {"x": 2}]
        assert all_records(of_text) == [b'{"x": 1}', b"", b'{"x": 2}']
    assert register(tmp_path / "*").lengths == of_json.lengths  # indices are no data
    path.write_bytes(frame(b"no\nJSON") * 3)
    with pytest.raises(Corrupt, match="line 1 is no JSON object"):
        register(path, format="jsonl")
    assert sum(register(path, format="tfrecord").lengths) == 3


def test_which_files_are_text(register: Register, tmp_path: Path) -> None:
    """Text lies beside data, so it is read where it is named only."""
    write(tmp_path / "a.jsonl", {"x": 1})
    (tmp_path / "LICENSE.txt").write_text("of it\n")
    (tmp_path / "state.json").write_text('{"x": 2}\n')
    assert all_records(register(tmp_path)) == [{"x": 1}]
    assert all_records(register(tmp_path, format="lines")) == [b"of it"]
    assert all_records(register(tmp_path / "state.json")) == [{"x": 2}]
    with pytest.raises(InvalidArgument, match=r"LICENSE\.txt is of no format"):
        register(tmp_path / "LICENSE.txt")
    (tmp_path / "part-00000-of-00002.gz").write_bytes(gzip.compress(b' {"x": 3}\n'))
    assert all_records(register(tmp_path / "part-*")) == [{"x": 3}]
    (tmp_path / "b.jsonl-00000-of-00001.gz").write_bytes(gzip.compress(b'{"x": 4}\n'))
    assert all_records(register(tmp_path)) == [{"x": 1}, {"x": 4}]
