"""Framing: a header and a payload over a stream socket, as transfer.proto lays them out.

Sockets are blocking ones, and each direction of a connection has a thread of its own. So a
block of any size leaves in one `sendmsg` and arrives in one `recv_into`, and its bytes move
without the interpreter lock. With readiness events instead, each piece that the kernel buffers
(some 100 KB) would have to win that lock back from whatever Python runs in the process.
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
from typing import Any, NamedTuple

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
_NO_PAYLOAD = np.empty(0, np.uint8)
_IOV_MAX = 1024
_READ_AHEAD_BYTES = 64 << 10
_DEAD_PEER_S = 30
_STALL_S = 30.0  # in the middle of a frame
_MAX_DESCRIPTORS = 64  # of files, received and not used yet
_UNIX_SEND_BYTES = 4 << 20  # a Unix socket's buffer does not grow by itself, as TCP's does


class Truncated(ProtocolError, ConnectionError):
    """The connection ended inside a frame. Unlike other broken rules, this may be mere bad luck."""


class Frame(NamedTuple):
    header: bytes
    payload: Bytes  # starts at a multiple of ALIGNMENT in memory


def encode(header: bytes, buffers: Sequence[memoryview] = ()) -> list[Buffer]:
    """A frame as buffers for `send`. The payload's `buffers` (of bytes) are not copied."""
    if len(header) > MAX_HEADER_BYTES:
        raise ValueError(f"a frame's header is {len(header)} bytes, above {MAX_HEADER_BYTES}")
    size = sum(len(b) + padding(len(b)) for b in buffers)
    lengths = _LENGTHS.pack(_MAGIC, len(header), size, google_crc32c.value(header))
    frame: list[Buffer] = [lengths + _CHECKSUM.pack(google_crc32c.value(lengths)) + header]
    for buffer in buffers:
        if len(buffer):
            frame.append(buffer)
        if pad := padding(len(buffer)):
            frame.append(_ZEROS[:pad])
    return frame


def send(sock: socket.socket, buffers: Sequence[Buffer], descriptors: Sequence[int] = ()) -> None:
    """Send all of the buffers (none of them empty), as few system calls as will do.

    `descriptors` of open files arrive with the first byte; over Unix sockets only. Raises
    OSError; the connection is then of no further use.
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


class FrameReader:
    """Reads frames from a blocking socket; used by one thread.

    Reads ahead a little, so that many small frames cost one system call; the bulk of a large
    payload goes straight to where it stays. `peer` names the sender in errors.
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
        # Called whenever the socket's SO_RCVTIMEO has passed; without it that is an error.
        self.on_quiet: Callable[[], None] | None = None
        self._takes_descriptors = takes_descriptors
        self._descriptors: collections.deque[int] = collections.deque()
        self._socket = sock
        self._max_header_bytes = max_header_bytes
        self._max_payload_bytes = max_payload_bytes
        self._ahead = memoryview(bytearray(_READ_AHEAD_BYTES))
        self._start = self._end = 0  # what of _ahead is filled and not used
        self._arena = Arena()
        self._in_frame = False
        self._heard_at_s = 0.0

    def read(self) -> Frame | None:
        """The next frame, or None if the peer closed the connection after the last one.

        Raises ProtocolError, Truncated, OSError; nothing can be read after any of them.
        """
        if self._start == self._end:
            try:
                self._start, self._end = 0, self._receive(self._ahead, 0)
            except EOFError:
                return None
        self._in_frame = True
        header_bytes, payload_bytes, checksum = self._lengths(self._take(_PREFIX_BYTES, "prefix"))
        header = self._take(header_bytes, "header")
        if google_crc32c.value(header) != checksum:
            raise ProtocolError(f"{self.peer} sent a header whose checksum is wrong")
        payload = _NO_PAYLOAD
        if payload_bytes:
            payload = self._arena.take(payload_bytes)
            self._fill(payload.data, "payload")
        self._in_frame = False
        return Frame(header, payload)

    def memory(self, size: int) -> Bytes:
        """`size` aligned bytes of undefined content, recycled like those of payloads."""
        return self._arena.take(size)

    def descriptor(self) -> int:
        """The first descriptor that came with the frames so far and was not asked for yet.

        It is the caller's to close. Raises ProtocolError if there is none.
        """
        if not self._descriptors:
            raise ProtocolError(f"{self.peer} did not send the file that it speaks of")
        return self._descriptors.popleft()

    def close(self) -> None:
        """Close the descriptors that nobody asked for; the socket is its owner's."""
        while self._descriptors:
            os.close(self._descriptors.popleft())

    def _lengths(self, prefix: bytes) -> tuple[int, int, int]:
        magic, header_bytes, payload_bytes, checksum = _LENGTHS.unpack_from(prefix)
        if magic != _MAGIC:
            raise ProtocolError(f"{self.peer} sent {magic!r} where a frame starts with {_MAGIC!r}")
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
                filled += size
        except EOFError:
            raise Truncated(
                f"{self.peer} closed the connection after {filled} of the {len(target)} bytes of "
                f"a frame's {part}"
            ) from None

    def _receive(self, target: memoryview, flags: int) -> int:
        """The number of bytes received, at least one. Raises EOFError at the stream's end."""
        while True:
            try:
                if self._takes_descriptors and not flags:
                    size = self._receive_with_descriptors(target)
                else:
                    size = self._socket.recv_into(target, 0, flags)
            except BlockingIOError:  # the socket's timeout
                stalled = self._in_frame and time.monotonic() > self._heard_at_s + _STALL_S
                if self.on_quiet is None or stalled:
                    raise TimeoutError(f"{self.peer} did not go on in time") from None
                self.on_quiet()
                continue
            if size == 0:
                raise EOFError
            self._heard_at_s = time.monotonic()
            return size

    def _receive_with_descriptors(self, target: memoryview) -> int:
        # A descriptor comes with the first byte of a frame, which is always read ahead.
        room = socket.CMSG_SPACE(_MAX_DESCRIPTORS * array.array("i").itemsize)
        size, rights, _, _ = self._socket.recvmsg_into([target], room, socket.MSG_CMSG_CLOEXEC)
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
"""References to an array that only a list holds, as this version of Python counts them."""


class Arena:
    """Aligned memory for payloads, the large ones recycled once nobody holds them.

    Fresh memory of some megabytes is mapped page by page while it is being filled. Over a Unix
    socket, blocks of 1 to 5 MB come 1.5 times as fast without that. Not thread-safe.
    """

    _LARGE_BYTES = 1 << 20
    _KEPT_BYTES = 32 << 20

    def __init__(self) -> None:
        self._slabs: list[Bytes] = []

    def take(self, size: int) -> Bytes:
        """`size` bytes of undefined content, aligned; theirs who hold the array or a view."""
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


def as_bytes(array: npt.NDArray[Any]) -> memoryview:
    """The array's memory in C order and native byte order, without a copy if it is so already."""
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def tune(sock: socket.socket) -> None:
    """Set what every data connection has: no delay, and an end when the other host is gone."""
    if sock.family == socket.AF_UNIX:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _UNIX_SEND_BYTES)
        return
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _DEAD_PEER_S // 3)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _DEAD_PEER_S // 3)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _DEAD_PEER_S * 1000)


def set_timeout(sock: socket.socket, option: int, seconds: float) -> None:
    """Set SO_RCVTIMEO or SO_SNDTIMEO; 0 waits for ever. The socket stays a blocking one."""
    timeval = struct.pack("@ll", int(seconds), int(seconds % 1 * 1e6))
    sock.setsockopt(socket.SOL_SOCKET, option, timeval)
