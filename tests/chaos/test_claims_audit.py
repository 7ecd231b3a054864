"""The audit of reads at least once can fail: it finds each broken promise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from forebay.chaos.claims_audit import check_claims
from forebay.chaos.history import read_history
from forebay.chaos.records import Got, Joined, Left, ReadToEnd, Record, Started
from forebay.chaos.trainer import BUNDLE_SPLITS, CLAIMED, CLAIMS_JOB
from forebay.journal.proto import events_pb2 as ev
from forebay.journal.reasons import GOODBYE, SILENT
from forebay.service.core import commands as c
from forebay.service.core.machine import apply, decide
from forebay.service.core.state import State

ELEMENTS = 2 * BUNDLE_SPLITS


def begin() -> tuple[list[ev.Event], list[int], int]:
    """The events of a job with two consumers, their ids, and the iteration's."""
    state, made = State(), list[ev.Event]()

    def do(command: c.Command) -> Any:
        events, answer = decide(state, command, 1000)
        for event in events:
            apply(state, event)
            made.append(event)
        return answer

    do(c.ElectLeader(term=1, address="d:1", version="0", journal_id="j"))
    definition = ev.DatasetDefinition(sources=[ev.SplitSource(count=ELEMENTS)])
    dataset = do(c.RegisterDataset(dataset_id="", definition=definition))
    job = do(c.GetOrCreateJob(dataset_id=dataset, name=CLAIMS_JOB, sharding=ev.OFF, order=CLAIMED))
    joined = [do(c.JoinIteration(job_id=job, epoch=1)) for _ in range(2)]
    return made, [each.consumer_id for each in joined], joined[0].iteration_id


BEGINNING, (FIRST, SECOND), ITERATION = begin()


class Run:
    """The first trainer was killed in bundle 0, when it had reported 5 of 7 elements; the second
    one read the rest."""

    def __init__(self) -> None:
        self.why = SILENT
        self.reported = 5
        self.finished = True
        self.first: list[Record] = [Started("claimer0.1"), Joined(1, FIRST), Got(1, 0, [*range(7)])]
        self.second = [*range(5, ELEMENTS)]

    def events(self) -> list[ev.Event]:
        def claimed(consumer: int, *places: int) -> ev.Event:
            return ev.Event(bundles_claimed=ev.BundlesClaimed(consumer_id=consumer, places=places))

        def moved(consumer: int, cursor: int, *done: int) -> ev.Event:
            return ev.Event(claims_moved=ev.ClaimsMoved(
                consumer_id=consumer, places=[0] if cursor else [],
                cursors=[cursor] if cursor else [], done=done))  # fmt: skip

        found = [
            *BEGINNING,
            claimed(FIRST, 0),
            claimed(SECOND, 1),
            moved(FIRST, self.reported),
            ev.Event(consumer_left=ev.ConsumerLeft(consumer_id=FIRST, reason=self.why)),
            claimed(SECOND, 0),
            moved(SECOND, 0, 0, 1),
            ev.Event(consumer_left=ev.ConsumerLeft(consumer_id=SECOND, reason=GOODBYE)),
        ]  # fmt: skip
        if self.finished:
            finished = ev.IterationFinished(iteration_id=ITERATION)
            found.append(ev.Event(iteration_finished=finished))
        return found

    def broken(self) -> list[str]:
        history = read_history((n, 1, event) for n, event in enumerate(self.events(), 1))
        second: list[Record] = [Joined(1, SECOND), Got(1, 0, self.second), ReadToEnd(1)]
        verdict = check_claims(history, [self.first, second], elements=ELEMENTS)
        return [*history.broken, *verdict.broken]


@pytest.fixture
def run() -> Run:
    return Run()


def test_what_a_dead_trainer_had_not_reported_comes_again(run: Run) -> None:
    assert run.broken() == []


def left_in_order(run: Run) -> None:
    run.first.append(Left(1))
    run.why = GOODBYE


def unfinished(run: Run) -> None:
    run.finished = False


@pytest.mark.parametrize(
    ("lie", "what"),
    [
        (left_in_order, "2 elements (5, 6) delivered again, and whoever had them lived"),
        (unfinished, "epoch 1 did not come to its end"),
        (lambda run: run.second.remove(30), "1 elements (30) lost"),
        (lambda run: run.second.append(30), f"(30) delivered twice to consumer {SECOND}"),
        (lambda run: run.second.append(4), f"(4) delivered to consumer {SECOND}, which"),
        (lambda run: run.first.append(Got(1, 0, [25])), f"(25) delivered to consumer {FIRST},"),
        (lambda run: run.second.append(99), f"(99) delivered to consumer {SECOND},"),
        (lambda run: run.first.append(Got(1, 0, [8], [8])), "(8) damaged on the way"),
    ],
)
def test_a_broken_promise_is_found(run: Run, lie: Callable[[Run], None], what: str) -> None:
    lie(run)
    assert any(what in promise for promise in run.broken())


def test_who_left_and_could_not_say_so_is_excused(run: Run) -> None:
    run.first.append(Left(1))
    assert run.broken() == []
