"""BlockClient: a consumer's end of the data connection to one worker.

One thread connects, reads, and connects again when the connection is cut, until the worker has
been out of reach for `give_up_s`. Blocks are numbered, so nothing is delivered twice, and the
worker keeps what was not received, so nothing is missed.
"""

from __future__ import annotations

import enum
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Collection, Sequence

import tenacity

from ..block_limits import MAX_PAYLOAD_BYTES
from ..blocks import Block
from ..connections.protocols import GRPC, TCP, UNIX
from ..delivery import ANY, End, HeldByOthers, Order
from ..errors import ForebayError, ProtocolError
from ..proto import transfer_pb2 as pb
from ..shared import Borrower
from . import frames
from .budget import Share
from .codecs import CODECS
from .dial import OpenTunnel, WorkerRefused, dial, greet
from .messages import (
    VERSION,
    Key,
    decode_block,
    decode_end,
    parse,
    payload_bytes,
    unpack_payload,
)
from .receiving import Receiving
from .worker_client import WorkerClient

_log = logging.getLogger(__name__)

_SEND_S = 10.0  # for a worker that does not read what it is told
_REPORT_S = 0.25  # of silence, and the worker is told what has come and what was taken


class NobodyListens(enum.Enum):
    """At a worker's address, which refuses connections."""

    WHERE_IT_ANSWERED = enum.auto()
    WHERE_IT_NEVER_ANSWERED = enum.auto()  # a firewall may refuse, or another host


class BlockClient(WorkerClient):
    """Reads tasks of one worker, all over one connection.

    Blocks that were delivered and not yet given back with `taken`, and those on the way, are
    never more than `credit_bytes` and one block.
    """

    def __init__(
        self,
        addresses: Sequence[tuple[str, str]],
        *,
        worker_uid: int,
        consumer_id: int,
        deliver: Callable[[int, int, Block | End | HeldByOthers], None],
        lost: Callable[[str], None],
        credit_bytes: int = 64 << 20,
        max_payload_bytes: int = MAX_PAYLOAD_BYTES,
        connect_timeout_s: float = 5.0,
        give_up_s: float = 30.0,
        open_tunnel: OpenTunnel | None = None,
        elements: Share | None = None,
        refused: Callable[[NobodyListens | None], None] = lambda _: None,
    ) -> None:
        """Read from the worker `worker_uid`, at the first of its `addresses` that answers.

        `addresses` are pairs of a protocol and an address, the best first; protocols not known
        are passed over, and so is "grpc" without `open_tunnel`.
        With `elements`, these are counted, too. `refused` is told when nobody listens at the
        worker's address, and with None once somebody does again.
        """
        super().__init__(str(worker_uid), deliver, lost)
        if credit_bytes <= 0:
            raise ValueError(f"credit_bytes is {credit_bytes}; without credit nothing is sent")
        self.worker_uid = worker_uid
        usable = (UNIX, TCP) if open_tunnel is None else (UNIX, TCP, GRPC)
        self._addresses = [a for a in addresses if a[0] in usable]
        self._open_tunnel = open_tunnel
        if not self._addresses:
            raise ValueError(f"none of the worker's addresses can be used here: {addresses}")
        self._consumer_id = consumer_id
        self._refused = refused
        self._answered: tuple[str, str] | None = None  # where the worker did, last
        self._refusing: NobodyListens | None = None
        self._max_payload_bytes = max_payload_bytes
        self._connect_timeout_s = connect_timeout_s
        self._give_up_s = give_up_s
        self._lock = threading.Lock()  # of all that follows; held while a message is sent
        self._receiving = Receiving(credit_bytes, elements)
        self._elements = elements
        self._socket: socket.socket | None = None
        self._borrower: Borrower | None = None  # of the memory that the worker shares
        self._may_borrow = True
        self._connected = False
        self._turned_away = False  # the last time
        self._heard_at = time.monotonic()  # or connected, or cut off
        self._goodbye: pb.ToWorker | None = None  # once it was said
        self._goodbye_heard = False  # the worker has heard it

    def read(self, task_id: int, order: Order = ANY, subscription: int = 0) -> None:
        with self._lock:
            self._say(self._receiving.read((task_id, subscription), order))

    def stop_task(self, task_id: int, subscription: int = 0) -> None:
        with self._lock:
            if self._receiving.incoming.pop((task_id, subscription), None) is not None:
                self._say_stop(task_id, subscription)

    def taken(self, block: Block, key: Key | None = None) -> None:
        with self._lock:
            last = self._receiving.taken(block, key)
            self._give_credit(at_once=last)  # others may wait for it to be taken

    def silent(self) -> tuple[bool, float]:
        return self._turned_away, time.monotonic() - self._heard_at

    def hand_back(self, given: tuple[Key, int] | None) -> None:
        with self._lock:
            goodbye = self._receiving.goodbye(given)
            if goodbye.positions and self._goodbye is None:
                self._goodbye = pb.ToWorker(goodbye=goodbye)
                self._say(self._goodbye)

    def hang_up(self) -> None:
        if self._elements is not None:
            self._elements.leave()
        with self._lock:
            if self._goodbye is None:
                self._say(pb.ToWorker(goodbye=pb.Goodbye()))
            self._closing.set()  # not before: the thread would hang up without a word
            self._cut()

    def close(self, give_up_s: float = 0.0) -> bool:
        if self._goodbye is not None:
            self._join(max(0.0, give_up_s - time.monotonic()))
        self.hang_up()
        self._join()
        nothing_to_say = self._goodbye is None or self._answered is None
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
                retrying(self._attend)
        except OSError as error:
            return f"worker {self.worker_uid} was out of reach for {self._give_up_s} s: {error}"
        except ForebayError as error:
            return str(error)
        return "the client was closed"

    def _attend(self) -> None:
        """Connect, and read until the connection ends.

        Raises OSError or ProtocolError if it was of no use.
        """
        started_at = time.monotonic()
        useful = False
        reader = None
        try:
            reader = self._connect()
            while (frame := reader.read()) is not None and not self._closing.is_set():
                useful = self._handle(frame, reader) or useful
            if not self._closing.is_set():
                raise ConnectionResetError(f"{reader.peer} closed the connection")
        except (OSError, ProtocolError) as error:
            if self._closing.is_set():
                return
            if not isinstance(error, OSError):
                _log.warning("closed the connection: %s", error)
            # One that had merely nothing to say for long was of use too.
            if not useful and time.monotonic() - started_at < self._give_up_s:
                raise
            _log.info("connecting again: %s", error)
        finally:
            if reader is not None:
                reader.close()
            with self._lock:
                sock, self._socket = self._socket, None
                self._borrower = None
                self._connected = False
                if reader is not None:
                    self._heard_at = time.monotonic()
            if sock is not None:
                sock.close()  # a tunnel takes its time

    def _connect(self) -> frames.FrameReader:
        errors, turned_away = [], []
        for protocol, address in self._addresses:
            try:
                reader = self._connect_to(protocol, address)
            except OSError as error:
                errors.append(f"{protocol} {address}: {error}")
                refused = isinstance(error, ConnectionRefusedError)
                if refused and (protocol, address) == self._answered:
                    # Now: other ways may take long to fail.
                    self._say_who_listens(NobodyListens.WHERE_IT_ANSWERED)
                if protocol != UNIX or len(self._addresses) == 1:  # whose names are of one host
                    turned_away.append(refused)
            else:
                self._answered = protocol, address
                self._turned_away = False
                self._say_who_listens(None)
                return reader
        self._turned_away = turned_away[:1] == [True]
        if self._turned_away and self._answered is None:
            self._say_who_listens(NobodyListens.WHERE_IT_NEVER_ANSWERED)
        raise ConnectionError("; ".join(errors))

    def _say_who_listens(self, refusing: NobodyListens | None) -> None:
        if refusing != self._refusing:
            self._refusing = refusing
            self._refused(refusing)

    def _connect_to(self, protocol: str, address: str) -> frames.FrameReader:
        sock = dial(protocol, address, self._connect_timeout_s, self._open_tunnel)
        with self._lock:
            before, self._socket = self._socket, sock  # hang_up() can cut it from now on
        if before is not None:  # of the address before
            before.close()
        if self._closing.is_set():
            raise ConnectionAbortedError("the client is being closed")
        frames.tune(sock)
        frames.set_timeout(sock, socket.SO_SNDTIMEO, _SEND_S)
        frames.set_timeout(sock, socket.SO_RCVTIMEO, self._connect_timeout_s)
        shares = protocol == UNIX and self._may_borrow  # a tunnel's socket is a Unix one, too
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
        )
        greet(sock, reader, hello)
        frames.set_timeout(sock, socket.SO_RCVTIMEO, _REPORT_S)
        reader.on_quiet = self._report
        with self._lock:
            self._borrower = Borrower(reader.peer) if shares else None
            self._connected = True
            self._heard_at = time.monotonic()
            for message in self._receiving.resume():
                self._say(message)
            if self._goodbye is None:
                self._give_credit(at_once=True)
            else:
                self._say(self._goodbye)
        return reader

    def _handle(self, frame: frames.Frame, reader: frames.FrameReader) -> bool:
        """Do what the worker says; was anything delivered?"""
        peer = reader.peer
        self._heard_at = time.monotonic()
        message = parse(frame, peer)
        match message.WhichOneof("message"):
            case "farewell" if self._goodbye is not None:
                with self._lock:
                    self._goodbye_heard = True
                    self._closing.set()
                    self._cut()
                return True
            case _ if self._goodbye is not None:
                return False  # what was on its way
            case "farewell":
                return False  # to hang_up's goodbye
            case "block":
                header = message.block
                block = decode_block(header, self._payload(header, frame, reader), peer)
                key = header.task_id, header.subscription
                wanted = self._accept(key, header.number, block, peer)
                if wanted:
                    self._deliver(*key, block)
                return wanted
            case "refused" if message.refused.broken:
                raise ProtocolError(f"{peer} refused: {message.refused.reason}")
            case "refused":
                raise WorkerRefused(f"{peer} refused: {message.refused.reason}")
            case other:
                ended = decode_end(message)
                if ended is None:
                    raise ProtocolError(f"{peer} sent {other or 'an empty message'}")
                return self._end(*ended)

    def _accept(self, key: Key, number: int, block: Block, peer: str) -> bool:
        with self._lock:
            if self._goodbye is not None:  # by now: it says what has been received
                return False
            wanted = self._receiving.accept(key, number, block, peer)
            self._give_credit()
            return wanted

    def _payload(
        self, header: pb.Block, frame: frames.Frame, reader: frames.FrameReader
    ) -> frames.Bytes:
        """The block's payload: behind its header, perhaps compressed, or in a slab."""
        if header.HasField("packed"):
            return self._unpacked(header, frame, reader)
        if not header.HasField("slab"):
            return frame.payload
        if self._borrower is None:
            raise ProtocolError(f"{reader.peer} lends memory over a connection that cannot")
        size = payload_bytes(header)
        if size > self._max_payload_bytes or len(frame.payload):
            raise ProtocolError(
                f"{reader.peer} lends {size} bytes, at most {self._max_payload_bytes} are "
                f"allowed here, and sends {len(frame.payload)}"
            )
        if header.slab.fresh:
            self._may_borrow = False  # again, if it fails: for want of descriptors, for one
            descriptor = reader.descriptor()
            try:
                self._borrower.learn(header.slab.number, descriptor)
            finally:
                os.close(descriptor)
            self._may_borrow = True
        return self._borrower.borrow(header.slab.number, size)

    def _unpacked(
        self, header: pb.Block, frame: frames.Frame, reader: frames.FrameReader
    ) -> frames.Bytes:
        size = payload_bytes(header)
        if size > self._max_payload_bytes:
            raise ProtocolError(
                f"{reader.peer} sent a block of {size} bytes, compressed; at most "
                f"{self._max_payload_bytes} are allowed here"
            )
        payload = reader.memory(size)
        unpack_payload(header, frame.payload, payload, reader.peer)
        return payload

    def _end(self, key: Key, end: End | HeldByOthers) -> bool:
        with self._lock:
            self._give_credit(at_once=True)  # so that the worker may forget the last blocks
            known = self._receiving.over(key, end)
            # Of one of several, that it was heard; a task's is kept as long as that.
            if key[1] and not isinstance(end, HeldByOthers):
                self._say_stop(*key)
        if known:
            self._deliver(*key, end)
        return known

    def _report(self) -> None:
        with self._lock:
            if self._receiving.unsaid:
                self._give_credit(at_once=True)

    def _give_credit(self, at_once: bool = False) -> None:
        """Tell the worker what there is room for and what has come, when it is worth a message."""
        credit = self._receiving.credit(at_once, self._connected)
        if credit is None:
            return
        if self._borrower is not None:
            free, abandoned = self._borrower.released()
            credit.slabs.extend(free)
            credit.abandoned_slabs.extend(abandoned)
        self._say(pb.ToWorker(credit=credit))

    def _say_stop(self, task_id: int, subscription: int) -> None:
        self._say(pb.ToWorker(stop=pb.Stop(task_id=task_id, subscription=subscription)))

    def _say(self, message: pb.ToWorker) -> None:
        """Send, if connected; what matters is said again after connecting."""
        if not self._connected or self._socket is None:
            return
        try:
            frames.send(self._socket, frames.encode(message.SerializeToString()))
        except OSError as error:
            _log.info("telling worker %d failed: %s", self.worker_uid, error)
            self._cut()  # the reading thread takes it from here

    def _cut(self) -> None:
        self._connected = False
        if self._socket is not None:
            try:
                self._socket.shutdown(socket.SHUT_RDWR)
            except OSError:  # it is not connected
                pass
