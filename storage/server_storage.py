"""What storages on a server do alike: reading the log, and becoming its writer."""

from __future__ import annotations

import logging
import secrets
from abc import abstractmethod
from collections.abc import Iterator, Sequence

from .base import LEASE_MS, REGISTER, Extent, Record, Storage, is_blob
from .batches import records_above
from .errors import Corrupt, Locked, Missing, Volatile
from .server_log import Entry, JournalNames, LogScan, Meta, decode_entry
from .server_writer import ServerWriter
from .tfrecord import unframe
from .writer_watch import WriterWatch

log = logging.getLogger(__name__)


class ServerStorage(Storage):
    """A storage whose log has a `Meta`. A subclass says how its server is asked."""

    def __init__(self, names: JournalNames, allow_volatile: bool) -> None:
        """`open_writer` refuses a server whose settings can lose acknowledged records, unless
        `allow_volatile`.
        """
        self.url = names.url
        self._allow_volatile = allow_volatile
        self._volatile: list[str] | None = None  # _find_volatile's last result
        self._names = names
        self._watch = WriterWatch(self._is_connected)
        # The latest term that was read, and a record that was acknowledged by then.
        self._acknowledged = (0, 0)

    # -- what the server does ------------------------------------------------------------------

    @abstractmethod
    def _meta(self) -> Meta | None:
        """The meta; None if there is no journal. Raises Corrupt, NewerFormat."""

    @abstractmethod
    def _look(self, lease_ms: int) -> Meta | None:
        """The same on a connection of its own, which does not wait for long."""

    @abstractmethod
    def _is_connected(self, token: str) -> bool:
        """Whether the server has a connection of this writer, or cannot say so. Raises Away."""

    @abstractmethod
    def _fetch(self, sequence: int, count: int) -> tuple[Meta | None, Sequence[Entry]]:
        """See `server_log.Fetch`."""

    @abstractmethod
    def _get_snapshot(self, sequence: int) -> bytes | None: ...

    @abstractmethod
    def _get_blob(self, name: str) -> bytes | None: ...

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
    def _make_writer(self, term: int, token: str, last: int, lease_ms: int) -> ServerWriter:
        """The writer of a term that has begun."""

    @abstractmethod
    def _lose(self, term: int, last: int, what: str) -> str:
        """Condemn the log, whoever is its writer, and return the reason.

        "" if the log has the record `last`: the meta may have been seen on a server that lags
        behind. Also "" if a repair later than `term` has removed records on purpose.
        """

    # -- reading -------------------------------------------------------------------------------

    def read(self, after: int = 0) -> Iterator[Record]:
        scan = LogScan(self._fetch, self._names, after)
        for batch in scan:
            yield from records_above(batch, after)
        self._acknowledged = max(self._acknowledged, (scan.term, scan.acknowledged))

    def first_sequence(self) -> int:
        meta = self._meta()
        return meta.first if meta else 1

    def extent(self) -> Extent:
        meta = self._check_end()
        return Extent(meta.first, meta.last) if meta else Extent(1, 0)

    def condemned(self) -> str:
        meta = self._meta()
        return meta.condemned if meta else ""

    def read_snapshot(self, sequence: int) -> bytes:
        where = f"{self.url}: {self._names.snapshots}: {sequence}"
        framed = self._get_snapshot(sequence)
        if framed is None:
            raise Missing(f"{where}: there is no such snapshot")
        data = unframe(framed)
        if data is None:
            raise Corrupt(f"{where}: the snapshot's checksum does not match")
        return data

    def read_blob(self, name: str) -> bytes:
        where = f"{self.url}: {self._names.blobs}: {name}"
        data = self._get_blob(name)
        if data is None:
            raise Missing(f"{where}: there is no such blob; {REGISTER}")
        if not is_blob(name, data):
            raise Corrupt(f"{where}: the blob's content does not match its name; {REGISTER}")
        return data

    def _check_newest(self, meta: Meta, newest: Entry | None, ahead: int) -> None:
        """Check that the log's newest entry, and the newest snapshot, fit the meta."""
        ends = meta.first - 1
        if newest is not None:
            batch = decode_entry(newest, self._names)
            ends = batch.first_sequence + len(batch.records) - 1
        if ends != meta.last or ahead > ends:
            raise Corrupt(
                f"{self._names.where()}: ends at record {ends}, and there was a record "
                f"{max(meta.last, ahead)}; {self._names.mend}"
            )

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
        writer = self._make_writer(term, token, meta.last if meta else 0, lease_ms)
        try:
            writer.confirm()
        except BaseException:
            writer.close()
            raise
        return writer

    def _inspect(self) -> None:
        found = self._find_volatile()
        message = f"{self.url} can lose acknowledged records: {'; '.join(found)}"
        if found and not self._allow_volatile:
            raise Volatile(f"{message}. Mend that, or accept it with --allow-volatile")
        if found and found != self._volatile:
            log.warning("%s. That was allowed", message)
        self._volatile = found

    def _inspect_again(self) -> None:
        """Log it if the settings have changed for the worse. Raises StorageUnusable."""
        found = self._find_volatile()
        if found and found != self._volatile:
            log.error(
                "%s can lose acknowledged records since its settings were changed: %s",
                self.url, "; ".join(found),
            )  # fmt: skip
        self._volatile = found

    def _meta_of_free_place(self, place: str, lease_ms: int = LEASE_MS) -> Meta | None:
        """The meta, if its writer has closed or ended, or its lease expired. Raises Locked."""
        with self._watch.looking():
            meta = self._look(lease_ms)
        self._check_acknowledged(meta)
        if meta is None or not meta.owner or (place and meta.place == place):
            return meta
        if self._watch.may_displace(meta, self.listens):
            return meta
        what = f"{self.url} is in use by {meta.owner}; stop that first"
        raise Locked(what, meta.lease_ms, meta.owner)

    def _check_acknowledged(self, meta: Meta | None) -> None:
        term, last = self._acknowledged
        found = meta.last if meta else 0
        if found >= last or (meta and meta.cut_term > term):
            return
        what = f"record {last} was read in term {term}, and the log ends at record {found}"
        if reason := self._lose(term, last, what):
            raise Corrupt(f"{self.url}: {reason}; {self._names.remedy}")

    def _begin(
        self, meta: Meta | None, owner: str, lease_ms: int, place: str, *, repair: bool = False
    ) -> tuple[int, str]:
        """Begin a term, if the meta is still the same; return the term and the writer's token."""
        token = secrets.token_hex(8)
        owner = owner or "somebody"  # "" in the meta means no writer
        term = self._begin_term(meta, token, owner, lease_ms, place, repair)
        if term is None:
            raise Locked(f"{self.url} is in use: another writer was faster, or is alive")
        return term, token

    # -- repair --------------------------------------------------------------------------------

    def _meta_for_repair(self) -> Meta | None:
        try:
            return self._meta_of_free_place("")
        except Corrupt:
            return self._meta()  # condemned now; raises again if it cannot be repaired

    def _find_cut(self, first: int, after: int) -> tuple[int, int]:
        """The last record of the last whole batch up to `after`, and its term."""
        scan = LogScan(self._fetch, self._names, first - 1)
        last, term = first - 1, 0
        try:
            for batch in scan:
                if scan.sequence - 1 > after:
                    break
                last, term = scan.sequence - 1, batch.term
        except Corrupt:
            pass  # the damage is why we cut
        return last, term
