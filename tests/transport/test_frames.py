"""Framing and blocks: everything round-trips, and nothing that a peer sends is believed."""

from __future__ import annotations

import random
import socket
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from forebay.service import block_limits
from forebay.service.blocks import Block, Component
from forebay.service.errors import ProtocolError
from forebay.service.proto import transfer_pb2 as pb
from forebay.service.transport import frames, messages

from .samples import SAMPLES, assert_same


def received(data: bytes, **limits: Any) -> Iterator[frames.Frame]:
    """What a reader makes of these bytes, however it gets them."""
    near, far = socket.socketpair()
    with near, far:

        def send() -> None:
            with near:
                try:
                    near.sendall(data)
                except OSError:  # the reader had enough of it
                    pass

        sender = threading.Thread(target=send, name="test-sender")
        sender.start()
        try:
            reader = frames.FrameReader(far, "the test", **limits)
            while (frame := reader.read()) is not None:
                yield frame
        finally:
            far.shutdown(socket.SHUT_RDWR)
            sender.join()


def frame(header: bytes, *payload: bytes) -> bytes:
    return b"".join(frames.encode(header, [memoryview(p) for p in payload]))


def block_frame(block: Block, number: int = 1) -> bytes:
    block_limits.check_block(block)
    return b"".join(messages.encode_block(5, number, block, checksum=True)[0])


def decoded(data: bytes) -> list[Block]:
    return [
        messages.decode_block(pb.ToConsumer.FromString(f.header).block, f.payload, "the test")
        for f in received(data)
    ]


@given(st.lists(st.tuples(st.binary(max_size=200), st.lists(st.binary(max_size=200)))))
def test_frames_round_trip(contents: list[tuple[bytes, list[bytes]]]) -> None:
    got = list(received(b"".join(frame(header, *payload) for header, payload in contents)))
    assert [f.header for f in got] == [header for header, _ in contents]
    for f, (_, payload) in zip(got, contents, strict=True):
        assert f.payload.tobytes() == b"".join(p + bytes(-len(p) % 64) for p in payload)


@pytest.mark.parametrize("size", [1, 65_535, 65_536, 65_537, 3_000_001])
def test_frames_around_the_size_of_the_reading_buffer(size: int) -> None:
    payload = random.Random(size).randbytes(size)
    header = payload[:1_000_000]
    for f in received(frame(header, payload) * 3):
        assert f.header == header
        assert f.payload[:size].tobytes() == payload
        assert f.payload.ctypes.data % block_limits.ALIGNMENT == 0


def test_sending_more_buffers_than_one_call_takes_and_more_than_the_socket_holds() -> None:
    parts = [bytes([i % 256]) * (i % 7 * 1000 + 1) for i in range(5000)]
    near, far = socket.socketpair()
    with near, far:
        near.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        sender = threading.Thread(target=frames.send, args=(near, parts), name="test-sender")
        sender.start()
        total = sum(map(len, parts))
        assert far.recv(total, socket.MSG_WAITALL) == b"".join(parts)
        sender.join()


def test_memory_is_recycled_only_when_nobody_holds_it() -> None:
    arena = frames.Arena()
    first = arena.take(2 << 20)
    view = first[100:200].view(np.int32)
    address = first.ctypes.data
    del first
    assert arena.take(2 << 20).ctypes.data != address, "a view still lives"
    del view
    slabs = {arena.take(2 << 20).ctypes.data for _ in range(3)}
    assert len(slabs) == 1


def test_a_stream_cut_at_every_byte() -> None:
    data = block_frame(SAMPLES["many"]) + block_frame(SAMPLES["strings"], 2)
    first = len(block_frame(SAMPLES["many"]))
    for size in range(len(data)):
        got = received(data[:size])
        if size >= first:
            next(got)
        if size in (0, first):
            assert list(got) == []
        else:
            with pytest.raises(frames.Truncated, match="closed the connection after"):
                next(got)


def test_a_flipped_bit_of_prefix_or_header_is_noticed() -> None:
    data = block_frame(SAMPLES["many"])
    header_bytes = len(messages.encode_block(5, 1, SAMPLES["many"])[0][0])
    for bit in range(header_bytes * 8):
        broken = bytearray(data)
        broken[bit // 8] ^= 1 << bit % 8
        with pytest.raises(ProtocolError):
            list(received(bytes(broken)))


@given(st.binary(min_size=1, max_size=300))
def test_garbage_is_refused(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        list(received(data))


def test_absurd_lengths_are_refused_before_memory_is_taken() -> None:
    with pytest.raises(ProtocolError, match=r"a frame of 100 and 0 bytes; at most 99 and 0"):
        list(received(frame(bytes(100)), max_header_bytes=99, max_payload_bytes=0))
    with pytest.raises(ProtocolError, match="at most 1048576 and 63"):
        list(received(frame(b"", b"x"), max_payload_bytes=63))


@pytest.mark.parametrize("name", SAMPLES)
def test_blocks_round_trip(name: str) -> None:
    (got,) = decoded(block_frame(SAMPLES[name]))
    assert_same(got, SAMPLES[name])


def test_what_cannot_travel_is_refused_where_it_was_made() -> None:
    with pytest.raises(TypeError, match="object cannot travel"):
        block_limits.check_block(Block(1, (Component(np.array([None])),)))
    with pytest.raises(ValueError, match="rank 33"):
        block_limits.check_block(Block(1, (Component(np.zeros((1,) * 33)),)))


def component(**changes: object) -> pb.Component:
    fields = {"dtype": "int32", "shape": [2, 3], "buffer_bytes": [24]} | changes
    return pb.Component(**fields)  # type: ignore[arg-type]


VARYING = {"shape": [5], "varying": True, "rank": 1, "buffer_bytes": [20, 16]}
BROKEN = {
    "dtype 'object' is not known": component(dtype="object"),
    "dtype 'finfo' is not known": component(dtype="finfo"),
    "dtype '' is not known": component(dtype=""),
    "24 bytes for int16": component(dtype="int16"),
    r"shape \(2, -3\)": component(shape=[2, -3]),
    r"shape \(\)": component(shape=[], buffer_bytes=[4]),
    r"shape \(3, 2\) for 2 stacked": component(shape=[3, 2]),
    r"shape \(2, 4611686018427387904, 4": component(shape=[2, 1 << 62, 4], buffer_bytes=[0]),
    "2 buffers for": component(buffer_bytes=[12, 12]),
    "too short": component(buffer_bytes=[1 << 60]),
    "payload of 128": component(shape=[2, 1], buffer_bytes=[8]),
    "rank -1": component(**VARYING | {"rank": -1}),
    "rank 33": component(**VARYING | {"rank": 33}),
    r"shape \(5, 1\)": component(**VARYING | {"shape": [5, 1]}),
    "shapes of 0 values, but 5": component(**VARYING),
    "sum up to their 20": component(dtype="string", shape=[2], buffer_bytes=[16, 20]),
}


@pytest.mark.parametrize("match", BROKEN)
def test_inconsistent_blocks_are_refused(match: str) -> None:
    header = pb.Block(task_id=5, number=9, count=2, components=[BROKEN[match]])
    with pytest.raises(ProtocolError, match=f"the test sent block 9 of task 5.*{match}"):
        messages.decode_block(header, np.zeros(128, np.uint8), "the test")


def test_products_and_sums_that_wrap_around_are_refused() -> None:
    huge = 1 << 62
    shapes = np.array([[huge, 4], [5, 1]], np.int64)  # wraps around to 0 + 5 values
    lengths = np.array([huge, -huge], np.int64)
    for payload, broken in (
        (np.zeros(128, np.uint8), component(**VARYING | {"rank": 2, "buffer_bytes": [20, 32]})),
        (np.zeros(64, np.uint8), component(dtype="string", shape=[2], buffer_bytes=[16, 0])),
    ):
        values = lengths if broken.dtype == "string" else shapes
        start = 0 if broken.dtype == "string" else 64
        payload[start : start + values.nbytes] = values.view(np.uint8).reshape(-1)
        header = pb.Block(count=2, components=[broken])
        with pytest.raises(ProtocolError, match="broken"):
            messages.decode_block(header, payload, "the test")


@given(st.data())
def test_mutated_blocks_decode_to_something_sound_or_not_at_all(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(sorted(SAMPLES)))
    parts, _ = messages.encode_block(1, 1, SAMPLES[name])
    header = bytearray(parts[0][24:])
    payload = bytearray(b"".join(parts[1:]))
    for target in (header, payload):
        for _ in range(data.draw(st.integers(0, 3)) if target else 0):
            target[data.draw(st.integers(0, len(target) - 1))] = data.draw(st.integers(0, 255))
    try:
        message = pb.ToConsumer.FromString(bytes(header))
    except DecodeError:
        return
    try:
        block = messages.decode_block(message.block, np.frombuffer(payload, np.uint8), "the test")
    except ProtocolError:
        return
    assert block.payload_bytes <= len(payload)
    for part in block.components:
        assert sum(1 for _ in part.elements()) == block.count
