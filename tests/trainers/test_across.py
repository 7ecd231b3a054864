"""One dataset for all tasks of a training job."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf

from forebay import service
from forebay.service import Role, TaskContext
from forebay.service.connections.dispatcher_client import SHORT_PATIENCE_S, DispatcherClient
from forebay.service.errors import Unavailable
from forebay.service.trainers import across as distribute_across_module

from ..cluster import WorkerProcess
from ..stock import DispatcherProcess, slow
from .clusters import said, start, tf_config

WORKER = TaskContext(role=Role.WORKER, index=0, rank=1, num_consumers=2)
CHIEF = TaskContext(num_consumers=2)
EVALUATOR = TaskContext(role=Role.EVALUATOR, rank=None, num_consumers=2)


TASK = """
import sys
import tensorflow as tf
from forebay import service

def numbers(context):
    print("built", flush=True)
    size = context.get_per_replica_batch_size(8)
    mine = context.num_input_pipelines, context.input_pipeline_id
    return tf.data.Dataset.range(1000).shard(*mine).batch(size)

dataset = service.distribute_across(numbers, sys.argv[1], job_name="numbers")
assert service.TaskContext.from_env().role == sys.argv[2]
policy = dataset.options().experimental_distribute.auto_shard_policy
assert policy == tf.data.experimental.AutoShardPolicy.OFF
print("found", flush=True)
sys.stdin.read()  # before anybody reads
batches = [batch.numpy() for batch in dataset]
assert {len(batch) for batch in batches} <= {4}, batches
print(*[element for batch in batches for element in batch])
"""


def test_a_cluster_reads_what_its_chief_has_registered(tmp_path: Path) -> None:
    cluster = {"chief": ["c:1"], "worker": ["w:1"]}
    with DispatcherProcess(tmp_path) as dispatcher, WorkerProcess(dispatcher.address):

        def task(kind: str) -> Any:
            return start(TASK, cluster, kind, 0, dispatcher.target, kind)

        tasks = [task(kind) for kind in ("worker", "evaluator", "chief")]
        for each in tasks:
            while (line := each.line()) != "found":
                assert line == "built" and each is tasks[2], "only the chief builds"
        tasks[2].kill()
        tasks[2].finish()
        tasks[2] = task("chief")
        assert [tasks[2].line(), tasks[2].line()] == ["built", "found"], "and compares"
        for each in tasks:
            each.close_input()
        worker, evaluator, chief = map(said, tasks)
        dispatcher.kill_and_restart()
        registered = service.list_datasets(dispatcher.target)
    elements = [[int(x) for x in lines[-1].split()] for lines in (chief, worker, evaluator)]
    assert sorted(elements[0] + elements[1]) == sorted(elements[2]) == list(range(1000))
    assert [dataset.dataset_id for dataset in registered] == ["numbers/across"]


def numbers(_: Any) -> Any:
    return tf.data.Dataset.range(10)


def never(_: Any) -> Any:
    raise AssertionError("only the chief builds")


def read(dataset: Any) -> list[int]:
    return sorted(int(element) for element in dataset)


def across(target: str, task: TaskContext, job_name: str, **how: Any) -> Any:
    return service.distribute_across(
        how.pop("dataset_fn", never), target, task, job_name=job_name, **how
    )


def test_finished_epochs_are_not_read_again(target: str) -> None:
    """Another training under the same name gets an error instead of no elements."""
    first = across(target, CHIEF, "epochs", dataset_fn=numbers)
    assert [read(first), read(first)] == [[*range(10)]] * 2
    for task, initial_epoch in itertools.product((CHIEF, WORKER), (0, 1)):
        with pytest.raises(
            tf.errors.FailedPreconditionError,
            match=f"'epochs' has read 2 epochs, and initial_epoch is {initial_epoch}: .*=2",
        ):
            across(target, task, "epochs", initial_epoch=initial_epoch)
    again = across(target, CHIEF, "epochs", initial_epoch=2, dataset_fn=numbers)
    assert [read(again), read(again)] == [[*range(10)]] * 2


def test_an_evaluator_evaluates_on_all_whenever_it_is_started(target: str) -> None:
    across(target, CHIEF, "evaluated", dataset_fn=numbers)
    for initial_epoch in (0, 0, 50):
        evaluator = across(target, EVALUATOR, "evaluated", initial_epoch=initial_epoch)
        assert [read(evaluator), read(evaluator)] == [[*range(10)]] * 2


@pytest.mark.parametrize(
    ("other", "replicas", "said"),
    [
        (range(100, 110), 2, "another chief of 'two of .*another dataset at the same time"),
        (range(20), 2, "another chief of 'two of "),  # which the dispatcher itself refuses
        (range(100, 110), 3, "began with 2 replicas, .* has 3"),
        (range(10), 2, None),
    ],
)
def test_the_second_of_two_chiefs_is_refused(
    target: str, other: range, replicas: int, said: str | None
) -> None:
    """The first one registered while the second built its dataset. Equal datasets are fine."""
    name = f"two of {other} {replicas}"

    def late(_: Any) -> Any:
        across(target, CHIEF, name, dataset_fn=numbers)
        return tf.data.Dataset.range(other.start, other.stop)

    second = TaskContext(num_consumers=replicas)
    if said is None:
        assert read(across(target, second, name, dataset_fn=late)) == [*range(10)]
    else:
        with pytest.raises(tf.errors.FailedPreconditionError, match=said):
            across(target, second, name, dataset_fn=late)
    assert read(across(target, EVALUATOR, name)) == [*range(10)]


def test_an_id_that_somebody_else_has_registered_is_refused(target: str) -> None:
    for dataset_id in ("foreign/replicas=2", "foreign/across"):
        service.register_dataset(target, tf.data.Dataset.range(7), dataset_id=dataset_id)
    for task in (CHIEF, WORKER, EVALUATOR):
        with pytest.raises(tf.errors.FailedPreconditionError, match="'foreign/across' was not"):
            across(target, task, "foreign")


def test_a_cluster_that_has_changed_is_told(target: str) -> None:
    service.distribute_across(numbers, target, CHIEF, job_name="changes")
    for role in (Role.CHIEF, Role.WORKER):
        grown = TaskContext(role=role, rank=int(role == Role.WORKER), num_consumers=3)
        with pytest.raises(tf.errors.FailedPreconditionError, match=r"with 2 replicas.* has 3"):
            service.distribute_across(never, target, grown, job_name="changes")
    evaluator = service.distribute_across(never, target, EVALUATOR, job_name="changes")
    assert read(evaluator) == [*range(10)]


def test_a_chief_that_finds_a_dataset_says_so(
    target: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The training has read nothing yet, so it may be another one by mistake."""
    for task, dataset_fn, warned in ((CHIEF, numbers, 0), (CHIEF, numbers, 1), (WORKER, never, 1)):
        across(target, task, "begun", dataset_fn=dataset_fn)
        said = ["'begun' has had its dataset since it began" in said for said in caplog.messages]
        assert sum(said) == warned


def test_a_training_that_began_with_other_elements_is_refused(target: str) -> None:
    """The chief finds that they have another dtype, shape or nesting."""
    assert read(across(target, CHIEF, "other spec", dataset_fn=numbers)) == [*range(10)]
    for other in (lambda i: tf.cast(i, tf.float32), lambda i: tf.fill([2], i), lambda i: {"i": i}):
        for initial_epoch in (1, 2):
            with pytest.raises(tf.errors.FailedPreconditionError) as raised:
                across(
                    target, CHIEF, "other spec", initial_epoch=initial_epoch,
                    dataset_fn=lambda _, other=other: tf.data.Dataset.range(10).map(other),
                )  # fmt: skip
            for part in ("'other spec'", "tf.int64", "dataset_id", "another job_name"):
                assert part in str(raised.value)


@pytest.mark.parametrize(
    "other",
    [
        lambda: tf.data.Dataset.range(10).map(lambda i: i + 100),
        lambda: tf.data.Dataset.range(100, 110),
        lambda: tf.data.Dataset.range(7),  # and of another cardinality
    ],
)
def test_a_changed_dataset_with_the_same_spec_is_warned_of_and_the_old_one_is_read(
    target: str, caplog: pytest.LogCaptureFixture, other: Any, request: pytest.FixtureRequest
) -> None:
    name = request.node.name
    assert read(across(target, CHIEF, name, dataset_fn=numbers)) == [*range(10)]
    across(target, CHIEF, name, dataset_fn=numbers, initial_epoch=1)
    assert not caplog.messages
    changed = across(target, CHIEF, name, dataset_fn=lambda _: other(), initial_epoch=1)
    (said,) = caplog.messages
    assert "began with another dataset" in said and f"'{name}/across'" in said
    assert read(changed) == [*range(10)]


def test_a_training_with_a_dataset_id_continues_with_that_dataset(
    target: str, caplog: pytest.LogCaptureFixture
) -> None:
    def floats(_: Any) -> Any:
        return tf.data.Dataset.range(5).map(lambda i: tf.cast(i, tf.float32))

    first = across(target, CHIEF, "goes on", dataset_fn=numbers)
    assert read(first) == [*range(10)]
    for task, dataset_fn in ((CHIEF, floats), (WORKER, never), (EVALUATOR, never)):
        dataset = across(
            target, task, "goes on", dataset_fn=dataset_fn, dataset_id="floats", initial_epoch=1
        )
        assert dataset.element_spec.dtype == tf.float32
    assert read(dataset) == read(dataset) == [*range(5)]
    trained = across(
        target, CHIEF, "goes on", dataset_fn=floats, dataset_id="floats", initial_epoch=1
    )
    assert read(trained) == [*range(5)]
    with pytest.raises(tf.errors.FailedPreconditionError, match="has read 2 epochs"):
        across(target, WORKER, "goes on", dataset_id="floats", initial_epoch=1)
    assert not caplog.messages
    assert "floats" in [known.dataset_id for known in service.list_datasets(target)]
    for number in (1, 2):
        trial = TaskContext(trial=str(number))
        across(target, trial, "tried", dataset_fn=lambda _, n=number: numbers(_).batch(n),
               dataset_id="of trials")  # fmt: skip
    assert not caplog.messages


def test_the_error_names_the_chief_that_tasks_wait_for(target: str) -> None:
    for task in (WORKER, EVALUATOR):
        with pytest.raises(tf.errors.UnavailableError, match="chief of 'alone' has not"):
            service.distribute_across(never, target, task, job_name="alone", timeout_s=0)


def test_wrong_arguments_are_refused(target: str) -> None:
    server = tf_config({"chief": ["c:1"], "worker": ["w:1"], "ps": ["p:1"]}, "ps", 0)
    with server, pytest.raises(tf.errors.FailedPreconditionError, match=r"server 0 of 1.*join"):
        service.distribute_across(never, target, job_name="of a server")
    with pytest.raises(ValueError, match="'chief' must be a TaskContext"):
        service.distribute_across(never, target, "chief", job_name="of a word")
    with pytest.raises(ValueError, match="initial_epoch=2 beside cross_trainer_cache"):
        across(
            target, TaskContext(), "one epoch", dataset_fn=lambda _: numbers(_).repeat(),
            cross_trainer_cache=True, initial_epoch=2,
        )  # fmt: skip
    for wrong, message in (
        ({"num_consumers": 2}, "num_consumers=2: leave it out"),
        ({"cross_trainer_cache": True}, "does not go with cross_trainer_cache"),
    ):
        with pytest.raises(service.ForebayError, match=message):
            across(target, CHIEF, "in order", dataset_fn=numbers, ordered=True, **wrong)
    for argument, value, message in [
        ("dataset_fn", tf.data.Dataset.range(3), r"dataset_fn=<_RangeDataset.* is no function: gi"),
        ("job_name", None, "job_name=None would have each task read all of the dataset: give"),
        ("job_name", 7, "`job_name` must be a string"),
        ("dataset_id", "", "dataset_id='' must be a string.*leave it out"),
        ("timeout_s", "10", "timeout_s='10' must be a number of seconds.*None"),
        ("timeout_s", -1, "timeout_s=-1 must be"),
    ]:
        how: dict[str, Any] = {"dataset_fn": never, "job_name": "mistyped", argument: value}
        with pytest.raises(ValueError, match=message):
            service.distribute_across(service=target, **how)


def test_trials_are_trainings_of_their_own(target: str) -> None:
    """Their parameters may be the dataset's, such as the size of batches."""
    for trial in (1, 2):

        def batches(_: Any, size: int = trial) -> Any:
            return tf.data.Dataset.range(10).batch(size)

        chief = TaskContext(trial=str(trial))
        read = service.distribute_across(batches, target, chief, job_name="tuned")
        assert [len(batch) for batch in read] == [trial] * (10 // trial)


def test_trials_that_share_the_cache_get_the_same(target: str) -> None:
    def endless(_: Any) -> Any:
        numbers = slow(tf.data.Dataset.range(10**12), 0.001)  # or a worker computes for seconds
        return numbers.repeat().map(lambda i: (i, tf.random.uniform([])))

    trials = [
        service.distribute_across(
            dataset_fn, target, TaskContext(trial=str(number)), job_name="cached",
            cross_trainer_cache=True,
        )
        for number, dataset_fn in ((1, endless), (2, endless))
    ]  # fmt: skip
    evaluator = across(target, EVALUATOR, "cached", cross_trainer_cache=True)
    assert len([*evaluator.take(100)]) == 100
    iterators = [trial.as_numpy_iterator() for trial in trials]
    got: list[set[Any]] = [set(), set()]
    # Numbers by chance, which are the same if they are drawn once.
    for _ in range(100):
        if got[0] & got[1]:
            break
        for found, iterator in zip(got, iterators, strict=True):
            found |= {*itertools.islice(iterator, 100)}
    assert got[0] & got[1]


def test_a_strategy_of_one_process_in_a_cluster_is_warned_of(
    target: str, caplog: pytest.LogCaptureFixture
) -> None:
    strategy = tf.distribute.OneDeviceStrategy("cpu:0")
    for cluster in ({"worker": ["a:1"]}, {"worker": ["a:1", "b:1"]}):
        assert not caplog.messages
        with tf_config(cluster, "worker", 0):
            service.distribute_across(numbers, target, strategy, job_name=f"of {cluster}")
    (said,) = caplog.messages
    assert said.startswith("OneDeviceStrategy trains in this process alone, which is one of 2 task")


def test_a_task_that_reads_everything_beside_others_is_warned(
    target: str, caplog: pytest.LogCaptureFixture
) -> None:
    dataset_id = service.register_dataset(target, numbers(None))
    two = {"chief": ["a:1"], "worker": ["b:1"]}

    def warned(cluster: Any, kind: str, job_name: str | None) -> int:
        caplog.clear()
        with tf_config(cluster, kind, 0):
            service.from_dataset_id("parallel_epochs", target, dataset_id, job_name=job_name)
            numbers(None).apply(service.distribute("parallel_epochs", target, job_name))
        return sum("each of the 2 tasks" in said for said in caplog.messages)

    assert warned(two, "chief", None) == warned(two, "worker", None) == 2
    assert warned(two, "evaluator", None) == warned(two, "worker", "a name") == 0
    assert warned({"worker": ["a:1"]}, "worker", None) == warned("no cluster", "worker", None) == 0


@pytest.mark.parametrize("task", [CHIEF, WORKER, EVALUATOR])
def test_an_absent_dispatcher_is_waited_for_as_long_as_the_chief(
    task: TaskContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    patience: list[float | None] = []

    def call(*_: Any, patience_s: float | None) -> None:
        patience.append(patience_s)
        raise Unavailable("nobody answers")

    monkeypatch.setattr(DispatcherClient, "call", lambda *_, **how: call(**how))
    for timeout_s in (0, 600, None):
        with pytest.raises(tf.errors.UnavailableError, match="nobody answers"):
            across("localhost:1", task, "late", timeout_s=timeout_s)
    zero, long, for_ever = patience
    assert zero == 0 and long is not None and 500 < long <= 600 and for_ever is None


def test_a_waiting_task_logs_what_it_waits_for(
    target: str, caplog: pytest.LogCaptureFixture
) -> None:
    """It logs when it waits longer than a moment for a dispatcher or a chief."""
    for service_, task, message in [
        ("localhost:1", CHIEF, "still trying to call .*GetDataset at localhost:1"),
        (target, WORKER, "waiting for the chief of 'awaited' to register its dataset"),
    ]:
        caplog.clear()
        asked_s = SHORT_PATIENCE_S + 1
        with pytest.raises(tf.errors.UnavailableError):
            service.distribute_across(never, service_, task, job_name="awaited", timeout_s=asked_s)
        assert re.search(message, caplog.text)


def test_only_tasks_that_may_train_in_lockstep_limit_their_elements(
    target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int | None] = []

    def found(*_: Any, max_outstanding_requests: int | None, **__: Any) -> Any:
        asked.append(max_outstanding_requests)
        return tf.data.Dataset.range(0)

    monkeypatch.setattr(distribute_across_module, "from_dataset_id", found)
    for task in (CHIEF, WORKER, EVALUATOR):
        across(target, task, "in step", dataset_fn=numbers)
    across(target, TaskContext(), "alone in step", dataset_fn=numbers)
    across(target, CHIEF, "endless", dataset_fn=lambda _: numbers(_).repeat())
    across(target, CHIEF, "as told", dataset_fn=numbers, max_outstanding_requests=3)
    assert asked == [16, 16, None, None, None, 3]
    with pytest.raises(ValueError, match="'MANY'"):
        across(target, WORKER, "in step", max_outstanding_requests="MANY")
