"""Row `preemption`: the time from SIGTERM in one trainer until another one of its job has all the
elements that the first had received and not used.

Both `read` 150 KB images from two workers. The first, a separate process, takes 50 per second, so
its buffers are full. When the signal comes, the second has taken all other images, and waits.

python -m forebay.benchmarks.preemption ADDRESS DATASET_ID JOB_NAME
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time

from ..service import ElementIterator, PreemptionHandler, ShardingPolicy, read, register_dataset
from ..service.errors import ForebayError
from .python import arrays
from .results import Better, Result
from .servers import Responder, Server, our_dispatcher, our_worker
from .setting import Setting

SPLITS = range(15)
IMAGES = 100 * len(SPLITS)
STEP_S = 0.02
SETTLE_S = 1.0
"""How long the first trainer has to fill its buffers."""
WAITS_S = 0.1
"""A reader that waits this long has got everything. At half a second its epoch ends."""
REQUIRED_S = 1.0


def preemption(setting: Setting) -> list[Result]:
    """Only our side: tf.data service has no such feature."""
    with contextlib.ExitStack() as stack:
        dispatcher = stack.enter_context(our_dispatcher(setting.directory("preemption")))
        for worker in [stack.enter_context(our_worker(dispatcher)) for _ in range(2)]:
            worker.wait_until_serving()
        dataset_id = register_dataset(dispatcher.address, arrays, splits=SPLITS)
        counts: list[int] = []

        def measured() -> float:
            seconds, count = _take_over(dispatcher, dataset_id, f"round {len(counts)}")
            counts.append(count)
            return seconds

        figures = setting.alternate(ours=measured)["ours"]
    handed = f"{min(counts)}–{max(counts)}"
    return [
        Result(
            row="preemption",
            what=f"SIGTERM to a trainer, until another has the last of {handed} 150 KB uint8 "
            "images that it had received and not used",
            unit="s",
            better=Better.LESS,
            ours=figures,
            required=REQUIRED_S,
        )
    ]


def _take_over(dispatcher: Server, dataset_id: str, job_name: str) -> tuple[float, int]:
    """The time, and the number of such elements. Raises ForebayError if one is missing."""
    where = dispatcher.address, dataset_id, job_name
    with Responder("forebay.benchmarks.preemption", *where) as first:
        first.answer()
        time.sleep(SETTLE_S)
        taken_s: list[float] = []

        def take() -> None:
            for _ in _elements(*where):
                taken_s.append(time.perf_counter())  # noqa: PERF401 - looked at meanwhile

        second = threading.Thread(target=take, name="second", daemon=True)
        second.start()
        while not taken_s or time.perf_counter() - taken_s[-1] < WAITS_S:
            time.sleep(WAITS_S / 10)
        before, told_s = len(taken_s), time.perf_counter()
        first.terminate()
        used = int(first.answer())
        second.join()
    if used + len(taken_s) != IMAGES:
        raise ForebayError(f"{used} and {len(taken_s)} elements were taken of {IMAGES}")
    return taken_s[-1] - told_s, len(taken_s) - before


def _elements(address: str, dataset_id: str, job_name: str) -> ElementIterator:
    return read(address, dataset_id, processing_mode=ShardingPolicy.DYNAMIC, job_name=job_name)


def main(*where: str) -> None:
    """The first trainer: it reports its first element, and at the end how many it has had."""
    used = 0
    with PreemptionHandler(exit_code=None):
        for _ in _elements(*where):
            if not used:
                print("reads", flush=True)
            used += 1
            time.sleep(STEP_S)
    print(used, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
