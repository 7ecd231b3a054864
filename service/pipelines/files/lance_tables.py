"""Tables of Lance, by pylance: a file is that of a fragment, and a record one of its rows that the
registered version of the table has not deleted."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from typing import Any

from ...blocks import Block
from ...extras import imported
from . import stores
from .arrow_types import block, columns_of, cut, wanted
from .byte_sources import ByteSource
from .formats import LARGE_BYTES, Damaged, Facts, Format, Ints, Options, RandomAccessFile, dict_of
from .row_groups import facts_of

VERSION = "lance"  # in the options' "snapshot"


def opened(path: str, version: int | None, options: Options) -> Any:
    """`options` are storage_options. Raises FailedPrecondition without pylance, and Damaged."""
    lance = imported("lance", "lance", path)
    try:
        storage = stores.of_object_store(path, options)
        return lance.dataset(path, version=version, storage_options=storage)
    except (ValueError, OSError) as error:
        which = "the table" if version is None else f"version {version} of the table"
        raise Damaged(f"{which} cannot be opened ({error!s:.300}): register it again") from error


def file_of(path: str, fragment: Any) -> str:
    return os.path.join(path, "data", fragment.data_files()[0].path)


@functools.lru_cache(maxsize=4)
def _fragments(
    path: str, version: int, options: tuple[tuple[str, Any], ...]
) -> tuple[Any, dict[str, tuple[Any, int]]]:
    """The table, and its fragments by file, with the number of rows before each."""
    table, found, before = opened(path, version, dict(options)), {}, 0
    for fragment in table.get_fragments():
        found[file_of(path, fragment)] = fragment, before
        before += fragment.count_rows()
    return table, found


class LanceRows(RandomAccessFile):
    """Of a fragment."""

    def __init__(self, source: ByteSource, options: Options) -> None:
        path, storage = source.path, options.get("storage", {})
        if stores.is_url(path):  # which Lance reads itself, and compares with nothing
            source.entry.require_same(stores.head(path, storage))
        root = os.path.dirname(os.path.dirname(path))
        self.table, fragments = _fragments(
            root, options["snapshot"][VERSION], (*sorted(storage.items()),)
        )
        self._fragment, self._before = fragments[path]
        self.rows = self._fragment.count_rows()
        if source.size != (size := self._fragment.data_files()[0].file_size_bytes or source.size):
            raise Damaged(f"it has {source.size} bytes, and its table says {size}: it is cut")
        names = options.get("columns")
        columns = columns_of(path, self.table.schema, options)
        self.columns = columns if names is None else wanted(path, columns, options)
        self._names = [*dict.fromkeys(one.keys[0] for one in self.columns)]
        super().__init__(source, source.size / max(1, self.rows))

    def read(self, first: int, stop: int) -> Iterator[Block]:
        scanner = self._fragment.scanner(columns=self._names, offset=first, limit=stop - first)
        for batch in scanner.to_batches():
            for piece in cut(batch, LARGE_BYTES):
                yield block(piece, self.columns)

    def take(self, records: Ints) -> Block:
        rows = self.table.take((self._before + records).tolist(), columns=self._names)
        (batch,) = rows.combine_chunks().to_batches()
        return block(batch, self.columns)


def _inspect(source: ByteSource, options: Options) -> Facts:
    file = LanceRows(source, options)
    if not file.rows:
        return Facts(0, dict_of({}))
    return facts_of(file.columns, [file.rows], file.rows)._replace(cuts=())


FORMAT = Format(
    suffixes=(),  # tables.py says which files a table has
    matches=lambda _: False,
    inspect=_inspect,
    open=LanceRows,
    native=True,
    reads_ends=True,
    options=("columns", "fill"),
)
