"""What reads, registers and works without TensorFlow does so where there is none."""

from __future__ import annotations

import subprocess
from pathlib import Path

import tensorflow as tf

from forebay import service

from .programs import said_by

ABSENT = """
import importlib.util, json, sys
from forebay import service
import forebay.torch
assert not {"tensorflow", "apache_beam", "jax"} & {*sys.modules}
import forebay.jax
service.read
print(json.dumps([x for x in ("tensorflow", "apache_beam") if importlib.util.find_spec(x)]))
"""


def test_it_has_no_tensorflow(frameworks: Path) -> None:
    assert said_by(frameworks, ABSENT) == [[]]


WORKS = """
import sys
from forebay import service


def lines(number):
    yield from ({"line": f"{number}.{i}", "size": i} for i in range(number))


def read(dataset_id):
    return [*service.read(dispatcher.target, dataset_id, processing_mode="distributed_epoch")]


with service.DispatchServer() as dispatcher:
    with service.WorkerServer(service.WorkerConfig(dispatcher.target)):
        dataset_id = service.register_dataset(dispatcher.target, lines, splits=range(5))
        assert service.register_dataset(dispatcher.target, lines, splits=range(5)) == dataset_id
        found = sorted((each["line"].decode(), int(each["size"])) for each in read(dataset_id))
        assert found == sorted((f"{n}.{i}", i) for n in range(5) for i in range(n)), found
        print(dispatcher.target, dataset_id, flush=True)
        for id in sys.stdin:
            try:
                read(id.strip())
            except service.ForebayError as error:
                print(error, flush=True)
        for wrong in (3, lambda: 1, "/nothing"):
            try:
                service.register_dataset(dispatcher.target, wrong)
            except service.ForebayError as error:
                print(error, flush=True)
"""


def test_functions_are_registered_and_run_without_it(frameworks: Path) -> None:
    program = subprocess.Popen(
        [frameworks, "-c", WORKS], text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    with program:
        assert program.stdout is not None
        target, dataset_id = program.stdout.readline().split()
        (registered,) = service.list_datasets(target)
        assert registered.dataset_id == dataset_id
        read = service.from_dataset_id("distributed_epoch", target, dataset_id)
        assert read.element_spec == {
            "line": tf.TensorSpec([], tf.string),
            "size": tf.TensorSpec([], tf.int64),
        }
        assert len([*read]) == 10
        graph = service.register_dataset(target, tf.data.Dataset.range(5))
        said, _ = program.communicate(f"{graph}\n", timeout=100)
    refused, *wrong = said.splitlines()
    assert "there is no TensorFlow on its host" in refused
    assert "3 is no dataset" in wrong[0]  # TensorFlow would not help
    assert "no `splits` are given" in wrong[1]
    assert "where there is no TensorFlow" in wrong[2] and len(wrong) == 3
    assert program.returncode == 0


WORKER = """
import json, subprocess, sys
from forebay import service


def doubled(number):
    yield 2 * number


with service.DispatchServer() as dispatcher:
    command = [sys.executable, "-m", "forebay.service.cli", "worker", "--dispatcher"]
    address = dispatcher.target.removeprefix("grpc://")
    worker = subprocess.Popen([*command, address], stdout=subprocess.PIPE)
    assert worker.stdout.readline(), "it has ended"
    dataset_id = service.register_dataset(dispatcher.target, doubled, splits=range(5))
    found = service.read(dispatcher.target, dataset_id, processing_mode="distributed_epoch")
    print(json.dumps(sorted(map(int, found))))
    worker.terminate()
    print(worker.wait(100))
"""


def test_a_worker_runs_functions_as_a_process_of_its_own(frameworks: Path) -> None:
    assert said_by(frameworks, WORKER) == [[0, 2, 4, 6, 8], 0]
