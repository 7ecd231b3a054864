"""Row `abandoned`: a worker's memory and threads after trainers leave early or are killed.

Each job is named, so that a reader might return. A trainer reads some of its 150 KB images, and
leaves. Both sides collect unread jobs with their default timeouts, minutes.

python -m forebay.benchmarks.abandoned (forebay|tensorflow) DISPATCHER

is that trainer: each input line is a number of jobs to begin and leave, or "killed", to begin one
and stay; each output line confirms it.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import pathlib
import sys
import time
from collections.abc import Callable

from .reader import SERVICES
from .results import Better, Result
from .servers import Responder, Server, our_dispatcher, our_worker, peer_dispatcher, peer_worker
from .setting import Setting

TAKEN = 20  # elements of each job
SETTLE_S = 5.0
JOBS = (300, 1_000)
JOBS_AT_A_TIME = 20  # per question, so that a busy machine answers in time
KILLED = 10
MOST_MB, MOST_THREADS = 1_200, 200


class AbandonedJobs:
    """One side's worker, and the trainer that abandons jobs there."""

    def __init__(self, service: str, dispatcher: Server, worker: Server) -> None:
        self.worker = worker
        self._arguments = f"{__name__}", service, dispatcher.address
        self._trainer = Responder(*self._arguments)
        self._trainer.answer()
        self._jobs = 0

    def grow(self, jobs: int) -> tuple[float, int]:
        """Abandon `jobs` jobs in all; return the worker's memory and number of threads."""
        while self._jobs < jobs:
            more = min(JOBS_AT_A_TIME, jobs - self._jobs)
            self._say(self._trainer, more)
            self._jobs += more
        return self._settled()

    def kill(self, trainers: int) -> tuple[float, int]:
        """Kill `trainers` trainers while they read; return the same as `grow`."""
        for _ in range(trainers):
            trainer = Responder(*self._arguments)
            trainer.answer()
            self._say(trainer, "killed")
            trainer.kill()
            trainer.close()
        return self._settled()

    def close(self) -> None:
        self._trainer.close()

    def _say(self, trainer: Responder, what: object) -> None:
        assert trainer.stdin is not None
        trainer.stdin.write(f"{what}\n")
        trainer.stdin.flush()
        trainer.answer()

    def _settled(self) -> tuple[float, int]:
        time.sleep(SETTLE_S)
        threads = len([*pathlib.Path(f"/proc/{self.worker.pid}/task").iterdir()])
        return self.worker.rss_mb(), threads


def abandoned(setting: Setting) -> list[Result]:
    """One round: the leftovers add up, and it takes minutes."""
    counts = (4, 8) if setting.quick else JOBS
    killed = 1 if setting.quick else KILLED
    directory = setting.directory("abandoned")
    ours = _measured(
        "forebay", lambda: our_dispatcher(directory, 0, "--client-timeout-ms", 60_000), our_worker,
        counts, killed,
    )  # fmt: skip
    peer = _measured("tensorflow", lambda: peer_dispatcher(directory), peer_worker, counts, killed)
    results = []
    for number, count in enumerate(counts):
        for what, unit, required, of in (
            ("a worker's memory", "MB", MOST_MB, 0),
            ("a worker's threads", "threads", MOST_THREADS, 1),
        ):
            results.append(
                Result(
                    row="abandoned",
                    what=f"{what} after {count:,} jobs that were left early",
                    unit=unit,
                    better=Better.LESS,
                    ours=[ours[number][of]],
                    peer=[peer[number][of]],
                    required=required,
                )
            )
    results.append(
        Result(
            row="abandoned",
            what=f"a worker's memory, after {killed} trainers more were killed",
            unit="MB",
            better=Better.LESS,
            ours=[ours[-1][0]],
            peer=[peer[-1][0]],
            required=MOST_MB,
        )
    )
    return results


def _measured(
    service: str,
    start_dispatcher: Callable[[], Server],
    start_worker: Callable[[Server], Server],
    counts: tuple[int, ...],
    killed: int,
) -> list[tuple[float, int]]:
    with start_dispatcher() as dispatcher, start_worker(dispatcher) as worker:
        worker.wait_until_serving()
        with contextlib.closing(AbandonedJobs(service, dispatcher, worker)) as left:
            return [*map(left.grow, counts), left.kill(killed)]


def main(name: str, dispatcher: str) -> None:
    import numpy as np
    import tensorflow as tf

    service = importlib.import_module(SERVICES[name])
    image = np.random.default_rng(0).integers(0, 256, (224, 224, 3), np.uint8)
    dataset = tf.data.Dataset.range(10_000).map(
        lambda number: tf.constant(image) + tf.cast(number, tf.uint8), num_parallel_calls=2
    )
    target = f"grpc://{dispatcher}"
    dataset_id = service.register_dataset(target, dataset.prefetch(2))

    def read(job_name: str) -> None:
        elements = service.from_dataset_id(
            "distributed_epoch", target, dataset_id, dataset.element_spec, job_name=job_name
        )
        iterator = iter(elements)
        for _ in itertools.islice(iterator, TAKEN):
            pass
        if job_name == "killed":
            print("reads", flush=True)
            time.sleep(600)  # until it is killed while it reads

    print("ready", flush=True)
    jobs = 0
    for line in sys.stdin:
        if line.strip() == "killed":
            read("killed")
        for _ in range(int(line)):
            jobs += 1
            read(f"job {jobs}")
        print("left", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
