"""The status that a dispatcher encodes piece by piece, while its state goes on."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from forebay.journal.proto import events_pb2 as ev
from forebay.service.core.machine import apply
from forebay.service.core.state import Dataset, State
from forebay.service.core.status import encoded_datasets, encoded_status, status
from forebay.service.structure import describe

from .make_fold import LIVES, Cluster
from .test_splits import growing


def decoded(pieces: Iterator[bytes]) -> Any:
    return json.loads(b"".join(pieces))


def nothing(_: int) -> None: ...


@pytest.mark.parametrize("life", LIVES)
def test_a_status_shows_the_state_at_the_time_of_its_request(life: str) -> None:
    cluster, state = Cluster(), State()
    LIVES[life](cluster)
    begun: list[tuple[Any, Iterator[bytes]]] = []
    for number, event in enumerate(cluster.events):
        if number % 7 == 0:
            expected = json.loads(json.dumps(status(state)))
            begun.append((expected, encoded_status(state, nothing)))
            for _, pieces in begun[-3:]:
                next(pieces)
        apply(state, event)
    for expected, pieces in begun:
        rest = b"".join(pieces)
        assert expected["jobs"] == json.loads(b"{" + rest[rest.index(b'"jobs":') :])["jobs"]
    assert decoded(encoded_status(state, nothing)) == json.loads(json.dumps(status(state)))


def test_a_status_includes_facts_that_are_not_in_the_state() -> None:
    state = growing()[0].state
    found = decoded(encoded_status(state, lambda number: {"of": number}, {"strangers": ["w:1"]}))
    assert found["strangers"] == ["w:1"]
    iterations = [each for job in found["jobs"] for each in job["iterations"]]
    assert iterations and all(
        each["metrics"] == {"of": each["iteration_id"]} for each in iterations
    )


def test_lists_of_datasets_shorten_long_texts() -> None:
    """An earlier version has registered these."""
    structure = json.dumps({"tuple": [{"tensor": "int64", "shape": []}] * 10_000})
    definition = ev.DatasetDefinition(structure=structure, unsplittable="x" * 100_000)
    given = State()
    given.datasets["id"] = Dataset("id", definition.SerializeToString())
    listed = encoded_datasets(given)
    assert len(listed) < 2_000 and len(json.dumps(status(given))) < 4_000
    assert describe(json.loads(listed)[0]["structure"]).startswith('{"tuple": [{"tensor": "int64"')


def test_an_outline_has_as_many_splits() -> None:
    definition = ev.DatasetDefinition(structure="{}", unsplittable="why")
    definition.sources.add(leased_with=1, singly=True).explicit.splits.extend([b"a", b"b"])
    definition.sources.add(count=7)
    dataset = Dataset("id", definition.SerializeToString())
    outline = dataset.outline
    assert [source.count for source in outline.sources] == [2, 7]
    assert (outline.sources[0].leased_with, outline.sources[0].singly) == (1, True)
    assert (outline.structure, outline.unsplittable) == ("{}", "why")
    assert dataset.definition == definition
    assert dataset.outline is outline
    assert dataset == Dataset("id", definition.SerializeToString())


def test_datasets_are_listed_as_json() -> None:
    state = growing()[0].state
    assert [each["dataset_id"] for each in json.loads(encoded_datasets(state))] == [*state.datasets]
    assert json.loads(encoded_datasets(State())) == []
