"""How far a trainer has come, which says what is handed back."""

from __future__ import annotations

import gc
import queue
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import pytest

from forebay.service.blocks import Block, Component
from forebay.service.client.batches import Layout, laid_out
from forebay.service.client.deferred_closer import deferred_closer
from forebay.service.client.open_iterations import Taker
from forebay.service.client.progress import Blocks, EpochIterator, Progress

LAYOUT = Layout('{"tensor": "int64", "shape": []}')


class Epoch:
    """Three blocks of four elements, and how many of the last one were left."""

    left: int | None = None

    def iterate(self, taker: Taker) -> Blocks:
        try:
            for first in range(0, 12, 4):
                yield Block(4, (Component(np.arange(first, first + 4)),))
        finally:
            self.left = taker.left()

    def taking(self, batch_size: int | None) -> EpochIterator:
        def give(blocks: Blocks, progress: Progress) -> Iterator[Any]:
            return laid_out(blocks, progress, layout=LAYOUT, batch_size=batch_size)

        return EpochIterator(self.iterate, give)


@pytest.mark.parametrize(
    ("size", "lefts"),
    [
        (None, [3, 2, 1, 0, 3, 2, 1, 0, 3, 2, 1, 0]),
        (1, [3, 2, 1, 0, 3, 2, 1, 0, 3, 2, 1, 0]),
        (3, [1, 2, 3, 0]),
        (5, [3, 2, 0]),
        (8, [0, 0]),
        (100, [0]),
    ],
)
@pytest.mark.parametrize("how", ["leave", "close", "drop"])
def test_elements_left_of_a_block(size: int | None, lefts: list[int], how: str) -> None:
    gc.disable()
    try:
        for taken, left in enumerate(lefts, 1):
            epoch = Epoch()
            taking = epoch.taking(size)
            given = [next(taking) for _ in range(taken)]
            assert np.hstack(given).tolist() == [*range(min(taken * (size or 1), 12))]
            if how == "leave":
                taking.leave()
                assert epoch.left is None or taken == len(lefts)
                assert list(taking) == []
            elif how == "close":
                taking.close()
                assert list(taking) == []
            else:
                del taking
                deferred_closer.wait()
            assert epoch.left == left
    finally:
        gc.enable()


def test_a_collected_iterator_is_left_in_another_thread_whatever_lock_is_held() -> None:
    """Garbage is collected anywhere, also in a lock that leaving needs."""
    lock, left_by = threading.Lock(), queue.SimpleQueue[str]()

    def iterate(_: Taker) -> Blocks:
        try:
            yield Block(4, (Component(np.arange(4)),))
        finally:
            with lock:
                left_by.put(threading.current_thread().name)

    for _ in range(3):
        taking = EpochIterator(iterate, partial(laid_out, layout=LAYOUT, batch_size=None))
        assert next(taking) == 0
        cycle: list[Any] = [taking]
        cycle.append(cycle)
        with lock:
            del taking, cycle
            gc.collect()
        assert left_by.get(timeout=60) == "forebay-leaving"


@pytest.mark.parametrize("size", [None, 5])
def test_threads_that_share_an_iterator_take_turns(size: int | None) -> None:
    """Without turns they crash the process, within itertools.chain."""

    def iterate(_: Taker) -> Blocks:
        for first in range(0, 400, 4):
            time.sleep(1e-4)  # another thread runs
            yield Block(4, (Component(np.arange(first, first + 4)),))

    taking = EpochIterator(iterate, partial(laid_out, layout=LAYOUT, batch_size=size))
    with ThreadPoolExecutor(4) as threads:
        taken = [*threads.map(lambda _: np.hstack([*taking, []]), range(4))]
    assert sorted(np.hstack(taken)) == [*range(400)]
