"""A BlockClient's outbox: its messages to one worker, in order, whichever threads they come from.

A send may block for seconds, while the worker does not read. So messages are collected under the
client's lock, and sent without it. One thread sends at a time, also what others add meanwhile:
those need not wait for it.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from typing import Self

from ..proto import transfer_pb2 as pb
from . import frames

_log = logging.getLogger(__name__)

_MAX_UNSENT = 64  # messages that wait for others


class Outbox:
    """`with` it, hold the client's lock; what is due is sent behind it, without the lock."""

    def __init__(self, worker_uid: int, lock: threading.Lock) -> None:
        self._worker_uid = worker_uid
        self._lock = lock  # the client's; guards all but `_sending`
        self._sending = threading.Lock()  # held while messages are sent; taken before `_lock`
        self.socket: socket.socket | None = None
        self.connected = False
        self.collects = False  # whether messages wait for the end of `together`
        self.traceparent = ""  # of the consumer's wait
        self.sent_at = 0.0
        self._unsent: list[frames.Buffer] = []  # messages to send with the next one
        self._is_due = False

    def __enter__(self) -> Self:
        self._lock.acquire()
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        due, self._is_due = self._is_due, False
        self._lock.release()
        if due and error is None:
            self.flush()

    def add(self, message: pb.ToWorker, *, is_urgent: bool = True) -> None:
        """Send it, if connected; the client repeats what matters after it reconnects. What is not
        urgent goes with a later message."""
        if not self.connected:
            return
        message.traceparent = self.traceparent
        self._unsent += frames.encode(message.SerializeToString())
        if (is_urgent and not self.collects) or len(self._unsent) >= _MAX_UNSENT:
            self._is_due = True

    def send_all(self) -> None:
        """What was added is due."""
        self._is_due = True

    def flush(self, wait_s: float = 0.0) -> None:
        """Send what was added. Without the lock. If another thread sends, it sends this too: wait
        for that so long at most, also where it has what was added already."""
        while (self._unsent or wait_s) and self._sending.acquire(timeout=wait_s):
            wait_s = 0.0
            try:
                with self._lock:
                    unsent, self._unsent = self._unsent, []
                    sock = self.socket if self.connected else None
                if sock is None or not unsent:
                    continue
                try:
                    frames.send(sock, unsent)
                    self.sent_at = time.monotonic()
                except OSError as error:
                    _log.info("telling worker %d failed: %s", self._worker_uid, error)
                    with self._lock:
                        if self.socket is sock:
                            self.cut()  # so that the reading thread reconnects
            finally:
                self._sending.release()

    def connect(self) -> None:
        """The worker has greeted us on the socket."""
        self.connected = True
        self._unsent.clear()

    def disconnect(self) -> socket.socket | None:
        """The socket, which is cut, to be closed by `close`."""
        self.cut()
        sock, self.socket = self.socket, None
        return sock

    def close(self, sock: socket.socket) -> None:
        """Close a socket that is cut. Without the lock: closing a tunnel takes time."""
        with self._sending:  # or a thread might send on another file of this number
            sock.close()

    def cut(self) -> None:
        """End the connection. It wakes a thread that sends or reads."""
        self.connected = False
        if self.socket is not None:
            try:
                self.socket.shutdown(socket.SHUT_RDWR)
            except OSError:  # it is not connected
                pass
