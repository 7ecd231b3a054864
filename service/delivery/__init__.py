"""Delivery policies: which subscription gets which of a task's blocks (base.py: the contract)."""

from __future__ import annotations

from .addressed import AddressedOutput, BundleRun
from .any_output import AnyOutput
from .base import (
    BundleForgotten,
    End,
    EndOfBundle,
    EndOfTask,
    EndPending,
    Listener,
    OutputCancelled,
    OutputReset,
    Part,
    Subscription,
    Superseded,
    TaskFailed,
    TaskOutput,
    TaskUnknown,
)
from .cached import MAX_TRAINERS, CachedOutput, Skips
from .memory import MemoryBudget
from .orders import ANY, Addressed, AnyBlock, Cached, Order, Rounds
from .rounds import RoundsOutput

__all__ = [
    "ANY",
    "MAX_TRAINERS",
    "Addressed",
    "AddressedOutput",
    "AnyBlock",
    "AnyOutput",
    "BundleForgotten",
    "BundleRun",
    "Cached",
    "CachedOutput",
    "End",
    "EndOfBundle",
    "EndOfTask",
    "EndPending",
    "Listener",
    "MemoryBudget",
    "Order",
    "OutputCancelled",
    "OutputReset",
    "Part",
    "Rounds",
    "RoundsOutput",
    "Skips",
    "Subscription",
    "Superseded",
    "TaskFailed",
    "TaskOutput",
    "TaskUnknown",
]
