"""Groups of consumers of an ordered read, each with a thread, and what they get put in order."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from forebay import service
from forebay.service.client.reader import OrderedIterator

from .cluster import WorkerProcess
from .stock import DispatcherProcess

PATIENCE_S = 90

At = Mapping[int, Callable[[], object]]
"""What happens before a consumer asks for its element or batch of this number."""


@dataclass
class Got:
    """What a group got: its elements as bytes, in the global order, and where it stands."""

    elements: list[bytes]
    states: list[dict[str, Any]]

    @property
    def digest(self) -> str:
        """SHA-256 over the elements' bytes, in their order."""
        sha = hashlib.sha256()
        for element in self.elements:
            sha.update(len(element).to_bytes(8, "little"))
            sha.update(element)
        return sha.hexdigest()

    @property
    def state(self) -> dict[str, Any]:
        """The one position of all consumers."""
        assert all(state == self.states[0] for state in self.states), self.states
        return self.states[0]

    @property
    def numbers(self) -> list[int]:
        """The elements, if they are int64 scalars."""
        return [int(np.frombuffer(element, np.int64)[0]) for element in self.elements]


def as_bytes(element: Any) -> bytes:
    """An element: its bytes, those of its parts, or an array's with its shape."""
    if isinstance(element, bytes):
        return element
    if isinstance(element, dict):
        element = tuple(element[name] for name in sorted(element))
    if isinstance(element, tuple):
        return b"|".join(map(as_bytes, element))
    array = np.asarray(element)
    return array.tobytes() + (repr(array.shape).encode() if array.shape else b"")


def opened(target: str, dataset_id: str, **order: Any) -> OrderedIterator:
    """One consumer's iterator."""
    elements = service.read(target, dataset_id, ordered=True, **order)
    assert isinstance(elements, OrderedIterator)
    return elements


def read(
    target: str,
    dataset_id: str,
    consumers: int = 1,
    *,
    steps: int | None = None,
    state: dict[str, Any] | None = None,
    at: At | None = None,
    in_lockstep: bool = False,
    **order: Any,
) -> Got:
    """Read to the end of the epoch, or `steps` batches each. Before consumer 0 asks for its batch
    number n, `at[n]` is called; `in_lockstep`, nobody asks for it earlier."""
    batch_size = order.get("batch_size")
    ready = threading.Barrier(consumers)

    def consume(index: int) -> tuple[list[list[bytes]], dict[str, Any]]:
        how = {**order, "consumer_index": index, "num_consumers": consumers}
        batches: list[list[bytes]] = []
        with opened(target, dataset_id, **how) as elements:
            if state is not None:
                elements.load_state_dict(state)
            for number in itertools.count() if steps is None else range(steps):
                if index == 0 and at is not None and number in at:
                    at[number]()
                if in_lockstep:
                    ready.wait(PATIENCE_S)
                batch = next(elements, None)
                if batch is None:
                    break
                batches.append([*map(as_bytes, [batch] if batch_size is None else batch)])
            ready.wait(PATIENCE_S)  # a group ends together
            return batches, elements.state_dict()

    with ThreadPoolExecutor(consumers) as pool:
        results = [*pool.map(consume, range(consumers))]
    elements = [
        element
        for step in itertools.zip_longest(*(batches for batches, _ in results), fillvalue=[])
        for batch in step
        for element in batch
    ]
    return Got(elements, [state for _, state in results])


class Cluster:
    """A dispatcher and workers, that are killed, stopped and started."""

    def __init__(self, storage: Any, workers: int) -> None:
        self._stack = contextlib.ExitStack()
        self.journal = storage
        self.dispatcher = self._stack.enter_context(DispatcherProcess(storage))
        self.target = self.dispatcher.target
        self.workers: list[WorkerProcess] = []
        self.resize(workers)

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self.workers:
            worker.kill()
        self._stack.close()

    def resize(self, workers: int) -> None:
        """Start or kill workers until there are so many."""
        while len(self.workers) > workers:
            self.kill_worker()
        new = [WorkerProcess(self.dispatcher.address) for _ in range(workers - len(self.workers))]
        for worker in new:
            self.workers.append(worker.wait_until_registered())

    def kill_worker(self) -> None:
        """SIGKILL for the one that was started first."""
        self.workers.pop(0).kill()

    def replace_worker(self) -> None:
        """SIGKILL for the one that was started first, and another one."""
        count = len(self.workers)
        self.kill_worker()
        self.resize(count)

    @contextlib.contextmanager
    def stopped_worker(self) -> Iterator[None]:
        """SIGSTOP, and SIGCONT at the end."""
        with self.workers[0].paused():
            yield


def stop_and_continue_worker(cluster: Cluster, number: int) -> At:
    """SIGSTOP before this number, and SIGCONT three seconds later."""
    paused = cluster.stopped_worker()

    def stop() -> None:
        paused.__enter__()
        threading.Timer(3, paused.__exit__, (None, None, None)).start()

    return {number: stop}


def kill_worker(cluster: Cluster) -> At:
    return {5: cluster.replace_worker, 20: cluster.replace_worker}


def kill_dispatcher(cluster: Cluster) -> At:
    return {5: cluster.dispatcher.kill, 20: cluster.dispatcher.restart}


def stop_worker(cluster: Cluster) -> At:
    return stop_and_continue_worker(cluster, 5)


TROUBLES = pytest.mark.parametrize(
    "trouble", [kill_worker, kill_dispatcher, pytest.param(stop_worker, marks=pytest.mark.long)]
)
"""What happens to the servers while a group reads."""


def uneven_numbers(splits: int) -> Any:
    """A tf.data.Dataset whose bundles have different lengths; some are empty."""
    import tensorflow as tf

    return tf.data.Dataset.range(splits).filter(lambda x: (x * x) % 7 < x // 100 % 7)
