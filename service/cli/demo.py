"""`forebay demo`: the main job, end to end, on scikit-learn's handwritten digits.

It writes 1,797 real images to 16 TFRecord files and registers them once. Two trainer processes
share one job over them through two workers, under dynamic sharding, and each trains a small Keras
model. Halfway through an epoch, the demo kills the dispatcher (SIGKILL), and another one replays
its journal; trainers and workers run on. The models do not learn from every fifth image: those
measure the accuracy.

Then the demo reads the images in order, twice: undisturbed, and by a trainer that it kills in the
middle. A worker leaves as well, and two trainers go on from the state that was saved last. The
bytes of all images must be the same, in the same order.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import pathlib
import queue
import shutil
import signal
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

from ...storage.extras import install
from ..errors import ForebayError
from ..processes import ChildProcess, forebay, free_port, tail

FILES = 16
BATCH = 16
TRAINERS = 2
WORKERS = 2
TIMEOUT_S = 300.0
HELD_OUT = 5  # every fifth image


@dataclass
class Tally:
    """The sums of the trainers' reports."""

    visits: dict[int, Counter[int]] = field(default_factory=dict)  # by epoch
    waited_s: dict[int, float] = field(default_factory=dict)  # by trainer
    longest_wait_s: dict[int, float] = field(default_factory=dict)
    read_s: dict[int, float] = field(default_factory=dict)
    accuracy: dict[int, float] = field(default_factory=dict)

    def add(self, report: dict[str, Any]) -> None:
        trainer = report["trainer"]
        if "ids" in report:
            self.visits.setdefault(report["epoch"], Counter()).update(report["ids"])
        if "accuracy" in report:
            self.accuracy[trainer] = report["accuracy"]
            self.waited_s[trainer] = report["waited_s"]
            self.longest_wait_s[trainer] = report["longest_wait_s"]
            self.read_s[trainer] = report["read_s"]

    @property
    def total(self) -> int:
        return sum(counter.total() for counter in self.visits.values())

    @property
    def twice(self) -> int:
        """The number of visits after an image's first one in an epoch."""
        return sum(n - 1 for counter in self.visits.values() for n in counter.values())


@dataclass
class Resumed:
    """What came of an ordered read that was stopped, and of an undisturbed one: the SHA-256 of each
    image, in the global order."""

    undisturbed: list[str]
    resumed: list[str]
    killed_after: int  # images

    @property
    def same(self) -> bool:
        return self.resumed == self.undisturbed

    def is_whole(self, images: int) -> bool:
        """Whether an epoch has every image once."""
        return len({*self.undisturbed}) == len(self.undisturbed) == images


def run_demo(*, epochs: int, keep: bool) -> bool:
    """Run the demo and print its results; return whether each epoch visited every image once."""
    missing = [name for name in ("sklearn", "tensorflow") if find_spec(name) is None]
    if missing:
        raise ForebayError(
            f"the demo needs {missing[0]}; install it: {install('tensorflow')}, and pip install "
            "scikit-learn"
        )
    directory = pathlib.Path(tempfile.mkdtemp(prefix="forebay-demo-"))
    processes: list[ChildProcess] = []
    try:
        return _run(directory, epochs, processes)
    finally:
        for process in reversed(processes):
            process.end()
        if keep:
            print(f"kept: {directory}")
        else:
            shutil.rmtree(directory)


def _run(directory: pathlib.Path, epochs: int, processes: list[ChildProcess]) -> bool:
    from rich.console import Console

    console = Console()
    port = free_port()
    service = f"127.0.0.1:{port}"
    journal = f"file://{directory / 'journal'}"

    def run(log: pathlib.Path, module: str, *arguments: str) -> ChildProcess:
        process = ChildProcess(forebay(module, *arguments), log, piped=True)
        processes.append(process)
        return process

    def start_dispatcher() -> ChildProcess:
        log = directory / "dispatcher.log"
        process = run(log, "service.cli", "dispatcher", f"--port={port}", f"--storage={journal}")
        if not process.line():
            raise ForebayError("the dispatcher did not start:\n" + tail(log))
        return process

    dispatcher = start_dispatcher()
    workers = [
        run(directory / f"worker{number}.log", "service.cli", "worker", f"--dispatcher={service}")
        for number in range(WORKERS)
    ]
    log = directory / "data.log"
    written = run(
        log, "service.cli.demo_data", str(directory / "digits"), str(FILES), service
    ).line()
    if not written:
        raise ForebayError("the digits could not be registered:\n" + tail(log))
    registered = json.loads(written)
    dataset_id, images = registered["dataset_id"], registered["images"]
    console.print(f"{images} handwritten digits in {FILES} TFRecord files")
    console.print(f"a dispatcher at {service}, {WORKERS} workers, {TRAINERS} trainers, one job")
    reports: queue.Queue[dict[str, Any] | None] = queue.Queue()
    for number in range(TRAINERS):
        numbers = map(str, (epochs, BATCH, HELD_OUT))
        log = directory / f"trainer{number}.log"
        trainer = run(log, "service.cli.demo_trainer", str(number), service, dataset_id, *numbers)
        threading.Thread(target=_collect, args=(trainer, reports), daemon=True).start()

    tally = Tally()
    kill_at = int(images * (epochs // 2 + 0.5))
    killed_at, killed_after = 0.0, 0
    recovered_s: float | None = None
    ended = 0
    deadline = time.monotonic() + TIMEOUT_S
    with _progress(console, epochs, images) as show:
        while ended < TRAINERS:
            try:
                report = reports.get(timeout=max(0.1, deadline - time.monotonic()))
            except queue.Empty:
                raise ForebayError(
                    f"the demo has not ended after {TIMEOUT_S:.0f} s; --keep keeps its logs"
                ) from None
            if report is None:
                ended += 1
                continue
            tally.add(report)
            show(tally)
            if not killed_at and tally.total >= kill_at:
                dispatcher.send_signal(signal.SIGKILL)
                dispatcher.wait()
                killed_at, killed_after = time.monotonic(), tally.total
                dispatcher = start_dispatcher()
                recovered_s = time.monotonic() - killed_at

    def read_in_order(state: str, *arguments: int) -> ChildProcess:
        module, log = "service.cli.demo_ordered", directory / "ordered.log"
        return run(log, module, state, service, dataset_id, *map(str, arguments))

    resumed = _resume(read_in_order, workers[0])
    return _summarize(
        console, directory, journal, tally, epochs, images, killed_after, recovered_s, resumed
    )


def _resume(read_in_order: Callable[..., ChildProcess], worker: ChildProcess) -> Resumed:
    """`read_in_order` starts a trainer, with a saved state or "", its batch size, its index and the
    number of trainers."""
    undisturbed = _steps([read_in_order("", TRAINERS * BATCH, 0, 1)])
    alone = read_in_order("", TRAINERS * BATCH, 0, 1)
    before = _steps([alone], len(undisturbed) // 2)
    alone.kill()
    worker.end()
    state = json.dumps(before[-1]["state"] if before else None)
    after = _steps([read_in_order(state, BATCH, index, TRAINERS) for index in range(TRAINERS)])

    def images(steps: list[dict[str, Any]]) -> list[str]:
        return [digest for step in steps for digest in step["digests"]]

    return Resumed(images(undisturbed), images(before + after), len(images(before)))


def _steps(trainers: Sequence[ChildProcess], steps: int | None = None) -> list[dict[str, Any]]:
    """What the trainers report, in the global order, up to their end or that of so many steps."""
    reports: list[dict[str, Any]] = []
    for _ in itertools.count() if steps is None else range(steps):
        step = [line for trainer in trainers if (line := trainer.line(TIMEOUT_S))]
        if not step:
            break
        reports += map(json.loads, step)
    return reports


def _described(images: list[str]) -> str:
    digest = hashlib.sha256("".join(images).encode()).hexdigest()
    return f"{len(images)} images, SHA-256 {digest[:20]}…"


def _summarize(
    console: Any,
    directory: pathlib.Path,
    journal: str,
    tally: Tally,
    epochs: int,
    images: int,
    killed_after: int,
    recovered_s: float | None,
    resumed: Resumed,
) -> bool:
    from rich.table import Table

    from ...journal.verification import stats, verify
    from ...storage import open_storage

    missing = sum(images - len(counter) for counter in tally.visits.values())
    missing += images * (epochs - len(tally.visits))
    storage = open_storage(journal)
    kinds = stats(storage).events
    healthy = verify(storage).ok
    storage.close()
    table = Table(show_header=False, title="forebay demo", title_justify="left")
    table.add_row("images visited", f"{tally.total} = {epochs} epochs of {images}")
    table.add_row("visited twice in an epoch", str(tally.twice))
    table.add_row("missed", str(missing))
    if recovered_s is not None:
        table.add_row(
            "dispatcher killed (SIGKILL)",
            f"after {killed_after} images; a new one served {recovered_s:.2f} s later",
        )
    for trainer in sorted(tally.accuracy):
        table.add_row(
            f"trainer {trainer} waited for data",
            f"{tally.waited_s[trainer]:.2f} s of {tally.read_s[trainer]:.2f} s, "
            f"at the longest {tally.longest_wait_s[trainer]:.2f} s",
        )
    table.add_row("read in order, undisturbed", _described(resumed.undisturbed))
    table.add_row("read in order, with a resume", _described(resumed.resumed))
    table.add_row(
        "its trainer killed (SIGKILL)",
        f"after {resumed.killed_after} images; {TRAINERS} trainers went on, with a worker less",
    )
    events = ", ".join(f"{n} {kind}" for kind, n in sorted(kinds.items(), key=lambda i: -i[1]))
    table.add_row("the journal holds", f"{sum(kinds.values())} events: {events}")
    table.add_row("the journal verifies", "yes" if healthy else "NO")
    for trainer, accuracy in sorted(tally.accuracy.items()):
        table.add_row(f"trainer {trainer}'s accuracy", f"{accuracy:.1%} on the held-out fifth")
    console.print(table)
    good = len(tally.accuracy) == TRAINERS and not tally.twice and not missing and healthy
    good = good and resumed.same and resumed.is_whole(images)
    if len(tally.accuracy) < TRAINERS:
        console.print("a trainer failed:")
        for trainer in range(TRAINERS):
            console.print(tail(directory / f"trainer{trainer}.log"), markup=False)
    if not (resumed.same and resumed.is_whole(images)):
        console.print("the ordered read went wrong:")
        console.print(tail(directory / "ordered.log"), markup=False)
    console.print(
        "every image once an epoch, and resumed exactly" if good else "a promise was broken",
        style="bold",
    )
    return good


@contextlib.contextmanager
def _progress(console: Any, epochs: int, images: int) -> Any:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
    with Progress(*columns, TimeElapsedColumn(), console=console) as progress:
        bars = [progress.add_task(f"epoch {n}", total=images, start=False) for n in range(epochs)]

        def show(tally: Tally) -> None:
            for epoch, counter in tally.visits.items():
                progress.start_task(bars[epoch])
                progress.update(bars[epoch], completed=counter.total())

        yield show


def _collect(trainer: ChildProcess, reports: queue.Queue[dict[str, Any] | None]) -> None:
    assert trainer.stdout is not None
    for line in trainer.stdout:
        reports.put(json.loads(line))
    reports.put(None)
