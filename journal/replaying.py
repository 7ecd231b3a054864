"""Replays a journal: reads the newest readable snapshot, then the events after it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, takewhile
from typing import Any

from ..storage import Corrupt, Missing, Record, Storage
from .codec import decode
from .proto.events_pb2 import Event
from .snapshots import decode_snapshot

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Replay:
    """The state to begin with, and the events after it."""

    state: Any  # as decode_state made it, as of snapshot_sequence; None: begin with nothing
    snapshot_sequence: int  # 0 without a snapshot
    events: Iterator[tuple[int, Event]]  # (sequence, event), from snapshot_sequence + 1 on


def replay(
    storage: Storage,
    at: int | None = None,
    decode_state: Callable[[int, bytes], Any] = lambda _, state: state,
) -> Replay:
    """Read a journal back, up to the event `at` (default: to its end).

    Skips a snapshot that is damaged, or for which `decode_state` raises ValueError, and logs
    it. An earlier snapshot then serves if the log still has the records after it. Raises Corrupt
    and NewerFormat, also while iterating, and Missing if the state as of `at` was trimmed.
    """
    wanted = [s for s in reversed(storage.snapshots()) if at is None or s <= at]
    unread = ""
    for sequence in wanted:
        try:
            snapshot = decode_snapshot(sequence, storage.read_snapshot(sequence))
            state = decode_state(sequence, snapshot.state)
        except (Corrupt, Missing, ValueError) as error:
            log.warning("snapshot %d is passed over: %s", sequence, error)
            unread = unread or f" (snapshot {sequence}: {error})"
            continue
        return Replay(state, sequence, _events(storage, sequence, at, bool(wanted), unread))
    return Replay(None, 0, _events(storage, 0, at, bool(wanted), unread))


def _events(
    storage: Storage, after: int, at: int | None, damaged: bool, unread: str
) -> Iterator[tuple[int, Event]]:
    """The events above `after`. Reads the first record at once, not when iterating.

    `damaged`: a snapshot exists, so the records must, too. `unread` names the unreadable snapshot.
    """
    try:
        records = storage.read(after)
        first = next(records, None)
    except Missing:
        begin = storage.first_sequence()
        if damaged or at is None:
            raise Corrupt(
                f"{storage.url}: the history begins at record {begin}, and no snapshot before it "
                f"can be read{unread}; restore the snapshots from a backup, or give the dispatcher "
                "another storage, on which workers and trainers begin anew when they are restarted"
            ) from None
        raise Missing(
            f"{storage.url}: the state as of {at} is gone: the history begins at record {begin}"
        ) from None
    found: Iterable[Record] = () if first is None else chain([first], records)
    if at is not None:
        found = takewhile(lambda record: record.sequence <= at, found)
    return ((sequence, decode(sequence, data)) for sequence, _, data in found)
