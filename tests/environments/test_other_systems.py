"""Programs on systems that lack what Linux has: it is taken away from a process."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from forebay import service

from ..stock import DispatcherProcess

# Python's own library and other packages have other code there, so they are imported before.
AS_ON = """
import asyncio, concurrent.futures, json, multiprocessing.connection, os, select, selectors, shutil
import signal, socket, ssl, subprocess, sys, tempfile
import cryptography.x509, grpc, grpc_health.v1.health_pb2_grpc, numpy.random
from google.protobuf import json_format
for name in sys.argv[1].split():
    for module in (os, socket, signal, select):
        vars(module).pop(name, None)
    sys.modules[name] = None
from forebay import service
from forebay.service.errors import FailedPrecondition
"""
MACOS = """memfd_create MFD_CLOEXEC MFD_ALLOW_SEALING eventfd EFD_CLOEXEC EFD_NONBLOCK pidfd_open
    sched_getaffinity pipe2 epoll MSG_CMSG_CLOEXEC SO_PEERCRED TCP_KEEPIDLE TCP_USER_TIMEOUT"""
WINDOWS = f"""{MACOS} AF_UNIX CMSG_LEN CMSG_SPACE MSG_DONTWAIT O_CLOEXEC O_DIRECTORY O_NONBLOCK
    SCM_RIGHTS SIGCHLD SIGHUP SIGKILL SOCK_SEQPACKET fork geteuid getegid getgid getuid killpg poll
    pread register_at_fork set_blocking sysconf fcntl resource pwd grp termios"""


def said(program: str, *arguments: str) -> Any:
    command = [sys.executable, "-c", AS_ON + program, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert not done.returncode, done.stderr
    return json.loads(done.stdout)


def test_all_names_can_be_imported() -> None:
    """But those that need TensorFlow. What needs Linux says what it lacks."""
    program = """
wrong = []
for name in service.__all__:
    try:
        getattr(service, name)
    except ModuleNotFoundError as error:
        wrong.append(f"{error.name} {name}")
for begin in (service.DispatchServer, lambda: service.WorkerServer(service.WorkerConfig("a:1")),
              lambda: service.read("a:1", "1", ordered=True)):
    try:
        begin()
    except FailedPrecondition as error:
        wrong.append(str(error).partition(", which this system lacks: ")[0])
print(json.dumps(wrong))
"""
    of_tensorflow = """OrderedPosition distribute distribute_across distributed_save from_dataset_id
        register_tfds"""
    assert said(program, f"{WINDOWS} tensorflow") == [
        *(f"tensorflow {name}" for name in of_tensorflow.split()),
        *("a dispatcher needs memfd_create", "a worker needs memfd_create"),
        "reading elements needs CMSG_SPACE",
    ]


@pytest.mark.usefixtures("workers")
def test_elements_are_read_on_macos(dispatcher: DispatcherProcess) -> None:
    dataset_id = service.register_dataset(dispatcher.target, lambda n: iter([n]), splits=range(8))
    program = """
with service.read(*sys.argv[2:], ordered=True, shuffle=False, data_transfer_protocol="tcp") as all:
    print(json.dumps([*map(int, all)]))
"""
    assert said(program, MACOS, dispatcher.target, dataset_id) == [*range(8)]
