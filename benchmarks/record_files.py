"""Row `record_files`: files of records beside each format's own reader, on the same files.

Forebay reads them in order by a worker and a dispatcher, the peers in one process:

- ArrayRecord beside Grain, MDS beside MosaicML Streaming: 1 KB records, shuffled by record, one by
  one, and in batches of arrays. ArrayRecord files have 4,000 records, not compressed, as to read
  one record takes time in proportion to its file; MDS shards have 64 MB.
- Parquet, beside PyArrow's dataset scanner, with its threads: rows of 40 numbers (13 float32, 26
  int32, an id), and rows of an id and a text of words, in batches, as NumPy arrays.

Each library reads in a process of its own, and has none or one beside it, as Forebay has a worker.
All files stay in the page cache. The environment of Grain and Streaming is .peers (scripts/peers).
"""

from __future__ import annotations

import contextlib
import functools
import json
import pathlib
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np

from ..service.client.files import register_files
from ..service.errors import ForebayError
from . import record_reader
from .record_reader import BATCH, Question, Reply
from .results import Result
from .servers import Responder, our_dispatcher, our_worker
from .setting import Setting

RECORDS, QUICK_RECORDS = 10**6, 10**4
RECORD_BYTES = 1_024
RATE = 1.0
TIMEOUT_S = 600  # for an answer
END_S = 30  # for a process that has given it
PEERS = {"grain": "Grain", "streaming": "MosaicML Streaming"}
CLONE = pathlib.Path(__file__).resolve().parent.parent
ENVIRONMENT = CLONE / ".peers"
FORMS = {False: "1 KB records one by one", True: f"batches of {BATCH} records of 1 KB"}
FOREBAY = "forebay"
LONGER = 3  # times as long as other rows measure
PARQUET_BATCH = 4_096
GROUP_ROWS = 16 * PARQUET_BATCH
PARQUET_FILES = 8
TABLES = {"numbers": 12, "text": 2}  # row groups of a file
WORDS = 20_000  # of which texts are made
ALL_MIXED = {"cycle_length": 1}  # the records are shuffled already
FORMATS = {"grain": ("*.array_record", FOREBAY), "streaming": ("mds", "forebay-mds")}


@dataclass(frozen=True)
class Way:
    """How to read: by which library, and with how many processes of its own."""

    library: str
    batched: bool
    processes: int = 0

    @property
    def name(self) -> str:
        return f"{self.library} {self.batched:d} {self.processes}"


def peers_python() -> pathlib.Path:
    """The interpreter of the peers' environment. Raises ForebayError if there is none."""
    if not (ENVIRONMENT / "made-of").exists():
        raise ForebayError(
            "this needs Grain and MosaicML Streaming in an environment of their own, .peers, which "
            "is not here: run scripts/peers in a clone of this repository, and this command there"
        )
    return ENVIRONMENT / "bin" / "python"


class Files:
    """Files of records, and processes that read them."""

    def __init__(self, directory: pathlib.Path, records: int, peers: pathlib.Path | None) -> None:
        self.directory = directory
        self.address = ""  # of the dispatcher
        self._records = records
        self._peers = peers

    def ask(self, way: Way, task: str, **how: Any) -> Reply:
        """What a new process replies. Raises ForebayError, with its error output, if it fails."""
        how.setdefault("directory", str(self.directory))
        question = Question(
            task=task,
            library=way.library,
            records=self._records,
            record_bytes=RECORD_BYTES,
            batched=way.batched,
            processes=way.processes,
            address=self.address,
            **how,
        )
        started: dict[str, Any] = {}
        if way.library in PEERS:  # without Forebay, but for the package of the benchmarks
            started["python"] = str(self._peers)
            started["environment"] = {"PYTHONPATH": str(CLONE / ".pkg")}
        with Responder(record_reader.__name__, json.dumps(vars(question)), **started) as process:
            reply = Reply(**json.loads(process.answer(TIMEOUT_S)))
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(END_S)  # it ends processes of its own
        return reply


def record_files(setting: Setting) -> list[Result]:
    """Raises ForebayError without the peers."""
    records = QUICK_RECORDS if setting.quick else RECORDS
    files = Files(setting.directory("record_files"), records, peers_python())
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
    data = record if isinstance(record, bytes) else record[record_reader.COLUMN]
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
        reply = files.ask(
            way,
            "rate",
            warm_up_s=0.0 if setting.quick else setting.warm_up_s,
            seconds=setting.seconds if setting.quick else LONGER * setting.seconds,
            **(how if way is ours else of_peers),
        )
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
