"""Recovery: replay a journal into a state."""

from __future__ import annotations

from ...journal.proto import events_pb2 as ev
from ...journal.replaying import replay
from ...storage import Corrupt, Storage
from ..core.encoding import decode_state
from ..core.lifecycles import WrongTransition
from ..core.machine import apply
from ..core.state import State


def recover(storage: Storage, at: int | None = None) -> tuple[State, int]:
    """The state as of event `at` (default: the last one), and how many events were replayed."""
    recovered = replay(storage, at, _state_of_snapshot)
    state = State() if recovered.state is None else recovered.state
    events = 0
    for sequence, event in recovered.events:
        apply_journaled(state, sequence, event)
        events += 1
    return state, events


def _state_of_snapshot(sequence: int, data: bytes) -> State:
    state = decode_state(data)
    if state.sequence != sequence:
        raise ValueError(f"it holds the state as of event {state.sequence}")
    return state


def apply_journaled(state: State, sequence: int, event: ev.Event) -> None:
    """Apply a journaled event; raises Corrupt if it is invalid in this state."""
    try:
        apply(state, event)
    except (WrongTransition, LookupError, ValueError, AssertionError) as error:
        raise Corrupt(
            f"record {sequence} is whole, and cannot follow what came before it: {error!r}. "
            "Another program wrote it, or Forebay has a bug, which please report: begin with the "
            "version that wrote it, or restore the storage from a backup"
        ) from error
