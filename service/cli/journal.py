"""`forebay journal …`: reads a journal, also one that is in use."""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

import typer

from ...storage import Corrupt
from ..errors import InvalidArgument
from .console import plain, plain_console
from .options import JSON, FlagCommand
from .progress_bar import progress

app = typer.Typer(help="Look into a journal, check it, repair it.", no_args_is_help=True)

STORAGE = typer.Argument(
    ..., help="URL or path of the storage, such as file:///var/lib/forebay.",
    envvar="FOREBAY_STORAGE",
)  # fmt: skip
AT = typer.Option(None, min=1, help="The sequence of an event.")


@contextmanager
def opened(url: str) -> Iterator[Any]:
    from ...journal.verification import holds_anything
    from ...storage import open_storage

    if url == "memory:":
        raise InvalidArgument("a memory: storage lives in its dispatcher only; name a directory")
    storage = open_storage(url)
    try:
        if not holds_anything(storage):
            raise InvalidArgument(f"there is no journal in {storage.url}; is that right?")
        yield storage
    finally:
        storage.close()


@app.command(cls=FlagCommand)
def show(
    storage: str = STORAGE,
    at: int | None = AT,
    limit: int = typer.Option(50, min=0, help="How many of the last events to show; 0: all."),
    as_json: bool = JSON,
) -> None:
    """The last events in words; with --at, the dispatcher's state as of that event."""
    from ..core.status import status
    from ..dispatcher.recovery import recover
    from .status import render

    with opened(storage) as found:
        if at is None:
            for sequence, event in _last_events(found, limit):
                _print_event(sequence, event, as_json)
            return
        with suppress(Corrupt):  # what comes before the damage can be shown
            last = found.extent().last
            if at > last:
                raise InvalidArgument(f"--at {at} is behind the end: the last event is {last}")
        summary = status(recover(found, at)[0])
    if as_json:
        print(json.dumps(summary, indent=2))
    else:
        plain_console().print(render(summary))


@app.command(cls=FlagCommand)
def tail(
    storage: str = STORAGE,
    limit: int = typer.Option(10, min=0, help="How many of the last events to begin with."),
    as_json: bool = JSON,
) -> None:
    """Follow the journal: events in words as they are written, until interrupted."""
    with opened(storage) as found:
        extent = found.extent()
        after = max(extent.first - 1, extent.last - limit)
        while True:
            for sequence, event in _events(found, after):
                _print_event(sequence, event, as_json)
                after = sequence
            time.sleep(0.2)


@app.command(cls=FlagCommand)
def verify(storage: str = STORAGE, as_json: bool = JSON) -> None:
    """Check every record, snapshot and blob. Exits 1 and names file and offset at corruption."""
    from ...journal.verification import verify as verify_storage

    with opened(storage) as found, progress("records") as show:
        report = verify_storage(found, _datasets, show)
    if as_json:
        print(json.dumps(asdict(report), indent=2))
    else:
        for problem in report.problems:
            print(plain(problem))
        verdict = "is sound" if report.ok else f"has {len(report.problems)} problems"
        torn = f", {report.torn_bytes} bytes of an unfinished append" if report.torn_bytes else ""
        print(
            f"the journal {verdict}: records {report.first} to {report.last}, "
            f"{report.snapshots} snapshots, {report.blobs} blobs{torn}"
        )
    raise typer.Exit(0 if report.ok else 1)


@app.command(cls=FlagCommand)
def repair(
    storage: str = STORAGE,
    truncate_corrupt: bool = typer.Option(
        False,
        help="Cut a corrupt log behind its last whole batch. Later acknowledged events are lost; "
        "their files are moved aside, not deleted.",
    ),
    restored: bool = typer.Option(
        False,
        help="The storage was restored from a backup: workers and trainers that know later events "
        "register again.",
    ),
) -> None:
    """Make a damaged journal usable again, as far as nothing is lost by it.

    Exits 1 if datasets have to be registered again then.
    """
    from ...journal.verification import repair as repair_storage
    from ...journal.verification import verify as verify_storage

    with opened(storage) as found:
        done = repair_storage(found, truncate_corrupt=truncate_corrupt, restored=restored)
        left = verify_storage(found, _datasets)
    done += [f"left as it is: {problem}" for problem in left.problems]
    if left.lost_datasets:
        names = ", ".join(map(repr, left.lost_datasets))
        done.append(
            f"a dispatcher can begin, but the datasets {names} can be read by nobody until "
            "their graphs are restored from a backup, or the same datasets are registered again: "
            "those whose ids were chosen with the same dataset_id"
        )
    elif not left.can_begin:
        done.append("no dispatcher can begin with that")
    elif left.problems:
        done.append("a dispatcher can begin, and needs nothing of what was left")
    print("\n".join(done) if done else "nothing to repair")
    raise typer.Exit(1 if left.lost_datasets or not left.can_begin else 0)


def _datasets(storage: Any) -> dict[str, str]:
    from ..dispatcher.graphs import needed_blobs
    from ..dispatcher.recovery import recover

    return needed_blobs(recover(storage)[0])


def _events(storage: Any, after: int) -> Iterator[tuple[int, Any]]:
    from ...journal.codec import decode

    for record in storage.read(after):
        yield record.sequence, decode(record.sequence, record.data)


def _last_events(storage: Any, limit: int) -> Iterator[tuple[int, Any]]:
    """The last events; 0: all. Of a damaged journal those before that; then raises Corrupt."""
    shown = False
    try:
        extent = storage.extent()
        after = max(extent.first - 1, extent.last - limit) if limit else extent.first - 1
        for each in _events(storage, after):
            shown = True
            yield each
    except Corrupt as damage:
        if shown:  # it is behind these
            raise
        readable = deque[tuple[int, Any]](maxlen=limit or None)
        with suppress(Corrupt):
            readable.extend(_events(storage, storage.first_sequence() - 1))
        yield from readable
        raise damage


def _print_event(sequence: int, event: Any, as_json: bool) -> None:
    from ...journal.words import content, fields, kind_of

    if as_json:
        line = {"sequence": sequence, "time_ms": event.time_ms, "event": event.WhichOneof("event")}
        print(json.dumps(line | content(event)), flush=True)
        return
    at = time_text(event.time_ms)
    print(f"{sequence:>10}  {at}  {kind_of(event)}  {fields(event)}", flush=True)


def time_text(time_ms: int) -> str:
    return datetime.fromtimestamp(time_ms / 1000, UTC).isoformat(timespec="milliseconds")
