"""The product, unmodified, on simulated threads, time, network and disk.

Modules find what they use of the operating system in names of their own (`threading`, `time`,
`socket`, …). For as long as the simulation runs, each such name, in every module of the product
and in the few libraries beneath it that wait, leads to the simulated thing.
"""

from __future__ import annotations

import concurrent.futures._base
import concurrent.futures.thread
import logging
import os as real_os
import queue as real_queue
import random as real_random
import secrets as real_secrets
import selectors as real_selectors
import socket as real_socket
import sys
import threading as real_threading
import time as real_time
import uuid as real_uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import grpc as real_grpc
import tenacity.nap
import tenacity.wait

import forebay.service.client.consumer
import forebay.service.client.links
import forebay.service.client.reader
import forebay.service.dispatcher.server
import forebay.service.pipelines.python.stored
import forebay.service.worker.worker  # noqa: F401
from forebay.service.client.deferred_closer import Closable, DeferredCloser
from forebay.service.proto import forebay_pb2 as pb
from forebay.service.worker import losses as real_losses

from .calls import grpc
from .disk import os
from .kernel import kernel
from .sockets import selectors, socket
from .threads import Uncontended, queue, threading, time

LIBRARIES: list[ModuleType] = [
    concurrent.futures._base,
    concurrent.futures.thread,
    tenacity,
    tenacity.nap,
    tenacity.wait,
]


class Chance:
    """`random`, `secrets` and `uuid`: whatever they are asked comes from the run's seed."""

    def __getattr__(self, name: str) -> Any:
        return getattr(kernel().rng, name)

    @staticmethod
    def randbits(bits: int) -> int:
        return kernel().rng.getrandbits(bits)

    @staticmethod
    def token_hex(size: int) -> str:
        return kernel().rng.randbytes(size).hex()

    @staticmethod
    def uuid4() -> SimpleNamespace:
        return SimpleNamespace(hex=kernel().rng.randbytes(16).hex())


class InOrder(dict[Any, None]):
    """`set`, for sets of objects: those iterate in the order of addresses, which no seed rules."""

    def __init__(self, items: Iterable[Any] = ()) -> None:
        super().__init__(dict.fromkeys(items))

    def add(self, item: Any) -> None:
        self[item] = None

    def discard(self, item: Any) -> None:
        self.pop(item, None)


class Losses:
    """`losses`, of workers: tells the oracle what they say is lost."""

    def __getattr__(self, name: str) -> Any:
        return getattr(real_losses, name)

    @staticmethod
    def not_handed_back(task_id: int, source: int, error: BaseException) -> None:
        kernel().oracle.not_handed_back.add(task_id)

    @staticmethod
    def parked(task: pb.Task, what: real_losses.Undelivered) -> None:
        if what.unfinished:
            kernel().oracle.let_go.add(task.task_id)

    @staticmethod
    def shed(task: pb.Task, elements: int) -> None:
        kernel().oracle.let_go.add(task.task_id)

    @staticmethod
    def dropped(task: pb.Task, what: real_losses.Undelivered, **_: object) -> None:
        kernel().oracle.dropped.add(task.task_id)


_chance = Chance()
REPLACED: list[tuple[ModuleType, object]] = [
    (real_threading, threading),
    (real_queue, queue),
    (real_time, time),
    (real_socket, socket),
    (real_selectors, selectors),
    (real_os, os),
    (real_grpc, grpc),
    (real_random, _chance),
    (real_secrets, _chance),
    (real_uuid, _chance),
    (real_losses, Losses()),
]
_BY_ID = {id(real): replacement for real, replacement in REPLACED}


@contextmanager
def replaced(owner: Any, **values: object) -> Iterator[None]:
    """Give attributes of a module or a class other values, and then their own again."""
    before = {name: getattr(owner, name) for name in values}
    for name, value in values.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)


def _no_tunnel(address: str, timeout_s: float) -> None:
    raise ConnectionRefusedError(111, "Connection refused")


class AtOnce(DeferredCloser):
    def start(self) -> None: ...

    def later(self, iteration: Closable) -> None:
        iteration.close()

    def wait(self) -> None: ...


@contextmanager
def simulated() -> Iterator[None]:
    """Replace all of it, and put it back."""
    undo: list[tuple[ModuleType, str, Any]] = []

    def replace(module: ModuleType, name: str, value: object) -> None:
        undo.append((module, name, getattr(module, name, _ABSENT)))
        setattr(module, name, value)

    product = {n: m for n, m in sorted(sys.modules.items()) if n.startswith("forebay.")}
    for module in [*product.values(), *LIBRARIES]:
        for name, value in list(vars(module).items()):
            if id(value) in _BY_ID and isinstance(value, ModuleType):
                replace(module, name, _BY_ID[id(value)])
    replace(concurrent.futures.thread, "_global_shutdown_lock", Uncontended())
    server = sys.modules["forebay.service.transport.server"]
    replace(server, "set", InOrder)
    # Consumers are never in a worker's process, nor do they reach one by gRPC.
    links = sys.modules["forebay.service.client.links"]
    replace(links, "local_worker", lambda uid: None)
    replace(links, "open_tunnel", _no_tunnel)
    # One interpreter has the threads of all processes: no garbage is left to another one's thread.
    replace(sys.modules["forebay.service.client.progress"], "deferred_closer", AtOnce())
    log = logging.getLogger("forebay")
    handler = _Listener()
    level, propagate = log.level, log.propagate
    log.addHandler(handler)
    log.setLevel(logging.WARNING)
    log.propagate = False
    noisy = [logging.getLogger(name) for name in ("asyncio", "concurrent.futures")]
    for other in noisy:  # about threads that are being taken apart
        other.disabled = True
    try:
        yield
        late = [n for n in sys.modules if n.startswith("forebay.") and n not in product]
        assert not late, f"{late} were imported too late to be replaced: import them in patches.py"
    finally:
        for other in noisy:
            other.disabled = False
        log.removeHandler(handler)
        log.setLevel(level)
        log.propagate = propagate
        for module, name, value in reversed(undo):
            if value is _ABSENT:
                delattr(module, name)
            else:
                setattr(module, name, value)


_ABSENT = object()


class _Listener(logging.Handler):
    """What the product says in its log that bears on promises: that it has met a bug of its own,
    and goes on.
    """

    def emit(self, record: logging.LogRecord) -> None:
        this = kernel()
        current = this.current
        if record.exc_info and not this.over and (current is None or current.process.alive):
            this.fail(f"{record.name} logged a bug: {self.format(record)}")
