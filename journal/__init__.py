"""Event sourcing: events in an append-only journal, with snapshots, on any storage."""

from __future__ import annotations

from .codec import FORMAT, decode, encode
from .journal import Journal
from .replay import Replay, replay
from .snapshots import Retention, RetentionPlan, plan_retention
from .verify import Problem, Report, Stats, holds_anything, repair, stats, verify

__all__ = [
    "FORMAT",
    "Journal",
    "Problem",
    "Replay",
    "Report",
    "Retention",
    "RetentionPlan",
    "Stats",
    "decode",
    "encode",
    "holds_anything",
    "plan_retention",
    "repair",
    "replay",
    "stats",
    "verify",
]
