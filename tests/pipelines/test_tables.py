"""Tables of Delta Lake and Iceberg, beside their own packages' scanners."""

from __future__ import annotations

import base64
import datetime
import json
import os
import string
from pathlib import Path
from typing import Any

import lance
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, QueryBuilder, write_deltalake
from pyiceberg import manifest as manifests
from pyiceberg.catalog.memory import InMemoryCatalog
from pyiceberg.table import StaticTable, Table
from pyiceberg.typedef import Record
from pyroaring import BitMap64

from forebay.service.errors import FailedPrecondition, ForebayError, InvalidArgument, NotFound
from forebay.service.pipelines.files.manifest import decode
from forebay.service.proto import forebay_pb2 as pb
from forebay.service.proto.python_pb2 import PythonDataset

from ..record_files import Register, all_records

EPOCH = datetime.date(1970, 1, 1)


def rows(numbers: range) -> pa.Table:
    kinds = [f"a/{number % 3} b=%20ä" for number in numbers]
    days = [EPOCH + datetime.timedelta(days=number % 2) for number in numbers]
    return pa.table(
        {"n": numbers, "text": [f"{n}" for n in numbers], "the kind": kinds, "day": days}
    )


def read(request: pb.RegisterDatasetRequest) -> list[Any]:
    return sorted(map(plain, all_records(request)))


def plain(record: dict[str, Any]) -> list[Any]:
    """Of Forebay's record, or of a row of Arrow."""
    values = []
    for _, value in sorted(record.items()):
        if isinstance(value, datetime.date):
            value = (value - EPOCH).days
        values.append(value if isinstance(value, bytes) else str(value).encode())
    return values


def scanned(table: pa.Table) -> list[Any]:
    return sorted(map(plain, table.to_pylist()))


def snapshot(request: pb.RegisterDatasetRequest) -> Any:
    return decode(PythonDataset.FromString(request.python).files).options["snapshot"]


# Delta Lake.


@pytest.mark.parametrize("keys", [[], ["the kind", "day"]])
def test_a_delta_table_has_the_rows_of_its_scanner(
    register: Register, tmp_path: Path, keys: list[str]
) -> None:
    """As of each version, also those that are registered while it goes on."""
    path = str(tmp_path / "table")
    write_deltalake(path, rows(range(40)), partition_by=keys)
    write_deltalake(path, rows(range(40, 90)), mode="append")
    before = register(path)
    first = DeltaTable(path).to_pyarrow_table()
    table = DeltaTable(path)
    table.update(updates={"text": "'changed'"}, predicate="n % 7 = 0")
    assert read(register(path)) == scanned(table.to_pyarrow_table())
    table.delete("n > 30 AND n < 60")
    assert read(register(path)) == scanned(table.to_pyarrow_table())
    table.optimize.compact()
    after = register(path, format="delta")
    assert read(after) == scanned(table.to_pyarrow_table())
    assert sum(after.lengths) == 61
    assert snapshot(after) == {"delta": table.version()}
    assert snapshot(before) == {"delta": 1}
    assert read(before) == scanned(first)
    some = register(path, columns=["day", "n"])
    assert read(some) == scanned(table.to_pyarrow_table(columns=["day", "n"]))
    with pytest.raises(InvalidArgument, match=r"the table has no columns \['x'\]: give some of \["):
        register(path, columns=["x"])


def test_nulls_of_a_delta_tables_partitions_need_a_value(
    register: Register, tmp_path: Path
) -> None:
    table = pa.table({"n": range(4), "kind": pa.array([None, "a", "a", None])})
    write_deltalake(tmp_path, table, partition_by=["kind"])
    with pytest.raises(InvalidArgument, match="has no 'kind', which others have: give"):
        register(tmp_path)
    filled = pa.table({"n": range(4), "kind": ["none", "a", "a", "none"]})
    assert read(register(tmp_path, fill={"kind": "none"})) == scanned(filled)


def test_columns_that_files_of_a_table_lack_are_named(register: Register, tmp_path: Path) -> None:
    write_deltalake(tmp_path, pa.table({"a": [1]}))
    write_deltalake(tmp_path, pa.table({"a": [2], "b": [3]}), mode="append", schema_mode="merge")
    with pytest.raises(InvalidArgument, match=r"has no columns \['b'\]: give some of \['a'\]"):
        register(tmp_path)
    assert read(register(tmp_path, columns=["a"])) == [[b"1"], [b"2"]]


def log_of(path: Path) -> list[dict[str, Any]]:
    return [*map(json.loads, (path / "_delta_log" / f"{0:020}.json").read_text().splitlines())]


def rewrite_log(path: Path, actions: list[dict[str, Any]]) -> None:
    text = "\n".join(map(json.dumps, actions))
    (path / "_delta_log" / f"{0:020}.json").write_text(text)


def require_features(actions: list[dict[str, Any]], *features: str) -> None:
    for action in actions:
        if "protocol" in action:
            action["protocol"] = {
                "minReaderVersion": 3,
                "minWriterVersion": 7,
                "readerFeatures": [*features],
                "writerFeatures": [*features],
            }


def deletion_vector(deleted: list[int]) -> dict[str, Any]:
    """Within the log. Deltalake reads them, and writes none."""
    data = (1681511377).to_bytes(4, "little") + BitMap64(deleted).serialize()
    text = base64.b85encode(data + bytes(-len(data) % 4)).decode()
    z85 = (
        string.digits + string.ascii_lowercase + string.ascii_uppercase + ".-:+=^!/*?&<>()[]{}@%$#"
    )
    b85 = (
        string.digits + string.ascii_uppercase + string.ascii_lowercase + "!#$%&()*+-;<=>?@^_`{|}~"
    )
    return {
        "storageType": "i",
        "pathOrInlineDv": text.translate(str.maketrans(b85, z85)),
        "sizeInBytes": len(data),
        "cardinality": len(deleted),
    }


def test_what_a_delta_table_says_beside_its_files_is_refused(
    register: Register, tmp_path: Path
) -> None:
    write_deltalake(tmp_path, pa.table({"n": range(40)}))
    actions = log_of(tmp_path)
    require_features(actions, "deletionVectors")
    rewrite_log(tmp_path, actions)
    assert sum(register(tmp_path).lengths) == 40
    for action in actions:
        if "add" in action:
            action["add"]["deletionVector"] = deletion_vector([3, 4, 7])
    rewrite_log(tmp_path, actions)
    assert (
        QueryBuilder()
        .register("t", DeltaTable(tmp_path))
        .execute("SELECT count(*) AS n FROM t")
        .read_all()["n"][0]
        .as_py()
        == 37
    )
    with pytest.raises(FailedPrecondition, match="has deletion vectors: REORG TABLE"):
        register(tmp_path)
    actions = log_of(tmp_path)
    require_features(actions, "columnMapping")
    for action in actions:
        if "metaData" in action:
            action["metaData"]["configuration"] = {"delta.columnMapping.mode": "name"}
    rewrite_log(tmp_path, actions)
    with pytest.raises(FailedPrecondition, match=r"columnMapping"):
        register(tmp_path)


def test_what_is_no_table_is_said(register: Register, tmp_path: Path) -> None:
    pq.write_table(pa.table({"n": [1]}), tmp_path / "a.parquet")
    with pytest.raises(FailedPrecondition, match=r"cannot be read as format='delta' \(TableNotFo"):
        register(tmp_path, format="delta")
    with pytest.raises(FailedPrecondition, match=r"cannot be read as format='iceberg' \(FileNotFo"):
        register(tmp_path, format="iceberg")
    (packed := tmp_path / "1-a.metadata.json.gz").touch()
    with pytest.raises(InvalidArgument, match=r"copy named ….gz.metadata.json"):
        register(packed, format="iceberg")
    with pytest.raises(NotFound, match="nothing is not there"):
        register(tmp_path / "nothing", format="delta")
    with pytest.raises(InvalidArgument, match="format='delta' is for one table: its path"):
        register([tmp_path], format="delta")


# Lance.


def test_a_lance_table_has_the_rows_of_its_scanner(register: Register, tmp_path: Path) -> None:
    """In its order, and those of its version."""
    path = str(tmp_path / "table.lance")
    lance.write_dataset(rows(range(40)), path, max_rows_per_file=16)
    table = lance.write_dataset(rows(range(40, 90)), path, mode="append", max_rows_per_file=16)
    before, first = register(path), table.to_table()
    table.update({"text": "'changed'"}, "n % 7 = 0")
    table.delete("n = 17 or (n > 30 and n < 60)")
    request = register(path, split_records=7)
    found = [*map(plain, all_records(request))]
    assert found == [*map(plain, table.to_table().to_pylist())]
    shuffled = register(path, shuffle_records=True, split_records=9, format="lance")
    assert read(shuffled) == sorted(found)
    table.optimize.compact_files()
    table.add_columns({"double": "n * 2"})
    after = register(path)
    assert read(after) == scanned(table.to_table())
    assert snapshot(after) == {"lance": table.version}
    assert read(before) == scanned(first)
    some = register(path, columns=["day", "n"])
    assert read(some) == scanned(table.to_table(["day", "n"]))
    table.cleanup_old_versions(datetime.timedelta())
    with pytest.raises(ForebayError, match=r"/data/.* cannot be read|version 2 of the table"):
        read(before)


# Iceberg.


def iceberg(directory: Path, first: pa.Table, scheme: str = "file://") -> Table:
    first = plainly_named(first)
    catalog = InMemoryCatalog("tests", warehouse=f"{scheme}{directory}")
    catalog.create_namespace("a")
    table = catalog.create_table("a.table", first.schema)
    table.append(first)
    return table


def plainly_named(table: pa.Table) -> pa.Table:
    """PyIceberg's files have other names than these with spaces."""
    return table.rename_columns(["n", "text", "kind", "day"])


def folder_of(table: Table) -> str:
    return str(table.location()).removeprefix("file:").removeprefix("//")


@pytest.mark.parametrize("scheme", ["file:", "file://"])
def test_an_iceberg_table_has_the_rows_of_its_scanner(
    register: Register, tmp_path: Path, scheme: str
) -> None:
    table = iceberg(tmp_path, rows(range(40)), scheme)
    with table.update_spec() as spec:
        spec.add_identity("day")
    table.append(plainly_named(rows(range(40, 90))))
    before = register(folder_of(table), format="iceberg")
    first = table.scan().to_arrow()
    assert read(before) == scanned(first)
    assert snapshot(before) == {"iceberg": table.metadata.current_snapshot_id}
    table.delete("n > 30 and n < 60")
    changed = rows(range(80, 95)).set_column(1, "text", pa.array(["changed"] * 15))
    table.upsert(plainly_named(changed), ["n"])
    after = register(folder_of(table), format="iceberg")
    assert read(after) == scanned(table.scan().to_arrow())
    assert snapshot(after) != snapshot(before)
    assert read(before) == scanned(first)
    table.overwrite(table.scan().to_arrow())
    written = register(table.metadata_location, format="iceberg")
    assert read(written) == read(after) == scanned(table.scan().to_arrow())


def test_an_iceberg_table_whose_columns_had_other_names_is_refused(
    register: Register, tmp_path: Path
) -> None:
    table = iceberg(tmp_path, rows(range(9)))
    with table.update_schema() as change:
        change.delete_column("text")
    assert read(register(folder_of(table), format="iceberg")) == scanned(table.scan().to_arrow())
    with table.update_schema() as change:
        change.rename_column("n", "m")
    with pytest.raises(FailedPrecondition, match="has column 'm long', once 'n long', and files"):
        register(folder_of(table), format="iceberg")


def test_columns_of_one_name_that_were_two_are_refused(register: Register, tmp_path: Path) -> None:
    table = iceberg(tmp_path, rows(range(9)))
    with table.update_schema() as change:
        change.delete_column("text")
    with table.update_schema() as change:
        change.add_column("text", table.schema().find_type("n"))
    with pytest.raises(FailedPrecondition, match="has had two columns 'text'"):
        register(folder_of(table), format="iceberg")


def test_metadata_of_one_number_need_a_catalog(register: Register, tmp_path: Path) -> None:
    table = iceberg(tmp_path, rows(range(9)))
    newest = Path(table.metadata_location.removeprefix("file://"))
    (newest.parent / newest.name.replace("-", "-0", 1)).write_bytes(newest.read_bytes())
    with pytest.raises(InvalidArgument, match="only its catalog knows which is current: give"):
        register(folder_of(table), format="iceberg")
    assert sum(register(str(newest), format="iceberg").lengths) == 9


class DeletesWriter(manifests.ManifestWriterV2):  # type: ignore[misc]
    """PyIceberg reads files of deleted rows, and writes none."""

    def content(self) -> manifests.ManifestContent:
        return manifests.ManifestContent.DELETES

    @property
    def _meta(self) -> dict[str, str]:
        return {**super()._meta, "content": "deletes"}


def test_deleted_rows_of_an_iceberg_table_are_refused(register: Register, tmp_path: Path) -> None:
    table = iceberg(tmp_path, rows(range(9)))
    (data,) = [task.file.file_path for task in table.scan().plan_files()]
    deleted = tmp_path / "deleted.parquet"
    ids = {"file_path": 2147483546, "pos": 2147483545}
    fields = [
        pa.field(name, kind, nullable=False, metadata={"PARQUET:field_id": str(ids[name])})
        for name, kind in (("file_path", pa.string()), ("pos", pa.int64()))
    ]
    pq.write_table(pa.table([[data], [4]], pa.schema(fields)), deleted)
    now, number = table.current_snapshot(), 7
    assert now is not None
    entry = manifests.DataFile.from_args(
        content=manifests.DataFileContent.POSITION_DELETES,
        file_path=f"file://{deleted}",
        file_format=manifests.FileFormat.PARQUET,
        partition=Record(),
        record_count=1,
        file_size_in_bytes=os.path.getsize(deleted),
        spec_id=0,
    )
    made = table.io.new_output(f"file://{tmp_path}/deletes.avro")
    with DeletesWriter(table.spec(), table.schema(), made, number, "null") as writer:
        writer.add(
            manifests.ManifestEntry.from_args(
                status=manifests.ManifestEntryStatus.ADDED, sequence_number=2, data_file=entry
            )
        )
    listed = table.io.new_output(f"file://{tmp_path}/list.avro")
    with manifests.write_manifest_list(2, listed, number, now.snapshot_id, 2, "null") as of_all:
        of_all.add_manifests([*now.manifests(table.io), writer.to_manifest_file()])
    about = json.loads(Path(table.metadata_location.removeprefix("file://")).read_text())
    about["snapshots"] += [
        {**about["snapshots"][-1], "snapshot-id": number, "sequence-number": 2,
         "manifest-list": f"file://{tmp_path}/list.avro"}
    ]  # fmt: skip
    about |= {"current-snapshot-id": number, "last-sequence-number": 2}
    about["refs"]["main"]["snapshot-id"] = number
    changed = tmp_path / "9.metadata.json"
    changed.write_text(json.dumps(about))
    assert len(StaticTable.from_metadata(str(changed)).scan().to_arrow()) == 8
    with pytest.raises(FailedPrecondition, match=r"has files of deleted rows: CALL system\.rewri"):
        register(changed, format="iceberg")
