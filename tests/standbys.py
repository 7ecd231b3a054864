"""Two dispatchers on one storage, as processes, and who of them leads."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import pytest

from forebay.service import DispatchServer
from forebay.service.proto import forebay_pb2 as pb

from .stock import DispatcherProcess

LEASE_MS = 1_000
LONG_LEASE_MS = 600_000  # for a leader that is not to be displaced, however busy the machine
PATIENCE_S = 60
ON_ALL = pytest.mark.parametrize("any_storage", ["files", "redis", "postgres"], indirect=True)


@contextlib.contextmanager
def running_pair(storage: str, lease_ms: int = LEASE_MS) -> Iterator[list[DispatcherProcess]]:
    """Standbys for each other; the first one leads."""
    with contextlib.ExitStack() as stack:
        pair: list[DispatcherProcess] = []
        for _ in range(2):
            pair.append(DispatcherProcess(storage, standby=True, leader_lease_ms=lease_ms))
            stack.callback(_end, pair[-1])
            wait_until(leads, pair[0])
        yield pair


def _end(process: DispatcherProcess) -> None:
    with contextlib.suppress(ProcessLookupError, ValueError):
        process.stop()


def wait_until(true: Callable[..., object], *arguments: object) -> None:
    give_up = time.monotonic() + PATIENCE_S
    while not true(*arguments):
        assert time.monotonic() < give_up, "waited in vain"
        time.sleep(0.02)


def status(dispatcher: DispatcherProcess | DispatchServer, timeout_s: float = 5) -> dict[str, Any]:
    """Of exactly this dispatcher. Raises grpc.RpcError."""
    with grpc.insecure_channel(dispatcher.address) as channel:
        get = channel.unary_unary("/forebay.v1.Dispatcher/GetStatus", None, None)
        answer: bytes = get(pb.GetStatusRequest().SerializeToString(), timeout=timeout_s)
    return json.loads(pb.GetStatusResponse.FromString(answer).status)


def leader_of(dispatcher: DispatcherProcess) -> int | None:
    """The term in which it leads; None if it does not."""
    try:
        return int(status(dispatcher)["term"])
    except grpc.RpcError:
        return None


def leads(dispatcher: DispatcherProcess, term: int = 1) -> bool:
    """Whether it leads, in this term or, as a busy machine may silence a leader, a later one."""
    found = leader_of(dispatcher)
    return found is not None and found >= term
