"""Measures reading real files without a service, in a process for each library.

python -m forebay.benchmarks.loaders (tensorflow|torch|grain) DIRECTORY

`bare` is the pipeline driven in C++, by `reduce`, which calls a function for each
element; `skipped` is the pipeline alone. `eager` is a loop over it in Python. Each loader has two
processes. As in users' code, they make batches, or packs that the trainer unpacks.
"""

from __future__ import annotations

import functools
import importlib
import itertools
import math
import os
import pathlib
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from .consume import measured, serve
from .contents import FILE_CASES, FileCase
from .machine import descendants, memory_mb
from .results import Reading

PROCESSES = 2
LEAST_S = 0.1  # of a trial pass, which determines the measured one's size

Open = Callable[[FileCase, pathlib.Path, int], Iterator[Any]]
"""Yields a number of elements of a case from the directory of its files; 0: infinitely many."""


class Numbered:
    """Records by number, repeated: the usual form of a PyTorch dataset."""

    def __init__(self, case: FileCase, directory: pathlib.Path) -> None:
        self._case = case
        path = case.content.numbered(directory)
        if case.content.pictures:
            self._pictures = sorted(path.iterdir())
            self._count = len(self._pictures)
        else:
            self._ends = np.load(case.content.ends(directory))
            self._data = np.memmap(path, np.uint8, "r")
            self._count = len(self._ends)

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, number: int) -> Any:
        number %= self._count
        if self._case.content.pictures:
            return self._case.decode(self._pictures[number].read_bytes())
        begin = self._ends[number - 1] if number else 0
        record = self._data[begin : self._ends[number]]
        return self._case.decode(bytearray(record))  # PyTorch wants memory that can be written


def eager_elements(case: FileCase, directory: pathlib.Path, size: int) -> Iterator[Any]:
    from .cases import pipeline

    return iter(pipeline(case, directory, size))


def torch_elements(case: FileCase, directory: pathlib.Path, size: int) -> Iterator[Any]:
    import torch

    packs: Iterable[Any] = torch.utils.data.DataLoader(
        Numbered(case, directory),  # type: ignore[arg-type, unused-ignore]
        batch_size=case.pack,
        sampler=range(size * case.batch) if size else itertools.count(),
        num_workers=PROCESSES,
        collate_fn=functools.partial(_torch_pack, case),
    )
    return iter(packs) if case.batched else _unpacked(case, packs, torch.split)


def _torch_pack(case: FileCase, elements: list[Any]) -> Any:
    import torch

    if isinstance(elements[0], bytes):
        return elements
    if not case.ragged:
        return torch.utils.data.default_collate(elements)
    tensors = list(map(torch.from_numpy, elements))
    if case.batched:
        return torch.nn.utils.rnn.pad_sequence(tensors, batch_first=True)
    return torch.cat(tensors), list(map(len, tensors))


def _unpacked(
    case: FileCase, packs: Iterable[Any], split: Callable[[Any, Any], Iterable[Any]]
) -> Iterator[Any]:
    if case.ragged:
        packs = (split(flat, lengths) for flat, lengths in packs)
    return itertools.chain.from_iterable(packs)


def grain_elements(case: FileCase, directory: pathlib.Path, size: int) -> Iterator[Any]:
    import grain
    from absl import flags

    flags.FLAGS.mark_as_parsed()  # a program of absl's would have; Grain reads flags of its own
    source = grain.sources.ArrayRecordDataSource([str(case.content.array_record(directory))])
    records = grain.MapDataset.source(source).repeat()
    if size:
        records = records[: size * case.batch]
    packs = (
        records.map(case.decode)
        .batch(case.pack, drop_remainder=size == 0, batch_fn=functools.partial(numpy_pack, case))
        # No threads for what is in memory already, as Grain's documentation advises.
        .to_iter_dataset(grain.ReadOptions(num_threads=0, prefetch_buffer_size=0))
        .mp_prefetch(grain.MultiprocessingOptions(num_workers=PROCESSES))
    )
    return iter(packs) if case.batched else _unpacked(case, packs, _numpy_split)


def numpy_pack(case: FileCase, elements: Any) -> Any:
    """Make a batch, or a pack of elements, which the trainer unpacks."""
    if isinstance(elements[0], bytes):
        return np.array(elements, object)
    if not case.ragged:
        return np.stack(elements)
    lengths = np.array(list(map(len, elements)))
    if not case.batched:
        return np.concatenate(elements), lengths
    padded = np.zeros((len(elements), lengths.max()), elements[0].dtype)
    for row, element in zip(padded, elements, strict=True):
        row[: len(element)] = element
    return padded


def _numpy_split(flat: Any, lengths: Any) -> list[Any]:
    return np.split(flat, np.cumsum(lengths)[:-1])


WAYS: dict[str, Open] = {"eager": eager_elements, "torch": torch_elements, "grain": grain_elements}


def measure(
    open_: Open, case: FileCase, directory: pathlib.Path, warm_up_s: float, seconds: float
) -> Reading:
    """Read for `seconds`; child processes' CPU time counts as a worker's."""
    begin = functools.partial(open_, case, directory, 0)
    return measured(begin, lambda: descendants(os.getpid()), warm_up_s, seconds)


def by_reduce(dataset: Any, count: Any) -> Any:
    """Take `count` elements, and call a function for each, as a loop in C++ does."""
    return dataset.take(count).reduce(np.int64(0), lambda total, _: total + 1)


def by_skip(dataset: Any, count: Any) -> Any:
    """Take `count` elements, and do nothing else.

    Between the two stands what cannot be skipped, so that none is left out or made in part.
    """
    import tensorflow as tf

    taken = dataset.take(count).apply(tf.data.experimental.assert_cardinality(count))
    return taken.skip(count).reduce(count, lambda total, _: total + 1)


DRIVERS = {"bare": by_reduce, "skipped": by_skip}


def measure_bare(
    drive: Callable[[Any, Any], Any], case: FileCase, directory: pathlib.Path, seconds: float
) -> Reading:
    """Drive the pipeline in C++, for about `seconds`."""
    import tensorflow as tf

    from .cases import pipeline

    dataset = pipeline(case, directory, 0)
    # Trace once: tracing costs as much as many elements.
    driven = tf.function(functools.partial(drive, dataset))
    driven(tf.constant(1, tf.int64))
    count, elapsed_s, cpu_s = 1, 0.0, 0.0
    while elapsed_s < seconds / 2:
        count = 2 * count if elapsed_s < LEAST_S else math.ceil(count * seconds / elapsed_s)
        elapsed_s, cpu_s = time.perf_counter(), time.process_time()
        passed = int(driven(tf.constant(count, tf.int64)))
        elapsed_s, cpu_s = time.perf_counter() - elapsed_s, time.process_time() - cpu_s
        assert passed == count
    return Reading(
        elements=count,
        seconds=elapsed_s,
        client_cpu_s=cpu_s,
        worker_cpu_s=0,
        client_peak_mb=memory_mb(os.getpid(), "VmHWM"),
        worker_peak_mb=0,
        first_s=0,
    )


def answer(
    way: str, row: str, warm_up_s: float, seconds: float, directory: pathlib.Path
) -> Reading:
    """Read in a way, for so long."""
    if way in DRIVERS:
        return measure_bare(DRIVERS[way], FILE_CASES[row], directory, seconds)
    return measure(WAYS[way], FILE_CASES[row], directory, warm_up_s, seconds)


if __name__ == "__main__":
    importlib.import_module(sys.argv[1])
    serve(functools.partial(answer, directory=pathlib.Path(sys.argv[2])))
