"""Relays gRPC calls for a process that was forked from one that had used gRPC.

The fork inherits the locks that gRPC's threads held, and nobody releases them there: about one such
process in a hundred hangs when it opens a channel. DataLoaders and users fork, so the fork starts
a helper program (this file) that makes its calls. The program ends with the fork.

For each call, the fork passes a socket to the program and sends a pickle over it: method, address,
credentials (the names of files), timeout and request. The program sends back the status, its
details, the leader's address and the answer.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import socket
import sys
import threading
from collections.abc import Callable
from typing import Any

import grpc

from ..errors import ForebayError, status_of
from ..platforms import at_fork
from ..processes import ChildProcess, end_with_parent, forebay
from .credentials import Credentials, LoadedCredentials
from .grpc_server import DISPATCHER_CHANNEL_OPTIONS, LEADER_KEY, connect
from .requests import ask

LATER_S = 5.0
"""How much longer than a call's timeout the fork waits, before it considers the program hung."""

_Answer = tuple[str, str, str, bytes]
"""The status ("": it is OK), its details, the leader's address, and the answer."""

_ENDED = OSError, EOFError, pickle.UnpicklingError  # the other end has gone or hangs

_used = False
_is_needed = False
_control: socket.socket | None = None  # to the program
_program: ChildProcess | None = None
_owner = 0  # the process that started it
_lock = threading.Lock()


def mark_grpc_used() -> None:
    """Note that this process uses gRPC."""
    global _used
    _used = True


def is_needed() -> bool:
    """Whether this process is a fork of one that had used gRPC."""
    return _is_needed


def program() -> ChildProcess | None:
    """The program that calls for this process, once it was needed."""
    return _program


def _after_fork() -> None:
    global _is_needed, _control, _lock
    _is_needed = _is_needed or _used
    if _control is not None:
        _control.close()
    _control, _lock = None, threading.Lock()


at_fork(after_in_child=_after_fork)


class RelayedError(grpc.RpcError):
    """Has the interface of gRPC's own call errors."""

    def __init__(self, code: grpc.StatusCode, details: str, leader: str = "") -> None:
        super().__init__(f"{code.name}: {details}")
        self._said = code, details, leader

    def code(self) -> grpc.StatusCode:
        return self._said[0]

    def details(self) -> str:
        return self._said[1]

    def trailing_metadata(self) -> Any:  # pairs
        return ((LEADER_KEY, self._said[2]),) if self._said[2] else ()


class RelayedChannel:
    """The part of grpc.Channel that a dispatcher's client uses. Thread-safe."""

    def __init__(self, address: str, credentials: Credentials | None = None) -> None:
        self._to = address, credentials
        self._calls: set[socket.socket] = set()
        self._closed = False

    def unary_unary(self, method: str, _: None = None, __: None = None) -> Callable[..., bytes]:
        def call(request: bytes, *, timeout: float, metadata: object = ()) -> bytes:
            if self._closed:
                raise ValueError("the channel is closed")
            try:
                code, details, leader, answer = self._relayed(method, request, timeout)
            except _ENDED as error:  # the program ended or hangs, or we are closed
                raise RelayedError(grpc.StatusCode.UNAVAILABLE, f"the relay: {error!r}") from error
            if code:
                raise RelayedError(grpc.StatusCode[code], details, leader)
            return answer

        return call

    def stream_unary(self, method: str, _: None = None, __: None = None) -> Callable[..., bytes]:
        call = self.unary_unary(method)
        return lambda pieces, **options: call(b"".join(pieces), **options)

    def _relayed(self, method: str, request: bytes, timeout_s: float) -> _Answer:
        with _passed() as own, own.makefile("rwb") as pipe:
            own.settimeout(timeout_s + LATER_S)
            self._calls.add(own)
            try:
                if self._closed:
                    raise EOFError("closed")
                pickle.dump((method, *self._to, timeout_s, request), pipe)
                pipe.flush()
                answer: _Answer = pickle.load(pipe)
                return answer
            finally:
                self._calls.discard(own)

    def close(self) -> None:
        self._closed = True
        for own in [*self._calls]:
            with contextlib.suppress(OSError):  # its call has just ended
                own.shutdown(socket.SHUT_RDWR)


def _passed() -> socket.socket:
    """A socket whose other end the program has. Starts the program if it does not run."""
    global _control, _program, _owner
    own, other = socket.socketpair()
    with _lock, other:
        try:
            if _control is not None:
                socket.send_fds(_control, [b"call"], [other.fileno()])
                return own
        except OSError:
            pass  # it has gone
        if _program is not None and _owner == os.getpid():
            _program.kill()
            _program.finish()
        _control, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
        with theirs:
            number = theirs.fileno()
            command = forebay("service.connections.relay", str(number))
            # Not `tied`: the thread of the first call may end before the fork does.
            _program = ChildProcess(command, None, exit_with_parent=True, descriptors=[number])
            _owner = os.getpid()
        socket.send_fds(_control, [b"call"], [other.fileno()])
    return own


# -- the program -----------------------------------------------------------------------------------


def _serve(control: socket.socket) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):  # the fork handles these
        signal.signal(number, signal.SIG_IGN)
    end_with_parent(lambda: os._exit(0))
    channels: _Channels = {}
    while True:
        message, descriptors, _, _ = socket.recv_fds(control, 16, 1)
        if not message:
            os._exit(0)
        end = socket.socket(fileno=descriptors[0])
        threading.Thread(target=_serve_call, args=(end, channels), daemon=True).start()


_Channels = dict[tuple[str, Credentials | None], tuple[LoadedCredentials | None, grpc.Channel]]
"""By address and credentials: the files' content with which each was made, and the channel."""


def _serve_call(end: socket.socket, channels: _Channels) -> None:
    with contextlib.suppress(*_ENDED), end, end.makefile("rwb") as pipe:  # nobody waits any more
        pickle.dump(_answer(channels, *pickle.load(pipe)), pipe)


def _answer(
    channels: _Channels,
    method: str,
    address: str,
    credentials: Credentials | None,
    timeout_s: float,
    request: bytes,
) -> _Answer:
    try:
        loaded = None if credentials is None else credentials.loaded()
        with _lock:
            made = channels.get((address, credentials))
            if made is None or made[0] is not loaded:
                channel = connect(address, DISPATCHER_CHANNEL_OPTIONS, credentials)
                made = channels[address, credentials] = loaded, channel
        metadata = () if loaded is None else loaded.metadata
        return "", "", "", ask(made[1], method, request, timeout=timeout_s, metadata=metadata)
    except grpc.RpcError as error:
        said: Any = error
        leader = dict(said.trailing_metadata() or ()).get(LEADER_KEY, "")
        return said.code().name, said.details() or "", leader, b""
    except ForebayError as error:  # the credentials' files cannot be used
        return status_of(error), str(error), "", b""


if __name__ == "__main__":
    _serve(socket.socket(fileno=int(sys.argv[1])))
