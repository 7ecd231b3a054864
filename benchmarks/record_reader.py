"""Reads what row `record_files` reads, in one process, by one library, and prints what it found.

python -m forebay.benchmarks.record_reader QUESTION

QUESTION is JSON, the fields of `Question`. The answer is a line of JSON, the fields of `Reply`.
Peers have an environment of their own, without Forebay: only `forebay` imports anything of it.
"""

from __future__ import annotations

import itertools
import json
import pathlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from importlib import import_module
from typing import Any

import numpy as np

from .consume import consume

SEED = 1
BATCH = 250
NUMBER_BYTES = 8  # each record begins with its number
ARRAY_RECORDS = 4_000  # a file
COLUMN = "record"  # the records' name in MDS


@dataclass(frozen=True, kw_only=True)
class Question:
    """What to read, and what for.

    `task`: "write" the files; take elements for `seconds`, and say their "rate"; take all, and say
    the numbers of their records in "order".
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
    warm_up_s: float = 0.0
    seconds: float = 0.0


@dataclass(kw_only=True)
class Reply:
    seconds: float = 0.0  # of the measurement of a rate
    records: int = 0  # that were taken in that time
    numbers: list[int] = field(default_factory=list)  # of records, in order


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


def forebay(question: Question) -> Iterator[Any]:
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
    if question.library == "forebay-mds" and not question.batched:
        return (sample[COLUMN] for sample in elements)
    return iter(elements)


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


def grain(question: Question) -> Iterator[Any]:
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
        return iter(
            grain.experimental.ElasticIterator(
                dataset.map(_as_array),
                BATCH,
                shard,
                read_options=how,
                multiprocessing_options=processes,
            )
        )
    one_by_one = dataset.to_iter_dataset(how)
    return iter(one_by_one if processes is None else one_by_one.mp_prefetch(processes))


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


def streaming(question: Question) -> Iterator[Any]:
    from streaming import StreamingDataLoader, StreamingDataset
    from streaming.base.util import clean_stale_shared_memory

    clean_stale_shared_memory()
    path = str(pathlib.Path(question.directory, "mds"))
    dataset = StreamingDataset(local=path, shuffle=True, shuffle_seed=SEED, batch_size=BATCH)
    if not question.batched and not question.processes:
        return (sample[COLUMN] for sample in dataset)
    loader = StreamingDataLoader(
        dataset,
        batch_size=BATCH,
        num_workers=question.processes,
        collate_fn=_as_arrays if question.batched else _as_lists,
    )
    batches = (batch[COLUMN] for batch in loader)
    return batches if question.batched else itertools.chain.from_iterable(batches)


# -- PyArrow: a dataset's scanner ------------------------------------------------------------------


def pyarrow(question: Question) -> Iterator[Any]:
    from pyarrow import dataset

    paths = sorted(map(str, pathlib.Path(question.directory).glob("*.parquet")))
    batches = dataset.dataset(paths).to_batches(batch_size=question.batch)
    return (
        {name: batch[name].to_numpy(zero_copy_only=False) for name in batch.schema.names}
        for batch in batches
    )


LIBRARIES: dict[str, Callable[[Question], Iterator[Any]]] = {
    "forebay": forebay,
    "forebay-mds": forebay,
    "pyarrow": pyarrow,
    "grain": grain,
    "streaming": streaming,
}
WRITERS = {"grain": write_for_grain, "streaming": write_for_streaming}


def answer(question: Question) -> Reply:
    reply = Reply()
    if question.task == "write":
        WRITERS[question.library](question)
        return reply
    elements = LIBRARIES[question.library](question)
    if question.task == "order":
        reply.numbers = [number for element in elements for number in numbers_of(element)]
        return reply
    next(elements)
    consume(elements, question.warm_up_s)
    count, reply.seconds = consume(elements, question.seconds)
    reply.records = count * (question.batch if question.batched else 1)
    return reply


if __name__ == "__main__":
    print(json.dumps(asdict(answer(Question(**json.loads(sys.argv[1]))))), flush=True)
