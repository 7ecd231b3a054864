"""The writer of a storage in Redis.

Each change is one script that compares the term first, so a displaced writer changes nothing.
While Redis is unreachable, the writer retries appends and blobs. The scripts are idempotent: a
retry recognises an earlier try whose reply was lost.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import tenacity

from ..base import Writer, blob_name
from ..batches import encode_batch
from ..errors import (
    AppendFailed,
    Away,
    Corrupt,
    Fenced,
    OutOfSequence,
    StorageError,
    StorageUnusable,
)
from ..tfrecord import frame
from .address import RedisAddress
from .client import RedisClient, Script
from .log import Keys
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

log = logging.getLogger(__name__)

INSPECT_S = 60.0
CONFIRM_S = 5.0  # how long a new writer waits for confirmation; a candidate leader retries

CONDEMNED = (
    "restore Redis's data from a backup that has them, or accept their loss: "
    "forebay journal repair --truncate-corrupt"
)


class RedisWriter(Writer):
    """The writer of a RedisStorage.

    In addition to `Writer`'s errors, each method raises Corrupt if Redis lost acknowledged records.
    `close` may be called while another thread appends; it ends that thread's retries.
    """

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
        """`renew` calls `inspect` every INSPECT_S, to check Redis's settings."""
        self.term = term
        self.last_sequence = last_sequence
        self.lease_ms = lease_ms
        self._client = RedisClient(address)
        # Half the lease, so that a hanging connection leaves time for a retry.
        self._renewals = RedisClient(address, timeout_s=lease_ms / 2000)
        self._keys = keys
        self._token = token
        self._url = address.url
        self._inspect = inspect
        self._inspect_at_s = time.monotonic() + INSPECT_S
        self._failed = ""  # why no append can follow
        self._closed = threading.Event()

    def confirm(self) -> None:
        """Wait until all earlier writes are as durable as the URL asks. Raises Away."""
        if self._client.confirmations:
            self._run_patiently(CONFIRM, patience_s=CONFIRM_S)

    def append(self, records: Sequence[bytes]) -> int:
        self._check_open()
        if self._failed:
            raise AppendFailed(f"an earlier append failed: {self._failed}")
        if not records:
            return self.last_sequence
        last = self.last_sequence + len(records)
        batch = encode_batch(self.term, self.last_sequence + 1, records)
        self._failed = "it was interrupted"  # until it is known to be durable
        try:
            self._run_patiently(APPEND, last, batch)
        except StorageUnusable as error:
            self._failed = str(error)
            raise AppendFailed(f"an append was given up: {error}") from error
        except (Fenced, Corrupt):
            self._failed = ""  # the script repeats this error each time
            raise
        self._failed = ""
        self.last_sequence = last
        return last

    def renew(self) -> None:
        self._check_open()
        self._send(self._renewals, RENEW)
        if time.monotonic() >= self._inspect_at_s:
            self._inspect_at_s = time.monotonic() + INSPECT_S
            with suppress(StorageUnusable):  # Redis is unreachable; the next inspection suffices
                self._inspect()

    def condemn(self, reason: str) -> None:
        self._run(CONDEMN, reason)
        self._failed = reason

    def write_snapshot(self, sequence: int, data: bytes) -> None:
        self._check_open()
        if not 1 <= sequence <= self.last_sequence:
            raise OutOfSequence(
                f"a snapshot at {sequence} does not fit a log that ends at {self.last_sequence}"
            )
        self._run(WRITE_SNAPSHOT, sequence, frame(data))

    def delete_snapshot(self, sequence: int) -> None:
        self._run(DELETE_SNAPSHOT, sequence)

    def trim(self, before: int) -> None:
        self._run(TRIM, before)

    def write_blob(self, data: bytes, mark: str = "") -> str:
        name = blob_name(data, mark)
        self._run_patiently(WRITE_BLOB, name, data)
        return name

    def delete_blob(self, name: str) -> None:
        self._run(DELETE_BLOB, name)

    def close(self) -> None:
        if self._closed.is_set():
            return
        self._closed.set()
        try:
            self._client.run_script(CLOSE, self._keys, (self.term, self._token))
        except StorageError as error:
            log.warning("the next writer must wait until this one's lease expires: %s", error)
        for client in (self._client, self._renewals):
            client.close()

    def _run_patiently(self, script: Script, *args: Any, patience_s: float = math.inf) -> None:
        """Retry an idempotent script until Redis answers, for `retry_s` or `patience_s` at most."""
        retry_s = min(self._client.address.retry_s, patience_s)
        self._check_open()
        try:
            self._send(self._client, script, *args)
            return
        except Away as error:
            log.warning("waiting for Redis, for up to %g s: %s", retry_s, error)
        retrying = tenacity.Retrying(
            retry=tenacity.retry_if_exception_type(Away),
            wait=tenacity.wait_exponential(0.02, max=0.5) + tenacity.wait_random(0, 0.1),
            stop=tenacity.stop_after_delay(retry_s) | tenacity.stop_when_event_set(self._closed),
            sleep=tenacity.sleep_using_event(self._closed),
            reraise=True,
        )
        retrying(self._send, self._client, script, *args)
        log.info("%s: Redis is back; nothing was lost, and the journal goes on", self._url)

    def _run(self, script: Script, *args: Any) -> None:
        self._check_open()
        self._send(self._client, script, *args)

    def _send(self, client: RedisClient, script: Script, *args: Any) -> None:
        arguments = (self.term, self._token, self.last_sequence, *args)
        result = client.run_script(script, self._keys, arguments, confirm=script is not RENEW)
        match result:
            case [b"ok"]:
                return
            case [b"fenced"]:
                raise Fenced(
                    f"{self._url}: another writer has taken over from term {self.term}; this one "
                    "must stop"
                )
            case [b"corrupt", bytes() as reason]:
                raise Corrupt(f"{self._url}: {reason.decode()}; {CONDEMNED}")
            case [b"no snapshot", newest]:
                raise OutOfSequence(
                    f"{self._url}: no trimming before {args[0]}: the newest snapshot is at {newest}"
                )
            case [b"overtaken"]:
                raise StorageUnusable(
                    f"{self._url}: the log has records behind {self.last_sequence} that this "
                    "writer does not know to be its own; restart the dispatcher, and it reads them"
                )
        raise StorageUnusable(f"{self._url}: a script returned {result!r}")

    def _check_open(self) -> None:
        if self._closed.is_set():
            raise Fenced(f"{self._url}: the writer of term {self.term} gave up its place")
