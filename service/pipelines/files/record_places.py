"""Where the records of files stand among the splits of a dataset, for who looks one up."""

from __future__ import annotations

import numpy as np

from ...errors import InvalidArgument, NotFound
from ...order import permuted_many
from ...proto.python_pb2 import PythonDataset
from . import manifest

RANKS = 1 << 20
"""Of shuffled records, looked at together."""


class RecordPlaces:
    """Of a registered PythonDataset. `varies`: a record may give no element or several."""

    def __init__(self, stored: bytes) -> None:
        """Raises InvalidArgument if that is not known."""
        dataset = PythonDataset.FromString(stored)
        if not dataset.files:
            raise InvalidArgument(
                "its splits are given to a function, which the journal does not see read files"
            )
        self.varies = dataset.varies
        self._manifest = manifest.decode(dataset.files)
        if not self._manifest.is_counted:
            raise InvalidArgument("its records were not counted (count=False)")
        counts = [of.records for of in self._manifest.files]
        self._starts = np.append(0, np.cumsum(counts))

    def rank(self, file: str, row: int, seed: int, epoch: int) -> int:
        """The record's number in the order of all splits of an epoch.

        Args:
          file: its path or URL as it was registered, or an end of that.
          row: its number there, from 0.

        Raises NotFound for a file or a record that the dataset does not have.
        """
        paths = {entry.path: number for number, entry in enumerate(self._manifest.files)}
        ends = [path for path in paths if path == file or path.endswith(f"/{file}")]
        found = [file] if file in paths else ends
        if len(found) != 1:
            named = f"several files end with {file}, such as {', '.join(found[:2])}"
            raise NotFound(named if found else f"no file {file} is registered")
        number = paths[found[0]]
        start, stop = self._starts[number : number + 2].tolist()
        if not 0 <= row < stop - start:
            raise NotFound(f"{found[0]} has {stop - start} records, from 0 on, and not {row}")
        if not self._manifest.shuffled:
            return int(start + row)
        total = int(self._starts[-1])
        for first in range(0, total, RANKS):
            ranks = np.arange(first, min(first + RANKS, total))
            at = np.flatnonzero(permuted_many(ranks, total, seed, epoch) == start + row)
            if len(at):
                return first + int(at[0])
        raise AssertionError("a permutation has each number")

    def split_of(self, rank: int) -> tuple[int, int]:
        """Its split, and its number there."""
        split = int(np.searchsorted(self._manifest.cuts, rank, "right")) - 1
        return split, rank - self._manifest.cuts[split]

    def number_in(self, rank: int, first_split: int) -> int:
        """How many records lie between a split's begin and it."""
        return rank - self._manifest.cuts[first_split]
