"""`make demo`: the main job, end to end, on scikit-learn's handwritten digits.

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
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table

from forebay.journal.verification import verify
from forebay.service.errors import ForebayError
from forebay.service.processes import ChildProcess, forebay, free_port, tail
from forebay.storage import open_storage

FILES = 16
BATCH = 16
TRAINERS = 2
WORKERS = 2
TIMEOUT_S = 300.0
HELD_OUT = 5  # every fifth image

Report = dict[str, Any]


def run_demo(*, epochs: int, keep: bool) -> bool:
    """Run the demo and print its results; return whether each epoch visited every image once, and
    the ordered read was resumed exactly."""
    demo = Demo(pathlib.Path(tempfile.mkdtemp(prefix="forebay-demo-")), epochs)
    try:
        return demo.run()
    finally:
        for process in reversed(demo.processes):
            process.end()
        if keep:
            print(f"kept: {demo.directory}")
        else:
            shutil.rmtree(demo.directory)


class Demo:
    """A cluster on this machine, and what its trainers reported."""

    def __init__(self, directory: pathlib.Path, epochs: int) -> None:
        self.directory = directory
        self.processes: list[ChildProcess] = []
        self._epochs = epochs
        self._console = Console()
        self._results = Table(show_header=False, title="demo", title_justify="left")
        self._journal = f"file://{directory / 'journal'}"
        self._port = free_port()
        self._service = f"127.0.0.1:{self._port}"
        self._visits = [Counter[int]() for _ in range(epochs)]
        self._dataset_id, self._images = "", 0

    def run(self) -> bool:
        dispatcher = self._start_dispatcher()
        worker, *_ = [
            self._serve(f"worker{number}", "worker", f"--dispatcher={self._service}")
            for number in range(WORKERS)
        ]
        folder = str(self.directory / "digits")
        data = self._start("data", "data", folder, str(FILES), self._service)
        if not (written := data.line()):
            raise ForebayError("the digits could not be registered:\n" + self._log("data"))
        registered = json.loads(written)
        self._dataset_id, self._images = registered["dataset_id"], registered["images"]
        self._console.print(f"{self._images} handwritten digits in {FILES} TFRecord files")
        self._console.print(
            f"a dispatcher at {self._service}, {WORKERS} workers, {TRAINERS} trainers, one job"
        )
        good = self._train(dispatcher)
        good = self._resume(worker) and good
        good = self._verify() and good
        self._console.print(self._results)
        if not good:
            for name in (*(f"trainer{number}" for number in range(TRAINERS)), "ordered"):
                self._console.print(self._log(name), markup=False)
        self._console.print(
            "every image once an epoch, and resumed exactly" if good else "a promise was broken",
            style="bold",
        )
        return good

    def _serve(self, name: str, *arguments: str) -> ChildProcess:
        """Start a dispatcher or a worker."""
        return self._run(name, forebay("service.cli", *arguments))

    def _start(self, name: str, program: str, *arguments: str) -> ChildProcess:
        """Start one of the demo's own programs."""
        path = pathlib.Path(__file__).with_name(f"{program}.py")
        return self._run(name, [sys.executable, str(path), *arguments])

    def _run(self, name: str, command: list[str]) -> ChildProcess:
        process = ChildProcess(command, self.directory / f"{name}.log", piped=True)
        self.processes.append(process)
        return process

    def _log(self, name: str) -> str:
        """Its last lines."""
        log = self.directory / f"{name}.log"
        return tail(log) if log.exists() else ""

    def _start_dispatcher(self) -> ChildProcess:
        options = f"--port={self._port}", f"--storage={self._journal}"
        process = self._serve("dispatcher", "dispatcher", *options)
        if not process.line():
            raise ForebayError("the dispatcher did not start:\n" + self._log("dispatcher"))
        return process

    def _train(self, dispatcher: ChildProcess) -> bool:
        """Two trainers share a job, and the dispatcher is killed; whether no image was missed or
        came twice."""
        reports: queue.Queue[Report | None] = queue.Queue()
        for number in range(TRAINERS):
            numbers = map(str, (self._epochs, BATCH, HELD_OUT))
            trainer = self._start(
                f"trainer{number}",
                "trainer",
                str(number),
                self._service,
                self._dataset_id,
                *numbers,
            )
            threading.Thread(target=_collect, args=(trainer, reports), daemon=True).start()
        kill_at, killed, ended = int(self._images * (self._epochs // 2 + 0.5)), False, 0
        accuracies: dict[int, float] = {}
        deadline = time.monotonic() + TIMEOUT_S
        with self._progress() as show:
            while ended < TRAINERS:
                try:
                    report = reports.get(timeout=max(0.1, deadline - time.monotonic()))
                except queue.Empty:
                    raise ForebayError(
                        f"the demo has not ended after {TIMEOUT_S:.0f} s; --keep keeps its logs"
                    ) from None
                if report is None:
                    ended += 1
                elif "accuracy" in report:
                    accuracies[report["trainer"]] = report["accuracy"]
                else:
                    self._visits[report["epoch"]].update(report["ids"])
                    show()
                if not killed and self._visited() >= kill_at:
                    killed, after = True, self._visited()
                    dispatcher.send_signal(signal.SIGKILL)
                    dispatcher.wait()
                    killed_at = time.monotonic()
                    dispatcher = self._start_dispatcher()
                    self._results.add_row(
                        "dispatcher killed (SIGKILL)",
                        f"after {after} images; a new one served "
                        f"{time.monotonic() - killed_at:.2f} s later",
                    )
        twice = sum(n - 1 for visits in self._visits for n in visits.values())
        missed = sum(self._images - len(visits) for visits in self._visits)
        visited = f"{self._visited()} = {self._epochs} epochs of {self._images}"
        self._results.add_row("images visited", visited)
        self._results.add_row("visited twice in an epoch", str(twice))
        self._results.add_row("missed", str(missed))
        for number, accuracy in sorted(accuracies.items()):
            told = f"{accuracy:.1%} on the held-out fifth"
            self._results.add_row(f"trainer {number}'s accuracy", told)
        return len(accuracies) == TRAINERS and not twice and not missed

    def _visited(self) -> int:
        return sum(visits.total() for visits in self._visits)

    @contextlib.contextmanager
    def _progress(self) -> Iterator[Callable[[], None]]:
        columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
        with Progress(*columns, console=self._console) as progress:
            bars = [
                progress.add_task(f"epoch {n}", total=self._images) for n in range(self._epochs)
            ]

            def show() -> None:
                for bar, visits in zip(bars, self._visits, strict=True):
                    progress.update(bar, completed=visits.total())

            yield show

    def _resume(self, worker: ChildProcess) -> bool:
        """Read in order, undisturbed and with a trainer that is killed; whether that is the same
        order, and each image comes once."""
        undisturbed = _steps([self._read_in_order("", TRAINERS * BATCH, 0, 1)])
        alone = self._read_in_order("", TRAINERS * BATCH, 0, 1)
        before = _steps([alone], len(undisturbed) // 2)
        alone.kill()
        worker.end()
        state = json.dumps(before[-1]["state"] if before else None)
        group = [self._read_in_order(state, BATCH, index, TRAINERS) for index in range(TRAINERS)]
        found = [_digests(undisturbed), _digests(before + _steps(group))]
        for how, images in zip(("undisturbed", "with a resume"), found, strict=True):
            digest = hashlib.sha256("".join(images).encode()).hexdigest()
            told = f"{len(images)} images, SHA-256 {digest[:20]}…"
            self._results.add_row(f"read in order, {how}", told)
        self._results.add_row(
            "its trainer killed (SIGKILL)",
            f"after {len(_digests(before))} images; {TRAINERS} trainers went on, with a worker "
            "less",
        )
        is_whole = len({*found[0]}) == len(found[0]) == self._images
        return is_whole and found[0] == found[1]

    def _read_in_order(self, state: str, *arguments: int) -> ChildProcess:
        """A trainer with a saved state or "", its batch size, its index, the number of trainers."""
        given = self._service, self._dataset_id, *map(str, arguments)
        return self._start("ordered", "ordered", state, *given)

    def _verify(self) -> bool:
        storage = open_storage(self._journal)
        report = verify(storage)
        storage.close()
        told = f"{report.last} events" if report.ok else "it is damaged"
        self._results.add_row("the journal verifies", told)
        return report.ok


def _steps(trainers: Sequence[ChildProcess], steps: int | None = None) -> list[Report]:
    """What the trainers report, in the global order, up to their end or that of so many steps."""
    reports: list[Report] = []
    for _ in itertools.count() if steps is None else range(steps):
        step = [line for trainer in trainers if (line := trainer.line(TIMEOUT_S))]
        if not step:
            break
        reports += map(json.loads, step)
    return reports


def _digests(steps: Sequence[Report]) -> list[str]:
    """Of all images."""
    return [digest for step in steps for digest in step["digests"]]


def _collect(trainer: ChildProcess, reports: queue.Queue[Report | None]) -> None:
    assert trainer.stdout is not None
    for line in trainer.stdout:
        reports.put(json.loads(line))
    reports.put(None)


def main(
    epochs: int = typer.Option(6, min=1, help="Epochs over the digits."),
    keep: bool = typer.Option(False, help="Keep the demo's files and say where they are."),
) -> None:
    """Train on real data on this machine, and kill the dispatcher in the middle."""
    raise typer.Exit(0 if run_demo(epochs=epochs, keep=keep) else 1)


if __name__ == "__main__":
    typer.run(main)
