"""`ParameterServerStrategy`: a coordinator says what is read, by real processes of all roles."""

from __future__ import annotations

import contextlib
import json

from forebay.service.processes import free_port

from ..forks import Fork
from ..stock import ServerProcess
from .clusters import said, start

TASK = """
import json
import logging
import os
import sys
import types
import tensorflow as tf
from forebay import service

target = sys.argv[1]
resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()


def numbers(context):
    print("built", flush=True)
    return tf.data.Dataset.range(2000).batch(context.get_per_replica_batch_size(10))


def across(name="of parameter servers", strategy=None):
    return service.distribute_across(
        numbers, target, strategy, job_name=name, max_outstanding_requests=1
    )
"""

SERVER = """
server = tf.distribute.Server(
    resolver.cluster_spec(), resolver.task_type, resolver.task_id, protocol="grpc"
)
try:
    across()
except tf.errors.FailedPreconditionError as error:
    print(error, flush=True)
server.join()
"""

EVALUATOR = """
iterator = iter(across())
elements = next(iterator).numpy().tolist()
print("reads", flush=True)
sys.stdin.read()
elements += [x for batch in iterator for x in batch.numpy().tolist()]
print(json.dumps(sorted(elements)), flush=True)
"""

COORDINATOR = """
warned = []
log = logging.getLogger("forebay")
log.addHandler(logging.StreamHandler(types.SimpleNamespace(write=warned.append, flush=int)))
strategy = tf.distribute.ParameterServerStrategy(resolver)
coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)


with strategy.scope():  # so that it is a parameter server's
    times = tf.Variable(tf.zeros([2000], tf.int64))


@tf.function
def step(iterator):
    found = iterator.get_next_as_optional()
    nothing = tf.zeros([0], tf.int64)
    elements = tf.cond(found.has_value(), found.get_value, lambda: nothing)
    times.scatter_nd_add(elements[:, None], tf.ones_like(elements))


def begin(dataset):
    "What has workers make 20 steps; how often each element was read is counted from now on."
    times.assign(tf.zeros_like(times))
    iterator = iter(coordinator.create_per_worker_dataset(dataset))

    def steps():
        for _ in range(20):
            coordinator.schedule(step, args=(iterator,))

    return steps


def end(steps):
    before = -1
    while before < (before := int(tf.reduce_sum(times))):
        steps()
        coordinator.join()
    print(json.dumps(times.numpy().tolist()), flush=True)
"""

CHIEF = """
def plain():
    return tf.data.Dataset.range(2000).batch(10)


def by_id():
    return service.from_dataset_id(
        "distributed_epoch", target, dataset_id, plain().element_spec, job_name="by id"
    )


def distributed():
    return plain().apply(service.distribute("distributed_epoch", target, job_name="distributed"))


def registered_here():
    found = service.register_dataset(target, plain().map(lambda x: x), "ZSTD")
    return service.from_dataset_id(
        service.ShardingPolicy.DYNAMIC, target, found, plain().element_spec, job_name="here"
    )


dataset_id = service.register_dataset(target, plain())
with_a_name = service.from_dataset_id("distributed_epoch", target, dataset_id, job_name="built")
for dataset in (by_id, distributed, registered_here, with_a_name):
    end(begin(dataset))
try:
    service.from_dataset_id(
        "distributed_epoch", "h:1,h:2", dataset_id, plain().element_spec, job_name="several"
    )
except ValueError as error:
    print(error, flush=True)
end(begin(plain))  # each worker has a plain dataset for itself
end(begin(lambda: across("made by a function", strategy)))
steps = begin(across())
steps()
coordinator.join()
steps()
print("under way", flush=True)
sys.stdin.read()
end(steps)
for name, how in (("of parameter servers", {}), ("of parameter servers", {"initial_epoch": 1})):
    try:
        service.distribute_across(numbers, target, strategy, job_name=name, **how)
    except (ValueError, tf.errors.FailedPreconditionError) as error:
        print(error, flush=True)
print(json.dumps(warned), flush=True)
os._exit(0)  # as TensorFlow cannot take the servers of a cluster down
"""

KILLED = """
steps = begin(across("a chief that is killed"))
steps()
coordinator.join()
print(json.dumps(times.numpy().tolist()), flush=True)
sys.stdin.read()
end(steps)
try:
    while True:
        steps()
        coordinator.join()
except (tf.errors.UnavailableError, tf.errors.AbortedError) as error:
    print("/job:ps/" in str(error), flush=True)
os._exit(0)
"""


def test_a_cluster_whose_tasks_are_killed(target: str) -> None:
    """Each element is for one worker, and the evaluator has all of them. A coordinator goes on when
    workers are killed; one that is killed itself goes on from there, once it is started again, and
    so it must be when a parameter server is killed."""
    numbers = {"chief": 1, "worker": 2, "ps": 1}
    cluster = {
        kind: [f"127.0.0.1:{free_port()}" for _ in range(number)]
        for kind, number in numbers.items()
    }
    with contextlib.ExitStack() as stack:

        def server(kind: str, index: int) -> ServerProcess:
            task = ServerProcess(start(TASK + SERVER, cluster, kind, index, target))
            stack.callback(task.kill)
            return task

        servers = [server(*task) for task in (("worker", 0), ("worker", 1), ("ps", 0))]
        refused = [task.first_line() for task in servers]
        for line, who in zip(refused, ("worker 0", "worker 1", "parameter server 0"), strict=True):
            assert f"this task is {who} of" in line and "tf.distribute.Server" in line
        evaluators = [start(TASK + EVALUATOR, cluster, "evaluator", 0, target)]
        chief = start(TASK + COORDINATOR + CHIEF, cluster, "chief", 0, target)
        assert [json.loads(chief.line()) for _ in range(4)] == [[1] * 2000] * 4
        assert "several addresses" in chief.line()
        own, built, by_function, built_too = (chief.line() for _ in range(4))
        assert json.loads(own) == [2] * 2000, "each worker has all of a plain dataset"
        assert json.loads(by_function) == [1] * 2000
        assert (built, built_too, chief.line()) == ("built", "built", "under way")
        assert evaluators[0].line() == "reads"
        evaluators[0].kill()
        evaluators[0].finish()
        evaluators.append(start(TASK + EVALUATOR, cluster, "evaluator", 0, target))
        for task in servers[:2]:
            task.kill()
        for index in range(2):
            assert server("worker", index).first_line() == refused[index]
        chief.close_input()
        read, *errors, warnings = [line for line in said(chief) if line != "built"]
        times = json.loads(read)
        assert {*times} <= {0, 1} and sum(times) >= 1800, "some were on their way to the killed"
        assert "give another job_name" in errors[0]
        assert "TensorFlow's own operations read" in errors[1]
        assert json.loads(warnings) == []
        assert evaluators[1].line() == "reads"
        evaluators[1].close_input()
        assert json.loads(said(evaluators[1])[0]) == [*range(2000)], "whenever it begins"

        def coordinator() -> Fork:
            return start(TASK + COORDINATOR + KILLED, cluster, "chief", 0, target)

        chief = coordinator()
        assert chief.line() == "built"
        before = json.loads(chief.line())
        chief.kill()
        chief.finish()
        chief = coordinator()
        chief.close_input()
        assert chief.line() == "built", "and compared"
        chief.line()
        after = json.loads(chief.line())
        assert {x + y for x, y in zip(before, after, strict=True)} <= {0, 1}
        assert sum(before) == 200 and sum(before + after) >= 1800, "it reads the rest"
        servers[2].kill()
        assert said(chief) == ["True"], "of the variables there: the chief is to be started again"
