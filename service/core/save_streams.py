"""Streams of saves: each is written by one worker at a time.

    assigned ──► … ──► completed; the last one finishes the save (saves.py)
       │  ▲
       └──┘ its worker is gone: another one resumes it

This module assigns streams to workers, and splits and chunks to streams. A stream is orphaned when
no worker with its address (TensorFlow's) or process (Forebay's) is registered. The next worker that
may write another stream resumes it:

- TensorFlow's workers request splits one by one, and keep their state in the directory. A stream
  resumes at their last commit, and gets the later splits again. The state keeps all of its splits,
  in runs, so that the dispatcher can write the split files again.
- A stream of Forebay's workers is a range of splits, whose elements are the same on every worker.
  A chunk belongs to the save once it is committed here. So no chunk is lost, and a worker presumed
  dead that still runs adds none. A stream resumes behind its last committed chunk.
"""

from __future__ import annotations

from collections.abc import Iterator

from ...journal.proto import events_pb2 as ev
from ..errors import FailedPrecondition, InvalidArgument
from .base import Bodies, Command, Decision, EventKind, find_save
from .state import EndedSave, Save, SplitRun, State, Stream, StreamSource, Worker, fields_of

STREAMS = 8
"""A stream has at least 1/STREAMS of a worker's even share of a save."""


MAY_FREE_STREAM = frozenset(
    {
        *("save_started", "save_finished", "save_failed", "stream_assigned", "stream_completed"),
        *("worker_registered", "worker_drains", "worker_lost"),
    }
)
"""The events after which a worker may be assigned another stream."""


class OfStream(Command, frozen=True, kw_only=True):
    """Of a stream, by the worker that writes it."""

    save_id: int
    stream: int | None
    worker_address: str = ""  # of a stock worker
    worker_uid: int = 0  # of Forebay's
    assignment: int = 0  # that a worker of Forebay's writes for; 0: the last


class AssignStream(Command, frozen=True, kw_only=True):
    """→ StreamAssigned, if the worker writes fewer than `most` streams and one is available. None
    for a worker that may run some jobs only: a save is of any dataset."""

    worker_id: int
    most: int


class AssignSplit(Command, frozen=True, kw_only=True):
    """TensorFlow's GetSnapshotSplit. → SaveSplitAssigned, unless the pass has ended.

    Answers the number of the source's splits that the stream has so far, and the event, or None
    at the end of the pass.
    """

    path: str
    stream: int
    source: int
    pass_number: int
    worker_address: str


class CommitChunk(OfStream, frozen=True, kw_only=True):
    """→ ChunkCommitted; idempotent. Raises FailedPrecondition for another worker's stream."""

    chunk: int
    elements: int
    file: str


class CompleteStream(OfStream, frozen=True, kw_only=True):
    """→ StreamCompleted (, SaveFinished). Ignores unknown streams and other workers' streams."""


def is_written_by(save: Save, stream: Stream, worker: Worker) -> bool:
    """Whether the stream's last assignment is to this worker."""
    if save.stock != worker.stock or worker.grants:
        return False
    return stream.address == worker.address if save.stock else stream.uid == worker.uid


def streams_of(state: State, worker: Worker) -> Iterator[tuple[Save, int]]:
    """The worker's uncompleted streams: (save, stream number)."""
    for save in state.saves.values():
        for number, stream in enumerate(save.streams):
            if not stream.completed and is_written_by(save, stream, worker):
                yield save, number


def may_assign(state: State, worker: Worker, most: int) -> bool:
    """Whether AssignStream would assign a stream to the worker."""
    return bool(_assign_stream(state, AssignStream(worker_id=worker.worker_id, most=most)).events)


def is_orphaned(state: State, save: Save, stream: Stream) -> bool:
    """Whether the stream is not completed and its worker is lost."""
    worker = state.workers.get(state.worker_at.get(stream.address, 0))
    is_lost = worker is None or not is_written_by(save, stream, worker)
    return is_lost and not stream.completed


def _assign_stream(state: State, command: AssignStream) -> Decision:
    worker = state.workers.get(command.worker_id)
    if worker is None or worker.draining or worker.grants or not state.saves:
        return Decision([], None)
    mine = {save.save_id for save, _ in streams_of(state, worker)}
    if len(mine) >= command.most:
        return Decision([], None)

    def load(save: Save) -> int:
        return sum(not (s.completed or is_orphaned(state, save, s)) for s in save.streams)

    for save in sorted(state.saves.values(), key=load):
        if save.save_id in mine or save.stock not in (None, worker.stock):
            continue
        if (assigned := _assign_some_stream(state, save, worker)) is not None:
            return Decision([assigned], None)
    return Decision([], None)


def _assign_some_stream(state: State, save: Save, worker: Worker) -> ev.StreamAssigned | None:
    """Assign an orphaned stream, or else a new one; None if neither is possible."""
    assigned = ev.StreamAssigned(
        save_id=save.save_id,
        stream=len(save.streams),
        worker_address=worker.address,
        worker_uid=worker.uid,
        stock=worker.stock,
    )
    for number, stream in enumerate(save.streams):
        if is_orphaned(state, save, stream):
            assigned.stream, assigned.first, assigned.count = number, stream.first, stream.count
            return assigned
    if worker.stock:
        if any(stream.completed for stream in save.streams):
            return None  # a completed stream has reached the end of the data
    elif save.indivisible:
        return None
    else:
        assigned.first = save.sources[0].next
        left = _count_splits(save) - assigned.first
        if not left and save.streams:
            return None
        writers = sum(not (w.stock or w.draining) for w in state.workers.values())
        # Half of the even share, so that the last streams end at about the same time. The minimum:
        # each stream costs a pipeline and a dataset.
        least = -(-_count_splits(save) // (STREAMS * writers))
        share = max(-(-left // (2 * writers)), least)
        assigned.count = left if writers < 2 else min(share, left)
    return assigned


def _count_splits(save: Save) -> int:
    """The number of splits of a save; several sources are zipped, so the shortest counts."""
    return min(source.size for source in save.sources)


def _stream_assigned(state: State, event: ev.StreamAssigned) -> None:
    save = state.saves[event.save_id]
    save.stock = event.stock
    if event.stream < len(save.streams):
        stream = save.streams[event.stream]
        stream.address, stream.uid = event.worker_address, event.worker_uid
        stream.assignments += 1
    else:
        stream = Stream(event.worker_address, event.worker_uid, event.first, event.count)
        if event.stock:
            stream.sources = [StreamSource() for _ in save.sources]
        else:
            save.sources[0].next = event.first + event.count
        save.streams.append(stream)
    tell_writer(state, save, stream)


def tell_writer(state: State, save: Save, stream: Stream) -> None:
    """Increment the version of the stream's worker: its list of streams has changed."""
    worker = state.workers.get(state.worker_at.get(stream.address, 0))
    if worker is not None and is_written_by(save, stream, worker):
        worker.version += 1


def _assign_split(state: State, command: AssignSplit) -> Decision:
    save = find_save(state, command.path)
    if isinstance(save, EndedSave) or not 0 <= command.stream < len(save.streams):
        raise FailedPrecondition(
            f"the save at {command.path!r} has no stream {command.stream} that is being written"
        )
    stream = save.streams[command.stream]
    if not save.stock or stream.completed or stream.address != command.worker_address:
        raise FailedPrecondition(
            f"stream {command.stream} of the save at {command.path!r} is no longer written by "
            f"the worker {command.worker_address}, but was assigned to {stream.address}"
        )
    if not 0 <= command.source < len(save.sources):
        raise InvalidArgument(
            f"the save at {command.path!r} has {len(save.sources)} split sources, and none is "
            f"number {command.source}"
        )
    source = save.sources[command.source]
    assigned = stream.sources[command.source].assigned
    later = command.pass_number > source.pass_number
    number = 0 if later else source.next
    if command.pass_number < source.pass_number or number >= source.size:
        return Decision([], (assigned, None))
    asked = fields_of(command, "stream", "source", "pass_number")
    event = ev.SaveSplitAssigned(save_id=save.save_id, number=number, **asked)
    return Decision([event], (assigned, event))


def _save_split_assigned(state: State, event: ev.SaveSplitAssigned) -> None:
    save = state.saves[event.save_id]
    source, stream = save.sources[event.source], save.streams[event.stream].sources[event.source]
    source.pass_number, source.next = event.pass_number, event.number + 1
    last = stream.runs[-1] if stream.runs else None
    if (
        last is not None
        and last.pass_number == event.pass_number
        and last.first + last.count == event.number
        and last.place + last.count == save.assigned
    ):
        last.count += 1
    else:
        stream.runs.append(SplitRun(event.pass_number, event.number, save.assigned))
    stream.assigned += 1
    save.assigned += 1


def _commit_chunk(state: State, command: CommitChunk) -> Decision:
    if (stream := stream_of(state, command)) is None:
        raise FailedPrecondition(
            f"stream {command.stream} of save {command.save_id} is not this worker's any more: it "
            "was given up and another one goes on with it, or the save is over"
        )
    if command.chunk == stream.chunks - 1 and command.file == stream.last_file:
        return Decision([], None)
    if command.chunk != stream.chunks or command.elements <= 0 or not command.file:
        raise InvalidArgument(
            f"chunk {command.chunk} of stream {command.stream} with {command.elements} elements "
            f"cannot follow: {stream.chunks} chunks were committed"
        )
    asked = fields_of(command, "save_id", "stream", "elements", "file")
    return Decision([ev.ChunkCommitted(**asked)], None)


def stream_of(state: State, command: OfStream) -> Stream | None:
    """The command's stream, if it is running and this worker's, under that assignment."""
    save, number = state.saves.get(command.save_id), command.stream
    if save is None or number is None or not 0 <= number < len(save.streams):
        return None
    stream = save.streams[number]
    if save.stock:
        mine = stream.address == command.worker_address
    else:
        is_last = command.assignment in (0, stream.assignments)
        mine = stream.uid == command.worker_uid and is_last
    return stream if mine and not stream.completed else None


def _chunk_committed(state: State, event: ev.ChunkCommitted) -> None:
    stream = state.saves[event.save_id].streams[event.stream]
    stream.chunks += 1
    stream.elements += event.elements
    stream.last_elements, stream.last_file = event.elements, event.file


def _complete_stream(state: State, command: CompleteStream) -> Decision:
    if (stream := stream_of(state, command)) is None:
        return Decision([], None)
    save = state.saves[command.save_id]
    events: Bodies = [ev.StreamCompleted(save_id=save.save_id, stream=command.stream)]
    all_given = save.stock or save.sources[0].next >= _count_splits(save)
    if all_given and all(other.completed or other is stream for other in save.streams):
        events.append(ev.SaveFinished(save_id=save.save_id))
    return Decision(events, None)


def _stream_completed(state: State, event: ev.StreamCompleted) -> None:
    save = state.saves[event.save_id]
    stream = save.streams[event.stream]
    stream.completed, stream.sources = True, []
    tell_writer(state, save, stream)


DECIDE = {
    AssignStream: _assign_stream,
    AssignSplit: _assign_split,
    CommitChunk: _commit_chunk,
    CompleteStream: _complete_stream,
}
EVENTS = {
    "stream_assigned": EventKind(_stream_assigned),
    "save_split_assigned": EventKind(_save_split_assigned, is_quiet=True),
    "chunk_committed": EventKind(_chunk_committed, is_quiet=True),
    "stream_completed": EventKind(_stream_completed),
}
