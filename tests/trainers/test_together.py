"""Processes that train in step and stop together: what each does, without TensorFlow's part."""

from __future__ import annotations

import json
import threading
from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from forebay.service.blocks import Block, Component
from forebay.service.client import same_end
from forebay.service.client.leaving import Taker
from forebay.service.client.same_end import Ends, Others
from forebay.service.trainers import together
from forebay.service.trainers.together import Together


class Board:
    """What all have said."""

    def __init__(self) -> None:
        self.said: dict[str, str] = {}
        self.changed = threading.Condition()


class Seat(Others):
    def __init__(self, board: Board, me: int) -> None:
        self._board = board
        self.me, self.number = me, 3

    def say(self, key: str, text: str) -> None:
        with self._board.changed:
            self._board.said.setdefault(key, text)
            self._board.changed.notify_all()

    def hear(self, key: str, timeout_s: float | None) -> str | None:
        with self._board.changed:
            self._board.changed.wait_for(lambda: key in self._board.said, timeout_s)
            return self._board.said.get(key)


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> Ends:
    """A process's own."""
    found = Ends()
    for module in (same_end, together):
        monkeypatch.setattr(module, "ends", found)
    return found


def block(first: int, count: int) -> Block:
    return Block(count, (Component(np.arange(first, first + count)),))


def answered(board: Board, key: str, who: int, checks: int, given: dict[str, int]) -> None:
    board.said[f"{key}/given/{who}"] = json.dumps([checks, given])


def numbers(blocks: Iterator[Block]) -> list[int]:
    return [int(x) for each in blocks for x in each.components[0].values]  # type: ignore[union-attr]


def test_an_iteration_ends_in_the_midst_of_a_block(ends: Ends) -> None:
    """And what is behind is not given."""
    left: list[int] = []

    def iterate(taker: Taker) -> Generator[Block, None, None]:
        try:
            yield from (block(first, 3) for first in range(0, 30, 3))
        finally:
            left.append(taker.left())

    blocks = same_end.blocks_of(iterate, "a")
    assert numbers(iter([next(blocks)])) == [0, 1, 2]
    assert ends.hold() == {"a/0": 3}
    with ThreadPoolExecutor() as pool:
        rest = pool.submit(numbers, blocks)
        ends.let_go({"a/0": 5})
        assert rest.result(60) == [3, 4]
    assert left == [1]


def test_all_leave_where_the_furthest_is(ends: Ends) -> None:
    board, told = Board(), threading.Event()
    mine = Together(Seat(board, 0), told.set)
    key = mine._key
    assert not any(mine.check() for _ in range(3))
    answered(board, key, 1, 5, {"a/0": 7, "b/0": 1})
    answered(board, key, 2, 2, {"a/0": 9})
    own = ends.begin("a")
    assert ends.admitted(own, 4) == 4
    mine.agree(60)
    assert board.said[f"{key}/to/1"] == board.said[f"{key}/to/2"] == together.STOP
    assert board.said[f"{key}/given/0"] == json.dumps([3, {"a/0": 4}])
    assert ends.admitted(own, 100) == 5 and ends.is_over(own)
    assert [mine.check() for _ in range(3)] == [False, False, True]
    mine.close()
    assert ends.admitted(own, 100) == 100, "the program goes on"
    assert not told.is_set()


def test_who_does_not_answer_is_not_waited_for(
    ends: Ends, caplog: pytest.LogCaptureFixture
) -> None:
    board = Board()
    mine = Together(Seat(board, 1), lambda: None)
    answered(board, mine._key, 0, 0, {})
    mine.agree(0.01)
    assert caplog.messages == ["process 2 of this training has not heard of the stop"]
    assert mine.check()
    board.said[f"{mine._key}/saved/0"] = together.OVER
    mine.wait_until_all_have_saved(0.01)
    assert "process 2 of this training has not saved in time" in caplog.messages


def test_who_is_told_by_another_stops_as_well(ends: Ends) -> None:
    board, told = Board(), threading.Event()
    mine = Together(Seat(board, 2), told.set)
    Seat(board, 0).say(f"{mine._key}/to/2", together.STOP)
    assert told.wait(60)
