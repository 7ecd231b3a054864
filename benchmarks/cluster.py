"""One side's cluster on this machine, with readers that measure."""

from __future__ import annotations

import contextlib
import functools
import json
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from .results import Reading, together
from .servers import Responder, Server, our_dispatcher, our_worker, peer_dispatcher, peer_worker
from .setting import Setting


@dataclass(frozen=True)
class Side:
    """A service, with a compression for its datasets."""

    label: str
    service: str
    compression: str


SIDES = {
    "peer": Side("tf.data service", "tensorflow", "AUTO"),
    "uncompressed": Side("tf.data service, compression=None", "tensorflow", "none"),
    "ours": Side("Forebay", "forebay", "AUTO"),
}


class ReaderProcess(Responder):
    """A trainer's process, which answers questions with readings. Its start takes a while."""

    def __init__(
        self, module: str, *arguments: object, environment: Mapping[str, str] = {}
    ) -> None:
        super().__init__(f"forebay.benchmarks.{module}", *arguments, environment=environment)

    @functools.cached_property
    def _greeting(self) -> str:
        return self.answer()

    def wait_until_ready(self) -> None:
        assert self._greeting

    def reading(self) -> Reading:
        """The answer to the last question."""
        return Reading(**json.loads(self.answer()))


class BenchmarkCluster:
    """A dispatcher, workers and readers of one side. Readers, if several, share a job."""

    def __init__(
        self,
        side: Side,
        setting: Setting,
        directory: pathlib.Path,
        listed: bool = False,
        *,
        environment: Mapping[str, str] = {},
        worker_options: Sequence[str] = (),
    ) -> None:
        """`environment` and `worker_options` are for our side."""
        self._side = side
        self._environment = environment
        self._worker_options = worker_options
        self._setting = setting
        self._stack = contextlib.ExitStack()
        self._workers: list[Server] = []
        self._readers: list[ReaderProcess] = []
        self._jobs = 0
        own = directory / side.label
        own.mkdir()
        start = (
            functools.partial(our_dispatcher, environment=environment)
            if self._ours
            else peer_dispatcher
        )
        dispatcher = start(own, collect=True, listed=listed)
        self._dispatcher = self._stack.enter_context(dispatcher)

    @property
    def _ours(self) -> bool:
        return self._side.service == "forebay"

    def grow(self, *, workers: int, readers: int) -> None:
        """Start the missing workers and readers; `wait_until_ready` waits for them."""
        for _ in range(len(self._workers), workers):
            self._workers.append(self._stack.enter_context(self._new_worker()))
        for _ in range(len(self._readers), readers):
            self._readers.append(self._stack.enter_context(self._new_reader()))

    def _new_worker(self) -> Server:
        if not self._ours:
            return peer_worker(self._dispatcher)
        options, environment = self._worker_options, self._environment
        return our_worker(self._dispatcher, *options, environment=environment)

    def _new_reader(self) -> ReaderProcess:
        side, files = self._side, self._setting.files
        arguments = (side.service, self._dispatcher.address, side.compression, files)
        return ReaderProcess("reader", *arguments, environment=self._environment)

    def wait_until_ready(self) -> None:
        for worker in self._workers:
            worker.wait_until_serving()
        for reader in self._readers:
            reader.wait_until_ready()

    @contextlib.contextmanager
    def fresh_reader(self) -> Iterator[None]:
        """Within the block, the only reader is a new one."""
        with self._new_reader() as reader:
            reader.wait_until_ready()
            before, self._readers = self._readers, [reader]
            yield
            self._readers = before

    def measure(
        self,
        case: str,
        *,
        size: int = 0,
        seconds: float | None = None,
        trainers: int = 0,
        consumers: int = 0,
        warm_up_s: float | None = None,
    ) -> Reading:
        """Read with all readers for some time; a dataset of a size to its end, if it gets there.

        Or with so many of them: `consumers`, or `trainers` that each read all of it, through a
        cache.
        """
        readers = self._readers[: trainers or consumers or None]
        self._jobs += 1
        if warm_up_s is None:
            warm_up_s = self._setting.warm_up_s
        question = {
            "case": case,
            "size": size,
            "warm_up_s": 0 if size else warm_up_s,
            "seconds": self._setting.seconds if seconds is None else seconds,
            "workers": [worker.pid for worker in self._workers],
            "job_name": f"job {self._jobs}" if trainers or len(readers) > 1 else None,
            "readers": len(readers),
            "cached": trainers > 0,
        }
        for number, reader in enumerate(readers):
            reader.ask({**question, "reader": number})
        return together([reader.reading() for reader in readers])

    def worker_rss_mb(self) -> float:
        """The workers' resident memory, in units of 10⁶ bytes."""
        return sum(worker.rss_mb() for worker in self._workers)

    def close(self) -> None:
        self._stack.close()


@contextlib.contextmanager
def own_clusters(
    setting: Setting, name: str, listed: bool = False
) -> Iterator[dict[str, BenchmarkCluster]]:
    """A cluster of each side, with one worker and one reader, for a single row."""
    with contextlib.ExitStack() as stack:
        directory = setting.directory(name)
        sides = {}
        for side in SIDES:
            cluster = BenchmarkCluster(SIDES[side], setting, directory, listed)
            sides[side] = stack.enter_context(contextlib.closing(cluster))
        grow(sides)
        yield sides


def shared_clusters(setting: Setting) -> dict[str, BenchmarkCluster]:
    """The clusters that several rows share, because starting processes takes time."""
    if not setting.shared:
        directory = setting.directory("shared")
        for side in SIDES:
            setting.shared[side] = BenchmarkCluster(SIDES[side], setting, directory)
        grow(setting.shared)
    return setting.shared


def grow(sides: dict[str, BenchmarkCluster], *, workers: int = 1, readers: int = 1) -> None:
    """Start each side's missing workers and readers, all at once, and wait for them."""
    for cluster in sides.values():
        cluster.grow(workers=workers, readers=readers)
    for cluster in sides.values():
        cluster.wait_until_ready()
