"""Row `silence`: trainers whose data connections fall silent, or are reset, again and again.

A proxy stands between them and a worker. Where a connection falls silent, the proxy keeps it open,
acknowledges all that comes, and passes nothing on. tf.data service may then wait for ever, so a
trainer reads for a minute or two at most, and a wait until then stands for any longer one.

python -m forebay.benchmarks.silence (forebay|tensorflow) DISPATCHER

is a trainer: it says "ready", takes one line of JSON, reads, and says in JSON what it got.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import pathlib
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from concurrent import futures
from dataclasses import dataclass
from typing import Any

from ..chaos.proxy import Limit, Proxies
from ..service.connections.protocols import GRPC, TCP
from ..service.processes import free_port
from .reader import SERVICES
from .results import Better, Result
from .servers import Responder, our_dispatcher, our_worker, peer_dispatcher, peer_worker
from .setting import Setting

QUICK_LIMIT_S = 2.0
REQUIRED_S = 15.0
PEER = "peer"
WAYS = {TCP: "TCP", GRPC: "gRPC", PEER: "the peer's gRPC"}


@dataclass(frozen=True, kw_only=True)
class ConnectionFault:
    """A dataset, and what happens to the connections over which it is read."""

    what: str
    limit: Limit | None
    elements: int = 200
    element_bytes: int = 150_000
    limit_s: float = 60.0
    required_s: float | None = REQUIRED_S
    required_percent: float = 100  # of the elements, within limit_s


# tf.data service's dispatcher keeps a connection of its own to the worker: it is made before.
NO_FAULT = ConnectionFault(what="no fault", limit=None, elements=1)
FAULTS = (
    ConnectionFault(
        what="the first connection silent after 100 B",
        limit=Limit(answer_bytes=100, silent=True, connections=1),
    ),
    ConnectionFault(
        what="the first connection silent after 1 MB",
        limit=Limit(answer_bytes=1_000_000, silent=True, connections=1),
    ),
    ConnectionFault(
        what="each connection silent after 2 MB",
        limit=Limit(answer_bytes=2_000_000, silent=True),
        limit_s=100.0,
        required_s=None,  # a block takes several connections, each of which is given up in 10 s
        required_percent=15,
    ),
    ConnectionFault(
        what="each connection reset after 1 MB, elements of 4 MB",
        limit=Limit(answer_bytes=1_000_000, silent=False),
        elements=16,
        element_bytes=4_000_000,
    ),
)


def silence(setting: Setting) -> list[Result]:
    """One round: the waits are timeouts. All trainers read at the same time; mostly they wait."""
    results: list[Result] = []
    with contextlib.ExitStack() as stack:
        proxies = stack.enter_context(contextlib.closing(Proxies()))
        dispatchers = {
            way: _start(way, proxies, setting.directory("silence"), stack) for way in WAYS
        }
        _read(NO_FAULT, NO_FAULT.limit_s, proxies, dispatchers)
        for fault in FAULTS[::3] if setting.quick else FAULTS:
            limit_s = QUICK_LIMIT_S if setting.quick else fault.limit_s
            read = _read(fault, limit_s, proxies, dispatchers)
            for way in (TCP, GRPC):
                results += _results(fault, limit_s, way, read)
    return results


def _start(way: str, proxies: Proxies, directory: pathlib.Path, stack: contextlib.ExitStack) -> str:
    """A dispatcher, and a worker that offers its elements at a proxy; the dispatcher's address."""
    port = free_port()
    proxy = f"127.0.0.1:{proxies.add(way, port)}"
    dispatcher = stack.enter_context(
        peer_dispatcher(directory) if way == PEER else our_dispatcher(directory)
    )
    prefix = "--data-" if way == TCP else "--"
    worker = peer_worker(dispatcher, port, proxy) if way == PEER else our_worker(
        dispatcher,
        *("--data-transfer-protocol", way, f"{prefix}port", port, f"{prefix}address", proxy),
    )  # fmt: skip
    stack.enter_context(worker).wait_until_serving()
    return dispatcher.address


def _read(
    fault: ConnectionFault, limit_s: float, proxies: Proxies, dispatchers: Mapping[str, str]
) -> dict[str, dict[str, float]]:
    with contextlib.ExitStack() as stack:
        trainers = {}
        for way, dispatcher in dispatchers.items():
            service = "tensorflow" if way == PEER else "forebay"
            trainers[way] = Responder(__name__, service, dispatcher)
            stack.enter_context(trainers[way])
            stack.callback(trainers[way].kill)  # it may wait for ever
        for trainer in trainers.values():
            trainer.answer()  # it is ready
        for way, trainer in trainers.items():
            proxies.limit(way, fault.limit)
            asked = {"elements": fault.elements, "element_bytes": fault.element_bytes}
            trainer.ask({**asked, "limit_s": limit_s})
        return {way: json.loads(trainer.answer()) for way, trainer in trainers.items()}


def _results(
    fault: ConnectionFault, limit_s: float, way: str, read: Mapping[str, Mapping[str, float]]
) -> Iterator[Result]:
    for figure, what, unit, better, required in (
        ("wait_s", f"longest wait, of ≤ {limit_s:g} s", "s", Better.LESS, fault.required_s),
        ("percent", f"of the epoch, in {limit_s:g} s", "%", Better.MORE, fault.required_percent),
        ("per_s", "until then", "elements/s", Better.MORE, None),
    ):
        yield Result(
            row="silence",
            what=f"{fault.what}, over {WAYS[way]}: {what}",
            unit=unit,
            better=better,
            ours=[read[way][figure]],
            peer=[read[PEER][figure]],
            required=required,
        )


class TimedReader:
    """Reads in a thread of its own, which may wait for ever."""

    def __init__(self, elements: Iterable[Any], count: int) -> None:
        self._elements, self._count = elements, count
        self._got = 0
        self._begun = self._last = time.perf_counter()
        self._longest_s = 0.0
        pool = futures.ThreadPoolExecutor(1, thread_name_prefix="reading")
        self._reading = pool.submit(self._run)
        pool.shutdown(wait=False)

    def _run(self) -> None:
        for _ in self._elements:
            now = time.perf_counter()
            self._longest_s = max(self._longest_s, now - self._last)
            self._last = now
            self._got += 1

    def until(self, limit_s: float) -> dict[str, float]:
        """What came, once all has or after so many seconds. An error counts as a wait for ever."""
        futures.wait([self._reading], limit_s)
        ended = self._last if self._got == self._count else self._begun + limit_s
        return {
            "wait_s": max(self._longest_s, ended - self._last),
            "percent": 100 * self._got / self._count,
            "per_s": self._got / (ended - self._begun),
        }


def main(name: str, dispatcher: str) -> None:
    import numpy as np
    import tensorflow as tf

    service = importlib.import_module(SERVICES[name])
    target = f"grpc://{dispatcher}"
    print("ready", flush=True)
    asked = json.loads(sys.stdin.readline())
    noise = np.random.default_rng(0).integers(0, 256, asked["element_bytes"], np.uint8)
    dataset = tf.data.Dataset.range(asked["elements"]).map(
        lambda number: tf.constant(noise) + tf.cast(number, tf.uint8)
    )
    dataset_id = service.register_dataset(target, dataset, compression=None)
    elements = service.from_dataset_id(
        "distributed_epoch", target, dataset_id, dataset.element_spec
    )
    reading = TimedReader(elements, asked["elements"])
    print(json.dumps(reading.until(asked["limit_s"])), flush=True)
    sys.stdin.read()  # until it is killed
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
