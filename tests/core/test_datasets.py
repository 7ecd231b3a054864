"""Datasets: which registrations are one."""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec
import pytest

from forebay.journal.datasets import content_fingerprint, stored
from forebay.journal.proto import events_pb2 as ev
from forebay.service.core import commands as c
from forebay.service.core.read_kinds import why_no_task
from forebay.service.dispatcher.graphs import needed_blobs
from forebay.service.errors import FailedPrecondition, InvalidArgument, NotFound

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


def test_a_dataset_whose_graph_is_lost_is_given_an_equal_one() -> None:
    given = Given()
    lost = dataset("a", "same", sources=[ev.SplitSource(count=9)])
    dataset_id = given.when(lost)
    given.when(c.DecideCompression(dataset_id=dataset_id, disable=True))

    def register(
        blob: str, restores: bool, count: int = 9, graph: str = "same"
    ) -> c.RegisterDataset:
        again = dataset(blob, graph, sources=[ev.SplitSource(count=count)])
        stored(again.definition).named = True
        return msgspec.structs.replace(again, dataset_id=dataset_id, restores=restores)

    assert given.when(register("b", False)) == dataset_id
    assert given.then == []
    with pytest.raises(InvalidArgument, match="other splits or another structure"):
        given.when(register("b", True, count=8))
    with pytest.raises(InvalidArgument, match="has another graph"):
        given.when(register("b", True, graph="other"))
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


def test_a_job_is_of_the_content_that_was_asked_for() -> None:
    given = Given()
    dataset_id = given.when(dataset("a", "same"))
    known = given.state.datasets[dataset_id]
    how = {"dataset_id": dataset_id, "name": "n", "sharding": ev.OFF}
    job = given.when(c.GetOrCreateJob(**how, content=known.content))
    assert given.when(c.GetOrCreateJob(**how)) == job
    with pytest.raises(FailedPrecondition, match="another one has its id"):
        given.when(c.GetOrCreateJob(**how, content="other"))
    with pytest.raises(FailedPrecondition, match="another one has its id"):
        given.when(c.JoinJob(**how, epoch=1, content="other"))


def test_what_the_content_of_a_dataset_is() -> None:
    def content(fingerprint: str = "same", blob: str = "a", **fields: Any) -> str:
        fields = {"structure": "[]", "sources": [ev.SplitSource(count=9)], **fields}
        return content_fingerprint(dataset(blob, fingerprint, **fields).definition)

    same = content()
    assert content(blob="b") == same
    assert content(metadata=b"of a training") == content(compression="ZSTD") == same
    assert content(sources=[ev.SplitSource(count=9, singly=True)]) == same
    others = {
        content("other"),
        content(structure="{}"),
        content(sources=[ev.SplitSource(count=8)]),
        content(sources=[ev.SplitSource(count=9), ev.SplitSource(count=9)]),
        content(sources=[]),
    }
    assert len(others) == 5 and same not in others


def python_dataset(blob: str, fingerprint: str = "same") -> c.RegisterDataset:
    function = ev.PythonFunction(blob=blob, fingerprint=fingerprint)
    sources = [ev.SplitSource(count=9)]
    definition = ev.DatasetDefinition(python_function=function, sources=sources)
    return c.RegisterDataset(dataset_id="", definition=definition)


def test_python_datasets_are_registered_restored_and_removed_as_graphs_are() -> None:
    given = Given()
    first = given.when(python_dataset("a.1"))
    assert given.when(python_dataset("b.1")) == first
    assert given.when(python_dataset("b", "other")) != first
    graph = given.when(dataset("g", "same", sources=[ev.SplitSource(count=9)]))
    assert graph != first
    restored = msgspec.structs.replace(python_dataset("c.1"), dataset_id=first, restores=True)
    given.when(restored)
    assert given.then == ["dataset_registered"]
    assert given.state.unused_blobs == ["a.1"]
    other = msgspec.structs.replace(restored, dataset_id=graph)
    with pytest.raises(InvalidArgument, match="another structure"):
        given.when(other)
    given.when(c.RemoveDataset(dataset_id=first))
    assert "c.1" not in needed(given)


def needed(given: Given) -> set[str]:
    return set(needed_blobs(given.state).values())


@pytest.mark.parametrize("stock", [False, True])
def test_a_worker_that_cannot_run_a_python_dataset_gets_no_task_of_it(stock: bool) -> None:
    """Whether they come before the reader or after, or are all that is left."""
    given = Given()
    dataset_id = given.when(python_dataset("a"))
    before = given.when(
        c.RegisterWorker(address="cannot:1", uid=1, stock=stock, no_python=not stock)
    )
    iteration = given.state.iterations[given.iteration(dataset_id=dataset_id).iteration_id]
    why = why_no_task(given.state, iteration)
    assert why.startswith(f"dataset {dataset_id} is a Python dataset, and none of the 1 registered")
    assert why.endswith("start a worker with --allow-python")
    after = given.when(
        c.RegisterWorker(address="cannot:2", uid=2, stock=stock, no_python=not stock)
    )
    ours = given.when(c.RegisterWorker(address="ours:1", uid=3))
    assert why_no_task(given.state, iteration) == ""
    assert [given.state.tasks[i].worker_id for i in iteration.tasks] == [ours]
    (task_id,) = iteration.tasks
    lease = given.lease(task_id, 4)
    given.hand_back(lease, 4)
    while given.lease(task_id, 9) is not None:
        pass
    given.when(c.LoseWorker(worker_id=ours, reason="it said goodbye", left=True))
    assert not iteration.tasks, "nobody is left who could sweep up what was handed back"
    assert not iteration.finished
    assert not any(given.state.workers[w].tasks for w in (before, after))
    again = given.when(c.RegisterWorker(address="ours:2", uid=4))
    assert [given.state.tasks[i].worker_id for i in iteration.tasks] == [again]


def test_a_worker_that_runs_no_python_reads_files() -> None:
    """They have no code of a user's. TensorFlow's workers know no such dataset."""
    given = Given()
    register = python_dataset("a")
    register.definition.python_function.no_code = True
    dataset_id = given.when(register)
    given.when(c.RegisterWorker(address="stock:1", uid=1, stock=True))
    iteration = given.state.iterations[given.iteration(dataset_id=dataset_id).iteration_id]
    assert not iteration.tasks
    ours = given.when(c.RegisterWorker(address="ours:1", uid=2, no_python=True))
    assert [given.state.tasks[i].worker_id for i in iteration.tasks] == [ours]


@pytest.mark.parametrize("read", [True, False])
def test_trainers_of_one_job_name_with_different_datasets(read: bool) -> None:
    """Each would have all elements. tf.data service reads both, and so does its client here."""
    given = Given()
    ids = [given.when(dataset("a", print_)) for print_ in ("one", "two")]
    contents = [given.state.datasets[dataset_id].content for dataset_id in ids]

    def joins(dataset_id: str, **how: Any) -> Any:
        name = f"dataset_id=/{dataset_id}/train"
        join = c.JoinJob(dataset_id=dataset_id, name=name, sharding=ev.OFF, epoch=1, **how)
        return given.when(join).consumer_id

    first = [joins(ids[0], one_dataset=True) for _ in range(2)]
    if not read:
        for consumer_id in first:
            given.when(c.LeaveIteration(consumer_id=consumer_id, reason=""))
        assert joins(ids[1], one_dataset=True)
        return
    with pytest.raises(FailedPrecondition, match=f"{contents[0]}.*{contents[1]}") as refused:
        joins(ids[1], one_dataset=True)
    assert "the job 'train'" in str(refused.value)
    assert joins(ids[1])  # TensorFlow's clients do not ask
    assert joins(ids[1], one_dataset=True)  # the job is there
