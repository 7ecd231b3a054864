"""One side's cluster on this machine, with readers that measure."""

from __future__ import annotations

import contextlib
import pathlib
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


class BenchmarkCluster:
    """A dispatcher, workers and readers of one side. Readers, if several, share a job."""

    def __init__(self, side: Side, setting: Setting, directory: pathlib.Path) -> None:
        self._side = side
        self._setting = setting
        self._stack = contextlib.ExitStack()
        self._workers: list[Server] = []
        self._readers: list[Responder] = []
        self._jobs = 0
        own = directory / side.label
        own.mkdir()
        self._ours = side.service == "forebay"
        start = our_dispatcher if self._ours else peer_dispatcher
        self._dispatcher = self._stack.enter_context(start(own, collect=True))

    def grow(self, *, workers: int, readers: int) -> None:
        """Start the missing workers and readers; `wait_until_ready` waits for them."""
        start = our_worker if self._ours else peer_worker
        for _ in range(len(self._workers), workers):
            self._workers.append(self._stack.enter_context(start(self._dispatcher)))
        for _ in range(len(self._readers), readers):
            self._readers.append(self._stack.enter_context(self._new_reader()))

    def _new_reader(self) -> Responder:
        side = self._side
        arguments = (side.service, self._dispatcher.address, side.compression, self._setting.files)
        return Responder("forebay.benchmarks.reader", *arguments)

    def wait_until_ready(self) -> None:
        for process in (*self._workers, *self._readers):
            process.wait_until_ready()

    def first_s(self, case: str, size: int, times: int) -> list[float]:
        """How long a new reader waits for its first element, again and again."""
        with self._new_reader() as reader:
            reader.wait_until_ready()
            waits = [self.measure(case, size=size, seconds=0, of=[reader]) for _ in range(times)]
        return [wait.first_s for wait in waits]

    def measure(
        self,
        case: str,
        *,
        size: int = 0,
        seconds: float | None = None,
        warm_up_s: float | None = None,
        consumers: int | None = None,
        of: list[Responder] | None = None,
    ) -> Reading:
        """Read with all readers, or so many, for some time; a dataset of a size to its end, if they
        get there.
        """
        readers = of or self._readers[:consumers]
        self._jobs += 1
        if warm_up_s is None:
            warm_up_s = self._setting.warm_up_s
        for number, reader in enumerate(readers):
            reader.ask(
                case=case,
                size=size,
                warm_up_s=0 if size else warm_up_s,
                seconds=self._setting.seconds if seconds is None else seconds,
                workers=[worker.pid for worker in self._workers],
                job_name=f"job {self._jobs}" if len(readers) > 1 else None,
                reader=number,
                readers=len(readers),
            )
        return together([Reading(**reader.answer_json()) for reader in readers])

    def close(self) -> None:
        self._stack.close()


def shared_clusters(
    setting: Setting, *, workers: int = 1, readers: int = 1
) -> dict[str, BenchmarkCluster]:
    """A cluster of each side, that several rows share, because starting processes takes time; with
    so many workers and readers at least.
    """
    if "ours" not in setting.shared:
        directory = setting.directory("shared")
        for side in SIDES:
            setting.shared[side] = BenchmarkCluster(SIDES[side], setting, directory)
    sides = {side: setting.shared[side] for side in SIDES}
    for cluster in sides.values():
        cluster.grow(workers=workers, readers=readers)
    for cluster in sides.values():
        cluster.wait_until_ready()
    return sides
