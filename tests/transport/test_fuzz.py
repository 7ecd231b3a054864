"""Whatever bytes a peer sends: refused and said once, memory bounded, nobody else disturbed."""

from __future__ import annotations

import fcntl
import itertools
import logging
import math
import os
import re
import socket
import struct
import time
import tracemalloc
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import google_crc32c
import numpy as np
import pytest
from google.protobuf.message import DecodeError
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from forebay.service import block_limits
from forebay.service.blocks import Block, Component
from forebay.service.delivery import AnyBlock, FirstComeOutput
from forebay.service.errors import ProtocolError
from forebay.service.proto import transfer_pb2 as pb
from forebay.service.transport import BlockServer, ElementBudget, frames, messages

from ..hypothesis_profiles import examples
from .peers import (
    TIMEOUT_S,
    UID,
    WELCOME,
    Consumer,
    Damage,
    MeddlingProxy,
    Saying,
    ScriptedWorker,
    connected,
    encoded,
    started,
    task,
)
from .samples import SAMPLES

TASK = 5
CREDIT_BYTES = 4096
HANDS_BACK = {"request": AnyBlock(hands_back=True)}
MAX_PAYLOAD_BYTES = 1 << 20
HELLO = pb.Hello(version=messages.VERSION, consumer_id=1, worker_uid=UID, shares_memory=True)


def fuzz(long: int) -> settings:
    return settings(
        derandomize=True,
        max_examples=examples(long),
        suppress_health_check=[HealthCheck.function_scoped_fixture],
    )


def open_files() -> Counter[str]:
    """What the process has open, by kind: "socket:[]"."""
    found: Counter[str] = Counter()
    for descriptor in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # that of the directory itself
            found[re.sub(r"\d+", "", os.readlink(f"/proc/self/fd/{descriptor}"))] += 1
    return found


@pytest.fixture(autouse=True)
def leave_no_descriptor() -> Iterator[None]:
    """But gRPC's threads, of tests that ran before, may open some for a moment."""
    before = open_files()
    yield
    give_up_s = time.monotonic() + TIMEOUT_S
    while (more := open_files() - before) and time.monotonic() < give_up_s:
        time.sleep(0.01)
    assert not more


@pytest.fixture(params=[socket.AF_INET, socket.AF_UNIX], ids=["tcp", "unix"])
def worker(request: pytest.FixtureRequest, closing: ExitStack) -> ScriptedWorker:
    worker = ScriptedWorker(request.param)
    closing.callback(worker.close)
    return worker


@contextmanager
def memory_bounded(size: int) -> Iterator[None]:
    """No more than `size` bytes are asked for, above what there is."""
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < size
    finally:
        tracemalloc.stop()


@contextmanager
def logged(level: int) -> Iterator[list[logging.LogRecord]]:
    """What the transport logs meanwhile, of this level or above."""
    records: list[logging.LogRecord] = []
    handler = logging.Handler(level)
    handler.emit = records.append  # type: ignore[assignment,method-assign]
    logger = logging.getLogger("forebay.service.transport")
    logger.addHandler(handler)
    try:
        yield records
    finally:
        logger.removeHandler(handler)


# -- damage on the way -------------------------------------------------------------------------


@pytest.mark.parametrize("cut", [True, False], ids=["cut", "turned over"])
@pytest.mark.parametrize("to_worker", [True, False], ids=["to worker", "to consumer"])
@pytest.mark.parametrize("reading", [{}, HANDS_BACK, HANDS_BACK | {"elements": 1}])
def test_a_damaged_byte_anywhere_loses_and_repeats_nothing(
    server: BlockServer,
    closing: ExitStack,
    caplog: pytest.LogCaptureFixture,
    reading: dict[str, Any],
    to_worker: bool,
    cut: bool,
) -> None:
    """A connection is damaged there; all blocks come, once and in order, all the same."""
    caplog.set_level(logging.INFO)  # a failure shows why each connection ended
    damages: list[Damage] = []
    proxy = MeddlingProxy(server.port, lambda: damages.pop() if damages else None)
    closing.callback(proxy.close)
    names = ("complex", "complex") if reading else ("varying strings", "scalars")
    samples = [SAMPLES[name] for name in names]
    at = 0
    for task_id in itertools.count(1):
        caplog.clear()
        output = FirstComeOutput()
        for number, block in enumerate(samples):
            output.put(Block(block.count, block.components, index=number))
        output.finish()
        server.sessions.add_task(task_id, output)
        damages.append(Damage(to_worker, at, cut))
        before = proxy.damaged
        if "elements" in reading:
            reading = reading | {"elements": ElementBudget(1).share()}
        consumer = Consumer(proxy.addresses, consumer_id=task_id, reads=task_id, **reading)
        try:
            assert consumer.numbers() == [0, 1], f"damaged at {at}"
            assert output.wait_drained(TIMEOUT_S), f"damaged at {at}"
        finally:
            consumer.client.close()
        server.sessions.remove_task(task_id)
        if proxy.damaged > before:
            at += 1
        elif at > 80:  # else the connection ended earlier: on a busy machine its greeting times out
            break


@pytest.mark.parametrize("checksums", [True, False])
def test_with_checksums_a_changed_payload_is_named_and_sent_again(
    closing: ExitStack, caplog: pytest.LogCaptureFixture, checksums: bool
) -> None:
    server = started(closing, checksums=checksums)
    damages = [Damage(to_worker=False, at=50_000, cut=False)]
    proxy = MeddlingProxy(server.port, lambda: damages.pop() if damages else None)
    closing.callback(proxy.close)
    sent = [Block(1, (Component(np.full((1, 100_000), n, np.uint8)),), index=n) for n in range(3)]
    output = FirstComeOutput()
    for block in sent:
        output.put(block)
    output.finish()
    server.sessions.add_task(TASK, output)
    consumer = Consumer(proxy.addresses, consumer_id=1, reads=TASK, closing=closing)
    blocks = [item for item in (consumer.take()[1] for _ in "012") if isinstance(item, Block)]
    assert [block.index for block in blocks] == [0, 1, 2]
    values: list[Any] = [[block.components[0].values for block in all_] for all_ in (blocks, sent)]
    equal = [bool((a == b).all()) for a, b in zip(*values, strict=True)]
    assert equal == [checksums, True, True]
    said = f"block 1 of task {TASK}, which is broken: its elements have the checksum"
    assert (said in caplog.text) == checksums


# -- strategies --------------------------------------------------------------------------------


def absurd_prefix(header_bytes: int, payload_bytes: int) -> bytes:
    """The beginning of a frame of these lengths, with right checksums."""
    lengths = struct.pack("<4sIQI", b"FBY1", header_bytes, payload_bytes, 0)
    return lengths + struct.pack("<I", google_crc32c.value(lengths))


ABSURD_PREFIXES = st.builds(
    absurd_prefix,
    st.sampled_from([0, 1, 1 << 16, 1 << 20, (1 << 20) + 1, (1 << 32) - 1]),
    st.sampled_from([0, 1, 1 << 20, (1 << 20) + 1, 1 << 32, (1 << 64) - 1]),
)


def damaged(frames_: st.SearchStrategy[bytes]) -> st.SearchStrategy[bytes]:
    """Most of them whole, some cut, some with a byte turned over, some garbage."""
    share = st.floats(0, 1, exclude_max=True)

    def cut(data: bytes, where: float) -> bytes:
        return data[: int(where * len(data))]

    def turned(data: bytes, where: float) -> bytes:
        at = int(where * len(data))
        return data[:at] + bytes([data[at] ^ 0xFF]) + data[at + 1 :]

    broken = [st.builds(f, frames_, share) for f in (cut, turned)]
    return st.one_of(frames_, frames_, frames_, *broken, st.binary(max_size=40), ABSURD_PREFIXES)


SIZES = st.sampled_from([0, 0, 0, 1, 2, 3, 8, 64, 1 << 20, 1 << 27, 1 << 31, 1 << 62, -1])


@st.composite
def absurd_blocks(draw: st.DrawFn) -> bytes:
    """The frame of a block whose sizes are absurd, though many of them agree with each other."""
    header = pb.Block(task_id=TASK, number=1, count=draw(SIZES))
    for _ in range(draw(st.integers(1, 3))):
        dtype, size = draw(
            st.sampled_from(
                [("int32", 4), ("bool", 1), ("complex128", 16), ("string", 8), ("?", 1)]
            )
        )
        varying = draw(st.booleans())
        rank = draw(st.sampled_from([0, 0, 1, 2, 32, 33, -1])) if varying else 0
        shape = draw(st.lists(SIZES, min_size=1, max_size=1 if varying else 4))
        if not varying and draw(st.integers(0, 9)):
            shape[0] = header.count
        sizes = [math.prod(shape) * size, *[0] * (dtype == "string")]
        sizes += [header.count * rank * 8] * varying
        header.components.add(
            dtype=dtype,
            shape=shape,
            rank=rank,
            varying=varying,
            buffer_bytes=[
                n if 0 <= n <= MAX_PAYLOAD_BYTES else draw(SIZES) % (1 << 64) for n in sizes
            ],
        )
    payload = sum(n + -n % 64 for c in header.components for n in c.buffer_bytes)
    filled = bytes([draw(st.sampled_from([0, 1, 255]))]) * min(payload, MAX_PAYLOAD_BYTES)
    return encoded(pb.ToConsumer(block=header), filled)


def block(task_id: int, number: int, size: int, slab: pb.Slab | None) -> bytes:
    component = pb.Component(dtype="uint8", shape=[1, size], buffer_bytes=[size])
    header = pb.Block(
        task_id=task_id, number=number, count=1, components=[component], index=number, slab=slab
    )
    return encoded(pb.ToConsumer(block=header), bytes(size) if slab is None else b"")


def run(task_id: int, count: int, size: int) -> bytes:
    """The first blocks of a task, as they ought to come."""
    return b"".join(block(task_id, number, size, None) for number in range(1, count + 1))


COUNTS = st.sampled_from([0, 0, 1, 2, 3, 1 << 62, (1 << 64) - 1])
TASKS = st.sampled_from([TASK, TASK, TASK + 1, 9])
SLABS = st.builds(pb.Slab, number=st.sampled_from([0, 1, 63, 64]), fresh=st.booleans())
FROM_WORKERS = st.one_of(
    st.builds(run, TASKS, st.integers(2, 5), st.sampled_from([0, 3000])),
    st.builds(block, TASKS, st.integers(0, 4), st.sampled_from([0, 8, 3000]), st.none()),
    st.builds(block, TASKS, st.integers(0, 4), st.sampled_from([0, 8, 3000]), st.none() | SLABS),
    st.builds(lambda t: encoded(pb.ToConsumer(end_of_task=pb.EndOfTask(task_id=t))), TASKS),
    st.builds(lambda t: encoded(pb.ToConsumer(task_failed=pb.TaskFailed(task_id=t))), TASKS),
    st.builds(lambda t: encoded(pb.ToConsumer(task_unknown=pb.TaskUnknown(task_id=t))), TASKS),
    st.builds(
        lambda t, n, c: encoded(
            pb.ToConsumer(end_of_slice=pb.EndOfSlice(task_id=t, bundle=n, length=n, complete=c))
        ),
        TASKS,
        COUNTS,
        st.booleans(),
    ),
    st.builds(lambda t: encoded(pb.ToConsumer(superseded=pb.Superseded(task_id=t))), TASKS),
    st.sampled_from([pb.ToConsumer(), pb.ToConsumer(welcome=pb.Welcome())]).map(encoded),
)

SUBSCRIPTIONS = st.sampled_from([0, 0, 0, 1, 2, (1 << 32) - 1])
SLICES = st.builds(
    pb.Slice,
    bundle=COUNTS,
    place=COUNTS,
    runs=st.lists(COUNTS, max_size=4) | st.sampled_from([(0, 1, 2, 3), (0, 3), range(10_000)]),
    until=COUNTS,
    known=COUNTS,
    keep=COUNTS,
    floor=COUNTS,
    reader=SUBSCRIPTIONS,
    readers=SUBSCRIPTIONS,
)
POSITIONS = st.builds(pb.Position, task_id=TASKS, received=COUNTS, subscription=SUBSCRIPTIONS)
FROM_CONSUMERS = st.one_of(
    st.builds(
        lambda t, n: pb.ToWorker(read=pb.Read(task_id=t, any=pb.Any(), received=n)), TASKS, COUNTS
    ),
    st.builds(
        lambda t, n, s, order: pb.ToWorker(
            read=pb.Read(task_id=t, slice=order, received=n, subscription=s)
        ),
        TASKS,
        COUNTS,
        SUBSCRIPTIONS,
        SLICES,
    ),
    st.builds(
        lambda size, positions, slabs: pb.ToWorker(
            credit=pb.Credit(bytes=size, positions=positions, slabs=slabs)
        ),
        st.sampled_from([0, 1, 3000, 1 << 20, 1 << 36, (1 << 64) - 1]),
        st.lists(POSITIONS, max_size=2),
        st.lists(st.sampled_from([0, 1, 64]), max_size=1),
    ),
    st.builds(
        lambda t, s: pb.ToWorker(stop=pb.Stop(task_id=t, subscription=s)), TASKS, SUBSCRIPTIONS
    ),
    st.sampled_from(
        [
            pb.ToWorker(),
            pb.ToWorker(goodbye=pb.Goodbye()),
            pb.ToWorker(read=pb.Read(task_id=TASK)),
            pb.ToWorker(hello=HELLO),
            pb.ToWorker(hello=pb.Hello(version=0)),
        ]
    ),
).map(encoded)


# -- what workers say --------------------------------------------------------------------------


def verdict(worker: ScriptedWorker, script: list[Saying]) -> list[Any]:
    """What comes of it with a consumer of two tasks: what was delivered, and why it ended."""
    worker.follow([WELCOME, *script])
    consumer = Consumer(
        worker.addresses,
        reads=TASK,
        credit_bytes=CREDIT_BYTES,
        max_payload_bytes=MAX_PAYLOAD_BYTES,
        give_up_s=TIMEOUT_S,
    )
    try:
        consumer.client.read(TASK + 1)
        arrived = [consumer.get()]
        while not isinstance(arrived[-1], str):
            arrived.append(consumer.get())
    finally:
        consumer.client.close()
    assert arrived[-1] != "its thread crashed; the log says why"
    return arrived


@pytest.mark.parametrize("worker", [socket.AF_INET], indirect=True, ids=["tcp"])
@given(frame=absurd_blocks())
@fuzz(long=200)
def test_blocks_with_absurd_headers(worker: ScriptedWorker, frame: bytes) -> None:
    with memory_bounded(16 * MAX_PAYLOAD_BYTES):
        for item in verdict(worker, [Saying(frame)])[:-1]:
            for component in item[1].components:
                assert component.values is not None


def descriptors(kind: str) -> list[int]:
    """Files, not all of which can be shared memory."""
    if kind == "pipe":
        return list(os.pipe())
    if kind == "none":
        return []
    file = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    os.ftruncate(file, 4096)
    if kind == "sealed":
        fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    return [file] if kind != "many" else [file, *(os.dup(file) for _ in range(80))]


FILES = st.sampled_from(["none", "none", "sealed", "sealed", "unsealed", "pipe", "many"])


@given(script=st.lists(st.tuples(damaged(FROM_WORKERS), FILES), max_size=10))
@fuzz(long=150)
def test_random_messages_of_a_worker_harm_no_consumer(
    worker: ScriptedWorker, script: list[tuple[bytes, str]]
) -> None:
    shares = worker.addresses[0][0] == "unix"
    sayings = [Saying(data, descriptors(files) if shares else []) for data, files in script]
    with memory_bounded(16 * MAX_PAYLOAD_BYTES):
        arrived = verdict(worker, sayings)[:-1]
        delivered = [item for _, item in arrived if isinstance(item, Block)]
        held = [block_limits.cost(block) for block in delivered]
        assert sum(held[:-1]) < CREDIT_BYTES
    assert {task_id for task_id, _ in arrived} <= {TASK, TASK + 1}
    for task_id in (TASK, TASK + 1):
        items = [item for of, item in arrived if of == task_id]
        ends = [item for item in items if not isinstance(item, Block)]
        assert ends == items[len(items) - len(ends) :]
        assert len(ends) <= 1
        numbers = [item.index for item in items if isinstance(item, Block)]
        assert numbers == list(range(1, len(numbers) + 1))


# -- what consumers say ------------------------------------------------------------------------


def understood(script: list[bytes]) -> Iterator[pb.ToWorker]:
    """The messages before the first that is damaged."""
    near, far = socket.socketpair()
    with near, far:
        near.sendall(b"".join(script))
        near.shutdown(socket.SHUT_WR)
        reader = frames.FrameReader(far, "the test", max_header_bytes=1 << 16, max_payload_bytes=0)
        try:
            while (frame := reader.read()) is not None:
                yield pb.ToWorker.FromString(frame.header)
        except (ProtocolError, DecodeError):
            return


def answers(sock: socket.socket) -> Iterator[pb.ToConsumer]:
    """All that the worker says, until it closes the connection."""
    reader = frames.FrameReader(sock, "the worker")
    try:
        while (frame := reader.read()) is not None:
            yield pb.ToConsumer.FromString(frame.header)
    except ConnectionResetError:  # it closed before it had read everything
        pass


@pytest.mark.parametrize("protocol", ["unix", "tcp"])
def test_random_messages_of_a_consumer_harm_no_worker(server: BlockServer, protocol: str) -> None:
    (address,) = [a for a in server.addresses if a[0] == protocol]
    hello = encoded(pb.ToWorker(hello=HELLO))
    examples = 0

    @given(greets=st.integers(0, 9), script=st.lists(damaged(FROM_CONSUMERS), max_size=10))
    @fuzz(long=80)
    def check(greets: int, script: list[bytes]) -> None:
        nonlocal examples
        examples += 1
        task(server, TASK, 3)
        task(server, TASK + 1, 3, lambda: 300_000)
        task(server, TASK + 2, 3)
        with connected(address) as sock:
            try:
                sock.sendall(b"".join([hello] * (greets > 0) + script))
                sock.shutdown(socket.SHUT_WR)
            except OSError:  # the worker has had enough of it
                pass
            said = list(answers(sock))
        costs = [
            sum(n for c in s.block.components for n in c.buffer_bytes) + 512
            for s in said
            if s.HasField("block")
        ]
        credit = sum(message.credit.bytes for message in understood(script))
        assert sum(costs[:-1]) <= credit
        assert not costs or credit
        brisk = Consumer([address], consumer_id=2, reads=TASK + 2)
        assert brisk.numbers() == [1, 2, 3]
        brisk.client.close()
        for task_id in range(TASK, TASK + 3):
            server.sessions.remove_task(task_id)

    with memory_bounded(64 << 20), logged(logging.WARNING) as records:
        check()
        server.stop()
    assert 0 < len(records) <= examples
