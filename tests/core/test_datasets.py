"""Datasets: which registrations are one."""

from __future__ import annotations

import hashlib

import msgspec
import pytest

from forebay.journal.proto import events_pb2 as ev
from forebay.service.core import commands as c
from forebay.service.errors import InvalidArgument, NotFound

from .given import Given, dataset


def test_graphs_of_one_fingerprint_are_one_dataset_unless_they_are_registered_otherwise() -> None:
    given = Given()
    first = given.when(dataset("a", "same"))
    assert given.when(dataset("b", "same")) == first
    assert given.then == []
    others = {
        given.when(dataset("a", "other")),
        given.when(dataset("a", "same", metadata=b"m")),
        given.when(dataset("a", "same", compression="ZSTD")),
        given.when(dataset("a")),
        given.when(dataset("b")),
    }
    assert len(others) == 5
    assert first not in others


def test_datasets_of_old_journals_are_found_by_their_graphs_themselves() -> None:
    given = Given()
    definition = ev.DatasetDefinition(tf_data_graph=ev.TfDataGraph(blob="a"))
    digest = hashlib.sha256(definition.SerializeToString()).hexdigest()
    assert given.state.dataset_by_fingerprint.get(digest) is None
    assert given.when(dataset("a")) == given.state.dataset_by_fingerprint[digest]


def test_a_dataset_whose_graph_is_lost_is_given_another_one_of_the_same_splits() -> None:
    given = Given()
    lost = dataset("a", "same", sources=[ev.SplitSource(count=9)])
    dataset_id = given.when(lost)
    given.when(c.DecideCompression(dataset_id=dataset_id, disable=True))

    def register(blob: str, restores: bool, count: int = 9) -> c.RegisterDataset:
        again = dataset(blob, sources=[ev.SplitSource(count=count)])
        return msgspec.structs.replace(again, dataset_id=dataset_id, restores=restores)

    assert given.when(register("b", False)) == dataset_id
    assert given.then == []
    with pytest.raises(InvalidArgument, match="other splits or another structure"):
        given.when(register("b", True, count=8))
    assert given.when(register("b", True)) == dataset_id
    assert given.then == ["dataset_registered"]
    restored = given.state.datasets[dataset_id]
    assert restored.definition.tf_data_graph.blob == "b"
    assert restored.compression_disabled, "which workers were told"
    assert given.when(register("b", True)) == dataset_id
    assert given.then == []
    assert given.when(dataset("c", "same", sources=[ev.SplitSource(count=9)])) == dataset_id
    given.when(c.RemoveDataset(dataset_id=dataset_id))
    with pytest.raises(NotFound, match=f"Dataset id {dataset_id} not found"):
        given.when(register("d", True))
