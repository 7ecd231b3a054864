"""Small readers of a crowd that read in other modes, several in each mode.

- *rounds*: the consumers of a coordinated read. If one of them learns that they are out of
  lockstep, all leave and restart together, as a launcher would make them.
- *cached*: trainers that read through one cross-trainer cache.
- *static*: readers that share a job with static sharding.

The first two read an infinite dataset, whose elements each worker numbers from 0.
"""

from __future__ import annotations

import contextlib
import pathlib
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from ..service.client.consumer import Consumer
from ..service.client.options import DEFAULT_READ_OPTIONS, CrossTrainerCache, ReadOptions
from ..service.connections.dispatcher_client import DispatcherClient
from ..service.errors import FailedPrecondition, NotFound, PipelineError
from ..service.proto import forebay_pb2 as pb
from .records import Got, Joined, Left, ReadToEnd, Recorder
from .trainer import CREDIT_BYTES, NOTHING, unpack

MODES = ("rounds", "cached", "static")
EACH = 2
"""Readers in each mode."""

STEPS = 100
"""Elements that a reader takes of an infinite dataset."""


def job_of(name: str, mode: str) -> str:
    """The job of the crowd `name` in a mode."""
    return f"{name} {mode}"


def records_of(directory: pathlib.Path, mode: str, reader: int) -> pathlib.Path:
    """The file of a reader."""
    return directory / f"{mode}{reader}.records"


class Readers:
    """All readers of one mode."""

    def __init__(
        self, mode: str, name: str, service: str, dataset_id: str, directory: pathlib.Path
    ) -> None:
        self._service = service
        self._request = pb.GetOrCreateJobRequest(
            dataset_id=dataset_id,
            job_name=job_of(name, mode),
            sharding="DATA" if mode == "static" else "OFF",
            num_consumers=EACH if mode == "rounds" else None,
            cross_trainer_cache=mode == "cached",
        )
        self._mode = mode
        self._directory = directory
        self._changed = threading.Condition()
        self._have_enough: set[int] = set()
        self._out_of_step = False

    def read(self) -> None:
        """Read until each reader has enough."""
        while len(self._have_enough) < EACH:
            self._have_enough.clear()
            self._out_of_step = False
            with ThreadPoolExecutor(EACH) as pool:
                list(pool.map(self._read, range(EACH)))

    def _read_options(self, reader: int) -> ReadOptions:
        match self._mode:
            case "rounds":
                return ReadOptions(consumer_index=reader, num_consumers=EACH)
            case "cached":
                return ReadOptions(cache=CrossTrainerCache(f"trainer {reader}"))
        return DEFAULT_READ_OPTIONS

    def _read(self, reader: int) -> None:
        try:
            self._join(reader)
        except BaseException:  # the others wait for it
            self._tell(partial(setattr, self, "_out_of_step", True))
            raise

    def _join(self, reader: int) -> None:
        records = Recorder(records_of(self._directory, self._mode, reader))
        with contextlib.closing(records) as recorder, DispatcherClient(self._service) as dispatcher:
            request = pb.GetOrCreateJobRequest()  # of its own, as it is numbered
            request.CopyFrom(self._request)
            job = dispatcher.call_numbered(request, pb.GetOrCreateJobResponse)
            index = reader if self._mode == "rounds" else None
            join = pb.JoinIterationRequest(job_id=job.job_id, epoch=1, consumer_index=index)
            joined = dispatcher.call_numbered(join, pb.JoinIterationResponse)
            consumer = Consumer(
                dispatcher, joined, credit_bytes=CREDIT_BYTES, reading=self._read_options(reader)
            )
            try:
                recorder.add(Joined(1, consumer.consumer_id, time.monotonic()))
                self._take(consumer, reader, recorder)
            finally:
                consumer.close()

    def _take(self, consumer: Consumer, reader: int, recorder: Recorder) -> None:
        left = STEPS
        try:
            for block in consumer.blocks(NOTHING):
                if self._out_of_step:
                    break
                if block is NOTHING:
                    continue
                ids, damaged = unpack(block)
                recorder.add(Got(1, time.monotonic(), consumer.last_task_id, ids, damaged))
                left -= block.count
                if left <= 0 and self._mode != "static":
                    break
        except (FailedPrecondition, NotFound, PipelineError):
            if self._mode != "rounds":
                raise
            self._tell(partial(setattr, self, "_out_of_step", True))
        if not self._out_of_step:
            self._tell(partial(self._have_enough.add, reader))
        with self._changed:  # stay until all have enough: a consumer that leaves changes the set
            self._changed.wait_for(lambda: self._out_of_step or len(self._have_enough) == EACH)
        now_s = time.monotonic()
        recorder.add(Left(1, now_s, [], True) if self._out_of_step else ReadToEnd(1, now_s))

    def _tell(self, what: partial[None]) -> None:
        with self._changed:
            what()
            self._changed.notify_all()
