"""`forebay journal show` of a damaged journal: what comes before the damage, each event once."""

from __future__ import annotations

from pathlib import Path

import pytest

from forebay.journal.codec import encode
from forebay.journal.proto import events_pb2 as ev
from forebay.service.cli.journal import _last_events
from forebay.storage import Corrupt, FileStorage


@pytest.mark.parametrize("damaged", [1, 4, -1])
@pytest.mark.parametrize("limit", [0, 3, 50])
def test_each_event_before_the_damage_is_shown_once(
    tmp_path: Path, damaged: int, limit: int
) -> None:
    storage = FileStorage(tmp_path, segment_bytes=100)
    writer = storage.open_writer("the test")
    for number in range(20):
        writer.append([encode(ev.Event(leader_elected=ev.LeaderElected(term=number + 1)))])
    writer.close()
    segments = sorted((tmp_path / "segments").iterdir())
    assert len(segments) > 5
    first = int(segments[damaged].stem)  # of the damaged segment
    data = bytearray(segments[damaged].read_bytes())
    data[20] ^= 1
    segments[damaged].write_bytes(data)
    shown = []
    damage_is_told = False
    try:
        for sequence, _ in _last_events(FileStorage(tmp_path, segment_bytes=100), limit):
            shown.append(sequence)
    except Corrupt as error:
        damage_is_told = str(segments[damaged]) in str(error)
    assert shown == sorted(set(shown))
    if limit == 3 and damaged != -1:  # the last ones are readable
        assert shown == [18, 19, 20]
    else:
        assert damage_is_told and shown == [*range(1, first)][-limit if limit else 0 :]
