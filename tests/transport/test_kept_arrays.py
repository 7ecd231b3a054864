"""What a trainer keeps of large blocks is never overwritten, although their memory is recycled."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import tensorflow as tf

from forebay.service.blocks import Block, Component
from forebay.service.client.tf_elements import dataset_of_blocks
from forebay.service.delivery import EndOfTask, FirstComeOutput, OutputCancelled
from forebay.service.transport import BlockServer

from .peers import UID, Consumer, only

BLOCKS = 200
TASK = 5
BYTES = np.random.default_rng(0).integers(0, 256, 4 << 20, np.uint8)
LEAST_BYTES = 1 << 20
Array = npt.NDArray[np.uint8]

both_protocols = pytest.mark.parametrize("protocol", ["unix", "tcp"])
both_sizes = pytest.mark.parametrize("same_size", [True, False], ids=["same size", "many sizes"])


class Source:
    """What element `number` holds: values that few others have, 1 to 3 MB of them."""

    def __init__(self, same_size: bool) -> None:
        self.size = 2 * LEAST_BYTES if same_size else None

    def __getitem__(self, number: int) -> Array:
        dice = random.Random(number)
        start = dice.randrange(LEAST_BYTES)
        return BYTES[start : start + (self.size or dice.randrange(LEAST_BYTES, 3 * LEAST_BYTES))]


@contextmanager
def reading(source: Source, protocol: str) -> Iterator[Callable[[], Iterator[Block]]]:
    """How to get the blocks of a task, an element each, over real sockets."""
    server = BlockServer(UID)
    output = FirstComeOutput(8 << 20)
    server.sessions.add_task(TASK, output)
    server.start()

    def produce() -> None:
        with suppress(OutputCancelled):  # when a test has failed
            for number in range(BLOCKS):
                values = source[number][np.newaxis]
                output.put(Block(1, (Component(np.array([number])), Component(values))))
            output.finish()

    def blocks() -> Iterator[Block]:
        while isinstance(item := consumer.get(), tuple) and isinstance(item[1], Block):
            yield item[1]
            consumer.client.taken(item[1])
        assert item == (TASK, EndOfTask())

    producer = threading.Thread(target=produce, name="test-producer")
    producer.start()
    consumer = Consumer(only(server, protocol), reads=TASK, credit_bytes=16 << 20)
    try:
        yield blocks
    finally:
        consumer.client.close()
        output.cancel()
        producer.join()
        server.stop()


class Keeper:
    """Keeps things for as long as the dice say, each beside what it has to be equal to."""

    def __init__(self, source: Source, forms: list[Callable[[Any], Any]]) -> None:
        self._source = source
        self._forms = forms
        self._dice = random.Random(1)
        self._kept: list[tuple[Any, Array]] = []
        self._seen: set[int] = set()

    def offer(self, number: int, values: Any) -> None:
        """Keep the element in one of the forms, or not; and let go of something, or not."""
        self._seen.add(number)
        if self._dice.random() < 0.4:
            form = self._dice.choice(self._forms)
            self._kept.append((form(values), np.asarray(form(self._source[number]))))
        if len(self._kept) > 15 or (self._kept and self._dice.random() < 0.3):
            self._check(*self._kept.pop(self._dice.randrange(len(self._kept))))

    def check(self) -> None:
        """Everything came, and all that is left is as it was."""
        assert self._seen == set(range(BLOCKS))
        assert self._kept
        for thing, expected in self._kept:
            self._check(thing, expected)

    @staticmethod
    def _check(thing: Any, expected: Array) -> None:
        assert np.array_equal(np.asarray(thing), expected)


VIEWS: list[Callable[[Any], Any]] = [
    lambda array: array,
    lambda array: array[1000:],
    lambda array: array[-1:],
    lambda array: array[:LEAST_BYTES].reshape(1 << 10, 1 << 10).T[5:, ::3],
    lambda array: array[:LEAST_BYTES].view(np.int32).view(np.int16),
    lambda array: memoryview(array)[77:-77],
]


@both_sizes
@both_protocols
def test_views_in_numpy(protocol: str, same_size: bool) -> None:
    source = Source(same_size)
    keeper = Keeper(source, VIEWS)
    with reading(source, protocol) as blocks:
        for block in blocks():
            (number,), (values,) = (component.elements() for component in block.components)
            keeper.offer(int(number), values)
            del block, values  # else the one before is held while the next one comes
        keeper.check()


TENSORS: list[Callable[[Any], Any]] = [
    lambda tensor: tensor,
    lambda tensor: tf.convert_to_tensor(tensor)[1024:],
    lambda tensor: tf.identity(tensor)[-1:],
    lambda tensor: tf.reshape(tensor[:LEAST_BYTES], [1 << 10, 1 << 10])[7:],
    lambda tensor: tf.convert_to_tensor(tensor).numpy(),
    lambda tensor: np.asarray(tensor)[50:],
    lambda tensor: np.asarray(tensor).data,
]


@both_sizes
@both_protocols
@pytest.mark.parametrize("shuffled", [False, True], ids=["", "shuffled"])
def test_tensors(protocol: str, same_size: bool, shuffled: bool) -> None:
    source = Source(same_size)
    keeper = Keeper(source, TENSORS)
    spec = (tf.TensorSpec([], tf.int64), tf.TensorSpec([source.size], tf.uint8))
    with reading(source, protocol) as blocks:
        dataset = dataset_of_blocks(blocks, spec)
        if shuffled:  # TensorFlow keeps some, too
            dataset = dataset.shuffle(8, seed=2).prefetch(2)
        for number, values in dataset:
            keeper.offer(int(number), values)
            del values
        keeper.check()
