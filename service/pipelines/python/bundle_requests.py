"""In a child: runs bundles of the dataset that the function builds, several at a time.

Bundles that run at the same time have a thread and a connection to the worker each, so that neither
end need sort the messages of one from those of another. TensorFlow runs all of them from one trace.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

from ... import malloc
from ..splits import SplitRange
from .child_blocks import BundleCancelled, FunctionFailed, failures
from .columns import columns_of
from .split_requests import ListeningSender

if TYPE_CHECKING:
    from .built import BuiltDataset


def serve_bundles(built: BuiltDataset | FunctionFailed, connection: int, at: memoryview) -> None:
    """Serve a socket in a thread, until the worker closes it. `at` is the file that says where the
    bundle is. A failure is what each bundle ends with."""
    sender = BundleSender(socket.socket(fileno=connection))
    place = [-1, -1]  # as `at`, but that it says whether the dataset was opened

    def send_elements(first: int, count: int, number: int, seed: int, start: int) -> None:
        if isinstance(built, FunctionFailed):
            raise built
        splits = SplitRange(first, count, 0)
        made = built.bundle(splits, number=number, seed=seed, start=start)
        sender.when_cancelled(made.cancel)
        place[:] = 0, start
        if not start:  # else it makes and drops elements, which may take as long as its start may
            at[0], at[1] = 0, 0
        behind = start
        with contextlib.closing(made.blocks()) as blocks:
            for block in blocks:
                malloc.keep_large_buffers_now()  # a `from_generator` may have changed it
                behind += block.count
                place[1] = at[1] = behind
                at[0] = 0
                sender.send_columns(block.count, columns_of(block), (0, behind))

    def serve() -> None:
        with contextlib.closing(sender), contextlib.suppress(BundleCancelled):
            while True:
                _, *request = sender.told()
                place[:] = -1, -1
                try:
                    with failures(place):
                        send_elements(*request)
                    sender.send(["end"])
                except FunctionFailed as failed:
                    sender.send(["failed", *failed.args])
                finally:
                    sender.when_cancelled(lambda: None)  # it must not keep the bundle

    threading.Thread(target=serve, name="forebay-bundles", daemon=True).start()


class BundleSender(ListeningSender):
    """A connection for bundles: only its bundle ends with it."""

    def __init__(self, connection: socket.socket) -> None:
        super().__init__(connection)
        self._cancelled = False
        self._cancel: Callable[[], None] = lambda: None

    def told(self) -> list[Any]:
        """The next request. Raises BundleCancelled."""
        if not (message := super().told()):
            raise BundleCancelled
        return message

    def when_cancelled(self, cancel: Callable[[], None]) -> None:
        """Call this once the worker has closed the connection, in another thread; at once if it
        has."""
        with self._freed:
            self._cancel = cancel
            cancelled = self._cancelled
        if cancelled:
            cancel()

    def close(self) -> None:
        """Wait until the worker has closed its end, and close this one."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_WR)
        self._listening.join()
        self._connection.close()

    def _listen(self) -> None:
        try:
            while True:
                self._hear(self._receive())
        except BundleCancelled:
            pass
        except BaseException:  # noqa: BLE001 - the bundle must end, and with it the connection
            traceback.print_exc()
        finally:
            with self._freed:
                self._cancelled = True
                self._freed.notify()
                cancel = self._cancel
            cancel()
            self._told.put([])

    def _wait_for_credit(self) -> None:
        with self._freed:
            self._freed.wait_for(lambda: self._credit > 0 or self._cancelled)
            if self._cancelled:
                raise BundleCancelled

    def _be_left(self) -> NoReturn:
        raise BundleCancelled
