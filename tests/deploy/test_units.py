"""deploy/systemd/: what the units forbid is much, and nothing that dispatchers and workers need."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from forebay import service

from ..stock import ServerProcess
from .manifests import DEPLOY

CONFINED = """
import ctypes, errno, json, os, socket, sys

ALLOW, REFUSE, EQUAL = 0x7FFF0000, 0x50000 | errno.EPERM, 4

class Compare(ctypes.Structure):
    _fields_ = [("arg", ctypes.c_uint), ("op", ctypes.c_int), ("a", ctypes.c_uint64),
                ("b", ctypes.c_uint64)]

calls, families, *command = json.loads(sys.argv[1])
library = ctypes.CDLL("libseccomp.so.2")
library.seccomp_init.restype = ctypes.c_void_p
context = ctypes.c_void_p(library.seccomp_init(REFUSE))
for call in calls:
    number = library.seccomp_syscall_resolve_name(call.encode())
    if call != "socket" and number >= 0:
        assert library.seccomp_rule_add(context, ALLOW, number, 0) == 0, call
for family in families:
    one = Compare(0, EQUAL, getattr(socket, family), 0)
    number = library.seccomp_syscall_resolve_name(b"socket")
    assert library.seccomp_rule_add_array(context, ALLOW, number, 1, ctypes.byref(one)) == 0
assert library.seccomp_load(context) == 0
try:
    socket.socket(socket.AF_PACKET)
except OSError as error:
    assert error.errno == errno.EPERM
else:
    raise AssertionError("nothing is forbidden")
os.execvp("setpriv", ["setpriv", "--bounding-set=-all", "--inh-caps=-all", "--no-new-privs",
                      sys.executable, "-m", "forebay.service.cli", *command])
"""
"""Starts a command with the system calls and kinds of sockets that are named, and without
capabilities, as systemd would."""


def unit(name: str) -> Path:
    return DEPLOY / "systemd" / f"forebay-{name}.service"


def setting(name: str, of: str) -> list[str]:
    (line,) = [line for line in unit(of).read_text().splitlines() if line.startswith(f"{name}=")]
    return line.partition("=")[2].split()


def calls_of(group: str) -> set[str]:
    shown = subprocess.run(
        ["systemd-analyze", "syscall-filter", group],
        capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    calls = {line.strip() for line in shown.splitlines()[1:] if "#" not in line} - {""}
    return calls.union(*(calls_of(call) for call in calls if call.startswith("@")))


def confined(name: str, *arguments: str) -> ServerProcess:
    (group,) = setting("SystemCallFilter", name)
    families = setting("RestrictAddressFamilies", name)
    command = [sorted(calls_of(group)), families, name, *arguments]
    return ServerProcess(["-c", CONFINED, json.dumps(command)])


@pytest.mark.parametrize("name", ["dispatcher", "worker"])
def test_a_unit_is_exposed_little(name: str) -> None:
    """systemd's own mark: 0 is best, 10 worst, and it was 8.4."""
    command = ["systemd-analyze", "security", "--offline=true", "--threshold=40", str(unit(name))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_a_dispatcher_and_a_worker_serve_with_what_their_units_leave_them(tmp_path: Path) -> None:
    """The filters of system calls and sockets are the units', and no capability is left. What
    systemd does by mounts, such as ProtectSystem=, is not tried: no systemd runs in tests."""
    import tensorflow as tf

    numbers = list(range(50))
    dispatcher = confined("dispatcher", f"--storage={tmp_path / 'journal'}")
    target = dispatcher.first_line()
    worker = confined("worker", f"--dispatcher={target.removeprefix('grpc://')}")
    worker.first_line()

    compiled = tf.function(lambda x: x + tf.zeros([], tf.int64), jit_compile=True)
    graph = tf.data.Dataset.range(50).map(compiled).batch(5).unbatch()
    python = service.register_dataset(target, lambda split: [int(split)], splits=numbers)
    for dataset_id in (service.register_dataset(target, graph), python):
        for protocol in ("tcp", "unix"):
            got = service.read(
                target, dataset_id,
                processing_mode="distributed_epoch", data_transfer_protocol=protocol,
            )  # fmt: skip
            assert sorted(int(each) for each in got) == numbers
    assert (worker.stop(), dispatcher.stop()) == (0, 0)
