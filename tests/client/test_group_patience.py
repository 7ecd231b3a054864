"""A trainer that comes back to its group waits for a dispatcher to learn who is gone."""

from __future__ import annotations

from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import tensorflow as tf

from forebay import service
from forebay.service.blocks import Block
from forebay.service.client import reader
from forebay.service.client.options import ShardingPolicy, read_options
from forebay.service.client.reader import Reader

from ..stock import DispatcherProcess

NOTHING = Block(0, ())
GRACE_MS, PATIENCE_S = 200, 1.5
"""A new dispatcher knows after three times the grace who is gone. To say goodbye takes longer than
the patience."""


def joined(target: str, dataset_id: str) -> Generator[Block, None, None]:
    """An ordered read that has joined its group."""
    how = read_options(ordered=True, consumer_index=0, num_consumers=2)
    assert how.ordered is not None
    blocks = Reader(target, dataset_id, ShardingPolicy.OFF, "job", how).iterate(NOTHING)
    while how.ordered.epoch is None:
        assert next(blocks) is NOTHING
    return blocks


def test_time_without_a_dispatcher_is_not_waited_for_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader, "GROUP_S", PATIENCE_S)
    with (
        ThreadPoolExecutor(1) as pool,
        DispatcherProcess(tmp_path, reconnect_grace_ms=GRACE_MS) as dispatcher,
    ):
        dataset_id = service.register_dataset(dispatcher.target, tf.data.Dataset.range(4))
        before = joined(dispatcher.target, dataset_id)
        dispatcher.kill()
        after = pool.submit(joined, dispatcher.target, dataset_id)
        before.close()  # in vain
        dispatcher.restart()
        after.result().close()
