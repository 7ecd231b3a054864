"""Iterators are not saved: neither they nor their job would know what was read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf

from forebay import service

from ..stock import DispatcherProcess

NUMBER = 300
REFUSED = (tf.errors.UnimplementedError, tf.errors.FailedPreconditionError)
Datasets = Callable[[Any], Any]


@pytest.fixture(scope="module")
def target(dispatcher: DispatcherProcess, worker: None) -> str:
    return dispatcher.target


@pytest.fixture
def read(target: str, request: pytest.FixtureRequest) -> Datasets:
    return service.distribute("distributed_epoch", target, job_name=request.node.name)


def with_options(dataset: Any, symbolic: bool, policy: str) -> Any:
    options = tf.data.Options()
    options.experimental_symbolic_checkpoint = symbolic
    options.experimental_external_state_policy = tf.data.experimental.ExternalStatePolicy[policy]
    return dataset.with_options(options)


ELEMENTS: dict[str, Callable[[Any], Any]] = {
    "rows of a block": lambda i: i,
    "slices of a block": lambda i: tf.fill([2000], i),
    "shapes that differ": lambda i: tf.range(i % 7 + 1),
    "composites": lambda i: tf.sparse.from_dense(tf.fill([3], i)),
}

BEHIND: dict[str, Datasets] = {
    "nothing": lambda d: d,
    "parallel map": lambda d: d.map(lambda *e: e, num_parallel_calls=2),
    "shuffle, prefetch": lambda d: d.shuffle(10, seed=1).prefetch(tf.data.AUTOTUNE),
    "zip": lambda d: tf.data.Dataset.zip(tf.data.Dataset.range(10**6), d),
    "repeat, flat_map": lambda d: d.repeat().flat_map(tf.data.Dataset.from_tensors),
    "interleave": lambda d: tf.data.Dataset.range(2).interleave(lambda _: d),
}


@pytest.mark.parametrize(
    ("symbolic", "policy"), [(True, "FAIL"), (False, "FAIL"), (False, "IGNORE")]
)
@pytest.mark.parametrize("element", ELEMENTS)
def test_an_iterator_is_not_saved(
    target: str, tmp_path: Path, element: str, symbolic: bool, policy: str
) -> None:
    """TensorFlow refuses it: part of what it reads keeps a state of its own."""
    dataset = tf.data.Dataset.range(NUMBER).map(ELEMENTS[element])
    for ordered in {False, element == "rows of a block"}:
        read = service.distribute("distributed_epoch", target, ordered=ordered)
        for behind in BEHIND.values():
            iterator = iter(with_options(behind(dataset.apply(read)), symbolic, policy))
            for _ in range(3):
                next(iterator)
            with pytest.raises(REFUSED, match=r"support|stateful"):
                tf.train.Checkpoint(iterator=iterator).save(str(tmp_path / "saved"))


def test_the_checkpoint_of_another_iterator_is_not_restored(read: Datasets, tmp_path: Path) -> None:
    """The other one read without the service. Afterwards the job's epoch is complete."""
    numbers = tf.data.Dataset.range(NUMBER)
    theirs = iter(with_options(numbers, True, "FAIL"))
    for _ in range(7):
        next(theirs)
    saved = tf.train.Checkpoint(iterator=theirs).save(str(tmp_path / "saved"))
    dataset = with_options(numbers.apply(read), True, "FAIL")
    with pytest.raises(tf.errors.NotFoundError, match="dataset definition has not changed"):
        tf.train.Checkpoint(iterator=iter(dataset)).restore(saved)
    assert sorted(int(e) for e in dataset) == list(range(NUMBER))
