"""Saved states and readers of an ordered read, where its dataset's id has another dataset."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf

from forebay import service
from forebay.service.errors import FailedPrecondition, InvalidArgument

from ..ordered_reads import Cluster, opened, read

COUNT = 40
ORDER: dict[str, Any] = {"seed": 5, "cycle_length": 3, "bundle_splits": 4}

Make = Callable[[int], Any]


def mapped(factor: int) -> tf.data.Dataset:
    return tf.data.Dataset.range(COUNT).map(lambda x: x * factor)


def yielding(factor: int) -> Any:
    def numbers(split: int) -> Iterator[int]:
        yield split * factor

    return service.python_dataset(range(COUNT))(numbers)


KINDS: dict[str, Make] = {"mapped": mapped, "yielding": yielding}


def register(cluster: Cluster, dataset: Any, dataset_id: str) -> None:
    assert service.register_dataset(cluster.target, dataset, dataset_id=dataset_id) == dataset_id


def replace(cluster: Cluster, dataset: Any, dataset_id: str) -> None:
    service.remove_dataset(cluster.target, dataset_id)
    register(cluster, dataset, dataset_id)


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Another dispatcher, on another storage."""
    with Cluster(tmp_path_factory.mktemp("elsewhere"), 1) as running:
        yield running


def begin(cluster: Cluster, dataset_id: str) -> tuple[list[int], dict[str, Any]]:
    """The whole epoch, and the state behind twelve elements."""
    part = read(cluster.target, dataset_id, steps=3, batch_size=4, **ORDER)
    whole = read(cluster.target, dataset_id, batch_size=4, **ORDER)
    assert whole.numbers[:12] == part.numbers
    return whole.numbers, part.state


def rest(cluster: Cluster, dataset_id: str, state: dict[str, Any], **how: Any) -> list[int]:
    return read(cluster.target, dataset_id, state=state, batch_size=4, **ORDER, **how).numbers


@pytest.mark.parametrize("kind", ["mapped", pytest.param("yielding", marks=pytest.mark.long)])
def test_a_state_holds_for_one_pipeline_under_an_id(
    cluster: Cluster, elsewhere: Cluster, kind: str
) -> None:
    """Also behind a restart, where the pipeline is registered again, and for another job."""
    make = KINDS[kind]
    register(cluster, make(1), kind)
    whole, state = begin(cluster, kind)
    register(elsewhere, make(3), kind)
    replace(cluster, make(3), kind)
    for there in (cluster, elsewhere):
        with pytest.raises(FailedPrecondition, match=r"another dataset.*start_position=12"):
            rest(there, kind, state)
    cluster.dispatcher.kill_and_restart()
    with pytest.raises(FailedPrecondition, match="another dataset"):
        rest(cluster, kind, state)
    for there in (cluster, elsewhere):
        replace(there, make(1), kind)
        assert rest(there, kind, state) == whole[12:]
    cluster.dispatcher.kill_and_restart()
    assert rest(cluster, kind, state, job_name="another job") == whole[12:]


def test_whether_the_id_was_asked_for_does_not_count(cluster: Cluster, elsewhere: Cluster) -> None:
    named = mapped(7)
    register(cluster, named, "seven")
    whole, state = begin(cluster, "seven")
    chosen = service.register_dataset(elsewhere.target, mapped(7))
    assert chosen != "seven"
    assert rest(elsewhere, chosen, state) == whole[12:]
    # One that was registered under an id is not given to others.
    assert service.register_dataset(cluster.target, mapped(7)) != "seven"


def test_a_reader_that_was_made_before_reads_no_other_dataset(cluster: Cluster) -> None:
    register(cluster, mapped(1), "replaced")
    with opened(cluster.target, "replaced", **ORDER) as elements:
        replace(cluster, mapped(2), "replaced")
        with pytest.raises(FailedPrecondition, match="another one has its id"):
            next(elements)
    with opened(cluster.target, "replaced", **ORDER) as elements:
        replace(cluster, mapped(2), "replaced")
        assert next(elements) % 2 == 0


def test_a_lost_graph_is_replaced_by_the_same_one_only(elsewhere: Cluster, tmp_path: Path) -> None:
    with Cluster(tmp_path, 1) as cluster:
        register(cluster, mapped(1), "lost")
        whole, state = begin(cluster, "lost")
        (blob,) = (path for path in (tmp_path / "blobs").iterdir() if path.is_file())
        blob.write_bytes(b"")
        with pytest.raises(InvalidArgument, match="'lost', whose graph is lost, has another graph"):
            register(cluster, mapped(2), "lost")
        register(cluster, mapped(1), "lost")
        assert rest(cluster, "lost", state) == whole[12:]


def test_a_cluster_of_another_size_on_another_storage(cluster: Cluster, elsewhere: Cluster) -> None:
    """Its metadata say how many replicas it began with, which is not in what it reads."""
    position = service.OrderedPosition()
    found = []
    for there, tasks in ((cluster, 1), (elsewhere, 2)):
        context = service.TaskContext(num_consumers=tasks)  # its chief
        dataset = service.distribute_across(
            lambda _: mapped(1), there.target, context, job_name="of any size", ordered=True,
            add_position=True, start_position=position, batch_size=4 // tasks, **ORDER,
        )  # fmt: skip
        batches = dataset.as_numpy_iterator()
        batch, behind = next(batches)
        found.append(batch.tolist())
        position.assign(behind)
    whole, _ = begin(elsewhere, service.register_dataset(elsewhere.target, mapped(1)))
    assert found == [whole[:4], whole[4:6]]
