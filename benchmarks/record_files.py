"""Row `record_files`: files of records beside each format's own reader, on the same files.

Forebay reads them in order by a worker and a dispatcher, the peers in one process:

- ArrayRecord beside Grain, MDS beside MosaicML Streaming: 1 KB records, shuffled by record, one by
  one, and in batches of arrays. ArrayRecord files have 4,000 records, not compressed; MDS shards
  have 64 MB.
- Parquet, beside PyArrow's dataset scanner, with its threads: rows of 40 numbers (13 float32, 26
  int32, an id), and rows of an id and a text of words, in batches, as NumPy arrays.

Each library reads in a process of its own, and has none or one beside it, as Forebay has a worker.
All files stay in the page cache. The environment of Grain and Streaming is .peers (scripts/peers).
"""

from __future__ import annotations

import functools
import pathlib
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np

from ..service.client.files import register_files
from ..service.errors import ForebayError
from . import record_reader
from .record_reader import BATCH, COLUMN, Way
from .results import Result
from .servers import Responder, our_dispatcher, our_worker
from .setting import Setting

RECORDS, QUICK_RECORDS = 10**6, 10**4
TIMEOUT_S = 600  # for an answer
PEERS = {"grain": ("Grain", "*.array_record"), "streaming": ("MosaicML Streaming", "mds")}
FORMS = {False: "1 KB records one by one", True: f"batches of {BATCH} records of 1 KB"}
CLONE = pathlib.Path(__file__).resolve().parent.parent
ENVIRONMENT = CLONE / ".peers"
LONGER = 3  # times as long as other rows measure
PARQUET_BATCH = 4_096
GROUP_ROWS = 16 * PARQUET_BATCH
PARQUET_FILES = 8
TABLES = {"numbers": 12, "text": 2}  # row groups of a file
WORDS = 20_000  # of which texts are made


def peers_python() -> pathlib.Path:
    """The interpreter of the peers' environment. Raises ForebayError if there is none."""
    if not (ENVIRONMENT / "made-of").exists():
        raise ForebayError(
            "this needs Grain and MosaicML Streaming in an environment of their own, .peers, which "
            "is not here: run scripts/peers in a clone of this repository, and this command there"
        )
    return ENVIRONMENT / "bin" / "python"


def ask(task: str, *, library: str, **question: Any) -> Any:
    """What a new process answers. Raises ForebayError, with its error output, if it fails."""
    started: dict[str, Any] = {}
    if library in PEERS:  # without Forebay, but for the package of the benchmarks
        started["python"] = str(peers_python())
        started["environment"] = {"PYTHONPATH": str(CLONE / ".pkg")}
    with Responder(record_reader.__name__, **started) as process:
        process.wait_until_ready()
        process.ask(task=task, library=library, **question)
        return process.answer_json(TIMEOUT_S)


def record_files(setting: Setting) -> list[Result]:
    """Raises ForebayError without the peers."""
    files = setting.directory("record_files")
    count = QUICK_RECORDS if setting.quick else RECORDS
    for peer in PEERS:
        ask("write", library=peer, directory=str(files), count=count)
    findings: list[Result] = []
    with our_dispatcher(files) as dispatcher, our_worker(dispatcher) as worker:
        worker.wait_until_serving()
        for peer, (name, pattern) in PEERS.items():
            for batched, form in FORMS.items():
                ours = Way(
                    library="forebay", directory=str(files), batched=batched,
                    address=dispatcher.address,
                    dataset_id=register_records(dispatcher.address, files / pattern, batched),
                )  # fmt: skip
                peers = [replace(ours, library=peer, processes=number) for number in (0, 1)]
                findings += _compared(setting, f"{name}: {form}, shuffled", ours, peers)
        for kind, groups in TABLES.items():
            write_parquet(files / kind, kind, groups=1 if setting.quick else groups)
            ours = Way(
                library="forebay", directory=str(files / kind), batched=True, batch=PARQUET_BATCH,
                address=dispatcher.address,
                dataset_id=register_files(dispatcher.address, files / kind),
            )  # fmt: skip
            what = f"PyArrow's scanner: Parquet rows of {kind}, in batches of {PARQUET_BATCH}"
            findings += _compared(setting, what, ours, [replace(ours, library="pyarrow")])
    return findings


def register_records(address: str, files: pathlib.Path, batched: bool) -> str:
    """Register them shuffled; for batches, as arrays. Returns the dataset's id."""
    map_ = _as_array if batched else None
    return register_files(address, files, shuffle_records=True, map=map_)


def _as_array(record: Any) -> Any:
    return np.frombuffer(record if isinstance(record, bytes) else record[COLUMN], np.uint8)


def _compared(setting: Setting, what: str, ours: Way, peers: Sequence[Way]) -> list[Result]:
    warm_up_s = 0.0 if setting.quick else setting.warm_up_s
    seconds = setting.seconds if setting.quick else LONGER * setting.seconds

    def rate(way: Way) -> float:
        return float(ask("rate", warm_up_s=warm_up_s, seconds=seconds, **asdict(way)))

    ways = {f"{way.library} {way.processes}": way for way in (ours, *peers)}
    found = setting.alternate(**{name: functools.partial(rate, way) for name, way in ways.items()})
    our_rates, *of_peers = found.values()
    return [
        Result(
            row="record_files",
            what=f"rate; peer: {what}{', one process beside the trainer' * way.processes}",
            unit="records/s",
            ours=our_rates,
            peer=rates,
            required_ratio=1.0,
        )
        for way, rates in zip(peers, of_peers, strict=True)
    ]


def write_parquet(directory: pathlib.Path, kind: str, groups: int) -> None:
    """Files with PyArrow's settings, but for the size of row groups."""
    import pyarrow
    import pyarrow.parquet

    directory.mkdir()
    random = np.random.default_rng(0)
    words = [random.bytes(4).hex()[:length] for length in random.integers(2, 9, WORDS)]
    rows = groups * GROUP_ROWS
    for file in range(PARQUET_FILES):
        columns: dict[str, Any] = {"id": np.arange(file * rows, (file + 1) * rows)}
        if kind == "text":
            columns["text"] = [
                " ".join(words[number] for number in (random.zipf(1.3, length) % WORDS).tolist())
                for length in random.integers(20, 180, rows)
            ]
        else:
            for number in range(13):
                numbers = np.log1p(random.integers(0, 10_000, rows))
                columns[f"f{number}"] = numbers.astype(np.float32)
            for number in range(26):
                numbers = random.zipf(1.2, rows) % 10 ** (1 + number % 6)
                columns[f"c{number}"] = numbers.astype(np.int32)
        pyarrow.parquet.write_table(
            pyarrow.table(columns), directory / f"{file}.parquet", row_group_size=GROUP_ROWS
        )
