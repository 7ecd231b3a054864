"""The job that a training's processes share, as all frameworks begin it: no framework is needed."""

from __future__ import annotations

import json
import logging
from collections.abc import Generator
from pathlib import Path
from typing import Any
from weakref import WeakSet

import pytest
import tensorflow as tf

from forebay import service
from forebay.service.client.lockstep import warn_if_unshared
from forebay.service.client.options import ShardingPolicy
from forebay.service.client.positions import OrderedRead
from forebay.service.client.progress import StaysFailed
from forebay.service.errors import FailedPrecondition, InvalidArgument
from forebay.service.task_context import TaskContext
from forebay.service.trainers.jobs import (
    IN_STEP_ELEMENTS,
    OrderedIteration,
    ReadsInOrder,
    TrainingJob,
    bound_of,
    evaluates,
    open_job,
)
from forebay.storage.tfrecord import frame

DEFAULTS: dict[str, Any] = {
    "processing_mode": ShardingPolicy.DYNAMIC,
    "job_name": "job",
    "initial_epoch": 0,
    "bound": None,
    "data_transfer_protocol": None,
    "target_workers": "AUTO",
}


def opened(target: str, dataset: tf.data.Dataset, processes: int, **how: Any) -> TrainingJob:
    dataset_id = service.register_dataset(target, dataset)
    return open_job(target, dataset_id, processes, **DEFAULTS | how)


def test_processes_in_lockstep_prefetch_a_bounded_number_of_elements(target: str) -> None:
    ends, endless = tf.data.Dataset.range(10), tf.data.Dataset.range(10).repeat()
    assert opened(target, ends, 2).in_step(4).options.max_elements == IN_STEP_ELEMENTS
    assert opened(target, ends, 2).in_step(40).options.max_elements == 80
    assert opened(target, ends, 1).in_step(40).options.max_elements is None
    assert opened(target, endless, 2).in_step(40).options.max_elements is None
    assert opened(target, ends, 2, bound=3).options.max_elements == 3


def test_frameworks_that_prefetch_refuse_to_read_at_least_once(target: str) -> None:
    once = {"delivery": "at_least_once"}
    for processes in (1, 2):
        with pytest.raises(InvalidArgument, match="batches are put together ahead"):
            opened(target, tf.data.Dataset.range(10), processes, **once)


def test_a_length_is_that_of_a_process_alone(target: str) -> None:
    alone = opened(target, tf.data.Dataset.range(10), 1)
    assert [alone.length(4, drop_remainder=drop) for drop in (False, True)] == [3, 2]
    assert alone.length(None, drop_remainder=False) == 10
    for other in (
        opened(target, tf.data.Dataset.range(10), 2),
        opened(target, tf.data.Dataset.range(10), 1, processing_mode="parallel_epochs"),
        opened(target, tf.data.Dataset.range(10).repeat(), 1),
    ):
        with pytest.raises(TypeError, match=r"has no len\(\) here"):
            other.length(None, drop_remainder=False)


def test_files_have_a_length_before_their_first_epoch(target: str, tmp_path: Path) -> None:
    path = tmp_path / "a.tfrecord"
    path.write_bytes(frame(b"x") * 10)
    dataset_id = service.register_files(target, path)
    alone = open_job(target, dataset_id, 1, **DEFAULTS)
    assert [alone.length(4, drop_remainder=drop) for drop in (False, True)] == [3, 2]
    lengths = {}
    for rank in range(2):
        how = DEFAULTS | {"job_name": None, "ordered": True, "rank": rank}
        job = open_job(target, dataset_id, 2, **how, batch_size=4)
        lengths[rank] = job.length(None, drop_remainder=False)
    assert lengths == {0: 2, 1: 1}


def test_processes_without_a_job_name_read_everything_only_when_told_so(target: str) -> None:
    everything = {"job_name": None, "processing_mode": "parallel_epochs"}
    numbers = tf.data.Dataset.range(10)
    assert opened(target, numbers, 2, **everything).name is None
    assert "a name" in (opened(target, numbers, 1, job_name=None, unnamed="a name").name or "")
    for how in ({"job_name": None}, everything | {"everything": False}):
        with pytest.raises(InvalidArgument, match="2 processes train, and without a job_name"):
            opened(target, numbers, 2, **how)


def test_bounds() -> None:
    assert [bound_of(given) for given in ("AUTO", None, 7)] == [
        (None, True),
        (None, False),
        (7, False),
    ]
    with pytest.raises(InvalidArgument, match='expected a number, "AUTO" or None'):
        bound_of("automatic")


def test_a_parameter_server_reads_nothing() -> None:
    cluster = {"chief": ["c:1"], "ps": ["p:1"]}
    task = {"cluster": cluster, "task": {"type": "ps", "index": 0}}
    context = TaskContext.from_env({"TF_CONFIG": json.dumps(task)})
    with pytest.raises(FailedPrecondition, match="parameter server 0, which reads nothing"):
        evaluates(context)
    assert not evaluates(TaskContext())


@pytest.mark.parametrize(
    ("environ", "warned"),
    [
        ({"RANK": "0", "WORLD_SIZE": "2"}, 1),
        ({"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2"}, 1),
        ({"RANK": "0", "WORLD_SIZE": "1"}, 0),
        ({"RANK": "0"}, 0),  # makes no sense, which is for who trains by it to say
    ],
)
def test_a_process_that_does_not_share_the_job_is_warned_under_every_launcher(
    environ: dict[str, str],
    warned: int,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    with caplog.at_level(logging.WARNING):
        warn_if_unshared("job")
        assert not caplog.messages
        warn_if_unshared(None)
    assert sum("each of the 2 tasks" in said for said in caplog.messages) == warned


def test_an_iteration_that_another_thread_fails_while_it_waits_does_not_just_end() -> None:
    """As the newest iteration of a job with a name does to older ones."""

    def waiting() -> Generator[Any, None, None]:
        iteration.fail(FailedPrecondition("a newer one"))  # closing this one ends it
        yield from ()

    dataset = ReadsInOrder()
    dataset._open = WeakSet()
    iteration = OrderedIteration(StaysFailed(waiting()), OrderedRead(), dataset)
    for _ in range(2):
        with pytest.raises(FailedPrecondition, match="a newer one"):
            next(iteration)
