"""Where the processes of Python datasets come from, and what ends with them."""

from __future__ import annotations

import contextlib
import errno
import gc
import itertools
import mmap
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn

import pytest

from forebay.service.errors import PipelineError
from forebay.service.pipelines.python import child_connections
from forebay.service.pipelines.python.child_connections import Died, PythonChild, StoredDataset
from forebay.service.pipelines.python.fork_server import HERE, ForkServer, ended, readable

from .functions import INT, numbers, pipeline_of, read


@pytest.fixture
def fork_server() -> Iterator[ForkServer]:
    found = ForkServer()
    yield found
    found.close()


def asked(fork_server: ForkServer) -> tuple[socket.socket, socket.socket]:
    """A child that waits to be told what to do, and what is said of its end."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        return ours, fork_server.fork(theirs)


def test_a_request_that_fails_costs_no_other_child(fork_server: ForkServer) -> None:
    connection, control = asked(fork_server)
    assert fork_server.requests is not None
    refused, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    socket.send_fds(fork_server.requests, [b"fork"], [theirs.fileno()])  # the other one is missing
    theirs.close()
    assert refused.recv(1) == b""
    other, told = asked(fork_server)
    other.close()
    assert ended(told).startswith("exit code")
    control.send(b"end")
    assert "SIGKILL" in ended(control)
    for each in (connection, control, refused, told):
        each.close()


def test_a_set_of_strings_has_one_order_in_all_processes() -> None:
    """Or a bundle of an ordered read would have another order on each worker."""

    def function(split: int) -> Iterator[str]:
        yield from {f"word {number}" for number in range(100)}

    found = []
    for _ in range(2):
        HERE.close()  # so that the next children are another one's
        found.append(read(function, [0], '{"tensor":"string","shape":[]}'))
    assert found[0] == found[1]


REFUSING = """
import errno, os, signal

os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))
fork_server, fork, refused = os.getpid(), os.fork, []

def forked():
    if os.getpid() == fork_server and refused:
        return fork()
    refused.append(True)
    raise OSError(errno.EAGAIN, "too many")

os.fork = forked
"""
"""Forks fail: the fork server's first one, and all of its inits. asyncio of 3.12 has that hook."""


def test_a_fork_that_fails_is_said_and_costs_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "refusing.py").write_text(REFUSING)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    fork_server, processes = ForkServer("refusing"), set[int]()
    for _ in range(3):
        child = PythonChild(fork_server, StoredDataset(INT, b"definition"))
        died = child.receive()
        assert isinstance(died, Died)
        assert died.how.startswith("it could not be forked: [Errno 11] too many")
        child.kill()
        assert fork_server._process is not None
        processes.add(fork_server._process.pid)
    fork_server.close()
    assert len(processes) == 1
    assert "Traceback" not in capfd.readouterr().err


def test_a_fork_server_that_has_gone_is_started_again(fork_server: ForkServer) -> None:
    for unread in ([], [b"fork"], []):
        connection, control = asked(fork_server)
        connection.close()
        assert ended(control).startswith("exit code")
        control.close()
        assert fork_server.requests is not None
        fork_server.requests.close()
        fork_server.requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for message in unread:
            fork_server.requests.send(message)
        theirs.close()  # as when it has just died


def test_a_fork_server_ends_though_a_fork_of_the_worker_lives() -> None:
    fork_server = ForkServer()
    connection, control = asked(fork_server)
    assert fork_server.requests is not None
    theirs = os.dup(fork_server.requests.fileno())
    fork_server.close()
    assert ended(control) == "with its init, or with the worker's fork server"
    for end in (theirs, connection.detach(), control.detach()):
        os.close(end)


def test_a_signal_to_all_of_a_workers_processes_does_not_end_them_before_it() -> None:
    """SIGTERM, with which it drains; what a function forks ends with it, as it would elsewhere."""

    def function(split: int) -> Iterator[int]:
        os.kill(os.getppid(), signal.SIGINT)
        for process in (os.getppid(), os.getpid()):
            os.kill(process, signal.SIGTERM)
        told, tells = os.pipe()
        if (fork := os.fork()) == 0:
            os.write(tells, b"forked")
            time.sleep(3600)  # until SIGTERM ends it, as it should
        os.read(told, 6)
        os.kill(fork, signal.SIGTERM)
        yield os.waitstatus_to_exitcode(os.waitpid(fork, 0)[1])

    assert read(function, range(3)) == [-signal.SIGTERM] * 3


def test_no_child_can_change_what_others_are_told() -> None:
    dataset = StoredDataset(INT, b"definition", b"files")
    with pytest.raises(PermissionError):
        os.pwrite(dataset.descriptor, b"x", 0)
    with pytest.raises(PermissionError):
        mmap.mmap(dataset.descriptor, 1)
    assert dataset.files() == b"files"


@pytest.mark.parametrize("fails", ["sealed_file", "new_slab", "fork"])
def test_a_process_that_cannot_be_started_costs_no_descriptor(
    fails: str, fork_server: ForkServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object) -> NoReturn:
        raise OSError(errno.EMFILE, "too many")

    connection, control = asked(fork_server)  # so that it has started
    if fails == "fork":
        monkeypatch.setattr(fork_server, "_ask", refused)
    else:
        monkeypatch.setattr(child_connections, fails, refused)
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(PipelineError, match=r"no process can be started: .*too many") as raised:
        PythonChild(fork_server, StoredDataset(INT, b"definition"))
    assert raised.value.code == "RESOURCE_EXHAUSTED"
    del raised
    gc.collect()  # memory that is mapped holds a descriptor
    assert len(os.listdir("/proc/self/fd")) <= before
    connection.close()
    control.close()


def daemon() -> int:
    """A process that nobody has started, in a session of its own."""
    told, tells = os.pipe()
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.write(tells, str(os.getpid()).encode())
            os.execvp("sleep", ["sleep", "1000"])
        os._exit(0)
    os.wait()
    return int(os.read(told, 20))


def test_what_a_function_leaves_behind_is_reaped_and_what_it_waits_for_is_not() -> None:
    def function(split: int) -> Iterator[int]:
        told, tells = os.pipe()
        if (fork := os.fork()) == 0:
            if (orphan := os.fork()) == 0:
                os._exit(0)
            os.write(tells, str(orphan).encode())
            os._exit(0)
        its_own = subprocess.Popen(["sh", "-c", "exit 7"])
        orphan = int(os.read(told, 20))
        os.waitpid(fork, 0)
        while os.path.exists(f"/proc/{orphan}"):
            time.sleep(0.01)
        yield its_own.wait()

    assert read(function, range(3), timeout_s=30) == [7] * 3


@pytest.mark.parametrize("killed", ["fork server", "init"])
def test_a_child_ends_though_what_it_was_forked_by_is_killed(
    killed: str, fork_server: ForkServer
) -> None:
    connection, control = asked(fork_server)
    assert fork_server._process is not None
    pid = fork_server._process.pid
    if killed == "fork server":
        os.kill(pid, signal.SIGKILL)
    while not readable(control, timeout_ms=10):
        for init in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(init), signal.SIGKILL)
    assert ended(control) == "with its init, or with the worker's fork server"
    assert connection.recv(1) == b""
    connection.close()
    control.close()


STARTED: dict[str, Callable[[], int]] = {
    "a process": lambda: subprocess.Popen(["sleep", "1000"]).pid,
    "a session": lambda: subprocess.Popen(["sleep", "1000"], start_new_session=True).pid,
    "a daemon": daemon,
}


def killing_its_fork_server() -> None:
    """And all in its group."""
    stat = Path(f"/proc/{os.getppid()}/stat").read_text()
    fork_server = int(stat.rpartition(")")[2].split()[1])
    os.killpg(os.getpgid(fork_server), signal.SIGKILL)
    time.sleep(3600)  # until the kernel ends it as well


@pytest.mark.parametrize(
    ("start", "last"),
    [
        *itertools.product(STARTED, [lambda: None, lambda: os._exit(7)]),
        ("a session", killing_its_fork_server),
    ],
)
def test_what_a_function_has_started_ends_with_it(
    last: Callable[[], object], start: str, tmp_path: Path
) -> None:
    path, begin = tmp_path / "process", STARTED[start]

    def function(split: int) -> Iterator[int]:
        path.write_text(str(begin()))
        yield 1
        last()

    with contextlib.suppress(PipelineError):
        read(function, [0])
    stat = Path(f"/proc/{path.read_text()}/stat")
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        while stat.read_text().rpartition(")")[2].split()[0] != "Z":
            time.sleep(0.01)


def test_all_are_told_to_tear_down_before_one_is_waited_for(tmp_path: Path) -> None:
    class Together:
        def __call__(self, split: int) -> Iterator[int]:
            (tmp_path / f"began {os.getpid()}").touch()
            while len([*tmp_path.glob("began *")]) < 2:
                time.sleep(0.01)
            yield split

        def teardown(self) -> None:
            (tmp_path / f"told {os.getpid()}").touch()
            while len([*tmp_path.glob("told *")]) < 2:
                time.sleep(0.01)
            (tmp_path / f"over {os.getpid()}").touch()

    pipeline = pipeline_of(Together(), range(2), processes=2)
    assert sorted(numbers(pipeline.run(None).blocks())) == [0, 1]
    pipeline.close()
    assert len([*tmp_path.glob("over *")]) == 2
