"""A worker on another host: two network namespaces, and a cable between them.

Run as a program, this file is what happens in the first of them.
"""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import pytest

from ..forks import Fork
from ..stock import DispatcherProcess

ROOT = pathlib.Path(__file__).resolve().parents[2]
HERE, THERE = "192.0.2.1", "192.0.2.2"

WORKER = """
import ctypes, os, runpy, subprocess, sys
here, *sys.argv[1:] = sys.argv[1:]
CLONE_NEWNET = 0x40000000
assert ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWNET) == 0, ctypes.get_errno()
print("moved", flush=True)
sys.stdin.read()
for command in ("link set lo up", f"addr add {here}/24 dev there", "link set there up"):
    subprocess.run(["ip", *command.split()], check=True)
runpy.run_module("forebay.service.cli", run_name="__main__", alter_sys=True)
"""

TRAINER = """
import sys
import numpy as np
from forebay import service

def squares(split):
    for number in range(100 * split, 100 * (split + 1)):
        yield {"number": number, "row": np.full(300, number)}

dataset_id = service.register_dataset(sys.argv[1], squares, splits=range(50))
with service.read(sys.argv[1], dataset_id, processing_mode="distributed_epoch") as elements:
    found = []
    for element in elements:
        assert (element["row"] == element["number"]).all()
        found.append(int(element["number"]))
assert sorted(found) == [*range(5000)]
print("all of them", flush=True)
"""


ISOLATED = ("unshare", "--map-root-user", "--net")


def test_a_python_dataset_is_read_across_hosts() -> None:
    require_namespaces()
    command = [*ISOLATED, sys.executable, "-m", __name__]
    try:
        said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=90)
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


def ip(command: str) -> None:
    subprocess.run(["ip", *command.split()], check=True)


def main() -> None:
    for command in (
        "link set lo up", "link add here type veth peer name there",
        f"addr add {HERE}/24 dev here", "link set here up",
    ):  # fmt: skip
        ip(command)
    with DispatcherProcess("memory:", host=HERE) as dispatcher:
        options = ["--dispatcher", dispatcher.address, "--host", THERE, "--allow-python"]
        worker = Fork(["-c", WORKER, THERE, "worker", *options])
        assert worker.line() == "moved"
        ip(f"link set there netns {worker.pid}")
        worker.close_input()
        assert worker.line().startswith(f"{THERE}:")
        trainer = Fork(["-c", TRAINER, dispatcher.target])
        print(trainer.line(), flush=True)
        trainer.finish(60)
        worker.kill()


if __name__ == "__main__":
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    main()
