"""What a Python dataset's processes made, as consumers on the worker's host have it: in the same
memory, and each its own."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import Iterator

import numpy as np

from forebay.service.blocks import Block
from forebay.service.delivery import EndOfTask, FirstComeOutput
from forebay.service.transport import BlockClient, BlockServer

from ..transport.peers import UID, Consumer, only
from .functions import pipeline_of

SPLITS, EACH, SIZE = 40, 5, 300_000
BYTES = f'{{"tensor":"uint8","shape":[{SIZE}]}}'


def images(split: int) -> Iterator[np.ndarray]:
    for number in range(EACH):
        yield np.full(SIZE, split * EACH + number, np.uint8)


def test_who_reads_keeps_writes_and_is_cut_off_has_its_own_elements_once() -> None:
    """Two consumers at once, of two processes."""
    pipeline = pipeline_of(images, range(SPLITS), BYTES, processes=2)
    server, output = BlockServer(UID), FirstComeOutput(4 * SIZE)
    server.sessions.add_task(5, output)
    server.start()
    dice = random.Random(7)
    found: list[int] = []
    passed = 0

    def produce() -> None:
        nonlocal passed
        for block in pipeline.run(None).blocks():
            passed += block.loan is not None
            output.put(block)
        output.finish()

    producer = threading.Thread(target=produce)
    with contextlib.ExitStack() as closing:
        closing.callback(server.stop)
        closing.callback(pipeline.close)
        consumers = [
            Consumer(only(server, "unix"), consumer_id=i, reads=5, credit_bytes=8 * SIZE)
            for i in (1, 2)
        ]
        for consumer in consumers:
            closing.callback(consumer.client.close)
        kept: list[tuple[int, np.ndarray]] = []
        ended = 0
        producer.start()
        while ended < len(consumers):
            ready = [consumer for consumer in consumers if not consumer.arrived.empty()]
            if not ready:
                time.sleep(0.001)
                continue
            consumer = dice.choice(ready)
            _, item = consumer.take()
            if item == EndOfTask():
                ended += 1
                continue
            assert isinstance(item, Block)
            for values in item.components[0].elements():
                assert (values == values[0]).all()
                found.append(int(values[0]))
                if dice.random() < 0.5:
                    values[:] = dice.randrange(256)
                if dice.random() < 0.3:
                    kept.append((int(values[0]), values))
            while len(kept) > 12 or (kept and dice.random() < 0.3):
                value, array = kept.pop(dice.randrange(len(kept)))
                assert (array == value).all()
            if dice.random() < 0.2:
                client = dice.choice(consumers).client
                assert isinstance(client, BlockClient)
                with client._lock:
                    client._outbox.cut()
        producer.join()
        for value, array in kept:
            assert (array == value).all()
    assert sorted(found) == [*range(SPLITS * EACH)]
    assert passed > 5
