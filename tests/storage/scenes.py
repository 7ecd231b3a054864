"""A log on local files with a writer that may be displaced, and what is to be seen of it."""

from __future__ import annotations

import time
from pathlib import Path

from forebay.storage import FileStorage, Locked, Missing, Record, Writer

Content = tuple[list[Record], dict[int, bytes]]


def storage_at(path: Path) -> FileStorage:
    return FileStorage(path, segment_bytes=100)  # three small batches


def take_over(path: Path, owner: str, attempts: int = 10_000) -> Writer:
    """Become the writer as soon as the present one has been silent for its lease, 1 ms."""
    storage = storage_at(path)
    for _ in range(attempts):
        try:
            return storage.open_writer(owner, lease_ms=1)
        except Locked as error:
            refused = error
            time.sleep(0.001)
    raise refused


def content(path: Path) -> Content:
    """The log, whole, and the snapshots, as somebody sees them who comes now."""
    storage = storage_at(path)
    first = storage.first_sequence()
    records = list(storage.read(first - 1))
    assert [record.sequence for record in records] == list(range(first, first + len(records)))
    assert storage.extent() == (first, first + len(records) - 1)
    return records, {s: storage.read_snapshot(s) for s in storage.snapshots()}


class Scene:
    """An old writer with eleven records in its log, and somebody who reads all along."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.old = storage_at(path).open_writer("the old one", lease_ms=1)
        self.acknowledged: list[bytes] = []
        self.in_flight: list[bytes] = []
        for number in range(1, 12):
            self.append([b"old %d" % number])
            if number in (3, 10):
                self.old.write_snapshot(number, b"as of %d" % number)
        self.follower = storage_at(path)
        self.followed: dict[int, Record] = {}
        self.followed_to = 0  # what was acknowledged by then
        self.follow()
        self.slow_pass = storage_at(path).read()
        self.seen_slowly = [next(self.slow_pass)]

    def append(self, records: list[bytes]) -> None:
        self.in_flight = records
        self.old.append(records)
        self.acknowledged += records
        self.in_flight = []

    def follow(self) -> None:
        """Read on behind what the old writer had acknowledged when it was read last."""
        after = max(self.followed_to, self.follower.first_sequence() - 1)
        self.followed_to = len(self.acknowledged)
        for record in self.follower.read(after):
            self.followed[record.sequence] = record

    def check_inherited(self, path: Path) -> None:
        """The new writer has found all that was acknowledged, and at most what was in flight."""
        records = content(path)[0]
        skipped = records[0].sequence - 1
        whole = [*self.acknowledged, *self.in_flight]
        assert [r.data for r in records] in (self.acknowledged[skipped:], whole[skipped:])

    def check_slow_pass(self) -> None:
        """A pass that was held up yields the log as it was, or says that this is gone."""
        try:
            self.seen_slowly += self.slow_pass
        except Missing:
            pass
        whole = [*self.acknowledged, *self.in_flight]
        assert [r.data for r in self.seen_slowly] == whole[: len(self.seen_slowly)]
