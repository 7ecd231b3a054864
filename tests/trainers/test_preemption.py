"""`PreemptionHandler` in this process; and processes that train in step and stop together: what
each does, without TensorFlow's part.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from forebay import service
from forebay.service.blocks import Block, Component
from forebay.service.client import lockstep, open_iterations
from forebay.service.client.lockstep import ElementLimits, LimitedTaker, Peers
from forebay.service.client.open_iterations import Taker, close_between_steps, stopping
from forebay.service.errors import InvalidArgument
from forebay.service.trainers import group_preemption, preemption
from forebay.service.trainers.group_preemption import StopAgreement

from .conftest import target

__all__ = ["target"]


class Board:
    """What all have said."""

    def __init__(self) -> None:
        self.said: dict[str, str] = {}
        self.changed = threading.Condition()


class Seat(Peers):
    def __init__(self, board: Board, me: int) -> None:
        self._board = board
        self.me, self.number = me, 3

    def publish(self, key: str, text: str) -> None:
        with self._board.changed:
            self._board.said.setdefault(key, text)
            self._board.changed.notify_all()

    def receive(self, key: str, timeout_s: float | None) -> str | None:
        with self._board.changed:
            self._board.changed.wait_for(lambda: key in self._board.said, timeout_s)
            return self._board.said.get(key)


@pytest.fixture
def element_limits(monkeypatch: pytest.MonkeyPatch) -> ElementLimits:
    """A process's own."""
    found = ElementLimits()
    for module in (lockstep, group_preemption):
        monkeypatch.setattr(module, "element_limits", found)
    return found


def block(first: int, count: int) -> Block:
    return Block(count, (Component(np.arange(first, first + count)),))


def answered(board: Board, key: str, who: int, checks: int, given: dict[str, int]) -> None:
    board.said[f"{key}/given/{who}"] = json.dumps([checks, given])


def numbers(blocks: Iterator[Block]) -> list[int]:
    return [int(x) for each in blocks for x in each.components[0].values]  # type: ignore[union-attr]


def test_an_iteration_ends_in_the_midst_of_a_block(element_limits: ElementLimits) -> None:
    """The trainer does not get the rest of the block."""
    left: list[int] = []

    def iterate(taker: Taker) -> Generator[Block, None, None]:
        try:
            yield from (block(first, 3) for first in range(0, 30, 3))
        finally:
            left.append(taker.left())

    blocks = lockstep.blocks_of(iterate, "a")
    assert numbers(iter([next(blocks)])) == [0, 1, 2]
    assert element_limits.pause() == {"a/0": 3}
    with ThreadPoolExecutor() as pool:
        rest = pool.submit(numbers, blocks)
        with pytest.raises(TimeoutError):
            rest.result(0.2)
        element_limits.resume({"a/0": 5})
        assert rest.result(60) == [3, 4]
    assert left == [1]


def test_a_batch_that_one_process_has_begun_is_made_whole_in_all(
    element_limits: ElementLimits,
) -> None:
    """Also in the second epoch, which begins behind another epoch's smaller last batch."""
    for begun, limit, expected in ((0, 5, 8), (8, 8, 8), (8, 17, 20)):
        own = element_limits.begin("a", 4)
        element_limits.pause()
        element_limits.resume({own: limit})
        assert begun + element_limits.admit_elements(own, 100) == expected
        element_limits.end(own)
        element_limits.forget_limits()


def test_all_processes_stop_at_the_step_of_the_furthest_one(element_limits: ElementLimits) -> None:
    board, told = Board(), threading.Event()
    mine = StopAgreement(Seat(board, 0), told.set)
    key = mine.key
    assert not any(mine.check() for _ in range(3))
    answered(board, key, 1, 5, {"a/0": 7, "b/0": 1})
    answered(board, key, 2, 2, {"a/0": 9})
    own = element_limits.begin("a")
    assert element_limits.admit_elements(own, 4) == 4
    mine.agree(60)
    assert board.said[f"{key}/to/1"] == board.said[f"{key}/to/2"] == group_preemption.STOP
    assert board.said[f"{key}/given/0"] == json.dumps([3, {"a/0": 4}])
    assert element_limits.admit_elements(own, 100) == 5 and element_limits.is_over(own)
    assert [mine.check() for _ in range(3)] == [False, False, True]
    mine.close()
    assert element_limits.admit_elements(own, 100) == 100, "the program goes on"
    assert not told.is_set()


def test_an_iteration_that_begins_late_gives_as_many_elements_as_the_others_have(
    element_limits: ElementLimits,
) -> None:
    """They wait in a step for this process. When it saves, no iteration begins any more."""

    def read(name: str) -> list[int]:
        return numbers(lockstep.blocks_of(iterate, name))

    def iterate(taker: Taker) -> Generator[Block, None, None]:
        if not lockstep.must_stop(taker):
            yield from (block(first, 3) for first in range(0, 30, 3))

    board = Board()
    mine = StopAgreement(Seat(board, 0), lambda: None)
    answered(board, mine.key, 1, 0, {"a/0": 7, "b/0": 1})
    answered(board, mine.key, 2, 0, {"a/0": 4})
    stopping.begin(mine)
    try:
        mine.agree(60)
        assert lockstep.may_repeat("a") and lockstep.may_repeat("b")
        assert read("a") == [*range(7)]
        assert not lockstep.may_repeat("a") and read("a") == []
        mine.end_reading()
        assert not lockstep.may_repeat("b") and read("b") == []
    finally:
        stopping.end(mine)
        mine.close()
    assert lockstep.may_repeat("a") and read("a") == [*range(30)], "the program goes on"


def test_a_process_that_does_not_answer_is_not_waited_for(
    element_limits: ElementLimits, caplog: pytest.LogCaptureFixture
) -> None:
    board = Board()
    mine = StopAgreement(Seat(board, 1), lambda: None)
    answered(board, mine.key, 0, 0, {})
    mine.agree(0.01)
    assert caplog.messages == ["process 2 of this training has not heard of the stop"]
    assert mine.check()
    board.said[f"{mine.key}/saved/0"] = group_preemption.OVER
    mine.wait_until_all_have_saved(0.01)
    assert "process 2 of this training has not saved in time" in caplog.messages
    mine.close()


def test_a_process_that_hears_of_anothers_signal_stops_too(element_limits: ElementLimits) -> None:
    board, told = Board(), threading.Event()
    mine = StopAgreement(Seat(board, 2), told.set)
    Seat(board, 0).publish(f"{mine.key}/to/2", group_preemption.STOP)
    assert told.wait(60)
    mine.close()


class Open:
    """A consumer, as far as it is asked to leave."""

    def __init__(self, taker: LimitedTaker) -> None:
        self.taker = taker
        self.told_to_leave = threading.Event()
        self.closed_with: list[int] = []

    def leave(self) -> None:
        self.told_to_leave.set()
        self.taker.leave()

    def close(self, left: int = 0) -> None:
        self.closed_with.append(left)


def test_elements_that_no_step_used_are_handed_back_between_steps(
    element_limits: ElementLimits,
) -> None:
    taker = LimitedTaker(element_limits.begin("a"))
    given = Open(taker)
    assert taker.admit(block(0, 4)) is not None
    element_limits.pause()
    element_limits.resume({"a/0": 7})
    assert taker.admit(block(4, 10)) is not None
    close_between_steps(given)  # type: ignore[arg-type]
    assert given.closed_with == [7]


def test_an_iterator_that_is_closed_while_it_waits_gets_nothing(
    element_limits: ElementLimits,
) -> None:
    """It was handed back."""
    taker = LimitedTaker(element_limits.begin("a"))
    given = Open(taker)
    element_limits.pause()
    with ThreadPoolExecutor() as pool:
        admitted = pool.submit(taker.admit, block(0, 10))
        with pytest.raises(TimeoutError):
            admitted.result(0.2)
        close_between_steps(given)  # type: ignore[arg-type]
        element_limits.resume({"a/0": 10})
        assert admitted.result(60) is None
    assert given.closed_with == [10]


@pytest.fixture
def board(monkeypatch: pytest.MonkeyPatch) -> Board:
    """Of three processes, of which this is the first, and a handler's next."""
    found = Board()
    monkeypatch.setattr(lockstep, "find_peers", lambda: Seat(found, 0))
    return found


def others_say(board: Board, handler: service.PreemptionHandler, what: str, text: str) -> None:
    assert handler.agreement is not None
    for who in (1, 2):
        Seat(board, who).publish(f"{handler.agreement.key}/{what}/{who}", text)


def test_an_iteration_goes_on_to_the_common_end_for_as_long_as_steps_take(
    element_limits: ElementLimits, board: Board, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Handing back is waited for no longer than ever."""
    own = element_limits.begin("a")
    given = Open(LimitedTaker(own))
    monkeypatch.setattr(preemption, "HAND_BACK_S", 0.2)
    monkeypatch.setattr(preemption, "open_consumers", lambda: [given])
    with service.PreemptionHandler(grace_period_s=60, exit_code=None) as handler:
        others_say(board, handler, "given", json.dumps([0, {own: 2}]))
        others_say(board, handler, "saved", group_preemption.OVER)
        os.kill(os.getpid(), signal.SIGTERM)
        assert handler.handed_back.wait(30)
        assert not given.told_to_leave.wait(0.3)
        assert element_limits.admit_elements(own, 10) == 2
        assert given.told_to_leave.wait(30)


def fails(_: float = 0) -> None:
    raise OSError("in vain")


@pytest.mark.parametrize(
    ("loop", "save"), [(fails, None), (lambda: None, fails)], ids=["the loop", "save_fn"]
)
def test_a_failed_process_is_not_waited_for(
    element_limits: ElementLimits,
    board: Board,
    loop: Callable[[], None],
    save: Callable[[float], object] | None,
) -> None:
    handler = service.PreemptionHandler(save, grace_period_s=60)
    with pytest.raises(OSError, match="in vain"), handler:
        others_say(board, handler, "given", json.dumps([0, {}]))
        others_say(board, handler, "saved", group_preemption.OVER)
        os.kill(os.getpid(), signal.SIGTERM)
        assert handler.handed_back.wait(30)
        loop()
    try:
        assert handler.agreement is not None
        assert board.said.get(f"{handler.agreement.key}/saved/0") == group_preemption.OVER
    finally:
        handler._exit_code = None  # the tests go on
        handler.__exit__(None, None, None)


def test_steps_are_counted_on_over_the_epochs_of_a_process() -> None:
    """Behind a repeat, epochs are longer in one process than in others, and steps go on."""
    counts = ElementLimits()
    first, beside = counts.begin("job"), counts.begin("job")
    assert counts.admit_elements(first, 45) == 45
    counts.end(first)
    assert counts.is_over(first)
    assert counts.begin("job") == first != beside
    assert counts.admit_elements(first, 10) == 10
    assert counts.pause() == {first: 55, beside: 0}
    counts.resume({first: 57, beside: 1})
    counts.pause()
    counts.resume({first: 99, beside: 1})  # of another handler
    assert counts.admit_elements(first, 10) == 2


ENDS = """
import pathlib, sys, weakref
from forebay.service.trainers.group_preemption import exit_with

class Gone: ...

gone = weakref.proxy(Gone())  # whose class cannot be asked for
written = open(sys.argv[1], "w")
written.write("a line")
exit_with(7)
"""


def test_a_process_that_is_killed_in_the_end_has_flushed_its_output(tmp_path: Path) -> None:
    file = tmp_path / "written"
    done = subprocess.run([sys.executable, "-c", ENDS, file], check=False, capture_output=True)
    assert (done.returncode, done.stderr, file.read_text()) == (7, b"", "a line")


@pytest.fixture
def wakeups() -> Iterator[socket.socket]:
    """Who was woken by signals before: the end that is written to."""
    woken, waker = socket.socketpair()
    waker.setblocking(False)
    before = signal.set_wakeup_fd(waker.fileno(), warn_on_full_buffer=False)
    yield waker
    signal.set_wakeup_fd(before)
    for each in (woken, waker):
        each.close()


def preempt() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def test_a_signal_in_place_of_save_fn_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="save_fn='SIGTERM' cannot be called"):
        service.PreemptionHandler("SIGTERM")  # type: ignore[arg-type]


def test_the_with_block_can_be_left_while_its_watcher_thread_ends() -> None:
    for _ in range(300):
        with service.PreemptionHandler(exit_code=None) as handler:
            preempt()
        assert handler.preempted


@pytest.mark.parametrize("how", ["full", "closed"])
def test_a_former_wakeup_socket_that_cannot_be_written_is_no_obstacle(
    wakeups: socket.socket, how: str
) -> None:
    saved: list[float] = []
    with service.PreemptionHandler(saved.append, grace_period_s=60, exit_code=None) as handler:
        if how == "closed":
            wakeups.close()
        else:
            with pytest.raises(BlockingIOError):
                while True:
                    wakeups.send(bytes(4096))
        preempt()
        assert handler.handed_back.wait(30)
    assert saved and saved[0] > 25


def test_save_fn_waits_only_some_seconds_for_elements_to_be_handed_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A consumer cannot be closed."""

    class Stuck:
        taker = None

        def leave(self) -> None:
            go_on.wait()

        def close(self, left: int) -> None: ...

    go_on = threading.Event()
    monkeypatch.setattr(preemption, "HAND_BACK_S", 0.1)
    monkeypatch.setattr(preemption, "open_consumers", lambda: [Stuck()])
    saved: list[float] = []
    try:
        with service.PreemptionHandler(saved.append, grace_period_s=60, exit_code=None):
            preempt()
        assert saved and saved[0] > 30
    finally:
        go_on.set()


def test_the_program_reads_again_once_it_goes_on(
    target: str, caplog: pytest.LogCaptureFixture
) -> None:
    dataset_id = service.register_dataset(target, tf.data.Dataset.range(3))

    def read() -> list[int]:
        return [int(number) for number in service.read(target, dataset_id)]

    while_preempted: list[list[int]] = []
    with (
        service.PreemptionHandler(exit_code=None) as outer,
        service.PreemptionHandler(lambda _: while_preempted.append(read()), exit_code=None),
    ):
        preempt()
        while_preempted.append(read())
    assert outer.preempted and while_preempted == [[], []]
    assert "this process is to stop" in caplog.text
    assert sorted(read()) == [0, 1, 2] and not open_iterations.stopping.is_set()
