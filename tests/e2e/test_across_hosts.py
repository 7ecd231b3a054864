"""Workers on other hosts: network namespaces, as those of `forebay chaos --hosts`.

Run as a program, this file is what happens in the first of them.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from forebay.chaos.hosts import OWN_ADDRESS, Host, Network

from ..forks import Fork
from ..standbys import status, wait_until
from ..stock import DispatcherProcess

ROOT = Path(__file__).resolve().parents[2]
WORKERS = ("worker0", "worker1")

THERE = """
import os, runpy, sys
from forebay.chaos.hosts import Host
namespace, *sys.argv[1:] = sys.argv[1:]
with Host(namespace=os.open(namespace, os.O_RDONLY)).inside():
    runpy.run_module("forebay.service.cli", run_name="__main__", alter_sys=True)
"""

TRAINER = """
import collections, contextlib, itertools, pathlib, sys, time
from concurrent.futures import ThreadPoolExecutor
import apache_beam as beam
import numpy as np
import tensorflow as tf
from forebay import service

target, folder = sys.argv[1], pathlib.Path(sys.argv[2])
SPLITS, FREE, EACH, IMAGES = 40, 5, 20, 100
ELEMENTS = {"tf.data": IMAGES, "Python": SPLITS * EACH, "Beam": SPLITS * EACH}
MODES = ("distributed_epoch", "parallel_epochs")

def registered(gate):
    "By kind. Functions wait for the gate behind some splits; the graph's elements are large."

    def function(split):
        while split >= FREE and not gate.exists():
            time.sleep(0.01)
        for number in range(EACH * split, EACH * (split + 1)):
            yield {"number": number, "row": np.full(300, number)}

    images = tf.data.Dataset.range(IMAGES)
    images = images.map(lambda n: {"number": n, "row": tf.fill([50_000], n)})
    chain = beam.Pipeline() | beam.Create(range(SPLITS)) | beam.FlatMap(function)
    return {
        "tf.data": service.register_dataset(target, images),
        "Python": service.register_dataset(target, function, splits=range(SPLITS)),
        "Beam": service.register_dataset(target, chain),
    }

def number_of(element):
    assert (element["row"] == element["number"]).all()
    return int(element["number"])

def read(step, workers):
    "What each reader gets; after its first elements of all workers, something happens."
    gate = folder / step
    found = {}
    with contextlib.ExitStack() as stack:
        readers = {}
        for (kind, dataset_id), mode in itertools.product(registered(gate).items(), MODES):
            most = workers if kind == "tf.data" else None  # so that it is not sent all at once
            reader = service.read(
                target, dataset_id, processing_mode=mode, max_outstanding_requests=most
            )
            readers[kind, mode] = stack.enter_context(reader)
        for (kind, mode), reader in readers.items():
            first = 1 if kind == "tf.data" else FREE * EACH
            first *= workers if mode == "parallel_epochs" else 1
            found[kind, mode] = [*map(number_of, itertools.islice(reader, first))]
        print(step, flush=True)
        while not gate.exists():
            time.sleep(0.01)
        with ThreadPoolExecutor(len(readers)) as pool:  # or a drain waits for those that come last
            rest = pool.map(lambda reader: [*map(number_of, reader)], readers.values())
            for key, numbers in zip(readers, rest, strict=True):
                found[key] += numbers
    return {key: collections.Counter(numbers) for key, numbers in found.items()}

for step, workers in (("drains", 2), ("reads on", 1)):
    for (kind, mode), found in read(step, workers).items():
        known = set(range(ELEMENTS[kind]))
        if mode == "parallel_epochs":
            assert found.keys() == known, (step, kind)
            times = {1, 2} if workers == 2 else {1}
            assert step != "drains" or kind == "tf.data" or len(known) < found.total()
        else:
            assert found.keys() == known, (step, kind)
            times = {1}
        assert {*found.values()} <= times, (step, kind, mode)
print("all of them", flush=True)
"""


ISOLATED = ("unshare", "--map-root-user", "--net")


def test_datasets_of_every_kind_are_read_across_hosts(tmp_path: Path) -> None:
    """In each mode, while one of two workers drains."""
    require_namespaces()
    command = [*ISOLATED, sys.executable, "-m", __name__, str(tmp_path)]
    try:
        said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=110)
    except subprocess.TimeoutExpired as error:
        pytest.fail(f"{error}; it said: {error.stdout!r}, {error.stderr!r}")
    assert said.stdout == "all of them\n", said.stdout + said.stderr


def require_namespaces() -> None:
    """Fails where this user may not have namespaces, or a cable between them, with what to do."""
    command = [*ISOLATED, "ip", "link", "add", "here", "type", "veth", "peer", "name", "there"]
    try:
        tried = subprocess.run(command, capture_output=True, text=True, timeout=10)
        said = tried.stderr if tried.returncode else ""
    except FileNotFoundError as error:
        said = str(error)
    assert not said, (
        f"{' '.join(command)}: {said.strip()}\nThis test needs util-linux, iproute2, and user and "
        "network namespaces. If they are forbidden, allow them, as root: sysctl -w "
        "user.max_user_namespaces=10000; on Ubuntu sysctl -w "
        "kernel.apparmor_restrict_unprivileged_userns=0 as well; in a container, run it with "
        "--security-opt seccomp=unconfined --security-opt apparmor=unconfined"
    )


class WorkerThere:
    """A worker on a host of its own."""

    def __init__(self, host: Host, dispatcher: str) -> None:
        self.host = host
        options = ["--dispatcher", dispatcher, "--host", host.address, "--processes=1"]
        options += ["--allow-python", "--drain-timeout-ms=80000", "--insecure"]
        namespace = f"/proc/{os.getpid()}/fd/{host.namespace}"
        self.process = Fork(["-c", THERE, namespace, "worker", *options])

    def wait_until_registered(self) -> None:
        assert self.process.line().startswith(f"{self.host.address}:")


def main() -> None:
    folder = Path(sys.argv[1])
    network = Network(WORKERS)
    with DispatcherProcess("memory:", host=OWN_ADDRESS, insecure=True) as dispatcher:
        workers = [WorkerThere(network.hosts[name], dispatcher.address) for name in WORKERS]
        for worker in workers:
            worker.wait_until_registered()
        trainer = Fork(["-c", TRAINER, dispatcher.target, str(folder)])
        assert trainer.line() == "drains"
        workers[1].process.terminate()
        wait_until(is_draining, dispatcher)
        (folder / "drains").touch()
        assert trainer.line() == "reads on"
        assert workers[1].process.finish(60) == 0
        (folder / "reads on").touch()
        print(trainer.line(), flush=True)
        trainer.finish(60)
        workers[0].process.kill()
    network.close()


def is_draining(dispatcher: DispatcherProcess) -> bool:
    workers = status(dispatcher)["workers"]
    return any(worker["draining"] for worker in workers)


if __name__ == "__main__":
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    main()
