"""The writer of a storage in Redis: each change is one script, which compares the term first."""

from __future__ import annotations

from typing import Any

from ..base import refuse_trim
from ..errors import Corrupt, StorageUnusable
from ..server_writer import CONFIRM_S, Change, ServerWriter
from .log import REMEDY, Keys
from .scripts import CLOSE, SCRIPTS


class RedisWriter(ServerWriter):
    """The writer of a RedisStorage."""

    server = "Redis"

    def confirm(self) -> None:
        if self._client.confirmations:
            self._run_patiently(lambda: self._send(Change.CONFIRM), CONFIRM_S)

    def _leave(self) -> None:
        self._client.run_script(CLOSE, self._keys, (self.term, self._token))

    @property
    def _keys(self) -> Keys:
        return Keys.of(self._client.address.prefix)

    def _send(self, change: Change, **values: Any) -> None:
        arguments = (self.term, self._token, self.last_sequence, *values.values())
        is_beat = change is Change.BEAT
        client = self._renewals if is_beat else self._client
        result = client.run_script(SCRIPTS[change], self._keys, arguments, confirm=not is_beat)
        match result:
            case [b"ok"]:
                return
            case [b"fenced"]:
                raise self._fenced()
            case [b"corrupt", bytes() as reason]:
                raise Corrupt(f"{self._url}: {reason.decode()}; {REMEDY}")
            case [b"no snapshot", newest]:
                raise refuse_trim(values["before"], newest)
            case [b"overtaken"]:
                raise self._overtaken()
        raise StorageUnusable(f"{self._url}: a script returned {result!r}")
