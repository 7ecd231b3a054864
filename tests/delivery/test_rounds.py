"""Rounds: complete or not there at all, and one consumer in each place."""

from __future__ import annotations

import pytest

from forebay.service.delivery import Rounds, RoundsOutput, Superseded, TaskFailed
from forebay.service.delivery.read_requests import decode, encode
from forebay.service.errors import ProtocolError
from forebay.service.proto import transfer_pb2 as pb

from .contract import Reader, block


def test_blocks_say_their_round_and_follow_one_another() -> None:
    output = RoundsOutput(2)
    request = Rounds(1, 2)
    reader = Reader(output, request)
    output.put(block(0, 7))
    output.put(block(7, 5))
    for expected in (3, 6):
        given = reader.next(max_elements=3)
        request = request.after(given)  # type: ignore[arg-type]
        assert request.round == expected
    with pytest.raises(ValueError, match="element of round 3, where 6 comes next"):
        request.after(given)  # type: ignore[arg-type]


def test_a_round_that_is_larger_than_the_buffer_comes_nonetheless() -> None:
    output = RoundsOutput(4, max_bytes=1)
    readers = [Reader(output, Rounds(i, 4)) for i in range(4)]
    for first in range(4):
        output.put(block(first, 1))
    assert [r.next() is not None for r in readers] == [True] * 4


def test_a_consumer_that_restarted_alone_is_refused() -> None:
    output = RoundsOutput(2)
    Reader(output, Rounds(0, 2)).next()
    output.put(block(0, 4))
    Reader(output, Rounds(0, 2)).next()
    answer = output.open(Rounds(0, 2))
    assert isinstance(answer, TaskFailed) and answer.code == "FAILED_PRECONDITION"
    assert "round 0 of the task, but the current round has already reached 2" in answer.message
    Reader(output, Rounds(0, 2, 2))  # who has all that was given may come again


def test_the_consumer_that_came_last_keeps_the_place() -> None:
    output = RoundsOutput(2)
    before, other = Reader(output, Rounds(0, 2)), Reader(output, Rounds(1, 2))
    now = Reader(output, Rounds(0, 2))
    output.put(block(0, 2))
    assert before.next() == Superseded()
    before.close()
    now.next(), other.next()
    assert (now.got, other.got) == ([0], [1])


def test_orders_travel_and_are_checked() -> None:
    request = Rounds(3, 4, 9)
    assert decode(encode(request, pb.Read())) == request
    with pytest.raises(ProtocolError, match="consumer 4 of 4"):
        decode(pb.Read(rounds=pb.Rounds(consumer=4, of=4)))
    other = RoundsOutput(2).open(request)
    assert isinstance(other, TaskFailed) and "each of 2 consumers" in other.message
