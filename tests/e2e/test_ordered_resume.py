"""Ordered reads that go on at a position or a step, and what they refuse."""

from __future__ import annotations

import json
from typing import Any

import pytest
import tensorflow as tf

from forebay import service
from forebay.service.client import reader
from forebay.service.client.saved_states import opened as opened_state
from forebay.service.client.saved_states import sealed
from forebay.service.errors import (
    AlreadyExists,
    FailedPrecondition,
    ForebayError,
    InvalidArgument,
    PipelineError,
    Unimplemented,
)

from ..ordered_reads import Cluster, opened, read
from ..standbys import status, wait_until

ORDER: dict[str, Any] = {"seed": 3, "cycle_length": 3, "block_length": 2, "bundle_splits": 5}


@pytest.fixture(scope="module")
def small(cluster: Cluster) -> str:
    """Seven bundles, one of which is empty."""
    return service.register_dataset(cluster.target, seven_bundles())


def seven_bundles() -> tf.data.Dataset:
    return tf.data.Dataset.range(35).filter(lambda x: x % 4 != 1 and x // 5 != 2)


@pytest.fixture(scope="module")
def epochs(cluster: Cluster, small: str) -> list[list[int]]:
    """Three epochs, read one by one."""
    found = [read(cluster.target, small, **ORDER).numbers]
    length = len(found[0])
    found += [
        read(cluster.target, small, start_position=epoch * length, **ORDER).numbers
        for epoch in (1, 2)
    ]
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
    def test_states_after_each_step_of_two_epochs(
        self, cluster: Cluster, small: str, epochs: list[list[int]], drop_remainder: bool
    ) -> None:
        """One step, one reader; an epoch's end is an empty step or none."""
        order = {**ORDER, "batch_size": 4, "drop_remainder": drop_remainder}
        length, step = len(epochs[0]), 2 * 4
        end = length - length % step if drop_remainder else length
        state: dict[str, Any] | None = None
        got: list[int] = []
        while state is None or state["position"] < 2 * length:
            part = read(cluster.target, small, 2, steps=1, state=state, **order)
            state, got = json.loads(json.dumps(part.state)), got + part.numbers
            assert len(json.dumps(state)) < 300
        assert got == epochs[0][:end] + epochs[1][:end]


def refused(cluster: Cluster, dataset: Any, **order: Any) -> ForebayError:
    """The error of the first element."""
    dataset_id = service.register_dataset(cluster.target, dataset)
    with (
        opened(cluster.target, dataset_id, **order) as elements,
        pytest.raises(ForebayError) as error,
    ):
        next(elements)
    return error.value


def clocked(count: int) -> tf.data.Dataset:
    """Each time it runs, other elements are left out."""

    def falls_out(x: tf.Tensor) -> tf.Tensor:
        return tf.cast(1e6 * tf.timestamp(), tf.int64) % 3 != 0

    return tf.data.Dataset.range(count).filter(falls_out)


class TestRefused:
    @pytest.mark.parametrize("how", [{"ordered": True}, {"delivery": "at_least_once"}])
    def test_a_pipeline_without_bundles(self, cluster: Cluster, how: dict[str, Any]) -> None:
        """tests/pipelines/test_bundles.py has which these are, tests/core what else is refused."""
        repeated = tf.data.Dataset.range(20).repeat(3)
        dataset_id = service.register_dataset(cluster.target, repeated)
        with pytest.raises(Unimplemented, match="RepeatDataset") as error:
            list(service.read(cluster.target, dataset_id, **how))
        assert not isinstance(error.value, PipelineError)

    def test_a_pipeline_that_is_not_deterministic(
        self, cluster: Cluster, caplog: pytest.LogCaptureFixture
    ) -> None:
        dataset_id = service.register_dataset(cluster.target, clocked(1000))
        for how in ({"delivery": "at_least_once"}, {"ordered": True, **ORDER}):
            caplog.clear()
            list(service.read(cluster.target, dataset_id, **{**how, "bundle_splits": 100}))
            assert "Timestamp" in caplog.text and "may not repeat" in caplog.text
        with pytest.raises(FailedPrecondition, match=r"bundle \d+ of epoch 0.*clocks"):
            read(cluster.target, dataset_id, **{**ORDER, "bundle_splits": 100})

    @pytest.mark.long
    def test_other_elements_of_as_many_are_noticed_and_told(
        self, cluster: Cluster, caplog: pytest.LogCaptureFixture
    ) -> None:
        """To who reads meanwhile, and to who comes later; `status` has it, too."""
        drawn = tf.data.Dataset.range(20).map(lambda x: (x, tf.timestamp()))
        dataset_id = service.register_dataset(cluster.target, drawn)
        how: dict[str, Any] = {**ORDER, "job_name": "drawn", "ordered": True}

        def job() -> dict[str, Any]:
            jobs = status(cluster.dispatcher)["jobs"]
            (found,) = [job for job in jobs if job["name"].endswith("drawn")]
            return dict(found)

        with service.read(cluster.target, dataset_id, **how) as first:
            assert len(list(first)) == 20
        wait_until(lambda: job()["checked_bundles"] == 4)
        assert not job()["checksum_mismatches"]
        for _ in range(2):  # their successors run the bundles again
            cluster.replace_worker()
        with service.read(cluster.target, dataset_id, **how) as second:
            next(second)
            wait_until(lambda: sorted(job()["checksum_mismatches"]) == [[0, n] for n in range(4)])
            wait_until(lambda: "had other elements when they were run again" in caplog.text)
        caplog.clear()
        with service.read(cluster.target, dataset_id, **how) as third:
            next(third)
            wait_until(lambda: "drawn had other elements" in caplog.text)

    @pytest.mark.parametrize("how", [{"ordered": True}, {"delivery": "at_least_once"}])
    def test_what_counts_elements(
        self, cluster: Cluster, caplog: pytest.LogCaptureFixture, how: dict[str, Any]
    ) -> None:
        """It would count within each bundle."""
        how = {**how, "bundle_splits": 100}
        dataset_id = service.register_dataset(cluster.target, tf.data.Dataset.range(300).skip(50))
        with pytest.raises(Unimplemented, match=r"SkipDataset.*start_position.*within_bundles"):
            list(service.read(cluster.target, dataset_id, **how))
        found = list(service.read(cluster.target, dataset_id, within_bundles=True, **how))
        assert len(found) == 150
        assert "SkipDataset" in caplog.text and "bundle by bundle" in caplog.text

    @pytest.mark.parametrize("batch_size", [None, 4])
    def test_datasets_without_elements(self, cluster: Cluster, batch_size: int | None) -> None:
        nothing = tf.data.Dataset.range(100).filter(lambda x: x < 0)
        for dataset in tf.data.Dataset.range(0), nothing:
            dataset_id = service.register_dataset(cluster.target, dataset)
            how: dict[str, Any] = {
                "batch_size": batch_size,
                "drop_remainder": batch_size is not None,
            }
            got = read(cluster.target, dataset_id, 2, **how)
            assert (got.elements, got.state["position"]) == ([], 0)
            assert read(cluster.target, dataset_id, 2, state=got.state, **how).elements == []
            for start, said in ("start_position", "start_position"), ("start_step", "no step 5"):
                error = refused(cluster, dataset, **how, **{start: 5})
                assert isinstance(error, InvalidArgument)
                assert said in str(error)

    def test_epochs_without_a_whole_step(self, cluster: Cluster) -> None:
        dataset = tf.data.Dataset.range(3)
        how: dict[str, Any] = {"batch_size": 4, "drop_remainder": True}
        got = read(cluster.target, service.register_dataset(cluster.target, dataset), **how)
        assert (got.elements, got.state["position"]) == ([], 3)
        assert "no whole step of " in str(refused(cluster, dataset, start_step=1, **how))

    def test_a_state_of_other_epochs_or_too_late(self, cluster: Cluster, small: str) -> None:
        state = opened_state(read(cluster.target, small, steps=3, **ORDER).state)
        other = sealed({**state, "order": [3, 1, 3, 2, 5, 8]})
        with pytest.raises(FailedPrecondition, match="8 bundles"):
            read(cluster.target, small, state=other, **ORDER)
        with opened(cluster.target, small, **ORDER) as elements:
            next(elements)
            with pytest.raises(FailedPrecondition, match="after the first element"):
                elements.load_state_dict(elements.state_dict())

    def test_a_place_that_is_taken(
        self,
        cluster: Cluster,
        small: str,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        monkeypatch.setattr(reader, "GROUP_S", 1)
        with (
            opened(cluster.target, small, consumer_index=0, num_consumers=2, **ORDER) as first,
            opened(cluster.target, small, consumer_index=0, num_consumers=2, **ORDER) as second,
        ):
            next(first)
            with pytest.raises(AlreadyExists, match=r"consumer_index=0 of a group of 2"):
                next(second)
        assert "cannot begin to read" in caplog.text


class TestUnequalConsumers:
    """What one consumer does holds up no other."""

    def test_one_that_never_comes(self, cluster: Cluster) -> None:
        """The others read on, though their workers may not keep so much."""
        large = tf.data.Dataset.range(3000).map(lambda x: tf.fill([8 << 10], x))
        dataset_id = service.register_dataset(cluster.target, large)
        with opened(
            cluster.target, dataset_id, shuffle=False, cycle_length=1,
            consumer_index=1, num_consumers=4,
        ) as elements:  # fmt: skip
            assert [int(element[0]) for element in elements] == [*range(1, 3000, 4)]
