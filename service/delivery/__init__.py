"""Delivery policies: which of a task's blocks go to whom (base.py is the contract)."""

from __future__ import annotations

from .addressed import AddressedOutput, BundleRun
from .any_output import AnyOutput
from .base import (
    BundleForgotten,
    End,
    EndOfBundle,
    EndOfTask,
    HeldByOthers,
    Listener,
    OutputCancelled,
    Part,
    Subscription,
    Superseded,
    TaskFailed,
    TaskOutput,
    TaskUnknown,
)
from .cached import MAX_TRAINERS, CachedOutput, Skips
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
    "HeldByOthers",
    "Listener",
    "Order",
    "OutputCancelled",
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
