"""What writers of storages on a server do alike: check, wait while the server is away, give up.

Each change is one atomic step of the server that compares the term first, so a displaced writer
changes nothing. While the server is unreachable, the writer retries appends and blobs. The steps
are idempotent: a retry recognises an earlier try whose reply was lost.

A step gets its writer's term, token and last acknowledged record. The token is random: if old data
comes back, two writers may have the same term, and the token tells them apart.

found on the server                              means                               outcome
-----------------------------------------------  ----------------------------------  ---------
condemned                                        somebody found records missing      corrupt
no meta, or an earlier term                      emptied, or older data came back    lost
our term, another token                          the same, and one more writer       lost
our term, last < acknowledged                    older data, of this very term       lost
our term, entries of the log are missing         somebody removed some of them       lost
our term, no owner                               we closed                           fenced
later term that began before what we know of     a failover lost it, then a takeover lost
later term                                       another has taken over              fenced
our term, last = acknowledged                    as it should be                     go on
append: last = our batch's, the same bytes       a retry whose first try was done    done
append: last > acknowledged, otherwise           a first try that arrives after its  overtaken
                                                 retry, and what followed that

An overtaken try changes nothing, and nobody waits for its outcome: TCP delivers it after a network
failure, on a connection that the writer has given up.

Who finds "lost" also condemns the log: no writer begins until a repair. A later term that a repair
has begun (`cut_term`) is not "lost", since a repair removes records on purpose.
"""

from __future__ import annotations

import logging
import math
import threading
from abc import abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress
from enum import Enum, auto
from typing import Any, NamedTuple

import tenacity

from .base import Writer, blob_name, check_snapshot_fits
from .batches import encode_batch
from .errors import AppendFailed, Corrupt, Fenced, StorageError, StorageUnavailable, StorageUnusable
from .server_log import JournalPartMissing, Meta, query_ms
from .tfrecord import frame

log = logging.getLogger(__name__)

CONFIRM_S = 5.0  # how long a new writer waits for confirmation; a candidate leader retries
TRIES = 50
"""How often a change is tried that finds another meta, although that is as it should be: it changed
meanwhile."""
PAUSE_S = 0.01  # between these tries


class Change(Enum):
    """What a writer has its server do, with the names of its values."""

    APPEND = auto()  # last: the batch's last record; batch: a frame
    BEAT = auto()  # a sign of life
    CONFIRM = auto()  # the same, once all earlier writes are as durable as they have to be
    CONDEMN = auto()  # reason
    WRITE_SNAPSHOT = auto()  # sequence; data: a frame
    DELETE_SNAPSHOT = auto()  # sequence
    TRIM = auto()  # before
    WRITE_BLOB = auto()  # name, data
    DELETE_BLOB = auto()  # name


class Seen(NamedTuple):
    """What a writer finds that may make no change, read atomically."""

    meta: Meta | None
    damage: str  # what entries of the log are missing; "" if it is as the meta says
    batch: bytes | None  # of the log, with the record that was asked for as its last


class ServerWriter(Writer):
    """The writer of a ServerStorage. A subclass says how its server makes each change.

    In addition to `Writer`'s errors, each method raises Corrupt if the server lost acknowledged
    records. `close` may be called while another thread appends; it ends that thread's retries.
    """

    server = ""  # the server's name, for the log
    remedy = ""  # for a condemned log
    lose: Callable[[Any, Meta | None, int, str], str]
    """By a client: condemn the log, whoever is its writer, in this term at least, and return the
    reason; "" if the meta is no longer as it was seen."""

    def __init__(
        self,
        address: Any,
        term: int,
        token: str,
        last_sequence: int,
        lease_ms: int,
        connect: Callable[..., Any],
    ) -> None:
        """`connect` makes a client of the server."""
        self.term = term
        self.last_sequence = last_sequence
        self.lease_ms = lease_ms
        self._url = address.url
        self._retry_s = address.retry_s
        self._token = token
        self._client = connect(token=token)
        # Half the lease, so that a hanging connection leaves time for a retry.
        self._renewals = connect(token=token, timeout_s=lease_ms / 2000)
        self._failed = ""  # why no append can follow
        self._closed = threading.Event()

    @abstractmethod
    def _try(self, client: Any, change: Change, values: dict[str, Any]) -> bool:
        """Have the server make the change in one atomic step, if the meta still has this writer's
        term and token, and all that it knows of; an append only behind the last record that it
        knows of. Returns whether it is made. Raises OutOfSequence, StorageUnusable.
        """

    @abstractmethod
    def _see(self, client: Any, last: int) -> Seen:
        """See `Seen`."""

    @abstractmethod
    def _leave(self) -> None:
        """Note that there is no writer now, if this is still the writer. Raises StorageError."""

    def confirm(self) -> None:
        """Wait until earlier writes are as durable as required. Raises StorageUnavailable."""

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
            self._run_patiently(lambda: self._send(Change.APPEND, last=last, batch=batch))
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
        self._send(Change.BEAT)

    def condemn(self, reason: str) -> None:
        self._check_open()
        with suppress(Corrupt):  # it is condemned already
            self._send(Change.CONDEMN, reason=reason)
        self._failed = reason

    def write_snapshot(self, sequence: int, data: bytes) -> None:
        self._check_open()
        check_snapshot_fits(sequence, self.last_sequence)
        self._send(Change.WRITE_SNAPSHOT, sequence=sequence, data=frame(data))

    def delete_snapshot(self, sequence: int) -> None:
        self._check_open()
        self._send(Change.DELETE_SNAPSHOT, sequence=sequence)

    def trim(self, before: int) -> None:
        self._check_open()
        self._send(Change.TRIM, before=before)

    def write_blob(self, data: bytes, mark: str = "") -> str:
        name = blob_name(data, mark)
        self._run_patiently(lambda: self._send(Change.WRITE_BLOB, name=name, data=data))
        return name

    def delete_blob(self, name: str) -> None:
        self._check_open()
        self._send(Change.DELETE_BLOB, name=name)

    def close(self) -> None:
        if self._closed.is_set():
            return
        self._closed.set()
        try:
            self._leave()
        except StorageError as error:
            log.warning("the next writer must wait until this one's lease expires: %s", error)
        for client in (self._client, self._renewals):
            client.close()

    def _run_patiently(self, call: Callable[[], None], patience_s: float = math.inf) -> None:
        """Retry an idempotent call until the server answers, for `retry_s` or `patience_s`."""
        retry_s = min(self._retry_s, patience_s)
        self._check_open()
        try:
            call()
            return
        except StorageUnavailable as error:
            log.warning("waiting for %s, for up to %g s: %s", self.server, retry_s, error)
        retrying = tenacity.Retrying(
            retry=tenacity.retry_if_exception_type(StorageUnavailable),
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

    def _send(self, change: Change, **values: Any) -> None:
        """Make the change. Idempotent. Raises Fenced, Corrupt, OutOfSequence, StorageUnusable."""
        client = self._renewals if change is Change.BEAT else self._client
        for _ in range(TRIES):
            absent = None
            try:
                if self._try(client, change, values):
                    return
            except JournalPartMissing as error:
                absent = error
            if self._is_done(client, values):
                # What follows it in the server's log is durable only after it.
                change, values = Change.CONFIRM, {}
            elif absent:
                raise absent
            else:
                self._closed.wait(PAUSE_S)
        raise StorageUnavailable(f"{self._url}: the journal's meta changes all the time")

    def _is_done(self, client: Any, values: dict[str, Any]) -> bool:
        """Whether an earlier try of the append of `values` was done.

        False if a change may succeed now. Raises Fenced, Corrupt, StorageUnusable.
        """
        last, batch = values.get("last", 0), values.get("batch")
        # Read before the query: its result may lack an append that is acknowledged meanwhile.
        term, acknowledged = self.term, self.last_sequence
        meta, damage, stored = self._see(client, last)
        known = f"record {acknowledged} was acknowledged in term {term}"
        if meta is None:
            raise self._lost(meta, f"{known}, and nothing is left")
        if meta.condemned:
            raise Corrupt(f"{self._url}: {meta.condemned}; {self.remedy}")
        if meta.term > term:
            if meta.began < acknowledged and meta.cut_term <= term:
                raise self._lost(meta, f"{known}, and a later term began at record {meta.began}")
            raise self._fenced()
        if meta.term < term or meta.last < acknowledged:
            what = f"{known}, and the log ends at record {meta.last} of term {meta.term}"
            raise self._lost(meta, what)
        if meta.token != self._token:
            raise self._lost(meta, f"{known}, and another writer has begun that term again")
        if damage:
            raise self._lost(meta, damage)
        if not meta.owner:
            raise self._fenced()
        if batch is None or meta.last == acknowledged:
            return False
        if meta.last != last:
            raise StorageUnusable(
                f"{self._url}: the log has records behind {acknowledged} that this writer does not "
                "know to be its own; restart the dispatcher, and it reads them"
            )
        if stored != batch:
            raise self._lost(meta, f"record {last} is not what was appended")
        return True

    def _lost(self, seen: Meta | None, what: str) -> StorageError:
        """Condemn the log; the error that says so."""
        if reason := self.lose(self._client, seen, self.term, what):
            return Corrupt(f"{self._url}: {reason}; {self.remedy}")
        return StorageUnavailable(f"{self._url}: the journal's meta changed while it was looked at")

    def _fenced(self) -> Fenced:
        return Fenced(
            f"{self._url}: another writer has taken over from term {self.term}; this one must stop"
        )
