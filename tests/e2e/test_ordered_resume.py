"""Ordered reads that go on at a position or a step, and what they refuse."""

from __future__ import annotations

import itertools
import json
import re
import signal
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

from ..forks import Fork
from ..ordered_reads import Cluster, opened, read
from ..standbys import status, wait_until

ORDER: dict[str, Any] = {"seed": 3, "cycle_length": 3, "block_length": 2, "bundle_splits": 5}


@pytest.fixture(scope="module")
def small(cluster: Cluster) -> str:
    """Seven bundles, one of which is empty."""
    return service.register_dataset(cluster.target, seven_bundles())


def seven_bundles() -> tf.data.Dataset:
    return tf.data.Dataset.range(35).filter(lambda x: x % 4 != 1 and x // 5 != 2)


def unread_before(cluster: Cluster, number: int) -> str:
    """The same elements as another dataset for each number: no length is known of it."""
    other = seven_bundles().filter(lambda x: x != 100 + number)
    return service.register_dataset(cluster.target, other)


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
        state: dict[str, Any] | None = None
        got: list[int] = []
        while state is None or state["position"] < 2 * length:
            part = read(cluster.target, small, 2, steps=1, state=state, **order)
            state, got = json.loads(json.dumps(part.state)), got + part.numbers
            assert len(json.dumps(state)) < 300
        assert got == epochs[0][:end] + epochs[1][:end]

    def test_past_several_epochs_where_lengths_are_unknown(
        self, cluster: Cluster, epochs: list[list[int]]
    ) -> None:
        length = len(epochs[0])
        for number, position in enumerate((0, 1, length - 1, length, 2 * length + 5)):
            epoch, offset = divmod(position, length)
            unread = unread_before(cluster, number)
            found = read(cluster.target, unread, start_position=position, **ORDER)
            assert found.numbers == epochs[epoch][offset:]
            assert found.state["position"] == (epoch + 1) * length

    def test_steps_where_lengths_are_unknown(
        self, cluster: Cluster, epochs: list[list[int]]
    ) -> None:
        length, step = len(epochs[0]), 2 * 4
        for number, drop_remainder in ((10, False), (11, True)):
            end = length - length % step if drop_remainder else length
            steps = -(-end // step)
            found = read(
                cluster.target, unread_before(cluster, number), 2, start_step=steps + 1,
                batch_size=4, drop_remainder=drop_remainder, **ORDER,
            )  # fmt: skip
            assert found.numbers == epochs[1][step:end]
            assert found.state["position"] == 2 * length

    def test_one_of_a_group_goes_back(
        self, cluster: Cluster, small: str, epochs: list[list[int]]
    ) -> None:
        """It was restarted at a saved step, while its neighbour goes on."""
        how = {"batch_size": 2, "num_consumers": 2, **ORDER}
        with opened(cluster.target, small, consumer_index=0, **how) as first:
            mine = [next(first).tolist() for _ in range(4)]
            for start in (0, 3, 1, 0):
                with opened(
                    cluster.target, small, consumer_index=1, start_position=4 * start, **how
                ) as second:
                    theirs = [batch.tolist() for batch in second]
                expected = epochs[0][4 * start :]
                assert theirs == [expected[n : n + 2] for n in range(2, len(expected), 4)]
            mine += [batch.tolist() for batch in first]
        assert mine == [epochs[0][n : n + 2] for n in range(0, len(epochs[0]), 4)]


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


CHOICE = (
    r"because of '\S+' \(DirectedInterleaveDataset\): it chooses among several datasets, and a "
    "bundle is a range of one dataset's splits. Read each dataset by itself, and choose where you "
    "train; or choose within a function of flat_map"
)


def sampled() -> tf.data.Dataset:
    return tf.data.Dataset.sample_from_datasets([tf.data.Dataset.range(20)] * 2, seed=1)


def chosen() -> tf.data.Dataset:
    of_two = tf.data.Dataset.range(2).repeat(20)
    return tf.data.Dataset.choose_from_datasets([tf.data.Dataset.range(20)] * 2, of_two)


class TestRefused:
    @pytest.mark.parametrize(
        ("build", "kind", "says"),
        [
            (lambda: tf.data.Dataset.range(20).repeat(3), Unimplemented, "RepeatDataset"),
            (lambda: tf.data.Dataset.range(20).repeat(), Unimplemented, "RepeatDataset"),
            (
                lambda: tf.data.Dataset.range(20).concatenate(tf.data.Dataset.range(5)),
                Unimplemented,
                "RangeDataset.*another source.*Zip them",
            ),
            (sampled, Unimplemented, CHOICE),
            (chosen, Unimplemented, CHOICE),
            (lambda: tf.data.Dataset.range(1 << 62), InvalidArgument, "at most 1048576"),
            (lambda: tf.data.Dataset.random(5), ForebayError, "RandomDataset|no end"),
            (lambda: lambda: tf.data.Dataset.range(20).repeat(3), Unimplemented, "RepeatDataset"),
        ],
    )
    def test_pipelines_without_bundles(
        self, cluster: Cluster, build: Any, kind: type[ForebayError], says: str
    ) -> None:
        error = refused(cluster, build(), bundle_splits=1)
        assert isinstance(error, kind) and not isinstance(error, PipelineError)
        assert re.search(says, str(error))

    def test_a_pipeline_that_is_not_deterministic(
        self, cluster: Cluster, caplog: pytest.LogCaptureFixture
    ) -> None:
        dataset_id = service.register_dataset(cluster.target, clocked(1000))
        read(cluster.target, dataset_id, **{**ORDER, "bundle_splits": 100})
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
            jobs: Any = status(cluster.dispatcher)["jobs"]
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
            for start in {"start_position": 5}, {"start_step": 5}:
                error = refused(cluster, dataset, **how, **start)
                assert isinstance(error, InvalidArgument)
                assert next(iter(start)) in str(error)

    def test_epochs_without_a_whole_step(self, cluster: Cluster) -> None:
        dataset = tf.data.Dataset.range(3)
        how: dict[str, Any] = {"batch_size": 4, "drop_remainder": True}
        got = read(cluster.target, service.register_dataset(cluster.target, dataset), **how)
        assert (got.elements, got.state["position"]) == ([], 3)
        assert "no whole step" in str(refused(cluster, dataset, start_step=1, **how))

    @pytest.mark.parametrize(
        ("wrong", "says"),
        [
            ({"drop_remainder": True}, "batch_size"),
            ({"start_position": 1, "start_step": 1}, "start_step=1"),
            ({"start_position": -1}, "start_position=-1"),
            ({"batch_size": 0}, "batch_size=0"),
            ({"consumer_index": 1}, "num_consumers"),
            ({"consumer_index": 2, "num_consumers": 2}, "consumer_index=2"),
            ({"processing_mode": service.ShardingPolicy.FILE}, "processing_mode"),
            ({"initial_epoch": 1, "job_name": "x"}, "start_position"),
        ],
    )
    def test_arguments(self, cluster: Cluster, small: str, wrong: Any, says: str) -> None:
        with pytest.raises(InvalidArgument, match=says):
            service.read(cluster.target, small, ordered=True, **wrong)

    @pytest.mark.parametrize(
        ("edits", "says"),
        [
            ({"position": 4}, "edited or damaged"),
            ({"order": [3, 1, 3, 2, 5, 8]}, "edited or damaged"),
            ({"forebay": 3}, "version 3"),
        ],
    )
    def test_edited_states(self, cluster: Cluster, small: str, edits: Any, says: str) -> None:
        """tests/client/test_saved_states.py has more of them."""
        state = read(cluster.target, small, steps=3, **ORDER).state
        with pytest.raises(InvalidArgument, match=says):
            read(cluster.target, small, state={**state, **edits}, **ORDER)

    def test_a_state_of_other_epochs(self, cluster: Cluster, small: str) -> None:
        state = opened_state(read(cluster.target, small, steps=3, **ORDER).state)
        other = sealed({**state, "order": [3, 1, 3, 2, 5, 8]})
        with pytest.raises(FailedPrecondition, match="8 bundles"):
            read(cluster.target, small, state=other, **ORDER)

    @pytest.mark.parametrize("state", ["", "{}", {}, [], {"position": 4}])
    def test_what_is_no_state(self, cluster: Cluster, small: str, state: Any) -> None:
        with opened(cluster.target, small, **ORDER) as elements:
            with pytest.raises(InvalidArgument, match="no state"):
                elements.load_state_dict(state)
            next(elements)
            with pytest.raises(FailedPrecondition, match="after the first element"):
                elements.load_state_dict(elements.state_dict())

    @pytest.mark.parametrize(("index", "consumers"), [(0, 2), (1, 3)])
    def test_a_place_that_is_taken(
        self,
        cluster: Cluster,
        small: str,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
        index: int,
        consumers: int,
    ) -> None:
        monkeypatch.setattr(reader, "GROUP_S", 1)
        with (
            opened(cluster.target, small, consumer_index=0, num_consumers=2, **ORDER) as first,
            opened(
                cluster.target, small, consumer_index=index, num_consumers=consumers, **ORDER
            ) as second,
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

    def test_one_that_stops(self, cluster: Cluster) -> None:
        large = tf.data.Dataset.range(3000).map(lambda x: tf.fill([8 << 10], x))
        dataset_id = service.register_dataset(cluster.target, large)
        how: dict[str, Any] = {"shuffle": False, "cycle_length": 1, "num_consumers": 2}
        stopping = Fork(["-c", STOPPING, cluster.target, dataset_id])
        try:
            assert stopping.line() == "0"
            with opened(cluster.target, dataset_id, consumer_index=1, **how) as elements:
                got = [int(element[0]) for element in itertools.islice(elements, 5)]
                stopping.send_signal(signal.SIGSTOP)
                got += [int(element[0]) for element in elements]
            assert got == [*range(1, 3000, 2)]
            stopping.send_signal(signal.SIGCONT)
            stopping.close_input()
            assert stopping.line() == str(sum(range(0, 3000, 2)))
        finally:
            stopping.kill()
            stopping.finish()


STOPPING = """
import sys
from forebay import service

target, dataset_id = sys.argv[1:]
how = {"ordered": True, "shuffle": False, "cycle_length": 1, "num_consumers": 2}
with service.read(target, dataset_id, consumer_index=0, **how) as elements:
    first = int(next(elements)[0])
    print(first, flush=True)
    sys.stdin.read()
    print(first + sum(int(element[0]) for element in elements), flush=True)
"""
