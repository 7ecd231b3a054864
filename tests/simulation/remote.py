"""A storage behind the network, as a database is: slow, sometimes out of reach, fencing writers.

It keeps the contract of storage/base.py. A call is a message there and one back; if either is
lost, its outcome is unknown, and a request may still arrive after its sender is dead. Each
dispatcher has a RemoteStorage; they share one Server, which outlives them all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from forebay.storage import (
    AppendFailed,
    Corrupt,
    Extent,
    Fenced,
    Holdings,
    Locked,
    Missing,
    OutOfSequence,
    Record,
    Storage,
    StorageError,
    StorageUnavailable,
    Writer,
    blob_name,
)
from forebay.storage.base import LEASE_MS
from forebay.storage.server_log import Meta, query_ms
from forebay.storage.writer_watch import WriterWatch

from . import calls
from .kernel import Kernel, Process, Violation, kernel
from .oracle import Oracle
from .threads import WaitingRoom, process

T = TypeVar("T")

TIMEOUT_S = 1.0


class Server:
    """What is stored, and who may write. Acts in no time; all else is the way to it."""

    fences = True  # refuses writers whose term is over (broken.py)

    def __init__(self, this: Kernel, oracle: Oracle) -> None:
        self.oracle = oracle
        self.delay_s = this.rng.choice([1e-4, 1e-3, 1e-2])
        self.lost = 0.0  # how likely a request or its answer is lost
        self.down = False
        self.hangs_until_s = 0.0  # until then it is stopped: it answers what was asked later
        self.cut_off = ""  # the host that does not reach it
        self.records: list[Record] = []
        self.first = 1
        self.snapshots: dict[int, bytes] = {}
        self.blobs: dict[str, bytes] = {}
        self.term = 0
        self.lease_ms = 0
        self.place = ""
        self.held = False  # the present writer has not closed
        self.writer: Process | None = None  # the present one's
        self.lived_s = 0.0  # when that gave its last sign of life
        self.connected: set[int] = set()  # the terms of writers that are connected
        self.beats = 0  # signs of life of all writers
        self.condemned = ""
        self._kernel = this

    @property
    def next(self) -> int:
        return self.first + len(self.records)

    def check(self, term: int) -> None:
        if self.fences and (term != self.term or not self.held):
            raise Fenced(f"term {term} is over; the storage is at {self.term}")

    def meta(self) -> Meta:
        return Meta(
            format=1, term=self.term, token=str(self.term), owner="somebody" if self.held else "",
            place=self.place, lease_ms=self.lease_ms, beat=self.beats, first=self.first,
            last=self.next - 1, began=0, cut_term=0, condemned=self.condemned,
        )  # fmt: skip

    def take(self, seen: Meta, writer: Process, lease_ms: int, place: str) -> int:
        """Begin a term; return it."""
        if self.condemned:
            raise Corrupt(self.condemned)
        if (self.term, self.beats, self.next - 1) != (seen.term, seen.beat, seen.last):
            raise Locked("remote: somebody was faster")
        silent_s = self._kernel.now - self.lived_s
        # Who was not answered tries again.
        early = self.held and self.writer is not writer and silent_s < self.lease_ms / 1000
        if early and self._serves(self.writer) and not self._kernel.network.rejects:
            raise Violation(f"term {self.term} was cut short, and its dispatcher lives")
        self.term += 1
        self.beats += 1
        self.held, self.lease_ms, self.place = True, lease_ms, place
        self.writer, self.lived_s = writer, self._kernel.now
        self.oracle.opened(self.term)
        if early:
            self._kernel.trace("early", self.term)
        return self.term

    def _serves(self, dispatcher: Process | None) -> bool:
        """Whether it lives, and can be connected to."""
        listeners = self._kernel.network.ports.values()
        return any(isinstance(one, calls.Server) and one.process is dispatcher for one in listeners)

    def connect(self, term: int, writer: Process) -> None:
        """Something came from a writer, on a connection that lasts."""
        if term in self.connected or not writer.alive:
            return
        self.connected.add(term)

        def end() -> None:
            if not writer.vanished:  # else nobody says so
                self._kernel.at(self.delay_s, self.connected.discard, term)

        writer.at_kill.append(end)

    def hang_up(self) -> None:
        """It ends all connections, as when it is started again."""
        self.connected.clear()

    def append(self, term: int, after: int, records: Sequence[bytes]) -> int:
        self.check(term)
        if self.fences and after + 1 != self.next:
            raise Fenced(f"the log ends at {self.next - 1}, not at {after}")
        first, self.lived_s = self.next, self._kernel.now
        self.records += [Record(n, term, data) for n, data in enumerate(records, first)]
        self.oracle.stored(term, first, records)
        return self.next - 1

    def trim(self, term: int, before: int) -> None:
        self.check(term)
        if before > self.first:
            if max(self.snapshots, default=0) < before - 1:
                raise OutOfSequence(f"no snapshot allows trimming before {before}")
            self.records = self.records[before - self.first :]
            self.first = before


class RemoteStorage(Storage):
    """One process's connection to the server."""

    def __init__(self, server: Server) -> None:
        self.url = "remote:"
        self.server = server
        self._watch = WriterWatch(lambda token: self.ask(lambda: int(token) in server.connected))

    def ask(self, act: Callable[[], T], error: type[StorageError] = StorageUnavailable) -> T:
        """Have the server do something; wait for its answer. Raises what it raises."""
        server, this, host = self.server, kernel(), process().host
        room = WaitingRoom()
        answers: list[T | StorageError] = []

        def arrive() -> None:
            if server.down or server.cut_off == host:
                return
            try:
                answer: T | StorageError = act()
            except StorageError as refusal:
                answer = refusal
            if this.rng.random() >= server.lost:
                this.at(self._delay(), reply, answer)

        def reply(answer: T | StorageError) -> None:
            answers.append(answer)
            room.notify_all()

        if this.rng.random() >= server.lost:
            this.at(self._delay(), arrive)
        if not answers:
            room.wait(TIMEOUT_S)
        if not answers:
            raise error(f"{self.url} does not answer")
        if isinstance(answers[0], StorageError):
            raise answers[0]
        return answers[0]

    def _delay(self) -> float:
        rng, server = kernel().rng, self.server
        delay_s = server.delay_s * (rng.uniform(10, 300) if rng.random() < 0.02 else rng.random())
        return max(delay_s, server.hangs_until_s - kernel().now)

    def open_writer(self, owner: str, *, lease_ms: int = LEASE_MS, place: str = "") -> RemoteWriter:
        server, me = self.server, process()
        with self._watch.looking():
            meta = self.ask(server.meta)
        mine = bool(place) and place == meta.place
        if meta.owner and not mine and not self._watch.may_displace(meta, self.listens):
            raise Locked(f"{self.url} is in use, in term {meta.term}")
        mine_term, last = self.ask(
            lambda: (server.take(meta, me, lease_ms, place), server.next - 1)
        )
        process().local.update(term=mine_term, oracle=server.oracle)
        return RemoteWriter(self, mine_term, last, lease_ms)

    def read(self, after: int = 0) -> Iterator[Record]:
        server = self.server

        def read() -> list[Record]:
            if after + 1 < server.first:
                raise Missing(f"{self.url}: records before {server.first} were trimmed")
            return server.records[after + 1 - server.first :]

        return iter(self.ask(read))

    def first_sequence(self) -> int:
        return self.ask(lambda: self.server.first)

    def extent(self) -> Extent:
        return self.ask(lambda: Extent(self.server.first, self.server.next - 1))

    def snapshots(self) -> list[int]:
        return self.ask(lambda: sorted(self.server.snapshots))

    def read_snapshot(self, sequence: int) -> bytes:
        return self.ask(lambda: _find(self.server.snapshots, sequence))

    def blobs(self) -> list[str]:
        return self.ask(lambda: list(self.server.blobs))

    def read_blob(self, digest: str) -> bytes:
        return self.ask(lambda: _find(self.server.blobs, digest))

    def holdings(self) -> Holdings:
        def count() -> Holdings:
            server = self.server
            kept = [server.snapshots.values(), server.blobs.values()]
            snapshots, blobs = ([len(data) for data in values] for values in kept)
            log_bytes = sum(len(record.data) for record in server.records)
            return Holdings(
                segments=int(bool(server.records)),
                log_bytes=log_bytes,
                torn_bytes=0,
                snapshots=len(snapshots),
                snapshot_bytes=sum(snapshots),
                blobs=len(blobs),
                blob_bytes=sum(blobs),
            )

        return self.ask(count)

    def condemned(self) -> str:
        return self.ask(lambda: self.server.condemned)

    def close(self) -> None: ...


K = TypeVar("K")


def _find(things: dict[K, bytes], key: K) -> bytes:
    if key not in things:
        raise Missing(f"there is no {key}")
    return things[key]


class RemoteWriter(Writer):
    """The writer of a term. Whether it still is one, the server says each time."""

    def __init__(
        self, storage: RemoteStorage, term: int, last_sequence: int, lease_ms: int
    ) -> None:
        self.term = term
        self.last_sequence = last_sequence
        self.lease_ms = lease_ms
        self._storage = storage
        self._server = storage.server
        self._failed = ""
        self._closed = False

    @property
    def query_ms(self) -> int:
        return query_ms(self.lease_ms)

    def renew(self) -> None:
        def beat() -> None:
            self._server.check(self.term)
            self._server.beats += 1
            self._server.lived_s = kernel().now

        self._open()
        self._send(beat)

    def append(self, records: Sequence[bytes]) -> int:
        self._open()
        if self._failed:
            raise AppendFailed(f"an earlier append failed: {self._failed}")
        if not records:
            return self.last_sequence
        self._failed = "its outcome is unknown"
        after, batch = self.last_sequence, list(records)
        append = lambda: self._server.append(self.term, after, batch)  # noqa: E731
        self.last_sequence = self._send(append, AppendFailed)
        self._failed = ""
        return self.last_sequence

    def write_snapshot(self, sequence: int, data: bytes) -> None:
        self._open()
        if not 1 <= sequence <= self.last_sequence:
            raise OutOfSequence(f"no snapshot at {sequence} of {self.last_sequence} records")
        self._change(lambda: self._server.snapshots.__setitem__(sequence, data))

    def delete_snapshot(self, sequence: int) -> None:
        self._open()
        self._change(lambda: self._server.snapshots.pop(sequence, b""))

    def trim(self, before: int) -> None:
        self._open()
        self._storage.ask(lambda: self._server.trim(self.term, before))

    def write_blob(self, data: bytes, mark: str = "") -> str:
        self._open()
        name = blob_name(data, mark)
        self._change(lambda: self._server.blobs.__setitem__(name, data))
        return name

    def delete_blob(self, name: str) -> None:
        self._open()
        self._change(lambda: self._server.blobs.pop(name, b""))

    def condemn(self, reason: str) -> None:
        def condemn() -> None:
            self._server.condemned = reason

        self._open()
        self._change(condemn)
        kernel().fail(f"{process().name} condemned the storage: {reason}")

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True

        def release() -> None:
            if self._server.term == self.term:
                self._server.held = False

        try:
            self._storage.ask(release)
        except StorageError:
            pass  # its lease will run out

    def _send(self, act: Callable[[], T], error: type[StorageError] = StorageUnavailable) -> T:
        me = process()

        def connected() -> T:
            self._server.connect(self.term, me)
            return act()

        return self._storage.ask(connected, error)

    def _change(self, act: Callable[[], object]) -> None:
        def checked() -> None:
            self._server.check(self.term)
            act()

        self._storage.ask(checked)

    def _open(self) -> None:
        if self._closed:
            raise Fenced(f"the writer of term {self.term} gave up its place")
