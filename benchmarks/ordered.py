"""Rows `ordered`: reads in order, and at least once, beside those that give elements at most once.

`ordered_images` and so on: two workers read files, and one or four trainers `read` elements one by
one. A split, and so a bundle, is a file. `dead_worker`: how long a trainer waits when one of two
workers gets kill -9. Only our side: tf.data service has no such reads.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import time
from typing import Any

import numpy as np

from ..service import ShardingPolicy, read, register_dataset
from ..service.errors import ForebayError
from .cluster import SIDES, BenchmarkCluster
from .contents import AT_LEAST_ONCE, AT_MOST_ONCE, FILE_CASES, ORDERED
from .results import Result, compared
from .servers import our_dispatcher, our_worker
from .setting import Setting

CASES = {"file_images": 0.8, "file_jpegs": 0.8, "file_tokens": 0.8, "file_records": 0.5}
LEAST = 0.9
WARM_UP_S = 4.0  # until the bundles that are open are filled
CONSUMERS = (1, 4)
SUFFIXES = {"ordered": ORDERED, "least": AT_LEAST_ONCE, "once": AT_MOST_ONCE}
HOW: dict[str, dict[str, Any]] = {
    "ordered": {"ordered": True, "bundle_splits": 1_000},
    "least": {"delivery": "at_least_once", "bundle_splits": 1_000},
    "once": {"processing_mode": ShardingPolicy.DYNAMIC},
}
NAMES = {"ordered": "in order", "least": "at least once"}
BESIDE = "; peer: Forebay, each element at most once"

KILL_AT = 1_000  # elements after which a worker is killed
AFTERWARDS = 4_000  # elements that are taken then
STEP_S = 0.002
MOST_WAIT_S = 3.0


def throughput(case: str, setting: Setting) -> list[Result]:
    """A case's rates, and its processor times."""
    FILE_CASES[case].content.write(setting.files, quick=setting.quick)
    cluster = BenchmarkCluster(SIDES["ours"], setting, setting.directory("ordered"))
    warm_up_s = None if setting.quick else WARM_UP_S
    results: list[Result] = []
    with contextlib.closing(cluster):
        cluster.grow(workers=2, readers=max(CONSUMERS))
        cluster.wait_until_ready()
        for consumers in CONSUMERS:
            measure = functools.partial(cluster.measure, consumers=consumers, warm_up_s=warm_up_s)
            ways = {way: functools.partial(measure, case + of) for way, of in SUFFIXES.items()}
            found = setting.alternate(**ways)
            what = f"{FILE_CASES[case].what}, {consumers} consumer(s), 2 workers"
            results += [
                compared(case.replace("file", "ordered"), f"{what}: {NAMES[way]}{BESIDE}", figure,
                         found[way], found["once"], least if figure == "elements_per_s" else None)
                for way, least in (("ordered", CASES[case]), ("least", LEAST))
                for figure in ("elements_per_s", "cpu_us", "client_cpu_us")
            ]  # fmt: skip
    return results


def dead_worker(setting: Setting) -> list[Result]:
    """The longest wait, of a trainer that takes all it can get, and of one with steps."""
    results: list[Result] = []
    for step_s, what in ((0.0, "takes all it can get"), (STEP_S, f"has steps of {STEP_S:g} s")):
        ways = {way: functools.partial(_longest_wait, setting, way, step_s) for way in HOW}
        found = setting.alternate(**ways)
        results += (
            Result(
                row="dead_worker",
                what=f"kill -9 of one of two workers: a trainer that {what} waits at most, "
                f"{name}{BESIDE}",
                unit="s",
                less=True,
                ours=found[way],
                peer=found["once"],
                required=MOST_WAIT_S,
            )
            for way, name in NAMES.items()
        )
    return results


def _images(count: int) -> Any:
    """A tf.data.Dataset of so many of 150 KB, uint8 [224, 224, 3]."""
    import tensorflow as tf

    pixels = tf.constant(np.random.default_rng(0).integers(0, 256, (224, 224, 3), np.uint8))
    return tf.data.Dataset.range(count).map(lambda number: pixels + tf.cast(number, tf.uint8))


def _longest_wait(setting: Setting, way: str, step_s: float) -> float:
    """How long the trainer waits at most, from the kill on. Raises ForebayError if it ends."""
    with contextlib.ExitStack() as stack:
        given_up = ("--worker-timeout-ms", 60_000)  # of a worker that is silent; the default
        started = our_dispatcher(setting.directory("dead_worker"), 0, *given_up)
        dispatcher = stack.enter_context(started)
        workers = [stack.enter_context(our_worker(dispatcher)) for _ in range(2)]
        for worker in workers:
            worker.wait_until_ready()
        dataset_id = register_dataset(dispatcher.address, _images(100 * (KILL_AT + AFTERWARDS)))
        elements = stack.enter_context(read(dispatcher.address, dataset_id, **HOW[way]))
        for _ in itertools.islice(elements, KILL_AT):
            time.sleep(step_s)
        workers[0].kill()
        waits = []
        for _ in range(AFTERWARDS if not setting.quick else 100):
            begun = time.perf_counter()
            if next(elements, None) is None:
                raise ForebayError("the epoch ended before the worker was missed")
            waits.append(time.perf_counter() - begun)
            time.sleep(step_s)
    return max(waits)
