"""Appends that go on while the server of a storage is disturbed, and what is to be seen of them."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

from forebay.chaos.proxy import drop_packets, keep_packets
from forebay.storage import StorageError, Writer, open_storage

from ..postgres_server import PostgresServer
from ..redis_server import wait_until
from ..transport.peers import Proxy

CONNECTIONS = "FROM pg_stat_activity WHERE application_name LIKE 'forebay%'"
"""Those of storages to a PostgreSQL."""


def fresh(server: PostgresServer) -> PostgresServer:
    """It, without a journal, and without what other tests have left connected."""
    server.execute(f"SELECT pg_terminate_backend(pid) {CONNECTIONS}")
    wait_until("they are gone", lambda: server.execute(f"SELECT {CONNECTIONS}") == [])
    server.execute("DROP SCHEMA IF EXISTS forebay CASCADE")
    return server


class Appender:
    """Appends b"1", b"2", b"3" … in batches of changing size, until told to stop.

    Each number has at least so many digits.
    """

    def __init__(self, writer: Writer, digits: int = 1) -> None:
        self.acknowledged = 0
        self.error: StorageError | None = None
        self._writer = writer
        self._digits = digits
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work, name="appender")
        self._thread.start()

    def _work(self) -> None:
        size = 0
        try:
            while not self._stop.is_set():
                size = size % 7 + 1
                begin = self.acknowledged + 1
                self.acknowledged = self._writer.append(
                    [b"%0*d" % (self._digits, number) for number in range(begin, begin + size)]
                )
        except StorageError as error:
            self.error = error

    def wait_for_more(self) -> None:
        before = self.acknowledged
        wait_until("more is appended", lambda: self.acknowledged > before + 7 or self.error)
        assert self.error is None

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(60)
        assert not self._thread.is_alive()


def read_numbers(url: str) -> list[int]:
    return [int(record.data) for record in open_storage(url).read()]


@contextlib.contextmanager
def appending(to: str | Writer, *, read_at: str = "", digits: int = 1) -> Iterator[Appender]:
    """Meanwhile there are appends to a storage, and afterwards, too. In the end all is there that
    was acknowledged, once and in order: at the same URL, or at another one of it."""
    writer = open_storage(to).open_writer("the test") if isinstance(to, str) else to
    appender = Appender(writer, digits)
    try:
        yield appender
        appender.wait_for_more()
    finally:
        appender.stop()
        assert appender.error is None
        numbers = read_numbers(read_at or str(to))
        assert numbers == list(range(1, appender.acknowledged + 1))


class LossyProxy(Proxy):
    """Between a client and its server: loses, on request, what one side says, and hangs up."""

    def __init__(
        self,
        target_port: int,
        *,
        is_append: Callable[[bytes], bool],
        is_done: Callable[[bytes], bool],
    ) -> None:
        self.lose_requests = 0  # so many of the next ones
        self.lose_replies = 0
        self.lost = 0
        self.delay = threading.Event()  # the next append is, and its connection stays
        self.arrives = threading.Event()  # and comes to the server now
        self._is_append = is_append
        self._is_done = is_done
        super().__init__(target_port, lambda: (self._there, self._back))

    def cut_off(self) -> None:
        """Let packets vanish from now on, also those that would make new connections."""
        for each in (self._listener, *self._open):
            drop_packets(each)

    def reachable_again(self) -> None:
        """For new connections; those that there are stay cut off."""
        keep_packets(self._listener)

    def _there(self, data: bytes) -> tuple[bytes, bool]:
        if self._is_append(data) and self.delay.is_set():
            self.delay.clear()
            self.arrives.wait(60)
        elif self._is_append(data) and self.lose_requests:
            self.lose_requests -= 1
            self.lost += 1
            return b"", False
        return data, True

    def _back(self, data: bytes) -> tuple[bytes, bool]:
        if self._is_done(data) and self.lose_replies:
            self.lose_replies -= 1
            self.lost += 1
            return b"", False
        return data, True
