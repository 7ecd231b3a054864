"""Trainers as processes write down what they are given, and are killed, as workers are: `forebay
audit` says of each batch what is true, and names every split of which elements are missing."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf

from forebay import service
from forebay.service.cli.audit import _replayed
from forebay.service.cli.audit_ordered import OrderedAnswers
from forebay.service.cli.audit_shared import unordered
from forebay.storage import FileStorage

from ..cluster import WorkerProcess
from ..forks import Fork
from ..standbys import status, wait_until
from ..stock import DispatcherProcess

SPLITS = range(40)
ORDER = {"seed": 5, "cycle_length": 4, "block_length": 2, "bundle_splits": 2}

TRAINER = """
import json, sys, time
from forebay import service
from forebay.service.client import heartbeats

heartbeats.HEARTBEAT_S = 0.3
target, dataset_id, order, way, index, consumers, most = sys.argv[1:]
how = {"ordered": True, **json.loads(order), "batch_size": 2, "job_name": way}
how |= {"consumer_index": int(index), "num_consumers": int(consumers)}

def train(batches):
    for number, batch in enumerate(batches):
        print(json.dumps(batch.tolist()), flush=True)
        time.sleep(0.02)
        if number + 1 == int(most):
            break

if way == "tf":
    train(service.from_dataset_id("parallel_epochs", target, dataset_id, **how).as_numpy_iterator())
else:
    with service.read(target, dataset_id, **how) as batches:
        train(batches)
"""


def numbers(split: int) -> Iterator[int]:
    for number in range(6):
        yield split * 6 + number


def audits(journal: Path) -> dict[str, OrderedAnswers]:
    """By job."""
    _, histories, _ = _replayed(FileStorage(journal))
    return {each.job.user_name: OrderedAnswers(each) for each in histories.jobs.values()}


def position_of_group(dispatcher: DispatcherProcess) -> int | None:
    """That has been reported."""
    jobs = status(dispatcher)["jobs"]
    found = [
        it["group"] for job in jobs if job["name"].endswith("group") for it in job["iterations"]
    ]
    return found[0][0]["position"] if found and found[0] else None


class Trainer(Fork):
    """A process, and the elements or batches that it has written down."""

    def __init__(self, program: str, path: Path, *arguments: object) -> None:
        self.path = path
        with path.open("w") as file:
            super().__init__(["-c", program, *map(str, arguments)], output=file.fileno())

    @property
    def seen(self) -> list[Any]:
        whole = self.path.read_text().rpartition("\n")[0]
        return [json.loads(line) for line in whole.splitlines()]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """The journal, and what trainers have seen: by job and consumer."""
    journal, seen = tmp_path_factory.mktemp("journal"), tmp_path_factory.mktemp("seen")
    with DispatcherProcess(journal) as dispatcher, WorkerProcess(dispatcher.address):
        dataset_id = service.register_dataset(dispatcher.target, numbers, splits=SPLITS)

        def trainer(way: str, index: int, consumers: int, most: int) -> Trainer:
            how = json.dumps(ORDER), way, index, consumers, most
            return Trainer(TRAINER, seen / f"{way}-{index}", dispatcher.target, dataset_id, *how)

        through = trainer("tf", 0, 1, 7)
        killed = trainer("group", 0, 2, 10_000)
        # Its first report; another one is journaled 4 s later.
        wait_until(lambda: bool(position_of_group(dispatcher)))
        left = trainer("group", 1, 2, 9)
        killed.kill()
        assert (left.finish(60), through.finish(60)) == (0, 0)
        assert dispatcher.stop() == 0
    return journal, {("group", 0): killed.seen, ("group", 1): left.seen, ("tf", 0): through.seen}


def test_what_is_given_was_seen(trained: tuple[Path, Any]) -> None:
    journal, seen = trained
    answers = audits(journal)
    said: dict[tuple[str, int], list[str]] = {each: [] for each in seen}
    for job in ("group", "tf"):
        for step in range(60 if job == "group" else 120):
            for batch in answers[job].step(step)["batches"]:
                who = job, batch["consumer"]
                said[who].append(batch["status"])
                mine = seen[who][step : step + 1]
                numbered = [bundle * 12 + index for bundle, index in batch["elements"]]
                assert not numbered or mine in ([], [numbered])
                assert not (mine and batch["status"] == "not yet")
    killed, left, through = said["group", 0], said["group", 1], said["tf", 0]
    count = killed.count("given")
    assert 0 < count <= len(seen["group", 0])
    assert killed == ["given"] * count + ["not known"] * (60 - count)
    assert left == ["given"] * 9 + ["not yet"] * 51
    taken = through.count("given")  # TensorFlow's pipeline is ahead of the loop
    assert taken >= 7 and through == ["given"] * taken + ["not yet"] * (120 - taken)
    far = answers["group"].step(100_000)  # in an epoch whose end is not known
    assert [batch["status"] for batch in far["batches"]] == ["not known", "not yet"]
    assert "not determined yet" in far["unknown"] and not far["batches"][0]["elements"]
    assert answers["tf"].step(100_000)["status"] == "not yet"


def test_an_element_has_its_step_and_its_consumer(trained: tuple[Path, Any]) -> None:
    journal, seen = trained
    for step, (number, _) in enumerate(seen["group", 1]):
        name = "{}:{}".format(*divmod(number, 12))
        (found,) = audits(journal)["group"].element(name, None)["found"]
        assert (found["step"], found["consumer"], found["status"]) == (step, 1, "given")


LEASED = 250
OF_SPLIT = 10

TAKER = """
import json, sys, time
from forebay import service

target, dataset_id, how = sys.argv[1:]
how = {"processing_mode": "distributed_epoch", **json.loads(how)}
with service.read(target, dataset_id, **how) as elements:
    for element in elements:
        print(element.flat[0], flush=True)
        time.sleep(0.002)
"""


def tens(split: int) -> Iterator[int]:
    yield from range(split * OF_SPLIT, (split + 1) * OF_SPLIT)


NAMED = {"job_name": "training"}


@pytest.mark.parametrize(
    ("ends", "how"),
    [
        ("worker", NAMED),
        ("worker", {}),
        ("worker of tf.data", NAMED),
        ("worker of tf.data", {}),
        ("drain", {**NAMED, "max_outstanding_requests": 8}),  # else all goes to the trainer
        ("trainer", NAMED),
        ("only trainer", NAMED),
    ],
)
def test_what_is_missing_is_named(ends: str, how: dict[str, Any], tmp_path: Path) -> None:
    of_split = OF_SPLIT if ends != "worker of tf.data" else 1
    expected = {*range(LEASED * OF_SPLIT)}
    trainers: list[Trainer] = []
    with (
        DispatcherProcess(tmp_path / "journal", reconnect_grace_ms=500) as dispatcher,
        WorkerProcess(dispatcher.address, drain_timeout_ms=100) as first,
        WorkerProcess(dispatcher.address),
    ):
        target = dispatcher.target
        if of_split > 1:
            dataset_id = service.register_dataset(target, tens, splits=range(LEASED))
        else:
            kilobytes = tf.data.Dataset.range(len(expected)).map(lambda n: tf.fill([500], n))
            dataset_id = service.register_dataset(target, kilobytes)
        with ExitStack() as stack:

            def takes(name: str) -> None:
                """About 500 elements a second."""
                path = tmp_path / name
                trainers.append(Trainer(TAKER, path, target, dataset_id, json.dumps(how)))
                stack.callback(trainers[-1].finish)
                stack.callback(trainers[-1].kill)

            for number in range(1 + (ends == "trainer")):
                takes(f"{number}")
            wait_until(lambda: all(len(each.seen) >= 500 for each in trainers))
            if "trainer" in ends:
                trainers[0].kill()
            elif ends == "drain":
                assert first.stop() == 3
            else:
                first.kill()
            if ends == "only trainer":
                takes("another")
            assert trainers[-1].finish(60) == 0
        assert dispatcher.stop() == 0
    seen = Counter(number for each in trainers for number in each.seen)
    missing = expected - seen.keys()
    affected = {number // of_split for number in missing}
    state, histories, _ = _replayed(FileStorage(tmp_path / "journal"))
    [history] = histories.jobs.values()
    said = unordered(state, history)
    named = {
        split
        for lost in said["lost"]
        if not lost["found"]
        for split in range(lost["splits"][0], lost["splits"][1] + 1)
    }
    assert seen.keys() <= expected and set(seen.values()) == {1}
    assert affected <= named and len(named) * of_split < len(expected) / 2
    assert 0 < len(missing) < len(expected) / 4
    assert not any(lost["mixed"] for lost in said["lost"]), "it tells which splits were taken"
    assert said["verdict"] == "held" and f"{len(named)} were lost" in said["promise"]
