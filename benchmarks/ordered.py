"""Rows `ordered`: reads in order, and at least once, beside those that give elements at most once.

`ordered_images` and so on: two workers read files, and one or four trainers `read` elements one by
one. A split, and so a bundle, is a file. `dead_worker`: how long a trainer waits when one of two
workers gets kill -9.

Row `positions`: the time to a first element deep in a long epoch, whose bundles' lengths are known;
the size of a saved state; and the events of an epoch whose lengths nobody knew.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from ..journal.proto import events_pb2 as ev
from ..service import ShardingPolicy, read, register_dataset
from ..service.client.bundle_lengths import MAX_LENGTHS
from ..service.client.reader import OrderedIterator
from ..service.errors import ForebayError
from ..service.proto import forebay_pb2 as pb
from .calls import Caller
from .cluster import SIDES, BenchmarkCluster
from .contents import AT_LEAST_ONCE, AT_MOST_ONCE, FILE_CASES, ORDERED
from .results import Better, Finding, Reading, Result
from .servers import our_dispatcher, our_worker
from .setting import Setting

CASES = {"file_images": 0.8, "file_jpegs": 0.8, "file_tokens": 0.8, "file_records": 0.5}
LEAST = 0.9
WARM_UP_S = 4.0  # until the bundles that are open are filled
CONSUMERS = (1, 4)
WAYS = {"ordered": ORDERED, "least": AT_LEAST_ONCE, "once": AT_MOST_ONCE}

BUNDLES = 10_000
SPLITS_OF_BUNDLE = 12_500  # four fifths of which the filter keeps
POSITION = 10**7
FEW_BUNDLES = 1_000
FEW_SPLITS_OF_BUNDLE = 1_250
MOST_S = 1.0
MOST_STATE_BYTES = 300
MOST_EVENTS = 10_000
KEPT, OF = 4 * 2**30, 5 * 2**30
MIXER = 2_654_435_761

KILL_AT = 1_000  # elements after which a worker is killed
AFTERWARDS = 4_000  # elements that are taken then
STEP_S = 0.002
MOST_WAIT_S = 3.0


def positions(setting: Setting) -> list[Finding]:
    """Only our side: tf.data service has no such reads."""
    return list(_resume(setting))


# -- throughput -----------------------------------------------------------------------------------


def throughput(case: str, setting: Setting) -> list[Finding]:
    """Only our side, too."""
    FILE_CASES[case].content.write(setting.files, quick=setting.quick, forms=set())
    cluster = BenchmarkCluster(SIDES["ours"], setting, setting.directory("ordered"))
    warm_up_s = None if setting.quick else WARM_UP_S
    found: list[Finding] = []
    with contextlib.closing(cluster):
        cluster.grow(workers=2, readers=max(CONSUMERS))
        cluster.wait_until_ready()
        for consumers in CONSUMERS:
            sides = {
                way: functools.partial(
                    cluster.measure, case + suffix, consumers=consumers, warm_up_s=warm_up_s
                )
                for way, suffix in WAYS.items()
            }
            found += _compared(case, consumers, setting.alternate(**sides))
    return found


def _compared(case: str, consumers: int, readings: dict[str, list[Reading]]) -> Iterator[Finding]:
    for (way, name, ratio), (of, unit, better) in itertools.product(
        (("ordered", "in order", CASES[case]), ("least", "at least once", LEAST)),
        (
            ("elements_per_s", "elements/s", Better.MORE),
            ("cpu_us_per_element", "CPU µs an element", Better.LESS),
            ("client_cpu_us_per_element", "of it client, µs", Better.LESS),
        ),
    ):
        what = f"{FILE_CASES[case].what}, {consumers} consumer(s), 2 workers: {name}"
        required = ratio if better is Better.MORE else None
        ours, peer = ([getattr(each, of) for each in readings[by]] for by in (way, "once"))
        yield Result(
            row=case.replace("file", "ordered"),
            what=f"{what}; peer: Forebay, each element at most once",
            unit=unit,
            better=better,
            ours=ours,
            peer=peer,
            required_ratio=required,
        )


# -- a position in a long epoch -------------------------------------------------------------------


def filtered(bundles: int, bundle_splits: int) -> Any:
    """Numbers, of which a filter keeps four fifths, spread evenly and without a pattern."""
    import tensorflow as tf

    numbers = tf.data.Dataset.range(bundles * bundle_splits)
    return numbers.filter(lambda number: number * MIXER % OF < KEPT)


def lengths_of(bundles: int, bundle_splits: int) -> list[int]:
    """How many elements of each bundle the filter keeps."""
    return [
        int(np.count_nonzero(np.arange(first, first + bundle_splits) * MIXER % OF < KEPT))
        for first in range(0, bundles * bundle_splits, bundle_splits)
    ]


def _resume(setting: Setting) -> Iterator[Finding]:
    bundles = 100 if setting.quick else BUNDLES
    few = 10 if setting.quick else FEW_BUNDLES
    with _servers(setting) as (address, _):
        dataset_id = register_dataset(address, filtered(bundles, SPLITS_OF_BUNDLE))
        start = functools.partial(_first_element, address, dataset_id)
        start(0)  # the worker knows the dataset from here on
        lengths = lengths_of(bundles, SPLITS_OF_BUNDLE)
        total = sum(lengths)
        teach(address, dataset_id, SPLITS_OF_BUNDLE, lengths)
        starts = {
            "position 0": 0,
            f"position {min(POSITION, total // 10):,}": min(POSITION, total // 10),
            "half": total // 2,
            "the last element": total - 1,
        }
        found = setting.alternate(**{where: _asking(start, at) for where, at in starts.items()})
        for where, seconds in found.items():
            yield _less(
                f"first element of {total:,} in {bundles:,} bundles, from {where}", "s",
                seconds, MOST_S,
            )  # fmt: skip
        with _read(address, dataset_id, SPLITS_OF_BUNDLE, start_position=total // 2) as elements:
            next(elements)
            state = len(json.dumps(elements.state_dict()))
        yield _less("a saved state at half of it", "B", [state], MOST_STATE_BYTES)

        dataset_id = register_dataset(address, filtered(few, FEW_SPLITS_OF_BUNDLE))
        before = _events(address, dataset_id)
        with _read(address, dataset_id, FEW_SPLITS_OF_BUNDLE) as elements:
            count = sum(1 for _ in elements)
        events = _events(address, dataset_id) - before
        yield _less(f"journaled for {count:,} elements in {few:,} bundles, whose lengths nobody "
                    "knew", "events", [events], MOST_EVENTS)  # fmt: skip


def _asking(start: Callable[[int], float], position: int) -> Callable[[], float]:
    return lambda: start(position)


def _first_element(address: str, dataset_id: str, position: int) -> float:
    begun = time.perf_counter()
    how = {"start_position": position}
    with _read(address, dataset_id, SPLITS_OF_BUNDLE, **how) as elements:
        next(elements)
        return time.perf_counter() - begun


def _read(address: str, dataset_id: str, bundle_splits: int, **how: Any) -> OrderedIterator:
    elements = read(address, dataset_id, ordered=True, bundle_splits=bundle_splits, **how)
    assert isinstance(elements, OrderedIterator)
    return elements


def teach(address: str, dataset_id: str, bundle_splits: int, lengths: Sequence[int]) -> None:
    """Tell the dispatcher the bundles' lengths, as a consumer does that has read them."""
    order = ev.OrderSpec(cycle_length=16, block_length=1, bundle_splits=bundle_splits)
    job = pb.GetOrCreateJobRequest(dataset_id=dataset_id, sharding="OFF", order=order)
    member = ev.GroupMember(index=0, consumers=1, batch_size=1)
    with Caller(address) as caller:
        joined = caller.call(
            pb.JoinIterationRequest(job=job, member=member), pb.JoinIterationResponse
        )
        for first in range(0, len(lengths), MAX_LENGTHS):
            last = min(first + MAX_LENGTHS, len(lengths))
            caller.call(
                pb.ConsumerHeartbeatRequest(
                    consumer_id=joined.consumer_id,
                    bundles=range(first, last),
                    lengths=lengths[first:last],
                ),
                pb.ConsumerHeartbeatResponse,
            )
        caller.call(
            pb.LeaveIterationRequest(consumer_id=joined.consumer_id), pb.LeaveIterationResponse
        )


def _events(address: str, dataset_id: str) -> int:
    """How many events the journal has, with the one of the job that is made to ask for that."""
    request = pb.GetOrCreateJobRequest(dataset_id=dataset_id, sharding="OFF", job_name="asks")
    with Caller(address) as caller:
        return int(caller.call(request, pb.GetOrCreateJobResponse).journal.sequence)


# -- a worker that dies ---------------------------------------------------------------------------


def dead_worker(setting: Setting) -> list[Finding]:
    """Only our side, too."""
    findings: list[Finding] = []
    for step_s, what in ((0.0, "takes all it can get"), (STEP_S, f"has steps of {STEP_S:g} s")):
        found = setting.alternate(
            **{way: functools.partial(_longest_wait, setting, way, step_s) for way in WAYS}
        )
        findings += (
            Result(
                row="dead_worker",
                what=f"kill -9 of one of two workers: a trainer that {what} waits at most, {name}; "
                "peer: Forebay, each element at most once",
                unit="s",
                better=Better.LESS,
                ours=found[way],
                peer=found["once"],
                required=MOST_WAIT_S,
            )
            for way, name in (("ordered", "in order"), ("least", "at least once"))
        )
    return findings


def images(count: int) -> Any:
    """So many 150 KB images."""
    import tensorflow as tf

    pixels = tf.constant(np.random.default_rng(0).integers(0, 256, (224, 224, 3), np.uint8))
    return tf.data.Dataset.range(count).map(lambda number: pixels + tf.cast(number, tf.uint8))


def _longest_wait(setting: Setting, way: str, step_s: float) -> float:
    """How long the trainer waits at most, from the kill on. Raises ForebayError if it ends."""
    with _servers(setting) as (address, workers):
        dataset_id = register_dataset(address, images(100 * (KILL_AT + AFTERWARDS)))
        ways: dict[str, dict[str, Any]] = {
            "ordered": {"ordered": True, "bundle_splits": 1_000},
            "least": {"delivery": "at_least_once", "bundle_splits": 1_000},
            "once": {"processing_mode": ShardingPolicy.DYNAMIC},
        }
        with read(address, dataset_id, **ways[way]) as elements:
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


@contextlib.contextmanager
def _servers(setting: Setting) -> Iterator[tuple[str, list[Any]]]:
    """A dispatcher's address, and two workers."""
    with contextlib.ExitStack() as stack:
        given_up = ("--worker-timeout-ms", 60_000)  # of a worker that is silent; the default
        directory = setting.directory("ordered")
        dispatcher = stack.enter_context(our_dispatcher(directory, 0, *given_up))
        workers = [stack.enter_context(our_worker(dispatcher)) for _ in range(2)]
        for worker in workers:
            worker.wait_until_serving()
        yield dispatcher.address, workers


def _less(what: str, unit: str, figures: Sequence[float], most: float) -> Result:
    return Result(
        row="positions",
        what=what,
        unit=unit,
        better=Better.LESS,
        ours=list(map(float, figures)),
        required=most,
    )
