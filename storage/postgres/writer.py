"""The writer of a storage in PostgreSQL: each change is one statement, which compares the term."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..errors import Away, Corrupt, OutOfSequence, StorageError
from ..server_log import Meta
from ..server_writer import ServerWriter
from .address import PostgresAddress
from .client import Absent, PostgresClient
from .statements import (
    APPEND,
    BEAT,
    CLOSE,
    CONDEMN_MINE,
    DELETE_BLOB,
    DELETE_SNAPSHOT,
    PASSED,
    TRIM,
    WRITE_BLOB,
    WRITE_SNAPSHOT,
)
from .tables import META, REMEDY, lose, parse_meta

TRIES = 50
"""How often a statement is tried that finds no row, although the meta is as it should be: the meta
changed while the statement ran."""
PAUSE_S = 0.01  # between these tries

_SEEN = (
    f"SELECT {META}, (SELECT max(l.last) FROM {{s}}.log l), "
    "(SELECT l.batch FROM {s}.log l WHERE l.last = %(last)s) FROM {s}.meta m"
)


class PostgresWriter(ServerWriter):
    """The writer of a PostgresStorage."""

    server = "PostgreSQL"

    def __init__(
        self,
        address: PostgresAddress,
        term: int,
        token: str,
        last_sequence: int,
        lease_ms: int,
        inspect: Callable[[], None],
    ) -> None:
        """`renew` calls `inspect` now and then, to check the server's settings."""
        super().__init__(address.url, term, last_sequence, lease_ms, address.retry_s, inspect)
        self._client = PostgresClient(address, token=token)
        # Half the lease, so that a hanging connection leaves time for a retry.
        self._renewals = PostgresClient(address, reply_s=lease_ms / 2000, token=token)
        self._token = token

    def _append(self, last: int, batch: bytes) -> None:
        self._send(self._client, APPEND, last=last, batch=batch)

    def _beat(self) -> None:
        self._send(self._renewals, BEAT)

    def _write_snapshot(self, sequence: int, framed: bytes) -> None:
        self._send(self._client, WRITE_SNAPSHOT, sequence=sequence, data=framed)

    def _delete_snapshot(self, sequence: int) -> None:
        self._send(self._client, DELETE_SNAPSHOT, sequence=sequence)

    def _write_blob(self, name: str, data: bytes) -> None:
        self._send(self._client, WRITE_BLOB, name=name, data=data)

    def _delete_blob(self, name: str) -> None:
        self._send(self._client, DELETE_BLOB, name=name)

    def _trim(self, before: int) -> None:
        self._send(self._client, BEAT)
        ((newest, first),) = self._client.run(
            "SELECT coalesce(max(sequence), 0), (SELECT first FROM {s}.meta) FROM {s}.snapshots"
        )
        if first is not None and before <= first:
            return
        if newest < before - 1:
            raise OutOfSequence(
                f"{self._url}: no trimming before {before}: the newest snapshot is at {newest}"
            )
        while (passed := self._client.run(PASSED, before=before)[0][0]) is not None:
            self._send(self._client, TRIM, passed=passed)

    def _condemn(self, reason: str) -> None:
        mine = {"term": self.term, "token": self._token}
        if not self._client.run(CONDEMN_MINE, reason=reason, **mine):
            try:
                self._check(self._client, {})
            except Corrupt:
                pass  # it is condemned already

    def _leave(self) -> None:
        self._client.run(CLOSE, term=self.term, token=self._token)

    def _disconnect(self) -> None:
        for client in (self._client, self._renewals):
            client.close()

    def _send(self, client: PostgresClient, statement: str, **values: Any) -> None:
        for _ in range(TRIES):
            absent, found = None, 0
            try:
                ((found,),) = client.run(
                    statement,
                    term=self.term,
                    token=self._token,
                    acknowledged=self.last_sequence,
                    **values,
                )
            except Absent as error:
                absent = error
            if found:
                return
            if self._check(client, values):
                # It is done. What follows it in the server's log is durable only after it.
                statement, values = BEAT, {}
            elif absent:
                raise absent
            else:
                self._closed.wait(PAUSE_S)
        raise Away(f"{self._url}: the journal's meta changes all the time")

    def _check(self, client: PostgresClient, values: dict[str, Any]) -> bool:
        """Whether an earlier try of the append of `values` was done.

        False if a statement may find its row now. Raises Fenced, Corrupt, StorageUnusable.
        """
        last, batch = values.get("last", 0), values.get("batch")
        # Read before the query: its result may lack an append that is acknowledged meanwhile.
        term, acknowledged = self.term, self.last_sequence
        try:
            rows = client.run(_SEEN, last=last)
        except Absent:
            rows = []
        meta = parse_meta(client, rows[0]) if rows else None
        known = f"record {acknowledged} was acknowledged in term {term}"
        if meta is None:
            raise self._lost(client, meta, f"{known}, and nothing is left")
        ends, stored = rows[0][-2:]
        if meta.condemned:
            raise Corrupt(f"{self._url}: {meta.condemned}; {REMEDY}")
        if meta.term > term:
            if meta.began < acknowledged and meta.cut_term <= term:
                what = f"{known}, and a later term began at record {meta.began}"
                raise self._lost(client, meta, what)
            raise self._fenced()
        if meta.term < term or meta.last < acknowledged:
            what = f"{known}, and the log ends at record {meta.last} of term {meta.term}"
            raise self._lost(client, meta, what)
        if meta.token != self._token:
            what = f"{known}, and another writer has begun that term again"
            raise self._lost(client, meta, what)
        if (ends or meta.first - 1) != meta.last:
            what = f"the log ends at record {ends}, and record {meta.last} was appended"
            raise self._lost(client, meta, what)
        if not meta.owner:
            raise self._fenced()
        if batch is None or meta.last == acknowledged:
            return False
        if meta.last != last:
            raise self._overtaken()
        if stored != batch:
            raise self._lost(client, meta, f"record {last} is not what was appended")
        return True

    def _lost(self, client: PostgresClient, meta: Meta | None, what: str) -> StorageError:
        """Condemn the log; the error that says so."""
        if reason := lose(client, self.term, what, meta):
            return Corrupt(f"{self._url}: {reason}; {REMEDY}")
        return Away(f"{self._url}: the journal's meta changed while it was looked at")
