"""`MultiWorkerMirroredStrategy`: real processes, which find each other by TF_CONFIG."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import pytest

from forebay.service.processes import free_port

from ..forks import Fork
from .clusters import start

BEGINS = """
import json
import os
import sys
import tensorflow as tf
from forebay import service

resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
if "not in the environment" in sys.argv:
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
        resolver.cluster_spec(),
        task_type=resolver.task_type,
        task_id=resolver.task_id,
        rpc_layer="grpc",
    )
    del os.environ["TF_CONFIG"]
strategy = tf.distribute.MultiWorkerMirroredStrategy(cluster_resolver=resolver)
index = strategy.cluster_resolver.task_id
target = sys.argv[1]


def say(what):
    print(json.dumps(what), flush=True)


@tf.function
def total(batch):
    own = strategy.run(lambda x: tf.reduce_sum(x), args=(batch,))
    return strategy.reduce("SUM", own, axis=None)


def steps(dataset):
    "Of an epoch: what this worker gets, and the sum of what all get."
    for batch in dataset:
        (own,) = strategy.experimental_local_results(batch)
        yield own.numpy().tolist(), int(total(batch))


def numbers(context):
    say("built")
    return tf.data.Dataset.range(600).batch(context.get_per_replica_batch_size(12))
"""

ENDS = """
say("end")
sys.stdin.read()  # TensorFlow ends a cluster with the first that leaves
os._exit(0)
"""


def started(program: str, number: int, *arguments: object) -> list[Fork]:
    cluster = {"worker": [f"127.0.0.1:{free_port()}" for _ in range(number)]}
    return [start(program, cluster, "worker", i, *arguments) for i in range(number)]


def said_by(tasks: list[Fork]) -> list[list[Any]]:
    """What each of them says before its end, which is in order."""
    said = [[json.loads(line) for line in iter(task.line, '"end"')] for task in tasks]
    for task in tasks:
        task.close_input()
    assert [task.finish(60) for task in tasks] == [0] * len(tasks)
    return said


SHARDED = """
Policy = tf.data.experimental.AutoShardPolicy


def lines(*names):
    "What these files of the directory have, one after another, in batches."
    files = tf.data.Dataset.from_tensor_slices([f"{sys.argv[2]}/{name}" for name in names])
    numbers = files.interleave(tf.data.TextLineDataset, cycle_length=1)
    return numbers.map(lambda line: tf.strings.to_number(line, tf.int64)).batch(4)


def with_policy(dataset, name):
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = Policy[name]
    return strategy.experimental_distribute_dataset(dataset.with_options(options))


def own(dataset, policy):
    try:
        return [own for own, _ in steps(with_policy(dataset, policy))]
    except tf.errors.NotFoundError as error:
        return "unshardable source" in str(error)


def read(dataset):
    return dataset.apply(service.distribute("parallel_epochs", target))


for policy, *names in json.loads(sys.argv[3]):
    say([own(lines(*names), policy), own(read(lines(*names)), policy)])
one_file = with_policy(lines("0 to 11"), "FILE")
if index == 0:
    try:
        next(iter(one_file))
    except tf.errors.InvalidArgumentError as error:
        say("FILE based sharding" in str(error))
else:
    say(None)
"""

HALVES = [[[0, 1], [2, 3], [4, 5]], [[6, 7], [8, 9], [10, 11]]]
IN_TURN = [[[0, 1], [4, 5], [8, 9]], [[2, 3], [6, 7], [10, 11]]]
EVERYTHING = [[[i, i + 1] for i in range(0, 12, 2)]] * 2
TWO, ONE = ["0 to 5", "6 to 11"], ["0 to 11"]
SHARDING: list[tuple[str, list[str], Any, Any]] = [
    # What each of two workers gets of the files: the guide's table; and through the service, each
    # for itself. (The guide has FILE end in [4] [5], where TensorFlow 2.21 joins what fits.)
    ("FILE", TWO, HALVES, [True, True]),  # an error, as with TensorFlow's own client
    ("AUTO", TWO, HALVES, IN_TURN),  # which is DATA, as it finds no files
    ("DATA", TWO, IN_TURN, IN_TURN),
    ("DATA", ONE, IN_TURN, IN_TURN),
    ("OFF", ONE, EVERYTHING, EVERYTHING),
]


def test_auto_sharding(target: str, tmp_path: pathlib.Path) -> None:
    for name, numbers in (("0 to 5", range(6)), ("6 to 11", range(6, 12)), ("0 to 11", range(12))):
        (tmp_path / name).write_text("".join(f"{i}\n" for i in numbers))
    rows = json.dumps([[policy, *names] for policy, names, *_ in SHARDING])
    said = said_by(started(BEGINS + SHARDED + ENDS, 2, target, tmp_path, rows))
    *found, too_few = zip(*said, strict=True)
    assert too_few == (True, None)
    for row, workers in zip(SHARDING, found, strict=True):
        assert [[*each] for each in zip(*workers, strict=True)] == [*row[2:]], row


BATCHES = """
plain = tf.data.Dataset.range(int(sys.argv[2])).batch(4)
read = plain.apply(service.distribute("parallel_epochs", target))
shared = service.distribute_across(lambda _: plain, target, strategy, job_name=str(sys.argv[2:]))
strategy.reduce("SUM", tf.constant(0), axis=None)  # nobody reads what others have not found
for dataset in (plain, read, shared):
    say([own for own, _ in steps(strategy.experimental_distribute_dataset(dataset))])
"""


@pytest.mark.parametrize(
    ("elements", "replicas", "expected"),
    [
        (6, 2, [[[0, 1], [2, 3]], [[4], [5]]]),
        (8, 3, [[[0, 1], [2, 3], []], [[4, 5], [6, 7], []]]),
    ],
)
def test_batches_over_replicas(
    target: str, elements: int, replicas: int, expected: list[list[list[int]]]
) -> None:
    """The guide's table, with a replica a process. In a shared job a batch is one trainer's, whose
    parts it has one after another."""
    workers = said_by(started(BEGINS + BATCHES + ENDS, replicas, target, elements))
    for way in range(2):
        assert [[*step] for step in zip(*(own[way] for own in workers), strict=True)] == expected
    shared = [own[2] for own in workers]
    assert len({len(own) for own in shared}) == 1, "all take part in each step"
    parts = sorted(part for own in shared for part in own if part)
    assert parts == sorted(part for batch in expected for part in batch if part)


SHARED = """
dataset = service.distribute_across(numbers, target, strategy, job_name="shared")
for distributed in (
    strategy.distribute_datasets_from_function(lambda _: dataset),
    strategy.experimental_distribute_dataset(dataset),
):
    say([*steps(distributed)])
"""


def test_a_shared_job(target: str) -> None:
    """Each element goes to one of them, and all make the same steps, of no elements if need be."""
    program = BEGINS + SHARED + ENDS
    chief, *others = said_by(started(program, 3, target, "not in the environment"))
    assert chief.pop(0) == "built"
    for size, epoch in zip((4, 2), zip(chief, *others, strict=True), strict=True):
        for step in zip(*epoch, strict=True):
            assert {total for _, total in step} == {sum(sum(own) for own, _ in step)}
            assert {len(own) for own, _ in step} <= {size, 0}  # 4 over 3 replicas are 2, 2 and 0
        own = [x for steps in epoch for elements, _ in steps for x in elements]
        assert sorted(own) == list(range(600))


FITTED = """
import keras

pairs = tf.data.Dataset.range(8).map(lambda i: (tf.fill([1], tf.cast(i, tf.float32)), 0.0)).batch(4)
for dataset in (pairs, pairs.apply(service.distribute("parallel_epochs", target))):
    with strategy.scope():
        model = keras.Sequential([keras.Input([1]), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    try:
        model.fit(dataset, shuffle=False, verbose=0)
    except ValueError as error:
        say("(PerReplica:" in str(error))
"""


def test_what_keras_cannot_do_it_cannot_without_a_service_either(target: str) -> None:
    """Its `fit` takes no batch of this strategy's for a tensor: README says so."""
    assert said_by(started(BEGINS + FITTED + ENDS, 2, target)) == [[True, True]] * 2


RESTARTED = """
first, last = map(int, sys.argv[2:])
dataset = service.distribute_across(
    numbers, target, strategy, job_name="restarted", initial_epoch=first
)
distributed = strategy.distribute_datasets_from_function(lambda _: dataset)
try:
    for epoch in range(first, last):
        for step, (own, _) in enumerate(steps(distributed)):
            say([epoch, own])
            if (first, epoch, step, index) == (0, 1, 3, 1):
                os.kill(os.getpid(), 9)
except tf.errors.OpError:  # of the other's death
    os._exit(3)
"""


def test_a_worker_that_is_killed_and_a_cluster_that_begins_again(target: str) -> None:
    chief, worker = started(BEGINS + RESTARTED + ENDS, 2, target, 0, 4)
    before = [[json.loads(line) for line in iter(task.line, "")] for task in (chief, worker)]
    assert chief.finish(60) != 0 and worker.finish(60) == -9
    assert before[0].pop(0) == "built"
    after = said_by(started(BEGINS + RESTARTED + ENDS, 2, target, 1, 3))
    for epoch in range(3):
        own = [x for task in before + after for number, own in task if number == epoch for x in own]
        assert len(own) == len({*own}), f"epoch {epoch} has elements twice"
        assert epoch == 1 or sorted(own) == list(range(600))
    assert any(own for task in after for number, own in task if number == 1), "what is left of it"
