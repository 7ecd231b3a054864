"""Where a worker's children for Python datasets come from: a process that has done their imports.

It is started when it is first needed, imports, and forks for each request; it runs nothing of a
user's. So a child is there within milliseconds, and after a crash as well. It ends with the worker,
and the kernel ends the children with it.

A request comes with two sockets: one is the child's (child.py), and over the other the nursery
says the child's exit code. When that one is closed or written to, the child is killed, with what
it has forked.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import os
import select
import signal
import socket
import sys
import threading

from ...processes import Child, forebay

PR_SET_PDEATHSIG = 1


class Nursery:
    """Of this process. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: Child | None = None
        self._requests: socket.socket | None = None

    def fork(self, connection: socket.socket) -> socket.socket:
        """A child that has this end of a connection; `ended` reads its exit code from what is
        returned, and closing that kills it. Raises OSError."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs, self._lock:
            if self._process is None or self._process.poll() is not None:
                self._start()
            assert self._requests is not None
            ends = [connection.fileno(), theirs.fileno()]
            socket.send_fds(self._requests, [b"fork"], ends)
        return ours

    def close(self) -> None:
        """End it, and all that it has forked. Idempotent."""
        with self._lock:
            self._end()

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None and self._requests is not None:
            self._requests.close()
            process.finish()

    def _start(self) -> None:
        self._end()
        self._requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            number = theirs.fileno()
            self._process = Child(
                forebay("pipelines.python.nursery", str(number)),
                None,
                exit_with_parent=True,
                descriptors=[number],
            )


def ended(control: socket.socket) -> str:
    """How the child has ended, in words; waits for it."""
    said = control.recv(64)
    if not said:
        return "with the worker's nursery"
    code = int(said)
    if code >= 0:
        return f"exit code {code}"
    how = f"it was killed by {signal.Signals(-code).name}"
    return how if code != -signal.SIGKILL else f"{how}, perhaps because memory was short"


NURSERY = Nursery()
atexit.register(NURSERY.close)


# -- the process ----------------------------------------------------------------------------------


def _serve(requests: socket.socket) -> socket.socket:
    """Fork for each request, until the worker has gone. Returns in the forks only."""
    ended, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    running: dict[int, socket.socket] = {}  # by process
    parent = [0, requests.fileno()]
    with contextlib.suppress(AttributeError, OSError):  # another system, or an old kernel
        parent.append(os.pidfd_open(os.getppid()))
    while True:
        polled = select.poll()
        for end in (*parent, ended, *running.values()):
            polled.register(end, select.POLLIN)
        ready = {descriptor for descriptor, _ in polled.poll()}
        if ended in ready:
            os.read(ended, 4096)
            for process in [*running]:
                found, status = os.waitpid(process, os.WNOHANG)
                if found:
                    with contextlib.suppress(OSError), running.pop(process) as control:
                        control.send(b"%d" % os.waitstatus_to_exitcode(status))
        for process, control in running.items():
            if control.fileno() in ready:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process, signal.SIGKILL)
                with contextlib.suppress(OSError):
                    control.shutdown(socket.SHUT_RD)
        if ready & {*parent[:1], *parent[2:]}:
            os._exit(0)
        if requests.fileno() not in ready:
            continue
        message, ends, _, _ = socket.recv_fds(requests, 64, 2)
        if not message:
            os._exit(0)
        connection, control = (socket.socket(fileno=end) for end in ends)
        process = os.fork()
        if process:
            connection.close()
            os.setpgid(process, process)  # whoever of both comes first
            running[process] = control
            continue
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        for other in (requests, control, *running.values()):
            other.close()
        for descriptor in (ended, wake, *parent[2:]):
            os.close(descriptor)
        with contextlib.suppress(OSError):
            os.setpgid(0, 0)
        return connection


if __name__ == "__main__":
    import cloudpickle  # noqa: F401

    from ...proto import python_pb2  # noqa: F401
    from . import child

    gc.freeze()  # so that no fork looks through it all again, and copies it
    child.main(_serve(socket.socket(fileno=int(sys.argv[1]))))
