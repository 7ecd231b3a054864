"""`ParameterServerStrategy`: a coordinator says what is read, and its workers read."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import pytest

from forebay.service.processes import free_port

from .. import forks
from ..cluster import WorkerProcess
from ..stock import DispatcherProcess, ServerProcess

SERVER = """
import json
import sys
import tensorflow as tf

cluster, job, index = sys.argv[1:]
server = tf.distribute.Server(json.loads(cluster), job_name=job, task_index=int(index))
print("serves", flush=True)
server.join()
"""

COORDINATOR = """
import collections
import json
import os
import sys
import tensorflow as tf
from forebay import service

cluster, target, where = sys.argv[1:]
cluster = json.loads(cluster)
if where == "in the coordinator's process":
    servers = [
        tf.distribute.Server(cluster, job_name=job, task_index=index)
        for job in ("worker", "ps")
        for index in range(len(cluster[job]))
    ]
numbers = tf.data.Dataset.range(100)
dataset_id = service.register_dataset(target, numbers)
strategy = tf.distribute.ParameterServerStrategy(
    tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec(cluster), task_type="chief", task_id=0, rpc_layer="grpc"
    )
)
coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)


@tf.function
def step(iterator):
    found = iterator.get_next_as_optional()
    return tf.cond(found.has_value(), found.get_value, lambda: tf.constant(-1, tf.int64))


def read(dataset):
    iterator = iter(coordinator.create_per_worker_dataset(dataset))
    got = collections.Counter()
    while True:
        steps = [coordinator.schedule(step, args=(iterator,)) for _ in range(20)]
        elements = [int(value.fetch()) for value in steps]
        got.update(element for element in elements if element >= 0)
        if got.total() >= 100 and set(elements) == {-1}:
            return got


def by_id():
    return service.from_dataset_id(
        "distributed_epoch", target, dataset_id, numbers.element_spec, job_name="by id"
    )


def distributed():
    mine = tf.data.Dataset.range(100)
    return mine.apply(service.distribute("distributed_epoch", target, job_name="distributed"))


def registered_here():
    mine = tf.data.Dataset.range(100).map(lambda x: x)
    found = service.register_dataset(target, mine, "ZSTD")
    return service.from_dataset_id(
        service.ShardingPolicy.DYNAMIC, target, found, numbers.element_spec, job_name="here"
    )


with_a_name = service.from_dataset_id("distributed_epoch", target, dataset_id, job_name="built")
for dataset in (by_id, distributed, registered_here, with_a_name):
    print(sorted(read(dataset).elements()) == list(range(100)), flush=True)
try:
    service.from_dataset_id("distributed_epoch", "h:1,h:2", dataset_id, numbers.element_spec)
except ValueError as error:
    print(error)
os._exit(0)  # as TensorFlow cannot take the servers of a cluster down
"""


@pytest.mark.parametrize("where", ["in processes", "in the coordinator's process"])
def test_each_element_is_for_one_worker(tmp_path: Path, where: str) -> None:
    cluster = {
        job: [f"127.0.0.1:{free_port()}" for _ in range(number)]
        for job, number in {"chief": 1, "worker": 2, "ps": 1}.items()
    }
    server, coordinator = tmp_path / "server.py", tmp_path / "coordinator.py"
    server.write_text(SERVER)
    coordinator.write_text(COORDINATOR)
    with DispatcherProcess(tmp_path / "journal") as dispatcher, contextlib.ExitStack() as stack:
        stack.enter_context(WorkerProcess(dispatcher.address))
        if where == "in processes":
            for job in ("worker", "ps"):
                for index in range(len(cluster[job])):
                    arguments = [str(server), json.dumps(cluster), job, str(index)]
                    process = ServerProcess(forks.Fork(arguments))
                    stack.callback(process.kill)
                    assert process.first_line() == "serves"
        arguments = [str(coordinator), json.dumps(cluster), dispatcher.target, where]
        run = forks.run(arguments, timeout_s=100)
    said = run.stdout.splitlines()
    assert run.returncode == 0, run.stderr
    assert said[:4] == ["True"] * 4 and "several addresses" in said[4], run.stderr
