"""A storage in Redis: reading it, opening its writer, cutting it.

log.py lists the keys and reads the log, scripts.py changes it, and checks.py checks Redis's
settings.
"""

from __future__ import annotations

import itertools
from typing import Any

from ..base import LEASE_MS, Holdings
from ..errors import Away, Corrupt, Locked, Missing, StorageUnusable
from ..server_log import Entry, JournalNames, Meta, decode_entry
from ..server_storage import ServerStorage
from .address import parse_redis_url
from .checks import find_volatile
from .client import RedisClient
from .log import MEND, REMEDY, Keys, RedisMeta, parse_meta
from .scripts import COPY, CUT, LOSE, OPEN
from .writer import RedisWriter, connection_name

LEAST_WATCH_TIMEOUT_S = 1.0
"""With a shorter timeout, a slow Redis would never answer in time."""


class RedisStorage(ServerStorage):
    """The storage in the Redis at a URL (address.py)."""

    def __init__(self, url: str, *, allow_volatile: bool = False) -> None:
        """Does not connect yet. Raises StorageUnusable."""
        self._address = parse_redis_url(url)
        self._client = RedisClient(self._address)
        self._keys = Keys.of(self._address.prefix)
        self._watcher: RedisClient | None = None  # polls the meta; None before the first poll
        names = JournalNames(
            url=self._address.url,
            log=self._keys.log,
            entry="entry {}-0",
            snapshots=self._keys.snapshots,
            blobs=self._keys.blobs,
            mend=MEND,
            remedy=REMEDY,
        )
        super().__init__(names, allow_volatile)

    # -- reading -----------------------------------------------------------------------------

    def snapshots(self) -> list[int]:
        self._meta()  # NewerFormat
        return self._list_snapshots(self._client.run("HKEYS", self._keys.snapshots))

    def blobs(self) -> list[str]:
        self._meta()  # NewerFormat
        return [name.decode() for name in self._client.run("HKEYS", self._keys.blobs)]

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

    def close(self) -> None:
        self._client.close()
        if self._watcher is not None:
            self._watcher.close()

    def _meta(self) -> RedisMeta | None:
        return self._parse(self._client.run("HGETALL", self._keys.meta))

    def _look(self, lease_ms: int) -> RedisMeta | None:
        if self._watcher is None:
            # A short timeout, because each missing reply restarts the watch.
            timeout_s = max(LEAST_WATCH_TIMEOUT_S, lease_ms / 2000)
            self._watcher = RedisClient(self._address, timeout_s=timeout_s)
        return self._parse(self._watcher.run("HGETALL", self._keys.meta))

    def _is_connected(self, token: str) -> bool:
        try:
            clients: bytes = (self._watcher or self._client).run("CLIENT", "LIST")
        except Away:
            raise
        except StorageUnusable:  # this user may not ask
            return True
        return f" name={connection_name(token)} ".encode() in clients

    def _get_snapshot(self, sequence: int) -> bytes | None:
        framed: bytes | None = self._client.run("HGET", self._keys.snapshots, sequence)
        return framed

    def _get_blob(self, name: str) -> bytes | None:
        data: bytes | None = self._client.run("HGET", self._keys.blobs, name)
        return data

    def _fetch(self, sequence: int, count: int) -> tuple[RedisMeta | None, list[Entry]]:
        reply, entries = self._client.run_together(
            ("HGETALL", self._keys.meta),
            ("XRANGE", self._keys.log, sequence, "+", "COUNT", count),
        )
        return self._parse(reply), [_entry(*entry) for entry in entries]

    def _parse(self, reply: list[bytes]) -> RedisMeta | None:
        return parse_meta(reply, f"{self.url}: {self._keys.meta}")

    def _list_snapshots(self, fields: list[bytes]) -> list[int]:
        return sorted(int(field) for field in fields if field.isdigit())

    def _sizes(self, key: str) -> list[int]:
        fields = self._client.run("HKEYS", key)
        return self._client.run_together(*(("HSTRLEN", key, field) for field in fields))

    def _check_end(self) -> RedisMeta | None:
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
        if entries != meta.entries:
            raise Corrupt(
                f"{self._names.where()}: has {entries} entries, and {meta.entries} were written; "
                f"{MEND}"
            )
        ahead = max(self._list_snapshots(snapshots), default=0)
        self._check_newest(meta, _entry(*newest[0]) if newest else None, ahead)
        return meta

    # -- writing -----------------------------------------------------------------------------

    def _find_volatile(self) -> list[str]:
        return find_volatile(self._client)

    def _begin_term(
        self, seen: Meta | None, token: str, owner: str, lease_ms: int, place: str, repair: bool
    ) -> int | None:
        expected: tuple[Any, ...] = ("",) * 5
        if seen:
            expected = seen.term, seen.token, seen.beat, seen.last, seen.condemned
        arguments = (*expected, token, owner, place, lease_ms, "repair" if repair else "write")
        result = self._client.run_script(OPEN, self._keys, arguments)
        return None if result == [b"changed"] else result[1]

    def _make_writer(self, term: int, token: str, last: int, lease_ms: int) -> RedisWriter:
        return RedisWriter(
            self._address, self._keys, term, token, last, lease_ms, self._inspect_again
        )

    def _lose(self, term: int, last: int, what: str) -> str:
        result = self._client.run_script(LOSE, self._keys, (term, "", last, what))
        return "" if result == [b"ok"] else result[1].decode()

    def cut(self, after: int, owner: str) -> str:
        meta = self._meta_for_repair()
        keys = self._keys
        if meta is None and not self._client.run("EXISTS", keys.log, keys.snapshots, keys.blobs):
            raise Missing(f"{self.url}: there is no log to cut")
        term, token = self._begin(meta, owner, LEASE_MS, "", repair=True)
        first = meta.first if meta else self._first_of_log()
        last, last_term = self._find_cut(first, after)
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

    def _first_of_log(self) -> int:
        for identity, fields in self._client.run("XRANGE", self._keys.log, "-", "+", "COUNT", 1):
            try:
                return decode_entry(_entry(identity, fields), self._names).first_sequence
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


def _entry(identity: bytes, fields: list[bytes]) -> Entry:
    return Entry(f"entry {identity.decode()}", fields[-1])
