"""BlockClient: a consumer's end of the data connection to one worker.

One thread connects, reads, and reconnects when the connection is cut, until the worker has been
unreachable for `give_up_s`. Blocks are numbered, so none is delivered twice. The worker retains
unacknowledged blocks, so none is missed.
"""

from __future__ import annotations

import contextlib
import logging
import math
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial

import tenacity

from ..block_limits import MAX_PAYLOAD_BYTES
from ..blocks import Block
from ..connections.credentials import token_to_send
from ..connections.protocols import TCP, UNIX
from ..connections.tls_socket import TlsError
from ..delivery import ANY, End, EndPending, ReadRequest
from ..errors import ForebayError, ProtocolError, Unauthenticated
from ..proto import transfer_pb2 as pb
from ..shared import MapMemory
from . import frames
from .budget import Share
from .codecs import CODECS
from .dial import (
    ConnectionRefused,
    CredentialRefused,
    OpenTunnel,
    WorkerAddresses,
    dial,
    greet,
    refusal,
)
from .messages import VERSION, Key, Payloads, decode_block, decode_end, parse
from .outbox import Outbox
from .receiving import Receiving
from .worker_client import WorkerClient

_log = logging.getLogger(__name__)

PING_S = 3.0
"""The client sends a ping after it has sent nothing for so long."""

SILENCE_S = 10.0
"""The client reconnects after no byte from the worker for so long: three pings are unanswered. Not
over a Unix socket: the kernel reports its end, so a silent worker there is merely paused."""

UNFIT_S = 20.0
"""The client gives up after the worker has refused its credentials as unfit for so long, although
the dispatcher has signed another one meanwhile: files of a certificate or token may be new to one
of the three only. Longer than the 5 s of a call's token (TOKEN_REPLACED_S of the dispatcher's
client): three processes look at their files, and the next credential comes with a heartbeat."""

_SEND_S = 10.0  # how long a send may block because the worker does not read
_REPORT_S = 0.25  # how often the client reports blocks that were received or taken
TOLD_S = 2.0  # an address that never could be connected for so long is worth a word,
_IN_VAIN = 5  # and so are connections that end before a block has come, as by a proxy's limit
_GOODBYE_S = 1.0  # how long a goodbye may wait for another thread's send


class BlockClient(WorkerClient):
    """Reads tasks of one worker, all over one connection.

    Blocks on the way, and those delivered and not yet released by `taken`, never exceed
    `credit_bytes` and one block.
    """

    def __init__(
        self,
        addresses: Sequence[tuple[str, str]],
        *,
        worker_uid: int,
        consumer_id: int,
        deliver: Callable[[int, int, Block | End | EndPending], None],
        lost: Callable[[str], None],
        credit_bytes: int = 64 << 20,
        max_payload_bytes: int = MAX_PAYLOAD_BYTES,
        connect_timeout_s: float = 5.0,
        give_up_s: float = 30.0,
        open_tunnel: OpenTunnel | None = None,
        elements: Share | None = None,
        refused: Callable[[ConnectionRefused | None], None] = lambda _: None,
        reconnected: Callable[[], None] = lambda: None,
        credential: Callable[[], tuple[bytes, int]] = lambda: (b"", 0),
        fail: Callable[[ForebayError], None] = lambda _: None,
        map_memory: MapMemory | None = None,
    ) -> None:
        """Read from the worker `worker_uid`, at the first of its `addresses` that answers.

        `addresses` and `refused` are as for WorkerAddresses; "grpc" is skipped without
        `open_tunnel`. `elements` also bounds the elements. `reconnected` is called for each
        connection but the first. `credential` is what the dispatcher signed for this consumer, and
        how often it has done that. `fail` is called with Unauthenticated if none will ever do.
        `map_memory` is as for Borrower.
        """
        super().__init__(str(worker_uid), deliver, lost)
        if credit_bytes <= 0:
            raise ValueError(f"credit_bytes is {credit_bytes}; without credit nothing is sent")
        self.worker_uid = worker_uid
        self._addresses = WorkerAddresses(
            addresses, with_grpc=open_tunnel is not None, refused=refused
        )
        self._open_tunnel = open_tunnel
        self._consumer_id = consumer_id
        self._reconnected = reconnected
        self._has_connected = False
        self._credential = credential
        self._fail = fail
        self._unfit: tuple[float, int] | None = None  # when one was, first, and its number
        self._max_payload_bytes = max_payload_bytes
        self._connect_timeout_s = connect_timeout_s
        self._give_up_s = give_up_s
        self._lock = threading.Lock()  # guards the fields below; not held while a message is sent
        self._outbox = Outbox(worker_uid, self._lock)
        self._receiving = Receiving(credit_bytes, elements)
        self._elements = elements
        self._payloads = Payloads(max_payload_bytes, map_memory)
        self._heard_at = time.monotonic()  # of the last message but pongs, connection or cut
        self._fell_silent = False  # whether the last connection timed out
        self._in_vain = 0  # connections since the last one that brought something
        self._was_told = False  # why nothing comes
        self._goodbye: pb.ToWorker | None = None  # once `hand_back` was called
        self._goodbye_heard = False  # whether the worker has answered it

    def read(self, task_id: int, request: ReadRequest = ANY, subscription: int = 0) -> None:
        with self._outbox as outbox:
            outbox.add(self._receiving.read((task_id, subscription), request))

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        with self._lock:
            self._outbox.collects = True
        try:
            yield
        finally:
            with self._outbox as outbox:
                outbox.collects = False
                outbox.send_all()

    def stop_task(self, task_id: int, subscription: int = 0) -> None:
        with self._outbox as outbox:
            if self._receiving.incoming.pop((task_id, subscription), None) is not None:
                outbox.add(_stop(task_id, subscription))

    def taken(self, block: Block, key: Key | None = None) -> None:
        with self._outbox:
            urgent = self._receiving.taken(block, key)
            self._give_credit(at_once=urgent)

    def trace(self, traceparent: str) -> None:
        with self._outbox as outbox:
            outbox.traceparent = traceparent
            if traceparent and outbox.connected:
                self._give_credit(at_once=True)

    @property
    def connected(self) -> bool:
        return self._outbox.connected

    def silent(self) -> tuple[bool, float]:
        return self._addresses.refuse, time.monotonic() - self._heard_at

    def hand_back(self, given: tuple[Key, int] | None) -> None:
        with self._outbox as outbox:
            goodbye = self._receiving.goodbye(given)
            if goodbye.positions and self._goodbye is None:
                self._goodbye = pb.ToWorker(goodbye=goodbye)
                outbox.add(self._goodbye)
                outbox.send_all()

    def hang_up(self) -> None:
        if self._elements is not None:
            self._elements.leave()
        with self._lock:
            if self._goodbye is None:
                self._outbox.add(pb.ToWorker(goodbye=pb.Goodbye()))
        self._outbox.flush(_GOODBYE_S)
        with self._lock:
            self._closing.set()  # not before: the thread would hang up without a goodbye
            self._outbox.cut()

    def close(self, give_up_s: float = 0.0) -> bool:
        if self._goodbye is not None:
            self._join(max(0.0, give_up_s - time.monotonic()))
        self.hang_up()
        self._join()
        nothing_to_say = self._goodbye is None or self._addresses.answered is None
        return self._goodbye_heard or nothing_to_say

    def _reading(self) -> Collection[Key]:
        return [key for key, i in self._receiving.incoming.items() if not i.ended]

    def _read_on(self) -> str:
        try:
            retrying = tenacity.Retrying(
                retry=tenacity.retry_if_exception_type((OSError, ProtocolError)),
                wait=tenacity.wait_random_exponential(multiplier=0.01, max=2),
                stop=tenacity.stop_after_delay(self._give_up_s)
                | tenacity.stop_when_event_set(self._closing),
                sleep=tenacity.sleep_using_event(self._closing),
                reraise=True,
            )
            while not self._closing.is_set():
                retrying(self._read_one_connection)
        except OSError as error:
            return f"worker {self.worker_uid} was out of reach for {self._give_up_s} s: {error}"
        except ForebayError as error:
            if isinstance(error, Unauthenticated):
                self._fail(error)
            return str(error)
        return "the client was closed"

    def _read_one_connection(self) -> None:
        """Connect, and read until the connection ends.

        Raises OSError or ProtocolError if the connection brought no progress.
        """
        started_at = time.monotonic()
        useful = fell_silent = False
        reader = None
        try:
            reader = self._addresses.connect(self._connect_to)
            while (frame := reader.read()) is not None and not self._closing.is_set():
                useful = self._handle(frame, reader) or useful
            if not self._closing.is_set():
                raise ConnectionResetError(f"{reader.peer} closed the connection")
        except (OSError, ProtocolError) as error:
            if self._closing.is_set():
                return
            if not isinstance(error, OSError):
                _log.warning("closed the connection: %s", error)
            fell_silent = reader is not None and isinstance(error, TimeoutError)
            self._in_vain = 0 if useful else self._in_vain + (reader is not None)
            # A connection that was only idle for long was useful, too.
            if not useful and time.monotonic() - started_at < self._give_up_s:
                is_away = self._addresses.answered is None and self.silent()[1] > TOLD_S
                is_useless = is_away or self._in_vain >= _IN_VAIN or isinstance(error, TlsError)
                if is_useless and not self._was_told:
                    self._was_told = True
                    _log.warning("no elements come from worker %d: %s", self.worker_uid, error)
                raise
            _log.info("connecting again: %s", error)
        finally:
            if reader is not None:
                reader.close()
            with self._lock:
                sock = self._outbox.disconnect()
                self._payloads.disconnect()
                if reader is not None:
                    self._fell_silent = fell_silent
                    if not fell_silent:
                        self._heard_at = time.monotonic()
            if sock is not None:
                self._outbox.close(sock)

    def _connect_to(self, protocol: str, address: str) -> frames.FrameReader:
        credential, number = self._credential()
        try:
            return self._admitted(protocol, address, credential)
        except CredentialRefused as error:
            self._count_unfit(number, error)
            raise

    def _admitted(self, protocol: str, address: str, credential: bytes) -> frames.FrameReader:
        sock = dial(protocol, address, self._connect_timeout_s, self._open_tunnel)
        with self._lock:
            before, self._outbox.socket = self._outbox.socket, sock  # hang_up() can cut it now
        if before is not None:  # of the previous address
            before.close()
        if self._closing.is_set():
            raise ConnectionAbortedError("the client is being closed")
        frames.tune(sock)
        frames.set_timeout(sock, socket.SO_SNDTIMEO, _SEND_S)
        frames.set_timeout(sock, socket.SO_RCVTIMEO, self._connect_timeout_s)
        shares = protocol == UNIX and self._payloads.may_share  # a tunnel has a Unix socket, too
        reader = frames.FrameReader(
            sock,
            f"worker at {address}",
            max_payload_bytes=self._max_payload_bytes,
            takes_descriptors=shares,
        )
        hello = pb.Hello(
            version=VERSION,
            consumer_id=self._consumer_id,
            worker_uid=self.worker_uid,
            shares_memory=shares,
            codecs=() if protocol == UNIX else CODECS,
            token=token_to_send() if protocol == TCP else "",
            credential=credential,
        )
        greet(sock, reader, hello)
        self._unfit = None
        max_silence_s = math.inf if protocol == UNIX else SILENCE_S
        reader.watch(_REPORT_S, partial(self._report, pings=protocol != UNIX), max_silence_s)
        with self._outbox as outbox:
            outbox.connect()
            if not self._fell_silent:
                self._heard_at = time.monotonic()
            self._payloads.connect(reader.peer, shares=shares)
            for message in self._receiving.resume():
                outbox.add(message)
            if self._goodbye is None:
                self._give_credit(at_once=True)
            else:
                outbox.add(self._goodbye)
        if self._has_connected:
            self._reconnected()
        self._has_connected = True
        return reader

    def _count_unfit(self, number: int, error: CredentialRefused) -> None:
        """Raises Unauthenticated once that is for good."""
        now = time.monotonic()
        since_s, first = self._unfit = self._unfit or (now, number)
        if now - since_s >= UNFIT_S and number > first:
            raise Unauthenticated(f"{error}. It was so for {now - since_s:.0f} s") from error

    def _handle(self, frame: frames.Frame, reader: frames.FrameReader) -> bool:
        """Handle a message of the worker; return whether it brought progress."""
        peer = reader.peer
        message = parse(frame, peer)
        if message.HasField("pong"):
            return False
        self._heard_at = time.monotonic()
        self._fell_silent = False
        match message.WhichOneof("message"):
            case "farewell" if self._goodbye is not None:
                with self._lock:
                    self._goodbye_heard = True
                    self._closing.set()
                    self._outbox.cut()
                return True
            case _ if self._goodbye is not None:
                return False  # it was on its way before the goodbye
            case "farewell":
                return False  # the answer to hang_up's goodbye
            case "block":
                header = message.block
                block = decode_block(header, self._payloads.read(header, frame, reader), peer)
                key = header.task_id, header.subscription
                wanted = self._accept(key, header.number, block, peer)
                if wanted:
                    self._deliver(*key, block)
                return wanted
            case "refused":
                raise refusal(message.refused, peer)
            case other:
                ended = decode_end(message)
                if ended is None:
                    raise ProtocolError(f"{peer} sent {other or 'an empty message'}")
                return self._end(*ended)

    def _accept(self, key: Key, number: int, block: Block, peer: str) -> bool:
        with self._outbox:
            if self._goodbye is not None:  # meanwhile; it has reported what was received
                return False
            wanted = self._receiving.accept(key, number, block, peer)
            self._give_credit()
            return wanted

    def _end(self, key: Key, end: End | EndPending) -> bool:
        with self._outbox as outbox:
            if not key[1]:
                self._give_credit(at_once=True)  # so that the worker may forget the last blocks
            known = self._receiving.over(key, end)
            # Acknowledge a numbered subscription's end: until then the worker keeps its buffer.
            if key[1] and not isinstance(end, EndPending):
                outbox.add(_stop(*key), is_urgent=False)
        if known:
            self._deliver(*key, end)
        return known

    def _report(self, pings: bool) -> None:
        with self._outbox as outbox:
            if self._receiving.must_report:
                self._give_credit(at_once=True)
            if pings and time.monotonic() - outbox.sent_at >= PING_S:
                outbox.add(pb.ToWorker(ping=pb.Ping()))
            outbox.send_all()

    def _give_credit(self, at_once: bool = False) -> None:
        credit = self._receiving.credit(at_once, self._outbox.connected)
        if credit is None:
            return
        free, abandoned = self._payloads.released()
        credit.slabs.extend(free)
        credit.abandoned_slabs.extend(abandoned)
        self._outbox.add(pb.ToWorker(credit=credit))


def _stop(task_id: int, subscription: int) -> pb.ToWorker:
    return pb.ToWorker(stop=pb.Stop(task_id=task_id, subscription=subscription))
