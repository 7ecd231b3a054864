"""Saves: several workers write a dataset to a directory, in streams (save_streams.py).

    started ──► finished, when all of its streams are completed
       └──────► failed, at the first error

The dispatcher (dispatcher/saves.py) updates the directory after the state, in the format of
TensorFlow's distributed snapshots. Only one kind of worker writes a save, that of its first stream:
their formats differ. If no such worker is left, the save waits for one, and its status says so.
"""

from __future__ import annotations

from ...journal.proto import events_pb2 as ev
from ...journal.splits import grows, source_size
from .. import ranges
from ..errors import AlreadyExists, InvalidArgument, Unimplemented
from ..ranges import Ranges
from .base import Command, Decision, EventKind, Ids, itself, reserve_id
from .read_kinds import staying
from .save_streams import OfStream, stream_of, tell_writer
from .state import MAX_ENDED_SAVES, EndedSave, Save, SaveSource, State, fields_of

CODES = frozenset(
    {
        *("CANCELLED", "UNKNOWN", "INVALID_ARGUMENT", "DEADLINE_EXCEEDED", "NOT_FOUND"),
        *("ALREADY_EXISTS", "PERMISSION_DENIED", "RESOURCE_EXHAUSTED", "FAILED_PRECONDITION"),
        *("ABORTED", "OUT_OF_RANGE", "UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE", "DATA_LOSS"),
        "UNAUTHENTICATED",
    }
)
"""The canonical names of the status codes."""


class StartSave(Command, frozen=True, kw_only=True):
    """→ SaveStarted, which is the answer."""

    path: str
    definition: ev.DatasetDefinition
    metadata: bytes
    prepared: str
    indivisible: str = ""
    is_gone: bool = False  # nothing is at the path any more


class FailSave(OfStream, frozen=True, kw_only=True):
    """→ SaveFailed, unless it is over. Ignores a worker that names another worker's stream."""

    stream: int | None = None
    code: str  # a status name; one that is not canonical becomes UNKNOWN
    message: str


def _start_save(state: State, command: StartSave) -> Decision:
    path = command.path
    if not is_absolute(path):
        raise InvalidArgument(
            f"a dataset cannot be saved to {path!r}: give the absolute path of a directory that "
            "the dispatcher, all workers and all readers see under this name"
        )
    for other in state.saves.values():
        if path != other.path and (is_within(path, other.path) or is_within(other.path, path)):
            raise InvalidArgument(
                f"a dataset cannot be saved to {path}: the save at {other.path} is being written, "
                "and one would lie in the directory of the other; save to another path"
            )
    save_id = state.save_at.get(path)
    if save_id is not None and not (save_id in state.ended_saves and command.is_gone):
        raise AlreadyExists(
            f"tf.data snapshot at {path} is already started or completed; save to another path, or "
            "delete the directory once the save is over"
        )
    if why := command.definition.unsplittable:
        raise Unimplemented(f"a dataset is saved split by split: {why}")
    if any(map(grows, command.definition.sources)):
        raise Unimplemented(
            "a dataset that is loaded from a distributed save cannot be saved once more: its "
            "splits are found while it is read. Save what that was made of, or copy its directory"
        )
    if command.indivisible and state.workers and not any(w.stock for w in state.workers.values()):
        raise Unimplemented(_needs_stock_workers(command.indivisible))
    started = ev.SaveStarted(
        save_id=Ids(state).new(),
        **fields_of(command, "path", "definition", "metadata", "prepared", "indivisible"),
    )
    return Decision([started], started)


def is_absolute(path: str) -> bool:
    """Whether the path is absolute and free of NUL; does not look at the file system."""
    return path.startswith("/") and "\0" not in path


def is_within(path: str, directory: str) -> bool:
    """Whether the path is the directory or lies in it; both must be normalized."""
    return f"{path}/".startswith(f"{directory.rstrip('/')}/")


def _needs_stock_workers(why: str) -> str:
    return f"Forebay's workers write ranges of a dataset's splits, TensorFlow's write any: {why}"


def _save_started(state: State, event: ev.SaveStarted) -> None:
    save_id = reserve_id(state, event.save_id)
    if (earlier := state.save_at.get(event.path)) is not None:
        del state.ended_saves[earlier]
    definition = event.definition.SerializeToString(deterministic=True)
    sources = [SaveSource(source_size(source)) for source in event.definition.sources]
    state.saves[save_id] = Save.of(event, definition_bytes=definition, sources=sources)
    state.save_at[event.path] = save_id


def completed_streams(save: Save | EndedSave) -> Ranges:
    """The numbers of the completed streams."""
    if isinstance(save, EndedSave):
        return save.completed
    found: Ranges = []
    for number, stream in enumerate(save.streams):
        if stream.completed:
            ranges.add(found, number, number + 1)
    return found


def waits_for(state: State, save: Save) -> str:
    """The missing kind of worker that the save needs, and why; "" if one is registered.

    Also "" for a save that no worker has begun and any worker can begin.
    """
    stock = True if save.indivisible else save.stock
    workers = [state.workers[worker_id] for worker_id in staying(state)]
    if workers and all(worker.grants for worker in workers):
        return "a worker whose grant in the access file has no patterns"
    if stock is None or any(worker.stock == stock for worker in workers):
        return ""
    needed = "a worker of TensorFlow's" if stock else "one of Forebay's workers"
    if save.stock is None:
        return f"{needed}: {_needs_stock_workers(save.indivisible)}"
    return f"{needed}: such ones have begun it, in a format of their own"


def size_of_saves(state: State) -> int:
    """The approximate number of items of running saves in a snapshot."""
    return sum(
        1 + sum(len(source.runs) for source in stream.sources)
        for save in state.saves.values()
        for stream in save.streams
    )


def _fail_save(state: State, command: FailSave) -> Decision:
    if (save := state.saves.get(command.save_id)) is None:
        return Decision([], None)
    if command.stream is not None and stream_of(state, command) is None:
        return Decision([], None)
    return Decision([failed(save, command.code, command.message)], None)


def failed(save: Save, code: str, message: str) -> ev.SaveFailed:
    """The event that ends the save with an error."""
    if code not in CODES:
        code, message = "UNKNOWN", f"{code}: {message}"
    return ev.SaveFailed(save_id=save.save_id, code=code, message=message)


def _save_finished(state: State, event: ev.SaveFinished) -> None:
    _end(state, event.save_id).finished = True


def _save_failed(state: State, event: ev.SaveFailed) -> None:
    ended = _end(state, event.save_id)
    ended.failed, ended.message = event.code or "UNKNOWN", event.message


def _end(state: State, save_id: int) -> EndedSave:
    save = state.saves.pop(save_id)
    ended = state.ended_saves[save_id] = EndedSave(
        save_id,
        save.path,
        save.prepared,
        len(save.streams),
        completed_streams(save),
        given_out(save),
        elements_of(save),
    )
    for stream in save.streams:
        if not stream.completed:
            tell_writer(state, save, stream)
    if len(state.ended_saves) > MAX_ENDED_SAVES:
        oldest = state.ended_saves.pop(next(iter(state.ended_saves)))
        del state.save_at[oldest.path]
    return ended


def elements_of(save: Save) -> int:
    """The number of committed elements, by Forebay's workers."""
    return sum(stream.elements for stream in save.streams)


def given_out(save: Save) -> int:
    """The number of assigned splits."""
    return save.assigned if save.stock else sum(stream.count for stream in save.streams)


def written_splits(save: Save) -> int | None:
    """Of Forebay's workers: the splits of completed streams. TensorFlow's do not tell."""
    return None if save.stock else sum(x.count for x in save.streams if x.completed)


def expected_elements(save: Save) -> int | None:
    """How many the whole save may have, judged by its completed streams; None before one is."""
    if not (written := written_splits(save)):
        return None
    splits = min(source.size for source in save.sources)
    return sum(x.elements for x in save.streams if x.completed) * splits // written


DECIDE = {StartSave: _start_save, FailSave: _fail_save}
EVENTS = {
    "save_started": EventKind(_save_started, answer=itself),
    "save_finished": EventKind(_save_finished),
    "save_failed": EventKind(_save_failed),
}
