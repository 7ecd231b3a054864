"""Elements of every kind, from four workers to four consumers, whoever dies meanwhile."""

from __future__ import annotations

import collections
import os
import random
import socket
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any, NamedTuple

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.data.experimental.ops import testing

from forebay import service
from forebay.service import DispatchServer, WorkerConfig, WorkerServer
from forebay.service.processes import free_port

from ..cluster import WorkerProcess
from ..scrapes import scraped, value
from ..stock import DispatcherProcess
from ..transport.peers import Damage, MeddlingProxy

OFF, DYNAMIC = service.ShardingPolicy.OFF, service.ShardingPolicy.DYNAMIC
WORKERS = CONSUMERS = 4


class Kind(NamedTuple):
    """Elements that look alike; `content` makes one of its number."""

    elements: int
    content: Callable[[Any], Any]


def values(number: Any, size: Any) -> Any:
    """int32 [size], other ones for every number."""
    return tf.cast(number, tf.int32) * 7919 + tf.range(size) * 40_503


def text(number: Any) -> Any:
    return tf.strings.reduce_join(tf.strings.as_string(values(number, 120)))


def ragged(number: Any) -> Any:
    size = tf.cast(number % 9, tf.int32)
    return tf.RaggedTensor.from_row_lengths(values(number, size), [size // 2, size - size // 2])


def nested(number: Any) -> Any:
    return {
        "texts": (text(number), tf.strings.as_string(number)),
        "matrix": tf.reshape(values(number, 48), [2, 4, 6]),
        "some": tf.cast(values(number, tf.cast(number % 5, tf.int32)), tf.float64),
    }


KINDS = {
    "scalars": Kind(10_000, lambda number: values(number, 1)[0]),
    "strings of 1 KB": Kind(3_000, text),
    "images of 200 KB": Kind(400, lambda number: tf.bitcast(values(number, 50_000), tf.uint8)),
    "arrays of 5 MB": Kind(40, lambda number: values(number, 1_250_000)),
    "ragged": Kind(2_000, ragged),
    "nested": Kind(2_000, nested),
}


def chosen(*essential: str) -> list[Any]:
    """All kinds, of which `make test` reads these."""
    long = pytest.mark.long
    return [pytest.param(kind, marks=[] if kind in essential else long) for kind in KINDS]


# -- elements that can be checked --------------------------------------------------------------


def dataset_of(kind: Kind, elements: int) -> Any:
    """Each element is its number, its content, and a checksum of both, made where it was made."""

    def element(number: Any) -> Any:
        content = kind.content(number)
        total = number
        for leaf in tf.nest.flatten(content, expand_composites=True):
            raw = tf.io.decode_raw(leaf, tf.uint8) if leaf.dtype == tf.string else leaf
            flat = tf.cast(tf.reshape(raw, [-1]), tf.int64)
            total = total * 31 + tf.reduce_sum(flat * (tf.range(tf.size(flat, tf.int64)) % 251 + 1))
        return number, content, total

    return tf.data.Dataset.range(elements).map(element)


def checked(number: int, leaves: list[Any], checksum: int) -> int:
    """The number, if the content is what was made under it."""
    total = number
    for leaf in leaves:
        raw = np.frombuffer(leaf, np.uint8) if isinstance(leaf, bytes) else np.asarray(leaf)
        flat = raw.reshape(-1).astype(np.int64)
        total = total * 31 + int((flat * (np.arange(flat.size) % 251 + 1)).sum())
    assert (total - checksum) % (1 << 64) == 0, f"element {number} is not what was made"
    return number


def leaves_of(content: Any) -> list[Any]:
    """The components of what `read` yields, as TensorFlow orders them."""
    if isinstance(content, dict):
        content = tuple(content[key] for key in sorted(content))
    if isinstance(content, tuple):
        return [leaf for part in content for leaf in leaves_of(part)]
    return [content]


class Job:
    """A job that four consumers share: two of them read NumPy, two TensorFlow."""

    def __init__(self, target: str, dataset: Any, policy: Any) -> None:
        self._target = target
        self._policy = policy
        self._name = uuid.uuid4().hex  # pipelines that are built alike are one dataset
        self._dataset_id = service.register_dataset(target, dataset)
        self._got: list[int] = []

    def numbers(self, disturb: Callable[[int], None] = lambda _: None) -> list[int]:
        """Those of all elements that came; `disturb` is told again and again how many have."""
        with ThreadPoolExecutor(CONSUMERS, thread_name_prefix="test-consumer") as pool:
            running = [pool.submit(self._consume, i % 2 == 0) for i in range(CONSUMERS)]
            while wait(running, timeout=0.02).not_done:
                disturb(len(self._got))
        for future in running:
            future.result()
        return self._got

    def _consume(self, in_numpy: bool) -> None:
        kept: list[tuple[int, list[Any], int]] = []
        for element in self._in_numpy() if in_numpy else self._in_tensorflow():
            self._got.append(checked(*element))
            if len(self._got) % 7 == 0 and len(kept) < 50:
                kept.append(element)
        for element in kept:  # nothing that came later has overwritten it
            checked(*element)

    def _in_numpy(self) -> Iterator[tuple[int, list[Any], int]]:
        with service.read(
            self._target, self._dataset_id, processing_mode=self._policy, job_name=self._name
        ) as elements:
            for number, content, checksum in elements:
                yield int(number), leaves_of(content), int(checksum)

    def _in_tensorflow(self) -> Iterator[tuple[int, list[Any], int]]:
        for number, content, checksum in service.from_dataset_id(
            self._policy, self._target, self._dataset_id, job_name=self._name
        ):
            tensors = tf.nest.flatten(content, expand_composites=True)
            yield int(number), [tensor.numpy() for tensor in tensors], int(checksum)


def cut_connections(dice: random.Random) -> int:
    """Cut some of this process's connections to workers, as a network would; how many."""
    cut = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            copy = os.dup(int(name))
        except OSError:  # closed meanwhile
            continue
        try:
            sock = socket.socket(fileno=copy)
        except OSError:  # something else
            os.close(copy)
            continue
        with sock:
            try:
                of_worker = sock.family == socket.AF_UNIX and b"forebay-" in sock.getpeername()
                if of_worker and dice.random() < 0.5:
                    sock.shutdown(socket.SHUT_RDWR)
                    cut += 1
            except (OSError, TypeError):  # it is not connected, or its peer has no name
                continue
    return cut


# -- tests -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def workers(dispatcher: DispatcherProcess) -> Iterator[list[WorkerProcess]]:
    running = [WorkerProcess(dispatcher.address) for _ in range(WORKERS)]
    try:
        for worker in running:
            worker.wait_until_registered()
        yield running
    finally:
        for worker in running:
            worker.__exit__()


@pytest.mark.usefixtures("workers")
class TestHealthy:
    @pytest.mark.parametrize("kind", chosen("scalars", "images of 200 KB", "nested"))
    def test_dynamic_every_element_once(self, dispatcher: DispatcherProcess, kind: str) -> None:
        dataset = dataset_of(KINDS[kind], KINDS[kind].elements)
        got = Job(dispatcher.target, dataset, DYNAMIC).numbers()
        assert sorted(got) == list(range(KINDS[kind].elements))

    @pytest.mark.parametrize("kind", ["ragged"])
    def test_off_every_element_once_a_worker(
        self, dispatcher: DispatcherProcess, kind: str
    ) -> None:
        elements = KINDS[kind].elements // WORKERS
        got = Job(dispatcher.target, dataset_of(KINDS[kind], elements), OFF).numbers()
        assert collections.Counter(got) == dict.fromkeys(range(elements), WORKERS)

    @pytest.mark.parametrize("kind", ["strings of 1 KB"])
    def test_cut_connections_cost_nothing(self, dispatcher: DispatcherProcess, kind: str) -> None:
        dice = random.Random(kind)
        cuts = 0

        def disturb(_: int) -> None:
            nonlocal cuts
            cuts += cut_connections(dice)

        dataset = dataset_of(KINDS[kind], KINDS[kind].elements)
        got = Job(dispatcher.target, dataset, DYNAMIC).numbers(disturb)
        assert sorted(got) == list(range(KINDS[kind].elements))
        assert cuts > 0


def test_killed_workers_and_cut_connections(
    dispatcher: DispatcherProcess, workers: list[WorkerProcess]
) -> None:
    """kill -9 of two of the four, and others in their places: nothing twice."""
    elements = 1_000
    dice = random.Random(1)
    kills = [elements // 2, elements // 4]

    def disturb(got: int) -> None:
        cut_connections(dice)
        if kills and got >= kills[-1]:
            kills.pop()
            workers.pop(dice.randrange(WORKERS)).kill()
            workers.append(WorkerProcess(dispatcher.address))

    dataset = dataset_of(KINDS["images of 200 KB"], elements).apply(testing.sleep(3_000))
    got = Job(dispatcher.target, dataset, DYNAMIC).numbers(disturb)
    assert len(set(got)) == len(got), "at most once"
    assert kills == []
    assert len(got) > elements // 2
    for worker in workers:
        if not worker.address:
            worker.wait_until_registered()


@pytest.mark.long
def test_a_worker_with_payload_checksums_sends_a_changed_block_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    damages = [Damage(to_worker=False, at=50_000, cut=False)]
    port = free_port()
    proxy = MeddlingProxy(port, lambda: damages.pop() if damages else None)
    try:
        ((_, address),) = proxy.addresses
        with (
            DispatchServer() as dispatcher,
            WorkerServer(
                WorkerConfig(
                    dispatcher.address,
                    data_port=port,
                    data_transfer_address=address,
                    payload_checksums=True,
                    http_port=0,
                )
            ) as worker,
        ):
            before = service.metrics()["reconnects"]
            dataset = tf.data.Dataset.range(5).map(lambda n: tf.fill([100_000], n))
            dataset_id = service.register_dataset(dispatcher.target, dataset)
            how: Any = {"processing_mode": "distributed_epoch", "data_transfer_protocol": "tcp"}
            got = [*service.read(dispatcher.target, dataset_id, **how)]
            assert service.metrics()["reconnects"] - before == 1
            told = scraped(worker.http_address)
            for kind in ("first", "again"):
                assert value(told, "forebay_worker_connections_total", kind=kind) == 1
    finally:
        proxy.close()
    assert [{*element.tolist()} for element in got] == [{n} for n in range(5)]
    assert "is broken: its elements have the checksum" in caplog.text
