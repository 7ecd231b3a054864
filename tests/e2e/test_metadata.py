"""What a registration tells readers of its dataset: element_spec, cardinality and options."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import tensorflow as tf
from tensorflow.data.experimental import service as peer

from forebay import service

from ..stock import DispatcherProcess

AutoShardPolicy = tf.data.experimental.AutoShardPolicy
OFF, DYNAMIC = service.ShardingPolicy.OFF, service.ShardingPolicy.DYNAMIC
INFINITE = tf.data.INFINITE_CARDINALITY
count = tf.data.Dataset.range


@pytest.fixture(scope="module")
def peers_dispatcher() -> Iterator[str]:
    running = peer.DispatchServer()
    yield running.target
    running._stop()


DATASETS: dict[str, Callable[[], Any]] = {
    "finite": lambda: count(10),
    "empty": lambda: count(0),
    "infinite": lambda: count(10).repeat(),
    "infinite, mapped": lambda: count(10).repeat().map(lambda i: tf.range(i)),
    "unknown": lambda: count(10).filter(lambda i: i > 3),
    "unknown, repeated": lambda: count(10).filter(lambda i: i > 3).repeat(),
    "empty, repeated": lambda: count(0).repeat(),
}


@pytest.mark.parametrize("policy", ["OFF", "DYNAMIC"])
@pytest.mark.parametrize("name", DATASETS)
def test_the_cardinality_is_the_same_as_in_tf_data_service(
    dispatcher: DispatcherProcess, peers_dispatcher: str, name: str, policy: str
) -> None:
    def cardinalities(module: Any, target: str) -> list[int]:
        dataset = DATASETS[name]()
        mode = module.ShardingPolicy[policy]
        dataset_id = module.register_dataset(target, dataset)
        read = module.from_dataset_id(mode, target, dataset_id, dataset.element_spec, "job")
        again = module.from_dataset_id(mode, target, dataset_id, job_name="job")
        made = [read, again, dataset.apply(module.distribute(mode, target))]
        return [
            int(d.cardinality())
            for own in made
            for d in (own, own.batch(2), own.repeat(), own.repeat(2), own.repeat(0))
        ]

    expected = cardinalities(peer, peers_dispatcher)
    assert cardinalities(service, dispatcher.target) == expected


def test_a_stock_clients_registration_has_its_cardinality_too(
    dispatcher: DispatcherProcess,
) -> None:
    dataset_id = peer.register_dataset(dispatcher.target, count(10).repeat())
    read = service.from_dataset_id(DYNAMIC, dispatcher.target, dataset_id)
    assert int(read.cardinality()) == INFINITE


@pytest.mark.usefixtures("worker")
def test_elements_come_whatever_the_cardinality(dispatcher: DispatcherProcess) -> None:
    def read(dataset: Any) -> list[int]:
        elements = dataset.map(tf.range).apply(service.distribute(OFF, dispatcher.target))
        return [int(tf.reduce_max(e)) for e in elements.take(25)]

    assert read(count(1, 11).repeat()) == read(count(1, 11).repeat(3)) != []
    assert read(count(0)) == []
    assert read(count(9).filter(lambda i: i > 9).repeat()) == []  # "infinite", and it ends


@pytest.mark.usefixtures("worker")
def test_a_wrong_element_spec_is_refused(dispatcher: DispatcherProcess) -> None:
    dataset = tf.data.Dataset.from_tensors({"x": 0.75})
    for dataset_id in (
        service.register_dataset(dispatcher.target, dataset),
        peer.register_dataset(dispatcher.target, dataset),
    ):
        wrong = {"y": tf.TensorSpec([], tf.float32)}
        with pytest.raises(ValueError, match="element_spec") as raised:
            service.from_dataset_id(OFF, dispatcher.target, dataset_id, wrong)
        assert str(wrong) in str(raised.value)
        assert str(dataset.element_spec) in str(raised.value)
        less = {"x": tf.TensorSpec(None, tf.float32)}
        read = service.from_dataset_id(OFF, dispatcher.target, dataset_id, less)
        assert read.element_spec == less
        assert [float(e["x"]) for e in read] == [0.75]


@pytest.mark.usefixtures("worker")
def test_an_endless_repeat_goes_on_after_an_epoch_without_elements(
    dispatcher: DispatcherProcess,
) -> None:
    """This happens to a trainer that shares a job: the others read all of that epoch."""
    dataset_id = service.register_dataset(dispatcher.target, count(3))

    def shared() -> Any:
        return service.from_dataset_id(DYNAMIC, dispatcher.target, dataset_id, job_name="shared")

    others = shared()
    for _ in range(2):
        assert sorted(int(e) for e in others) == [0, 1, 2]
    mine = [int(e) for e in shared().repeat().take(6)]
    assert sorted(mine) == [0, 0, 1, 1, 2, 2]
    spec = others.element_spec

    @tf.function  # type: ignore[untyped-decorator]
    def total() -> Any:
        read = service.from_dataset_id(
            DYNAMIC, dispatcher.target, dataset_id, job_name="shared", element_spec=spec
        )
        return read.repeat().take(6).reduce(tf.constant(0, tf.int64), lambda a, b: a + b)

    assert int(total()) == 6
    assert [int(e) for e in shared().repeat(2)] == []


def with_options(dataset: Any) -> Any:
    options = tf.data.Options()
    options.deterministic = False
    options.autotune.enabled = False
    options.threading.private_threadpool_size = 2
    options.experimental_distribute.auto_shard_policy = AutoShardPolicy.DATA
    return dataset.with_options(options)


@pytest.mark.parametrize("policy", ["OFF", "DYNAMIC"])
@pytest.mark.parametrize("job_name", [None, "options"])
def test_the_options_are_the_same_as_in_tf_data_service(
    dispatcher: DispatcherProcess, peers_dispatcher: str, job_name: str | None, policy: str
) -> None:
    """Options set before the service stay there. A shared job is not sharded again."""

    def options(module: Any, target: str) -> list[Any]:
        mode, dataset = module.ShardingPolicy[policy], count(10).map(lambda i: tf.range(i))
        name = job_name and f"{job_name} {policy}"
        dataset_id = module.register_dataset(target, dataset)
        made = [
            module.from_dataset_id(mode, target, dataset_id, dataset.element_spec, name),
            dataset.apply(module.distribute(mode, target, name)),
            with_options(dataset).apply(module.distribute(mode, target, name)),
        ]
        made += [d.repeat() for d in made] + [d.repeat(2).prefetch(2) for d in made]
        return [d.options() for own in made for d in (own, with_options(own))]

    assert options(service, dispatcher.target) == options(peer, peers_dispatcher)


def test_a_traced_function_knows_the_options(dispatcher: DispatcherProcess) -> None:
    """Inside the trace they are the options of Python's dataset objects."""
    dataset_id = service.register_dataset(dispatcher.target, count(10))
    spec = tf.TensorSpec([], tf.int64)

    @tf.function  # type: ignore[untyped-decorator]
    def trace() -> int:
        read = service.from_dataset_id(
            DYNAMIC, dispatcher.target, dataset_id, job_name="traced", element_spec=spec
        )
        for dataset in (read, read.repeat(), read.batch(2)):
            with pytest.warns(UserWarning, match="graph mode"):
                distribute = dataset.options().experimental_distribute
            assert distribute.auto_shard_policy == AutoShardPolicy.OFF
        return 1

    assert int(trace()) == 1
