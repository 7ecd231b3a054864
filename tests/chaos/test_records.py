"""What trainers write down survives them, and tells the next process where to go on."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from forebay.chaos import trainer
from forebay.chaos.records import (
    Got,
    Joined,
    Left,
    ReadToEnd,
    Record,
    Recorder,
    Started,
    read_records,
)
from forebay.chaos.trainer import NextEpoch, next_epoch

RECORDS: tuple[Record, ...] = (
    Started("trainer0.1"),
    Joined(1, 30),
    Got(1, 20, [4, 5], [5]),
    ReadToEnd(1),
)


def test_cut_at_every_byte(tmp_path: Path) -> None:
    """What was written whole counts, and the next process can go on."""
    path = tmp_path / "records"
    recorder = Recorder(path)
    stops = []
    for record in RECORDS:
        recorder.add(record)
        stops.append(path.stat().st_size)
    recorder.close()
    data = path.read_bytes()
    again = Started("trainer0.2")
    for cut in range(len(data) + 1):
        path.write_bytes(data[:cut])
        recorder = Recorder(path)
        recorder.add(again)
        recorder.close()
        whole = sum(stop - 1 <= cut for stop in stops)  # a newline is no news
        assert list(read_records(path)) == [*RECORDS[:whole], again]


@pytest.mark.parametrize(
    ("count", "expected"),
    [(0, NextEpoch(1)), (1, NextEpoch(1)), (2, NextEpoch(1, begun=True)),
     (3, NextEpoch(1, begun=True)), (4, NextEpoch(2))],
)  # fmt: skip
def test_where_a_trainer_goes_on(count: int, expected: NextEpoch) -> None:
    assert next_epoch(list(RECORDS[:count])) == expected


def test_it_goes_on_with_what_it_had_to_leave() -> None:
    preempted = Left(1)
    assert next_epoch([*RECORDS[:3], preempted]) == NextEpoch(1, begun=True)


def test_who_is_told_to_stop_heeds_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """As Python takes handlers away before it ends, what comes then would kill it."""
    before = signal.getsignal(signal.SIGUSR1)
    monkeypatch.setattr(trainer, "_reading", True)
    monkeypatch.setattr(trainer, "_told", set())
    try:
        trainer._leave(signal.SIGTERM, None)
        assert signal.getsignal(signal.SIGUSR1) is signal.SIG_IGN
        assert trainer._told == {signal.SIGTERM}
        monkeypatch.setattr(trainer, "_reading", False)
        with pytest.raises(SystemExit):
            trainer._leave(signal.SIGTERM, None)
    finally:
        signal.signal(signal.SIGUSR1, before)
