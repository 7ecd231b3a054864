"""At least once: nothing is missing, whoever dies, and only what the dead one had comes again."""

from __future__ import annotations

import contextlib
import itertools
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf

from forebay import service
from forebay.service.client import claims
from forebay.service.errors import InvalidArgument

from ..cluster import WorkerProcess
from ..ordered_reads import Cluster, uneven_numbers
from ..standbys import wait_until
from ..stock import DispatcherProcess
from .test_preemption import Trainer, numbers

SPLITS = 3_000
ONCE: dict[str, Any] = {"delivery": "at_least_once", "bundle_splits": 50}
NAMES = itertools.count()


@pytest.fixture
def small_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Consumers ask for little ahead, so that workers are asked until the end."""
    monkeypatch.setattr(claims, "WINDOW_BYTES", 4 << 10)


def register(cluster: Cluster, dataset: tf.data.Dataset | None = None) -> str:
    return service.register_dataset(
        cluster.target, uneven_numbers(SPLITS) if dataset is None else dataset
    )


EXPECTED = sorted(x for x in range(SPLITS) if (x * x) % 7 < x // 100 % 7)


def new_name() -> str:
    return f"job {next(NAMES)}"


def read(target: str, dataset_id: str, most: int | None = None, **how: Any) -> list[int]:
    """What one consumer gets, which leaves after `most` elements."""
    with service.read(target, dataset_id, **ONCE | how) as elements:
        return [int(element) for element in itertools.islice(elements, most)]


class TestWithoutTrouble:
    @pytest.mark.usefixtures("small_windows")
    def test_who_leaves_in_order_leaves_neither_gap_nor_repeat(self, cluster: Cluster) -> None:
        dataset_id, name = register(cluster), new_name()
        got: list[int] = []
        for most in (1, 0, 3, 50, 17, 400, 2, 100):
            part = read(cluster.target, dataset_id, most, job_name=name)
            assert len(part) == most
            got += part
        assert sorted(got + read(cluster.target, dataset_id, job_name=name)) == EXPECTED

    @pytest.mark.usefixtures("small_windows")
    def test_the_element_of_a_step_that_raised_comes_again(self, cluster: Cluster) -> None:
        """Wherever in a block it was; of others, none comes again."""
        dataset_id = register(cluster, uneven_numbers(SPLITS).batch(7))
        how, got = {**ONCE, "job_name": new_name()}, []
        for steps in (1, 2, 40, 3, None):
            raised = pytest.raises(ZeroDivisionError) if steps else contextlib.nullcontext()
            with raised, service.read(cluster.target, dataset_id, **how) as elements:
                for step, element in enumerate(elements):
                    assert step != steps or 1 // 0
                    got += element.tolist()
        assert sorted(got) == EXPECTED

    def test_epochs(self, cluster: Cluster) -> None:
        dataset_id, name = register(cluster), new_name()
        epochs = [
            read(cluster.target, dataset_id, job_name=name, initial_epoch=epoch)
            for epoch in (0, 1, 3)
        ]
        assert all(sorted(epoch) == EXPECTED for epoch in epochs)
        assert epochs[0] != epochs[1], "each has its own permutation"
        assert read(cluster.target, dataset_id, job_name=name, initial_epoch=1) == []

    def test_into_tf_data(self, cluster: Cluster) -> None:
        dataset_id = register(cluster)
        dataset = service.from_dataset_id(
            "distributed_epoch", cluster.target, dataset_id, job_name=new_name(), **ONCE
        )
        for _ in range(2):  # epochs
            assert sorted(int(x) for x in dataset) == EXPECTED
        distributed = uneven_numbers(SPLITS).apply(
            service.distribute("parallel_epochs", cluster.target, **ONCE)
        )
        assert sorted(int(x) for x in distributed) == EXPECTED

    @pytest.mark.parametrize("job_name", [None, "drawn"])
    def test_each_epoch_draws_other_numbers(self, cluster: Cluster, job_name: str | None) -> None:
        drawn = tf.data.Dataset.range(40).map(lambda x: (x, tf.random.uniform([])))
        dataset_id = register(cluster, drawn)
        dataset = service.from_dataset_id(
            "parallel_epochs", cluster.target, dataset_id, job_name=job_name, **ONCE
        )
        first, second = ({int(x): float(y) for x, y in dataset} for _ in range(2))
        assert first.keys() == second.keys() == set(range(40))
        assert all(first[x] != second[x] for x in first)


ELEMENTS = 400


def kill(trainer: Trainer) -> None:
    trainer.process.kill()
    trainer.process.finish()


class TestTrainersDie:
    @pytest.fixture
    def dispatcher(self, tmp_path: Path) -> Iterator[DispatcherProcess]:
        with (
            DispatcherProcess(tmp_path / "journal", client_timeout_ms=3_000) as running,
            WorkerProcess(running.address),
            WorkerProcess(running.address),
        ):
            yield running

    def three(self, dispatcher: DispatcherProcess, folder: Path) -> list[Trainer]:
        """They train, and have reported that they do."""
        dataset_id = numbers(dispatcher.target)
        trainers = [
            Trainer("at least once", dispatcher.target, dataset_id, folder / f"{i}")
            for i in range(3)
        ]
        wait_until(lambda: all(trainer.elements() for trainer in trainers))
        return trainers

    def require_all(self, trainers: list[Trainer], dead: Trainer | None = None) -> None:
        used = Counter(number for trainer in trainers for number in trainer.elements())
        assert used.keys() == {*range(ELEMENTS)}
        repeated = {number for number, times in used.items() if times > 1}
        assert repeated <= {*(dead.elements() if dead is not None else [])}

    def test_one_is_killed(self, dispatcher: DispatcherProcess, tmp_path: Path) -> None:
        trainers = self.three(dispatcher, tmp_path)
        dead, *others = trainers
        kill(dead)
        assert [trainer.end() for trainer in others] == [0, 0]
        self.require_all(trainers, dead)

    @pytest.mark.long
    def test_one_is_paused_until_it_is_given_up(
        self, dispatcher: DispatcherProcess, tmp_path: Path
    ) -> None:
        trainers = self.three(dispatcher, tmp_path)
        paused, *others = trainers
        paused.process.send_signal(signal.SIGSTOP)
        assert [trainer.end() for trainer in others] == [0, 0]
        self.require_all(trainers, paused)
        paused.process.send_signal(signal.SIGCONT)
        assert paused.end() == 1, "it is told that it was given up"
        self.require_all(trainers, paused)


class TestRefused:
    def test_a_dataset_id_that_tensorflows_own_operations_would_read(
        self, cluster: Cluster
    ) -> None:
        @tf.function(autograph=False)  # type: ignore[untyped-decorator]
        def first(dataset_id: tf.Tensor) -> tf.Tensor:
            spec = tf.TensorSpec([], tf.int64)
            dataset = service.from_dataset_id(
                "distributed_epoch", cluster.target, dataset_id, spec, **ONCE
            )
            return dataset.reduce(tf.constant(0, tf.int64), lambda _, x: x)

        with pytest.raises(InvalidArgument, match="delivery='at_least_once' is not for a dataset_"):
            first(tf.constant(register(cluster)))
