"""Terms: the election of a leader, also for a journal that is new or was repaired."""

from __future__ import annotations

import hashlib

from ...journal.codec import FORMAT
from ...journal.proto import events_pb2 as ev
from ...journal.reasons import REPAIRED
from . import tasks
from .base import Bodies, Command, Decision, EventKind
from .consumers import left
from .iterations import collected, over
from .places import listed
from .read_kinds import STATIC_READ, kind_of
from .saves import failed
from .splits import lost_leases
from .state import Place, State, fields_of

MAX_CUT_IDS = 10**12
"""An upper bound of the ids that a repair can cut off, even at the journal's beginning."""

_REPAIRED_SAVE = (
    f"{REPAIRED}, so nobody knows what belongs to the save: delete the directory, and save again"
)


class ElectLeader(Command, frozen=True, kw_only=True):
    """A dispatcher has taken over. → LeaderElected

    After a repair that cut events off: → LeaseLost …, ConsumerLeft …, WorkerLost …, the ends of
    coordinated reads (IterationPaused …, IterationCollected …), SaveFailed … first. All workers and
    consumers must restart, since they may know of lost events. A save's directory may hold what
    the journal lacks. No id that may have been used is used again.
    With a new list of workers: → ConsumerLeft …, IterationCollected … first, for the unfinished
    iterations that were divided among the old list.
    """

    term: int
    address: str
    version: str
    journal_id: str  # used if the journal has none yet
    position_key: bytes = b""  # likewise
    worker_addresses: tuple[str, ...] = ()  # for static sharding
    dashboard: str = ""


def _elect_leader(state: State, command: ElectLeader) -> Decision:
    journal_id = state.journal_id or command.journal_id
    elected = ev.LeaderElected(
        **fields_of(command, "term", "address", "version", "dashboard"),
        format=FORMAT,
        journal_id=journal_id,
        position_key=b"" if state.position_key else command.position_key,
        next_id=_first_id(state, journal_id) if state.cut or not state.journal_id else 0,
    )
    places = listed(state, command.worker_addresses)
    elected.places.extend(ev.Place(configured=p.configured, address=p.address) for p in places)
    events = _dismiss_members(state) if state.cut else []
    if places is not state.places:
        events += _end_static_reads(state, dismissed=state.cut)
    return Decision([*events, elected], elected)


def _dismiss_members(state: State) -> Bodies:
    """Events that dismiss all workers and consumers: they may know of events that were cut off."""
    ends = [
        iteration
        for iteration in state.iterations.values()
        if not kind_of(state.jobs[iteration.job_id]).tasks_complete and iteration.all_tasks
    ]
    return [
        *lost_leases(state, state.tasks),
        *(left(consumer_id, REPAIRED) for consumer_id in state.consumers),
        *(ev.WorkerLost(worker_id=i, reason=REPAIRED, for_good=True) for i in state.workers),
        *map(over, ends),
        *(failed(save, "DATA_LOSS", _REPAIRED_SAVE) for save in state.saves.values()),
    ]


def _end_static_reads(state: State, dismissed: bool) -> Bodies:
    """Events that end the statically sharded iterations of an outdated list of workers."""
    events: Bodies = []
    for iteration in state.iterations.values():
        if kind_of(state.jobs[iteration.job_id]) is STATIC_READ and not iteration.finished:
            if not dismissed:
                reason = "the dispatcher has another list of workers"
                events += [left(i, reason) for i in sorted(iteration.consumers)]
            events += collected(state, iteration)
    return events


def _first_id(state: State, journal_id: str) -> int:
    """A first id that depends on the journal, so that ids of another journal are unknown here."""
    digest = hashlib.sha256(journal_id.encode()).hexdigest()
    begin = 1000 * (1 + int(digest[:8], 16) % 10**6)
    return max(begin, state.next_id + MAX_CUT_IDS if state.journal_id else 0)


def _leader_elected(state: State, event: ev.LeaderElected) -> None:
    other = event.journal_id != state.journal_id
    if other:
        state.born_ms = state.time_ms
        if event.after_repair:
            state.predecessors.append(state.journal_id)
            tasks.forget_lost(state, lambda _: True)
    state.cut = other and event.after_repair
    state.places = [Place(place.configured, place.address) for place in event.places]
    state.next_id = max(state.next_id, event.next_id)
    state.term = event.term
    state.leader = event.address
    state.dashboard = event.dashboard
    state.journal_id = event.journal_id
    state.position_key = event.position_key or state.position_key


DECIDE = {ElectLeader: _elect_leader}
EVENTS = {"leader_elected": EventKind(_leader_elected)}
