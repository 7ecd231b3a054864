"""The fork server, which has done the imports, and forks a worker's children for Python datasets.

A fork server starts when the worker first needs it. It imports, and forks for each request; it runs
no function of a dataset. So a child starts within milliseconds, after a crash as well. The fork
server ends with the worker, and the kernel ends the children with it.

A request comes with two sockets. One is the child's (child.py). The other belongs to the child's
*init*, a process between fork server and child, which reports how the child ended. When that socket
is closed or written to, the init kills the child. The init is a subreaper (PR_SET_CHILD_SUBREAPER
in prctl(2)): it adopts the processes that the child started and left behind, and ends them once
the child has ended, however it ended. So a function may wait for all children that its process has.

A fork has one thread, whatever locks other threads of the fork server held. So the imports of a
fork server start no thread, except OpenBLAS's, which prepare for forks themselves. Beam imports
gRPC, which starts its threads with the first channel, and Arrow, whose allocator jemalloc is told
to do without.

SIGTERM ends none of these processes, since it may reach all processes of a worker at once, which
drains then. SIGINT ends no fork server and no init. If both are killed at once, the child ends, and
the programs that its function started stay.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import gc
import importlib
import os
import pathlib
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import NoReturn

from ...processes import EXIT_WITH_PARENT, ChildProcess, forebay
from ...proto.python_pb2 import PythonDataset

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36

MAX_EXIT_TEXT = 1000

END_S = 5.0
"""For the process to end, before it is killed."""

BEAM = "apache-beam"
"""The distribution."""

_ENVIRONMENT = {"JE_ARROW_MALLOC_CONF": "background_thread:false"}

_SECRETS = {
    f"OTEL_EXPORTER_OTLP_{signal}HEADERS" for signal in ("", "TRACES_", "METRICS_", "LOGS_")
}
"""Of the worker itself. FOREBAY_… variables, too, are kept from all child processes. Others may be
meant for functions, such as those of a cloud's storage."""

_DEFAULTS = {"PYTHONHASHSEED": "0", "MIMALLOC_PURGE_DELAY": "-1"}
"""Unless the worker's environment has them. A set of strings has one order on all workers, and a
bundle that yields from it the same elements. Arrow's mimalloc keeps free memory: a bundle waits for
its readers for seconds, and then needs the memory again."""


class ForkServer:
    """Of this process. Thread-safe."""

    def __init__(self, *imports: str) -> None:
        """What it imports, too, besides child.py."""
        self._imports = imports
        self._lock = threading.Lock()
        self._process: ChildProcess | None = None
        self.requests: socket.socket | None = None
        self._owner = 0  # the process that started it

    def fork(self, connection: socket.socket) -> socket.socket:
        """A child that has this end of a connection; `ended` reads from what is returned how it has
        ended, and closing that kills it. Raises OSError."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with contextlib.ExitStack() as kept, theirs, self._lock:
            kept.enter_context(ours)
            ends = [connection.fileno(), theirs.fileno()]
            try:
                self._ask(ends)
            except (BrokenPipeError, ConnectionResetError):  # it has just died
                self._end()
                self._ask(ends)
            kept.pop_all()
        return ours

    def _ask(self, ends: list[int]) -> None:
        if self._process is None or self._process.poll() is not None:
            self._start()
        assert self.requests is not None
        socket.send_fds(self.requests, [b"fork"], ends)

    def close(self) -> None:
        """End it, and all that it has forked. Idempotent."""
        with self._lock:
            self._end()

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is None or self.requests is None or self._owner != os.getpid():
            return  # or this is a fork of its owner
        with self.requests, contextlib.suppress(OSError):
            self.requests.shutdown(socket.SHUT_RDWR)  # a fork may have it as well
        try:
            process.finish(END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.finish()

    def _start(self) -> None:
        self._end()
        self._owner = os.getpid()
        self.requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            number = theirs.fileno()
            self._process = ChildProcess(
                forebay("service.pipelines.python.fork_server", str(number), *self._imports),
                None,
                exit_with_parent=True,
                environment={
                    **{name: "" for name in os.environ if name in _SECRETS},
                    **_ENVIRONMENT,
                    **{name: os.environ.get(name, value) for name, value in _DEFAULTS.items()},
                },
                descriptors=[number],
            )


def ended(control: socket.socket) -> str:
    """How the child has ended, in words; waits for it. Others may ask, too."""
    return (
        control.recv(MAX_EXIT_TEXT, socket.MSG_PEEK).decode()
        or "with its init, or with the worker's fork server"
    )


class ForkServers:
    """A worker's fork servers: for functions of splits, for Beam's chains, for files, and for files
    in object stores. Each imports only what its children need: Beam takes long."""

    def __init__(self) -> None:
        self.plain, self.beams = ForkServer(), ForkServer("..beam.chain")
        self.files = ForkServer("..files.preloaded")
        self.far = ForkServer("..files.preloaded", "..files.preloaded_stores")

    def of(self, dataset: PythonDataset) -> ForkServer:
        """The fork server whose children run this dataset."""
        if dataset.files:
            return self.far if dataset.far else self.files
        return self.beams if BEAM in dataset.packages else self.plain

    def close(self) -> None:
        """End them, and all that they have forked. Idempotent."""
        for fork_server in (self.plain, self.beams, self.files, self.far):
            fork_server.close()


HERE = ForkServers()
"""Of whoever runs pipelines and is no worker."""


# -- the process ----------------------------------------------------------------------------------


def _serve(requests: socket.socket) -> socket.socket:
    """Fork for each request, until the worker has gone. Returns in the children only."""
    _adopt()
    ended, wake = _wakened_by_ends()
    inits: set[int] = set()
    parent = [0]
    with contextlib.suppress(AttributeError, OSError):  # another system, or an old kernel
        parent.append(os.pidfd_open(os.getppid()))
    while True:
        ready = readable(*parent, requests.fileno(), ended)
        if ended in ready:
            os.read(ended, 4096)
            inits -= {process for process, _ in _reaped()}
            _kill(_children() - inits)  # of an init that was killed; their end wakes us again
        if not ready.isdisjoint(parent):
            _exit_with_descendants()
        if requests.fileno() not in ready:
            continue
        ends: list[int] = []
        try:
            message, ends, _, _ = socket.recv_fds(requests, 64, 2)
            if not message:
                _exit_with_descendants()
            if len(ends) < 2:
                raise OSError(errno.EMFILE, "too few descriptors came")
            fork_server, process = os.getpid(), os.fork()
        except OSError as error:
            _refuse(ends, error)
            continue
        connection, control = (socket.socket(fileno=end) for end in ends)
        if not process:
            signal.set_wakeup_fd(-1)  # as asyncio has from Python 3.12 on, if it is imported
            for descriptor in (requests.detach(), ended, wake, *parent[1:]):
                os.close(descriptor)
            _fork_child(connection, control, fork_server)
            return connection
        connection.close()
        control.close()
        inits.add(process)


def _refuse(ends: Sequence[int], error: OSError) -> None:
    """Close the descriptors of a request; the caller reads that its child has ended, and why."""
    how = f"it could not be forked: {error} (a child is two processes)"
    print(f"a Python dataset's process: {how}", file=sys.stderr)
    for end in ends[1:]:
        with contextlib.suppress(OSError):  # nobody waits for it any more
            os.write(end, how.encode())
    for end in ends:
        os.close(end)


def _fork_child(connection: socket.socket, control: socket.socket, fork_server: int) -> None:
    """Returns in the child only; this process is its init."""
    try:
        _adopt()
        os.setpgid(0, 0)  # so that a signal to the fork server's group spares it
        ended, wake = _wakened_by_ends()
        _prctl(PR_SET_PDEATHSIG, signal.SIGCHLD)  # which wakes us as well
        init, child = os.getpid(), os.fork()
    except OSError as error:
        _refuse([connection.detach(), control.detach()], error)
        os._exit(1)
    if not child:
        signal.set_wakeup_fd(-1)
        os.close(wake)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.register_at_fork(after_in_child=_end_by_sigterm)
        _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != init:
            os._exit(0)  # it ended before that
        control.close()
        os.close(ended)
        os.setpgid(0, 0)  # so that signals to its group spare this init
        return
    connection.close()
    told = [control.fileno()]
    while True:
        for process, status in _reaped():
            if process == child:
                _kill(_children())
                with contextlib.suppress(OSError):
                    control.send(_describe_exit(os.waitstatus_to_exitcode(status)).encode())
                _exit_with_descendants()
        if os.getppid() != fork_server:
            told.clear()
            control.close()  # the fork server is gone: do not report how the child is killed
        if not told:
            _kill({child})
        ready = readable(ended, *told)
        if ended in ready:
            os.read(ended, 4096)
        if not ready.isdisjoint(told):
            told.clear()
            with contextlib.suppress(OSError):
                control.recv(64)  # unread, it would make the exit code an error


def _describe_exit(code: int) -> str:
    """A child has ended, in words."""
    if code >= 0:
        return f"exit code {code}"
    try:
        how = f"it was killed by {signal.Signals(-code).name}"
    except ValueError:  # most of the real-time signals have no name
        return f"it was killed by signal {-code}"
    return how if code != -signal.SIGKILL else f"{how}, perhaps because memory was short"


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, value)


def _adopt() -> None:
    """Orphans among those that we have forked, and they in turn, become our children."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)


def _wakened_by_ends() -> tuple[int, int]:
    """A descriptor that is readable when children have ended, and the other end of its pipe."""
    ended, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    return ended, wake


def readable(*ends: int | socket.socket, timeout_ms: float | None = None) -> set[int]:
    """The descriptors of those from which there is something to read, or whose peer has ended."""
    polled = select.poll()  # select supports no descriptor above 1,023
    for end in ends:
        polled.register(end, select.POLLIN)
    return {descriptor for descriptor, _ in polled.poll(timeout_ms)}


def _reaped() -> Iterator[tuple[int, int]]:
    """Children that have ended, and their statuses."""
    with contextlib.suppress(ChildProcessError):
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            yield found


def _go_on(*_: object) -> None:
    """The handler of a fork server, inits and children. Unlike SIG_IGN, programs that they start
    do not inherit it."""


def _end_by_sigterm() -> None:
    """In what a child forks, unless its function has set another handler."""
    if signal.getsignal(signal.SIGTERM) is _go_on:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _kill(processes: Iterable[int]) -> None:
    for process in processes:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(process, signal.SIGKILL)


def _children() -> set[int]:
    """Of this process."""
    found: set[int] = set()
    for path in pathlib.Path("/proc/self/task").glob("*/children"):
        with contextlib.suppress(OSError):  # the thread has ended
            found.update(map(int, path.read_text().split()))
    return found


def _exit_with_descendants() -> NoReturn:
    """Kill all descendants, including those that this process adopts meanwhile, then exit."""
    with contextlib.suppress(ChildProcessError):
        while True:
            _kill(_children())
            os.waitpid(-1, 0)
            for _ in _reaped():  # all at once: listing many children is slow
                pass
    os._exit(0)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _go_on)  # if all of the worker's processes get it, that drains
    signal.signal(signal.SIGINT, _go_on)
    import cloudpickle  # noqa: F401

    from ...proto import python_pb2  # noqa: F401
    from . import child

    for name in sys.argv[2:]:
        if name != EXIT_WITH_PARENT:
            importlib.import_module(name, __package__)
    gc.freeze()  # so that no fork looks through it all again, and copies it
    child.main(_serve(socket.socket(fileno=int(sys.argv[1]))))
