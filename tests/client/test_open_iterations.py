"""A consumer that other threads close while one reads."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from forebay.service.client.consumer import Consumer
from forebay.service.client.links import Links
from forebay.service.client.open_iterations import close_between_steps
from forebay.service.delivery import EndOfTask
from forebay.service.errors import InvalidArgument
from forebay.service.proto import forebay_pb2 as pb

from .connections import Client, consuming, news

TIMEOUT_S = 60


@pytest.fixture
def consumer(connections: None) -> Iterator[Consumer]:
    with consuming() as made:
        yield made


def in_thread(call: Any) -> threading.Thread:
    thread = threading.Thread(target=call)
    thread.start()
    return thread


def test_a_link_opened_during_leave_is_closed(
    consumer: Consumer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If it stayed open, it would take blocks that nobody reads."""
    real, barrier = Links._connected, threading.Barrier(2, timeout=TIMEOUT_S)
    left = threading.Event()
    blocks: list[Any] = []

    def open_slowly(self: Links, task: pb.TaskInfo) -> Any:
        barrier.wait()
        left.wait(0.2)  # who leaves waits for us, or has been and gone
        return real(self, task)

    monkeypatch.setattr(Links, "_connected", open_slowly)
    consumer._hear(news(1))
    reader = in_thread(lambda: blocks.extend(consumer.blocks()))
    barrier.wait()
    consumer.leave()
    left.set()
    reader.join(TIMEOUT_S)
    assert not reader.is_alive() and not blocks
    assert all(client.closed for client in Client.all.values())


def test_close_during_the_removal_of_a_worker(
    consumer: Consumer, monkeypatch: pytest.MonkeyPatch
) -> None:
    consumer.mode.update(news(1, 2))
    consumer.mode.end((1, 0), EndOfTask())
    close = Client.close

    def close_all(self: Client, *arguments: Any) -> bool:
        monkeypatch.setattr(Client, "close", close)
        in_thread(consumer.close).join(TIMEOUT_S)
        return close(self, *arguments)

    monkeypatch.setattr(Client, "close", close_all)
    consumer.mode.update(news(2))
    assert all(client.closed for client in Client.all.values())


def test_a_second_close_waits_for_the_first(
    consumer: Consumer, monkeypatch: pytest.MonkeyPatch
) -> None:
    consumer.mode.update(news(1))
    closing, go_on = threading.Event(), threading.Event()
    close = Client.close

    def close_slowly(self: Client, *arguments: Any) -> bool:
        closing.set()
        assert go_on.wait(TIMEOUT_S)
        return close(self, *arguments)

    monkeypatch.setattr(Client, "close", close_slowly)
    first = in_thread(consumer.close)
    assert closing.wait(TIMEOUT_S)
    second = in_thread(consumer.close)
    second.join(0.2)
    assert second.is_alive()
    go_on.set()
    first.join(TIMEOUT_S)
    second.join(TIMEOUT_S)
    assert Client.all[11].closed and not second.is_alive()


def test_only_a_taker_in_use_by_another_thread_may_refuse_close(consumer: Consumer) -> None:
    class Taker:
        def __init__(self, error: Exception) -> None:
            self.error = error

        def close(self) -> None:
            raise self.error

    consumer.taker = Taker(InvalidArgument("a bug"))  # type: ignore[assignment]
    with pytest.raises(InvalidArgument):
        close_between_steps(consumer)
    consumer.taker = Taker(ValueError("generator already executing"))  # type: ignore[assignment]
    close_between_steps(consumer)
    assert consumer._closed.is_set()
