"""Reading in a fork of a process that has read: a program of its own calls the dispatcher."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import tensorflow as tf

from forebay import service
from forebay.service.connections import relay

from ..cluster import WorkerProcess
from ..forks import run
from ..stock import DispatcherProcess

FORKS = """
import os
import pathlib
import signal
import sys
import threading

import grpc

from forebay import service
from forebay.service.client.reader import fetch_dataset
from forebay.service.connections import relay
from forebay.service.errors import NotFound

target, dataset_id = sys.argv[1:]
found = fetch_dataset(target, dataset_id)
assert not relay.is_needed()


def read():
    return sorted(int(x) for x in service.read(target, dataset_id))


def forked():
    assert relay.is_needed()
    os.environ["FOREBAY_DISPATCHER"] = "another"
    in_a_thread = threading.Thread(target=fetch_dataset, args=(target, dataset_id))
    in_a_thread.start()
    in_a_thread.join()
    began = relay.program().pid
    assert read() == [*range(100)]
    assert relay.program().pid == began, "it outlives the thread that called first"
    first = relay.program()
    environment = pathlib.Path(f"/proc/{first.pid}/environ").read_bytes()
    assert b"FOREBAY_" not in environment, "which is not meant for it"
    assert os.getpgid(first.pid) != os.getpgid(0), "a signal to our group is not for it"
    first.terminate()
    assert fetch_dataset(target, dataset_id) == found, "a scheduler tells all processes to end"
    assert relay.program() is first
    first.kill()
    assert fetch_dataset(target, dataset_id) == found, "it is started again"
    assert relay.program().pid != first.pid
    relay.LATER_S = 0.1
    relay.program().send_signal(signal.SIGSTOP)
    channel = relay.RelayedChannel(target)
    call = channel.unary_unary("/a")
    try:
        call(b"", timeout=0.1)
        raise AssertionError("a program that hangs has answered")
    except grpc.RpcError as error:
        assert error.code() == grpc.StatusCode.UNAVAILABLE
    relay.program().send_signal(signal.SIGCONT)
    try:
        fetch_dataset(target, "nothing")
    except NotFound as error:
        print(relay.program().pid, error, flush=True)


elements = service.read(target, dataset_id)
next(elements)  # others of its threads use gRPC now
for _ in range(2):
    child = os.fork()
    if not child:
        try:
            forked()
        finally:
            os._exit(0)
    os.waitpid(child, 0)
assert len([*elements]) == 99
assert read() == [*range(100)], "in the first one as ever"
"""


def test_close_tolerates_a_call_that_has_just_ended() -> None:
    channel = relay.RelayedChannel("somewhere")
    own, other = socket.socketpair()
    with own, other:
        pass
    channel._calls.add(own)
    channel.close()


def is_there(pid: str) -> bool:
    try:
        return "forebay" in (Path("/proc") / pid / "cmdline").read_text()
    except OSError:
        return False


def test_a_fork_reads(tmp_path: Path) -> None:
    with DispatcherProcess(tmp_path) as dispatcher, WorkerProcess(dispatcher.address):
        dataset_id = service.register_dataset(dispatcher.target, tf.data.Dataset.range(100))
        ended = run(["-c", FORKS, dispatcher.target, dataset_id])
        assert ended.returncode == 0, ended.stderr
        said = ended.stdout.splitlines()
        assert len(said) == 2, ended.stderr
        for line in said:
            pid, error = line.split(maxsplit=1)
            assert "nothing" in error
            while is_there(pid):  # it ends with the fork
                pass


PREPARES = """
import os
import sys
import time

from forebay import service

assert not service.list_datasets(sys.argv[1])
for _ in range(5):
    child = os.fork()
    if not child:
        os._exit(0)
    os.waitpid(child, 0)
    time.sleep(0.1)
"""


def test_grpc_fork_support_is_off_unless_enabled(tmp_path: Path) -> None:
    """With it, gRPC says PrepareFork for each fork, and sometimes waits for ever in one."""
    traced = {k: v for k, v in os.environ.items() if k != "GRPC_ENABLE_FORK_SUPPORT"}
    traced |= {"GRPC_VERBOSITY": "debug", "GRPC_TRACE": "event_engine"}
    with DispatcherProcess(tmp_path) as dispatcher:
        command = [sys.executable, "-c", PREPARES, dispatcher.target]
        forked = subprocess.run(command, env=traced, stderr=subprocess.PIPE, text=True, timeout=60)
    assert forked.returncode == 0, forked.stderr
    assert "event_engine" in forked.stderr or "EventEngine" in forked.stderr
    assert "PrepareFork" not in forked.stderr


def test_grpc_fork_support_that_a_user_enables_stays_on() -> None:
    """No fork here: gRPC may wait for ever in one."""
    shows = "import os; import forebay.service; print(os.environ['GRPC_ENABLE_FORK_SUPPORT'])"
    enabled = {**os.environ, "GRPC_ENABLE_FORK_SUPPORT": "1"}
    shown = subprocess.run(
        [sys.executable, "-c", shows], env=enabled, stdout=subprocess.PIPE, text=True, timeout=60
    )
    assert shown.stdout == "1\n"
