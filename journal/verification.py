"""Maintains a journal: verifies every record, and repairs what is safe to repair."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from ..storage import Corrupt, Locked, Missing, Record, Storage, StorageError, Writer
from ..storage.errors import ACCEPT_LOSS
from .codec import FORMAT, decode, encode
from .datasets import stored
from .proto.events_pb2 import Event, LeaderElected
from .replaying import replay
from .snapshots import decode_snapshot

Begin = Callable[[Storage], Mapping[str, str]]

ENDINGS = {
    *("lease_lost", "consumer_left", "worker_lost", "iteration_paused", "iteration_collected"),
    "save_failed",
}
"""Events that an election may put before its LeaderElected (ElectLeader, service/core/terms.py)."""

SHOWN = 1000
"""Every how many records `verify` tells how far it is."""


@dataclass(slots=True)
class Report:
    """What `verify` found."""

    first: int = 1  # of the records that were checked
    last: int = 0
    snapshots: int = 0
    blobs: int = 0
    torn_bytes: int = 0  # a crash left them; the next dispatcher removes them. Not a problem
    problems: list[str] = field(default_factory=list)  # each names the file and byte, if it can
    lost_datasets: list[str] = field(default_factory=list)  # ids of datasets without their blob
    can_begin: bool = True  # whether a dispatcher can start on this storage

    @property
    def ok(self) -> bool:
        return not self.problems

    def add(self, problem: StorageError | str) -> None:
        """Add a problem, unless it was added before."""
        if str(problem) not in self.problems:
            self.problems.append(str(problem))


def holds_anything(storage: Storage) -> bool:
    """Whether the storage holds a journal, or the remains of a damaged one."""
    try:
        storage.check()
        return bool(storage.extent().last or storage.condemned())
    except Corrupt:
        return True


def verify(
    storage: Storage,
    begin: Begin = lambda storage: _begin(storage),
    show: Callable[[int, int], None] = lambda done, of: None,
) -> Report:
    """Check every record, snapshot and blob, and whether a dispatcher could start. Read-only.

    `begin` restores a dispatcher's state from the storage and returns the digests of its
    datasets by id. By default it only checks that the replay can start. `show` is told now and
    then how many records were checked, and of how many. While a writer runs, this checks what was
    there at the call. Raises NewerFormat, StorageUnusable.
    """
    report = Report(first=storage.first_sequence())
    snapshots = storage.snapshots()
    blobs: dict[str, str] = {}  # by dataset
    _verify_log(storage, report, blobs, show)
    if reason := storage.condemned():
        remedy = f"restore a backup that has them, or {ACCEPT_LOSS}"
        report.add(f"{storage.url}: {reason}; {remedy}")
    _verify_beginning(storage, report, blobs, begin)
    for sequence in snapshots:
        try:
            decode_snapshot(sequence, storage.read_snapshot(sequence))
        except Corrupt as error:
            report.add(error)
        except Missing:
            continue  # a running dispatcher's retention deleted it
        else:
            if sequence + 1 < report.first:
                report.add(
                    f"{storage.url}: the log begins at record {report.first}, and there is a "
                    f"snapshot {sequence}: what follows that is missing; restore it from a backup"
                )
        report.snapshots += 1
    for dataset_id, digest in sorted(blobs.items()):
        try:
            storage.read_blob(digest)
        except (Corrupt, Missing) as error:
            report.add(error)
            report.add(f"the dataset {dataset_id!r} needs the blob {digest}")
            report.lost_datasets.append(dataset_id)
    report.blobs = len(set(blobs.values()))
    report.torn_bytes = storage.holdings().torn_bytes
    return report


def _begin(storage: Storage) -> Mapping[str, str]:
    replay(storage)
    return {}


def _verify_beginning(
    storage: Storage, report: Report, blobs: dict[str, str], begin: Begin
) -> None:
    while True:
        snapshots = storage.snapshots()
        try:
            storage.check()
            blobs.update(begin(storage))
            return
        except Corrupt as error:
            if storage.snapshots() == snapshots:
                report.add(error)
                report.can_begin = False
                return
            # A newer snapshot was written meanwhile, and the records to replay were trimmed.


def _verify_log(
    storage: Storage, report: Report, blobs: dict[str, str], show: Callable[[int, int], None]
) -> None:
    try:
        of = storage.extent().last - report.first + 1
    except Corrupt:  # which reading finds, too
        of = 0
    report.last = report.first - 1
    led = 0 if report.first == 1 else None  # the term whose leader is known; None: it was trimmed
    journal_id = ""
    try:
        for record in storage.read(report.first - 1):
            report.last = record.sequence
            if record.sequence % SHOWN == 0:
                show(record.sequence - report.first + 1, of)
            try:
                event = decode(record.sequence, record.data)
            except Corrupt as error:
                report.add(error)
                led = record.term
            else:
                kind = event.WhichOneof("event")
                if kind == "leader_elected":
                    if not journal_id or event.leader_elected.after_repair:
                        journal_id = event.leader_elected.journal_id
                    _verify_leader(report, record, event.leader_elected, journal_id)
                elif led is not None and record.term != led and kind not in ENDINGS:
                    report.add(
                        f"record {record.sequence} of term {record.term} comes before any that "
                        "elects its leader"
                    )
                if led is None or kind not in ENDINGS:
                    led = record.term
                for registered in (event.dataset_registered, event.mixture_registered):
                    if digest := stored(registered.definition).blob:
                        blobs[registered.dataset_id] = digest
                if event.HasField("dataset_removed"):
                    blobs.pop(event.dataset_removed.dataset_id, None)
    except Corrupt as error:
        report.add(error)


def _verify_leader(report: Report, record: Record, leader: LeaderElected, journal_id: str) -> None:
    if leader.term != record.term:
        report.add(f"record {record.sequence} elects term {leader.term} in term {record.term}")
    if leader.journal_id != journal_id:
        report.add(
            f"record {record.sequence} is of the journal {leader.journal_id!r}, and those before "
            f"it of {journal_id!r}"
        )


def repair(
    storage: Storage,
    *,
    truncate_corrupt: bool = False,
    restored: bool = False,
    owner: str = "journal repair",
) -> list[str]:
    """Make a journal usable by a dispatcher again; return descriptions of what was done.

    Removes a torn tail, which was never acknowledged. With `truncate_corrupt`, cuts a corrupt
    log after its last whole batch, which loses acknowledged decisions. The part that is cut off
    is moved aside, never deleted. With `restored`, the journal is a copy from a backup: peers that
    know later events register again. Leaves damage that a dispatcher does not read; `verify`
    reports it.

    Raises Locked while a dispatcher runs, NewerFormat, and Corrupt if it cannot (or, without
    `truncate_corrupt`, may not) be repaired.
    """
    done = []
    torn_bytes = storage.holdings().torn_bytes
    anew = "workers and trainers that knew {} will begin anew"
    try:
        _take_over(storage, owner, begin_anew=restored)
    except Corrupt as error:
        if not truncate_corrupt:
            if ACCEPT_LOSS not in str(error) and _cut_helps(storage):
                raise Corrupt(
                    f"{error}; or go on without what cannot be read: forebay journal repair "
                    f"--truncate-corrupt cuts the log behind record {_last_readable(storage)}, and "
                    "moves the rest aside"
                ) from error
            raise
        done.append(storage.cut(_last_readable(storage), owner))
        _take_over(storage, owner, begin_anew=True)
        done.append(anew.format("what was cut off"))
    else:
        if restored:
            done.append(anew.format("later events"))
        if torn_bytes:
            done.append(
                f"removed {torn_bytes} bytes of an append that a crash cut off behind record "
                f"{storage.extent().last}"
            )
    return done


def _take_over(storage: Storage, owner: str, begin_anew: bool = False) -> None:
    """Open the writer and replay, as a starting dispatcher does; `begin_anew`: as a new journal."""
    writer = _open_writer(storage, owner)
    try:
        for _ in replay(storage).events:
            pass
        if begin_anew:
            elected = LeaderElected(
                term=writer.term, format=FORMAT, journal_id=uuid.uuid4().hex, after_repair=True
            )
            writer.append([encode(Event(time_ms=time.time_ns() // 10**6, leader_elected=elected))])
    finally:
        writer.close()


def _open_writer(storage: Storage, owner: str) -> Writer:
    """Open the writer; if the last one may still live, wait until its lease has expired."""
    begun_s = time.monotonic()
    while True:
        try:
            return storage.open_writer(owner)
        except Locked as error:
            if time.monotonic() - begun_s >= 2 * error.silence_ms / 1000:
                raise
            time.sleep(0.1)


def _cut_helps(storage: Storage) -> bool:
    """Whether it is the log's end that cannot be read, and not its beginning or a snapshot."""
    try:
        storage.check()
        for _ in storage.read(storage.first_sequence() - 1):
            pass
    except Corrupt:
        return True
    return bool(storage.condemned())


def _last_readable(storage: Storage) -> int:
    last = storage.first_sequence() - 1
    try:
        for record in storage.read(last):
            last = record.sequence
    except Corrupt:
        pass  # the end of what is readable
    return last
