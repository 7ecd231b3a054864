"""Framing: a header and a payload over a stream socket; transfer.proto defines the layout.

Sockets block, and each direction of a connection has its own thread. So one `sendmsg` sends a block
of any size, one `recv_into` receives it, and neither holds the interpreter lock. With readiness
events, the thread would need that lock again for each piece that the kernel buffers (some 100 KB).
It would compete for it with all other Python code of the process.
"""

from __future__ import annotations

import array
import collections
import os
import socket
import struct
import sys
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import google_crc32c
import numpy as np
import numpy.typing as npt

from ..block_limits import ALIGNMENT, MAX_PAYLOAD_BYTES, padding
from ..errors import ProtocolError

Buffer = bytes | memoryview
Bytes = npt.NDArray[np.uint8]

MAX_HEADER_BYTES = 1 << 20

_MAGIC = b"FBY1"
_LENGTHS = struct.Struct("<4sIQI")
_CHECKSUM = struct.Struct("<I")
_PREFIX_BYTES = _LENGTHS.size + _CHECKSUM.size
_ZEROS = memoryview(bytes(ALIGNMENT))
NO_PAYLOAD = np.empty(0, np.uint8)
_IOV_MAX = 1024
_READ_AHEAD_BYTES = 64 << 10
_DEAD_PEER = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 10, "TCP_USER_TIMEOUT": 30_000}  # s, s, ms
_CLOSED_BY_EXEC = getattr(socket, "MSG_CMSG_CLOEXEC", 0)
_MAX_DESCRIPTORS = 64  # of files, received and not used yet
_UNIX_SEND_BYTES = 4 << 20  # unlike TCP's, a Unix socket's buffer does not grow by itself


_OF_TLS = (b"\x15\x03", b"\x16\x03")  # an alert, or a handshake
_TLS_ADVICE = (
    ": it speaks TLS, and this process does not; give both of them credentials (FOREBAY_TLS_CA, "
    "FOREBAY_TLS_CERT and FOREBAY_TLS_KEY, or FOREBAY_TOKEN_FILE), or neither"
)


class Truncated(ProtocolError, ConnectionError):
    """The connection ended inside a frame: unlike other broken rules, often a network failure."""


class Frame(NamedTuple):
    header: bytes
    payload: Bytes  # starts at a multiple of ALIGNMENT in memory


def encode(header: bytes, buffers: Sequence[memoryview] = ()) -> list[Buffer]:
    """A frame as buffers for `send`. The payload's `buffers` (of bytes) are not copied."""
    if len(header) > MAX_HEADER_BYTES:
        raise ValueError(f"a frame's header is {len(header)} bytes, above {MAX_HEADER_BYTES}")
    parts = (part for b in buffers for part in (b, _ZEROS[: padding(len(b))]))
    payload = [part for part in parts if len(part)]  # `send` takes no empty ones
    size = sum(len(part) for part in payload)
    lengths = _LENGTHS.pack(_MAGIC, len(header), size, google_crc32c.value(header))
    return [lengths + _CHECKSUM.pack(google_crc32c.value(lengths)) + header, *payload]


def send(sock: socket.socket, buffers: Sequence[Buffer], descriptors: Sequence[int] = ()) -> None:
    """Send all buffers, none of them empty, with as few system calls as possible.

    `descriptors` of open files arrive with the first byte, over Unix sockets only. Raises OSError;
    the connection is then unusable.
    """
    rest = list(buffers)
    done = 0
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))]
    while done < len(rest):
        sent = sock.sendmsg(rest[done : done + _IOV_MAX], rights if descriptors else ())
        descriptors = ()
        while sent:
            size = len(rest[done])
            if sent < size:
                rest[done] = memoryview(rest[done])[sent:]
                break
            sent -= size
            done += 1


def send_at_once(sock: socket.socket, frame: Sequence[Buffer]) -> bool:
    """Send a small frame if the socket has room for it; return whether it had.

    Raises OSError, also if the socket took only a part; the connection is then unusable.
    """
    try:
        sent = sock.sendmsg(frame, (), socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    if sent < sum(len(part) for part in frame):
        raise ConnectionAbortedError("the connection has no room for a small message")
    return True


class FrameReader:
    """Reads frames from a blocking socket; used by one thread.

    It reads ahead a little, so that many small frames cost one system call. It receives the bulk of
    a large payload directly into its final memory. `peer` names the sender in errors.
    """

    def __init__(
        self,
        sock: socket.socket,
        peer: str,
        *,
        max_header_bytes: int = MAX_HEADER_BYTES,
        max_payload_bytes: int = MAX_PAYLOAD_BYTES,
        takes_descriptors: bool = False,
    ) -> None:
        self.peer = peer
        self._takes_descriptors = takes_descriptors
        self._descriptors: collections.deque[int] = collections.deque()
        self._socket = sock
        self._max_header_bytes = max_header_bytes
        self._max_payload_bytes = max_payload_bytes
        self._ahead = memoryview(bytearray(_READ_AHEAD_BYTES))
        self._start = self._end = 0  # the part of _ahead that is filled and not used
        self._arena = Arena()
        self._on_tick: Callable[[], None] | None = None
        self._tick_s = 0.0
        self._ticked_at_s = 0.0
        self._max_silence_s = 0.0
        self._silent_s = 0.0

    def read(self) -> Frame | None:
        """The next frame, or None if the peer closed the connection after the last one.

        Raises ProtocolError, Truncated, OSError; the reader is unusable afterwards.
        """
        if self._start == self._end:
            try:
                self._start, self._end = 0, self._receive(self._ahead, 0)
            except EOFError:
                return None
        header_bytes, payload_bytes, checksum = self._lengths(self._take(_PREFIX_BYTES, "prefix"))
        header = self._take(header_bytes, "header")
        if google_crc32c.value(header) != checksum:
            raise ProtocolError(f"{self.peer} sent a header whose checksum is wrong")
        payload = NO_PAYLOAD
        if payload_bytes:
            payload = self._arena.take(payload_bytes)
            self._fill(payload.data, "payload")
        return Frame(header, payload)

    def watch(self, tick_s: float, on_tick: Callable[[], None], max_silence_s: float) -> None:
        """From now on, `read` calls `on_tick` about every `tick_s`, whether bytes come or not.

        If the peer sends no byte for `max_silence_s`, `read` raises TimeoutError. Time in which
        this process was paused does not count. Without `watch`, a wait longer than the socket's
        SO_RCVTIMEO raises TimeoutError.
        """
        self._on_tick, self._tick_s, self._max_silence_s = on_tick, tick_s, max_silence_s
        self._ticked_at_s = time.monotonic()
        set_timeout(self._socket, socket.SO_RCVTIMEO, tick_s)

    def memory(self, size: int) -> Bytes:
        """`size` aligned bytes of undefined content, recycled like those of payloads."""
        return self._arena.take(size)

    def descriptor(self) -> int:
        """The oldest descriptor that came with the frames so far and was not returned yet.

        The caller closes it. Raises ProtocolError if there is none.
        """
        if not self._descriptors:
            raise ProtocolError(f"{self.peer} did not send the file that it speaks of")
        return self._descriptors.popleft()

    def close(self) -> None:
        """Close the descriptors that were not returned. The socket stays open."""
        while self._descriptors:
            os.close(self._descriptors.popleft())

    def _lengths(self, prefix: bytes) -> tuple[int, int, int]:
        magic, header_bytes, payload_bytes, checksum = _LENGTHS.unpack_from(prefix)
        if magic != _MAGIC:
            advice = _TLS_ADVICE if magic.startswith(_OF_TLS) else ""
            raise ProtocolError(
                f"{self.peer} sent {magic!r} where a frame starts with {_MAGIC!r}{advice}"
            )
        if prefix[_LENGTHS.size :] != _CHECKSUM.pack(google_crc32c.value(prefix[: _LENGTHS.size])):
            raise ProtocolError(f"{self.peer} sent a frame whose lengths' checksum is wrong")
        if header_bytes > self._max_header_bytes or payload_bytes > self._max_payload_bytes:
            raise ProtocolError(
                f"{self.peer} sent a frame of {header_bytes} and {payload_bytes} bytes; at most "
                f"{self._max_header_bytes} and {self._max_payload_bytes} are allowed here"
            )
        return header_bytes, payload_bytes, checksum

    def _take(self, size: int, part: str) -> bytes:
        if self._end - self._start >= size:  # nearly always
            self._start += size
            return bytes(self._ahead[self._start - size : self._start])
        data = bytearray(size)
        self._fill(memoryview(data), part)
        return bytes(data)

    def _fill(self, target: memoryview, part: str) -> None:
        filled = 0
        try:
            while filled < len(target):
                rest = len(target) - filled
                if size := min(rest, self._end - self._start):
                    target[filled : filled + size] = self._ahead[self._start : self._start + size]
                    self._start += size
                elif rest >= _READ_AHEAD_BYTES:
                    size = self._receive(target[filled:], socket.MSG_WAITALL)
                else:
                    self._start, self._end = 0, self._receive(self._ahead, 0)
                    continue
                filled += size
        except EOFError:
            is_tls = part == "prefix" and bytes(target[: min(2, filled)]).startswith(_OF_TLS)
            raise Truncated(
                f"{self.peer} closed the connection after {filled} of the {len(target)} bytes of "
                f"a frame's {part}{_TLS_ADVICE if is_tls else ''}"
            ) from None

    def _receive(self, target: memoryview, flags: int) -> int:
        """The number of bytes received, at least one. Raises EOFError at the stream's end."""
        while True:
            begun_s = time.monotonic()
            size = None
            try:
                if self._takes_descriptors and not flags:
                    size = self._receive_with_descriptors(target)
                else:
                    size = self._socket.recv_into(target, 0, flags)
            except BlockingIOError:  # the socket's timeout
                if self._on_tick is None:
                    raise TimeoutError(f"{self.peer} did not go on in time") from None
            if size == 0:
                raise EOFError
            now_s = time.monotonic()
            if size is None:
                self._silent_s += min(now_s - begun_s, 2 * self._tick_s)
                if self._silent_s >= self._max_silence_s:
                    raise TimeoutError(f"{self.peer} sent nothing for {self._silent_s:.0f} s")
            else:
                self._silent_s = 0.0
            if self._on_tick is not None and now_s - self._ticked_at_s >= self._tick_s:
                self._ticked_at_s = now_s
                self._on_tick()
            if size is not None:
                return size

    def _receive_with_descriptors(self, target: memoryview) -> int:
        # A descriptor comes with the first byte of a frame, which is always read ahead.
        room = socket.CMSG_SPACE(_MAX_DESCRIPTORS * array.array("i").itemsize)
        size, rights, _, _ = self._socket.recvmsg_into([target], room, _CLOSED_BY_EXEC)
        for level, kind, data in rights:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                descriptors = array.array("i")
                descriptors.frombytes(data[: len(data) - len(data) % descriptors.itemsize])
                self._descriptors.extend(descriptors)
        if len(self._descriptors) > _MAX_DESCRIPTORS:
            raise ProtocolError(f"{self.peer} sent files that it does not speak of")
        return size


_nobodys = [np.empty(1, np.uint8)]
_UNUSED = sys.getrefcount(_nobodys[0])
"""The reference count of an array that only a list holds, in this version of Python."""


class Arena:
    """Aligned memory for payloads; large pieces are recycled once nothing refers to them.

    The kernel maps fresh memory page by page while it is being filled. Without that, blocks of 1
    to 5 MB arrive 1.5 times as fast over a Unix socket. Not thread-safe.
    """

    _LARGE_BYTES = 1 << 20
    _KEPT_BYTES = 32 << 20

    def __init__(self) -> None:
        self._slabs: list[Bytes] = []

    def take(self, size: int) -> Bytes:
        """`size` aligned bytes of undefined content, recycled when nothing refers to them."""
        if size < self._LARGE_BYTES:
            return _aligned(np.empty(size + ALIGNMENT, np.uint8), size)
        slabs = self._slabs
        for i in range(len(slabs)):
            # Twice the size at most, so that a small block does not hold on to a huge slab.
            fits = size < slabs[i].size <= 2 * size + ALIGNMENT
            if fits and sys.getrefcount(slabs[i]) == _UNUSED:
                return _aligned(slabs[i], size)
        slab = np.empty(size + ALIGNMENT, np.uint8)
        self._slabs.append(slab)
        while sum(kept.size for kept in self._slabs) > self._KEPT_BYTES and len(self._slabs) > 2:
            del self._slabs[0]
        return _aligned(slab, size)


def _aligned(slab: Bytes, size: int) -> Bytes:
    start = -slab.__array_interface__["data"][0] % ALIGNMENT
    return slab[start : start + size]  # its own views have the slab as their base, too


def tune(sock: socket.socket) -> None:
    """Set the options of every data connection: no delay, and an error when the host is gone."""
    if sock.family == socket.AF_UNIX:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _UNIX_SEND_BYTES)
        return
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _DEAD_PEER.items():
        if hasattr(socket, name):  # macOS has the second only
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def set_timeout(sock: socket.socket, option: int, seconds: float) -> None:
    """Set SO_RCVTIMEO or SO_SNDTIMEO; 0 waits for ever. The socket stays a blocking one."""
    timeval = struct.pack("@ll", int(seconds), int(seconds % 1 * 1e6))
    sock.setsockopt(socket.SOL_SOCKET, option, timeval)
