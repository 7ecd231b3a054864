"""`forebay diff`: at which step two jobs that are read in order part, by their journal."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterator, Sequence
from typing import Any

import typer

from ..errors import InvalidArgument
from .audit import found_in, in_words
from .audit_ordered import OrderedAnswers
from .console import plain
from .journal import STORAGE, opened
from .options import JSON

COMPARED = 1 << 16
"""Elements that are compared behind a first difference in weights: other weights may pick the same
source for some."""

NAMED = 5
"""The most bundles with different checksums that are named: the first ones by position."""


def diff(
    storage: str = STORAGE,
    job: str = typer.Argument(..., help="A job's name, or its id.", envvar="FOREBAY_JOB"),
    other: str = typer.Argument(..., help="Another one's."),
    as_json: bool = JSON,
) -> None:
    """Show from which step on two ordered jobs read different data, and why.

    It compares their datasets and orders, what was decided for each, and the checksums of bundles
    that workers ran for both. Exits 1 if they differ.
    """
    with opened(storage) as found:
        answers = [OrderedAnswers(history) for history in found_in(found, (job, other))]
    said = compared(*answers)
    print(json.dumps(said, indent=2) if as_json else plain("\n".join(in_words(said))))
    raise typer.Exit(1 if said["differences"] else 0)


def compared(mine: OrderedAnswers, theirs: OrderedAnswers) -> dict[str, Any]:
    """What differs, the first of it first."""
    both = mine, theirs
    names = [f"{x.job.user_name} (id {x.job.job_id})" for x in both]
    about = [x.about() for x in both]
    steps = [x.job.step for x in both]
    if not all(steps):
        raise InvalidArgument(
            f"nobody has read job {names[steps.index(0)]}: start its trainers once"
        )
    wholly = [
        {"what": what, "first_job": about[0][what], "second_job": about[1][what]}
        for what in about[0]
        if about[0][what] != about[1][what]
    ]
    found: list[dict[str, Any]] = [*wholly]
    if not wholly:
        checksums = sorted(_checksums(mine, theirs), key=_position)[:NAMED]
        found = sorted([*_schedules(mine, theirs), *checksums], key=_position)
    return {
        "jobs": " and ".join(names),
        "global_batches": " and ".join(map(str, steps)),
        "verdict": "they read different data"
        if found
        else "they read the same data, as far as the journal tells",
        "differences": found,
    }


def _schedules(mine: OrderedAnswers, theirs: OrderedAnswers) -> Iterator[dict[str, Any]]:
    """The first position at which the changes of the two jobs give them different elements."""
    both = mine, theirs
    place = mine.known.schedule.first_difference(theirs.known.schedule)
    if place is None:
        return
    position = mine.known.schedule.position_of(place)
    if mine.known.is_mixture:  # other weights may pick the same sources for a while
        with contextlib.suppress(InvalidArgument):  # lengths are not known
            (a, i), (b, j) = (x.known.elements(0, position, position + COMPARED) for x in both)
            position += int(((a != b) | (i != j)).argmax())  # 0 if none of them differs
    yield {"what": "what was decided", **_at(both, (position, position))}


def _checksums(mine: OrderedAnswers, theirs: OrderedAnswers) -> Iterator[dict[str, Any]]:
    """Bundles of which workers made other elements."""
    both = mine, theirs
    first, second = (x.job.checksums for x in both)
    for bundle in sorted(n for n in first.keys() & second.keys() if first[n] != second[n]):
        crc = f"{first[bundle]:08x} and {second[bundle]:08x}"
        yield {
            "what": f"the elements of bundle {bundle}, whose checksums are {crc}",
            **_at(both, [x.position_of_bundle(bundle) for x in both]),
            **mine.splits_of(bundle if mine.known.is_mixture else bundle % mine.job.order.bundles),
        }


def _at(both: Sequence[OrderedAnswers], positions: Sequence[int | None]) -> dict[str, Any]:
    """The first of the positions, as saved states have it, and the step of each; None: unknown."""
    there = [(x, at) for x, at in zip(both, positions, strict=True) if at is not None]
    place = min((x.known.schedule.place_of(at) for x, at in there), default=None)
    steps = [None if at is None else x.step_at(at) for x, at in zip(both, positions, strict=True)]
    return {"position": place, "first_step": steps[0], "second_step": steps[1]}


def _position(part: dict[str, Any]) -> float:
    return math.inf if part["position"] is None else part["position"]
