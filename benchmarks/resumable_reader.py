"""Reads what rows `resumable` and `record_files` read, in one process, by one library, and prints
what it found.

python -m forebay.benchmarks.resumable_reader QUESTION

QUESTION is JSON, the fields of `Question`. The answer is a line of JSON, the fields of `Reply`.
Peers have an environment of their own, without Forebay: only `forebay` imports anything of it.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import pathlib
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from importlib import import_module
from typing import Any

import numpy as np

from .consume import consume
from .machine import descendants, process_cpu_s

SEED = 1
BATCH = 250
SAVED_AT = 3 * BATCH  # records of the epoch, whose position is saved
NUMBER_BYTES = 8  # each record begins with its number
ARRAY_RECORDS = 4_000  # a file
COLUMN = "record"  # the records' name in MDS


@dataclass(frozen=True, kw_only=True)
class Question:
    """What to read, and what for.

    `task`: "write" the files; take elements for `seconds`, and say their "rate"; take the first
    element ("resume"); take all, and say the numbers of their records in "order". `state` is where
    to begin; None: at the epoch's begin.
    """

    task: str
    library: str
    directory: str
    records: int
    record_bytes: int
    batched: bool = False
    batch: int = BATCH  # its size
    processes: int = 0  # of the library's own, beside this one
    address: str = ""
    dataset_id: str = ""
    order: dict[str, Any] = field(default_factory=dict)  # of Forebay's read, beside the default
    state: Any = None
    warm_up_s: float = 0.0
    seconds: float = 0.0
    servers: list[int] = field(default_factory=list)  # processes that work for this one
    begun_s: float = 0.0  # on the clock of all processes: when this one was started


@dataclass(kw_only=True)
class Reply:
    """Times in seconds."""

    imported_s: float = 0.0  # from the process's start until all is imported
    first_s: float = 0.0  # from then to the first element
    seconds: float = 0.0  # of the measurement of a rate
    records: int = 0  # that were taken in that time
    cpu_s: float = 0.0  # of all processes for it
    state: Any = None  # behind SAVED_AT records
    numbers: list[int] = field(default_factory=list)  # of records, in order


@dataclass(frozen=True, kw_only=True)
class Elements:
    """Records or batches, and the position behind those that were taken.

    A record is a string, and a batch is an array: uint8, (BATCH, record_bytes).
    """

    iterator: Iterator[Any]
    state: Callable[[int], Any]  # behind so many elements
    close: Callable[[], None] = lambda: None


def numbers_of(element: Any) -> list[int]:
    if isinstance(element, dict):
        rows: list[int] = element["id"].tolist()
        return rows
    if isinstance(element, bytes):
        return [int.from_bytes(element[:NUMBER_BYTES], "little")]
    found: list[int] = np.ascontiguousarray(element[:, :NUMBER_BYTES]).view("<u8").ravel().tolist()
    return found


def record(number: int, size: int, random: np.random.Generator) -> bytes:
    """Its number, and noise."""
    return number.to_bytes(NUMBER_BYTES, "little") + random.bytes(size - NUMBER_BYTES)


def records(question: Question) -> Iterator[bytes]:
    """The same ones for each library."""
    random = np.random.default_rng(0)
    return (record(number, question.record_bytes, random) for number in range(question.records))


# -- Forebay: an ordered read ---------------------------------------------------------------------


def forebay(question: Question) -> Elements:
    service = import_module("forebay.service")
    elements = service.read(
        question.address,
        question.dataset_id,
        ordered=True,
        seed=SEED,
        bundle_splits=1,
        batch_size=question.batch if question.batched else None,
        **question.order,
    )
    if question.state is not None:
        elements.load_state_dict(question.state)
    records = elements
    if question.library == "forebay-mds" and not question.batched:
        records = (sample[COLUMN] for sample in elements)
    return Elements(iterator=records, state=lambda _: elements.state_dict(), close=elements.close)


# -- Grain: a MapDataset, and ElasticIterator -----------------------------------------------------


def _array_records(question: Question) -> list[str]:
    """Files of few records: to read one takes time in proportion to its file's."""
    count = -(-question.records // ARRAY_RECORDS)
    return [f"{question.directory}/{number:05}.array_record" for number in range(count)]


def write_for_grain(question: Question) -> None:
    from array_record.python.array_record_module import ArrayRecordWriter

    all_records = records(question)
    for path in _array_records(question):
        # As Grain's documentation advises; the other formats do not compress either.
        writer = ArrayRecordWriter(path, "group_size:1,uncompressed")
        for one in itertools.islice(all_records, ARRAY_RECORDS):
            writer.write(one)
        writer.close()


def _as_array(one: bytes) -> Any:
    return np.frombuffer(one, np.uint8)


def grain(question: Question) -> Elements:
    import grain
    from absl import flags

    flags.FLAGS.mark_as_parsed()  # a program of absl's would have; Grain reads flags of its own
    source = grain.sources.ArrayRecordDataSource(_array_records(question))
    dataset = grain.MapDataset.source(source).shuffle(SEED)
    # No threads for what is in memory already, as Grain's documentation advises.
    how = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
    processes = None
    if question.processes:
        processes = grain.MultiprocessingOptions(num_workers=question.processes)
    if question.batched:
        shard = grain.sharding.ShardOptions(shard_index=0, shard_count=1)
        elements = iter(
            grain.experimental.ElasticIterator(
                dataset.map(_as_array),
                BATCH,
                shard,
                read_options=how,
                multiprocessing_options=processes,
            )
        )
    else:
        one_by_one = dataset.to_iter_dataset(how)
        elements = iter(one_by_one if processes is None else one_by_one.mp_prefetch(processes))
    if question.state is not None:
        elements.set_state(question.state)
    return Elements(iterator=elements, state=lambda _: elements.get_state(), close=elements.close)


# -- MosaicML Streaming: a StreamingDataset, and StreamingDataLoader -------------------------------


def write_for_streaming(question: Question) -> None:
    from streaming import MDSWriter

    out = str(pathlib.Path(question.directory, "mds"))
    with MDSWriter(columns={COLUMN: "bytes"}, out=out) as writer:
        for one in records(question):
            writer.write({COLUMN: one})


def _as_arrays(samples: list[dict[str, bytes]]) -> dict[str, Any]:
    return {COLUMN: np.stack([np.frombuffer(sample[COLUMN], np.uint8) for sample in samples])}


def _as_lists(samples: list[dict[str, bytes]]) -> dict[str, Any]:
    return {COLUMN: [sample[COLUMN] for sample in samples]}


def streaming(question: Question) -> Elements:
    from streaming import StreamingDataLoader, StreamingDataset
    from streaming.base.util import clean_stale_shared_memory

    clean_stale_shared_memory()
    path = str(pathlib.Path(question.directory, "mds"))
    dataset = StreamingDataset(local=path, shuffle=True, shuffle_seed=SEED, batch_size=BATCH)
    if not question.batched and not question.processes:
        if question.state is not None:
            dataset.load_state_dict(question.state)
        return Elements(
            iterator=(sample[COLUMN] for sample in dataset),
            state=lambda taken: dataset.state_dict(taken, from_beginning=False),
        )
    loader = StreamingDataLoader(
        dataset,
        batch_size=BATCH,
        num_workers=question.processes,
        collate_fn=_as_arrays if question.batched else _as_lists,
    )
    if question.state is not None:
        loader.load_state_dict(question.state)
    batches = (batch[COLUMN] for batch in loader)
    elements = batches if question.batched else itertools.chain.from_iterable(batches)
    return Elements(iterator=elements, state=lambda _: loader.state_dict())


# -- PyArrow: a dataset's scanner ------------------------------------------------------------------


def pyarrow(question: Question) -> Elements:
    from pyarrow import dataset

    paths = sorted(map(str, pathlib.Path(question.directory).glob("*.parquet")))
    batches = dataset.dataset(paths).to_batches(batch_size=question.batch)
    arrays = (
        {name: batch[name].to_numpy(zero_copy_only=False) for name in batch.schema.names}
        for batch in batches
    )
    return Elements(iterator=arrays, state=lambda _: None)


LIBRARIES: dict[str, tuple[tuple[str, ...], Callable[[Question], Elements]]] = {
    "forebay": (("forebay.service.client.reader",), forebay),  # forebay.service imports lazily
    "forebay-mds": (("forebay.service.client.reader",), forebay),
    "pyarrow": (("pyarrow.dataset",), pyarrow),
    "grain": (("grain", "array_record"), grain),
    "streaming": (("streaming",), streaming),
}
"""What to import, and how to open it."""

WRITERS = {"grain": write_for_grain, "streaming": write_for_streaming}


def answer(question: Question) -> Reply:
    modules, open_ = LIBRARIES[question.library]
    for module in modules:
        import_module(module)
    found = Reply(imported_s=time.monotonic() - question.begun_s)
    if question.task == "write":
        WRITERS[question.library](question)
        return found
    begun = time.monotonic()
    elements = open_(question)
    numbers = map(numbers_of, elements.iterator)
    found.numbers = next(numbers)
    found.first_s = time.monotonic() - begun
    if question.task != "resume":
        saved_at = max(1, SAVED_AT // len(found.numbers))
        for more in itertools.islice(numbers, saved_at - 1):
            found.numbers += more
        found.state = elements.state(saved_at)
    if question.task == "order":
        found.numbers += itertools.chain.from_iterable(numbers)
    elif question.task == "rate":
        _measure(question, elements.iterator, found)
    elements.close()
    return found


def _measure(question: Question, elements: Iterator[Any], found: Reply) -> None:
    """Take elements for `seconds`, or to the epoch's end."""
    consume(elements, question.warm_up_s)
    processes = [os.getpid(), *descendants(os.getpid()), *question.servers]
    cpu_s = _cpu_s(processes)
    count, found.seconds = consume(elements, question.seconds)
    found.cpu_s = _cpu_s(processes) - cpu_s
    found.records = count * (question.batch if question.batched else 1)


def _cpu_s(processes: list[int]) -> float:
    """A process beside this one may have ended with the epoch."""
    total = 0.0
    for process in processes:
        with contextlib.suppress(FileNotFoundError):
            total += process_cpu_s(process)
    return total


if __name__ == "__main__":
    print(json.dumps(asdict(answer(Question(**json.loads(sys.argv[1]))))), flush=True)
