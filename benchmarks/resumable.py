"""Row `resumable`: ordered reads beside Grain and MosaicML Streaming, on the same records.

Each library reads a shuffled epoch whose position can be saved, in a process of its own: its rate
from the epoch's begin, and the time of a new process to the first element behind half of the epoch.
All files stay in the page cache.

- Forebay: TFRecord files of FILE_RECORDS records; a file is a bundle, whose records the pipeline
  shuffles. A worker and a dispatcher, which go on while the trainer is started anew, and know the
  bundles' lengths: a trainer has read the epoch before.
- Grain: ArrayRecord files of 4,000 records, not compressed: to read one record takes time in
  proportion to its file. Records come from a `MapDataset`, batches from an `ElasticIterator`.
- MosaicML Streaming: MDS shards of 64 MB on the local disk; records come from a `StreamingDataset`,
  batches from a `StreamingDataLoader`.

The peers shuffle all records, an ordered read the files, and records within 16 files at a time. The
peers read in the trainer's process, or in one process beside it, as Forebay's worker is one.

The peers' environment is .peers (scripts/peers).
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import pathlib
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ..service import read, register_dataset
from ..service.client.saved_states import opened, sealed
from ..service.errors import ForebayError
from ..storage.tfrecord import frame
from . import resumable_reader
from .results import Result
from .resumable_reader import BATCH, SAVED_AT, Question, Reply
from .servers import Responder, our_dispatcher, our_worker
from .setting import Setting

RECORDS, QUICK_RECORDS = 10**6, 10**4
RECORD_BYTES = 1_024
FILE_RECORDS, QUICK_FILE_RECORDS = 1_000, 250
RATE = 1.0
RESUME = 2.0  # in half of the peer's time
LONGER = 5  # times as long as other rows measure: buffers of 64 MB are filled at the begin
TIMEOUT_S = 600  # for an answer
END_S = 30  # for a process that has given it
PEERS = {"grain": "Grain", "streaming": "MosaicML Streaming"}
CLONE = pathlib.Path(__file__).resolve().parent.parent
ENVIRONMENT = CLONE / ".peers"
FORMS = {False: "1 KB records one by one", True: f"batches of {BATCH} records of 1 KB"}
FOREBAY = "forebay"


@dataclass(frozen=True)
class Way:
    """How to read: by which library, and with how many processes of its own."""

    library: str
    batched: bool
    processes: int = 0

    @property
    def name(self) -> str:
        return f"{self.library} {self.batched:d} {self.processes}"

    @property
    def peer(self) -> str:
        """In words."""
        beside = ", one process beside the trainer's" if self.processes else ", in one process"
        return PEERS[self.library] + beside


def ways(batched: bool) -> list[Way]:
    return [
        Way(FOREBAY, batched),
        *(Way(library, batched, processes) for library in PEERS for processes in (0, 1)),
    ]


def resumable(setting: Setting) -> list[Result]:
    """Raises ForebayError without the peers."""
    records = QUICK_RECORDS if setting.quick else RECORDS
    file_records = QUICK_FILE_RECORDS if setting.quick else FILE_RECORDS
    files = Files(setting.directory("resumable"), records, file_records, peers_python())
    files.write(*PEERS)
    with our_dispatcher(files.directory) as dispatcher, our_worker(dispatcher) as worker:
        worker.wait_until_serving()
        files.register(dispatcher.address)
        return [
            result for batched in FORMS for result in _compared(files, setting, batched, worker.pid)
        ]


def _compared(files: Files, setting: Setting, batched: bool, worker: int) -> Iterator[Result]:
    found = setting.alternate(
        **{
            way.name: functools.partial(_measured, files, setting, way, worker)
            for way in ways(batched)
        }
    )
    what = FORMS[batched]
    half = f"{what}: the first element from half of {files.records:,}"
    for way in ways(batched)[1:]:
        for figure, name, unit, required in (
            ("records_per_s", f"{what}, shuffled", "records/s", RATE),
            ("cpu_us", f"{what}: processor time of a record", "µs", None),
            ("resumed_s", f"{half}, after imports", "s", RESUME),
            ("started_s", f"{half}, from the process' start", "s", RESUME),
        ):
            yield Result(
                row="resumable",
                what=f"{name}; peer: {way.peer}",
                unit=unit,
                less=figure != "records_per_s",
                ours=[one[figure] for one in found[Way(FOREBAY, batched).name]],
                peer=[one[figure] for one in found[way.name]],
                required_ratio=required,
            )


def _measured(files: Files, setting: Setting, way: Way, worker: int) -> dict[str, float]:
    """Of one way, in one round; processor time is that of all processes."""
    servers = [worker] if way.library == FOREBAY else []
    rate = files.rate(way, setting, LONGER, servers=servers)
    resumed = files.ask(way, "resume", state=moved(rate.state, files.records // 2))
    return {
        "records_per_s": rate.records / rate.seconds,
        "cpu_us": rate.cpu_s / rate.records * 1e6,
        "resumed_s": resumed.first_s,
        "started_s": resumed.imported_s + resumed.first_s,
    }


def peers_python() -> pathlib.Path:
    """The interpreter of the peers' environment. Raises ForebayError if there is none."""
    if not (ENVIRONMENT / "made-of").exists():
        raise ForebayError(
            "this needs Grain and MosaicML Streaming in an environment of their own, .peers, which "
            "is not here: run scripts/peers in a clone of this repository, and this command there"
        )
    return ENVIRONMENT / "bin" / "python"


class Files:
    """The records as files of each library, and processes that read them."""

    def __init__(
        self, directory: pathlib.Path, records: int, file_records: int, peers: pathlib.Path | None
    ) -> None:
        self.directory = directory
        self.records = records
        self.file_records = file_records
        self._peers = peers
        self.address = ""  # of the dispatcher
        self._datasets: dict[bool, str] = {}  # by whether it is read in batches

    def write(self, *peers: str) -> None:
        for peer in peers:
            self.ask(Way(peer, batched=False), "write")
        all_records = resumable_reader.records(self._question(Way(FOREBAY, False), "write"))
        for path in self._tfrecords():
            some = itertools.islice(all_records, self.file_records)
            path.write_bytes(b"".join(map(frame, some)))

    def _tfrecords(self) -> list[pathlib.Path]:
        count = self.records // self.file_records
        return [self.directory / f"{number:05}.tfrecord" for number in range(count)]

    def register(self, address: str) -> None:
        """Register the datasets, and read them: so the dispatcher learns their bundles' lengths."""
        self.address = address
        for batched in FORMS:
            self._datasets[batched] = register_dataset(address, self._pipeline(batched))
            with read(address, self._datasets[batched], ordered=True, bundle_splits=1) as elements:
                for _ in elements:
                    pass

    def _pipeline(self, batched: bool) -> Any:
        import tensorflow as tf

        paths = tf.data.Dataset.from_tensor_slices(list(map(str, self._tfrecords())))
        records = paths.flat_map(tf.data.TFRecordDataset).shuffle(self.file_records, seed=1)
        if not batched:
            return records
        return records.map(
            lambda record: tf.ensure_shape(tf.io.decode_raw(record, tf.uint8), [RECORD_BYTES])
        )

    def _question(self, way: Way, task: str, **how: Any) -> Question:
        how.setdefault("dataset_id", self._datasets.get(way.batched, ""))
        how.setdefault("directory", str(self.directory))
        return Question(
            task=task,
            library=way.library,
            records=self.records,
            record_bytes=RECORD_BYTES,
            batched=way.batched,
            processes=way.processes,
            address=self.address,
            **how,
        )

    def ask(self, way: Way, task: str, **how: Any) -> Reply:
        """What a new process replies. Raises ForebayError, with its error output, if it fails."""
        question = self._question(way, task, begun_s=time.monotonic(), **how)
        # All keep what they compile of their modules, as installed packages do.
        environment = {
            "PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": str(self.directory / "compiled")
        }  # fmt: skip
        started: dict[str, Any] = {"environment": environment}
        if way.library in PEERS:  # without Forebay, but for the package of the benchmarks
            started["python"] = str(self._peers)
            environment["PYTHONPATH"] = str(CLONE / ".pkg")
        with Responder(resumable_reader.__name__, json.dumps(vars(question)), **started) as process:
            reply = Reply(**json.loads(process.answer(TIMEOUT_S)))
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(END_S)  # it ends processes of its own
        return reply

    def rate(self, way: Way, setting: Setting, longer: int, **how: Any) -> Reply:
        """How many records it takes in some time, `longer` than other rows."""
        return self.ask(
            way,
            "rate",
            warm_up_s=0.0 if setting.quick else setting.warm_up_s,
            seconds=setting.seconds if setting.quick else longer * setting.seconds,
            **how,
        )


def moved(state: Any, position: int) -> Any:
    """A state that was saved behind SAVED_AT records, as it is behind `position` records.

    Of all the libraries, the state of an epoch of a single consumer is the number of its records or
    batches, with settings beside it.
    """
    if isinstance(state, dict):
        if "crc32" in state:  # Forebay's
            return sealed(moved(opened(state), position))
        return {name: moved(value, position) for name, value in state.items()}
    if isinstance(state, list):
        return [moved(value, position) for value in state]
    return position if state == SAVED_AT and not isinstance(state, bool) else state
