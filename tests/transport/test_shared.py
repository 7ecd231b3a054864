"""Memory that a worker shares with a consumer: who has it, and what becomes of it."""

from __future__ import annotations

import contextlib
import fcntl
import gc
import mmap
import os
import pathlib
import random
import tempfile
from collections.abc import Iterator

import numpy as np
import pytest

from forebay.service import block_limits
from forebay.service.blocks import Block, Component, as_bytes
from forebay.service.delivery import FirstComeOutput
from forebay.service.errors import ProtocolError
from forebay.service.proto import transfer_pb2 as pb
from forebay.service.shared import (
    LEAST_BYTES,
    LEAST_SLABS,
    MAPPED_BYTES,
    MAX_PASSED,
    MAX_SLABS,
    POOL_BYTES,
    SHARED_BYTES,
    Borrower,
    Lender,
)
from forebay.service.transport import BlockServer, frames, messages

from .peers import Peer

MIB = 1 << 20


class Pair:
    """A lender and the borrower that hears of everything."""

    def __init__(self) -> None:
        self.lender = Lender()
        self.borrower = Borrower("a worker")

    def send(self, *values: np.ndarray) -> frames.Bytes | None:
        """The values as the consumer gets them; None if no memory was free."""
        buffers = [as_bytes(v) for v in values]
        size = sum(len(b) + block_limits.padding(len(b)) for b in buffers)
        lent = self.lender.lend(size, buffers)
        if lent is None:
            return None
        if lent.descriptor is not None:
            self.borrower.learn(lent.slab, lent.descriptor)
            os.close(lent.descriptor)
        return self.borrower.borrow(lent.slab, size)

    def give_back(self) -> list[int]:
        released, abandoned = self.borrower.released()
        self.lender.take_back(released, abandoned)
        return released


OTHERS = [0]  # slabs of earlier tests: one that failed keeps what its frames have


def mapped_slabs() -> int:
    return pathlib.Path("/proc/self/maps").read_text().count("memfd:forebay-slab") - OTHERS[0]


@pytest.fixture(autouse=True)
def leave_nothing_mapped() -> Iterator[None]:
    gc.collect()
    OTHERS[0] += mapped_slabs()
    before = _open_slabs()
    yield
    gc.collect()
    assert mapped_slabs() == 0
    assert _open_slabs() == before


def _open_slabs() -> list[str]:
    open_files = [os.readlink(f"/proc/self/fd/{fd}") for fd in _open_descriptors()]
    return [name for name in open_files if "forebay-slab" in name]


def _open_descriptors() -> list[str]:
    return [fd for fd in os.listdir("/proc/self/fd") if os.path.islink(f"/proc/self/fd/{fd}")]


def test_memory_is_used_again_when_the_last_view_is_gone() -> None:
    pair = Pair()
    payload = pair.send(np.full(MIB, 1, np.uint8))
    assert payload is not None
    view = payload[10:20].view(np.int16)
    del payload
    assert pair.give_back() == []
    other = pair.send(np.full(MIB, 2, np.uint8))
    assert (view == 0x0101).all()
    del view
    assert pair.give_back() == [0]
    third = pair.send(np.full(MIB, 3, np.uint8))
    assert mapped_slabs() == 4  # two of them, in both roles: the first one was used again
    assert other is not None and third is not None
    assert (other == 2).all() and (third == 3).all()


def test_who_keeps_everything_is_lent_no_more_than_the_pool() -> None:
    pair = Pair()
    kept: list[frames.Bytes] = []
    while (payload := pair.send(np.full(4 * MIB, len(kept), np.uint8))) is not None:
        kept.append(payload)
    assert len(kept) == POOL_BYTES // (4 * MIB)
    assert all((payload == i).all() for i, payload in enumerate(kept))


def test_payloads_above_the_pool_have_a_few_slabs() -> None:
    pair = Pair()
    kept = [pair.send(np.zeros(POOL_BYTES, np.uint8)) for _ in range(LEAST_SLABS + 1)]
    assert [payload is None for payload in kept] == [False] * LEAST_SLABS + [True]


def test_other_sizes_take_the_place_of_free_slabs() -> None:
    pair = Pair()
    kept: list[object] = [pair.send(np.zeros(SHARED_BYTES, np.uint8)) for _ in range(MAX_SLABS)]
    assert pair.send(np.zeros(SHARED_BYTES, np.uint8)) is None
    kept.clear()
    assert len(pair.give_back()) == MAX_SLABS
    payload = pair.send(np.full(8 * MIB, 9, np.uint8))
    assert payload is not None and (payload == 9).all()


def test_free_slabs_stay_if_without_them_there_is_no_room_either() -> None:
    pair = Pair()
    kept = [pair.send(np.zeros(POOL_BYTES // 4, np.uint8)) for _ in range(LEAST_SLABS)]
    small = [pair.send(np.zeros(MIB, np.uint8)) for _ in range(8)]
    small.clear()
    assert len(pair.give_back()) == 8
    assert pair.send(np.zeros(POOL_BYTES // 3, np.uint8)) is None and len(kept) == LEAST_SLABS
    assert len(pair.lender._free) == 8


def test_random_sizes_and_times_of_giving_back() -> None:
    dice = random.Random(1)
    pair = Pair()
    kept: list[tuple[int, frames.Bytes]] = []
    shared = 0
    for number in range(400):
        payload = pair.send(np.full(64 * dice.randrange(1, MIB // 20), number % 251, np.uint8))
        if payload is not None:
            kept.append((number % 251, payload))
            shared += 1
        while kept and dice.random() < 0.5:
            value, payload = kept.pop(dice.randrange(len(kept)))
            assert (payload == value).all()
        payload = None
        if dice.random() < 0.3:
            pair.give_back()
    assert shared > 300


def test_what_a_fork_holds_is_never_overwritten() -> None:
    pair = Pair()
    payload = pair.send(np.full(MIB, 1, np.uint8))
    let_go = pair.send(np.full(MIB, 2, np.uint8))
    assert payload is not None and let_go is not None
    del let_go
    asked, ask = os.pipe()
    answer, answers = os.pipe()
    child = os.fork()
    if child == 0:
        os.read(asked, 1)
        os.write(answers, bytes([payload.min(), payload.max()]))
        os._exit(0)
    del payload
    assert pair.give_back() == []
    later = [pair.send(np.full(MIB, 3 + n, np.uint8)) for n in range(3)]
    assert all(values is not None and (values == 3 + n).all() for n, values in enumerate(later))
    os.write(ask, b"?")
    assert os.read(answer, 2) == bytes([1, 1])
    os.waitpid(child, 0)
    later.clear()
    assert sorted(pair.give_back()) == [0, 1, 2]


def test_a_slab_is_given_back_once() -> None:
    pair = Pair()
    pair.send(np.zeros(MIB, np.uint8))
    assert pair.give_back() == [0]
    for slabs in ([0], [1], [MAX_SLABS]):
        with pytest.raises(ProtocolError, match="had not been lent"):
            pair.lender.take_back(slabs)


def test_what_a_worker_may_not_lend() -> None:
    borrower = Borrower("a worker")
    with tempfile.TemporaryFile() as file, pytest.raises(ProtocolError, match="might shrink"):
        borrower.learn(0, file.fileno())
    unsealed = os.memfd_create("forebay-test")
    try:
        with pytest.raises(ProtocolError, match="might shrink"):
            borrower.learn(0, unsealed)
        with pytest.raises(ProtocolError, match="there are 32 at most"):
            borrower.learn(MAX_SLABS, unsealed)
    finally:
        os.close(unsealed)
    empty = os.memfd_create("forebay-test", os.MFD_ALLOW_SEALING)
    fcntl.fcntl(empty, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    with os.fdopen(empty), pytest.raises(ProtocolError, match="a slab of no bytes"):
        borrower.learn(0, empty)
    with pytest.raises(ProtocolError, match="slab 3, which is unknown"):
        borrower.borrow(3, 10)
    pair = Pair()
    pair.send(np.zeros(1000, np.uint8))
    with pytest.raises(ProtocolError, match="2000 bytes into slab 0, which is one of 1024"):
        pair.borrower.borrow(0, 2000)


def large(number: int, size: int = MIB) -> Block:
    return Block(1, (Component(np.full((1, size), number % 256, np.uint8)),))


@pytest.mark.parametrize("shares_memory", [True, False])
def test_only_who_says_so_is_lent_memory(server: BlockServer, shares_memory: bool) -> None:
    output = FirstComeOutput()
    server.sessions.add_task(5, output)
    output.put(large(1))
    with contextlib.closing(Peer(server, protocol="unix", shares_memory=shares_memory)) as peer:
        peer.read(5)
        peer.say(credit=pb.Credit(bytes=MIB))
        frame = peer.frame()
        block = pb.ToConsumer.FromString(frame.header).block
        assert block.HasField("slab") == shares_memory
        assert len(frame.payload) == (0 if shares_memory else MIB)


def test_who_gives_back_what_it_does_not_have_is_refused(server: BlockServer) -> None:
    with contextlib.closing(Peer(server, protocol="unix", shares_memory=True)) as peer:
        peer.say(credit=pb.Credit(bytes=MIB, slabs=[3]))
        assert "slab 3 was given back, and had not been lent" in peer.refusal()


class Chain:
    """A process that lends, a worker that passes on, and a consumer, which hear of everything."""

    def __init__(self) -> None:
        self.child = Lender()
        self.worker = Borrower("a process", passes_on=True)

    def send(self, block: Block, lender: Lender) -> tuple[Block, tuple[list[frames.Buffer], int]]:
        """What the process made, as the worker has it; and as it is sent on, with a descriptor."""
        values = block.components[0].values
        assert isinstance(values, np.ndarray)
        lent = self.child.lend(values.nbytes, [as_bytes(values)])
        assert lent is not None
        if lent.descriptor is not None:
            self.worker.learn(lent.slab, lent.descriptor)
            os.close(lent.descriptor)
        payload = self.worker.borrow(lent.slab, values.nbytes)
        view = payload.reshape(values.shape)
        loan = self.worker.loan(lent.slab, payload)
        borrowed = Block(block.count, (Component(view),), loan=loan)
        frame, descriptor = messages.encode_block(5, 1, borrowed, lender)
        assert descriptor is not None
        return borrowed, (frame, descriptor)

    def give_back(self) -> tuple[list[int], list[int]]:
        released = self.worker.released()
        self.child.take_back(*released)
        return released


def received(consumer: Borrower, frame: list[frames.Buffer], descriptor: int) -> np.ndarray:
    prefix = frames._PREFIX_BYTES
    header = pb.ToConsumer.FromString(bytes(frame[0])[prefix:]).block
    assert header.slab.fresh and len(frame) == 1
    consumer.learn(header.slab.number, descriptor, keep_mapped=header.slab.keep_mapped)
    os.close(descriptor)
    size = messages.payload_bytes(header)
    block = messages.decode_block(header, consumer.borrow(header.slab.number, size), "a worker")
    return np.asarray(block.components[0].values)


def test_what_a_process_lends_is_passed_on_as_it_is() -> None:
    chain, lender, consumer = Chain(), Lender(), Borrower("a worker")
    block, sent = chain.send(large(7), lender)
    values = received(consumer, *sent)
    mine = np.asarray(block.components[0].values)
    assert (values == 7).all() and values.shape == mine.shape
    values[0, 0] = 9
    assert mine[0, 0] == 9  # it is the same memory
    del block, mine
    assert chain.give_back() == ([], [])  # the consumer has it yet
    del values
    lender.take_back(*consumer.released())
    assert chain.give_back() == ([0], [])
    with pytest.raises(ProtocolError, match="had not been lent"):
        lender.take_back([0])


def test_what_is_passed_on_again_is_mapped_once_and_not_kept_for_ever() -> None:
    mapped: list[int] = []

    def map_memory(descriptor: int, size: int) -> mmap.mmap:
        mapped.append(size)
        return mmap.mmap(descriptor, size)

    chain, lender = Chain(), Lender()
    consumer = Borrower("a worker", map_memory=map_memory)
    for number in range(5):
        block, sent = chain.send(large(number), lender)
        values = received(consumer, *sent)
        assert (values == number).all()
        del block, values
        lender.take_back(*consumer.released())
        chain.give_back()
    assert mapped == [LEAST_BYTES]
    size = MAPPED_BYTES // 3
    for number in range(8):
        fresh, other = Chain(), Lender()
        block, sent = fresh.send(large(number, size), other)
        assert (received(consumer, *sent) == number).all()
        del block, sent
    del fresh, other
    gc.collect()
    mine = mapped_slabs()
    del consumer
    assert mine - mapped_slabs() == 3


def test_of_what_a_worker_has_copied_nothing_stays_mapped_that_it_has_replaced() -> None:
    lender, consumer = Lender(most=1), Borrower("a worker")
    for number in range(1, 4):
        frame, descriptor = messages.encode_block(5, 1, large(number, number * 3 * MIB), lender)
        assert descriptor is not None
        assert (received(consumer, frame, descriptor) == number).all()
        lender.take_back(*consumer.released())
    gc.collect()
    assert mapped_slabs() == 2  # the lender's, and the consumer's


@pytest.mark.parametrize("how", ["its connection ends", "it has forked"])
def test_what_was_passed_on_to_who_may_hold_it_yet_is_not_used_again(how: str) -> None:
    chain, lender, consumer = Chain(), Lender(), Borrower("a worker")
    block, sent = chain.send(large(1), lender)
    values = received(consumer, *sent)
    del block
    if how == "its connection ends":
        lender.close()
    else:
        lender.take_back([], [0])
    assert chain.give_back() == ([], [0])
    later = [chain.send(large(2), Lender()) for _ in range(3)]
    assert (values == 1).all()
    for _, (_, descriptor) in later:
        os.close(descriptor)


def test_of_one_process_so_much_is_passed_on_and_the_rest_is_copied() -> None:
    chain = Chain()
    lenders = [Lender() for _ in range(MAX_PASSED + 2)]
    consumers = [Borrower("a worker") for _ in lenders]
    there = [received(c, *chain.send(large(n), lender)[1])
             for n, (c, lender) in enumerate(zip(consumers, lenders, strict=True))]  # fmt: skip
    assert chain.give_back() == ([MAX_PASSED, MAX_PASSED + 1], [])
    for n, values in enumerate(there):
        assert (values == n).all()
    there.clear()
    for lender, consumer in zip(lenders, consumers, strict=True):
        lender.take_back(*consumer.released())
    assert sorted(chain.give_back()[0]) == list(range(MAX_PASSED))
    received(consumers[0], *chain.send(large(0), lenders[0])[1])  # it may be passed on again
    del there
    assert chain.give_back() == ([], [])


def test_who_has_nothing_left_to_call_a_slab_by_is_sent_a_copy() -> None:
    chain, lender = Chain(), Lender(most=1)
    block, (_, descriptor) = chain.send(large(1), lender)
    os.close(descriptor)
    assert block.loan is not None and lender.pass_on(block.loan) is None
    assert lender.lend(MIB, [as_bytes(np.zeros(MIB, np.uint8))]) is None
