"""Row `failover`: how long a trainer waits for its next element when the leader gets kill -9.
Row `redis_cut`: how long it waits beyond a silent cut of the network to Redis.

Two dispatchers stand by for each other on one storage, with a lease of two seconds. An eager
trainer takes all it can get, so that the buffers between it and the workers are empty. A steady
one takes as much as a training step would, and its buffers are full. The peer has no standby.
"""

from __future__ import annotations

import contextlib
import statistics
import threading
import time
import urllib.parse
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress

from ..chaos.proxy import Proxies
from ..service import ShardingPolicy, read
from ..service.errors import ForebayError
from .calls import ENDLESS
from .postgres import postgres_storage
from .redis import redis_storage
from .results import Better, Result
from .servers import OURS, Server
from .setting import Setting

LEASE_MS = 2_000
TIMEOUT_S = 60.0
FAILOVERS_A_ROUND = 4
ELEMENT_BYTES = 10_000
STEP_S = 0.02
EAGER, STEADY = "an eager trainer", "a step every 20 ms"
REQUIRED_S = {EAGER: 1.0, STEADY: STEP_S}  # a steady trainer's wait must not be noticeable
CUT_S = 8.0
QUICK_CUT_S = 1.0
CUTS_A_ROUND = 1
REQUIRED_CUT_S = 2.0
SETTLE_S = 3.0  # of reading before each kill; a standby that has just begun waits for the lease
OVER_S = 4.0  # after each kill or cut; by then all is as before


def failover(setting: Setting) -> list[Result]:
    """On local files, on Redis and on PostgreSQL."""
    results = []
    failovers = 1 if setting.quick else FAILOVERS_A_ROUND * setting.rounds
    with (
        redis_storage(setting.directory("failover-redis"), "always") as redis,
        postgres_storage(setting.directory("failover-postgres")) as postgres,
    ):
        files = str(setting.directory("failover") / OURS)
        storages = {"files": files, "Redis": redis, "PostgreSQL": postgres}
        for name, storage in storages.items():
            waits = _waits(storage, failovers, _Dispatcher.kill, OVER_S)
            results += [
                Result(
                    row="failover",
                    what=f"longest wait at kill -9 of the leader, {what} of {failovers}, "
                    f"{trainer}, {name}",
                    unit="s",
                    better=Better.LESS,
                    ours=ours,
                    required=required,
                )
                for trainer, figures in waits.items()
                for what, ours, required in (
                    ("p99", [_p99(figures)], REQUIRED_S[trainer]),
                    ("each", figures, None),
                )
            ]
    return results


def redis_cut(setting: Setting) -> list[Result]:
    """Packets to Redis vanish for some seconds, on existing and new connections."""
    cuts = 1 if setting.quick else CUTS_A_ROUND * setting.rounds
    cut_s = QUICK_CUT_S if setting.quick else CUT_S
    with (
        redis_storage(setting.directory("redis-cut"), "always") as redis,
        contextlib.closing(Proxies()) as proxies,
    ):
        address = urllib.parse.urlsplit(redis)
        assert address.port is not None
        storage = f"redis://127.0.0.1:{proxies.add('redis', address.port)}/0"
        waits = _waits(storage, cuts, lambda _: proxies.silence("redis", cut_s), cut_s + OVER_S)
    return [
        Result(
            row="redis_cut",
            what=f"longest wait beyond {cut_s:g} s without the network to Redis, p99 of {cuts}, "
            "an eager trainer",
            unit="s",
            better=Better.LESS,
            ours=[_p99([wait_s - cut_s for wait_s in waits[EAGER]])],
            required=REQUIRED_CUT_S,
        )
    ]


def _p99(figures: list[float]) -> float:
    if len(figures) == 1:
        return figures[0]
    return statistics.quantiles(figures, n=100, method="inclusive")[-1]


def _waits(
    storage: str, times: int, disturb: Callable[[_Dispatcher], None], over_s: float
) -> dict[str, list[float]]:
    """The longest wait after each disturbance, in seconds, of an eager and of a steady trainer.

    `disturb` gets the leader, unless an earlier disturbance has made it the standby.
    """
    with ExitStack() as stack:
        pair = [stack.enter_context(_Dispatcher(storage)) for _ in range(2)]
        service = ",".join(one.address for one in pair)
        worker = Server("forebay.service.cli", "worker", "--dispatcher", service)
        stack.enter_context(worker).wait_until_serving()
        dataset_id = _register(service)
        eager = stack.enter_context(_Trainer(service, dataset_id, 0))
        steady = stack.enter_context(_Trainer(service, dataset_id, STEP_S))
        waits: dict[str, list[float]] = {EAGER: [], STEADY: []}
        leader = 0
        for _ in range(times):
            eager.wait_until_reading()
            steady.wait_until_reading()
            time.sleep(SETTLE_S)
            for trainer in (eager, steady):
                trainer.forget()
            disturb(pair[leader])
            time.sleep(over_s)
            for name, trainer in ((EAGER, eager), (STEADY, steady)):
                waits[name].append(trainer.longest_s)
            if not pair[leader].alive:
                pair[leader].start()
                leader = 1 - leader
    return waits


class _Dispatcher:
    """A standby dispatcher that keeps its port over restarts."""

    def __init__(self, storage: str) -> None:
        self._storage = storage
        self._port = 0
        self.start()

    def start(self) -> None:
        options = ("--storage", self._storage, "--leader-lease-ms", LEASE_MS, "--port", self._port)
        self._server = Server(
            "forebay.service.cli", "dispatcher", "--standby", *options, exit_with_parent=True
        )
        self.address = self._server.address
        self._port = self._server.port
        self.alive = True

    def kill(self) -> None:
        self._server.kill()
        self.alive = False

    def __enter__(self) -> _Dispatcher:
        return self

    def __exit__(self, *_: object) -> None:
        self._server.__exit__(None, None, None)


class _Trainer:
    """Reads in its own thread, and notes how long it waits for an element."""

    def __init__(self, service: str, dataset_id: str, step_s: float) -> None:
        self._elements = read(service, dataset_id, processing_mode=ShardingPolicy.DYNAMIC)
        self._step_s = step_s
        self._over = threading.Event()
        self._count = 0
        self._since: float | None = None  # it waits, seconds
        self._longest_s = 0.0
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="trainer")

    def _read(self) -> None:
        while not self._over.is_set():
            self._since = time.perf_counter()
            next(self._elements)
            self._longest_s = self.longest_s
            self._since = None
            self._count += 1
            if self._step_s:
                time.sleep(self._step_s)

    def wait_until_reading(self) -> None:
        count, give_up = self._count, time.perf_counter() + TIMEOUT_S
        while self._count <= count + 1:
            if self._reading.done():
                self._reading.result()  # raises what it failed with
            if time.perf_counter() > give_up:
                raise ForebayError(f"a trainer got no element for {TIMEOUT_S} s")
            time.sleep(0.01)

    def forget(self) -> None:
        """Forget earlier waits."""
        self._longest_s = 0.0

    @property
    def longest_s(self) -> float:
        """The longest wait, including the present one."""
        since = self._since
        lasting = 0.0 if since is None else time.perf_counter() - since
        return max(self._longest_s, lasting)

    def __enter__(self) -> _Trainer:
        self._reading = self._pool.submit(self._read)
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._pool.shutdown(wait=False)
        with suppress(TimeoutError):
            self._reading.exception(TIMEOUT_S)
        self._elements.close()


def _register(service: str) -> str:
    import tensorflow as tf

    from ..service import register_dataset

    elements = tf.data.Dataset.range(ENDLESS).map(
        lambda number: tf.fill([ELEMENT_BYTES // 8], number)
    )
    return register_dataset(service, elements, compression=None)
