"""What the product sees of threads and time: `threading`, `queue` and `time`, simulated."""

from __future__ import annotations

import collections
import queue as real_queue
import threading as real_threading
import time as real_time
from collections.abc import Callable, Iterable, Mapping
from types import SimpleNamespace, TracebackType
from typing import Any

from greenlet import GreenletExit

from .kernel import Process, SimThread, kernel

EPOCH_S = 1_700_000_000.0


class WaitingRoom:
    """Threads that wait for the same thing, in the order in which they came."""

    def __init__(self) -> None:
        self._threads: list[SimThread] = []

    def __len__(self) -> int:
        return len(self._threads)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until notified; whether that was in time."""
        this = kernel().current
        if kernel().over or this is None:
            raise GreenletExit
        self.enter(this)
        try:
            return kernel().wait(timeout_s)
        finally:
            self.leave(this)

    def enter(self, thread: SimThread) -> None:
        self._threads.append(thread)

    def leave(self, thread: SimThread) -> None:
        if thread in self._threads:
            self._threads.remove(thread)

    def notify(self, count: int = 1) -> None:
        for thread in self._threads[:count]:
            self._threads.remove(thread)
            kernel().wake(thread)

    def notify_all(self) -> None:
        if self._threads:
            self.notify(len(self._threads))


class Lock:
    """threading.Lock. Yielding at acquisition is what makes races between threads show."""

    def __init__(self) -> None:
        self._locked = False
        self._room = WaitingRoom()

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        this = kernel()
        this.maybe_yield()
        give_up = None if timeout < 0 else this.now + timeout
        while self._locked:
            if this.over:
                raise GreenletExit
            if not blocking:
                return False
            left = None if give_up is None else give_up - this.now
            if left is not None and left <= 0:
                return False
            self._room.wait(left)
        self._locked = True
        return True

    def release(self) -> None:
        if not self._locked:
            raise RuntimeError("release unlocked lock")
        self._locked = False
        if self._room:
            self._room.notify()

    def locked(self) -> bool:
        return self._locked

    __enter__ = acquire

    def __exit__(self, *_: object) -> None:
        if self._locked or not kernel().over:
            self.release()


class RLock:
    """threading.RLock."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._owner: SimThread | None = None
        self._count = 0

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        this = kernel().current
        if self._owner is not this:
            if not self._lock.acquire(blocking, timeout):
                return False
            self._owner = this
        self._count += 1
        return True

    def release(self) -> None:
        self._count -= 1
        if not self._count:
            self._owner = None
            self._lock.release()

    def release_all(self) -> int:
        count, self._count, self._owner = self._count, 0, None
        self._lock.release()
        return count

    def acquire_again(self, count: int) -> None:
        self._lock.acquire()
        self._owner, self._count = kernel().current, count

    __enter__ = acquire

    def __exit__(self, *_: object) -> None:
        if self._count or not kernel().over:
            self.release()


class Condition:
    """threading.Condition."""

    def __init__(self, lock: Lock | RLock | None = None) -> None:
        self._lock: Lock | RLock = lock if lock is not None else RLock()
        self._room = WaitingRoom()
        self.acquire = self._lock.acquire
        self.release = self._lock.release

    def __enter__(self) -> bool:
        return self._lock.__enter__()

    def __exit__(self, *args: object) -> None:
        self._lock.__exit__(*args)

    def wait(self, timeout: float | None = None) -> bool:
        lock = self._lock
        count = 0
        if isinstance(lock, RLock):
            count = lock.release_all()
        else:
            lock.release()
        try:
            return self._room.wait(timeout)
        finally:
            if not kernel().over:
                if isinstance(lock, RLock):
                    lock.acquire_again(count)
                else:
                    lock.acquire()

    def wait_for(self, predicate: Callable[[], Any], timeout: float | None = None) -> Any:
        give_up = None if timeout is None else kernel().now + timeout
        while not (result := predicate()):
            left = None if give_up is None else give_up - kernel().now
            if left is not None and left <= 0:
                break
            self.wait(left)
        return result

    def notify(self, n: int = 1) -> None:
        self._room.notify(n)

    def notify_all(self) -> None:
        self._room.notify_all()


class Event:
    """threading.Event."""

    def __init__(self) -> None:
        self._set = False
        self._room = WaitingRoom()

    def is_set(self) -> bool:
        return self._set

    def set(self) -> None:
        self._set = True
        self._room.notify_all()
        kernel().maybe_yield()

    def clear(self) -> None:
        self._set = False

    def wait(self, timeout: float | None = None) -> bool:
        kernel().maybe_yield()
        if not self._set:
            self._room.wait(timeout)
        return self._set


class Semaphore:
    """threading.Semaphore."""

    def __init__(self, value: int = 1) -> None:
        self._value = value
        self._room = WaitingRoom()

    def acquire(self, blocking: bool = True, timeout: float | None = None) -> bool:
        give_up = None if timeout is None else kernel().now + timeout
        while not self._value:
            left = None if give_up is None else give_up - kernel().now
            if not blocking or (left is not None and left <= 0):
                return False
            self._room.wait(left)
        self._value -= 1
        return True

    def release(self, n: int = 1) -> None:
        self._value += n
        self._room.notify(n)

    __enter__ = acquire

    def __exit__(self, *_: object) -> None:
        self.release()


class Thread:
    """threading.Thread, in the process of whoever makes it."""

    def __init__(
        self,
        group: None = None,
        target: Callable[..., object] | None = None,
        name: str | None = None,
        args: Iterable[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        daemon: bool | None = None,
    ) -> None:
        self.name = name or f"Thread-{getattr(target, '__name__', '')}"
        self.daemon = bool(daemon)
        self._target = target
        self._args = tuple(args)
        self._kwargs = dict(kwargs or {})
        self._thread: SimThread | None = None
        self._ended = WaitingRoom()

    def __hash__(self) -> int:
        """A pool joins its threads in the order of a set; not in that of their addresses."""
        return 0

    @property
    def ident(self) -> int | None:
        return None if self._thread is None else self._thread.number

    def start(self) -> None:
        if self._thread is not None:
            raise RuntimeError("threads can only be started once")
        if kernel().over:
            raise GreenletExit
        self._thread = process().spawn(self.name, self.run)
        self._thread.facade = self
        self._thread.at_end = self._ended.notify_all

    def run(self) -> None:
        if self._target is not None:
            self._target(*self._args, **self._kwargs)

    def is_alive(self) -> bool:
        return self._thread is not None and not self._thread.finished

    def join(self, timeout: float | None = None) -> None:
        thread, this = self._thread, kernel()
        if thread is None or thread is this.current:
            raise RuntimeError("cannot join a thread that is not started, or the current one")
        give_up = None if timeout is None else this.now + timeout
        while not thread.finished:
            left = None if give_up is None else give_up - this.now
            if left is not None and left <= 0:
                return
            self._ended.wait(left)


class SimpleQueue:
    """queue.SimpleQueue."""

    def __init__(self) -> None:
        self._items: collections.deque[Any] = collections.deque()
        self._room = WaitingRoom()

    def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
        self._items.append(item)
        self._room.notify()
        kernel().maybe_yield()

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        give_up = None if timeout is None else kernel().now + timeout
        while not self._items:
            left = None if give_up is None else give_up - kernel().now
            if not block or (left is not None and left <= 0):
                raise real_queue.Empty
            self._room.wait(left)
        return self._items.popleft()

    def get_nowait(self) -> Any:
        return self.get(block=False)

    def empty(self) -> bool:
        return not self._items

    def qsize(self) -> int:
        return len(self._items)


class Uncontended:
    """A lock that is never held across a wait: nobody ever finds it taken."""

    def __enter__(self) -> None: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None: ...


def process() -> Process:
    """The process whose thread is running."""
    current = kernel().current
    assert current is not None, "no simulated thread is running"
    return current.process


def _current_thread() -> Any:
    current = kernel().current
    if current is None:
        return real_threading.current_thread()
    if current.facade is None:
        current.facade = Thread(name=current.name)
        current.facade._thread = current
    return current.facade


def _native_id() -> int:
    current = kernel().current
    return 0 if current is None else current.number


def _monotonic() -> float:
    this = kernel()
    current = this.current
    return this.now if current is None else this.now + current.process.monotonic_offset_s


def _wall() -> float:
    current = kernel().current
    offset = current.process.wall_offset_s if current is not None else 0.0
    return EPOCH_S + kernel().now + offset


def _sleep(seconds: float) -> None:
    kernel().sleep(seconds)


threading = SimpleNamespace(
    Condition=Condition,
    Event=Event,
    Lock=Lock,
    RLock=RLock,
    Semaphore=Semaphore,
    Thread=Thread,
    current_thread=_current_thread,
    get_ident=_native_id,
    get_native_id=_native_id,
    main_thread=real_threading.main_thread,
    local=real_threading.local,
)
queue = SimpleNamespace(SimpleQueue=SimpleQueue, Empty=real_queue.Empty, Full=real_queue.Full)
time = SimpleNamespace(
    monotonic=_monotonic,
    perf_counter=_monotonic,
    time=_wall,
    time_ns=lambda: int(_wall() * 1e9),
    sleep=_sleep,
    strftime=real_time.strftime,
    gmtime=real_time.gmtime,
    localtime=real_time.localtime,
)
