"""What a trainer of chaos writes down: one JSON line a record, appended by one write.

A killed process loses nothing of what it has written, as the page cache is the kernel's. An
element counts as delivered once its record is written, which is before the next block is asked
for. Times are CLOCK_MONOTONIC, which all processes of a machine share.
"""

from __future__ import annotations

import os
import pathlib
from collections.abc import Iterator
from typing import Any

import msgspec


class Started(msgspec.Struct, frozen=True, tag="started"):
    """A trainer process; all that follows is its, until the next one has started."""

    name: str
    at_s: float


class Joined(msgspec.Struct, frozen=True, tag="joined"):
    """It is a consumer of an epoch from now on, and has asked for nothing yet."""

    epoch: int
    consumer_id: int
    at_s: float


class Got(msgspec.Struct, frozen=True, tag="got"):
    """A block of a task's elements. `damaged` are those whose content is not what their id says."""

    epoch: int
    at_s: float
    task_id: int
    ids: list[int]
    damaged: list[int] = []


class Worked(msgspec.Struct, frozen=True, tag="worked"):
    """It has worked on its block until now, and asks for the next one."""

    at_s: float


class Ended(msgspec.Struct, frozen=True, tag="ended"):
    """It was told that the epoch has ended, and has all of its elements."""

    epoch: int
    at_s: float


class Left(msgspec.Struct, frozen=True, tag="left"):
    """It leaves the epoch before its end, and hands back what it has not used; `for_good`, if the
    next one is its next. The workers of the `unheard` tasks did not hear of it.
    """

    epoch: int
    at_s: float
    unheard: list[int]
    for_good: bool


Record = Started | Joined | Got | Worked | Ended | Left

_decode = msgspec.json.Decoder(Record).decode


class Recorder:
    """Appends records to a file."""

    def __init__(self, path: pathlib.Path) -> None:
        torn = path.exists() and not path.read_bytes().endswith(b"\n")
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        if torn:  # the process before was killed while it wrote
            os.write(self._file, b"\n")

    def add(self, record: Any) -> None:
        os.write(self._file, msgspec.json.encode(record) + b"\n")

    def close(self) -> None:
        os.close(self._file)


def read_records(path: pathlib.Path) -> Iterator[Record]:
    """The records of a file. One that was not written whole does not count."""
    if not path.exists():
        return
    for line in path.read_bytes().splitlines():
        try:
            yield _decode(line)
        except msgspec.DecodeError:
            continue
