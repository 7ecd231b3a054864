"""The state machine: `decide` turns a command into events, `apply` changes the state by an event.

    command → decide(state, command) → events → journal → apply(state, event) → state

Both are synchronous and free of I/O. `decide` reads the state, changes nothing, and returns events
and the caller's answer. Most commands are idempotent: repeating them yields no event. Commands that
create something carry a request number; a retry gets the answer of the first event. `apply` accepts
every event that any version of this program decided, live and in replays. It raises on invalid
transitions (lifecycles.py).
"""

from __future__ import annotations

from typing import Any

from ...journal.proto import events_pb2 as ev
from ..errors import InvalidArgument
from . import (
    checksums,
    claims,
    consumers,
    datasets,
    iterations,
    jobs,
    lengths,
    lifecycles,
    ordered,
    rounds,
    save_streams,
    saves,
    schedules,
    skips,
    splits,
    tasks,
    terms,
    workers,
)
from .base import Command, Decide, Decision, Events
from .state import MAX_ANSWERS, Answer, State

TOPICS = (
    *(terms, datasets, jobs, iterations, consumers, workers, tasks, rounds, splits, skips),
    *(lengths, claims, ordered, checksums, schedules, saves, save_streams),
)
DECIDE: Decide = {command: how for topic in TOPICS for command, how in topic.DECIDE.items()}
EVENTS: Events = {name: kind for topic in TOPICS for name, kind in topic.EVENTS.items()}
KIND_OF_BODY = {
    getattr(ev, field.message_type.name): field.name
    for field in reversed(ev.Event.DESCRIPTOR.oneofs_by_name["event"].fields)
}
"""The kind of an event by the class of its body; of two kinds with one class, the earlier one."""


def decide(state: State, command: Command, now_ms: int) -> Decision:
    """Returns events and answer. Raises the errors of service/errors.py; then nothing happened."""
    if command.request is not None:
        caller, number = command.request
        last = state.answers.get(caller)
        if last is not None and number == last.number:
            return Decision([], _answer(ev.Event.FromString(last.event)))
        if last is not None and number < last.number:
            raise InvalidArgument(
                f"request {number} of caller {caller!r} comes after its request {last.number} "
                "was answered; number the requests of one caller upwards, one at a time"
            )
    bodies, answer = DECIDE[type(command)](state, command)
    events = [_event(body, now_ms) for body in bodies]
    if command.request is not None and events and _answer(events[-1]) is not None:
        events[-1].request.caller, events[-1].request.number = command.request
    return Decision(events, answer)


def _event(body: Any, now_ms: int) -> ev.Event:
    event = body if isinstance(body, ev.Event) else ev.Event(**{KIND_OF_BODY[type(body)]: body})
    event.time_ms = now_ms
    return event


def _answer(event: ev.Event) -> Any:
    """The answer that this event gives to its command; None if it answers nothing."""
    kind = event.WhichOneof("event")
    assert kind is not None
    answer = EVENTS[kind].answer
    return None if answer is None else answer(getattr(event, kind))


def apply(state: State, event: ev.Event) -> None:
    """Apply `event`, the next one of the journal, to `state`.

    Raises WrongTransition, before it changes anything, if the event is invalid in this state.
    """
    kind = event.WhichOneof("event")
    assert kind is not None, f"event {state.sequence + 1} is of no known kind"
    body = getattr(event, kind)
    lifecycles.check(state, kind, body)
    state.sequence += 1
    state.time_ms = event.time_ms
    state.recent.append((state.sequence, event))
    EVENTS[kind].apply(state, body)
    if event.HasField("request"):
        if kind == "consumer_joined":
            state.consumers[body.consumer_id].caller = event.request.caller
        answers = state.answers
        answers.pop(event.request.caller, None)
        answers[event.request.caller] = Answer(event.request.number, event.SerializeToString())
        if len(answers) > MAX_ANSWERS:
            del answers[next(iter(answers))]
