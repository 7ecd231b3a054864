"""Row `materialize`: writes a CPU-bound dataset to files, with two Dask workers and with one."""

from __future__ import annotations

import contextlib
import functools
import pathlib
import sys
import tempfile
import time
from collections.abc import Iterator

from ..service.errors import ForebayError
from ..service.processes import ChildProcess
from .results import Better, Finding, Result
from .servers import Responder, our_dispatcher
from .setting import Setting

SHARDS = 16
LOOPS = 5_000_000  # of Python for a shard, 250 ms or so
QUICK_LOOPS = 20_000
START_S = 60


def materialize(setting: Setting) -> list[Finding]:
    """The time of a run, with running workers that have finished another run before."""
    with contextlib.ExitStack() as stack:
        directory = setting.directory("materialize")
        dispatcher = stack.enter_context(our_dispatcher(directory))
        arguments = (dispatcher.address, QUICK_LOOPS if setting.quick else LOOPS)
        sides = {}
        for workers in (1, 2):
            folder = setting.directory(f"dask-{workers}")
            scheduler = stack.enter_context(_dask(folder, workers))
            runner = Responder("forebay.benchmarks.materialize", *arguments, scheduler, folder)
            stack.enter_context(runner)
            runner.answer()
            sides[workers] = functools.partial(_ask, runner)
        figures = setting.alternate(two=sides[2], one=sides[1])
    return [
        Result(
            row="materialize",
            what="A CPU-bound Python dataset into TFRecord files, two Dask workers; peer: one",
            unit="shards/s",
            better=Better.MORE,
            ours=figures["two"],
            peer=figures["one"],
            required_ratio=1.7,
        )
    ]


@contextlib.contextmanager
def _dask(folder: pathlib.Path, workers: int) -> Iterator[pathlib.Path]:
    """Run a scheduler and `workers` single-threaded workers; yield the scheduler's file."""
    file, log = folder / "scheduler.json", folder / "log"
    common = ["--scheduler-file", str(file), "--host", "127.0.0.1", "--dashboard-address", ":0"]
    alone = ["--no-nanny", "--nthreads", "1", "--local-directory", str(folder)]
    commands = [["scheduler", "--port", "0"], *[["worker", *alone]] * workers]
    with contextlib.ExitStack() as stack:
        for what, *options in commands:
            module = f"distributed.cli.dask_{what}"
            process = ChildProcess([sys.executable, "-m", module, *options, *common], log)
            stack.callback(process.end)
            give_up_s = time.monotonic() + START_S
            while not file.exists():
                if process.poll() is not None or time.monotonic() > give_up_s:
                    raise ForebayError(f"Dask's scheduler did not start: {log.read_text()[-2000:]}")
                time.sleep(0.05)
        yield file


def _ask(runner: Responder) -> float:
    runner.ask({})
    return float(runner.answer())


def main(address: str, loops: str, scheduler: str, directory: str) -> None:
    """Answer questions for shards/s until the input ends."""
    from ..service import materialize, register_dataset

    rounds = int(loops)

    def busy(split: int) -> Iterator[int]:
        yield sum(split * i for i in range(rounds))

    dataset_id = register_dataset(address, busy, splits=range(SHARDS))

    def run() -> float:
        output = tempfile.mkdtemp(dir=directory)
        begun = time.perf_counter()
        options = [f"--dask_scheduler_file={scheduler}"]
        materialize(address, dataset_id, output, runner="DaskRunner", options=options)
        return SHARDS / (time.perf_counter() - begun)

    run()  # in which workers import what they need
    print("ready", flush=True)
    for _ in sys.stdin:
        print(run(), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
