"""The records of a trainer of chaos: one JSON line per record, appended by one write.

A killed process loses no written record, since the kernel keeps the page cache. An element counts
as delivered once its record is written; the trainer writes it before it requests the next block.
"""

from __future__ import annotations

import os
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from .members import Member


class Started(msgspec.Struct, frozen=True, tag="started"):
    """A trainer process has started; the following records are its, until the next start."""

    name: str


class Joined(msgspec.Struct, frozen=True, tag="joined"):
    """It has become a consumer of an epoch, and has requested nothing yet."""

    epoch: int
    consumer_id: int


class Got(msgspec.Struct, frozen=True, tag="got"):
    """It got a block of a task's elements. `damaged`: their content contradicts their id."""

    epoch: int
    task_id: int
    ids: list[int]
    damaged: list[int] = []


class ReadToEnd(msgspec.Struct, frozen=True, tag="ended"):
    """The epoch has ended, and it has received all of its own elements."""

    epoch: int


class Left(msgspec.Struct, frozen=True, tag="left"):
    """It is preempted, and returns unused elements; its next process continues with the epoch."""

    epoch: int


class OrderedGroup(msgspec.Struct, frozen=True):
    """The trainers that read in order together, until all are ended and another group begins."""

    number: int  # from 1
    consumers: int
    batch_size: int  # of each
    position: int = 0  # where it begins
    state: dict[str, Any] | None = None  # that was saved there


class Began(msgspec.Struct, frozen=True, tag="began"):
    """An ordered trainer begins to read an epoch, or the rest of it, at this position."""

    group: OrderedGroup
    position: int


class OrderedStep(msgspec.Struct, frozen=True, tag="step"):
    """An ordered trainer got its batch of the next step; without ids, the epoch's end. `position`
    is behind the step. `state` was saved there.
    """

    position: int
    ids: list[int]
    damaged: list[int] = []
    state: dict[str, Any] | None = None


Record = Started | Joined | Got | ReadToEnd | Left | Began | OrderedStep

_decode = msgspec.json.Decoder(Record).decode


class Recorder:
    """Appends records to a file."""

    def __init__(self, path: pathlib.Path) -> None:
        torn = path.exists() and not path.read_bytes().endswith(b"\n")
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        if torn:  # the previous process was killed during a write
            os.write(self._file, b"\n")

    def add(self, record: Any) -> None:
        os.write(self._file, msgspec.json.encode(record) + b"\n")

    def close(self) -> None:
        os.close(self._file)


def read_records(path: pathlib.Path) -> Iterator[Record]:
    """Yield the records of a file; skip torn ones."""
    if not path.exists():
        return
    for line in path.read_bytes().splitlines():
        try:
            yield _decode(line)
        except msgspec.DecodeError:
            continue


class RecordFiles:
    """The record files of a run in its directory, by the members that wrote them."""

    def __init__(self, directory: pathlib.Path, members: Mapping[str, Sequence[Member]]) -> None:
        self._directory = directory
        self._members = members

    def path_of(self, role: str, number: int) -> pathlib.Path:
        """The file of a trainer, of any kind."""
        return self._directory / f"{role}{number}.records"

    def content(self, reader: Member) -> bytes:
        """What a trainer of any kind has written so far."""
        path = self.path_of(reader.role, reader.number)
        return path.read_bytes() if path.exists() else b""

    def of_trainers(self, role: str = "trainer") -> list[list[Record]]:
        """Each trainer's records so far; with the role "claimer", those that read at least once,
        and with "ordered", those that read in order."""
        paths = [self.path_of(role, member.number) for member in self._members[role]]
        return [list(read_records(path)) for path in paths]

    def consumers(self) -> dict[int, str]:
        """The processes of all consumers, by the consumers' ids."""
        found = {}
        for records in (*self.of_trainers(), *self.of_trainers("claimer")):
            name = ""
            for record in records:
                if isinstance(record, Started):
                    name = record.name
                elif isinstance(record, Joined):
                    found[record.consumer_id] = name
        return found
