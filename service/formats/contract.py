"""What every format must do, as tests: each format's own tests subclass `FormatContract`.

For packages that bring a format, too (docs/formats.md). Needs pytest, and nothing else of Forebay
imports it.
"""

from __future__ import annotations

import pathlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import pytest

from ..blocks import Block
from ..errors import ForebayError
from ..order import permuted_many
from ..pipelines.files import manifest
from ..pipelines.files.byte_sources import Buffer
from ..pipelines.files.known_formats import format_of
from ..pipelines.files.reading import FileRecords
from ..pipelines.kinds.files import definition
from ..proto import forebay_pb2 as pb
from ..proto.python_pb2 import PythonDataset
from ..structure import assemble

COUNTS = (23, 0, 5, 40)


def elements_of(request: pb.RegisterDatasetRequest, split: int, start: int = 0) -> list[Any]:
    """Of a split of files, as a child sends them."""
    records = FileRecords(PythonDataset.FromString(request.python))
    try:
        return [one for block in records.blocks(split, start) for one in _assembled(request, block)]
    finally:
        records.close()


def _assembled(request: pb.RegisterDatasetRequest, block: Block) -> list[Any]:
    columns = [component.elements() for component in block.components]
    return [*assemble(request.structure)(columns, block.count)]


def plain(element: Any) -> Any:
    """What is equal for equal elements."""
    if isinstance(element, dict):
        return {name: plain(value) for name, value in element.items()}
    if isinstance(element, bytes):
        return element
    array = np.asarray(element)
    return array.dtype, array.shape, repr(array.tolist())


class FormatContract(ABC):
    """A subclass says which format it is, and writes its files.

    Call `pytest.register_assert_rewrite("forebay.service.formats.contract")` in
    conftest.py, before the subclass is imported: then a failed assertion shows its values.
    """

    format: ClassVar[str]
    options: ClassVar[dict[str, Any]] = {}
    """Arguments of `register_files`, such as columns."""

    @abstractmethod
    def write(self, directory: pathlib.Path, counts: Sequence[int]) -> tuple[Any, list[Any]]:
        """Write files of so many records. Returns what `register_files` takes for them in this
        order, and their records, as elements of Python and NumPy."""

    @pytest.fixture
    def written(self, tmp_path: pathlib.Path) -> tuple[Any, list[Any]]:
        files, records = self.write(tmp_path, COUNTS)
        return files, [*map(plain, records)]

    def register(self, files: Any, **options: Any) -> pb.RegisterDatasetRequest:
        return definition(files, format=self.format, **self.options | options)

    def all_of(self, request: pb.RegisterDatasetRequest) -> list[Any]:
        splits = range(len(request.lengths))
        return [plain(one) for split in splits for one in elements_of(request, split)]

    def test_splits_of_any_size_have_the_records(self, written: tuple[Any, list[Any]]) -> None:
        files, records = written
        for size in (None, 1, 6, 1000):
            request = self.register(files, split_records=size)
            assert self.all_of(request) == records
            assert sum(request.lengths) == len(records)
            assert request.sources[0].count == len(request.lengths)

    def test_a_split_is_read_from_any_record_on(self, written: tuple[Any, list[Any]]) -> None:
        files, records = written
        request = self.register(files, split_records=9)
        for start in {*range(0, request.lengths[0], 4), request.lengths[0]}:
            found = [*map(plain, elements_of(request, 0, start))]
            assert found == records[start : request.lengths[0]]

    def test_records_are_shuffled(self, written: tuple[Any, list[Any]]) -> None:
        files, records = written
        request = self.register(files, split_records=9, shuffle_records=True, seed=4)
        order = permuted_many(np.arange(len(records)), len(records), 4, 0).tolist()
        assert self.all_of(request) == [records[number] for number in order]
        found = [*map(plain, elements_of(request, 1, 4))]
        assert found == [records[number] for number in order[13:18]]

    def test_files_say_of_which_format_they_are(self, written: tuple[Any, list[Any]]) -> None:
        files, _ = written
        assert definition(files, **self.options) == self.register(files)

    def test_a_file_is_read_by_its_bytes(self, written: tuple[Any, list[Any]]) -> None:
        """As of an object of a store, in any order and from any record on; it closes the bytes."""
        files, records = written
        request = self.register(files)
        stored = manifest.decode(PythonDataset.FromString(request.python).files)
        for entry in filter(lambda entry: entry.records, stored.files):
            source = _Closable(entry, pathlib.Path(entry.path).read_bytes())
            options = stored.options | {"structure": stored.structure}
            file = format_of(self.format).open(source, options)
            mine, records = records[: entry.records], records[entry.records :]
            for first in range(0, entry.records, 6):
                blocks = [*file.read(first, entry.records)]
                assert [plain(one) for b in blocks for one in _assembled(request, b)] == mine[
                    first:
                ]
            order = np.random.default_rng(1).permutation(entry.records)
            found = [*map(plain, _assembled(request, file.take(order)))]
            assert found == [mine[number] for number in order]
            assert all(record in file.group_of(record) for record in range(entry.records))
            file.close()
            assert source.closed

    def test_a_file_that_is_cut_is_named(self, written: tuple[Any, list[Any]]) -> None:
        """Or it is one of fewer records, where a format has no end of its own."""
        files, records = written
        stored = PythonDataset.FromString(self.register(files).python).files
        entry = manifest.decode(stored).files[0]
        path = pathlib.Path(entry.path)
        whole = path.read_bytes()
        for size in (len(whole) - 1, len(whole) // 2, 5):
            path.write_bytes(whole[:size])
            try:
                request = self.register(files)
            except ForebayError as error:
                assert str(path) in str(error)
            else:
                lost = len(records) - sum(request.lengths)
                kept = entry.records - lost
                assert 0 <= lost <= entry.records
                assert self.all_of(request) == records[:kept] + records[entry.records :]

    def test_a_file_that_is_changed_is_refused(self, written: tuple[Any, list[Any]]) -> None:
        files, _ = written
        request = self.register(files)
        stored = PythonDataset.FromString(request.python).files
        path = pathlib.Path(manifest.decode(stored).files[0].path)
        path.write_bytes(path.read_bytes()[:-1] + b"~")
        with pytest.raises(ForebayError, match="when it was registered"):
            self.all_of(request)


class _Closable(Buffer):
    closed = False

    def close(self) -> None:
        self.closed = True
        super().close()
