"""`forebay audit`: what a job read, from its journal and arithmetic alone."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import typer

from ..errors import InvalidArgument, NotFound
from .audit_ordered import OrderedAnswers
from .audit_shared import BROKEN, claimed, unordered
from .console import plain
from .journal import STORAGE, opened, time_text
from .options import JSON

JOB = typer.Argument(
    ..., help="The job's name, or its id.", envvar="FOREBAY_JOB", show_default=False
)
STEP = typer.Option(
    None, min=0, help="What each consumer gets in this step, counted over all epochs."
)
ELEMENT = typer.Option(None, help="BUNDLE:INDEX: the step and the consumer that get this element.")
RECORD = typer.Option(
    None, help="FILE:ROW: the same of a record of a file, whose path may be cut at its begin."
)
EPOCH = typer.Option(None, min=0, help="Of --element or --record: in this epoch; the first is 0.")

PARTS = {"readers", "bundles"}
"""The lists within parts of an answer that are shown in words, too."""


def audit(
    storage: str = STORAGE,
    job: str = JOB,
    step: int | None = STEP,
    element: str | None = ELEMENT,
    record: str | None = RECORD,
    epoch: int | None = EPOCH,
    as_json: bool = JSON,
) -> None:
    """Show who read a job, from where and in which order, and which elements were lost and why.

    With --step, --element or --record: which consumer of an ordered read was given which elements.
    Exits 1 if the journal tells that a promise did not hold.
    """
    asked = {"--step": step, "--element": element, "--record": record}
    given = [f"{name} {value}" for name, value in asked.items() if value is not None]
    if len(given) > 1:
        raise InvalidArgument(f"{' and '.join(given)}: ask for one of them")
    if epoch is not None and element is None and record is None:
        raise InvalidArgument(f"--epoch {epoch} is for --element and --record; leave it out")
    with opened(storage) as found:
        state, histories, begins = _replayed(found)
        gone = _gone(begins)
        history = _find(histories, job, gone)
        if not history.job.is_ordered:
            if given:
                raise InvalidArgument(
                    f"job {history.job.user_name} is not read in order, so the journal does not "
                    f"tell of its elements: leave out {given[0]}"
                )
            answer = claimed(history) if history.job.is_claimed else unordered(state, history)
        else:
            ordered = OrderedAnswers(history)
            if step is not None:
                answer = ordered.step(step)
            elif element is not None:
                answer = ordered.element(element, epoch)
            elif record is not None:
                answer = ordered.record(record, epoch, found.read_blob)
            else:
                answer = ordered.overview()
    answer = {"job": history.job.user_name, "job_id": history.job.job_id, **answer}
    if gone:
        answer["note"] = gone
    print(json.dumps(answer, indent=2) if as_json else plain("\n".join(in_words(answer))))
    raise typer.Exit(1 if answer.get("verdict") == BROKEN else 0)


def _replayed(storage: Any) -> tuple[Any, Any, int]:
    """The last state, the jobs' histories, and the event behind which those begin."""
    from ...journal.codec import decode
    from ..core.job_history import JobHistories
    from ..core.state import State
    from ..dispatcher.recovery import apply_journaled, recover

    first = storage.extent().first
    begins = min((at for at in storage.snapshots() if at >= first - 1), default=0)
    begins = begins if first > 1 else 0
    state = recover(storage, begins)[0] if begins else State()
    histories = JobHistories(state)
    for record in storage.read(state.sequence):
        event = decode(record.sequence, record.data)
        histories.observe(state, event)
        apply_journaled(state, record.sequence, event)
    histories.follow_end(state)
    return state, histories, begins


def found_in(storage: Any, names: Sequence[str]) -> list[Any]:
    """The histories of these jobs, which are read in order. Raises NotFound, InvalidArgument."""
    _, histories, begins = _replayed(storage)
    found = [_find(histories, name, _gone(begins)) for name in names]
    for history in found:
        if not history.job.is_ordered:
            raise InvalidArgument(
                f"job {history.job.user_name} is not read in order, so the journal does not tell "
                "of its elements: give an ordered job"
            )
    return found


def _gone(begins: int) -> str | None:
    return f"what came before event {begins + 1} is no longer in the journal" if begins else None


def _find(histories: Any, name: str, gone: str | None) -> Any:
    jobs = histories.jobs.values()
    exact = [h for h in jobs if name in (h.job.name, str(h.job.job_id))]
    found = exact or [h for h in jobs if name == h.job.user_name]
    if len(found) == 1:
        return found[0]
    known = ", ".join(f"{h.job.user_name} (id {h.job.job_id})" for h in found or jobs)
    if found:
        raise InvalidArgument(f"{len(found)} jobs are named {name}; give an id: {known}")
    note = f"; {gone}" if gone else ""
    raise NotFound(f"job {name!r} is not in the journal; these are: {known or 'none'}{note}")


def in_words(answer: dict[str, Any], indent: str = "") -> Iterator[str]:
    """The answer in words; lists of parts are indented."""
    for key, value in answer.items():
        if isinstance(value, list) and value and isinstance(value[0], dict):
            yield f"{indent}{key.replace('_', ' ')}:"
            for part in value:
                yield f"{indent}  {', '.join(_words(part))}"
                nested = {k: v for k, v in part.items() if k in PARTS and isinstance(v, list)}
                yield from in_words(nested, f"{indent}    ")
        else:
            yield from _words({key: value})


def _words(part: dict[str, Any]) -> Iterator[str]:
    """What is not known, and lists that are for programs, are left out."""
    for key, value in part.items():
        name = key.removesuffix("_ms").replace("_", " ")
        if key == "values" and value:
            yield "values " + " and ".join(_range(*each) for each in value)
        elif isinstance(value, tuple):
            yield f"{name} {_range(*value)}"
        elif isinstance(value, bool):
            yield from [name] * value
        elif value is not None and not isinstance(value, list):
            yield f"{name} {time_text(value) if key.endswith('_ms') else value}"


def _range(first: object, last: object) -> str:
    return f"{first}" if first == last else f"{first} … {last}"
