"""Rows `leases` and `get_split`: how many splits a second a dispatcher hands out, durably.

Ours are fsynced before they are answered; the peer's journal is flushed, and not fsynced.
"""

from __future__ import annotations

from collections.abc import Callable

from .calls import (
    CALLERS,
    Caller,
    begin_iteration,
    begin_tasks,
    get_splits,
    lease_splits,
    splits_per_second,
)
from .results import Better, Result
from .servers import Server, our_dispatcher, peer_dispatcher
from .setting import Setting

REQUIRED = {4: 0.8, 16: None, 64: 0.6}
"""Of GetSplit's rate, by the number of callers."""

QUICK = (4,)
LEASE = 1000
"""Splits a lease. A worker asks for as many as will keep it busy for a quarter of a second: this
many if it takes 4,000 a second."""


def leases(setting: Setting) -> list[Result]:
    """Leases of many splits, beside the peer's GetSplit."""
    directory = setting.directory("leases")
    with our_dispatcher(directory) as ours, peer_dispatcher(directory) as peer:

        def lease() -> float:
            with Caller(ours.address) as caller:
                tasks = begin_tasks(caller, CALLERS)
            arguments = [(task_id, LEASE) for task_id in tasks]
            return splits_per_second(ours.address, lease_splits, arguments, setting.seconds)

        figures = setting.alternate(peer=_get_split(peer, CALLERS, setting), ours=lease)
    return [
        Result(
            row="leases",
            what=f"splits in leases of {LEASE}, {CALLERS} callers",
            unit="splits/s",
            better=Better.MORE,
            ours=figures["ours"],
            peer=figures["peer"],
            required=100_000,
        )
    ]


def get_split(setting: Setting) -> list[Result]:
    """GetSplit, TensorFlow's own call, on both."""
    directory = setting.directory("get_split")
    with our_dispatcher(directory) as ours, peer_dispatcher(directory) as peer:
        figures = {
            callers: setting.alternate(
                peer=_get_split(peer, callers, setting), ours=_get_split(ours, callers, setting)
            )
            for callers in (QUICK if setting.quick else REQUIRED)
        }
    return [
        Result(
            row="get_split",
            what=f"GetSplit, {callers} callers",
            unit="splits/s",
            better=Better.MORE,
            ours=rates["ours"],
            peer=rates["peer"],
            required_ratio=REQUIRED[callers],
        )
        for callers, rates in figures.items()
    ]


def _get_split(dispatcher: Server, callers: int, setting: Setting) -> Callable[[], float]:
    with Caller(dispatcher.address) as caller:
        arguments = [(begin_iteration(caller),)] * callers
    return lambda: splits_per_second(dispatcher.address, get_splits, arguments, setting.seconds)
