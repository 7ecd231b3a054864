"""Delivery policies: which subscription gets which of a task's blocks (base.py: the contract)."""

from __future__ import annotations

from .base import (
    End,
    EndOfSlice,
    EndOfTask,
    EndPending,
    Listener,
    OutputCancelled,
    OutputReset,
    Subscription,
    Superseded,
    TaskFailed,
    TaskOutput,
    TaskUnknown,
)
from .bundles import BundleRun, BundlesOutput
from .cached import MAX_TRAINERS, CachedOutput, Skips
from .first_come import FirstComeOutput
from .memory import MemoryBudget
from .read_requests import ANY, AnyBlock, Cached, ReadRequest, Rounds, Slice
from .rounds import RoundsOutput

__all__ = [
    "ANY",
    "MAX_TRAINERS",
    "AnyBlock",
    "BundleRun",
    "BundlesOutput",
    "Cached",
    "CachedOutput",
    "End",
    "EndOfSlice",
    "EndOfTask",
    "EndPending",
    "FirstComeOutput",
    "Listener",
    "MemoryBudget",
    "OutputCancelled",
    "OutputReset",
    "ReadRequest",
    "Rounds",
    "RoundsOutput",
    "Skips",
    "Slice",
    "Subscription",
    "Superseded",
    "TaskFailed",
    "TaskOutput",
    "TaskUnknown",
]
