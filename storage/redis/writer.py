"""The writer of a storage in Redis: each change is one script, which compares the term first."""

from __future__ import annotations

from typing import Any

from ..base import refuse_trim
from ..server_log import Meta
from ..server_writer import CONFIRM_S, Change, Seen, ServerWriter
from .client import RedisClient
from .log import REMEDY, Keys, parse_meta
from .scripts import CLOSE, LOSE, SCRIPTS


def lose(client: RedisClient, seen: Meta | None, term: int, what: str) -> str:
    """See ServerWriter."""
    keys = Keys.of(client.address.prefix)
    reason = f"acknowledged records are missing: {what}"
    expected = (seen.term, seen.token, seen.last) if seen else ("",) * 3
    return reason if client.run_script(LOSE, keys, (*expected, term, reason)) else ""


class RedisWriter(ServerWriter):
    """The writer of a RedisStorage."""

    server = "Redis"
    remedy = REMEDY
    lose = staticmethod(lose)

    @property
    def _keys(self) -> Keys:
        return Keys.of(self._client.address.prefix)

    def confirm(self) -> None:
        if self._client.confirmations:
            self._run_patiently(lambda: self._send(Change.CONFIRM), CONFIRM_S)

    def _leave(self) -> None:
        self._client.run_script(CLOSE, self._keys, (self.term, self._token))

    def _try(self, client: RedisClient, change: Change, values: dict[str, Any]) -> bool:
        arguments = (self.term, self._token, self.last_sequence, *values.values())
        confirm = change is not Change.BEAT
        result = client.run_script(SCRIPTS[change], self._keys, arguments, confirm=confirm)
        if isinstance(result, list):
            raise refuse_trim(values["before"], result[1])
        return bool(result)

    def _see(self, client: RedisClient, last: int) -> Seen:
        keys = self._keys
        reply, kept, entries = client.run_together(
            ("HGETALL", keys.meta), ("XLEN", keys.log), ("XRANGE", keys.log, last, last)
        )
        meta = parse_meta(reply, f"{self._url}: {keys.meta}")
        damage = ""
        if meta and kept != meta.entries:
            damage = f"the log has {kept} entries, and {meta.entries} were written"
        return Seen(meta, damage, entries[0][1][-1] if entries else None)
