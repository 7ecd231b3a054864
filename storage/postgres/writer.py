"""The writer of a storage in PostgreSQL: each change is one statement, which compares the term."""

from __future__ import annotations

from typing import Any

from ..base import refuse_trim
from ..server_log import JournalPartMissing
from ..server_writer import Change, Seen, ServerWriter
from .client import PostgresClient
from .statements import CLOSE, PASSED, STATEMENTS
from .tables import META, REMEDY, lose, parse_meta

_SEEN = (
    f"SELECT {META}, (SELECT max(l.last) FROM {{s}}.log l), "
    "(SELECT l.batch FROM {s}.log l WHERE l.last = %(last)s) FROM {s}.meta m"
)


class PostgresWriter(ServerWriter):
    """The writer of a PostgresStorage."""

    server = "PostgreSQL"
    remedy = REMEDY
    lose = staticmethod(lose)

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

    def _try(self, client: PostgresClient, change: Change, values: dict[str, Any]) -> bool:
        mine = {"term": self.term, "token": self._token, "acknowledged": self.last_sequence}
        ((found,),) = client.run(STATEMENTS[change], **mine, **values)
        return bool(found)

    def _see(self, client: PostgresClient, last: int) -> Seen:
        try:
            rows = client.run(_SEEN, last=last)
        except JournalPartMissing:
            rows = []
        meta = parse_meta(client, rows[0]) if rows else None
        if meta is None:
            return Seen(None, "", None)
        ends, stored = rows[0][-2:]
        damage = ""
        if (ends or meta.first - 1) != meta.last:
            damage = f"the log ends at record {ends}, and record {meta.last} was appended"
        return Seen(meta, damage, stored)
