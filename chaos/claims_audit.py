"""Checks what trainers got that read at least once (trainer.py, with claims) against the journal.

No element of an epoch may be missing. An element comes to another trainer once more only if the one
before was killed, or given up, and had not reported it: a bundle's elements begin with the cursor
that the journal has of it. This is pure, as the audit is.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

from ..journal.reasons import GOODBYE
from .audit import Verdict, Visit, visits
from .history import History, listed
from .records import Record
from .trainer import BUNDLE_SPLITS, CLAIMS_JOB


def check_claims(
    history: History, trainers: Sequence[Iterable[Record]], *, elements: int
) -> Verdict:
    """Find every broken promise. The elements of each epoch are 0 … `elements` − 1, one a split.

    `twice` counts what came again, with or without a cause.
    """
    verdict = Verdict([])
    by_epoch: defaultdict[int, list[Visit]] = defaultdict(list)
    for visit in visits(trainers, CLAIMS_JOB, verdict):
        by_epoch[visit.epoch].append(visit)
        _check_visit(visit, history, verdict)
    epochs = history.jobs[CLAIMS_JOB].epochs if CLAIMS_JOB in history.jobs else {}
    for number, of_epoch in sorted(by_epoch.items()):
        if number not in epochs or not epochs[number].finished:
            verdict.broken.append(f"{CLAIMS_JOB}: epoch {number} did not come to its end")
            continue
        verdict.epochs += 1
        _check_epoch(number, of_epoch, history, elements, verdict)
    return verdict


def _check_visit(visit: Visit, history: History, verdict: Verdict) -> None:
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
    if again := sorted(number for number, n in Counter(visit.got).items() if n > 1):
        verdict.broken.append(
            f"{where}: {listed(again)} delivered twice to consumer {visit.consumer_id}"
        )


def _check_epoch(
    epoch: int, visits: list[Visit], history: History, elements: int, verdict: Verdict
) -> None:
    had: defaultdict[int, list[Visit]] = defaultdict(list)
    for visit in visits:
        for number in visit.got:
            had[number].append(visit)
    where = f"{CLAIMS_JOB}: epoch {epoch}"
    verdict.lose([number for number in range(elements) if number not in had], where)
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


def _is_excused(visit: Visit, history: History) -> bool:
    """Whether it could not report all that it had: it was killed, or could not say goodbye."""
    return visit.end is None or history.stays[visit.consumer_id].why != GOODBYE
