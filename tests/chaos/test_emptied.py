"""What a dispatcher decides on an empty storage shows, and the fault is for local files only."""

from __future__ import annotations

import pathlib

import pytest

from forebay.chaos.cluster import Options
from forebay.chaos.members import TRAINERS
from forebay.chaos.report import decided
from forebay.journal.proto import events_pb2 as ev
from forebay.storage import open_storage


def test_only_an_election_is_nobodys_beginning(tmp_path: pathlib.Path) -> None:
    storage = open_storage(str(tmp_path))
    writer = storage.open_writer("test")
    writer.append([ev.Event(leader_elected=ev.LeaderElected(term=1)).SerializeToString()])
    assert decided(tmp_path) == []
    writer.append([ev.Event(worker_registered=ev.WorkerRegistered()).SerializeToString()])
    assert decided(tmp_path) == ["worker_registered"]
    writer.close()
    storage.close()


@pytest.mark.parametrize(
    ("storage", "own"),
    [
        *(("files", {"storage"}), ("redis", {"redis"}), ("postgres", {"postgres"})),
        ("/mnt/journal", set()),
    ],
)
def test_whose_storage_is_emptied(storage: str, own: set[str]) -> None:
    options = Options(
        seed=1, duration_s=1.0, kill_every_s=1.0, storage=storage,
        dispatchers=1, workers=1, trainers=1, elements=1,
    )  # fmt: skip
    everywhere = {"dispatcher", "worker", *TRAINERS}
    assert options.members.keys() - everywhere == own
