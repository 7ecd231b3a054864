"""Snapshots of the dispatcher's state: their encoding, and the retention of them and the log."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from google.protobuf.message import DecodeError

from ..storage import Corrupt, NewerFormat
from .codec import FORMAT
from .proto.events_pb2 import Snapshot

_HOUR_MS = 3_600_000


def encode_snapshot(state: bytes, time_ms: int) -> bytes:
    """Encode a snapshot of the state, for a storage to keep."""
    return Snapshot(format=FORMAT, time_ms=time_ms, state=state).SerializeToString()


def decode_snapshot(sequence: int, data: bytes) -> Snapshot:
    """Decode the snapshot at `sequence`. Raises NewerFormat, Corrupt."""
    try:
        snapshot = Snapshot.FromString(data)
    except DecodeError as error:
        raise Corrupt(f"snapshot {sequence} holds no state: {error}") from None
    if snapshot.format > FORMAT:
        raise NewerFormat(
            f"snapshot {sequence} has format {snapshot.format}, newer than {FORMAT}, the newest "
            "that this version knows; upgrade Forebay"
        )
    return snapshot


@dataclass(frozen=True, slots=True)
class Retention:
    """How long to keep history, for audit and rewind; infinity keeps all of it."""

    hours: float

    def __post_init__(self) -> None:
        if not self.hours >= 0:
            raise ValueError(f"history cannot be kept for {self.hours} hours; give 0 or more")


class RetentionPlan(NamedTuple):
    """What may be deleted: these snapshots, and the records before this sequence (1: none)."""

    delete: list[int]
    trim_before: int


def plan_retention(
    snapshots: Sequence[tuple[int, int]], now_ms: int, retention: Retention
) -> RetentionPlan:
    """Plan what to delete, given the undamaged snapshots as (sequence, time in ms), ascending.

    The newest two snapshots stay, and all history after the older one, in case the newest is
    damaged. Of the others, the first one of each hour stays. The history begins at the newest
    snapshot that is older than the retention.
    """
    if len(snapshots) < 2:
        return RetentionPlan([], 1)
    oldest_ms = now_ms - retention.hours * _HOUR_MS
    expired = [sequence for sequence, time_ms in snapshots if time_ms <= oldest_ms]
    newest = [sequence for sequence, _ in snapshots[-2:]]
    start = min(expired[-1], newest[0]) if expired else 0
    keep = {start, *newest}
    hours = set()
    for sequence, time_ms in snapshots:
        hour = time_ms // _HOUR_MS
        if sequence >= start and hour not in hours:
            hours.add(hour)
            keep.add(sequence)
    delete = [sequence for sequence, _ in snapshots if sequence not in keep]
    return RetentionPlan(delete, start + 1)
