"""Workers and trainers are killed under DYNAMIC. Little is missing then, and `forebay audit` names
every split of which elements are."""

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
from forebay.service.cli.audit_shared import unordered
from forebay.storage import FileStorage

from ..cluster import WorkerProcess
from ..forks import Fork
from ..standbys import wait_until
from ..stock import DispatcherProcess

SPLITS = 250
OF_SPLIT = 10

TRAINER = """
import json, sys, time
from forebay import service

target, dataset_id, path, how = sys.argv[1:]
how = {"processing_mode": "distributed_epoch", **json.loads(how)}
with service.read(target, dataset_id, **how) as elements, open(path, "w", 1) as file:
    for element in elements:
        print(element.flat[0], file=file)
        time.sleep(0.002)
"""


def numbers(split: int) -> Iterator[int]:
    yield from range(split * OF_SPLIT, (split + 1) * OF_SPLIT)


class Trainer(Fork):
    """It takes about 500 elements a second, and writes down each."""

    def __init__(self, target: str, dataset_id: str, path: Path, **how: Any) -> None:
        self.path = path
        super().__init__(["-c", TRAINER, target, dataset_id, str(path), json.dumps(how)])

    def end(self) -> None:
        self.kill()
        self.finish()

    @property
    def seen(self) -> list[int]:
        whole = self.path.read_text().rpartition("\n")[0] if self.path.exists() else ""
        return [*map(int, whole.splitlines())]


def audit(journal: Path) -> dict[str, Any]:
    state, histories, _ = _replayed(FileStorage(journal))
    [history] = histories.jobs.values()
    return unordered(state, history)


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
    expected = {*range(SPLITS * OF_SPLIT)}
    trainers: list[Trainer] = []
    with (
        DispatcherProcess(tmp_path / "journal", reconnect_grace_ms=500) as dispatcher,
        WorkerProcess(dispatcher.address, drain_timeout_ms=100) as first,
        WorkerProcess(dispatcher.address),
    ):
        target = dispatcher.target
        if of_split > 1:
            dataset_id = service.register_dataset(target, numbers, splits=range(SPLITS))
        else:
            kilobytes = tf.data.Dataset.range(len(expected)).map(lambda n: tf.fill([500], n))
            dataset_id = service.register_dataset(target, kilobytes)
        with ExitStack() as stack:
            for number in range(1 + (ends == "trainer")):
                trainers.append(Trainer(target, dataset_id, tmp_path / f"{number}", **how))
                stack.callback(trainers[-1].end)
            wait_until(lambda: all(len(each.seen) >= 500 for each in trainers))
            if "trainer" in ends:
                trainers[0].kill()
            elif ends == "drain":
                assert first.stop() == 3
            else:
                first.kill()
            if ends == "only trainer":
                trainers.append(Trainer(target, dataset_id, tmp_path / "another", **how))
                stack.callback(trainers[-1].end)
            assert trainers[-1].finish(60) == 0
        assert dispatcher.stop() == 0
    seen = Counter(number for each in trainers for number in each.seen)
    missing = expected - seen.keys()
    affected = {number // of_split for number in missing}
    said = audit(tmp_path / "journal")
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
