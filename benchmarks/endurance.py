"""Rows `endurance`: memory, descriptors and threads of processes around which others are killed.

One dispatcher, one worker, and two trainers, of which one reads in order, live for half an hour at
full rate. Two more workers and a trainer of the same job are killed in turn, and started again; in
row `endurance_dispatcher` the dispatcher too. A trainer is a process of its own, which reads one
epoch after another:

python -m forebay.benchmarks.endurance DISPATCHER DATASET (shared|ordered)
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from ..service import ShardingPolicy
from ..service.dispatcher.options import DispatcherOptions
from ..service.processes import ChildProcess
from .cases import ENDLESS
from .machine import memory_mb
from .results import Better, Finding, Result
from .servers import Responder, Server, our_dispatcher, our_worker
from .setting import Setting

MINUTES = 30.0
KILL_EVERY_S = 10.0  # a trainer takes several to start
ELEMENTS = 400_000  # of an epoch
BATCH = 100
_DEFAULTS = DispatcherOptions()
GIVEN_UP = (
    *("--worker-timeout-ms", _DEFAULTS.worker_timeout_ms),
    *("--client-timeout-ms", _DEFAULTS.client_timeout_ms),
)
SAMPLES = 60
FIRST = 10  # samples before which caches still fill


@dataclass
class _Watched:
    """A process that is not killed, and what it held at each sample."""

    process: ChildProcess
    memory: list[float] = field(default_factory=list)
    descriptors: list[int] = field(default_factory=list)
    threads: list[int] = field(default_factory=list)

    def sample(self) -> None:
        pid = self.process.pid
        self.memory.append(memory_mb(pid, "VmRSS"))
        self.descriptors.append(len(os.listdir(f"/proc/{pid}/fd")))
        self.threads.append(len(os.listdir(f"/proc/{pid}/task")))


def endurance(setting: Setting, *, dispatcher_dies: bool = False) -> list[Finding]:
    """What was held at most in the last quarter of the time, less the most of the quarter after
    the first samples. Measured once."""
    seconds = 10 * setting.seconds if setting.quick else 60 * MINUTES
    directory = setting.directory("endurance")
    with contextlib.ExitStack() as stack:
        killed: list[Responder] = []
        stack.callback(lambda: [*map(Responder.close, reversed(killed))])
        dispatcher = our_dispatcher(directory, 0, *GIVEN_UP)
        if dispatcher_dies:
            killed.append(dispatcher)
        else:
            stack.enter_context(dispatcher)
        port = dispatcher.port

        def worker() -> Server:
            return our_worker(dispatcher)

        def trainer(how: str = "shared") -> Responder:
            return Responder("forebay.benchmarks.endurance", dispatcher.address, how)

        watched = {
            "worker": _Watched(stack.enter_context(worker())),
            "trainer of a shared job": _Watched(stack.enter_context(trainer())),
            "trainer in order": _Watched(stack.enter_context(trainer("ordered"))),
        }
        starts: list[Callable[[], Responder]] = [worker, worker, trainer]
        if dispatcher_dies:
            starts.insert(0, lambda: our_dispatcher(directory, port, *GIVEN_UP))
        else:
            watched["dispatcher"] = _Watched(dispatcher)
        for start in starts[len(killed) :]:
            killed.append(start())  # noqa: PERF401 - each is closed if a later one does not start
        begun, kills = time.monotonic(), 0
        for number in range(1, SAMPLES + 1):
            while time.monotonic() < begun + seconds * number / SAMPLES:
                time.sleep(min(KILL_EVERY_S, seconds / SAMPLES))
                place = kills % len(killed)
                os.kill(killed[place].pid, signal.SIGKILL)
                killed[place].close()
                killed[place] = starts[place]()
                kills += 1
            for each in watched.values():
                each.sample()
    what = f"{seconds / 60:.0f} min and {kills} kills around it"
    return [
        Result(
            row="endurance_dispatcher" if dispatcher_dies else "endurance",
            what=f"{name}, {what}: growth of its {kind}",
            unit=unit,
            better=Better.LESS,
            ours=[max(held[-SAMPLES // 4 :]) - max(held[FIRST : FIRST + SAMPLES // 4])],
        )
        for name, each in watched.items()
        for kind, unit, held in (
            (f"memory of {each.memory[-1]:.0f} MB", "MB", each.memory),
            (f"{each.descriptors[-1]} descriptors", "", each.descriptors),
            (f"{each.threads[-1]} threads", "", each.threads),
        )
    ]


def train(dispatcher: str, how: str) -> None:
    """Read an endless job with others, or one epoch after another in order."""
    import tensorflow as tf

    from ..service import read, register_dataset

    numbers = tf.data.Dataset.range(ENDLESS if how == "shared" else ELEMENTS)
    dataset = numbers.map(lambda number: tf.fill([256], number)).batch(BATCH)
    dataset_id = register_dataset(dispatcher, dataset)
    mode = ShardingPolicy.DYNAMIC
    while True:
        reading = (
            read(dispatcher, dataset_id, processing_mode=mode, job_name="shared")
            if how == "shared"
            else read(dispatcher, dataset_id, ordered=True)
        )
        with reading as elements:
            for _ in elements:
                pass


if __name__ == "__main__":
    train(*sys.argv[1:])
