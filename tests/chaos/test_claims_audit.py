"""The audit of reads at least once can fail: it finds each broken promise."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from forebay.chaos.claims_audit import check_claims
from forebay.chaos.history import read_history
from forebay.chaos.records import Got, Joined, Left, ReadToEnd, Record, Started
from forebay.chaos.trainer import BUNDLE_SPLITS, CLAIMS_JOB
from forebay.journal.proto import events_pb2 as ev
from forebay.journal.reasons import GOODBYE, SILENT

JOB, ITERATION, FIRST, SECOND = 1, 2, 10, 11
ELEMENTS = 2 * BUNDLE_SPLITS


class Run:
    """The first trainer was killed in bundle 0, when it had reported 5 of 7 elements; the second
    one read the rest."""

    def __init__(self) -> None:
        self.why = SILENT
        self.reported = 5
        self.finished = True
        self.first: list[Record] = [
            Started("claimer0.1", 0),
            Joined(1, FIRST, 1),
            Got(1, 2, 0, [*range(7)]),
        ]
        self.second = [*range(5, ELEMENTS)]

    def events(self) -> list[ev.Event]:
        def claimed(consumer: int, *places: int) -> ev.Event:
            return ev.Event(bundles_claimed=ev.BundlesClaimed(consumer_id=consumer, places=places))

        def moved(consumer: int, cursor: int, *done: int) -> ev.Event:
            return ev.Event(claims_moved=ev.ClaimsMoved(
                consumer_id=consumer, places=[0] if cursor else [],
                cursors=[cursor] if cursor else [], done=done))  # fmt: skip

        found = [
            ev.Event(leader_elected=ev.LeaderElected(term=1)),
            ev.Event(job_created=ev.JobCreated(job_id=JOB, name=CLAIMS_JOB)),
            ev.Event(iteration_created=ev.IterationCreated(
                iteration_id=ITERATION, job_id=JOB, epoch=1)),
            *(
                ev.Event(consumer_joined=ev.ConsumerJoined(
                    consumer_id=consumer, iteration_id=ITERATION))
                for consumer in (FIRST, SECOND)
            ),
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
        second: list[Record] = [Joined(1, SECOND, 1), Got(1, 3, 0, self.second), ReadToEnd(1, 4)]
        verdict = check_claims(history, [self.first, second], elements=ELEMENTS)
        return [*history.broken, *verdict.broken]


@pytest.fixture
def run() -> Run:
    return Run()


def test_what_a_dead_trainer_had_not_reported_comes_again(run: Run) -> None:
    assert run.broken() == []


def left_in_order(run: Run) -> None:
    run.first.append(Left(1, 3, []))
    run.why = GOODBYE


def unfinished(run: Run) -> None:
    run.finished = False


@pytest.mark.parametrize(
    ("lie", "what"),
    [
        (left_in_order, "2 elements (5, 6) delivered again, and whoever had them lived"),
        (unfinished, "epoch 1 did not come to its end"),
        (lambda run: run.second.remove(30), "1 elements (30) lost"),
        (lambda run: run.second.append(30), "1 elements (30) delivered twice to consumer 11"),
        (lambda run: run.second.append(4), "1 elements (4) delivered to consumer 11, which had"),
        (lambda run: run.first.append(Got(1, 3, 0, [25])), "(25) delivered to consumer 10, which"),
        (lambda run: run.second.append(99), "(99) delivered to consumer 11, which had not"),
        (lambda run: run.first.append(Got(1, 3, 0, [8], [8])), "(8) damaged on the way"),
    ],
)
def test_a_broken_promise_is_found(run: Run, lie: Callable[[Run], None], what: str) -> None:
    lie(run)
    assert any(what in promise for promise in run.broken())


def test_who_left_and_could_not_say_so_is_excused(run: Run) -> None:
    run.first.append(Left(1, 3, []))
    assert run.broken() == []
