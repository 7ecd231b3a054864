"""A storage in Redis: reading it, opening its writer, cutting it.

log.py lists the keys and reads the log, scripts.py changes it, and checks.py checks Redis's
settings.
"""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

from ..base import Holdings
from ..errors import Corrupt, Missing, StorageUnavailable, StorageUnusable
from ..server_log import Cut, Entry, JournalNames, Meta, check_newest
from ..server_storage import ServerStorage
from .address import parse_redis_url
from .checks import find_volatile
from .client import RedisClient, connection_name
from .log import MEND, REMEDY, Keys, RedisMeta, parse_meta
from .scripts import COPY, CUT, OPEN
from .writer import RedisWriter


class RedisStorage(ServerStorage):
    """The storage in the Redis at a URL (address.py)."""

    writer_type = RedisWriter

    def __init__(self, url: str, *, allow_volatile: bool = False) -> None:
        """Does not connect yet. Raises StorageUnusable."""
        address = parse_redis_url(url)
        self._keys = Keys.of(address.prefix)
        names = JournalNames(
            url=address.url,
            log=self._keys.log,
            entry="entry {}-0",
            snapshots=self._keys.snapshots,
            blobs=self._keys.blobs,
            mend=MEND,
            remedy=REMEDY,
        )
        super().__init__(address, names, partial(RedisClient, address), allow_volatile)

    # -- reading -----------------------------------------------------------------------------

    def snapshots(self) -> list[int]:
        self._meta(self._client)  # NewerFormat
        return _sequences(self._client.run("HKEYS", self._keys.snapshots))

    def blobs(self) -> list[str]:
        self._meta(self._client)  # NewerFormat
        return [name.decode() for name in self._client.run("HKEYS", self._keys.blobs)]

    def holdings(self) -> Holdings:
        entries, log_bytes = self._client.run_together(
            ("XLEN", self._keys.log), ("MEMORY", "USAGE", self._keys.log, "SAMPLES", 0)
        )
        snapshots, blobs = map(self._count, (self._keys.snapshots, self._keys.blobs))
        return Holdings(int(entries > 0), log_bytes or 0, 0, *snapshots, *blobs)

    def _meta(self, client: RedisClient) -> RedisMeta | None:
        return self._parse(client.run("HGETALL", self._keys.meta))

    def _is_connected(self, token: str) -> bool:
        try:
            clients: bytes = self._watcher.run("CLIENT", "LIST")
        except StorageUnavailable:
            raise
        except StorageUnusable:  # this user may not ask
            return True
        return f" name={connection_name(token)} ".encode() in clients

    def _get(self, table: str, name: int | str) -> bytes | None:
        data: bytes | None = self._client.run("HGET", getattr(self._keys, table), name)
        return data

    def _fetch(self, sequence: int, count: int) -> tuple[RedisMeta | None, list[Entry]]:
        reply, entries = self._client.run_together(
            ("HGETALL", self._keys.meta), ("XRANGE", self._keys.log, sequence, "+", "COUNT", count)
        )
        return self._parse(reply), [_entry(*entry) for entry in entries]

    def _parse(self, reply: list[bytes]) -> RedisMeta | None:
        return parse_meta(reply, f"{self.url}: {self._keys.meta}")

    def _count(self, key: str) -> tuple[int, int]:
        """How many fields a hash has, and their bytes."""
        fields = self._client.run("HKEYS", key)
        sizes = self._client.run_together(*(("HSTRLEN", key, field) for field in fields))
        return len(sizes), sum(sizes)

    def _check_end(self) -> RedisMeta | None:
        keys = self._keys
        reply, entries, newest, snapshots, others = self._client.run_together(
            ("HGETALL", keys.meta),
            ("XLEN", keys.log),
            ("XREVRANGE", keys.log, "+", "-", "COUNT", 1),
            ("HKEYS", keys.snapshots),
            ("EXISTS", keys.snapshots, keys.blobs),
        )
        if (meta := self._parse(reply)) is None:
            if entries or others:
                raise Corrupt(f"{self.url}: {keys.meta}: is missing, and others are not; {MEND}")
            return None
        if entries != meta.entries:
            raise Corrupt(
                f"{self._names.where()}: has {entries} entries, and {meta.entries} were written; "
                f"{MEND}"
            )
        ahead = max(_sequences(snapshots), default=0)
        check_newest(meta, _entry(*newest[0]) if newest else None, ahead, self._names)
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

    def cut(self, after: int, owner: str) -> str:
        if not self._client.run("EXISTS", *self._keys):
            raise Missing(f"{self.url}: there is no log to cut")
        return super().cut(after, owner)

    def _cut(self, cut: Cut, term: int, token: str, new_term: int) -> str | None:
        keys = self._keys
        exists, newest, last = self._client.run_together(
            ("EXISTS", keys.log),
            ("XREVRANGE", keys.log, "+", "-", "COUNT", 1),
            ("HGET", keys.meta, "last"),
        )
        ends = newest[0][0] if newest else b""
        whole = last == b"%d" % cut.last and ends in (b"", b"%d-0" % cut.last)
        aside = f"{self._address.prefix}:cut:{self._free_number()}"
        kept = f"{aside}:kept"
        moves = bool(exists) and not whole
        if moves:
            self._copy_log(kept, cut.last)
        result = self._client.run_script(
            CUT,
            (*keys, kept, *(f"{aside}:{name}" for name in ("meta", "log", "snapshots"))),
            (term, token, cut.first, cut.last, new_term, int(moves)),
            confirm=True,
        )
        if result != [b"ok"]:
            return None
        moved = f"; the log as it was, and all later snapshots, were moved to {aside}:…"
        return moved if moves else ""

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


def _sequences(fields: list[bytes]) -> list[int]:
    return sorted(int(field) for field in fields if field.isdigit())


def _entry(identity: bytes, fields: list[bytes]) -> Entry:
    return Entry(f"entry {identity.decode()}", fields[-1])
