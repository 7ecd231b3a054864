"""Places: the fixed list of workers that static sharding divides a dataset among.

A place is a configured address; its index in the list is its shard's number. `host:port` fits that
worker alone; `host` and `host:%port%` (or `host:%port_name%`) fit any worker of the host. A place
has at most one worker at a time. A worker that returns gets its last place back, unless another
worker has taken it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from ..errors import FailedPrecondition, NotFound, Unavailable
from .state import STATIC, Place, State

_URL = re.compile(r"(.*):([a-zA-Z0-9_]+|%port(?:_[a-zA-Z0-9_]+)?%)", re.DOTALL)


def place_of(state: State, address: str) -> int | None:
    """The current or last place of the worker at an address; None if it never had one."""
    return next((i for i, place in enumerate(state.places) if place.address == address), None)


def find_place(state: State, address: str, stock: bool) -> int | None:
    """The place for a worker that registers; None if the list is empty.

    Raises FailedPrecondition if no place fits its address. If other workers hold all fitting
    places, raises FailedPrecondition for TensorFlow's workers, and Unavailable for Forebay's: these
    retry, and a holder may be dead already.
    """
    if not state.places:
        return None
    fitting = [i for i, place in enumerate(state.places) if _fits(place.configured, address)]
    if not fitting:
        raise FailedPrecondition(
            f"{_failed(state.places, address)} The worker's address is not configured: start it "
            "with an address of the list, or the dispatcher with a list that has it"
        )
    holders = {i: state.places[i].address for i in fitting}
    free = [i for i in fitting if holders[i] == address or holders[i] not in state.worker_at]
    if not free:
        raise (FailedPrecondition if stock else Unavailable)(
            f"{_failed(state.places, address)} For each of its places other workers are already "
            f"running at the configured host: {', '.join(holders.values())}. A worker that was "
            "restarted finds its place at once if it has the address and port that it had"
        )
    # In order: its last place, a place for its exact address, a place that was never taken.
    return min(free, key=lambda i: (
        holders[i] != address, state.places[i].configured != address, holders[i] != "", i
    ))  # fmt: skip


def listed(state: State, addresses: Sequence[str]) -> list[Place]:
    """The places for this list of addresses. If the list has changed, the known workers take
    places in the order of their registration, exact addresses first."""
    if [place.configured for place in state.places] == list(addresses):
        return state.places
    places = [Place(address) for address in addresses]
    waiting = [worker.address for worker in state.workers.values()]
    for exact in (True, False):
        for address in list(waiting):
            for place in places:
                fits = place.configured == address if exact else _fits(place.configured, address)
                if fits and not place.address:
                    place.address = address
                    waiting.remove(address)
                    break
    return places


def require_list(state: State, sharding: int) -> None:
    """Raises NotFound for a statically sharded job without a list of workers."""
    if sharding in STATIC and not state.places:
        workers = ", ".join(worker.address for worker in state.workers.values()) or "that may come"
        raise NotFound(
            f"Failed to shard dataset in tf.data service: Worker {workers} is not in the workers "
            "list. The list is empty: start the dispatcher with the addresses of its workers "
            "(worker_addresses, or --workers)"
        )


def _fits(configured: str, address: str) -> bool:
    if configured == address:
        return True
    mine, theirs = _URL.fullmatch(configured), _URL.fullmatch(address)
    if theirs is None or (mine is not None and not mine[2].startswith("%")):
        return False
    return (configured if mine is None else mine[1]) == theirs[1]


def _failed(places: Iterable[Place], address: str) -> str:
    configured = ", ".join(place.configured for place in places)
    return (
        f"Failed to assign an index for worker {address}. Configured workers list: [{configured}]."
    )
