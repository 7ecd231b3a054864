"""Reads the log in Redis: a stream, each entry of it one batch.

<prefix>:meta        a hash: the fields of Meta
<prefix>:log         a stream: id = <sequence of the batch's last record>-0, its one field a frame
<prefix>:snapshots   a hash: a frame by sequence
<prefix>:blobs       a hash: data by name, which is its SHA-256 and perhaps a mark
<prefix>:cut:<n>:…   keys that a repair moved aside
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..batches import UnfitBatch, check_follows, decode_batch
from ..errors import Corrupt, Missing, NewerFormat
from ..proto.segment_pb2 import Batch
from ..tfrecord import unframe
from .client import RENAME, RedisClient

FORMAT = 1
RESTORE = "restore Redis's data from a backup"
MEND = f"{RESTORE}, or repair the journal"

_CHUNK_BYTES = 4 << 20  # the approximate size of a request
_CHUNK_ENTRIES = 1000  # the most entries in a request
_FIRST_ENTRIES = 16  # in the first request, when entry sizes are unknown


class Keys(NamedTuple):
    """The names of a journal's keys, in the order of the scripts' arguments."""

    meta: str
    log: str
    snapshots: str
    blobs: str

    @classmethod
    def of(cls, prefix: str) -> Keys:
        return cls(*(f"{prefix}:{name}" for name in cls._fields))


@dataclass(frozen=True, slots=True)
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
    entries: int  # of the log
    began: int  # `last` when the term began
    cut_term: int  # the latest term that a repair has begun
    condemned: str  # the reason why no writer may begin; "" without one


def parse_meta(reply: list[bytes], where: str) -> Meta | None:
    """Parse the reply to HGETALL; None if it is empty. Raises NewerFormat, Corrupt."""
    if not reply:
        return None
    values = {
        k.decode(): v.decode(errors="replace") for k, v in zip(*[iter(reply)] * 2, strict=True)
    }
    try:
        version = int(values["format"])
        if version > FORMAT:
            raise NewerFormat(
                f"{where}: format {version} is newer than {FORMAT}, the newest that this version "
                "knows; upgrade Forebay"
            )
        meta = Meta(
            format=version,
            token=values["token"],
            owner=values["owner"],
            place=values["place"],
            cut_term=int(values.get("cut_term", "0")),
            condemned=values.get("condemned", ""),
            **{
                name: int(values[name])
                for name in ("term", "lease_ms", "beat", "first", "last", "entries", "began")
            },
        )
    except (KeyError, ValueError) as error:
        raise Corrupt(
            f"{where}: is no journal's meta ({error!r}); {RESTORE}, or {RENAME}"
        ) from None
    if meta.term < 1 or not 1 <= meta.first <= meta.last + 1 or meta.began > meta.last:
        raise Corrupt(
            f"{where}: term {meta.term}, first {meta.first}, last {meta.last} and began "
            f"{meta.began} do not fit; {RESTORE}, or {RENAME}"
        )
    return meta


class StreamScan:
    """One pass over the batches, from the one with record `after + 1` to the end."""

    def __init__(self, client: RedisClient, keys: Keys, after: int) -> None:
        self.sequence = after + 1  # of the next record
        self.term = 0  # of the last batch seen
        self.acknowledged = 0  # the record before that batch: appends follow acknowledged ones
        self._client = client
        self._keys = keys

    def __iter__(self) -> Iterator[Batch]:
        """Yield the batches in order. Raises Corrupt, NewerFormat, Missing (trimmed away)."""
        count = _FIRST_ENTRIES
        while True:
            meta, entries = self._fetch(count)
            for entry in entries:
                batch = self._decode(entry)
                self.acknowledged = batch.first_sequence - 1
                self.term = batch.term
                self.sequence = batch.first_sequence + len(batch.records)
                yield batch
            if len(entries) < count:
                break
            size = sum(len(fields[-1]) for _, fields in entries)
            count = max(1, min(_CHUNK_ENTRIES, 2 * count, _CHUNK_BYTES * count // size))
        ends = self.sequence - 1
        if ends != meta.last and (self.term or ends < meta.last):
            raise Corrupt(
                f"{self._where()}: ends at record {ends}, and record {meta.last} was appended; "
                f"{MEND}"
            )

    def _fetch(self, count: int) -> tuple[Meta, list[Any]]:
        reply, entries = self._client.run_together(
            ("HGETALL", self._keys.meta),
            ("XRANGE", self._keys.log, self.sequence, "+", "COUNT", count),
        )
        meta = parse_meta(reply, f"{self._client.address.url}: {self._keys.meta}")
        if meta is None:
            if entries:
                raise Corrupt(f"{self._where()}: there is a log, and no meta; {MEND}")
            return _NOTHING, []
        if self.sequence < meta.first:
            raise Missing(
                f"{self._client.address.url}: records before {meta.first} were trimmed, so none "
                f"can be read from {self.sequence}"
            )
        return meta, entries

    def _decode(self, entry: Any) -> Batch:
        identity, fields = entry
        where = self._where(identity.decode())
        batch = decode_entry(identity, fields, where)
        # Only the first batch may begin before the requested record.
        expected = self.sequence if self.term else min(self.sequence, batch.first_sequence)
        try:
            check_follows(batch, expected, self.term)
        except UnfitBatch as error:
            raise Corrupt(f"{where}: {error}; {MEND}") from None
        return batch

    def _where(self, identity: str = "") -> str:
        where = f"{self._client.address.url}: {self._keys.log}"
        return f"{where}: entry {identity}" if identity else where


_NOTHING = Meta(FORMAT, 0, "", "", "", 0, 0, 1, 0, 0, 0, 0, "")


def decode_entry(identity: bytes, fields: Sequence[bytes], where: str) -> Batch:
    """Decode the batch in a stream entry. Raises Corrupt, NewerFormat."""
    data = unframe(fields[-1])
    if data is None:
        raise Corrupt(f"{where}: the checksum does not match; {MEND}")
    try:
        batch = decode_batch(data, where)
    except UnfitBatch as error:
        raise Corrupt(f"{where}: {error}; {MEND}") from None
    last = batch.first_sequence + len(batch.records) - 1
    if identity != b"%d-0" % last:
        raise Corrupt(f"{where}: holds a batch that ends at record {last}; {MEND}")
    return batch
