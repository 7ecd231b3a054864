"""The base of the core's topics: commands, decisions, and lookups in the state.

A topic holds its commands with their decide functions, and its kinds of events with their apply
functions. Topics import this file and each other, in one direction; machine.py lists them (TOPICS),
and puts them together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from msgspec import Struct

from ..errors import InvalidArgument, NotFound, Unavailable
from .state import Consumer, Dataset, EndedSave, Iteration, Save, State, Task

Numbered = tuple[str, int] | None
"""A caller and the number of its request, by which a retry is known; None: not numbered."""


class Command(Struct, frozen=True, kw_only=True):
    """A request to the state machine.

    It carries everything that a decision depends on besides the state. The state recognises a
    retry by `request` (caller, number).
    """

    request: Numbered = None


Bodies = list[Any]
"""Events without their envelope, such as ev.LeaseBegun; `machine.decide` puts them in an ev.Event.
Where two kinds of events have one class of bodies, the later kind (mixture_registered, job_forked)
must be given as a whole ev.Event."""


class Decision(NamedTuple):
    """Events to journal and apply, in order, and the answer to the command.

    The last event answers a retry of a numbered command. `events` are bodies in a topic's
    decision, and ev.Event in that of `machine.decide`.
    """

    events: Bodies
    answer: Any


Decide = dict[type[Command], Callable[[State, Any], Decision]]
"""A topic's decide functions, by command. They read the state and change nothing. They may raise
the errors of service/errors.py; then nothing has happened."""


class EventKind(NamedTuple):
    """Everything about a kind of events except its transitions (lifecycles.py)."""

    apply: Callable[[State, Any], None]
    """Changes the state and decides nothing: decide has already refused whatever could fail."""
    answer: Callable[[Any], Any] | None = None
    """The answer that the event gives to its command, also to a retry; by default it gives none."""
    is_quiet: bool = False
    """Whether the event does not wake those who wait for a change of the state."""


Events = dict[str, EventKind]
"""A topic's events, by their names in events.proto."""


def itself(body: Any) -> Any:
    """For events that are the answer."""
    return body


class Ids:
    """New ids for the events of one decision."""

    def __init__(self, state: State) -> None:
        self._next = state.next_id

    def new(self) -> int:
        self._next += 1
        return self._next - 1


def reserve_id(state: State, number: int) -> int:
    """Mark this id as used by an event, so that no later event gets it."""
    state.next_id = max(state.next_id, number + 1)
    return number


def find_dataset(state: State, dataset_id: str) -> Dataset:
    """Raises NotFound."""
    if (dataset := state.datasets.get(dataset_id)) is None:
        raise NotFound(
            f"Dataset id {dataset_id} not found: it was removed, or never registered with this "
            "dispatcher; register it first"
        )
    return dataset


def find_consumer(state: State, consumer_id: int) -> Consumer:
    """Raises NotFound."""
    if (consumer := state.consumers.get(consumer_id)) is None:
        raise NotFound(
            f"Consumer id {consumer_id} not found: it left, or was given up; read the dataset again"
        )
    return consumer


def find_iteration(state: State, iteration_id: int) -> Iteration:
    """Raises NotFound."""
    if (iteration := state.iterations.get(iteration_id)) is None:
        raise NotFound(
            f"Iteration id {iteration_id} not found: it was collected, or this dispatcher lost its "
            "state; read the dataset again"
        )
    return iteration


def find_task(state: State, task_id: int) -> Task | None:
    """Raises Unavailable for a running task whose worker was presumed dead and may return."""
    task = state.tasks.get(task_id) or state.lost_tasks.get(task_id)
    if task is not None and task.orphan is not None and not task.completed:
        raise Unavailable(
            f"the worker of task {task_id} was given up after too long a silence; it goes on "
            "once the worker has registered again"
        )
    return task


def find_running_task(state: State, task_id: int) -> Task:
    """Raises NotFound, and Unavailable as `find_task` does."""
    if (task := find_task(state, task_id)) is None or task.completed:
        raise NotFound(f"Task {task_id} not found: it has ended, or its worker was lost")
    return task


def require_one_of_each(who: str, what: str, values: Sequence[int], bundles: Sequence[int]) -> None:
    """Raises InvalidArgument if a report on bundles has not one value of each."""
    if len(values) != len(bundles):
        raise InvalidArgument(
            f"{who} reports {len(values)} {what} of {len(bundles)} bundles; report one of each"
        )


def find_save(state: State, path: str) -> Save | EndedSave:
    """The save at the path, running or remembered. Raises NotFound."""
    if (save_id := state.save_at.get(path)) is None:
        raise NotFound(f"the dispatcher does not know of a save at {path!r}")
    return state.saves.get(save_id) or state.ended_saves[save_id]
