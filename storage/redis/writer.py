"""The writer of a storage in Redis: each change is one script, which compares the term first."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..errors import Corrupt, OutOfSequence, StorageUnusable
from ..server_writer import CONFIRM_S, ServerWriter
from .address import RedisAddress
from .client import RedisClient, Script
from .log import REMEDY, Keys
from .scripts import (
    APPEND,
    CLOSE,
    CONDEMN,
    CONFIRM,
    DELETE_BLOB,
    DELETE_SNAPSHOT,
    RENEW,
    TRIM,
    WRITE_BLOB,
    WRITE_SNAPSHOT,
)


def connection_name(token: str) -> str:
    """The name of all connections of the writer with this token."""
    return f"forebay-{token}"


class RedisWriter(ServerWriter):
    """The writer of a RedisStorage."""

    server = "Redis"

    def __init__(
        self,
        address: RedisAddress,
        keys: Keys,
        term: int,
        token: str,
        last_sequence: int,
        lease_ms: int,
        inspect: Callable[[], None],
    ) -> None:
        """`renew` calls `inspect` now and then, to check Redis's settings."""
        super().__init__(address.url, term, last_sequence, lease_ms, address.retry_s, inspect)
        name = connection_name(token)
        self._client = RedisClient(address, name=name)
        # Half the lease, so that a hanging connection leaves time for a retry.
        self._renewals = RedisClient(address, timeout_s=lease_ms / 2000, name=name)
        self._keys = keys
        self._token = token

    def confirm(self) -> None:
        if self._client.confirmations:
            self._run_patiently(lambda: self._send(CONFIRM), CONFIRM_S)

    def _append(self, last: int, batch: bytes) -> None:
        self._send(APPEND, last, batch)

    def _beat(self) -> None:
        self._send(RENEW, client=self._renewals)

    def _condemn(self, reason: str) -> None:
        self._send(CONDEMN, reason)

    def _write_snapshot(self, sequence: int, framed: bytes) -> None:
        self._send(WRITE_SNAPSHOT, sequence, framed)

    def _delete_snapshot(self, sequence: int) -> None:
        self._send(DELETE_SNAPSHOT, sequence)

    def _trim(self, before: int) -> None:
        self._send(TRIM, before)

    def _write_blob(self, name: str, data: bytes) -> None:
        self._send(WRITE_BLOB, name, data)

    def _delete_blob(self, name: str) -> None:
        self._send(DELETE_BLOB, name)

    def _leave(self) -> None:
        self._client.run_script(CLOSE, self._keys, (self.term, self._token))

    def _disconnect(self) -> None:
        for client in (self._client, self._renewals):
            client.close()

    def _send(self, script: Script, *args: Any, client: RedisClient | None = None) -> None:
        arguments = (self.term, self._token, self.last_sequence, *args)
        result = (client or self._client).run_script(
            script, self._keys, arguments, confirm=script is not RENEW
        )
        match result:
            case [b"ok"]:
                return
            case [b"fenced"]:
                raise self._fenced()
            case [b"corrupt", bytes() as reason]:
                raise Corrupt(f"{self._url}: {reason.decode()}; {REMEDY}")
            case [b"no snapshot", newest]:
                raise OutOfSequence(
                    f"{self._url}: no trimming before {args[0]}: the newest snapshot is at {newest}"
                )
            case [b"overtaken"]:
                raise self._overtaken()
        raise StorageUnusable(f"{self._url}: a script returned {result!r}")
