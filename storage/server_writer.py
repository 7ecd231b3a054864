"""What writers of storages on a server do alike: check, wait while the server is away, give up.

Each change is one atomic step of the server that compares the term first, so a displaced writer
changes nothing. While the server is unreachable, the writer retries appends and blobs. The steps
are idempotent: a retry recognises an earlier try whose reply was lost.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress

import tenacity

from .base import Writer, blob_name
from .batches import encode_batch
from .errors import (
    AppendFailed,
    Away,
    Corrupt,
    Fenced,
    OutOfSequence,
    StorageError,
    StorageUnusable,
)
from .server_log import query_ms
from .tfrecord import frame

log = logging.getLogger(__name__)

INSPECT_S = 60.0
CONFIRM_S = 5.0  # how long a new writer waits for confirmation; a candidate leader retries


class ServerWriter(Writer):
    """The writer of a ServerStorage. A subclass says how its server makes each change.

    In addition to `Writer`'s errors, each method raises Corrupt if the server lost acknowledged
    records. `close` may be called while another thread appends; it ends that thread's retries.
    """

    server = ""  # the server's name, for the log

    def __init__(
        self,
        url: str,
        term: int,
        last_sequence: int,
        lease_ms: int,
        retry_s: float,
        inspect: Callable[[], None],
    ) -> None:
        """`renew` calls `inspect` every INSPECT_S, to check the server's settings."""
        self.term = term
        self.last_sequence = last_sequence
        self.lease_ms = lease_ms
        self._url = url
        self._retry_s = retry_s
        self._inspect = inspect
        self._inspect_at_s = time.monotonic() + INSPECT_S
        self._failed = ""  # why no append can follow
        self._closed = threading.Event()

    # -- what the server does: each may raise Fenced, Corrupt and StorageUnusable --------------

    def confirm(self) -> None:
        """Wait until all earlier writes are as durable as they have to be. Raises Away."""

    @abstractmethod
    def _append(self, last: int, batch: bytes) -> None:
        """Append the batch, whose last record is `last`; idempotent."""

    @abstractmethod
    def _beat(self) -> None:
        """Give a sign of life."""

    @abstractmethod
    def _condemn(self, reason: str) -> None: ...

    @abstractmethod
    def _write_snapshot(self, sequence: int, framed: bytes) -> None: ...

    @abstractmethod
    def _delete_snapshot(self, sequence: int) -> None: ...

    @abstractmethod
    def _trim(self, before: int) -> None: ...

    @abstractmethod
    def _write_blob(self, name: str, data: bytes) -> None: ...

    @abstractmethod
    def _delete_blob(self, name: str) -> None: ...

    @abstractmethod
    def _leave(self) -> None:
        """Note that there is no writer now, if this is still the writer."""

    @abstractmethod
    def _disconnect(self) -> None: ...

    # -- the interface -------------------------------------------------------------------------

    @property
    def query_ms(self) -> int:
        return query_ms(self.lease_ms)

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
            self._run_patiently(lambda: self._append(last, batch))
        except StorageUnusable as error:
            self._failed = str(error)
            raise AppendFailed(f"an append was given up: {error}") from error
        except (Fenced, Corrupt):
            self._failed = ""  # the server repeats this error each time
            raise
        self._failed = ""
        self.last_sequence = last
        return last

    def renew(self) -> None:
        self._check_open()
        self._beat()
        if time.monotonic() >= self._inspect_at_s:
            self._inspect_at_s = time.monotonic() + INSPECT_S
            with suppress(StorageUnusable):  # it is unreachable; the next inspection suffices
                self._inspect()

    def condemn(self, reason: str) -> None:
        self._check_open()
        self._condemn(reason)
        self._failed = reason

    def write_snapshot(self, sequence: int, data: bytes) -> None:
        self._check_open()
        if not 1 <= sequence <= self.last_sequence:
            raise OutOfSequence(
                f"a snapshot at {sequence} does not fit a log that ends at {self.last_sequence}"
            )
        self._write_snapshot(sequence, frame(data))

    def delete_snapshot(self, sequence: int) -> None:
        self._check_open()
        self._delete_snapshot(sequence)

    def trim(self, before: int) -> None:
        self._check_open()
        self._trim(before)

    def write_blob(self, data: bytes, mark: str = "") -> str:
        name = blob_name(data, mark)
        self._run_patiently(lambda: self._write_blob(name, data))
        return name

    def delete_blob(self, name: str) -> None:
        self._check_open()
        self._delete_blob(name)

    def close(self) -> None:
        if self._closed.is_set():
            return
        self._closed.set()
        try:
            self._leave()
        except StorageError as error:
            log.warning("the next writer must wait until this one's lease expires: %s", error)
        self._disconnect()

    def _run_patiently(self, call: Callable[[], None], patience_s: float = math.inf) -> None:
        """Retry an idempotent call until the server answers, for `retry_s` or `patience_s`."""
        retry_s = min(self._retry_s, patience_s)
        self._check_open()
        try:
            call()
            return
        except Away as error:
            log.warning("waiting for %s, for up to %g s: %s", self.server, retry_s, error)
        retrying = tenacity.Retrying(
            retry=tenacity.retry_if_exception_type(Away),
            wait=tenacity.wait_exponential(0.02, max=0.5) + tenacity.wait_random(0, 0.1),
            stop=tenacity.stop_after_delay(retry_s) | tenacity.stop_when_event_set(self._closed),
            sleep=tenacity.sleep_using_event(self._closed),
            reraise=True,
        )
        retrying(call)
        log.info(
            "%s: %s is back; nothing was lost, and the journal goes on", self._url, self.server
        )

    def _check_open(self) -> None:
        if self._closed.is_set():
            raise Fenced(f"{self._url}: the writer of term {self.term} gave up its place")

    def _fenced(self) -> Fenced:
        return Fenced(
            f"{self._url}: another writer has taken over from term {self.term}; this one must stop"
        )

    def _overtaken(self) -> StorageUnusable:
        return StorageUnusable(
            f"{self._url}: the log has records behind {self.last_sequence} that this writer does "
            "not know to be its own; restart the dispatcher, and it reads them"
        )
