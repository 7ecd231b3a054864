"""What storages on a server do alike: reading the log, becoming its writer, and cutting it."""

from __future__ import annotations

import logging
import secrets
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, ClassVar

from .base import LEASE_MS, REGISTER, Extent, Record, Storage, is_blob
from .batches import records_above
from .errors import Corrupt, Locked, Missing, Volatile
from .server_log import Cut, Entry, JournalNames, LogScan, Meta, find_cut, find_loss
from .server_writer import ServerWriter
from .tfrecord import unframe
from .writer_watch import WriterWatch

log = logging.getLogger(__name__)

LEAST_WATCH_TIMEOUT_S = 1.0
"""With a shorter timeout, a slow server would never answer in time."""


class ServerStorage(Storage):
    """A storage whose log has a `Meta`. A subclass says how its server is asked."""

    writer_type: ClassVar[type[ServerWriter]]

    def __init__(
        self, address: Any, names: JournalNames, connect: Callable[..., Any], allow_volatile: bool
    ) -> None:
        """`connect` makes a client of the server. `open_writer` refuses a server whose settings can
        lose acknowledged records, unless `allow_volatile`.
        """
        self.url = names.url
        self._address = address
        self._names = names
        self._connect = connect
        self._client = connect()
        self._watcher: Any = None  # a client that polls the meta; None before the first poll
        self._allow_volatile = allow_volatile
        self._volatile: list[str] | None = None  # _find_volatile's last result
        self._watch = WriterWatch(self._is_connected)
        # The latest term that was read, and a record that was acknowledged by then.
        self._acknowledged = (0, 0)

    # -- what the server does ------------------------------------------------------------------

    @abstractmethod
    def _meta(self, client: Any) -> Meta | None:
        """The meta; None if there is no journal. Raises Corrupt, NewerFormat."""

    @abstractmethod
    def _is_connected(self, token: str) -> bool:
        """Whether the server has a connection of this writer, or cannot say so.

        Raises StorageUnavailable.
        """

    @abstractmethod
    def _fetch(self, sequence: int, count: int) -> tuple[Meta | None, Sequence[Entry]]:
        """See `server_log.Fetch`."""

    @abstractmethod
    def _get(self, table: str, name: int | str) -> bytes | None:
        """A snapshot or a blob, by its table "snapshots" or "blobs"."""

    @abstractmethod
    def _check_end(self) -> Meta | None:
        """The meta; checks that the log and the snapshots fit it. Raises Corrupt."""

    @abstractmethod
    def _find_volatile(self) -> list[str]:
        """Describe how acknowledged records can be lost, each with its remedy.

        Raises StorageUnusable if this server cannot keep a journal at all.
        """

    @abstractmethod
    def _begin_term(
        self, seen: Meta | None, token: str, owner: str, lease_ms: int, place: str, repair: bool
    ) -> int | None:
        """Begin the next term, and return it; None if the meta is no longer as it was `seen`.

        Afterwards nobody can append in the previous term. A `repair` needs no meta.
        """

    @abstractmethod
    def _cut(self, cut: Cut, term: int, token: str, new_term: int) -> str | None:
        """Move what `cut` does not leave aside, undo `condemn`, and set the meta's term to
        `new_term`.

        Returns what was moved where, for the message; None if the meta no longer has the term and
        token.
        """

    # -- reading -------------------------------------------------------------------------------

    def read(self, after: int = 0) -> Iterator[Record]:
        scan = LogScan(self._fetch, self._names, after)
        for batch in scan:
            yield from records_above(batch, after)
        self._acknowledged = max(self._acknowledged, (scan.term, scan.acknowledged))

    def first_sequence(self) -> int:
        meta = self._meta(self._client)
        return meta.first if meta else 1

    def extent(self) -> Extent:
        meta = self._check_end()
        return Extent(meta.first, meta.last) if meta else Extent(1, 0)

    def condemned(self) -> str:
        meta = self._meta(self._client)
        return meta.condemned if meta else ""

    def read_snapshot(self, sequence: int) -> bytes:
        where = f"{self.url}: {self._names.snapshots}: {sequence}"
        if (framed := self._get("snapshots", sequence)) is None:
            raise Missing(f"{where}: there is no such snapshot")
        if (data := unframe(framed)) is None:
            raise Corrupt(f"{where}: the snapshot's checksum does not match")
        return data

    def read_blob(self, name: str) -> bytes:
        where = f"{self.url}: {self._names.blobs}: {name}"
        if (data := self._get("blobs", name)) is None:
            raise Missing(f"{where}: there is no such blob; {REGISTER}")
        if not is_blob(name, data):
            raise Corrupt(f"{where}: the blob's content does not match its name; {REGISTER}")
        return data

    def close(self) -> None:
        self._client.close()
        if self._watcher is not None:
            self._watcher.close()

    # -- writing -------------------------------------------------------------------------------

    def open_writer(self, owner: str, *, lease_ms: int = LEASE_MS, place: str = "") -> ServerWriter:
        if self._volatile is None:  # so that a standby reports it at its start
            self._inspect()
        meta = self._meta_of_free_place(place, lease_ms)
        if meta and meta.condemned:
            raise Corrupt(f"{self.url}: {meta.condemned}; {self._names.remedy}")
        self._inspect()  # again: the server may have been restarted since
        self._check_end()
        term, token = self._begin(meta, owner, lease_ms, place)
        last = meta.last if meta else 0
        writer = self.writer_type(self._address, term, token, last, lease_ms, self._connect)
        try:
            writer.confirm()
        except BaseException:
            writer.close()
            raise
        return writer

    def _inspect(self) -> None:
        """Refuse settings that can lose records, unless that is allowed. Raises StorageUnusable."""
        found = self._find_volatile()
        message = f"{self.url} can lose acknowledged records: {'; '.join(found)}"
        if found and not self._allow_volatile:
            raise Volatile(f"{message}. Mend that, or accept it with --allow-volatile")
        if found and found != self._volatile:
            log.warning("%s. That was allowed", message)
        self._volatile = found

    def _meta_of_free_place(self, place: str, lease_ms: int = LEASE_MS) -> Meta | None:
        """The meta, if its writer has closed or ended, or its lease expired. Raises Locked."""
        if self._watcher is None:
            # A short timeout, because each missing reply restarts the watch.
            timeout_s = max(LEAST_WATCH_TIMEOUT_S, lease_ms / 2000)
            self._watcher = self._connect(timeout_s=timeout_s)
        with self._watch.looking():
            meta = self._meta(self._watcher)
        lose = partial(self.writer_type.lose, self._client)
        if reason := find_loss(meta, *self._acknowledged, partial(self._meta, self._client), lose):
            raise Corrupt(f"{self.url}: {reason}; {self._names.remedy}")
        if meta is None or not meta.owner or (place and meta.place == place):
            return meta
        if self._watch.may_displace(meta, self.listens):
            return meta
        what = f"{self.url} is in use by {meta.owner}; stop that first"
        raise Locked(what, meta.lease_ms, meta.owner)

    def _begin(
        self, meta: Meta | None, owner: str, lease_ms: int, place: str, *, repair: bool = False
    ) -> tuple[int, str]:
        """Begin a term, if the meta is still the same; return the term and the writer's token."""
        token = secrets.token_hex(8)
        owner = owner or "somebody"  # "" in the meta means no writer
        if (term := self._begin_term(meta, token, owner, lease_ms, place, repair)) is None:
            raise Locked(f"{self.url} is in use: another writer was faster, or is alive")
        return term, token

    def cut(self, after: int, owner: str) -> str:
        try:
            meta = self._meta_of_free_place("")
        except Corrupt:
            meta = self._meta(self._client)  # condemned now; raises if it cannot be repaired
        term, token = self._begin(meta, owner, LEASE_MS, "", repair=True)
        cut = find_cut(self._fetch, self._names, meta, after)
        if (moved := self._cut(cut, term, token, max(term, cut.term + 1))) is None:
            raise Locked(f"{self.url}: another writer has begun meanwhile; stop that first")
        self._acknowledged = (0, 0)
        return f"the log ends at record {cut.last} now{moved}"
