"""Forebay's own clients and workers: what trainers get, whoever is killed meanwhile."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf

from forebay import service
from forebay.journal.codec import decode
from forebay.service.errors import NotFound
from forebay.storage import open_storage

from .. import forks
from ..cluster import WorkerProcess
from ..standbys import status, wait_until
from ..stock import DispatcherProcess, slow

OFF, DYNAMIC = service.ShardingPolicy.OFF, service.ShardingPolicy.DYNAMIC


def numbers(dataset: Any) -> list[int]:
    return [int(x) for x in dataset]


def test_an_epoch_goes_on_while_a_worker_comes(tmp_path: Path) -> None:
    """It is no longer over because a worker has sent all of a short one."""
    with DispatcherProcess(tmp_path / "journal") as dispatcher, WorkerProcess(dispatcher.address):
        distribute = service.distribute(OFF, dispatcher.target)
        elements = iter(tf.data.Dataset.range(200).apply(distribute))
        got = [int(next(elements)) for _ in range(100)]
        with WorkerProcess(dispatcher.address):
            got += numbers(elements)
    assert Counter(got) == dict.fromkeys(range(200), 2)


@pytest.mark.usefixtures("workers")
class TestHealthy:
    @pytest.mark.parametrize(("drop", "sizes"), [(False, [8, 8, 8, 8, 8, 1]), (True, [8] * 5)])
    def test_batches_are_as_those_of_an_ordered_read(
        self, dispatcher: DispatcherProcess, drop: bool, sizes: list[int]
    ) -> None:
        elements = tf.data.Dataset.range(41).map(
            lambda n: {"n": tf.cast(n, tf.uint8), "text": tf.as_string(n), "some": tf.range(n % 3)}
        )
        dataset_id = service.register_dataset(dispatcher.target, elements)
        how: Any = {"batch_size": 8, "drop_remainder": drop}
        found, ordered = (
            [*service.read(dispatcher.target, dataset_id, **how, **one)]
            for one in ({"processing_mode": DYNAMIC, "delivery": "at_most_once"}, {"ordered": True})
        )
        assert [len(batch["n"]) for batch in found] == sizes
        seen = [int(n) for batch in found for n in batch["n"]]
        assert len({*seen}) == len(seen) and {*seen} <= {*range(41)}
        for one, other in zip(found, ordered, strict=True):
            for name in ("n", "text"):
                assert (one[name].dtype, one[name].shape) == (other[name].dtype, other[name].shape)
            assert [len(each) for each in one["some"]] == [n % 3 for n in one["n"]]
            assert {each.dtype for each in one["some"]} == {each.dtype for each in other["some"]}

    def test_a_second_dataset_under_one_job_name_is_refused(
        self, dispatcher: DispatcherProcess
    ) -> None:
        """Each of two trainers would have all elements, without a word."""
        target = dispatcher.target
        one, other = (
            service.register_dataset(target, tf.data.Dataset.range(count)) for count in (40, 41)
        )
        ways: list[dict[str, Any]] = [
            {"processing_mode": "distributed_epoch", "job_name": "dynamic"},
            {"ordered": True, "job_name": "ordered"},
            {"delivery": "at_least_once", "job_name": "claimed"},
        ]
        reads = [service.read(target, one, **how) for how in ways]
        for elements in reads:
            next(elements)
        program = (
            "from forebay import service\nfrom forebay.service.errors import FailedPrecondition\n"
            f"for how in {ways}:\n"
            f"    try: next(service.read({target!r}, {other!r}, **how))\n"
            "    except FailedPrecondition as error: print(error)"
        )
        said = forks.run(["-c", program], timeout_s=60).stdout.splitlines()
        both = re.compile(rf"dataset {one} \(fingerprint \w+\), .* dataset {other} \(\w+\)")
        assert [bool(both.search(line)) for line in said] == [True] * 3
        for elements in reads:
            next(elements)
            elements.close()

    def test_a_trainer_whose_elements_differ_cannot_share_the_job(
        self, dispatcher: DispatcherProcess
    ) -> None:
        distribute = service.distribute(DYNAMIC, dispatcher.target, job_name="of numbers")
        assert sorted(numbers(tf.data.Dataset.range(5).apply(distribute))) == list(range(5))
        texts = tf.data.Dataset.range(5).map(tf.strings.as_string).apply(distribute)
        with pytest.raises(tf.errors.InvalidArgumentError, match="another element_spec"):
            list(texts)


class TestKilled:
    """Each test has its own cluster. `slow` elements leave time to kill a process in mid-epoch."""

    SIZE = 400

    def start(
        self, dispatcher: DispatcherProcess, mode: service.ShardingPolicy = DYNAMIC
    ) -> Iterator[int]:
        dataset = slow(tf.data.Dataset.range(self.SIZE), 0.004)
        dataset_id = service.register_dataset(dispatcher.target, dataset)
        elements = service.read(dispatcher.target, dataset_id, processing_mode=mode)
        return (int(x) for x in elements)

    def test_a_worker_is_killed_that_reads_everything(self, tmp_path: Path) -> None:
        with (
            DispatcherProcess(tmp_path) as d,
            WorkerProcess(d.address),
            WorkerProcess(d.address) as w,
        ):
            got: Counter[int] = Counter()
            for x in self.start(d, service.ShardingPolicy.OFF):
                got[x] += 1
                if got.total() == self.SIZE // 4:
                    w.kill()
            assert got.keys() == {*range(self.SIZE)}, "the other worker has all"
            assert max(got.values()) <= 2, "once from each"

    def test_a_dispatcher_that_lost_its_state(self) -> None:
        with DispatcherProcess("memory:") as d, WorkerProcess(d.address) as w:
            assert sorted(self.start(d)) == list(range(self.SIZE))
            elements = self.start(d)
            next(elements)
            d.kill_and_restart()
            with pytest.raises(NotFound, match="lost its state"):
                list(elements)
            wait_until(lambda: w.address in {worker["address"] for worker in status(d)["workers"]})
            for _ in range(2):
                assert sorted(self.start(d)) == list(range(self.SIZE))

    @pytest.mark.long
    def test_a_dispatcher_that_was_paused_gives_nobody_up(self, tmp_path: Path) -> None:
        with (
            DispatcherProcess(tmp_path, worker_timeout_ms=2000, client_timeout_ms=2000) as d,
            WorkerProcess(d.address),
        ):
            elements = self.start(d)
            got = [next(elements)]
            with d.paused():
                time.sleep(3)  # longer than both timeouts: what is tested is that they do not count
            got += elements
            assert sorted(got) == list(range(self.SIZE))
        storage = open_storage(str(tmp_path))
        events = [decode(record.sequence, record.data) for record in storage.read(0)]
        assert not any(event.HasField("worker_lost") for event in events)
        storage.close()
