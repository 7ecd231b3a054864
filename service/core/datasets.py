"""Datasets: registered pipelines, immutable.

Removing a dataset removes its jobs. The dispatcher never picks its id again, but a user may
reuse it. The storage deletes the graph afterwards. Until then `State.unused_blobs` names it, so
that a new leader can continue the deletion.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from ...journal.datasets import SHARES, forget_analysis, stored
from ...journal.proto import events_pb2 as ev
from ...journal.splits import grows
from ..errors import FailedPrecondition, InvalidArgument
from .base import Command, Decision, EventKind, find_dataset, itself, reserve_id
from .bundles import splits_of
from .jobs import readers_of, removed
from .saves import is_absolute
from .state import Dataset, Job, State


class RegisterDataset(Command, frozen=True, kw_only=True):
    """→ DatasetRegistered. If an equal dataset is registered: → DatasetUsed with `renews`, else
    nothing. Answers the dataset's id.
    """

    dataset_id: str  # empty: choose one
    definition: ev.DatasetDefinition
    restores: bool = False  # this definition replaces the one whose graph is lost
    renews: bool = False
    graph_bytes: int = 0


class RemoveDataset(Command, frozen=True, kw_only=True):
    """→ LeaseLost …, IterationCollected …, JobRemoved … of its jobs, DatasetRemoved. Answers the
    DatasetRemoved event.

    If its jobs have consumers: raises FailedPrecondition, or, with `force`, → ConsumerLeft … first.
    """

    dataset_id: str
    force: bool = False


class ForgetBlob(Command, frozen=True, kw_only=True):
    """The storage has deleted the blob. → BlobDeleted"""

    blob: str


class DecideCompression(Command, frozen=True, kw_only=True):
    """The first answer for a dataset is final. → CompressionDecided"""

    dataset_id: str
    disable: bool


def fingerprint(definition: ev.DatasetDefinition) -> str:
    """A hash that equal datasets share, whatever names were generated for their graphs."""
    equal = ev.DatasetDefinition()
    equal.CopyFrom(definition)
    if stored(equal).fingerprint and not stored(equal).named:
        stored(equal).blob = ""
    return hashlib.sha256(equal.SerializeToString(deterministic=True)).hexdigest()


def _register_dataset(state: State, command: RegisterDataset) -> Decision:
    _require_splits(command.definition)
    _require_sources(state, command.definition)
    dataset_id = command.dataset_id
    if command.restores:
        find_dataset(state, dataset_id)  # its id is not chosen again
    if dataset_id and (known := state.datasets.get(dataset_id)):
        old, new = known.outline, command.definition
        if (old.metadata, old.compression) != (new.metadata, new.compression):
            raise InvalidArgument(
                "Datasets with the same ID should have the same structure: dataset "
                f"{dataset_id!r} is registered with another element_spec, compression or "
                "cardinality; register the new one under another id"
            )
        if not command.restores or known.definition == command.definition:
            return _known(dataset_id, command)
        if _without_graph(known.definition) != _without_graph(command.definition):
            raise InvalidArgument(
                f"dataset {dataset_id!r}, whose graph is lost, has another graph, other splits or "
                "another structure than this one; register the new one under another id, or remove "
                "the old one first"
            )
    if not dataset_id:
        equal = state.dataset_by_fingerprint.get(fingerprint(command.definition))
        if equal is not None:
            return _known(equal, command)
        dataset_id = _free_dataset_id(state)
    registered = ev.DatasetRegistered(
        dataset_id=dataset_id, definition=command.definition, graph_bytes=command.graph_bytes
    )
    kind = "mixture" if command.definition.HasField("mixture") else "dataset"
    event = ev.Event(**{f"{kind}_registered": registered})  # type: ignore[arg-type]
    return Decision([event], dataset_id)


def _known(dataset_id: str, command: RegisterDataset) -> Decision:
    return Decision([ev.DatasetUsed(dataset_id=dataset_id)] if command.renews else [], dataset_id)


def _require_sources(state: State, definition: ev.DatasetDefinition) -> None:
    for source in definition.mixture.sources:
        known = state.datasets.get(source.dataset_id)
        if known is None or known.content != source.content:
            raise FailedPrecondition(
                f"dataset {source.dataset_id}, source {source.name!r} of the mixture, was removed "
                "just now: register both again"
            )


def _require_splits(definition: ev.DatasetDefinition) -> None:
    for number, source in enumerate(definition.sources):
        kind = source.WhichOneof("source")
        if not kind or source.count < 0 or (kind == "arithmetic" and source.arithmetic.step == 0):
            raise InvalidArgument(
                f"a dataset with the split source <{source}>, which yields no splits: name "
                "a kind, a count of at least 0, a step other than 0"
            )
        if grows(source) and not is_absolute(path := source.saved_chunks.path):
            raise InvalidArgument(
                f"a dataset that is loaded from a distributed save at {path!r}: give the absolute "
                "path of a directory that the dispatcher and all workers see under this name"
            )
        first = source.leased_with
        if source.HasField("leased_with") and (
            not 0 <= first < number or definition.sources[first].HasField("leased_with")
        ):
            raise InvalidArgument(
                f"split source {number} is leased with source {first}: name one before it that is "
                "leased on its own"
            )
        zipped = [source, definition.sources[first]] if source.HasField("leased_with") else []
        if any(map(grows, zipped)) and not zipped[1].unleasable:
            raise InvalidArgument(
                f"split source {number} is leased with source {first}, and nobody knows how many "
                "splits a distributed save will have: zip before you save, or where you read"
            )


def _without_graph(definition: ev.DatasetDefinition) -> ev.DatasetDefinition:
    """What a replacement for a lost graph must share with it: the fingerprint, the splits and the
    structure, but for what depends on the version that analysed the graph."""
    rest = ev.DatasetDefinition()
    rest.CopyFrom(definition)
    stored(rest).blob, stored(rest).named = "", False
    rest.ClearField("unsplittable")
    forget_analysis(rest.sources)
    return rest


def _free_dataset_id(state: State) -> str:
    number = state.next_id
    while str(number) in state.datasets:
        number += 1
    return str(number)


def _dataset_registered(state: State, event: ev.DatasetRegistered) -> None:
    definition = event.definition.SerializeToString(deterministic=True)
    known = state.datasets.get(event.dataset_id)  # its graph was lost
    disabled = known.compression_disabled if known else None
    registered_ms = known.registered_ms if known else state.time_ms
    state.datasets[event.dataset_id] = Dataset(
        event.dataset_id, definition, disabled, event.graph_bytes, registered_ms, state.time_ms
    )
    if known:
        _leave_blob(state, known)
    state.dataset_by_fingerprint.setdefault(fingerprint(event.definition), event.dataset_id)
    if event.dataset_id.isdecimal() and len(event.dataset_id) < 19:
        reserve_id(state, int(event.dataset_id))


def _dataset_used(state: State, event: ev.DatasetUsed) -> None:
    state.datasets[event.dataset_id].used_ms = state.time_ms


def mixtures_of(state: State, dataset_id: str) -> list[str]:
    """The ids of those that have it as a source."""
    return [
        known.dataset_id
        for known in state.datasets.values()
        if any(source.dataset_id == dataset_id for source in known.outline.mixture.sources)
    ]


def mixture(state: State, asked: Sequence[ev.MixtureSource]) -> ev.DatasetDefinition:
    """The definition of a mixture of registered datasets, whose sources say `name`, `dataset_id`
    and `share`. Raises InvalidArgument, NotFound and Unimplemented."""
    if not asked:
        raise InvalidArgument("a mixture without sources: give at least one")
    names = [source.name for source in asked]
    if len({*names}) < len(names) or not all(names):
        raise InvalidArgument(f"the sources are named {names}: give each a name of its own")
    if sum(source.share for source in asked) != SHARES or min(s.share for s in asked) < 0:
        raise InvalidArgument(f"the shares of {names} do not add up to {SHARES}")
    definition = ev.DatasetDefinition()
    for source in asked:
        dataset, first = (find_dataset(state, each.dataset_id) for each in (source, asked[0]))
        if dataset.outline.HasField("mixture"):
            raise InvalidArgument(
                f"source {source.name!r} is dataset {source.dataset_id}, a mixture itself: give "
                "its sources, with its weights times their own"
            )
        splits_of(dataset)
        if (mine := _form(dataset.outline)) != (others := _form(first.outline)):
            raise InvalidArgument(
                "the sources of a mixture must have elements of one element_spec: "
                f"{names[0]!r} has {others!r}, and {source.name!r} has {mine!r}"
            )
        definition.mixture.sources.add(
            name=source.name, dataset_id=source.dataset_id, share=source.share,
            content=dataset.content,
        )  # fmt: skip
    outline = find_dataset(state, asked[0].dataset_id).outline
    definition.structure, definition.compression = outline.structure, outline.compression
    return definition


def _form(outline: ev.DatasetDefinition) -> str | bytes:
    """How elements arrive, as readers are told of it."""
    return outline.structure or outline.metadata


def jobs_of(state: State, dataset_id: str) -> list[Job]:
    """All jobs of the dataset, including those without a name."""
    return [job for job in state.jobs.values() if job.dataset_id == dataset_id]


def _remove_dataset(state: State, command: RemoveDataset) -> Decision:
    find_dataset(state, command.dataset_id)
    if mixtures := mixtures_of(state, command.dataset_id):
        raise FailedPrecondition(
            f"dataset {command.dataset_id} is a source of the mixtures {', '.join(mixtures)}: "
            "remove these first"
        )
    jobs = jobs_of(state, command.dataset_id)
    if not command.force and (reading := [job for job in jobs if readers_of(state, job)]):
        count = sum(len(readers_of(state, job)) for job in reading)
        raise FailedPrecondition(
            f"dataset {command.dataset_id} is being read by {count} consumers, of the jobs "
            f"{', '.join(job.user_name for job in reading)}: "
            "stop them first, or remove it by force, which ends them with an error; one whose "
            "process was killed is given up after client_timeout_ms"
        )
    reason = f"its dataset {command.dataset_id} was removed"
    events = [event for job in jobs for event in removed(state, job, reason)]
    names = [job.name for job in jobs if job.name]
    gone = ev.DatasetRemoved(dataset_id=command.dataset_id, jobs=names)
    return Decision([*events, gone], gone)


def _dataset_removed(state: State, event: ev.DatasetRemoved) -> None:
    dataset = state.datasets.pop(event.dataset_id)
    found_by = state.dataset_by_fingerprint  # several fingerprints, if its graph was lost
    for known in [known for known, found in found_by.items() if found == event.dataset_id]:
        del found_by[known]
    _leave_blob(state, dataset)


def _leave_blob(state: State, dataset: Dataset) -> None:
    """Mark the dataset's graph for deletion."""
    if blob := stored(dataset.outline).blob:
        state.unused_blobs.append(blob)


def _forget_blob(state: State, command: ForgetBlob) -> Decision:
    if command.blob not in state.unused_blobs:
        return Decision([], None)
    return Decision([ev.BlobDeleted(blob=command.blob)], None)


def _blob_deleted(state: State, event: ev.BlobDeleted) -> None:
    state.unused_blobs.remove(event.blob)


def _decide_compression(state: State, command: DecideCompression) -> Decision:
    dataset = find_dataset(state, command.dataset_id)
    if dataset.compression_disabled is not None:
        return Decision([], dataset.compression_disabled)
    decided = ev.CompressionDecided(dataset_id=command.dataset_id, disabled=command.disable)
    return Decision([decided], command.disable)


def _compression_decided(state: State, event: ev.CompressionDecided) -> None:
    state.datasets[event.dataset_id].compression_disabled = event.disabled


DECIDE = {
    RegisterDataset: _register_dataset,
    RemoveDataset: _remove_dataset,
    ForgetBlob: _forget_blob,
    DecideCompression: _decide_compression,
}
EVENTS = {
    "dataset_registered": EventKind(_dataset_registered),
    "mixture_registered": EventKind(_dataset_registered),
    "dataset_used": EventKind(_dataset_used),
    "dataset_removed": EventKind(_dataset_removed, answer=itself),
    "blob_deleted": EventKind(_blob_deleted),
    "compression_decided": EventKind(_compression_decided),
}
