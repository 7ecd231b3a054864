"""`PreemptionHandler` in this process, which goes on."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Iterator

import pytest
import tensorflow as tf

from forebay import service
from forebay.service.client import open_iterations
from forebay.service.errors import InvalidArgument
from forebay.service.trainers import preemption

from .conftest import target

__all__ = ["target"]


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
