"""Trainers as processes write down what they are given. One is killed, one leaves in order, and one
reads through TensorFlow: `forebay audit` says of each batch what is true."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from forebay import service
from forebay.service.cli.audit import _replayed
from forebay.service.cli.audit_ordered import OrderedAnswers
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
    """A process, and the batches that it has written down."""

    def __init__(self, way: str, index: int, consumers: int, most: int, *where: str) -> None:
        self.path = Path(where[-1]) / f"{way}-{index}"
        with self.path.open("w") as file:
            said = [*where[:-1], json.dumps(ORDER), way, str(index), str(consumers), str(most)]
            super().__init__(["-c", TRAINER, *said], output=file.fileno())

    @property
    def seen(self) -> list[list[int]]:
        whole = self.path.read_text().rpartition("\n")[0]
        return [json.loads(line) for line in whole.splitlines()]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """The journal, and what trainers have seen: by job and consumer."""
    journal, seen = tmp_path_factory.mktemp("journal"), tmp_path_factory.mktemp("seen")
    with DispatcherProcess(journal) as dispatcher, WorkerProcess(dispatcher.address):
        dataset_id = service.register_dataset(dispatcher.target, numbers, splits=SPLITS)
        where = dispatcher.target, dataset_id, str(seen)
        through = Trainer("tf", 0, 1, 7, *where)
        killed = Trainer("group", 0, 2, 10_000, *where)
        # Its first report; another one is journaled 4 s later.
        wait_until(lambda: bool(position_of_group(dispatcher)))
        left = Trainer("group", 1, 2, 9, *where)
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
