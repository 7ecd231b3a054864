"""One dataset for all tasks of a training job."""

from __future__ import annotations

import itertools
import pathlib
from typing import Any

import pytest
import tensorflow as tf

from forebay import service
from forebay.service import Role, TaskContext

from ..cluster import WorkerProcess
from ..stock import DispatcherProcess
from .clusters import said, start, tf_config

WORKER = TaskContext(role=Role.WORKER, index=0, rank=1, num_consumers=2)
CHIEF = TaskContext(num_consumers=2)
EVALUATOR = TaskContext(role=Role.EVALUATOR, rank=None, num_consumers=2)


TASK = """
import sys
import tensorflow as tf
from forebay import service

def numbers(context):
    print("built", flush=True)
    size = context.get_per_replica_batch_size(8)
    mine = context.num_input_pipelines, context.input_pipeline_id
    return tf.data.Dataset.range(1000).shard(*mine).batch(size)

dataset = service.distribute_across(numbers, sys.argv[1], job_name="numbers")
assert service.TaskContext.from_env().role == sys.argv[2]
policy = dataset.options().experimental_distribute.auto_shard_policy
assert policy == tf.data.experimental.AutoShardPolicy.OFF
batches = [batch.numpy() for batch in dataset]
assert {len(batch) for batch in batches} <= {4}, batches
print(*[element for batch in batches for element in batch])
"""


def test_a_cluster_reads_what_its_chief_has_registered(tmp_path: pathlib.Path) -> None:
    cluster = {"chief": ["c:1"], "worker": ["w:1"]}
    with DispatcherProcess(tmp_path) as dispatcher, WorkerProcess(dispatcher.address):

        def task(kind: str) -> Any:
            return start(TASK, cluster, kind, 0, dispatcher.target, kind)

        others = [task("worker"), task("evaluator")]
        chief = said(task("chief"))
        worker, evaluator = map(said, others)
        dispatcher.kill_and_restart()
        again = said(task("chief"))
        registered = service.list_datasets(dispatcher.target)
    assert chief[0] == "built" and len(chief) == 2
    elements = [[int(x) for x in lines[-1].split()] for lines in (chief, worker, evaluator)]
    assert sorted(elements[0] + elements[1]) == sorted(elements[2]) == list(range(1000))
    assert len(worker) == len(evaluator) == 1, "they have built it as well"
    assert again == [""], "it has built it again, or has got what the others had"
    assert [dataset.dataset_id for dataset in registered] == ["numbers/replicas=2"]


def numbers(_: Any) -> Any:
    return tf.data.Dataset.range(10)


def never(_: Any) -> Any:
    raise AssertionError("only the chief builds, and once")


def read(dataset: Any) -> list[int]:
    return sorted(int(element) for element in dataset)


def test_epochs_that_are_over_are_not_read_again(target: str) -> None:
    first = service.distribute_across(numbers, target, CHIEF, job_name="epochs")
    assert [read(first), read(first)] == [[*range(10)]] * 2
    again = service.distribute_across(never, target, CHIEF, job_name="epochs", initial_epoch=1)
    assert [read(again), read(again)] == [[], [*range(10)]]


def test_a_cluster_that_has_changed_is_told(target: str) -> None:
    service.distribute_across(numbers, target, CHIEF, job_name="changes")
    for role in (Role.CHIEF, Role.WORKER):
        grown = TaskContext(role=role, rank=int(role == Role.WORKER), num_consumers=3)
        with pytest.raises(tf.errors.FailedPreconditionError, match=r"with 2 replicas.* has 3"):
            service.distribute_across(never, target, grown, job_name="changes")
    evaluator = service.distribute_across(never, target, EVALUATOR, job_name="changes")
    assert read(evaluator) == [*range(10)]


def test_a_chief_that_does_not_come_is_named(target: str) -> None:
    for task in (WORKER, EVALUATOR):
        with pytest.raises(tf.errors.UnavailableError, match="chief of run 'alone' has not"):
            service.distribute_across(never, target, task, job_name="alone", timeout_s=0)


def test_what_makes_no_sense_is_said(target: str) -> None:
    server = tf_config({"chief": ["c:1"], "worker": ["w:1"], "ps": ["p:1"]}, "ps", 0)
    with server, pytest.raises(tf.errors.FailedPreconditionError, match=r"server 0 of 1.*join"):
        service.distribute_across(never, target, job_name="of a server")
    with pytest.raises(ValueError, match="'chief' must be a TaskContext"):
        service.distribute_across(never, target, "chief", job_name="of a word")
    for wrong, name in ((-1, "j"), (True, "j"), (1, None)):
        with pytest.raises(ValueError, match=f"initial_epoch={wrong}"):
            service.from_dataset_id(
                "parallel_epochs", target, "x", job_name=name, initial_epoch=wrong
            )


def test_trials_are_runs_of_their_own(target: str) -> None:
    """Their parameters may be the dataset's, such as the size of batches."""
    for trial in (1, 2):

        def batches(_: Any, size: int = trial) -> Any:
            return tf.data.Dataset.range(10).batch(size)

        chief = TaskContext(trial=str(trial))
        read = service.distribute_across(batches, target, chief, job_name="tuned")
        assert [len(batch) for batch in read] == [trial] * (10 // trial)


def test_trials_that_share_the_cache_get_the_same(target: str) -> None:
    def endless(_: Any) -> Any:
        return tf.data.Dataset.range(10**12).repeat().map(lambda i: (i, tf.random.uniform([])))

    trials = [
        service.distribute_across(
            dataset_fn, target, TaskContext(trial=str(number)), job_name="cached",
            cross_trainer_cache=True,
        )
        for number, dataset_fn in ((1, endless), (2, never))
    ]  # fmt: skip
    iterators = [trial.as_numpy_iterator() for trial in trials]
    got: list[set[Any]] = [set(), set()]
    while not got[0] & got[1]:  # numbers by chance, which are the same if they are drawn once
        for found, iterator in zip(got, iterators, strict=True):
            found |= {*itertools.islice(iterator, 100)}


def test_a_strategy_says_how_many_replicas_there_are(target: str) -> None:
    sizes = []

    def sized(context: Any) -> Any:
        sizes.append(context.get_per_replica_batch_size(6))
        return tf.data.Dataset.range(12).batch(sizes[0])

    strategy = tf.distribute.OneDeviceStrategy("cpu:0")
    dataset = service.distribute_across(sized, target, strategy, job_name="on one device")
    distributed = strategy.distribute_datasets_from_function(lambda _: dataset)
    assert [batch.numpy().tolist() for batch in distributed] == [[*range(6)], [*range(6, 12)]]
    assert sizes == [6]


def test_sharding_what_is_shared_is_warned_of(
    target: str, caplog: pytest.LogCaptureFixture
) -> None:
    dataset = service.distribute_across(numbers, target, TaskContext(), job_name="warned")
    policies = tf.data.experimental.AutoShardPolicy
    for policy, doubles in (("AUTO", False), ("OFF", False), ("FILE", True), ("DATA", True)):
        options = tf.data.Options()
        options.experimental_distribute.auto_shard_policy = policies[policy]
        found = dataset.with_options(options).options().experimental_distribute.auto_shard_policy
        assert (found != policies.OFF) == doubles, "TensorFlow takes AUTO for nothing said"
        assert (f"auto_shard_policy is {policy} for" in caplog.text) == doubles
