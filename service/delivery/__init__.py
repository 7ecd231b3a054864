"""Delivery policies: which of a task's blocks go to whom (base.py is the contract)."""

from __future__ import annotations

from .addressed import AddressedOutput, BundleRun
from .any_output import AnyOutput
from .base import (
    BundleForgotten,
    End,
    EndOfBundle,
    EndOfTask,
    Listener,
    OutputCancelled,
    Part,
    Subscription,
    Superseded,
    TaskFailed,
    TaskOutput,
    TaskUnknown,
)
from .orders import ANY, Addressed, AnyBlock, Order, Rounds
from .rounds import RoundsOutput

__all__ = [
    "ANY",
    "Addressed",
    "AddressedOutput",
    "AnyBlock",
    "AnyOutput",
    "BundleForgotten",
    "BundleRun",
    "End",
    "EndOfBundle",
    "EndOfTask",
    "Listener",
    "Order",
    "OutputCancelled",
    "Part",
    "Rounds",
    "RoundsOutput",
    "Subscription",
    "Superseded",
    "TaskFailed",
    "TaskOutput",
    "TaskUnknown",
]
