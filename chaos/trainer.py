"""A trainer of chaos: reads a shared job, epoch after epoch, and records its elements.

It reads like `forebay.service.read`, with less credit, so that its buffers hold little when it is
killed. It continues with its last process's epoch. SIGTERM makes it return unused elements, even
within a block, and end. SIGUSR1 cuts all its connections, to workers and dispatchers. In every
other epoch it reads slowly, so that workers run ahead of it, and faults find full buffers. With
`claims` it reads at least once.
"""

from __future__ import annotations

import os
import pathlib
import signal
import socket
import sys
import time
from typing import Any

import msgspec
import numpy as np

from ..service.blocks import Block
from ..service.client.consumer import Consumer
from ..service.client.options import ReadOptions, ShardingPolicy
from ..service.client.positions import claimed_options
from ..service.connections.dispatcher_client import DispatcherClient
from ..service.proto import forebay_pb2 as pb
from .records import Got, Joined, Left, ReadToEnd, Record, Recorder, Started, read_records

JOB = "chaos"
CLAIMS_JOB = "chaos at least once"
BUNDLE_SPLITS = 20
CREDIT_BYTES = 256 << 10
NOTHING = Block(0, ())

READING = ReadOptions(policy=ShardingPolicy.DYNAMIC)
CLAIMED = claimed_options({"shuffle": False, "bundle_splits": BUNDLE_SPLITS})
"""In the order of their places, so that the audit knows each element's bundle."""

_told: set[int] = set()
"""Received signals to leave. Not an event: its lock could deadlock with the signal handler."""

_reading = False
"""Whether it may have elements to return; if not, SIGTERM ends the process at once."""


class TrainerTask(msgspec.Struct, frozen=True):
    """The arguments of a trainer process."""

    name: str  # of the process
    service: str
    dataset_id: str
    records: str  # the path of its file
    stop: str  # once this path exists, the present epoch is the last
    pace_s: float  # per element, in slow epochs
    claims: bool = False  # it reads at least once


def main(task: TrainerTask) -> None:
    path = pathlib.Path(task.records)
    epoch = next_epoch(list(read_records(path)))
    recorder = Recorder(path)
    recorder.add(Started(task.name))
    with DispatcherClient(task.service) as dispatcher:
        request = pb.GetOrCreateJobRequest(
            dataset_id=task.dataset_id, job_name=JOB, sharding="DYNAMIC"
        )
        reading = READING
        if task.claims:
            request = pb.GetOrCreateJobRequest(
                dataset_id=task.dataset_id, job_name=CLAIMS_JOB, sharding="OFF", order=CLAIMED
            )
            reading = ReadOptions(claimed=CLAIMED)
        job = dispatcher.call_numbered(request, pb.GetOrCreateJobResponse)
        # Finish a started epoch, even if it is time to stop.
        while (epoch.begun or not os.path.exists(task.stop)) and signal.SIGTERM not in _told:
            pace_s = task.pace_s if epoch.number % 2 == 0 else 0.0
            read_epoch(dispatcher, job.job_id, epoch.number, recorder, pace_s, reading)
            epoch = NextEpoch(epoch.number + 1)
        recorder.close()


class NextEpoch(msgspec.Struct, frozen=True):
    number: int
    begun: bool = False


def next_epoch(records: list[Record]) -> NextEpoch:
    """The epoch to continue with: the last one, unless it ended."""
    for record in reversed(records):
        if isinstance(record, Joined | Left):
            return NextEpoch(record.epoch, begun=True)
        if isinstance(record, ReadToEnd):
            return NextEpoch(record.epoch + 1)
    return NextEpoch(1)


def read_epoch(
    dispatcher: DispatcherClient,
    job_id: int,
    epoch: int,
    recorder: Recorder,
    pace_s: float,
    reading: ReadOptions = READING,
) -> None:
    """Read an epoch, and record its elements."""
    global _reading
    request = pb.JoinIterationRequest(job_id=job_id, epoch=epoch)
    joined = dispatcher.call_numbered(request, pb.JoinIterationResponse)
    consumer = Consumer(dispatcher, joined, credit_bytes=CREDIT_BYTES, options=reading)
    try:
        recorder.add(Joined(epoch, consumer.consumer_id))
        _reading = True
        for block in consumer.blocks(NOTHING):
            left = block.count // 2 if _told else 0
            if block is not NOTHING:
                ids, damaged = unpack(block)
                task_id, used = consumer.last_task_id, block.count - left
                damaged = [i for i in damaged if i in ids[:used]]
                recorder.add(Got(epoch, task_id, ids[:used], damaged))
                if pace_s:
                    time.sleep(pace_s * used)
            if _told:
                consumer.close(left)
                recorder.add(Left(epoch))
                return
        recorder.add(ReadToEnd(epoch))
    finally:
        _reading = False
        consumer.close()


def unpack(block: Block) -> tuple[list[int], list[int]]:
    """The ids of a block's elements, and the ids of those whose payload is wrong."""
    ids, payload = (component.values for component in block.components)
    assert isinstance(ids, np.ndarray) and isinstance(payload, np.ndarray)
    whole = (payload == ids[:, None]).all(axis=1)
    return ids.tolist(), ids[~whole].tolist()


def _leave(number: int, _: Any) -> None:
    _told.add(number)
    _ignore_cuts()
    if not _reading:
        sys.exit(0)


def _ignore_cuts() -> None:
    """Ignore SIGUSR1: Python removes its handlers at exit, and then it would kill the process."""
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)


def cut_connections(*_: Any) -> None:
    """Close all connections as a network failure would: both ends see them closed."""
    for name in os.listdir("/proc/self/fd"):
        try:
            with socket.socket(fileno=os.dup(int(name))) as connection:
                connection.shutdown(socket.SHUT_RDWR)
        except OSError:
            continue  # no connection


if __name__ == "__main__":
    signal.signal(signal.SIGUSR1, cut_connections)
    signal.signal(signal.SIGTERM, _leave)
    main(msgspec.json.decode(sys.argv[1], type=TrainerTask))
    _ignore_cuts()
