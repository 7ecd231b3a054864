"""The simulated dispatchers: the product's own `serve`, on either storage."""

from __future__ import annotations

import math
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from forebay.service.dispatcher import candidate
from forebay.service.dispatcher import server as product
from forebay.service.dispatcher.dispatcher import Dispatcher
from forebay.service.dispatcher.dispatcher_servicer import DispatcherServicer
from forebay.service.dispatcher.graphs import needed_blobs
from forebay.service.dispatcher.options import DispatcherOptions
from forebay.service.dispatcher.recovery import recover
from forebay.service.errors import ForebayError
from forebay.storage import FileStorage, Storage
from forebay.storage.base import LEASE_MS

from .calls import Server
from .kernel import Kernel, kernel
from .loop import SimLoop, run
from .nodes import Node
from .oracle import Elsewhere, Oracle
from .patches import replaced
from .remote import RemoteStorage
from .remote import Server as RemoteServer
from .threads import process

SEGMENT_BYTES = 4000
POLLS_A_LEASE = 8
"""Fewer than the product's: the steps of a standby that waits prove nothing new."""


class WatchedFiles(FileStorage):
    """FileStorage, telling the oracle what it acknowledges and what it recovers."""

    def __init__(self, path: Path, oracle: Oracle) -> None:
        super().__init__(path, segment_bytes=SEGMENT_BYTES)
        self._oracle = oracle

    def open_writer(self, owner: str, *, lease_ms: int = LEASE_MS, place: str = "") -> Any:
        writer = super().open_writer(owner, lease_ms=lease_ms, place=place)
        oracle = self._oracle
        oracle.opened(writer.term)
        process().local.update(term=writer.term, oracle=oracle)
        first = self.first_sequence()
        oracle.found(first, self.read(first - 1))
        append = writer.append

        def watched(records: Sequence[bytes]) -> int:
            first = writer.last_sequence + 1
            last = append(records)
            if records:
                oracle.stored(writer.term, first, records)
            return last

        writer.append = watched  # type: ignore[method-assign]
        return writer


class WatchedServicer(DispatcherServicer):
    """Forebay's service, telling the oracle whose dispatcher it is."""

    def __init__(self, dispatcher: Dispatcher, *access: Any) -> None:
        super().__init__(dispatcher, *access)
        process().local["dispatcher"] = dispatcher


class Storages:
    """The one storage of a run: files on a disk, or remote; or, while it is `emptied`, another."""

    def __init__(self, this: Kernel, directory: Path | None) -> None:
        self.directory = directory
        self.emptied = False
        self._oracles = {False: this.oracle, True: Elsewhere(this, this.oracle)}
        self._remotes = {key: RemoteServer(this, oracle) for key, oracle in self._oracles.items()}

    @property
    def remote(self) -> RemoteServer:
        return self._remotes[self.emptied]

    def open(self, url: str = "", **_: object) -> Storage:
        if self.directory is not None:
            path = self.directory / ("empty" if self.emptied else "storage")
            return WatchedFiles(path, self._oracles[self.emptied])
        return RemoteStorage(self.remote)


class DispatcherNode(Node):
    """A dispatcher's place: its host and port, and whichever process has them."""

    def __init__(self, this: Kernel, name: str, host: str, options: DispatcherOptions) -> None:
        super().__init__(this, name, host)
        self.options = options
        self.loops: list[SimLoop] = []

    def main(self) -> None:
        try:
            run(product.serve(self.options, ready=lambda address: None), self.loops)
        except ForebayError as error:  # as the command line does: say so, exit
            self.kernel.trace("gave up", self.name, type(error).__name__)
            self.kernel.note(error)

    def terminate(self) -> None:
        """SIGTERM."""
        if self.alive and self.loops and (act := self.loops[-1].signals.get(signal.SIGTERM)):
            self.kernel.trace("terminate", self.name)
            act()

    def fall_silent(self) -> None:
        """It was paused or cut off: those who wait for its answers will notice."""
        for server in self.kernel.network.ports.values():
            if isinstance(server, Server) and server.process is self.process:
                server.silent()


@contextmanager
def on(storages: Storages) -> Iterator[None]:
    """Have dispatchers use this storage."""
    with (
        replaced(product, open_storage=storages.open, DispatcherServicer=WatchedServicer),
        replaced(candidate, POLLS_A_LEASE=POLLS_A_LEASE, LONGEST_POLL_S=math.inf),
    ):
        yield


def examine(storages: Storages) -> None:
    """When all is over: what the storage holds is what the oracle saw."""
    storage, oracle = storages.open(), kernel().oracle
    first = storage.first_sequence()
    oracle.found(first, storage.read(first - 1))
    state, _ = recover(storage)
    oracle.require_same(state, "the recovered state")
    if first == 1:
        oracle.require_same(recover_without_snapshots(storage), "the state of all events")
    for blob in needed_blobs(state).values():
        storage.read_blob(blob)
    storage.close()


def recover_without_snapshots(storage: Storage) -> Any:
    storage.snapshots = list  # type: ignore[method-assign]
    return recover(storage)[0]
