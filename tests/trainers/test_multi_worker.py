"""`MultiWorkerMirroredStrategy`: real processes, which find each other by TF_CONFIG."""

from __future__ import annotations

import json
from typing import Any

from forebay.service.processes import free_port

from ..forks import Fork
from .clusters import start

BEGINS = """
import json
import os
import sys
import tensorflow as tf
from forebay import service

strategy = tf.distribute.MultiWorkerMirroredStrategy()
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
options = tf.data.Options()
elements = tf.data.Dataset.range(12).batch(4)
options.experimental_distribute.auto_shard_policy = Policy.DATA
read = elements.apply(service.distribute("parallel_epochs", target)).with_options(options)
say([own for own, _ in steps(strategy.experimental_distribute_dataset(read))])
"""


def test_auto_sharding(target: str) -> None:
    """Of what each trainer reads for itself."""
    everything = [[i, i + 1] for i in range(0, 12, 2)]
    expected = [[everything[0::2]], [everything[1::2]]]
    assert said_by(started(BEGINS + SHARDED + ENDS, 2, target)) == expected


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
    chief, *others = said_by(started(BEGINS + SHARED + ENDS, 3, target))
    assert chief.pop(0) == "built"
    for size, epoch in zip((4, 2), zip(chief, *others, strict=True), strict=True):
        for step in zip(*epoch, strict=True):
            assert {total for _, total in step} == {sum(sum(own) for own, _ in step)}
            assert {len(own) for own, _ in step} <= {size, 0}  # 4 over 3 replicas are 2, 2 and 0
        own = [x for steps in epoch for elements, _ in steps for x in elements]
        assert sorted(own) == list(range(600))


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
