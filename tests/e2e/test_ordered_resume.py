"""Ordered reads that go on at a position or a step, and what they refuse."""

from __future__ import annotations

import copy
import json
import logging
import pathlib
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import tensorflow as tf

from forebay import service
from forebay.service.client import reader
from forebay.service.errors import (
    AlreadyExists,
    FailedPrecondition,
    ForebayError,
    InvalidArgument,
    PipelineError,
    Unimplemented,
)

from ..ordered_reads import Cluster, read
from ..stock import DispatcherProcess

ORDER: dict[str, Any] = {"seed": 3, "cycle_length": 3, "block_length": 2, "bundle_splits": 5}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("journal"), 2) as running:
        yield running


@pytest.fixture(scope="module")
def small(cluster: Cluster) -> str:
    """Seven bundles, one of which is empty."""
    return register(cluster)


def register(cluster: Cluster, count: int = 35) -> str:
    dataset = tf.data.Dataset.range(count).filter(lambda x: x % 4 != 1 and x // 5 != 2)
    return service.register_dataset(cluster.target, dataset)


@pytest.fixture(scope="module")
def epochs(cluster: Cluster, small: str) -> list[list[int]]:
    """Three epochs, read one by one."""
    found = [read(cluster.target, small, **ORDER).numbers]
    length = len(found[0])
    for epoch in (1, 2):
        found.append(read(cluster.target, small, start_position=epoch * length, **ORDER).numbers)
    assert len({*map(tuple, found)}) == 3
    assert all(sorted(epoch) == sorted(found[0]) for epoch in found)
    return found


class TestPositions:
    def test_every_position(self, cluster: Cluster, small: str, epochs: list[list[int]]) -> None:
        length = len(epochs[0])
        for position in range(2 * length + 2):
            epoch, offset = divmod(position, length)
            found = read(cluster.target, small, start_position=position, **ORDER)
            assert found.numbers == epochs[epoch][offset:]
            assert found.state["position"] == (epoch + 1) * length

    @pytest.mark.parametrize("drop_remainder", [False, True])
    def test_every_step(
        self, cluster: Cluster, small: str, epochs: list[list[int]], drop_remainder: bool
    ) -> None:
        length, step = len(epochs[0]), 2 * 4
        assert length % step
        end = length - length % step if drop_remainder else length
        steps = -(-end // step)
        order = {**ORDER, "batch_size": 4, "drop_remainder": drop_remainder}
        for start in range(2 * steps + 2):
            epoch, before = divmod(start, steps)
            found = read(cluster.target, small, 2, start_step=start, **order)
            assert found.numbers == epochs[epoch][before * step : end]
            assert found.state["position"] == (epoch + 1) * length

    @pytest.mark.parametrize("drop_remainder", [False, True])
    def test_states_after_each_step_of_two_epochs(
        self, cluster: Cluster, small: str, epochs: list[list[int]], drop_remainder: bool
    ) -> None:
        """One step, one reader; an epoch's end is an empty step or none."""
        order = {**ORDER, "batch_size": 4, "drop_remainder": drop_remainder}
        length, step = len(epochs[0]), 2 * 4
        end = length - length % step if drop_remainder else length
        state, got = None, []
        while state is None or state["position"] < 2 * length:
            part = read(cluster.target, small, 2, steps=1, state=state, **order)
            state, got = json.loads(json.dumps(part.state)), got + part.numbers
            assert len(json.dumps(state)) < 300
        assert got == epochs[0][:end] + epochs[1][:end]

    def test_past_several_epochs_where_lengths_are_unknown(
        self, cluster: Cluster, epochs: list[list[int]], tmp_path: pathlib.Path
    ) -> None:
        length = len(epochs[0])
        for number, position in enumerate((0, 1, length - 1, length, 2 * length + 5)):
            with Cluster(tmp_path / str(number), 1) as fresh:
                epoch, offset = divmod(position, length)
                found = read(fresh.target, register(fresh), start_position=position, **ORDER)
                assert found.numbers == epochs[epoch][offset:]
                assert found.state["position"] == (epoch + 1) * length

    def test_steps_where_lengths_are_unknown(
        self, cluster: Cluster, epochs: list[list[int]], tmp_path: pathlib.Path
    ) -> None:
        length, step = len(epochs[0]), 2 * 4
        for drop_remainder in (False, True):
            end = length - length % step if drop_remainder else length
            steps = -(-end // step)
            with Cluster(tmp_path / str(drop_remainder), 1) as fresh:
                found = read(
                    fresh.target, register(fresh), 2, start_step=steps + 1, batch_size=4,
                    drop_remainder=drop_remainder, **ORDER,
                )  # fmt: skip
                assert found.numbers == epochs[1][step:end]
                assert found.state["position"] == 2 * length

    def test_one_of_a_group_goes_back(
        self, cluster: Cluster, small: str, epochs: list[list[int]]
    ) -> None:
        """It was restarted at a saved step, while its neighbour goes on."""
        how = {"ordered": True, "batch_size": 2, "num_consumers": 2, **ORDER}
        with service.read(cluster.target, small, consumer_index=0, **how) as first:
            mine = [next(first).tolist() for _ in range(4)]
            for start in (0, 3, 1, 0):
                with service.read(
                    cluster.target, small, consumer_index=1, start_position=4 * start, **how
                ) as second:
                    theirs = [batch.tolist() for batch in second]
                expected = epochs[0][4 * start :]
                assert theirs == [expected[n : n + 2] for n in range(2, len(expected), 4)]
            mine += [batch.tolist() for batch in first]
        assert mine == [epochs[0][n : n + 2] for n in range(0, len(epochs[0]), 4)]
