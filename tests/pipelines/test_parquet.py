"""Parquet files as other writers leave them, held against PyArrow."""

from __future__ import annotations

import glob
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest

from forebay.service.errors import InvalidArgument

from ..record_files import Register, all_records


def test_two_columns_of_one_name_are_refused(register: Register, tmp_path: Path) -> None:
    arrays = [pa.array([1]), pa.array([2]), pa.array([3])]
    pq.write_table(pa.Table.from_arrays(arrays, ["x", "x", "X"]), tmp_path / "a.parquet")
    for how in ({}, {"columns": ["X", "x"]}):
        with pytest.raises(InvalidArgument, match=r"a\.parquet has several columns.*\['x'\]: read"):
            register(tmp_path, **how)
    assert all_records(register(tmp_path, columns=["X"])) == [{"X": 3}]


@pytest.mark.parametrize(
    "kind", [pa.list_(pa.int32()), pa.large_list(pa.int32()), pa.list_(pa.int32(), 2)]
)
def test_nulls_in_lists_are_found_where_files_are_registered(
    register: Register, tmp_path: Path, kind: Any
) -> None:
    """Statistics count an empty list like a null one."""
    path, size = tmp_path / "a.parquet", getattr(kind, "list_size", None)
    rows = [[1, 2], [None, 4], *([] if size else [None])]  # PyArrow reads no null of a fixed size
    pq.write_table(pa.table({"l": pa.array(rows, kind)}), path)
    with pytest.raises(InvalidArgument, match=r"1 nulls in column 'l': give fill=\{'l': …\}.*list"):
        register(path)
    found = [one["l"].tolist() for one in all_records(register(path, fill={"l": -1}))]
    assert found == [[1, 2], [-1, 4], *([] if size else [[]])]
    with pytest.raises(InvalidArgument, match=r"fill=\{'l': 'x'\}.* is no int32"):
        register(path, fill={"l": "x"})
    if not size:
        pq.write_table(pa.table({"l": pa.array([[1, 2], [], [3]], kind)}), path)
        found = [one["l"].tolist() for one in all_records(register(path))]
        assert found == [[1, 2], [], [3]]


def test_an_empty_file_says_nothing_of_types(register: Register, tmp_path: Path) -> None:
    """A writer that saw no rows writes columns of type null, or none."""
    pq.write_table(pa.table({"x": [1, 2]}), tmp_path / "b.parquet")
    pq.write_table(pa.table({"x": pa.array([], pa.null())}), tmp_path / "a.parquet")
    pq.write_table(pa.table({}), tmp_path / "c.parquet")
    assert all_records(register(tmp_path, columns=["x"])) == [{"x": 1}, {"x": 2}]


def test_extension_types_are_what_they_are_stored_as(register: Register, tmp_path: Path) -> None:
    """As PyArrow's arrays give them; Ray's tensors too, whose type is not known here."""
    numbers = np.arange(24, dtype=np.float32).reshape(4, 2, 3)
    turned = pa.fixed_shape_tensor(pa.int16(), [2, 3], permutation=[1, 0])
    flat = pa.array([[*range(6 * n, 6 * n + 6)] for n in range(4)], pa.list_(pa.int16(), 6))
    bools = pa.array([1, 0, -3, 0], pa.int8())
    table = pa.table(
        {
            "tensor": pa.FixedShapeTensorArray.from_numpy_ndarray(numbers),
            "turned": pa.ExtensionArray.from_storage(turned, flat),
            "uuid": pa.array([bytes([n]) * 16 for n in range(4)], pa.uuid()),
            "json": pa.array(["{}", "[1]", "2", '"x"'], pa.json_()),
            "bool": pa.ExtensionArray.from_storage(pa.bool8(), bools),
            "ray": pa.array(numbers.reshape(4, 6).tolist(), pa.large_list(pa.float32())),
        }
    )
    about = {
        "ARROW:extension:name": "ray.data.arrow_tensor_v2",
        "ARROW:extension:metadata": "[2, 3]",
    }
    at = table.schema.get_field_index("ray")
    schema = table.schema.set(at, table.schema.field(at).with_metadata(about))
    pq.write_table(table.cast(schema), tmp_path / "a.parquet", row_group_size=3)
    read = pq.read_table(tmp_path / "a.parquet").combine_chunks()
    expected = {
        "tensor": read["tensor"].chunk(0).to_numpy_ndarray(),
        "turned": read["turned"].chunk(0).to_numpy_ndarray(),
        "uuid": [one.bytes for one in read["uuid"].to_pylist()],
        "json": [one.encode() for one in read["json"].to_pylist()],
        "bool": read["bool"].to_pylist(),
        "ray": numbers,
    }
    for shuffled in (False, True):
        found = all_records(register(tmp_path, shuffle_records=shuffled))
        if shuffled:
            found.sort(key=lambda record: record["uuid"])
        for name, values in expected.items():
            for record, value in zip(found, values, strict=True):
                assert np.asarray(record[name]).dtype == np.asarray(value).dtype
                np.testing.assert_array_equal(record[name], value)


def _write(root: Path, *places: str) -> None:
    for number, place in enumerate(places):
        path = root / place / f"{number}.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.table({"n": [10 * number, 10 * number + 1]}), path, row_group_size=1)


def _as_read(table: pa.Table, **fill: Any) -> list[dict[str, Any]]:
    """PyArrow's rows, with what Forebay gives for texts, and for nulls."""
    rows = table.to_pylist()
    rows = [{n: fill.get(n) if v is None else v for n, v in row.items()} for row in rows]
    rows = [{n: v.encode() if isinstance(v, str) else v for n, v in row.items()} for row in rows]
    return sorted(rows, key=lambda row: int(row["n"]))


PLACES = ("year=2020/kind=a%20b", "year=2021/kind=x", "year=__HIVE_DEFAULT_PARTITION__/kind=7", ".")


def test_partitions_are_columns_as_pyarrow_has_them(
    register: Register, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _write(tmp_path / "run=3" / "hive", *PLACES)
    monkeypatch.chdir(tmp_path / "run=3")
    fill = {"year": -1, "kind": "none"}
    files = sorted(glob.glob("hive/*/*/*.parquet"))
    for given, read, filled in (
        ("hive", "hive", fill),
        (Path("hive/year=2020"), "hive/year=2020", {}),
        (files, files, {"year": -1}),
        ("hive/year=202*/*/*.parquet", files[:2], {}),
        ("hive/year={2021,2020}/*/*.parquet", files[:2], {}),
        ("hive/year=2020/kind=a%20b/0.parquet", "hive/year=2020/kind=a%20b/0.parquet", {}),
    ):
        table = pq.read_table(read)
        expected = _as_read(table, **fill)
        for how in ({}, {"shuffle_records": True}, {"columns": [*table.column_names]}):
            request = register(given, fill=filled, **how)
            found = sorted(all_records(request), key=lambda row: int(row["n"]))
            assert found == expected
        for name in {"year"} & {*table.column_names}:
            (only,) = {type(row[name]) for row in all_records(register(given, fill=filled))}
            assert only is np.int32
            found = all_records(register(given, fill=filled, columns=["year"]))
            assert sorted(one["year"] for one in found) == sorted(one["year"] for one in expected)
    for name in ("year", "kind"):
        with pytest.raises(InvalidArgument, match=rf"has no '{name}', which .*fill=.'{name}': …"):
            register("hive", fill={one: value for one, value in fill.items() if one != name})
    for value in (2.5, "x", 2**40):
        with pytest.raises(InvalidArgument, match="fill="):
            register("hive", fill=fill | {"year": value})


def test_other_partitionings_are_pyarrows(register: Register, tmp_path: Path) -> None:
    _write(tmp_path / "d", "2020/1", "2021/2")
    _write(tmp_path / "h", "day=2020-01-02/b=1")
    schema = pa.schema([("day", pa.date32()), ("b", pa.bool_())])
    cases: list[tuple[str, Any]] = [
        ("d", ["year", "month"]),
        ("d", ds.partitioning(field_names=["year"])),
        ("d", None),
        ("h", ds.partitioning(schema, flavor="hive")),
    ]
    for directory, how in cases:
        read = pq.read_table(tmp_path / directory, partitioning=how)
        if "day" in read.column_names:
            at = read.schema.get_field_index("day")
            read = read.set_column(at, "day", read["day"].cast(pa.int32()).cast(pa.int64()))
        found = all_records(register(tmp_path / directory, partitioning=how))
        assert sorted(found, key=lambda row: int(row["n"])) == _as_read(read)
    with pytest.raises(InvalidArgument, match=r"partitioning=.* does not fit the names"):
        register(
            tmp_path / "h",
            partitioning=ds.partitioning(schema.set(0, pa.field("day", pa.int32())), flavor="hive"),
        )
    for wrong in (5, "directory", [1]):
        with pytest.raises(InvalidArgument, match="partitioning="):
            register(tmp_path / "d", partitioning=wrong)


def test_a_column_in_a_file_and_in_its_directorys_name(register: Register, tmp_path: Path) -> None:
    """Refused by name, unless it is said which one."""
    _write(tmp_path, "n=7")
    for how in ({}, {"columns": ["n"]}):
        with pytest.raises(InvalidArgument, match=r"has columns \['n'\], and so has its dir.*None"):
            register(tmp_path, **how)
    assert all_records(register(tmp_path, partitioning=None)) == [{"n": 0}, {"n": 1}]


def test_a_directory_of_a_table_is_refused(register: Register, tmp_path: Path) -> None:
    """It has files that are no longer the table's."""
    _write(tmp_path, "t/year=1")
    for name, kind in (("_delta_log", "Delta Lake"), (".hoodie", "Apache Hudi")):
        (tmp_path / "t" / name).mkdir()
        with pytest.raises(InvalidArgument, match=f"t is a table of {kind}, whose log .*parquet"):
            register(tmp_path)
        assert len(all_records(register(f"{tmp_path}/t/**/*.parquet"))) == 2
        (tmp_path / "t" / name).rmdir()


def test_files_whose_schemas_differ(register: Register, tmp_path: Path) -> None:
    """Sizes of lists may; the columns that differ are named, and only they."""

    def write(number: int, **columns: Any) -> None:
        pq.write_table(pa.table({"n": [number]} | columns), tmp_path / f"{number}.parquet")

    for number, kind in enumerate(
        (pa.list_(pa.int8(), 2), pa.list_(pa.int8(), 3), pa.list_(pa.int8()))
    ):
        write(number, a=pa.array([[1, 2, 3][: getattr(kind, "list_size", 1)]], kind))
        request = register(tmp_path)
        assert f'["a",{{"tensor":"int8","shape":[{"null" if number else 2}]}}]' in request.structure
        assert [one["n"] for one in all_records(request)] == [*range(number + 1)]
    write(2)
    for columns, said in (
        ({}, r"2\.parquet has records without \['a'\], and .*0\.parquet of \{a: int8\[\?\]\}: "),
        ({"a": [1]}, r"records of \{a: int64\[\]\}, and .*0\.parquet of \{a: int8\[\?\]\}: "),
        ({"b": [1]}, r"records of \{b: int64\[\]\} without \['a'\], and .*int8.* without \['b'\]"),
        ({"a": pa.nulls(1)}, r"2\.parquet has column 'a' of type null, whose values are all nulls"),
    ):
        write(2, **columns)
        with pytest.raises(InvalidArgument, match=said):
            register(tmp_path)
