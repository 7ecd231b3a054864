"""From a storage to events: the newest snapshot that can be read, and what came after it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any

from ..storage import Corrupt, Missing, Record, Storage
from .codec import decode
from .proto.events_pb2 import Event
from .snapshots import decode_snapshot

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Replay:
    """Where to begin, and the events from there on."""

    state: Any  # as decode_state made it, as of snapshot_sequence; None: begin with nothing
    snapshot_sequence: int  # 0 without a snapshot
    events: Iterator[tuple[int, Event]]  # (sequence, event), from snapshot_sequence + 1 on


def replay(
    storage: Storage,
    at: int | None = None,
    decode_state: Callable[[int, bytes], Any] = lambda _, state: state,
) -> Replay:
    """Read a journal back, up to the event `at` (default: to its end).

    A snapshot that is damaged, or that `decode_state` raises ValueError for, is passed over,
    with a log line, if the history behind an earlier one is still there. Raises Corrupt and
    NewerFormat, while iterating as well, and Missing when the state as of `at` cannot be had
    any more.
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
    """The events above `after`. The first record is looked for at once, not when iterating.

    `damaged`: there should be some, as a snapshot is kept; `unread` says which one was no use.
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
    return _decode([] if first is None else chain([first], records), at)


def _decode(records: list[Record] | chain[Record], at: int | None) -> Iterator[tuple[int, Event]]:
    for sequence, _, data in records:
        if at is not None and sequence > at:
            return
        yield sequence, decode(sequence, data)
