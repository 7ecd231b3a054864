"""Columns that directories' names have, such as `year=2020/0.parquet`, as PyArrow reads them.

PyArrow finds their types and values where the files are registered. A file's values are in its
entry (manifest.py), and are given with each of its records.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from ...blocks import Component, Strings
from ...errors import InvalidArgument
from .arrow_types import ArrowColumn, columns_of, pyarrow
from .formats import Node


class Partitions(NamedTuple):
    """Columns of several files."""

    nodes: Mapping[str, Node] = MappingProxyType({})  # by name
    values: Sequence[Mapping[str, Any]] = ()  # by file; None is a null

    def values_of(
        self, number: int, path: str, names: Iterable[str], fill: Mapping[str, Any]
    ) -> dict[str, Any]:
        """A file's. Raises InvalidArgument for a null without `fill`, and OverflowError."""
        values = {name: self.values[number][name] for name in names}
        for name, value in values.items():
            if value is None and name not in fill:
                raise InvalidArgument(
                    f"the directory of {path} has no {name!r}, which others have: give "
                    f"fill={{{name!r}: …}}, a value in its place, or other `columns`"
                )
            values[name] = fill[name] if value is None else value
            constant(self.nodes[name]["tensor"], values[name])
        return values


def found(first: str, places: Sequence[str], partitioning: Any) -> Partitions:
    """Of files: the first one's path, and where all are below what was registered. `partitioning`
    is as in pyarrow.parquet.read_table. Raises InvalidArgument."""
    if partitioning is None or (partitioning == "hive" and not any("=" in one for one in places)):
        return Partitions()
    pyarrow(first)
    from pyarrow import dataset, fs

    options = dataset.FileSystemFactoryOptions(partition_base_dir="", exclude_invalid_files=False)
    try:
        if partitioning == "hive":
            partitioning = dataset.HivePartitioning.discover(infer_dictionary=True)
        elif isinstance(partitioning, list):
            partitioning = dataset.partitioning(field_names=partitioning)
        if isinstance(partitioning, dataset.PartitioningFactory):
            options.partitioning_factory = partitioning
        else:
            options.partitioning = partitioning
        factory = dataset.FileSystemDatasetFactory(
            fs.LocalFileSystem(), [*places], dataset.ParquetFileFormat(), options
        )  # it opens none of them
        schema = factory.inspect(fragments=0)
        expressions = [one.partition_expression for one in factory.finish(schema).get_fragments()]
    except (ValueError, TypeError) as error:  # Arrow's are among them
        raise InvalidArgument(
            f"partitioning={partitioning!r:.100} does not fit the names of directories: "
            f"{error!s:.300}. Give another one, or None"
        ) from error
    keys = map(dataset.get_partition_keys, expressions)
    return of_types(f"a directory of {first}", schema, keys)


def of_types(named: str, schema: Any, values: Iterable[Mapping[str, Any]]) -> Partitions:
    """Columns of Arrow's types, with each file's values. `named` is what has them, for errors.
    Raises InvalidArgument."""
    columns = columns_of(named, schema, {})
    return Partitions(
        {one.name: one.nodes[one.keys] for one in columns},
        [{one.name: _plain(one, keys.get(one.name)) for one in columns} for keys in values],
    )


def _plain(column: ArrowColumn, value: Any) -> Any:
    if value is None:
        return None
    import pyarrow as arrow

    ((_, (component,)),) = column.components(arrow.array([value], column.kind))
    values = component.values
    return values.data.tobytes() if isinstance(values, Strings) else values[0].item()


def constant(dtype: str, value: Any) -> Any:
    """The value as a column has it, bytes or an array of one. Raises OverflowError."""
    if dtype == "string":
        return value.encode() if isinstance(value, str) else value
    found = np.array([value]).astype(dtype)
    if found.dtype.kind in "iu" and found[0] != value:
        raise OverflowError(f"{value} is no {found.dtype}")
    return found


def repeated(dtype: str, value: Any, count: int) -> Component:
    """A column of this value alone."""
    value = constant(dtype, value)
    if not isinstance(value, bytes):
        return Component(np.repeat(value, count))
    lengths = np.full(count, len(value), np.int64)
    return Component(Strings(lengths, np.frombuffer(value * count, np.uint8)))
