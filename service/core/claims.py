"""Claims: bundles that consumers read at least once.

A consumer claims bundles, reads each to its end, and reports how many of its elements its trainer
was given: the claim's *cursor*. If the consumer leaves or is given up, its claims return, and
others claim them from their cursors on. So what a dead trainer was given since its last report
comes again, and nothing is missing. The iteration finishes once all bundles are done.

Bundles are claimed by place: the client's arithmetic says which bundle of the epoch is at a place.
"""

from __future__ import annotations

from itertools import chain, islice
from typing import NamedTuple

from ...journal.proto import events_pb2 as ev
from .. import ranges
from ..errors import InvalidArgument
from .base import Bodies, Command, Decision, EventKind, find_consumer, require_one_of_each
from .state import Consumer, Iteration, State

MAX_CLAIMS = 1000
"""Of one consumer."""


class ClaimBundles(Command, frozen=True, kw_only=True):
    """→ (ClaimsMoved,) (BundlesClaimed,); with the last one done, IterationPaused and
    IterationFinished. Answers Claimed.

    A request may arrive again, or late: cursors only grow, and places that the consumer has not
    claimed are ignored.
    """

    consumer_id: int
    most: int  # claims that the consumer wants to have
    places: tuple[int, ...] = ()
    cursors: tuple[int, ...] = ()  # of each
    done: tuple[int, ...] = ()


class Claimed(NamedTuple):
    """A consumer's claims."""

    claims: dict[int, int]  # place → cursor
    unclaimed: int  # bundles that could be claimed


def _claim_bundles(state: State, command: ClaimBundles) -> Decision:
    consumer = find_consumer(state, command.consumer_id)
    iteration = state.iterations[consumer.iteration_id]
    if (of := iteration.claims) is None:
        raise InvalidArgument(
            f"consumer {consumer.consumer_id} claims bundles of iteration "
            f"{iteration.iteration_id}, which is not read at least once"
        )
    who = f"consumer {consumer.consumer_id}"
    require_one_of_each(who, "cursors", command.cursors, command.places)
    claims = dict(consumer.claims)
    reported = zip(command.places, command.cursors, strict=True)
    moved = {place: cursor for place, cursor in reported if cursor > claims.get(place, cursor)}
    claims |= moved
    done = [place for place in dict.fromkeys(command.done) if claims.pop(place, None) is not None]
    events: Bodies = []
    if moved or done:
        moved = {place: cursor for place, cursor in moved.items() if place in claims}
        event = ev.ClaimsMoved(
            consumer_id=consumer.consumer_id, places=moved.keys(), cursors=moved.values(), done=done
        )
        events.append(event)
    if new := _next(iteration, len(claims), min(command.most, MAX_CLAIMS)):
        events.append(ev.BundlesClaimed(consumer_id=consumer.consumer_id, places=new))
        claims |= {place: of.returned.get(place, 0) for place in new}
    if not iteration.finished and ranges.total(of.done) + len(done) == of.bundles:
        events.append(ev.IterationPaused(iteration_id=iteration.iteration_id))  # ends its tasks
        events.append(ev.IterationFinished(iteration_id=iteration.iteration_id))
    return Decision(events, Claimed(claims, of.unclaimed - len(new)))


def _next(iteration: Iteration, have: int, most: int) -> list[int]:
    """The places that a consumer with so many claims gets next.

    Up to half of its even share of those that are left, so that the last ones spread over all
    consumers, whatever their speed; who has claims gets none of the very last.
    """
    of = iteration.claims
    assert of is not None
    consumers = len(iteration.consumers)
    if have and of.unclaimed < consumers:
        return []
    count = min(most - have, -(-of.unclaimed // (2 * max(1, consumers))))
    waiting = chain(sorted(of.returned), range(of.next, of.bundles))
    return list(islice(waiting, max(0, count)))


def _bundles_claimed(state: State, event: ev.BundlesClaimed) -> None:
    consumer = state.consumers[event.consumer_id]
    of = state.iterations[consumer.iteration_id].claims
    assert of is not None
    for place in event.places:
        if place == of.next:
            of.next += 1
            consumer.claims[place] = 0
        else:
            consumer.claims[place] = of.returned.pop(place)


def _claims_moved(state: State, event: ev.ClaimsMoved) -> None:
    consumer = state.consumers[event.consumer_id]
    of = state.iterations[consumer.iteration_id].claims
    assert of is not None
    consumer.claims.update(zip(event.places, event.cursors, strict=True))
    for place in event.done:
        del consumer.claims[place]
        ranges.add(of.done, place, place + 1)


def returned(iteration: Iteration, consumer: Consumer) -> None:
    """The consumer left: others may claim what it had, from where its trainer was."""
    if iteration.claims is not None and consumer.claims:
        iteration.claims.returned.update(consumer.claims)
        iteration.version += 1


DECIDE = {ClaimBundles: _claim_bundles}
EVENTS = {
    "bundles_claimed": EventKind(_bundles_claimed, is_quiet=True),
    "claims_moved": EventKind(_claims_moved, is_quiet=True),
}
