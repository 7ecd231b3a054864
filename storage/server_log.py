"""The log of a storage on a server: one entry a batch, and one *meta* that says what is valid.

The meta has the writer's term and the log's length. A server changes it in the same atomic step
in which it appends. Redis and PostgreSQL keep their logs so; what is theirs alone is in `redis/`
and `postgres/`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

from .base import trimmed
from .batches import UnfitBatch, check_follows, decode_batch
from .errors import Corrupt, NewerFormat, StorageUnusable
from .proto.segment_pb2 import Batch
from .tfrecord import unframe

FORMAT = 1
QUERY_MS = 500

_CHUNK_BYTES = 4 << 20  # the approximate size of a request
_CHUNK_ENTRIES = 1000  # the most entries in a request
_FIRST_ENTRIES = 16  # in the first request, when entry sizes are unknown


@dataclass(frozen=True, slots=True, kw_only=True)
class Meta:
    """The content of a journal's meta."""

    format: int
    term: int
    token: str  # random, of the writer
    owner: str  # the writer's name; "" after it has closed
    place: str
    lease_ms: int
    beat: int  # counts the writer's signs of life
    first: int  # the oldest record, or the next one if the log is empty
    last: int
    began: int  # `last` when the term began
    cut_term: int  # the latest term that a repair has begun
    condemned: str  # the reason why no writer may begin; "" without one

    @property
    def query_ms(self) -> int:
        """See `Writer.query_ms`."""
        return query_ms(self.lease_ms)

    @property
    def fits(self) -> bool:
        """Whether its numbers can be true together."""
        return self.term >= 0 and 1 <= self.first <= self.last + 1 and self.began <= self.last


def query_ms(lease_ms: int) -> int:
    """See `Writer.query_ms`. Standbys compute it from the leader's lease, so it never grows."""
    return min(QUERY_MS, lease_ms // 4)


class JournalNames(NamedTuple):
    """How errors name the parts of a journal, and what they say is to be done."""

    url: str
    log: str
    entry: str  # of the log, with {} for the sequence of its last record
    snapshots: str
    blobs: str
    mend: str
    remedy: str  # for a condemned log

    def where(self, entry: str = "") -> str:
        """The log, or an entry of it."""
        return ": ".join(filter(None, (self.url, self.log, entry)))


class Entry(NamedTuple):
    """An entry of the log, as it was read."""

    name: str  # `JournalNames.entry` of its last record, unless it is damaged
    data: bytes  # a frame


class JournalPartMissing(StorageUnusable):
    """A part of the journal, or all of it, does not exist."""


class Cut(NamedTuple):
    """What a repair leaves of a log."""

    first: int
    last: int
    term: int  # of the last batch


Fetch = Callable[[int, int], tuple[Meta | None, Sequence[Entry]]]
"""Reads atomically the meta, and so many entries from the one that holds this record on."""


class LogScan:
    """One pass over the batches, from the one with record `after + 1` to the end."""

    def __init__(self, fetch: Fetch, names: JournalNames, after: int) -> None:
        self.sequence = after + 1  # of the next record
        self.term = 0  # of the last batch seen
        self.acknowledged = 0  # the record before that batch: appends follow acknowledged ones
        self._fetch = fetch
        self._names = names

    def __iter__(self) -> Iterator[Batch]:
        """Yield the batches in order. Raises Corrupt, NewerFormat, Missing (trimmed away)."""
        count = _FIRST_ENTRIES
        while True:
            meta, entries = self._fetch(self.sequence, count)
            if meta is None:
                if entries:
                    raise Corrupt(
                        f"{self._names.where()}: there is a log, and no meta; {self._names.mend}"
                    )
                return
            if self.sequence < meta.first:
                raise trimmed(self._names.url, meta.first, self.sequence)
            for entry in entries:
                batch = self._decode(entry)
                self.acknowledged = batch.first_sequence - 1
                self.term = batch.term
                self.sequence = batch.first_sequence + len(batch.records)
                yield batch
            if len(entries) < count:
                break
            size = sum(len(entry.data) for entry in entries)
            count = max(1, min(_CHUNK_ENTRIES, 2 * count, _CHUNK_BYTES * count // size))
        ends = self.sequence - 1
        if ends != meta.last and (self.term or ends < meta.last):
            raise Corrupt(
                f"{self._names.where()}: ends at record {ends}, and record {meta.last} was "
                f"appended; {self._names.mend}"
            )

    def _decode(self, entry: Entry) -> Batch:
        batch = decode_entry(entry, self._names)
        # Only the first batch may begin before the requested record.
        expected = self.sequence if self.term else min(self.sequence, batch.first_sequence)
        try:
            check_follows(batch, expected, self.term)
        except UnfitBatch as error:
            where = self._names.where(entry.name)
            raise Corrupt(f"{where}: {error}; {self._names.mend}") from None
        return batch


def decode_entry(entry: Entry, names: JournalNames) -> Batch:
    """Decode the batch in an entry. Raises Corrupt, NewerFormat."""
    where = names.where(entry.name)
    data = unframe(entry.data)
    if data is None:
        raise Corrupt(f"{where}: the checksum does not match; {names.mend}")
    try:
        batch = decode_batch(data, where)
    except UnfitBatch as error:
        raise Corrupt(f"{where}: {error}; {names.mend}") from None
    last = batch.first_sequence + len(batch.records) - 1
    if entry.name != names.entry.format(last):
        raise Corrupt(f"{where}: holds a batch that ends at record {last}; {names.mend}")
    return batch


def check_newest(meta: Meta, newest: Entry | None, ahead: int, names: JournalNames) -> None:
    """Check that the log's newest entry, and the newest snapshot `ahead`, fit the meta."""
    ends = meta.first - 1
    if newest is not None:
        batch = decode_entry(newest, names)
        ends = batch.first_sequence + len(batch.records) - 1
    if ends != meta.last or ahead > ends:
        raise Corrupt(
            f"{names.where()}: ends at record {ends}, and there was a record "
            f"{max(meta.last, ahead)}; {names.mend}"
        )


def find_loss(
    meta: Meta | None,
    term: int,
    last: int,
    read: Callable[[], Meta | None],
    lose: Callable[[Meta | None, int, str], str],
) -> str:
    """The reason why the log is condemned that lacks the record `last`, read in `term`; "" if it
    does not lack that.

    The meta may have been seen on a server that lags behind. So it is read again, and the log is
    condemned (`ServerWriter.lose`) only if it still is as it was read.
    """

    def lacks(meta: Meta | None) -> bool:
        if meta and meta.cut_term > term:
            return False  # a repair removes records on purpose
        return (meta.last if meta else 0) < last

    while lacks(meta):
        meta = read()
        if not lacks(meta):
            break
        if meta and meta.condemned:
            return meta.condemned
        ends = meta.last if meta else 0
        what = f"record {last} was read in term {term}, and the log ends at record {ends}"
        if reason := lose(meta, term, what):
            return reason
    return ""


def find_cut(fetch: Fetch, names: JournalNames, meta: Meta | None, after: int) -> Cut:
    """Where a repair cuts the log: behind the last whole batch up to record `after`."""
    first = 1
    if meta and meta.term:
        first = meta.first
    else:
        for entry in fetch(1, 1)[1]:
            with suppress(Corrupt):
                first = decode_entry(entry, names).first_sequence
    cut = Cut(first, first - 1, 0)
    scan = LogScan(fetch, names, first - 1)
    with suppress(Corrupt):  # the damage is why we cut
        for batch in scan:
            if scan.sequence - 1 > after:
                break
            cut = Cut(first, scan.sequence - 1, batch.term)
    return cut


def check_format(version: int, where: str) -> None:
    """Raise NewerFormat if a journal of this format is not known."""
    if version > FORMAT:
        raise NewerFormat(
            f"{where}: format {version} is newer than {FORMAT}, the newest that this version "
            "knows; upgrade Forebay"
        )
