"""Rows of a file whose columns come in groups, each of which is read at once (arrow_types.py)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from ...blocks import Block
from .arrow_types import ArrowColumn, block, cut, pyarrow, structure_of, wide, without_nulls
from .byte_sources import ByteSource
from .formats import LARGE_BYTES, Facts, Ints, Options, grouped


def facts_of(columns: list[ArrowColumn], rows: Sequence[int], in_all: int) -> Facts:
    """Of a file with so many rows in each group, and `in_all` with those that are left out."""
    cuts = np.cumsum([0, *rows]).tolist()
    times = {one.name: one.time for one in columns if one.time}
    return Facts(cuts[-1], structure_of(columns), cuts, times, left_out=in_all - cuts[-1])


class RowGroups(ABC):
    """An open file. Its records are its rows, or those without nulls."""

    def __init__(
        self, source: ByteSource, options: Options, columns: list[ArrowColumn], rows: Ints
    ) -> None:
        """`rows` are before each group, and in all."""
        self._path, self._read = source.path, columns
        self._drops = options.get("nulls") == "drop"
        self._starts = np.array(source.entry.cuts) if self._drops else rows

    @abstractmethod
    def batches(self, groups: range) -> Iterator[Any]:
        """Arrow's record batches of all rows, with the columns that are read at least."""

    @abstractmethod
    def table(self, group: int) -> Any:
        """As Arrow's table, with these columns alone."""

    @abstractmethod
    def plan(self, groups: Iterable[int]) -> None:
        """They will be read, in this order."""

    @abstractmethod
    def close(self) -> None: ...

    def _group(self, record: int) -> int:
        return int(np.searchsorted(self._starts, record, "right")) - 1

    def expect(self, first: int, stop: int) -> range:
        """These records will be read. Returns their groups."""
        groups = range(self._group(first), self._group(stop - 1) + 1)
        self.plan(groups)
        return groups

    def read(self, first: int, stop: int) -> Iterator[Block]:
        groups = self.expect(first, stop)
        at = int(self._starts[groups.start])
        for batch in self.batches(groups):
            kept = self._kept(batch)
            low, high = max(0, first - at), min(kept.num_rows, stop - at)
            at += kept.num_rows
            if low < high:
                for part in cut(kept.slice(low, high - low), LARGE_BYTES):
                    yield block(part, self._read)

    def _kept(self, batch: Any) -> Any:
        return without_nulls(batch, self._read) if self._drops else batch

    def take(self, records: Ints) -> Block:
        if not self._read:  # a table without columns has no rows, either
            return Block(len(records), ())
        arrow, tables = pyarrow(self._path), []
        groups = grouped(self._starts, records)
        self.plan(number for number, _ in groups)
        for number, places in groups:
            table = self.table(number)
            table = table.cast(wide(table.schema))  # or the rows may be too many bytes for one
            if self._drops:
                (batch,) = table.combine_chunks().to_batches()
                table = arrow.Table.from_batches([self._kept(batch)])
            tables.append(table.take(arrow.array(records[places] - self._starts[number])))
        order = np.argsort(np.concatenate([places for _, places in groups]))
        table = arrow.concat_tables(tables).take(arrow.array(order)).combine_chunks()
        (batch,) = table.to_batches()
        return block(batch, self._read)

    def group_of(self, record: int) -> range:
        group = self._group(record)
        return range(int(self._starts[group]), int(self._starts[group + 1]))
