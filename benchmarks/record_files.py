"""Row `record_files`: files of records beside each format's own reader, on the same files.

Forebay reads them in order by a worker and a dispatcher, the peers in one process:

- ArrayRecord beside Grain, MDS beside MosaicML Streaming: 1 KB records, shuffled by record, one by
  one, and in batches of arrays. The files are those of row `resumable`.
- Parquet, beside PyArrow's dataset scanner, with its threads: rows of 40 numbers (13 float32, 26
  int32, an id), and rows of an id and a text of words, in batches, as NumPy arrays.

All files stay in the page cache. The environment of Grain and Streaming is .peers (scripts/peers).
"""

from __future__ import annotations

import functools
import pathlib
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

from ..service.client.files import register_files
from . import resumable_reader
from .results import Result
from .resumable import FOREBAY, FORMS, PEERS, QUICK_RECORDS, RATE, RECORDS, Files, Way, peers_python
from .servers import our_dispatcher, our_worker
from .setting import Setting

LONGER = 3  # times as long as other rows measure
PARQUET_BATCH = 4_096
GROUP_ROWS = 16 * PARQUET_BATCH
PARQUET_FILES = 8
TABLES = {"numbers": 12, "text": 2}  # row groups of a file
WORDS = 20_000  # of which texts are made
ALL_MIXED = {"cycle_length": 1}  # the records are shuffled already
FORMATS = {"grain": ("*.array_record", FOREBAY), "streaming": ("mds", "forebay-mds")}


def record_files(setting: Setting) -> list[Result]:
    """Raises ForebayError without the peers."""
    records = QUICK_RECORDS if setting.quick else RECORDS
    files = Files(setting.directory("record_files"), records, 1, peers_python())
    for peer in PEERS:
        files.ask(Way(peer, batched=False), "write")
    tables = {kind: files.directory / kind for kind in TABLES}
    for kind, directory in tables.items():
        write_parquet(directory, kind, groups=1 if setting.quick else TABLES[kind])
    with our_dispatcher(files.directory) as dispatcher, our_worker(dispatcher) as worker:
        worker.wait_until_serving()
        files.address = dispatcher.address
        compare = functools.partial(_compared, files, setting)
        findings: list[Result] = []
        for peer, (pattern, library) in FORMATS.items():
            for batched, form in FORMS.items():
                dataset_id = register_files(
                    dispatcher.address,
                    files.directory / pattern,
                    shuffle_records=True,
                    map=_as_array if batched else None,
                )
                ours = Way(library, batched)
                findings += compare(
                    f"{PEERS[peer]}: {form}, shuffled",
                    ours,
                    {"dataset_id": dataset_id, "order": ALL_MIXED},
                    [Way(peer, batched, processes) for processes in (0, 1)],
                )
        for kind, directory in tables.items():
            dataset_id = register_files(dispatcher.address, directory)
            findings += compare(
                f"PyArrow's scanner: Parquet rows of {kind}, in batches of {PARQUET_BATCH}",
                Way(FOREBAY, batched=True),
                {"dataset_id": dataset_id, "order": ALL_MIXED, "batch": PARQUET_BATCH},
                [Way("pyarrow", batched=True)],
                {"directory": str(directory), "batch": PARQUET_BATCH},
            )
        return findings


def _as_array(record: Any) -> Any:
    data = record if isinstance(record, bytes) else record[resumable_reader.COLUMN]
    return np.frombuffer(data, np.uint8)


def _compared(
    files: Files,
    setting: Setting,
    what: str,
    ours: Way,
    how: dict[str, Any],
    peers: list[Way],
    of_peers: Mapping[str, Any] = MappingProxyType({}),
) -> Iterator[Result]:
    def rate(way: Way) -> float:
        reply = files.rate(way, setting, LONGER, **(how if way is ours else of_peers))
        return reply.records / reply.seconds

    found = setting.alternate(**{way.name: functools.partial(rate, way) for way in [ours, *peers]})
    for way in peers:
        beside = ", one process beside the trainer's" if way.processes else ""
        yield Result(
            row="record_files",
            what=f"rate; peer: {what}{beside}",
            unit="records/s",
            ours=found[ours.name],
            peer=found[way.name],
            required_ratio=RATE,
        )


def write_parquet(directory: pathlib.Path, kind: str, groups: int) -> None:
    """Files with PyArrow's settings, but for the size of row groups."""
    import pyarrow
    import pyarrow.parquet

    directory.mkdir()
    random = np.random.default_rng(0)
    letters = "".join(map(chr, random.integers(97, 123, 10 * WORDS)))
    ends = 10 * np.arange(WORDS) + random.integers(2, 9, WORDS)
    words = [letters[10 * number : end] for number, end in enumerate(ends.tolist())]
    for file in range(PARQUET_FILES):
        rows = groups * GROUP_ROWS
        columns: dict[str, Any] = {"id": np.arange(file * rows, (file + 1) * rows)}
        if kind == "text":
            lengths = random.integers(20, 180, rows)
            chosen = (random.zipf(1.3, lengths.sum()) % WORDS).tolist()
            ends = np.cumsum(lengths).tolist()
            columns["text"] = [
                " ".join(map(words.__getitem__, chosen[begin:end]))
                for begin, end in zip([0, *ends], ends, strict=False)
            ]
        else:
            for number in range(13):
                columns[f"f{number}"] = np.log1p(random.integers(0, 10_000, rows)).astype(
                    np.float32
                )
            for number in range(26):
                of = 10 ** (1 + number % 6)
                columns[f"c{number}"] = (random.zipf(1.2, rows) % of).astype(np.int32)
        pyarrow.parquet.write_table(
            pyarrow.table(columns), directory / f"{file}.parquet", row_group_size=GROUP_ROWS
        )
