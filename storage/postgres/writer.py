"""The writer of a storage in PostgreSQL: each change is one statement, which compares the term."""

from __future__ import annotations

from typing import Any

from ..base import refuse_trim
from ..errors import Away, Corrupt, StorageError
from ..server_log import Meta
from ..server_writer import Change, ServerWriter
from .client import Absent, PostgresClient
from .statements import CLOSE, PASSED, STATEMENTS
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

    def trim(self, before: int) -> None:
        self._check_open()
        self._send(Change.BEAT)
        ((newest, first),) = self._client.run(
            "SELECT coalesce(max(sequence), 0), (SELECT first FROM {s}.meta) FROM {s}.snapshots"
        )
        if first is not None and before <= first:
            return
        if newest < before - 1:
            raise refuse_trim(before, newest)
        while (passed := self._client.run(PASSED, before=before)[0][0]) is not None:
            self._send(Change.TRIM, passed=passed)

    def _leave(self) -> None:
        self._client.run(CLOSE, term=self.term, token=self._token)

    def _send(self, change: Change, **values: Any) -> None:
        client = self._renewals if change is Change.BEAT else self._client
        for _ in range(TRIES):
            absent, found = None, 0
            try:
                ((found,),) = client.run(
                    STATEMENTS[change],
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
                change, values = Change.BEAT, {}
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
