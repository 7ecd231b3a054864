"""Tables, whose own packages say which files they have now: Delta Lake, Iceberg and Lance.

What these files have, read alone, must be what the table has. So whatever a table says beside them
(deleted rows, other names of columns) is refused by name.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import re
from collections import defaultdict
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any, NamedTuple
from urllib.parse import unquote

from ...errors import FailedPrecondition, ForebayError, InvalidArgument, NotFound
from ...extras import imported
from ..files import lance_tables
from ..files.arrow_types import pyarrow
from ..files.byte_sources import opened_now
from ..files.formats import few
from ..files.known_formats import TABLE_SIGNS, TABLES
from ..files.manifest import FileEntry
from ..files.partitions import Partitions, of_types
from ..files.stores import is_url, listed, of_object_store, require_plain
from .file_paths import heads

_HINT = "version-hint.text"
"""The name of a file in which a table of Iceberg may say its newest metadata."""

_DELTA_FEATURES = {"deletionVectors", "timestampNtz", "v2Checkpoint", "vacuumProtocolCheck"}
"""Of readers, which change nothing of what a file has; of the first, it is looked whether any does.
Column mapping has an older way to be said as well."""


class Table(NamedTuple):
    """A snapshot of a table."""

    files: list[FileEntry]  # of local ones only their paths
    columns: list[str]
    snapshot: dict[str, int]  # its number, by the kind of table
    outside: Partitions = Partitions()
    format: str = "parquet"

    def chosen(self, columns: Any) -> Any:
        """By default all that the table has: files may have more. Raises InvalidArgument."""
        if not isinstance(columns, Iterable) or isinstance(columns, str):
            return self.columns if columns is None else columns
        columns = [*columns]
        tops = [name if name in self.columns else str(name).partition(".")[0] for name in columns]
        if missing := [name for name in tops if name not in self.columns]:
            raise InvalidArgument(
                f"the table has no columns {few(missing)}: give some of {few(self.columns)}"
            )
        return columns


def found(files: Any, named: str | None, options: dict[str, Any]) -> Table | None:
    """The table that the files are, if they are one. `options` are storage_options. Raises
    InvalidArgument, NotFound, FailedPrecondition."""
    one = isinstance(files, str | os.PathLike)
    path = _local(os.fspath(files)).rstrip("/") if one else ""
    for sign, (_, kind) in TABLE_SIGNS.items() if one and named is None else ():
        if kind and os.path.isdir(os.path.join(path, sign)):
            named = kind
    if named not in TABLES:
        return None
    if not path:
        raise InvalidArgument(f"files={files!r:.100}: format={named!r} is for one table: its path")
    if is_url(path):
        require_plain(path)
    elif not os.path.exists(path := os.path.abspath(path)):
        raise NotFound(f"{path} is not there")
    read = {"delta": _delta, "iceberg": _iceberg, "lance": _lance}[named]
    try:
        table = read(path, options)
    except ForebayError:
        raise
    except Exception as error:
        raise FailedPrecondition(
            f"{path} cannot be read as format={named!r} ({type(error).__name__}: {error!s:.300})"
        ) from error
    if not table.files:
        raise InvalidArgument(f"{path} has no files: give a table that has rows")
    return table


def _delta(path: str, options: dict[str, Any]) -> Table:
    deltalake, arrow = imported("deltalake", "delta", path), pyarrow(path)
    table = deltalake.DeltaTable(path, storage_options=of_object_store(path, options))
    about, features = table.metadata(), {*(table.protocol().reader_features or ())}
    if about.configuration.get("delta.columnMapping.mode", "none") != "none":
        features.add("columnMapping")
    if others := features - _DELTA_FEATURES:
        raise _refusal(path, f"has the features {sorted(others)}")
    if "deletionVectors" in features and any(batch.num_rows for batch in table.deletion_vectors()):
        raise _refusal(path, "has deletion vectors: REORG TABLE … APPLY (PURGE) writes it without")
    schema = arrow.schema(table.schema().to_arrow())
    added = arrow.table(table.get_add_actions(flatten=True)).sort_by("path")
    outside = Partitions()
    if (names := about.partition_columns) and len(added):
        keys = added.select([f"partition.{name}" for name in names]).rename_columns(names)
        keys = keys.cast(arrow.schema([schema.field(name) for name in names]))
        outside = of_types(f"the table {path}", keys.schema, keys.to_pylist())
    places = [os.path.join(path, unquote(one)) for one in added["path"].to_pylist()]
    return Table(_entries(places, options), schema.names, {"delta": table.version()}, outside)


def _iceberg(path: str, options: dict[str, Any]) -> Table:
    pyiceberg = imported("pyiceberg.table", "iceberg", path)
    from pyiceberg.catalog.noop import NoopCatalog
    from pyiceberg.serializers import FromInputFile

    newest, files = _newest_metadata(path, options), _FilesOfTable(options)
    metadata = FromInputFile.table_metadata(files.new_input(newest))
    table = pyiceberg.StaticTable(
        identifier=("table", newest), metadata=metadata, metadata_location=newest, io=files,
        catalog=NoopCatalog("none"),
    )  # fmt: skip
    if (snapshot := table.current_snapshot()) is None:
        return Table([], [], {})
    _require_no_other_names(path, table)
    tasks = sorted(table.scan().plan_files(), key=lambda task: str(task.file.file_path))
    if any(task.delete_files for task in tasks):
        raise _refusal(
            path,
            "has files of deleted rows: CALL system.rewrite_data_files(…, "
            "options => map('delete-file-threshold', '1')) writes it without",
        )
    if odd := {str(task.file.file_format.value) for task in tasks} - {"PARQUET"}:
        raise _refusal(path, f"has files of {sorted(odd)}")
    names = [field.name for field in table.schema().fields]
    places = [task.file.file_path for task in tasks]
    return Table(_entries(places, options), names, {"iceberg": snapshot.snapshot_id})


class _FilesOfTable:
    """PyIceberg's FileIO, as far as it reads. Its own would ask an endpoint that the table names,
    and have other credentials than files of records."""

    def __init__(self, options: dict[str, Any]) -> None:
        self._options = options

    def new_input(self, location: str) -> Any:
        return SimpleNamespace(location=location, open=lambda **_: io.BytesIO(self.read(location)))

    def read(self, location: str) -> bytes:
        with contextlib.closing(opened_now(_local(location), self._options)) as file:
            return bytes(file.read(0, file.size))


def _lance(path: str, options: dict[str, Any]) -> Table:
    table = lance_tables.opened(path, None, options)
    places = [lance_tables.file_of(path, one) for one in table.get_fragments()]
    snapshot = {lance_tables.VERSION: table.version}
    return Table(_entries(places, options), table.schema.names, snapshot, format="lance")


def _newest_metadata(path: str, options: dict[str, Any]) -> str:
    """A table that no catalog names: what its hint says, or the file with the largest number."""
    if path.endswith(".metadata.json"):
        return path
    if path.endswith(".metadata.json.gz"):
        raise InvalidArgument(
            f"{path}: PyIceberg takes it for no gzip. Give a copy named ….gz.metadata.json"
        )
    folder, numbered = os.path.join(path, "metadata"), defaultdict(list)
    names = (
        os.listdir(folder)
        if not is_url(path)
        else [os.path.basename(entry.path) for entry in listed(folder, options)]
    )
    if _HINT in names:
        said = _FilesOfTable(options).read(os.path.join(folder, _HINT)).decode().strip()
        said = f"v{said}" if said.isnumeric() else said.removesuffix(".metadata.json")
        return os.path.join(folder, f"{said}.metadata.json")
    for name in names:
        if number := re.match(r"v?(\d+).*\.metadata\.json$", name):
            numbered[int(number[1])].append(os.path.join(folder, name))
    if not numbered:
        raise FileNotFoundError(errno.ENOENT, "it has no metadata of Iceberg", folder)
    if len(newest := numbered[max(numbered)]) != 1:
        raise InvalidArgument(
            f"{path} has newest metadata {few(sorted(newest))}, and only its catalog knows which "
            "is current: give the path of that metadata.json"
        )
    return newest[0]


def _require_no_other_names(path: str, table: Any) -> None:
    """A file has the names and types of its time, and Iceberg finds columns by their ids. Raises
    FailedPrecondition."""
    names: dict[int, tuple[str, str]] = {}
    ids: dict[str, int] = {}
    for schema in table.metadata.schemas:
        for field in schema.fields:
            now = field.name, str(field.field_type)
            if (before := names.setdefault(field.field_id, now)) != now:
                raise _refusal(path, f"has column {' '.join(now)!r}, once {' '.join(before)!r}")
            if ids.setdefault(field.name, field.field_id) != field.field_id:
                raise _refusal(path, f"has had two columns {field.name!r}")


def _entries(places: list[str], options: dict[str, Any]) -> list[FileEntry]:
    places = [*map(_local, places)]
    if places and is_url(places[0]):
        return heads(places, options)
    return [FileEntry(one, 0, "", 0) for one in places]


def _local(location: str) -> str:
    """A path without `file://`, or `file:` as Hadoop writes it; other URLs as they are."""
    return re.sub(r"^file:(//|(?=/))", "", location)


def _refusal(path: str, what: str) -> FailedPrecondition:
    return FailedPrecondition(
        f"{path} {what}, and files are read as they are: rewrite the table, or register files that "
        "you write of it"
    )
