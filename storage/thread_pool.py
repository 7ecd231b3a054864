"""ThreadPool: threads that never hold up the end of the process.

The interpreter joins the threads of `concurrent.futures.ThreadPoolExecutor` at its exit, before
anything could stop what they wait for. A thread here may wait for a reader, a dispatcher or a file
system, so it is a daemon thread, and its owner stops it.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from functools import partial
from typing import Any, TypeVar

T = TypeVar("T")


class ThreadPool(Executor):
    """Runs work in at most `most` threads, in the order in which it was submitted. A thread starts
    when there is work and none is idle, and ends at `shutdown`. Thread-safe."""

    def __init__(self, most: int, name: str) -> None:
        self._most, self._name = most, name
        self._lock = threading.Lock()  # guards what follows
        self._threads: list[threading.Thread] = []
        self._free = 0  # idle threads, less the queued work
        self._is_shut = False
        self._queue: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]
        self._queue = queue.SimpleQueue()

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        """Raises RuntimeError after `shutdown`, or if the system starts no thread."""
        future: Future[T] = Future()
        with self._lock:
            if self._is_shut:
                raise RuntimeError(f"the thread pool {self._name!r} has been shut down")
            if self._free <= 0 and len(self._threads) < self._most:
                name = f"{self._name}_{len(self._threads)}"
                thread = threading.Thread(target=self._run, name=name, daemon=True)
                thread.start()
                self._threads.append(thread)
                self._free += 1
            self._free -= 1
            self._queue.put((future, partial(fn, *args, **kwargs)))
        return future

    async def run(self, work: Callable[..., T], *args: Any) -> T:
        """Returns or raises what `work` does. Cancelling does not stop work that has begun."""
        return await asyncio.wrap_future(self.submit(work, *args))

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Take no more work. `wait` until what was submitted has ended; `cancel_futures` cancels
        what has not begun. Called by a thread of its own, it does not wait for that one.
        Idempotent."""
        with self._lock:
            self._is_shut = True
            while cancel_futures:
                try:
                    work = self._queue.get_nowait()
                except queue.Empty:
                    break
                if work is not None:
                    work[0].cancel()
            for _ in self._threads:
                self._queue.put(None)
        for thread in self._threads if wait else ():
            if thread is not threading.current_thread():
                thread.join()

    def _run(self) -> None:
        while (work := self._queue.get()) is not None:
            _carry_out(*work)
            del work  # what it holds is free while this thread is idle
            with self._lock:
                self._free += 1


async def in_a_thread(name: str, work: Callable[..., T], *args: Any) -> T:
    """As `asyncio.to_thread`, in a thread of its own that the process's end does not wait for."""
    pool = ThreadPool(1, name)
    try:
        return await pool.run(work, *args)
    finally:
        pool.shutdown(wait=False)


def _carry_out(future: Future[Any], work: Callable[[], Any]) -> None:
    if future.set_running_or_notify_cancel():
        try:
            result = work()
        except BaseException as error:  # noqa: BLE001 - who waits for it gets it
            future.set_exception(error)
            del future, work  # else the error's traceback would keep them, and they the error
        else:
            future.set_result(result)
