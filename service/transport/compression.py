"""Compression: measures whether to compress the blocks of a connection, and with which codec.

The measure is how long the sender is busy for each byte of elements. Without compression, this is
the time that the socket blocks: almost none while the network keeps up, and otherwise the network's
time for a byte. With compression, it is the time to compress and then to send, as far as the
socket's buffer does not overlap them. `CodecChoice` compares both: it picks a codec by samples of a
block, tries it, and keeps it if it is faster.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

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


class Sample(NamedTuple):
    """A codec's measurements on a piece of a block."""

    ratio: float  # compressed to uncompressed
    s_per_byte: float  # to compress, by uncompressed size


class CodecChoice:
    """Which codec to use now, if any. Pure: it decides from the measurements that it is told."""

    def __init__(self) -> None:
        self.codec: str | None = None
        self.wants_samples = False
        self._plain_s_per_byte = 0.0  # when last measured without compression
        self._bytes = 0  # in this window
        self._busy_s = 0.0
        self._left = 1  # windows until the next comparison

    def sent(self, raw_bytes: int, busy_s: float) -> None:
        """Blocks of `raw_bytes`, before compression by `codec`, were compressed and sent in
        `busy_s`."""
        self._bytes += raw_bytes
        self._busy_s += busy_s
        if self._busy_s < WINDOW_S and self._bytes < WINDOW_BYTES:
            return
        s_per_byte = self._busy_s / max(1, self._bytes)
        self._left -= 1
        if self.codec is not None and (
            self._left <= 0 or s_per_byte > GAIN * self._plain_s_per_byte
        ):
            self.use(None)  # it did not pay; or one window measures the network again
            return
        self._bytes, self._busy_s = 0, 0.0
        if self.codec is None:
            self._plain_s_per_byte = s_per_byte
            if self._left <= 0:
                self._left = PERIOD
                self.wants_samples = s_per_byte > FAST_S_PER_BYTE

    def sampled(self, samples: Mapping[str, Sample]) -> None:
        """Choose a codec by its results on the current blocks, if any is worth a try."""
        self.wants_samples = False
        plain = self._plain_s_per_byte
        expected = {
            codec: max(sample.s_per_byte, sample.ratio * plain)
            for codec, sample in samples.items()
            if sample.ratio <= USELESS
        }
        best = min(expected, key=expected.__getitem__, default=None)
        self.use(best if best is not None and expected[best] <= GAIN * plain else None)

    def use(self, codec: str | None) -> None:
        """Begin a window with this codec."""
        self.codec = codec
        self._bytes, self._busy_s = 0, 0.0


class Packer:
    """Compresses the blocks of one connection; used by the thread that sends them.

    The consumer can decompress the codecs in `known`. MEASURED compresses only if the consumer is
    `far`: on another host.
    """

    def __init__(self, known: Collection[str], *, far: bool) -> None:
        self._known = [codec for codec in codecs.CODECS if codec in known]
        self._far = far
        self._choice = CodecChoice()
        self._raw_bytes = 0  # since the last `sent`
        self._packing_s = 0.0

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
        self._raw_bytes += size
        if self._choice.wants_samples:
            self._choice.sampled(self._samples(buffers))
        packed = self._packed(self._choice.codec, buffers, encodings)
        if self._choice.codec is not None and (packed is None or len(packed[1]) > USELESS * size):
            self._choice.use(None)
        return packed

    def sent(self, seconds: float) -> None:
        """The blocks packed since the last call were sent in so many seconds."""
        if self._raw_bytes:
            self._choice.sent(self._raw_bytes, self._packing_s + seconds)
        self._raw_bytes, self._packing_s = 0, 0.0

    def _packed(
        self, codec: str | None, buffers: Sequence[memoryview], encodings: Encodings | None
    ) -> tuple[str, bytes] | None:
        if codec not in self._known:
            return None

        def pack() -> bytes | None:
            begun = time.perf_counter()
            packed = codecs.pack(codec, codecs.join(buffers))
            self._packing_s += time.perf_counter() - begun
            return packed

        # `_packing_s` excludes waiting for another connection that packs the same payload.
        packed = pack() if encodings is None else encodings.get(codec, pack)
        return None if packed is None else (codec, packed)

    def _samples(self, buffers: Sequence[memoryview]) -> dict[str, Sample]:
        largest = max(buffers, key=len)
        start = max(0, len(largest) - SAMPLE_BYTES) // 2
        piece = largest[start : start + SAMPLE_BYTES]
        return {codec: _sample(codec, piece) for codec in self._known}


def _sample(codec: str, piece: memoryview) -> Sample:
    seconds = []
    for _ in range(2):  # one may have waited for the interpreter lock
        begun = time.perf_counter()
        packed = codecs.pack(codec, piece)
        seconds.append(time.perf_counter() - begun)
    return Sample(1.0 if packed is None else len(packed) / len(piece), min(seconds) / len(piece))
