"""The events that the dashboard shows: quiet ones are counted, in runs, over the whole journal."""

from __future__ import annotations

from typing import Any

import pytest

from forebay.journal.codec import encode
from forebay.journal.proto import events_pb2 as ev
from forebay.service.dispatcher import journal_reader
from forebay.service.dispatcher.journal_reader import StorageReader
from forebay.storage.memory import MemoryStorage

LOUD = {5, 6, 30}


def test_runs_of_quiet_events_are_counted_and_loud_ones_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    storage = MemoryStorage()
    begun = ev.Event(time_ms=1, lease_begun=ev.LeaseBegun(lease_id=3))
    leased = ev.Event(time_ms=1, splits_leased=ev.SplitsLeased(lease_id=3))
    lost = ev.Event(time_ms=1, worker_lost=ev.WorkerLost(worker_id=7))
    events = [lost if n in LOUD else begun if n % 3 else leased for n in range(1, 41)]
    storage.open_writer("a test").append([encode(event) for event in events])
    monkeypatch.setattr(journal_reader, "_WINDOW", 7)  # so that runs lie across windows
    reader = StorageReader(storage)

    def asked(**how: Any) -> list[dict[str, Any]]:
        return reader.events(**how)["events"]

    whole = asked(folds=True)
    assert [(one["sequence"], one.get("to")) for one in whole] == [
        (31, 40), (30, None), (7, 29), (6, None), (5, None), (1, 4)
    ]  # fmt: skip
    assert whole[0]["quiet"] == {"LeaseBegun": 7, "SplitsLeased": 3}
    assert sum(sum(one["quiet"].values()) for one in whole if "quiet" in one) == 40 - len(LOUD)
    # A run may be looked into, and a short answer goes on where it ended.
    assert [one["sequence"] for one in asked(before=30)] == [*range(29, 0, -1)]
    monkeypatch.setattr(journal_reader, "MOST_EVENTS", 2)
    found = reader.events(folds=True)
    begin: int = found["before"]
    rest: list[dict[str, Any]] = found["events"]
    while begin > 1:
        found = reader.events(folds=True, before=begin)
        begin, rest = found["before"], rest + found["events"]
    assert {one["sequence"] for one in rest if "name" in one} == LOUD
    assert sum(sum(one["quiet"].values()) for one in rest if "quiet" in one) == 40 - len(LOUD)
