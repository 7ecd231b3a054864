"""Compression of blocks: when it pays, what arrives, and which frames are refused."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from contextlib import ExitStack

import lz4.block
import numpy as np
import pytest
import zstandard

from forebay.journal.proto import events_pb2 as ev
from forebay.service import block_limits
from forebay.service.blocks import Block, Component
from forebay.service.delivery import Cached, CachedOutput, EndOfTask, FirstComeOutput
from forebay.service.errors import ProtocolError
from forebay.service.proto import transfer_pb2 as pb
from forebay.service.transport import codecs, compression, frames, messages
from forebay.service.transport.codecs import CODECS, Broken, join, pack, unpack
from forebay.service.transport.compression import PERIOD, SAMPLE_BYTES, Packer

from .peers import WELCOME, Consumer, Proxy, Saying, ScriptedWorker, only, started, whole
from .samples import SAMPLES, assert_same, strings

TASK = 5
MB = 1 << 20
SMOOTH = bytes(range(256)) * 4096
NOISE = np.random.default_rng(0).bytes(MB)

every_codec = pytest.mark.parametrize("codec", CODECS)


# -- codecs ------------------------------------------------------------------------------------


def room(size: int) -> frames.Bytes:
    return np.full(size, 0xEE, np.uint8)


@every_codec
@pytest.mark.parametrize("size", [1000, 64 << 10, MB])
def test_each_codec_round_trips(codec: str, size: int) -> None:
    packed = pack(codec, SMOOTH[:size])
    assert packed is not None and len(packed) < size
    target = room(size)
    unpack(codec, memoryview(packed), target)
    assert target.tobytes() == SMOOTH[:size]


@every_codec
def test_what_cannot_be_made_smaller_is_left_as_it_is(codec: str) -> None:
    assert pack(codec, NOISE) is None


@every_codec
@pytest.mark.parametrize("change", [-1, 1, -MB // 2, MB])
def test_a_wrong_size_is_noticed_and_nothing_is_written_beyond(codec: str, change: int) -> None:
    packed = pack(codec, SMOOTH)
    assert packed is not None
    memory = room(2 * MB + 64)
    target = memory[: MB + change]
    with pytest.raises(Broken, match="decompress"):
        unpack(codec, memoryview(packed), target)
    assert (memory[target.size :] == 0xEE).all()


@every_codec
def test_every_cut_is_noticed(codec: str) -> None:
    packed = pack(codec, SMOOTH[:5000])
    assert packed is not None
    for size in range(len(packed)):
        with pytest.raises(Broken):
            unpack(codec, memoryview(packed)[:size], room(5000))


@every_codec
def test_garbage_decompresses_to_nothing_or_to_what_fits(codec: str) -> None:
    dice = np.random.default_rng(1)
    packed = bytearray(pack(codec, SMOOTH[:5000]) or b"")
    for _ in range(500):
        broken = bytearray(packed)
        broken[dice.integers(len(broken))] ^= 1 << int(dice.integers(8))
        memory = room(6000)
        try:
            unpack(codec, memoryview(broken), memory[:5000])
        except Broken:
            pass
        assert (memory[5000:] == 0xEE).all()


def test_a_zstd_frame_that_wants_much_memory_is_refused() -> None:
    parameters = zstandard.ZstdCompressionParameters(window_log=30, enable_ldm=True)
    compressor = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    packed = compressor.compress(SMOOTH) + compressor.flush()
    with pytest.raises(Broken):
        unpack("zstd", memoryview(packed), room(MB - 1))


def test_an_unknown_codec_is_refused() -> None:
    with pytest.raises(Broken, match="'gzip', which nobody asked for"):
        unpack("gzip", memoryview(b""), room(1))


def test_lz4_of_more_than_it_can_hold() -> None:
    with pytest.raises(Broken, match="which LZ4 cannot"):
        unpack("lz4", memoryview(b"abc"), np.broadcast_to(np.zeros(1, np.uint8), (1 << 31,)))


def test_join_pads_as_frames_do() -> None:
    assert join([memoryview(b"a" * 64)]) == b"a" * 64
    joined = join([memoryview(b"a"), memoryview(b""), memoryview(b"b" * 65)])
    assert joined == b"a" + bytes(63) + b"b" * 65 + bytes(63)


# -- the decision ------------------------------------------------------------------------------

GOOD = {"lz4": (0.5, 2e-9), "zstd": (0.3, 6e-9)}  # how small, and seconds for a byte
NOISY = {"lz4": (1.0, 0.2e-9), "zstd": (1.0, 0.3e-9)}


class Wire:
    """A connection with a sender that always has something to send, and codecs that take their
    time on a clock of its own."""

    def __init__(
        self, patch: pytest.MonkeyPatch, s_per_byte: float, samples: dict[str, tuple[float, float]]
    ) -> None:
        self.packer = Packer(CODECS, far=True)
        self.s_per_byte = s_per_byte
        self.samples = samples
        self.looks = self.slow = 0  # samples taken; how often slower the codec is than on these
        self._now_s = 0.0
        patch.setattr(compression, "time", self)
        patch.setattr(codecs, "pack", self._pack)

    def perf_counter(self) -> float:
        return self._now_s

    def _pack(self, codec: str, payload: memoryview) -> bytes | None:
        ratio, s_per_byte = self.samples[codec]
        is_sample = len(payload) == SAMPLE_BYTES
        self.looks += is_sample
        self._now_s += s_per_byte * len(payload) * (1 if is_sample else 1 + self.slow)
        return bytes(int(ratio * len(payload))) if ratio < 1 else None

    def window(self) -> str | None:
        """Send for one window; with what."""
        used, packer = set[str | None](), self.packer
        while not packer._is_over or not used:
            packed = packer.pack(ev.MEASURED, [memoryview(SMOOTH)], len(SMOOTH))
            used.add(packed and packed[0])
            packer.sent((len(packed[1]) if packed else len(SMOOTH)) * self.s_per_byte)
        (codec,) = used
        return codec

    def windows(self, count: int) -> list[str | None]:
        return [self.window() for _ in range(count)]


@pytest.mark.parametrize(
    ("mb_per_s", "codec"),
    [(10, "zstd"), (60, "zstd"), (100, "lz4"), (150, "lz4"), (400, None), (3000, None)],
)
def test_the_codec_that_makes_blocks_arrive_soonest(
    monkeypatch: pytest.MonkeyPatch, mb_per_s: int, codec: str | None
) -> None:
    """After a try, if need be: at 400 MB/s LZ4 might pay, and does not."""
    connection = Wire(monkeypatch, 1e-6 / mb_per_s, GOOD)
    assert connection.windows(3)[2] == codec


@pytest.mark.parametrize(
    ("s_per_byte", "samples", "used"),
    [(20e-9, GOOD, {"zstd"}), (2.5e-9, GOOD, {None, "lz4"}), (20e-9, NOISY, {None})],
    ids=["it pays", "it only seems to pay", "incompressible"],
)
def test_looking_again_costs_two_windows_of_a_period(
    monkeypatch: pytest.MonkeyPatch,
    s_per_byte: float,
    samples: dict[str, tuple[float, float]],
    used: set[str | None],
) -> None:
    connection = Wire(monkeypatch, s_per_byte, samples)
    connection.windows(2)
    windows = connection.windows(10 * PERIOD)
    assert {*windows} - {None} == used - {None}
    usual = None if None in used else "zstd"
    assert len(windows) - windows.count(usual) <= 20
    assert connection.looks <= 11 * 2 * len(CODECS)


def test_a_network_faster_than_any_codec_is_not_even_sampled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    connection = Wire(monkeypatch, 0.1e-9, GOOD)
    assert set(connection.windows(100)) == {None}
    assert connection.looks == 0


@pytest.mark.parametrize("becomes", ["compressible", "fast"])
def test_what_changes_is_noticed_within_a_period(
    monkeypatch: pytest.MonkeyPatch, becomes: str
) -> None:
    connection = Wire(monkeypatch, 20e-9, NOISY if becomes == "compressible" else GOOD)
    connection.windows(500)
    connection.samples = GOOD
    connection.s_per_byte = 0.3e-9 if becomes == "fast" else 20e-9
    windows = connection.windows(PERIOD + 2)
    assert (windows[-1] is None) == (becomes == "fast")


def test_a_codec_that_is_slower_than_its_sample_is_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    connection = Wire(monkeypatch, 20e-9, GOOD)
    connection.slow = 9
    assert connection.windows(3) == [None, "zstd", None]


# -- the packer --------------------------------------------------------------------------------


def slow(packer: Packer, data: bytes, *, blocks: int) -> list[str | None]:
    """Send blocks of so many bytes over a network of 1 MB/s; with which codecs."""
    used = []
    for _ in range(blocks):
        packed = packer.pack(ev.MEASURED, [memoryview(data)], len(data))
        packer.sent((len(data) if packed is None else len(packed[1])) * 1e-6)
        used.append(packed and packed[0])
    return used


@pytest.mark.parametrize(
    ("known", "far", "data", "used"),
    [
        (CODECS, True, SMOOTH, {"zstd"}),
        (["lz4"], True, SMOOTH, {"lz4"}),
        (CODECS, False, SMOOTH, set()),  # within a host
        (["gzip"], True, SMOOTH, set()),  # what the consumer cannot undo
        (CODECS, True, NOISE, set()),
    ],
)
def test_what_a_slow_network_is_compressed_with(
    known: Sequence[str], far: bool, data: bytes, used: set[str]
) -> None:
    packed = slow(Packer(known, far=far), data, blocks=20)
    assert {*packed} == used | {None} and (not used or packed.count(None) < 6)


def test_a_codec_that_the_consumer_does_not_know_is_not_used_by_name_either() -> None:
    assert Packer(["lz4"], far=True).pack(ev.ZSTD, [memoryview(SMOOTH)], len(SMOOTH)) is None


def test_compressible_data_that_ends_is_given_up_at_once() -> None:
    packer = Packer(CODECS, far=True)
    slow(packer, SMOOTH, blocks=2)
    assert slow(packer, SMOOTH, blocks=1) != [None]
    assert set(slow(packer, NOISE, blocks=10)) == {None}


@pytest.mark.parametrize(("named", "codec"), [(ev.ZSTD, "zstd"), (ev.LZ4, "lz4"), (ev.NEVER, None)])
def test_by_name(named: ev.BlockCompression, codec: str | None) -> None:
    packed = Packer(CODECS, far=False).pack(named, [memoryview(SMOOTH)], len(SMOOTH))
    assert (packed and packed[0]) == codec


def test_small_payloads_are_not_worth_it() -> None:
    assert Packer(CODECS, far=True).pack(ev.ZSTD, [memoryview(bytes(512))], 512) is None


# -- connections -------------------------------------------------------------------------------


class Slow(Proxy):
    """Lets so many bytes of the worker through a second, and counts them."""

    def __init__(self, port: int, bytes_per_s: float) -> None:
        self.passed = 0
        begun = time.monotonic()

        def slowly(data: bytes) -> tuple[bytes, bool]:
            self.passed += len(data)
            time.sleep(max(0.0, begun + self.passed / bytes_per_s - time.monotonic()))
            return data, True

        # Else the network would take megabytes at once.
        super().__init__(port, lambda: (whole, slowly), buffer_bytes=64 << 10)


def read_through(
    closing: ExitStack,
    data: bytes,
    *,
    compression: ev.BlockCompression,
    far: bool,
    blocks: int = 40,
    bytes_per_s: float = 100e6,
) -> int:
    """Send blocks of such data, and look at what arrives; the bytes that it took."""
    server = started(closing, is_this_host=lambda _: not far)
    slow = Slow(server.port, bytes_per_s)
    closing.callback(slow.close)
    output = FirstComeOutput(1 << 40)
    output.compression = compression
    values = np.frombuffer(data, np.uint8)[np.newaxis]
    for number in range(blocks):
        output.put(Block(1, (Component(values),), index=number))
    output.finish()
    server.sessions.add_task(TASK, output)
    consumer = Consumer(slow.addresses, reads=TASK, closing=closing)
    for number in range(blocks):
        _, block = consumer.take()
        assert isinstance(block, Block) and block.index == number
        array = block.components[0].values
        assert isinstance(array, np.ndarray) and np.array_equal(array, values)
        assert array.ctypes.data % block_limits.ALIGNMENT == 0 and array.flags.writeable
    assert consumer.take() == (TASK, EndOfTask())
    return slow.passed


@pytest.mark.parametrize(
    ("compression", "data", "far", "least_mb", "most_mb"),
    [
        (ev.ZSTD, SMOOTH, False, 0, 4),
        (ev.LZ4, SMOOTH, False, 0, 4),
        (ev.NEVER, SMOOTH, True, 40, 41),
        (ev.MEASURED, SMOOTH, False, 40, 41),
        (ev.MEASURED, SMOOTH, True, 0, 30),  # plain until the first window is over
        (ev.MEASURED, NOISE, True, 40, 41),
    ],
)
def test_what_passes_over_tcp(
    closing: ExitStack,
    compression: ev.BlockCompression,
    data: bytes,
    far: bool,
    least_mb: int,
    most_mb: int,
) -> None:
    rate = 20e6 if least_mb == 0 and compression == ev.MEASURED else 100e6
    passed = read_through(closing, data, compression=compression, far=far, bytes_per_s=rate)
    assert least_mb * MB < passed < most_mb * MB


@every_codec
def test_every_kind_of_block(closing: ExitStack, codec: str) -> None:
    """Of every size from a kilobyte on; the small ones are left as they are."""
    server = started(closing)
    output = FirstComeOutput()
    output.compression = {"zstd": ev.ZSTD, "lz4": ev.LZ4}[codec]
    words = strings([*itertools.islice(itertools.cycle([b"abc" * 9, b"", b"d"]), 500)])
    large = Block(500, (Component(words), Component(np.arange(500), np.ones((500, 1), np.int64))))
    expected = [*SAMPLES.values(), large]
    for block in expected:
        output.put(block)
    output.finish()
    server.sessions.add_task(TASK, output)
    consumer = Consumer(only(server, "tcp"), reads=TASK, closing=closing)
    for block in expected:
        got = consumer.take()[1]
        assert isinstance(got, Block)
        assert_same(got, block)


def test_a_block_for_several_consumers_is_compressed_once(
    closing: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed = []

    def counted(codec: str, payload: bytes | memoryview) -> bytes | None:
        packed.append(codec)
        return pack(codec, payload)

    monkeypatch.setattr(codecs, "pack", counted)
    server = started(closing)
    output = CachedOutput()
    output.compression = ev.ZSTD
    server.sessions.add_task(TASK, output)
    consumers = [
        Consumer(
            only(server, "tcp"), n, reads=TASK, request=Cached(f"trainer {n}"), closing=closing
        )
        for n in range(1, 4)
    ]
    for number in range(5):
        values = np.full((1, MB // 16), number)
        output.put(Block(1, (Component(values),)))
        for consumer in consumers:
            _, block = consumer.take()
            assert isinstance(block, Block)
            assert_same(block, Block(1, (Component(values),)))
    assert packed == ["zstd"] * 5


# -- liars -------------------------------------------------------------------------------------


def packed_frame(codec: str, data: bytes, raw_bytes: int, *, says: int | None = None) -> bytes:
    header = pb.Block(task_id=TASK, number=1, count=1)
    header.components.add(dtype="uint8", shape=[1, raw_bytes], buffer_bytes=[raw_bytes])
    header.packed.codec, header.packed.bytes = codec, len(data) if says is None else says
    message = pb.ToConsumer(block=header).SerializeToString()
    return b"".join(frames.encode(message, [memoryview(data)]))


@pytest.mark.parametrize(
    ("frame", "reason"),
    [
        (packed_frame("zstd", zstandard.compress(SMOOTH), MB + 64), "instead of 1048640"),
        (packed_frame("zstd", zstandard.compress(SMOOTH), MB - 64), "instead of 1048512"),
        (packed_frame("lz4", lz4.block.compress(SMOOTH, store_size=False), 4096), "to 4096 bytes"),
        (packed_frame("zstd", b"", 4096), "decompress"),
        (packed_frame("lz4", b"\x00", 4096), "decompress"),
        (packed_frame("gzip", b"abc", 4096), "nobody asked for"),
        (packed_frame("zstd", b"abc", 4096, says=1 << 40), "says that they are 1099511627776"),
        (packed_frame("zstd", b"abc", 1 << 33), "at most 4294967296 are allowed here"),
        (packed_frame("zstd", b"abc", (1 << 63) - 1), "are allowed here"),
    ],
)
def test_a_consumer_leaves_a_worker_that_announces_wrong_sizes(
    closing: ExitStack, frame: bytes, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    worker = ScriptedWorker()
    closing.callback(worker.close)
    worker.follow_always([WELCOME, Saying(frame)])
    consumer = Consumer(worker.addresses, reads=TASK, give_up_s=0.2, closing=closing)
    assert isinstance(consumer.get(), str)  # lost
    assert reason in caplog.text


def test_wrong_sizes_break_the_protocol() -> None:
    header = pb.Block(task_id=TASK, number=1, count=1)
    header.packed.codec, header.packed.bytes = "zstd", 65
    with pytest.raises(ProtocolError):
        messages._unpack(header, np.zeros(64, np.uint8), np.zeros(64, np.uint8), "the peer")
