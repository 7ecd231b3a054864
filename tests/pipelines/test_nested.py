"""Nested columns and nulls of Parquet files, held against PyArrow's rows."""

from __future__ import annotations

import datetime
import decimal
import itertools
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tensorflow as tf

from forebay.service.errors import InvalidArgument, PipelineError
from forebay.service.order import permuted_many
from forebay.service.pipelines.files import byte_sources, parquet
from forebay.service.pipelines.python.element_structures import element_spec_of
from forebay.service.pipelines.tf_data.element_specs import encode_element_spec
from forebay.service.structure import Ragged, encode

from ..record_files import Register, all_records, records

ROWS = 40


def expected(rows: list[dict[str, Any]], schema: pa.Schema) -> list[Any]:
    """PyArrow's rows, with a list of dicts as a dict of lists."""
    return [{one.name: _pushed(row[one.name], one.type, 0) for one in schema} for row in rows]


def _pushed(value: Any, kind: Any, depth: int) -> Any:
    """`value` has values of a kind, below so many lists."""

    def each(found: Callable[[Any], Any], inner: Any, further: int = 0) -> Any:
        return _pushed(_mapped(value, depth, found), inner, depth + further)

    if pa.types.is_struct(kind):
        fields = [kind.field(at) for at in range(kind.num_fields)]
        return {one.name: each(partial(_field, one.name), one.type) for one in fields}
    if pa.types.is_map(kind):
        return {
            "keys": each(partial(_of_pairs, 0), kind.key_type, 1),
            "values": each(partial(_of_pairs, 1), kind.item_type, 1),
        }
    if hasattr(kind, "value_type") and not pa.types.is_dictionary(kind):
        return _pushed(value, kind.value_type, depth + 1)
    return _mapped(value, depth, _leaf)


def _field(name: str, value: Any) -> Any:
    return value and value[name]


def _of_pairs(at: int, value: Any) -> Any:
    return value and [pair[at] for pair in value]


def _mapped(value: Any, depth: int, found: Callable[[Any], Any]) -> Any:
    if not depth or value is None:
        return found(value) if not depth else None
    return [_mapped(one, depth - 1, found) for one in value]


def _leaf(value: Any) -> Any:
    if isinstance(value, decimal.Decimal):
        value = str(value)
    return value.encode() if isinstance(value, str) else value


def lists(value: Any) -> Any:
    """A record in Python's objects."""
    if isinstance(value, dict):
        return {name: lists(one) for name, one in value.items()}
    if isinstance(value, Ragged):
        values = lists(value.values)
        return [values[a:b] for a, b in itertools.pairwise(value.row_splits.tolist())]
    return value.tolist() if isinstance(value, np.ndarray | np.generic) else value


def table_of(rows: int = ROWS) -> pa.Table:
    """Structs, lists and maps, in each other, without nulls."""
    random = np.random.default_rng(rows)

    def some(of: Callable[[], Any], most: int = 4) -> list[Any]:
        return [of() for _ in range(random.integers(0, most))]

    def number() -> int:
        return int(random.integers(0, 100))

    def text() -> str:
        return "ä" * (number() % 4) + str(number())

    item = pa.struct({"price": pa.float32(), "tags": pa.list_(pa.string())})
    meta = {"score": pa.float64(), "inner": pa.struct({"a.b": pa.int8(), "t": pa.string()})}
    kinds = {
        "n": pa.int64(),
        "meta": pa.struct(meta),
        "items": pa.list_(item),
        "grid": pa.list_(pa.list_(pa.int16())),
        "deep": pa.large_list(pa.list_(pa.list_(pa.string()))),
        "pairs": pa.list_(pa.list_(pa.int32(), 2)),
        "square": pa.list_(pa.list_(pa.float32(), 2), 3),
        "fixed_of_ragged": pa.list_(pa.list_(pa.int32()), 2),
        "map": pa.map_(pa.string(), pa.int32()),
        "maps": pa.list_(pa.map_(pa.string(), pa.list_(pa.bool_()))),
        "of_map": pa.map_(pa.int32(), pa.struct({"x": pa.int64(), "y": pa.list_(pa.int64())})),
        "money": pa.decimal128(12, 3),
        "moneys": pa.list_(pa.decimal128(30, 9)),
        "when": pa.struct({"at": pa.timestamp("us", "Europe/Berlin")}),
        "kind": pa.struct({"of": pa.dictionary(pa.int8(), pa.string())}),
    }
    found = [
        {
            "n": at,
            "meta": {"score": number() / 7, "inner": {"a.b": number(), "t": text()}},
            "items": some(lambda: {"price": number() / 2, "tags": some(text)}),
            "grid": some(lambda: some(number)),
            "deep": some(lambda: some(lambda: some(text))),
            "pairs": some(lambda: [number(), number()]),
            "square": [[number(), number()] for _ in range(3)],
            "fixed_of_ragged": [some(number), some(number)],
            "map": some(lambda: (text(), number())),
            "maps": some(lambda: some(lambda: (text(), [*map(bool, some(number))]))),
            "of_map": some(lambda: (number(), {"x": number(), "y": some(number)})),
            "money": decimal.Decimal(number()) / 8,
            "moneys": some(lambda: decimal.Decimal(number()).scaleb(-9)),
            "when": {"at": datetime.datetime(2020, 3, 4, number() % 24, tzinfo=datetime.UTC)},
            "kind": {"of": str(number() % 3)},
        }
        for at in range(rows)
    ]
    columns = [pa.array([row[name] for row in found], kind) for name, kind in kinds.items()]
    return pa.table(columns, names=[*kinds])


def plain_times(table: pa.Table) -> pa.Table:
    """The same with the times that Forebay gives."""
    at = table.schema.get_field_index("when")
    times = table["when"].combine_chunks().field("at").cast(pa.int64())
    return table.set_column(at, "when", pa.StructArray.from_arrays([times], ["at"]))


def test_nested_columns_are_pyarrows_rows(register: Register, tmp_path: Path) -> None:
    tables = [table_of(ROWS), table_of(1), table_of(3)]
    for number, table in enumerate(tables):
        pq.write_table(table, tmp_path / f"{number}.parquet", row_group_size=7)
    wanted = [
        row
        for number in range(len(tables))
        for table in [plain_times(pq.read_table(tmp_path / f"{number}.parquet"))]
        for row in expected(table.to_pylist(), table.schema)
    ]
    request = register(tmp_path, split_records=1)
    assert [*map(lists, all_records(request))] == wanted
    assert [*map(lists, records(request, 2, 3))] == wanted[17:21]
    shuffled = register(tmp_path, split_records=9, shuffle_records=True, seed=4)
    order = permuted_many(np.arange(len(wanted)), len(wanted), 4, 0)
    assert [*map(lists, all_records(shuffled))] == [wanted[at] for at in order]
    spec = {
        "grid": tf.RaggedTensorSpec([None, None], tf.int16, 1, tf.int64),
        "deep": tf.RaggedTensorSpec([None, None, None], tf.string, 2, tf.int64),
        "pairs": tf.TensorSpec([None, 2], tf.int32),
        "fixed_of_ragged": tf.RaggedTensorSpec([2, None], tf.int32, 1, tf.int64),
    }
    structure = register(tmp_path, columns=[*spec]).structure
    assert structure == encode(spec)
    assert element_spec_of(structure) == encode_element_spec(spec)
    (first, *_) = all_records(register(tmp_path, columns=["square", "pairs", "meta", "grid"]))
    assert [first["square"].shape, first["square"].dtype] == [(3, 2), np.float32]
    assert first["pairs"].shape == (len(wanted[0]["pairs"]), 2)
    assert first["meta"]["inner"]["a.b"].dtype == np.int8
    assert isinstance(first["grid"], Ragged)


def test_columns_by_dotted_names(
    register: Register, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only their bytes are asked for."""
    table = table_of()
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=16)
    names = ["meta.inner", "items.tags", "map.keys", "of_map.values.y", "n"]
    request = register(tmp_path, columns=names)
    rows = expected(table.to_pylist(), table.schema)
    planned: list[tuple[int, int]] = []

    def plan(self: Any, ranges: Any) -> None:
        planned.extend(ranges)

    monkeypatch.setattr(byte_sources.LocalFile, "plan", plan)
    monkeypatch.setattr(parquet, "_HOLE_BYTES", 0)
    assert [*map(lists, all_records(request))] == [
        {
            "meta": {"inner": row["meta"]["inner"]},
            "items": {"tags": row["items"]["tags"]},
            "map": {"keys": row["map"]["keys"]},
            "of_map": {"values": {"y": row["of_map"]["values"]["y"]}},
            "n": row["n"],
        }
        for row in rows
    ]
    about = pq.read_metadata(tmp_path / "a.parquet")
    for number in range(about.num_row_groups):
        group = about.row_group(number)
        for column in map(group.column, range(group.num_columns)):
            begin, path = column.data_page_offset, column.path_in_schema
            of_them = ("meta.inner", "items.list.element.tags", "map.key_value.key")
            wanted = path == "n" or path.startswith((*of_them, "of_map.key_value.value.y"))
            assert wanted == any(first <= begin < end for first, end in planned)
    for wrong in ("meta.x", "items.list", "meta.inner.a"):
        with pytest.raises(InvalidArgument, match=rf"has no columns \['{wrong}'\]: give some of"):
            register(tmp_path, columns=["n", wrong])


def test_a_name_that_is_two_columns(register: Register, tmp_path: Path) -> None:
    pq.write_table(pa.table({"a.b": [1], "a": [{"b": 2}], "c": [3]}), tmp_path / "a.parquet")
    with pytest.raises(InvalidArgument, match=r"several columns of one name, \['a\.b'\]"):
        register(tmp_path)
    assert all_records(register(tmp_path, columns=["c"])) == [{"c": 3}]


NULLS = pa.table(
    {
        "n": pa.array([1, None, 3, 4, 5], pa.int32()),
        "s": pa.array(["a", "b", None, "d", "e"]),
        "meta": pa.array([
            {"x": 0.5, "t": "q"}, {"x": 1.5, "t": "r"}, None, {"x": None, "t": "s"},
            {"x": 2.5, "t": "u"},
        ]),
        "l": pa.array([[1, 2], [], [3], None, [5, None]]),
        "f": pa.array([[1, 2], [3, 4], [None, None], [5, None], [6, 7]], pa.list_(pa.int8(), 2)),
        "i": pa.array([[{"y": 1}], [None, {"y": 2}], [], None, [{"y": None}]]),
        "g": pa.array([[[1], [2, 3]], [[]], [None, [None]], None, [[4]]]),
        "b": pa.array([b"xy", None, b"ab", b"cd", b"ef"], pa.binary(2)),
        "h": pa.array([True, False, None, None, True]),
        "d": pa.array([decimal.Decimal("1.5"), None, None, None, decimal.Decimal("2.5")]),
        "t": pa.array([1, 2, None, 4, 5], pa.timestamp("ms", "UTC")),
    }
)  # fmt: skip
FILL = {
    "n": -1, "s": "-", "meta.x": -1.0, "meta.t": "-", "l": -1, "f": -1, "i.y": -1, "g": -1,
    "b": b"--", "h": False, "d": "0.0", "t": -1,
}  # fmt: skip


@pytest.mark.parametrize("statistics", [True, False])
def test_nulls_are_refused_filled_masked_or_dropped(
    register: Register, tmp_path: Path, statistics: bool
) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(NULLS, path, row_group_size=2, write_statistics=statistics)
    for name in FILL:
        others = {one: value for one, value in FILL.items() if one != name}
        with pytest.raises((InvalidArgument, PipelineError), match=rf"nulls in column '{name}': "):
            all_records(register(path, fill=others))
    found = [*map(lists, all_records(register(path, fill=FILL)))]
    of_filled = {
        "n": [1, -1, 3, 4, 5],
        "s": [b"a", b"b", b"-", b"d", b"e"],
        "l": [[1, 2], [], [3], [], [5, -1]],
        "f": [[1, 2], [3, 4], [-1, -1], [5, -1], [6, 7]],
        "g": [[[1], [2, 3]], [[]], [[], [-1]], [], [[4]]],
        "b": [b"xy", b"--", b"ab", b"cd", b"ef"],
        "h": [True, False, False, False, True],
        "d": [b"1.5", b"0.0", b"0.0", b"0.0", b"2.5"],
        "t": [1, 2, -1, 4, 5],
    }
    for name, values in of_filled.items():
        assert [row[name] for row in found] == values
    assert [row["meta"]["x"] for row in found] == [0.5, 1.5, -1.0, -1.0, 2.5]
    assert [row["i"]["y"] for row in found] == [[1], [-1, 2], [], [], [-1]]
    names = [field.name for field in NULLS.schema]
    request = register(path, nulls="mask", fill={"n": -1})
    masked = [*map(lists, all_records(request))]
    assert [*masked[0]] == sorted(
        [*names, *(f"{n}.valid" for n in names if n not in {"n", "meta", "i"})]
    )
    for name, zero in (("s", b""), ("b", b""), ("h", False), ("d", b""), ("t", 0), ("l", 0)):
        for row, one in zip(NULLS[name].to_pylist(), masked, strict=True):
            value, valid = one[name], one[f"{name}.valid"]
            if isinstance(row, list):
                assert valid == [item is not None for item in row]
                assert value == [item or zero for item in row]
            elif name != "l":
                assert valid == (row is not None)
                assert valid or value == zero
    assert [row["f.valid"] for row in masked] == [
        [True, True], [True, True], [False, False], [True, False], [True, True],
    ]  # fmt: skip
    assert [row["meta"]["x.valid"] for row in masked] == [True, True, False, False, True]
    assert [row["i"]["y.valid"] for row in masked] == [[True], [False, True], [], [], [False]]
    assert masked[2]["g.valid"] == [[], [False]]
    assert masked[0]["n"] == 1
    assert [row["n"] for row in masked] == [1, -1, 3, 4, 5]


def test_rows_with_nulls_are_left_out(
    register: Register, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Their number is known in advance, also of row groups that are left out as a whole."""
    random = np.random.default_rng(1)
    kinds = {"n": pa.int64(), "x": pa.float32(), "l": pa.list_(pa.string())}
    rows: list[dict[str, Any]] = [
        {
            "n": at,
            "x": None if random.random() < 0.4 or 20 <= at < 40 else at / 2,
            "l": None if at % 9 == 5 else [None if at % 11 == 7 else str(at)] * (at % 3),
        }
        for at in range(100)
    ]
    whole = [row for row in rows if row["x"] is not None]
    whole = [row for row in whole if row["l"] is not None and None not in row["l"]]
    for number, statistics in enumerate([True, False]):
        table = pa.table([pa.array([r[n] for r in rows], k) for n, k in kinds.items()], [*kinds])
        pq.write_table(table, tmp_path / f"{number}.parquet", 10, write_statistics=statistics)
    wanted = expected(whole * 2, pa.schema(kinds))
    request = register(tmp_path, nulls="drop", split_records=1)
    assert sum(request.lengths) == len(wanted)
    assert f"{200 - len(wanted)} of 200 rows lack a column" in caplog.text
    assert [*map(lists, all_records(request))] == wanted
    before = np.cumsum([0, *request.lengths]).tolist()
    for split, start in ((3, 1), (5, 0)):
        begin = before[split] + start
        assert [*map(lists, records(request, split, start))] == wanted[begin : before[split + 1]]
    shuffled = register(tmp_path, nulls="drop", split_records=13, shuffle_records=True, seed=2)
    order = permuted_many(np.arange(len(wanted)), len(wanted), 2, 0)
    assert [*map(lists, all_records(shuffled))] == [wanted[at] for at in order]
    some = register(tmp_path, nulls="drop", columns=["n", "l"], fill={"l": "-"})
    assert [row["n"] for row in all_records(some)] == [*range(100)] * 2
    (tmp_path / "nulls").mkdir()
    table = pa.table({"x": pa.nulls(3, pa.int8())})
    pq.write_table(table, tmp_path / "nulls" / "a.parquet")
    with pytest.raises(InvalidArgument, match="have no records"):
        register(tmp_path / "nulls", nulls="drop")


def test_what_cannot_be_carried_is_named(register: Register, tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"a": [{"b": [None, None]}], "n": [1]}), path)
    with pytest.raises(InvalidArgument, match=r"column 'a\.b' of type null, whose values are all"):
        register(path)
    assert all_records(register(path, columns=["n"])) == [{"n": 1}]
    pq.write_table(pa.table({"a": [{"b": 1}]}), path)
    for fill in ({"a": 0}, {"b": 0}):
        with pytest.raises(InvalidArgument, match=r"fill has column '[ab]', and .*\['a\.b'\]"):
            register(path, fill=fill)
    with pytest.raises(InvalidArgument, match=r"fill=\{'a\.b': 'x'\}"):
        register(path, fill={"a.b": "x"})
    for wrong in ("skip", None, 5):
        with pytest.raises(InvalidArgument, match=r"nulls=.* must be 'raise', 'drop' or 'mask'"):
            register(path, nulls=wrong)


def test_nested_files_of_one_schema(register: Register, tmp_path: Path) -> None:
    pq.write_table(pa.table({"a": [{"b": 1, "c": [[1]]}]}), tmp_path / "0.parquet")
    pq.write_table(pa.table({"a": [{"b": 1, "c": [1]}]}), tmp_path / "1.parquet")
    said = r"1\.parquet has records of \{a\.c: int64\[\?\]\}, and .*a\.c: ragged int64\[\?, \?\]"
    with pytest.raises(InvalidArgument, match=said):
        register(tmp_path)
    assert all_records(register(tmp_path, columns=["a.b"])) == [{"a": {"b": 1}}] * 2
