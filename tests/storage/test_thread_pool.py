from __future__ import annotations

import gc
import threading
import weakref

import pytest

from forebay.storage.thread_pool import ThreadPool


def test_it_runs_as_much_at_a_time_as_it_may() -> None:
    pool, together, go_on = ThreadPool(2, "two"), threading.Barrier(3), threading.Event()

    def work(number: int) -> int:
        if number < 2:
            together.wait(30)
            assert go_on.wait(30)
        return number

    futures = [pool.submit(work, number) for number in range(5)]
    together.wait(30)  # two run side by side
    assert not any(future.running() for future in futures[2:])
    go_on.set()
    assert [future.result(30) for future in futures] == [*range(5)]
    pool.shutdown()
    with pytest.raises(RuntimeError, match="'two' has been shut down"):
        pool.submit(int)


def test_a_thread_that_is_idle_is_used_again() -> None:
    pool = ThreadPool(8, "reused")
    names = {pool.submit(lambda: threading.current_thread().name).result(30)}
    for _ in range(100):
        names.add(pool.submit(lambda: threading.current_thread().name).result(30))
    assert len(names) <= 2  # a result is there a moment before its thread is idle
    pool.shutdown()


def test_what_has_not_begun_is_cancelled_and_the_rest_awaited() -> None:
    pool, begun, go_on = ThreadPool(1, "one"), threading.Event(), threading.Event()

    def work() -> bool:
        begun.set()
        return go_on.wait(30)

    first, second = pool.submit(work), pool.submit(int)
    assert begun.wait(30)
    threading.Timer(0.05, go_on.set).start()
    pool.shutdown(cancel_futures=True)
    assert first.result(0) and second.cancelled()
    pool.shutdown()


def test_one_of_its_threads_may_shut_it_down() -> None:
    pool = ThreadPool(1, "own")
    assert pool.submit(pool.shutdown).result(30) is None


def test_errors_reach_the_waiter_and_leave_nothing_behind() -> None:
    class Kept:
        pass

    pool, kept = ThreadPool(1, "errors"), Kept()
    there = weakref.ref(kept)

    def fail(what: Kept) -> None:
        raise ValueError("of the work")

    gc.disable()
    try:
        future = pool.submit(fail, kept)
        assert isinstance(future.exception(30), ValueError)
        pool.shutdown()
        del kept, future
        assert there() is None
    finally:
        gc.enable()
