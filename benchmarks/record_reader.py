"""Reads what row `record_files` reads, in one process, by one library (see `consume.serve`).

python -m forebay.benchmarks.record_reader

Peers have an environment of their own, without Forebay: only `forebay` imports anything of it.
"""

from __future__ import annotations

import itertools
import pathlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import numpy as np

from .consume import consume, serve

SEED = 1
BATCH = 250
RECORD_BYTES = 1_024
NUMBER_BYTES = 8  # each record begins with its number
ARRAY_RECORDS = 4_000  # a file: to read one record takes time in proportion to its file's
COLUMN = "record"  # the records' name in MDS


@dataclass(frozen=True, kw_only=True)
class Way:
    """How to read a directory's files: by which library, and with how many processes of its own."""

    library: str
    directory: str
    batched: bool = False
    batch: int = BATCH  # its size
    processes: int = 0  # beside this one
    address: str = ""  # of Forebay's dispatcher
    dataset_id: str = ""


def write(library: str, directory: str, count: int) -> None:
    """Write records of a number and noise, the same ones for each library."""
    random = np.random.default_rng(0)
    noise = RECORD_BYTES - NUMBER_BYTES
    records = (n.to_bytes(NUMBER_BYTES, "little") + random.bytes(noise) for n in range(count))
    if library == "grain":
        from array_record.python.array_record_module import ArrayRecordWriter

        for number in range(-(-count // ARRAY_RECORDS)):
            # As Grain's documentation advises; the other formats do not compress either.
            path = f"{directory}/{number:05}.array_record"
            writer = ArrayRecordWriter(path, "group_size:1,uncompressed")
            for record in itertools.islice(records, ARRAY_RECORDS):
                writer.write(record)
            writer.close()
    else:
        from streaming import MDSWriter

        with MDSWriter(columns={COLUMN: "bytes"}, out=f"{directory}/mds") as writer:
            for record in records:
                writer.write({COLUMN: record})


def forebay(way: Way) -> Iterator[Any]:
    elements = import_module("forebay.service").read(
        way.address,
        way.dataset_id,
        ordered=True,
        seed=SEED,
        bundle_splits=1,
        cycle_length=1,  # the records are shuffled already
        batch_size=way.batch if way.batched else None,
    )
    return (one[COLUMN] if isinstance(one, dict) and COLUMN in one else one for one in elements)


def grain(way: Way) -> Iterator[Any]:
    """A MapDataset; in batches, ElasticIterator."""
    import grain
    from absl import flags

    flags.FLAGS.mark_as_parsed()  # a program of absl's would have; Grain reads flags of its own
    paths = sorted(map(str, pathlib.Path(way.directory).glob("*.array_record")))
    dataset = grain.MapDataset.source(grain.sources.ArrayRecordDataSource(paths)).shuffle(SEED)
    # No threads for what is in memory already, as Grain's documentation advises.
    how = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
    processes = grain.MultiprocessingOptions(num_workers=way.processes) if way.processes else None
    if way.batched:
        arrays = dataset.map(lambda one: np.frombuffer(one, np.uint8))
        shard = grain.sharding.ShardOptions(shard_index=0, shard_count=1)
        options = {"read_options": how, "multiprocessing_options": processes}
        return iter(grain.experimental.ElasticIterator(arrays, way.batch, shard, **options))
    one_by_one = dataset.to_iter_dataset(how)
    return iter(one_by_one if processes is None else one_by_one.mp_prefetch(processes))


def _as_arrays(samples: list[dict[str, bytes]]) -> Any:
    return np.stack([np.frombuffer(sample[COLUMN], np.uint8) for sample in samples])


def _as_list(samples: list[dict[str, bytes]]) -> list[bytes]:
    return [sample[COLUMN] for sample in samples]


def streaming(way: Way) -> Iterator[Any]:
    """A StreamingDataset, and StreamingDataLoader."""
    from streaming import StreamingDataLoader, StreamingDataset
    from streaming.base.util import clean_stale_shared_memory

    clean_stale_shared_memory()
    dataset = StreamingDataset(
        local=f"{way.directory}/mds", shuffle=True, shuffle_seed=SEED, batch_size=way.batch
    )
    if not way.batched and not way.processes:
        return (sample[COLUMN] for sample in dataset)
    collate = _as_arrays if way.batched else _as_list
    loader = StreamingDataLoader(
        dataset, batch_size=way.batch, num_workers=way.processes, collate_fn=collate
    )
    return iter(loader) if way.batched else itertools.chain.from_iterable(loader)


def pyarrow(way: Way) -> Iterator[Any]:
    """A dataset's scanner."""
    from pyarrow import dataset

    paths = sorted(map(str, pathlib.Path(way.directory).glob("*.parquet")))
    return (
        {name: batch[name].to_numpy(zero_copy_only=False) for name in batch.schema.names}
        for batch in dataset.dataset(paths).to_batches(batch_size=way.batch)
    )


LIBRARIES: dict[str, Callable[[Way], Iterator[Any]]] = {
    "forebay": forebay,
    "grain": grain,
    "streaming": streaming,
    "pyarrow": pyarrow,
}


def _numbers(element: Any) -> list[int]:
    """Of an element's records or rows."""
    if isinstance(element, bytes):
        return [int.from_bytes(element[:NUMBER_BYTES], "little")]
    if isinstance(element, dict):
        return list(map(int, element["id"]))
    heads = np.ascontiguousarray(element[:, :NUMBER_BYTES])
    return list(map(int, heads.view("<u8").ravel()))


def answer(task: str, warm_up_s: float = 0.0, seconds: float = 0.0, **way: Any) -> Any:
    """`task`: "write" the files; take elements for `seconds`, and tell the "rate" in records a
    second; take all, and tell the numbers of their records in "order".
    """
    if task == "write":
        write(**way)
        return None
    asked = Way(**way)
    elements = LIBRARIES[asked.library](asked)
    if task == "order":
        return [number for element in elements for number in _numbers(element)]
    next(elements)
    consume(elements, warm_up_s)
    count, elapsed_s = consume(elements, seconds)
    return count * (asked.batch if asked.batched else 1) / elapsed_s


if __name__ == "__main__":
    serve(answer)
