"""A distributed save: who asks for it, its files, and what is promised of them.

After the documentation: a chunk that is where readers look stays there, and none of its elements is
in another one, at any time, since it may be read already; once the directory has DONE, it holds
every element once. It has ERROR instead if its file system failed, and never both.

The file system is shared, and keeps what was written whoever dies. The files are real; their
writers take their time, and may find no room.
"""

from __future__ import annotations

import errno
import itertools
import json
import os as real
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from forebay.journal.proto import events_pb2 as ev
from forebay.service import pipelines
from forebay.service.blocks import Block
from forebay.service.connections.dispatcher_client import DispatcherClient
from forebay.service.errors import FailedPrecondition
from forebay.service.pipelines import SplitRange
from forebay.service.proto import forebay_pb2 as pb
from forebay.service.proto import tf_service_pb2 as tf

from .kernel import Kernel, kernel
from .nodes import Node
from .oracle import Element
from .patches import replaced
from .pipeline import GRAPH, block_of, elements_of
from .threads import Event

LOOK_S = 0.3
"""How often somebody looks at the directory."""


class SharedFiles:
    """The file system that all hosts see, in a directory."""

    def __init__(self, this: Kernel, root: Path) -> None:
        self.root = root
        self.sync_s = this.rng.choice([1e-4, 5e-3, 0.05])  # typical
        self.split_s = 10 ** this.rng.uniform(-3, -1)  # of work, typically
        self.full = 0.0  # how likely there is no room
        self.was_full = False
        self._kernel = this

    def pass_time(self, share: float) -> None:
        this = self._kernel
        if this.current is not None and not this.over:
            this.sleep(self.sync_s * share * this.rng.uniform(0.1, 2))

    def synced(self) -> None:
        self.pass_time(1)
        if self.full and self._kernel.rng.random() < self.full:
            self.was_full = True
            raise OSError(errno.ENOSPC, real.strerror(errno.ENOSPC))


class Chunk:
    """pipelines.Chunk, a line for each element."""

    def __init__(self, path: str) -> None:
        self.elements = self.bytes = 0
        self._path = path
        with open(path, "w"):
            pass

    def write(self, block: Block) -> None:
        with open(self._path, "a") as file:
            file.writelines(f"{element.split}\n" for element in elements_of(block))
        self.elements += block.count
        self.bytes += block.payload_bytes

    def close(self) -> None: ...


class Bundle:
    """pipelines.Run of a range of splits, each of which is an element."""

    def __init__(self, splits: Sequence[int], start: int) -> None:
        self._splits = splits
        self._start = start
        self._cancelled = Event()

    def cancel(self) -> None:
        self._cancelled.set()

    def blocks(self) -> Iterator[Block]:
        rng = kernel().rng
        at = self._start
        while at < len(self._splits):
            taken = self._splits[at : at + rng.randint(1, 8)]
            if self._cancelled.wait(kernel().shared.split_s * len(taken) * rng.uniform(0.1, 2)):
                return
            yield block_of([Element(0, 0, 0, 0, split) for split in taken], at)
            at += len(taken)


def _opened(graph: bytes, sources: Sequence[ev.SplitSource], _: Sequence[str]) -> Any:
    def bundle(splits: SplitRange, *, number: int, seed: int, start: int = 0) -> Bundle:
        return Bundle(range(splits.first, splits.first + splits.count), start)

    return SimpleNamespace(bundle=bundle, close=lambda: None)


def _opener(graph: bytes, compression: str) -> Callable[[str], Chunk]:
    return Chunk


@contextmanager
def stood_in_for() -> Iterator[None]:
    """What of saves takes TensorFlow."""
    with ExitStack() as stack:
        stack.enter_context(replaced(pipelines, open_saved=_opened, chunk_opener=_opener))
        yield


class Saver(Node):
    """A program that has a dataset saved, and looks at the directory meanwhile."""

    def __init__(
        self, this: Kernel, name: str, host: str, service: str, files: SharedFiles, splits: int
    ) -> None:
        super().__init__(this, name, host)
        self._service = service
        self._files = files
        self._splits = splits
        self._path = files.root / "saved"
        self._seen: dict[str, list[int]] = {}
        self._begun = False

    @property
    def began(self) -> bool:
        return self._begun

    def main(self) -> None:
        attempts = itertools.count(1)
        while not self._begin(next(attempts)):
            self.kernel.sleep(1)
        self._begun = True
        while not self.look():
            self.kernel.sleep(LOOK_S)
        self.done = True

    def _begin(self, attempt: int) -> bool:
        """Have it saved; whether that was not refused, as there was no room."""
        dispatcher = DispatcherClient(self._service)
        request = pb.StartSaveRequest(
            request=ev.Request(caller="saver", number=attempt),
            path=str(self._path),
            graph=GRAPH,
            sources=[ev.SplitSource(count=self._splits)],
            metadata=tf.DistributedSnapshotMetadata().SerializeToString(),
        )
        try:
            dispatcher.call(request, pb.StartSaveResponse, timeout_s=60)
        except FailedPrecondition as error:
            self.kernel.trace("refused", type(error).__name__)
            if not self._files.was_full:
                raise
            return False
        finally:
            dispatcher.close()
        return True

    def look(self) -> bool:
        """Hold the directory against the promises; whether the save is over."""
        chunks = self._path / "chunks"
        for name in sorted(real.listdir(chunks)) if chunks.is_dir() else ():
            if not name.endswith(".tmp"):
                self._look_at(chunks / name)
        if gone := [name for name in self._seen if not (chunks / name).exists()]:
            self.kernel.fail(f"the chunks {gone} were there, and are not any more")
        counts = Counter(element for elements in self._seen.values() for element in elements)
        if twice := [element for element, times in counts.items() if times > 1]:
            self.kernel.fail(f"the elements {twice} of a save are there more than once")
        done, failed = ((self._path / name).exists() for name in ("DONE", "ERROR"))
        if done and failed:
            self.kernel.fail("the save has both DONE and ERROR")
        if done and (missing := set(range(self._splits)) - counts.keys()):
            self.kernel.fail(f"the save is DONE without its elements {sorted(missing)}")
        if failed and not self._files.was_full:
            error = (self._path / "ERROR").read_text()
            self.kernel.fail(f"the save failed without a reason: {error}")
        return done or failed

    def _look_at(self, path: Path) -> None:
        elements = [json.loads(line) for line in path.read_text().splitlines()]
        if self._seen.setdefault(path.name, elements) != elements:
            self.kernel.fail(f"the chunk {path.name} has changed")
        if int(path.name.split("_")[3]) != len(elements):
            self.kernel.fail(f"the chunk {path.name} has {len(elements)} elements")
