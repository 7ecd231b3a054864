"""Datasets: registered pipelines, immutable."""

from __future__ import annotations

import hashlib

from ...journal.proto import events_pb2 as ev
from ..errors import InvalidArgument, NotFound
from .base import Apply, Command, Decide, Decision, taken
from .state import Dataset, State


class RegisterDataset(Command, frozen=True, kw_only=True):
    """→ DatasetRegistered, unless an equal dataset is registered. Answers the dataset's id."""

    dataset_id: str  # empty: choose one
    definition: ev.DatasetDefinition
    restores: bool = False  # the graph of the dataset of that id is lost: this one takes its place


class DecideCompression(Command, frozen=True, kw_only=True):
    """The first answer for a dataset is final. → CompressionDecided"""

    dataset_id: str
    disable: bool


def fingerprint(definition: ev.DatasetDefinition) -> str:
    """What equal datasets have in common, whatever names were generated for their graphs."""
    equal = ev.DatasetDefinition()
    equal.CopyFrom(definition)
    if equal.tf_data_graph.fingerprint:
        equal.tf_data_graph.blob = ""
    return hashlib.sha256(equal.SerializeToString(deterministic=True)).hexdigest()


def _register_dataset(state: State, command: RegisterDataset) -> Decision:
    _require_splits(command.definition)
    dataset_id = command.dataset_id
    if dataset_id and (known := state.datasets.get(dataset_id)):
        if (known.definition.metadata, known.definition.compression) != (
            command.definition.metadata,
            command.definition.compression,
        ):
            raise InvalidArgument(
                "Datasets with the same ID should have the same structure: dataset "
                f"{dataset_id!r} is registered with another element_spec, compression or "
                "cardinality; register the new one under another id"
            )
        if not command.restores or known.definition == command.definition:
            return Decision([], dataset_id)
        if _without_graph(known.definition) != _without_graph(command.definition):
            raise InvalidArgument(
                f"dataset {dataset_id!r}, whose graph is lost, has other splits or another "
                "structure than this one; register the new one under another id"
            )
    if not dataset_id:
        equal = state.dataset_by_fingerprint.get(fingerprint(command.definition))
        if equal is not None:
            return Decision([], equal)
        dataset_id = _free_dataset_id(state)
    registered = ev.DatasetRegistered(dataset_id=dataset_id, definition=command.definition)
    return Decision([ev.Event(dataset_registered=registered)], dataset_id)


def _require_splits(definition: ev.DatasetDefinition) -> None:
    for number, source in enumerate(definition.sources):
        kind = source.WhichOneof("source")
        if not kind or source.count < 0 or (kind == "arithmetic" and source.arithmetic.step == 0):
            raise InvalidArgument(
                f"a dataset with the split source <{source}>, which yields no splits: name "
                "a kind, a count of at least 0, a step other than 0"
            )
        first = source.leased_with
        if source.HasField("leased_with") and (
            not 0 <= first < number or definition.sources[first].HasField("leased_with")
        ):
            raise InvalidArgument(
                f"split source {number} is leased with source {first}: name one before it that is "
                "leased on its own"
            )


def _without_graph(definition: ev.DatasetDefinition) -> ev.DatasetDefinition:
    """What must be the same in the graph that replaces it, whatever version analysed them; but one
    that could be split and one that could not are not the same."""
    rest = ev.DatasetDefinition()
    rest.CopyFrom(definition)
    for field in ("tf_data_graph", "unsplittable"):
        rest.ClearField(field)
    for source in rest.sources:
        for field in ("unleasable", "singly"):
            source.ClearField(field)
    return rest


def _free_dataset_id(state: State) -> str:
    number = state.next_id
    while str(number) in state.datasets:
        number += 1
    return str(number)


def _dataset_registered(state: State, event: ev.DatasetRegistered) -> None:
    definition = event.definition.SerializeToString(deterministic=True)
    known = state.datasets.get(event.dataset_id)  # whose graph was lost
    disabled = known.compression_disabled if known else None
    state.datasets[event.dataset_id] = Dataset(event.dataset_id, definition, disabled)
    state.dataset_by_fingerprint.setdefault(fingerprint(event.definition), event.dataset_id)
    if event.dataset_id.isdecimal() and len(event.dataset_id) < 19:
        taken(state, int(event.dataset_id))


def _decide_compression(state: State, command: DecideCompression) -> Decision:
    dataset = state.datasets.get(command.dataset_id)
    if dataset is None:
        raise NotFound(f"Dataset id {command.dataset_id} not found")
    if dataset.compression_disabled is not None:
        return Decision([], dataset.compression_disabled)
    decided = ev.CompressionDecided(dataset_id=command.dataset_id, disabled=command.disable)
    return Decision([ev.Event(compression_decided=decided)], command.disable)


def _compression_decided(state: State, event: ev.CompressionDecided) -> None:
    state.datasets[event.dataset_id].compression_disabled = event.disabled


DECIDE: Decide = {RegisterDataset: _register_dataset, DecideCompression: _decide_compression}
APPLY: Apply = {
    "dataset_registered": _dataset_registered,
    "compression_decided": _compression_decided,
}
