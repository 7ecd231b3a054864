"""Splits: leases of an iteration's sources to tasks.

A task requests splits of a source's current pass, and leases the next range. It gets as many splits
as it wants, up to half of its even share of the remaining ones. So the last splits spread over all
tasks, whatever their speed. The ledger records each split's state (ledger.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from msgspec.structs import asdict

from ...journal.proto import events_pb2 as ev
from ...journal.splits import grows, source_size
from ..errors import FailedPrecondition, InvalidArgument
from .base import (
    Bodies,
    Command,
    Decision,
    EventKind,
    find_iteration,
    find_running_task,
    itself,
    reserve_id,
)
from .ledger import Ledger, Offer
from .state import Iteration, Lease, State, Task, fields_of

DROPPED = "a trainer disconnected before it had taken their elements, or the worker stopped first"

MAX_NAMES = 1_000
"""The most splits with names in one lease."""


class GetSplit(Command, frozen=True, kw_only=True):
    """TensorFlow's GetSplit. → SplitsLeased of one split, or PassStarted.

    Answers the SplitsLeased event. At the end of the pass: a SplitsLeased without splits that names
    the source's current pass and is not journaled. None if no split has been found yet.
    """

    iteration_id: int
    pass_number: int
    source: int


class LeaseSplits(Command, frozen=True, kw_only=True):
    """What has become of a task's leases, and what it wants or returns.

    → LeaseBegun …, LeaseLost …, DeliveryReported. Then, with `want`: SplitsLeased or PassStarted;
    it answers as GetSplit does. With `returned`: LeaseReturned …, perhaps SplitsLeased. That
    answers None. But if a numbered request returns part of a lease, the answer is a new lease of
    the kept part; without a number, the kept part counts as begun.

    A command that says nothing of leases only asks whether the pass is over: → nothing. It answers
    a SplitsLeased without splits if it is, and None if splits remain or may be found.
    """

    task_id: int
    begun: tuple[int, ...] = ()  # leases that were begun, and whose elements are not tracked
    taken: tuple[int, ...] = ()  # leases whose elements trainers have all taken
    lost: tuple[int, ...] = ()  # leases with elements that were dropped
    dropped: int = 0  # elements, since the last report
    all_taken: bool = False  # trainers have taken all other elements of the begun splits
    returned: tuple[tuple[int, int], ...] = ()  # (lease id, count)
    source: int = 0
    pass_number: int = 0
    want: int = 0
    or_later: bool = False  # if that pass is over, lease from the current one


class FindSplits(Command, frozen=True, kw_only=True):
    """Report the splits of a growing source. → SplitsFound, unless all were known."""

    iteration_id: int
    source: int
    names: tuple[str, ...]  # in the order in which they get their numbers
    complete: bool


def _get_split(state: State, command: GetSplit) -> Decision:
    iteration = find_iteration(state, command.iteration_id)
    ledger = _find_ledger(iteration, command.source)
    _require_one_way(state, iteration, ledger, singly=True)
    offer = ledger.offer(ledger.size, command.pass_number)
    return _lease(state, offer, 1, iteration, command.source, None)


def _lease_splits(state: State, command: LeaseSplits) -> Decision:
    task = find_running_task(state, command.task_id)
    events = _reported(task, command)
    if command.returned and command.want > 0:
        raise InvalidArgument("a request that returns splits cannot want others; want 0")
    if command.returned:
        return _return(state, task, command, events)
    told = command.begun or command.taken or command.lost or command.dropped or command.all_taken
    if told and command.want <= 0:
        return Decision(events, None)
    iteration = state.iterations[task.iteration_id]
    ledger = _find_ledger(iteration, command.source)
    offer = ledger.offer(ledger.size_together, command.pass_number, command.or_later)
    if command.want <= 0:
        over = not (offer.total or offer.waits)
        return Decision([], ev.SplitsLeased(pass_number=offer.pass_number) if over else None)
    if ledger.leased_with is not None:
        raise InvalidArgument(
            f"split provider {command.source} is zipped with {ledger.leased_with}, and leased "
            "with it: ask for that one's splits"
        )
    _require_one_way(state, iteration, ledger, singly=False)
    share = -(-offer.total // (2 * max(1, iteration.running_tasks)))
    want = min(command.want, share)
    if ledger.names:
        want = min(want, MAX_NAMES)
    leased = _lease(state, offer, want, iteration, command.source, task)
    return Decision([*events, *leased.events], leased.answer)


def _return(state: State, task: Task, command: LeaseSplits, events: Bodies) -> Decision:
    told = {*command.begun, *command.taken, *command.lost}
    kept = []
    for lease_id, count in dict(command.returned).items():
        if lease_id not in task.leases or lease_id in told:
            continue
        lease = state.leases[lease_id]
        if not 0 < count <= lease.count:
            raise InvalidArgument(
                f"lease {lease_id} holds {lease.count} splits; {count} cannot be returned"
            )
        if count < lease.count and command.request is not None:
            events.append(all_returned(lease))
            kept.append(_leased_anew(state, lease, lease.count - count))
        else:
            events.append(ev.LeaseReturned(lease_id=lease_id, count=count))
    if len(kept) > 1:
        raise InvalidArgument(
            f"parts of {len(kept)} leases are returned, and one answer tells of one lease: return "
            "them one by one"
        )
    return Decision([*events, *kept], kept[0] if kept else None)


def _reported(task: Task, command: LeaseSplits) -> Bodies:
    left = dict.fromkeys(task.leases)

    def mine(lease_ids: tuple[int, ...]) -> list[int]:
        return [i for i in lease_ids if left.pop(i, True) is None]

    events: Bodies = [ev.LeaseBegun(lease_id=lease_id) for lease_id in mine(command.begun)]
    events += [ev.LeaseBegun(lease_id=lease_id, taken=True) for lease_id in mine(command.taken)]
    events += [ev.LeaseLost(lease_id=lease_id, reason=DROPPED) for lease_id in mine(command.lost)]
    if command.dropped or command.all_taken:
        reported = ev.DeliveryReported(
            task_id=task.task_id,
            dropped=command.dropped,
            reason=DROPPED if command.dropped else "",
            all_taken=command.all_taken,
        )
        events.append(reported)
    return events


def _lease(
    state: State, offer: Offer, want: int, iteration: Iteration, source: int, task: Task | None
) -> Decision:
    """Lease up to `want` of the offer to `task`, or, for GetSplit, to no task."""
    events: Bodies = []
    if offer.starts:
        started = ev.PassStarted(
            iteration_id=iteration.iteration_id, source=source, pass_number=offer.pass_number
        )
        events.append(started)
    count = min(want, offer.stop - offer.first)
    if count <= 0:
        none = None if offer.waits else ev.SplitsLeased(pass_number=offer.pass_number)
        return Decision(events, none)
    leased = ev.SplitsLeased(
        lease_id=0 if task is None else state.next_id,
        iteration_id=iteration.iteration_id,
        task_id=0 if task is None else task.task_id,
        source=source,
        pass_number=offer.pass_number,
        first=offer.first,
        count=count,
    )
    return Decision([*events, leased], leased)


def _leased_anew(state: State, lease: Lease, count: int) -> ev.SplitsLeased:
    """A new lease of the first splits of a returned lease."""
    again = asdict(lease) | {"lease_id": state.next_id, "count": count}
    return ev.SplitsLeased(**again)


def _find_splits(state: State, command: FindSplits) -> Decision:
    ledger = _find_ledger(find_iteration(state, command.iteration_id), command.source)
    known = set(ledger.names)
    names = [name for name in command.names if name not in known]
    if not ledger.grows or not (names or command.complete):
        return Decision([], None)
    asked = fields_of(command, "iteration_id", "source", "complete")
    return Decision([ev.SplitsFound(names=names, **asked)], None)


def _find_ledger(iteration: Iteration, source: int) -> Ledger:
    if not iteration.ledgers:
        raise FailedPrecondition(
            f"iteration {iteration.iteration_id} hands out no splits: its job is not sharded "
            "dynamically"
        )
    if not 0 <= source < len(iteration.ledgers):
        raise InvalidArgument(
            f"iteration {iteration.iteration_id} has {len(iteration.ledgers)} split providers; "
            f"there is no number {source}"
        )
    return iteration.ledgers[source]


def _require_one_way(state: State, iteration: Iteration, ledger: Ledger, *, singly: bool) -> None:
    """Our workers lease zipped sources together, TensorFlow's singly. Refuses a mix of the two."""
    known = iteration.leased_singly
    if ledger.is_zipped and known is not None and known != singly:
        job = state.jobs[iteration.job_id]
        raise FailedPrecondition(
            f"dataset {job.dataset_id} zips several sources, and iteration "
            f"{iteration.iteration_id} reads it on Forebay's workers and on tf.data service's own: "
            "together they would pair what does not belong together. Run workers of one kind"
        )


def all_returned(lease: Lease) -> ev.LeaseReturned:
    """The worker returns the whole lease: none of its elements was or will be seen."""
    return ev.LeaseReturned(lease_id=lease.lease_id, count=lease.count)


def lost_leases(state: State, task_ids: Iterable[int]) -> Iterator[ev.LeaseLost]:
    """LeaseLost for each lease of these tasks, whose progress is unknown."""
    for task_id in task_ids:
        for lease_id in state.tasks[task_id].leases:
            yield ev.LeaseLost(lease_id=lease_id)


def running_tasks(state: State, iteration_id: int) -> set[int]:
    """The tasks that may request splits, now or after a lost worker's return."""
    iteration = state.iterations.get(iteration_id)
    listed = [] if iteration is None else [state.tasks[i] for i in iteration.all_tasks]
    lost = (task for task in state.lost_tasks.values() if task.iteration_id == iteration_id)
    return {task.task_id for task in (*listed, *lost) if not task.completed}


def ledgers(sources: Sequence[ev.SplitSource]) -> list[Ledger]:
    """The ledgers of a new iteration."""
    kept = [Ledger(source_size(source), grows=grows(source)) for source in sources]
    for ledger, source in zip(kept, sources, strict=True):
        if source.HasField("leased_with"):
            ledger.leased_with = source.leased_with
            first = kept[source.leased_with]
            first.shared_size = min(first.size_together, ledger.size)
    return kept


def _splits_leased(state: State, event: ev.SplitsLeased) -> None:
    iteration = state.iterations[event.iteration_id]
    ledger = iteration.ledgers[event.source]
    if ledger.is_zipped:
        iteration.leased_singly = event.lease_id == 0
    first, stop = event.first, event.first + event.count
    ledger.lease(event.pass_number, first, stop)
    if event.lease_id == 0:  # from GetSplit: nobody will report its progress
        ledger.begin(event.pass_number, first, stop)
        return
    lease_id = reserve_id(state, event.lease_id)
    fields = fields_of(event, *Lease.__struct_fields__)  # as fast as can be: there are many
    state.leases[lease_id] = Lease(**fields)
    state.tasks[event.task_id].leases.append(lease_id)


def _lease_begun(state: State, event: ev.LeaseBegun) -> None:
    lease = _end_lease(state, event.lease_id)
    ledger_of(state, lease).begin(lease.pass_number, lease.first, lease.stop)


def _lease_returned(state: State, event: ev.LeaseReturned) -> None:
    lease = _end_lease(state, event.lease_id)
    kept = lease.stop - event.count
    ledger_of(state, lease).begin(lease.pass_number, lease.first, kept)
    ledger_of(state, lease).give_back(lease.pass_number, kept, lease.stop)


def _lease_lost(state: State, event: ev.LeaseLost) -> None:
    lease = _end_lease(state, event.lease_id)
    if not event.reason:  # else its worker has dropped elements, and has nothing to restore
        state.tasks[lease.task_id].lost.append(lease)
    ledger_of(state, lease).lose(lease.pass_number, lease.first, lease.stop)


def _nothing(state: State, event: ev.DeliveryReported) -> None:
    """The state needs no more than the leases that were lost (job_history.py has the rest)."""


def _end_lease(state: State, lease_id: int) -> Lease:
    lease = state.leases.pop(lease_id)
    state.tasks[lease.task_id].leases.remove(lease_id)
    return lease


def ledger_of(state: State, lease: Lease) -> Ledger:
    """The ledger of the lease's splits."""
    return state.iterations[lease.iteration_id].ledgers[lease.source]


def _pass_started(state: State, event: ev.PassStarted) -> None:
    state.iterations[event.iteration_id].ledgers[event.source].start(event.pass_number)


def _splits_found(state: State, event: ev.SplitsFound) -> None:
    ledger = state.iterations[event.iteration_id].ledgers[event.source]
    ledger.grow(event.names, event.complete)


DECIDE = {GetSplit: _get_split, LeaseSplits: _lease_splits, FindSplits: _find_splits}
EVENTS = {
    "splits_leased": EventKind(_splits_leased, answer=itself, is_quiet=True),
    "lease_begun": EventKind(_lease_begun, is_quiet=True),
    "lease_returned": EventKind(_lease_returned, is_quiet=True),
    "lease_lost": EventKind(_lease_lost),
    "delivery_reported": EventKind(_nothing, is_quiet=True),
    "pass_started": EventKind(_pass_started, is_quiet=True),
    "splits_found": EventKind(_splits_found, is_quiet=True),
}
