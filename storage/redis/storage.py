"""A storage in Redis: reading it, opening its writer, cutting it.

log.py lists the keys and reads the log, scripts.py changes it, and checks.py checks Redis's
settings.
"""

from __future__ import annotations

import itertools
import logging
import secrets
import time
from collections.abc import Iterator
from typing import Any

from ..base import LEASE_MS, REGISTER, Extent, Holdings, Record, Storage, is_blob
from ..batches import records_above
from ..errors import Corrupt, Locked, Missing, Volatile
from ..tfrecord import unframe
from .address import parse_redis_url
from .checks import find_volatile
from .client import RedisClient
from .log import MEND, Keys, Meta, StreamScan, decode_entry, parse_meta
from .scripts import COPY, CUT, LOSE, OPEN
from .writer import CONDEMNED, RedisWriter

log = logging.getLogger(__name__)

LEAST_WATCH_TIMEOUT_S = 1.0
"""With a shorter timeout, a slow Redis would never answer in time."""


class RedisStorage(Storage):
    """The storage in the Redis at a URL (address.py)."""

    def __init__(self, url: str, *, allow_volatile: bool = False) -> None:
        """Does not connect yet.

        `open_writer` refuses a Redis whose settings can lose acknowledged records, unless
        `allow_volatile`. Raises StorageUnusable.
        """
        self._address = parse_redis_url(url)
        self.url = self._address.url
        self._client = RedisClient(self._address)
        self._keys = Keys.of(self._address.prefix)
        self._allow_volatile = allow_volatile
        self._volatile: list[str] | None = None  # find_volatile's last result
        # The present writer's meta, and since when (monotonic seconds) it has been the same.
        self._watched: Meta | None = None
        self._watched_since = 0.0
        self._watcher: RedisClient | None = None  # polls that meta; None before the first poll
        # The latest term that was read, and a record that was acknowledged by then.
        self._acknowledged = (0, 0)

    # -- reading -----------------------------------------------------------------------------

    def read(self, after: int = 0) -> Iterator[Record]:
        scan = StreamScan(self._client, self._keys, after)
        for batch in scan:
            yield from records_above(batch, after)
        self._acknowledged = max(self._acknowledged, (scan.term, scan.acknowledged))

    def first_sequence(self) -> int:
        meta = self._meta()
        return meta.first if meta else 1

    def extent(self) -> Extent:
        meta = self._check_end()
        return Extent(meta.first, meta.last) if meta else Extent(1, 0)

    def snapshots(self) -> list[int]:
        self._meta()  # NewerFormat
        return self._list_snapshots(self._client.run("HKEYS", self._keys.snapshots))

    def read_snapshot(self, sequence: int) -> bytes:
        where = f"{self.url}: {self._keys.snapshots}: {sequence}"
        framed = self._client.run("HGET", self._keys.snapshots, sequence)
        if framed is None:
            raise Missing(f"{where}: there is no such snapshot")
        data = unframe(framed)
        if data is None:
            raise Corrupt(f"{where}: the snapshot's checksum does not match")
        return data

    def blobs(self) -> list[str]:
        self._meta()  # NewerFormat
        return [name.decode() for name in self._client.run("HKEYS", self._keys.blobs)]

    def read_blob(self, name: str) -> bytes:
        where = f"{self.url}: {self._keys.blobs}: {name}"
        data: bytes | None = self._client.run("HGET", self._keys.blobs, name)
        if data is None:
            raise Missing(f"{where}: there is no such blob; {REGISTER}")
        if not is_blob(name, data):
            raise Corrupt(f"{where}: the blob's content does not match its name; {REGISTER}")
        return data

    def holdings(self) -> Holdings:
        entries, log_bytes = self._client.run_together(
            ("XLEN", self._keys.log), ("MEMORY", "USAGE", self._keys.log, "SAMPLES", 0)
        )
        snapshots = self._sizes(self._keys.snapshots)
        blobs = self._sizes(self._keys.blobs)
        return Holdings(
            segments=int(entries > 0),
            log_bytes=log_bytes or 0,
            torn_bytes=0,
            snapshots=len(snapshots),
            snapshot_bytes=sum(snapshots),
            blobs=len(blobs),
            blob_bytes=sum(blobs),
        )

    def condemned(self) -> str:
        meta = self._meta()
        return meta.condemned if meta else ""

    def close(self) -> None:
        self._client.close()
        if self._watcher is not None:
            self._watcher.close()

    def _meta(self, client: RedisClient | None = None) -> Meta | None:
        return self._parse((client or self._client).run("HGETALL", self._keys.meta))

    def _parse(self, reply: list[bytes]) -> Meta | None:
        return parse_meta(reply, f"{self.url}: {self._keys.meta}")

    def _list_snapshots(self, fields: list[bytes]) -> list[int]:
        return sorted(int(field) for field in fields if field.isdigit())

    def _sizes(self, key: str) -> list[int]:
        fields = self._client.run("HKEYS", key)
        return self._client.run_together(*(("HSTRLEN", key, field) for field in fields))

    def _check_end(self) -> Meta | None:
        """The meta; checks that the log and the snapshots fit it. Raises Corrupt."""
        keys = self._keys
        reply, entries, newest, snapshots, others = self._client.run_together(
            ("HGETALL", keys.meta),
            ("XLEN", keys.log),
            ("XREVRANGE", keys.log, "+", "-", "COUNT", 1),
            ("HKEYS", keys.snapshots),
            ("EXISTS", keys.snapshots, keys.blobs),
        )
        meta = self._parse(reply)
        if meta is None:
            if entries or others:
                raise Corrupt(f"{self.url}: {keys.meta}: is missing, and others are not; {MEND}")
            return None
        where = f"{self.url}: {keys.log}"
        if entries != meta.entries:
            raise Corrupt(
                f"{where}: has {entries} entries, and {meta.entries} were written; {MEND}"
            )
        if newest:
            identity, fields = newest[0]
            decode_entry(identity, fields, f"{where}: entry {identity.decode()}")
        ends = int(identity.split(b"-")[0]) if newest else meta.first - 1
        ahead = max(self._list_snapshots(snapshots), default=0)
        if ends != meta.last or ahead > ends:
            raise Corrupt(
                f"{where}: ends at record {ends}, and there was a record {max(meta.last, ahead)}; "
                f"{MEND}"
            )
        return meta

    # -- writing -----------------------------------------------------------------------------

    def open_writer(self, owner: str, *, lease_ms: int = LEASE_MS, place: str = "") -> RedisWriter:
        if self._volatile is None:  # so that a standby reports it at its start
            self._inspect()
        meta = self._meta_of_free_place(place, lease_ms)
        if meta and meta.condemned:
            raise Corrupt(f"{self.url}: {meta.condemned}; {CONDEMNED}")
        self._inspect()  # again: Redis may have been restarted since
        self._check_end()
        term, token = self._begin(meta, owner, lease_ms, place)
        last = meta.last if meta else 0
        writer = RedisWriter(
            self._address, self._keys, term, token, last, lease_ms, self._inspect_again
        )
        try:
            writer.confirm()
        except BaseException:
            writer.close()
            raise
        return writer

    def _inspect(self) -> None:
        found = find_volatile(self._client)
        message = f"{self.url} can lose acknowledged records: {'; '.join(found)}"
        if found and not self._allow_volatile:
            raise Volatile(f"{message}. Mend that, or accept it with --allow-volatile")
        if found and found != self._volatile:
            log.warning("%s. That was allowed", message)
        self._volatile = found

    def _inspect_again(self) -> None:
        """Log it if the settings have changed for the worse. Raises StorageUnusable."""
        found = find_volatile(self._client)
        if found and found != self._volatile:
            log.error(
                "%s can lose acknowledged records since its settings were changed: %s",
                self.url, "; ".join(found),
            )  # fmt: skip
        self._volatile = found

    def _meta_of_free_place(self, place: str, lease_ms: int = LEASE_MS) -> Meta | None:
        """The meta, if its writer has closed or ended, or its lease expired. Raises Locked."""
        if self._watcher is None:
            # A short timeout, because each missing reply restarts the watch.
            timeout_s = max(LEAST_WATCH_TIMEOUT_S, lease_ms / 2000)
            self._watcher = RedisClient(self._address, timeout_s=timeout_s)
        watched, self._watched = self._watched, None  # forget it if the poll below fails
        asked = time.monotonic()
        meta = self._meta(self._watcher)
        self._check_acknowledged(meta)
        if meta is None or not meta.owner or (place and meta.place == place):
            return meta
        if meta != watched:
            self._watched_since = time.monotonic()
        self._watched = meta
        if meta == watched and asked - self._watched_since >= meta.lease_ms / 1000:
            return meta
        raise Locked(f"{self.url} is in use by {meta.owner}; stop that first")

    def _check_acknowledged(self, meta: Meta | None) -> None:
        term, last = self._acknowledged
        found = meta.last if meta else 0
        if found >= last or (meta and meta.cut_term > term):
            return
        what = f"record {last} was read in term {term}, and the log ends at record {found}"
        result = self._client.run_script(LOSE, self._keys, (term, "", last, what))
        if result == [b"ok"]:
            return
        raise Corrupt(f"{self.url}: {result[1].decode()}; {CONDEMNED}")

    def _begin(
        self, meta: Meta | None, owner: str, lease_ms: int, place: str, purpose: str = "write"
    ) -> tuple[int, str]:
        """Begin a term, if the meta is still the same; return the term and the writer's token."""
        token = secrets.token_hex(8)
        seen: tuple[Any, ...] = ("",) * 5
        if meta:
            seen = meta.term, meta.token, meta.beat, meta.last, meta.condemned
        owner = owner or "somebody"  # "" in the meta means no writer
        arguments = (*seen, token, owner, place, lease_ms, purpose)
        result = self._client.run_script(OPEN, self._keys, arguments)
        if result == [b"changed"]:
            raise Locked(f"{self.url} is in use: another writer was faster, or is alive")
        return result[1], token

    def cut(self, after: int, owner: str) -> str:
        try:
            meta = self._meta_of_free_place("")
        except Corrupt:
            meta = self._meta()  # condemned now; raises again if it cannot be repaired
        keys = self._keys
        if meta is None and not self._client.run("EXISTS", keys.log, keys.snapshots, keys.blobs):
            raise Missing(f"{self.url}: there is no log to cut")
        term, token = self._begin(meta, owner, LEASE_MS, "", "repair")
        first, last, last_term = self._find_cut(meta, after)
        exists, newest = self._client.run_together(
            ("EXISTS", keys.log), ("XREVRANGE", keys.log, "+", "-", "COUNT", 1)
        )
        ends = newest[0][0] if newest else b""
        whole = meta is not None and meta.last == last and ends in (b"", b"%d-0" % last)
        aside = f"{self._address.prefix}:cut:{self._free_number()}"
        kept = f"{aside}:kept"
        moves = bool(exists) and not whole
        if moves:
            self._copy_log(kept, last)
        result = self._client.run_script(
            CUT,
            (*keys, kept, *(f"{aside}:{name}" for name in ("meta", "log", "snapshots"))),
            (term, token, first, last, max(term, last_term + 1), int(moves)),
            confirm=True,
        )
        if result != [b"ok"]:
            raise Locked(f"{self.url}: another writer has begun meanwhile; stop that first")
        self._acknowledged = (0, 0)
        moved = f"; the log as it was, and all later snapshots, were moved to {aside}:…"
        return f"the log ends at record {last} now{moved if moves else ''}"

    def _find_cut(self, meta: Meta | None, after: int) -> tuple[int, int, int]:
        """The first record, the last record of the last whole batch up to `after`, and its term."""
        first = meta.first if meta else self._first_of_log()
        scan = StreamScan(self._client, self._keys, first - 1)
        last, term = first - 1, 0
        try:
            for batch in scan:
                if scan.sequence - 1 > after:
                    break
                last, term = scan.sequence - 1, batch.term
        except Corrupt:
            pass  # the damage is why we cut
        return first, last, term

    def _first_of_log(self) -> int:
        for identity, fields in self._client.run("XRANGE", self._keys.log, "-", "+", "COUNT", 1):
            try:
                return decode_entry(identity, fields, "").first_sequence
            except Corrupt:
                pass
        return 1

    def _free_number(self) -> int:
        metas = ((n, f"{self._address.prefix}:cut:{n}:meta") for n in itertools.count(1))
        return next(number for number, meta in metas if not self._client.run("EXISTS", meta))

    def _copy_log(self, target: str, last: int) -> None:
        """Copy the log in pieces, since Redis serves nobody else while a script runs."""
        self._client.run("DEL", target)  # of a cut that was not finished
        begin = "-"
        while begin:
            copied = self._client.run_script(COPY, (self._keys.log, target), (begin, last))
            begin = f"({copied.decode()}" if copied else ""
