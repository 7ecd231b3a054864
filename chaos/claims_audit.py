"""Checks what trainers got that read at least once (trainer.py, with claims) against the journal.

No element of an epoch may be missing. An element comes to another trainer once more only if the one
before was killed, or given up, and had not reported it: a bundle's elements begin with the cursor
that the journal has of it. This is pure, as the audit is.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from ..journal.reasons import GOODBYE
from .audit import Verdict
from .history import History, listed
from .records import Got, Joined, Left, ReadToEnd, Record, Started
from .trainer import BUNDLE_SPLITS, CLAIMS_JOB


@dataclass
class ClaimingVisit:
    """One consumer, from joining an epoch until it left, or its process was killed."""

    epoch: int
    consumer_id: int
    got: list[int] = field(default_factory=list)
    was_killed: bool = True  # unless it says otherwise


def check_claims(
    history: History, trainers: Sequence[Iterable[Record]], *, elements: int
) -> Verdict:
    """Find every broken promise. The elements of each epoch are 0 … `elements` − 1, one a split.

    `twice` counts what came again, with or without a cause.
    """
    verdict = Verdict([])
    visits = [visit for records in trainers for visit in _visits(records, verdict)]
    by_epoch: defaultdict[int, list[ClaimingVisit]] = defaultdict(list)
    for visit in visits:
        by_epoch[visit.epoch].append(visit)
        verdict.delivered += len(visit.got)
        _check_visit(visit, history, verdict)
    epochs = history.jobs[CLAIMS_JOB].epochs if CLAIMS_JOB in history.jobs else {}
    for number, of_epoch in sorted(by_epoch.items()):
        if number not in epochs or not epochs[number].finished:
            verdict.broken.append(f"{CLAIMS_JOB}: epoch {number} did not come to its end")
            continue
        verdict.epochs += 1
        _check_epoch(number, of_epoch, history, elements, verdict)
    return verdict


def _visits(records: Iterable[Record], verdict: Verdict) -> list[ClaimingVisit]:
    visits: list[ClaimingVisit] = []
    for record in records:
        match record:
            case Joined():
                visits.append(ClaimingVisit(record.epoch, record.consumer_id))
            case Got():
                visits[-1].got += record.ids
                if record.damaged:
                    verdict.damaged += len(record.damaged)
                    verdict.broken.append(
                        f"{CLAIMS_JOB}: {listed(record.damaged)} damaged on the way"
                    )
            case Left() | ReadToEnd():
                visits[-1].was_killed = False
            case Started():
                pass
    return visits


def _check_visit(visit: ClaimingVisit, history: History, verdict: Verdict) -> None:
    """It got what it had claimed, from the cursors on, and nothing twice."""
    claims = {
        claim.place: claim.start
        for claim in history.jobs[CLAIMS_JOB].claims
        if claim.consumer_id == visit.consumer_id
    }
    wrong = [
        number
        for number in visit.got
        if number % BUNDLE_SPLITS < claims.get(number // BUNDLE_SPLITS, BUNDLE_SPLITS)
    ]
    where = f"{CLAIMS_JOB}: epoch {visit.epoch}"
    if wrong:
        verdict.broken.append(
            f"{where}: {listed(wrong)} delivered to consumer {visit.consumer_id}, which had not "
            "claimed them, or behind whose claims' beginnings they are not"
        )
    if len(set(visit.got)) != len(visit.got):
        again = sorted({number for number in visit.got if visit.got.count(number) > 1})
        verdict.broken.append(
            f"{where}: {listed(again)} delivered twice to consumer {visit.consumer_id}"
        )


def _check_epoch(
    epoch: int, visits: list[ClaimingVisit], history: History, elements: int, verdict: Verdict
) -> None:
    had: defaultdict[int, list[ClaimingVisit]] = defaultdict(list)
    for visit in visits:
        for number in visit.got:
            had[number].append(visit)
    where = f"{CLAIMS_JOB}: epoch {epoch}"
    if lost := [number for number in range(elements) if number not in had]:
        verdict.lost_unexplained += len(lost)
        verdict.broken.append(f"{where}: {listed(lost)} lost")
    if strays := sorted(had.keys() - set(range(elements))):
        verdict.broken.append(f"{where}: {listed(strays)} delivered that nobody made")
    verdict.twice += sum(len(each) - 1 for each in had.values())
    unexcused = [
        number
        for number, each in sorted(had.items())
        if sum(not _is_excused(visit, history) for visit in each) > 1
    ]
    if unexcused:
        verdict.broken.append(
            f"{where}: {listed(unexcused)} delivered again, and whoever had them lived"
        )


def _is_excused(visit: ClaimingVisit, history: History) -> bool:
    """Whether it could not report all that it had: it was killed, or could not say goodbye."""
    return visit.was_killed or history.stays[visit.consumer_id].why != GOODBYE
