"""Compression: measures whether to compress the blocks of a connection, and with which codec.

The measure is how long the sender is busy for each byte of elements. Without compression, this is
the time that the socket blocks: almost none while the network keeps up, and otherwise the network's
time for a byte. With compression, it is the time to compress and then to send, as far as the
socket's buffer does not overlap them. `Packer` compares both: it picks a codec by samples of a
block, tries it, and keeps it if it is faster.
"""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Sequence

from ...journal.proto import events_pb2 as ev
from ..blocks import Encodings
from . import codecs

WINDOW_S = 0.1  # a window ends after so many busy seconds,
WINDOW_BYTES = 32 << 20  # or after so many bytes
FAST_S_PER_BYTE = 0.25e-9  # 4 GB/s: no codec makes that faster
GAIN = 0.9  # of the time without: a codec that needs more is not worth the processor
USELESS = 0.95  # give up a codec at once that compresses to more than this part
PERIOD = 32  # windows from one comparison to the next
SAMPLE_BYTES = 256 << 10
LEAST_BYTES = 1 << 10  # of a payload that is compressed

_CODECS: dict[int, str] = {ev.ZSTD: "zstd", ev.LZ4: "lz4"}


class Packer:
    """Compresses the blocks of one connection; used by the thread that sends them.

    The consumer can decompress the codecs in `known`. MEASURED compresses only if the consumer is
    `far`: on another host.
    """

    def __init__(self, known: Collection[str], *, far: bool) -> None:
        self._known = [codec for codec in codecs.CODECS if codec in known]
        self._far = far
        self._codec: str | None = None  # that MEASURED uses now
        self._plain_s_per_byte = 0.0  # when last measured without compression
        self._bytes, self._busy_s = 0, 0.0  # in this window, before compression and with it
        self._is_over = False  # the window
        self._left = 1  # windows until the next comparison

    def pack(
        self,
        compression: int,
        buffers: Sequence[memoryview],
        size: int,
        encodings: Encodings | None = None,
    ) -> tuple[str, bytes] | None:
        """The codec and the compressed payload; None to send the payload uncompressed.

        `compression` is the dataset's events_pb2.BlockCompression. `encodings` shares the result
        among the connections that send the same payload.
        """
        if size < LEAST_BYTES or not self._known:
            return None
        if compression != ev.MEASURED:
            return self._packed(_CODECS.get(compression), buffers, encodings)
        if not self._far:
            return None
        if self._is_over:
            self._codec = self._choice(max(buffers, key=len))
            self._bytes, self._busy_s, self._is_over = 0, 0.0, False
        self._bytes += size
        packed = self._packed(self._codec, buffers, encodings)
        if packed is None or len(packed[1]) > USELESS * size:
            self._codec = None
        return packed

    def sent(self, seconds: float) -> None:
        """The blocks packed since the last call were sent in so many seconds."""
        self._busy_s += seconds
        is_full = self._busy_s >= WINDOW_S or self._bytes >= WINDOW_BYTES
        self._is_over = is_full and self._bytes > 0

    def _choice(self, buffer: memoryview) -> str | None:
        """The codec for the next window, after this one."""
        s_per_byte = self._busy_s / self._bytes
        self._left -= 1
        if self._codec is not None:
            # Without it, if it did not pay, or for one window, which measures the network again.
            pays = s_per_byte <= GAIN * self._plain_s_per_byte
            return self._codec if pays and self._left > 0 else None
        self._plain_s_per_byte = s_per_byte
        if self._left > 0:
            return None
        self._left = PERIOD
        if s_per_byte <= FAST_S_PER_BYTE:
            return None
        start = max(0, len(buffer) - SAMPLE_BYTES) // 2
        piece = buffer[start : start + SAMPLE_BYTES]
        expected = {codec: _expected(codec, piece, s_per_byte) for codec in self._known}
        best = min(expected, key=expected.__getitem__)
        return best if expected[best] <= GAIN * s_per_byte else None

    def _packed(
        self, codec: str | None, buffers: Sequence[memoryview], encodings: Encodings | None
    ) -> tuple[str, bytes] | None:
        if codec not in self._known:
            return None

        def pack() -> bytes | None:
            begun = time.perf_counter()
            packed = codecs.pack(codec, codecs.join(buffers))
            self._busy_s += time.perf_counter() - begun
            return packed

        # `_busy_s` excludes waiting for another connection that packs the same payload.
        packed = pack() if encodings is None else encodings.get(codec, pack)
        return None if packed is None else (codec, packed)


def _expected(codec: str, piece: memoryview, plain_s_per_byte: float) -> float:
    """Seconds for a byte, by the slower of compressing and sending; infinite if it is useless."""
    seconds = []
    for _ in range(2):  # one may have waited for the interpreter lock
        begun = time.perf_counter()
        packed = codecs.pack(codec, piece)
        seconds.append(time.perf_counter() - begun)
    ratio = 1.0 if packed is None else len(packed) / len(piece)
    if ratio > USELESS:
        return math.inf
    return max(min(seconds) / len(piece), ratio * plain_s_per_byte)
