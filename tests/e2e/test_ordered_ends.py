"""Ordered reads near the end of an epoch, where it is not known yet how long the epoch is."""

from __future__ import annotations

import pathlib
import threading
import time
from collections.abc import Iterator
from typing import Any

from forebay import service
from forebay.service.client.reader import OrderedIterator

from ..cluster import WorkerProcess
from ..stock import DispatcherProcess


def slow_to_end(split: int) -> Iterator[int]:
    yield from range(5)
    time.sleep(1)  # so that steps are given while nobody knows the epoch's end


def test_no_position_lies_behind_the_end(tmp_path: pathlib.Path) -> None:
    """The last step has an element of one consumer only."""
    states: list[list[Any]] = [[], []]
    elements: list[list[int]] = [[], []]
    with DispatcherProcess(tmp_path) as dispatcher, WorkerProcess(dispatcher.address):
        target = dispatcher.target
        dataset_id = service.register_dataset(target, slow_to_end, splits=range(1))

        def read(index: int) -> None:
            with service.read(
                target, dataset_id, ordered=True, consumer_index=index, num_consumers=2
            ) as found:
                assert isinstance(found, OrderedIterator)
                for element in found:
                    elements[index].append(int(element))
                    states[index].append(found.state_dict()["position"])

        threads = [threading.Thread(target=read, args=(i,)) for i in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert elements == [[0, 2, 4], [1, 3]]
    assert states == [[2, 4, 5], [2, 4]]
