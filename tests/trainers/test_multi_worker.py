"""`MultiWorkerMirroredStrategy`: real processes, which find each other by TF_CONFIG.

They take long to begin, so a cluster does one thing after another, and tests look at what it said.
"""

from __future__ import annotations

import collections
import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from forebay import service
from forebay.service.processes import free_port

from ..forks import Fork
from .clusters import start

# The table of auto-sharding in TensorFlow's guide on distributed input.
HALVES = [[[0, 1], [2, 3], [4, 5]], [[6, 7], [8, 9], [10, 11]]]
IN_TURN = [[[0, 1], [4, 5], [8, 9]], [[2, 3], [6, 7], [10, 11]]]
EVERYTHING = [[[i, i + 1] for i in range(0, 12, 2)]] * 2
TWO, ONE, UNEQUAL = ["0 to 5", "6 to 11"], ["0 to 11"], ["0 to 5", "6 to 8"]
SHARDING: list[tuple[str, list[str], Any, Any]] = [
    # What each of two workers gets of the files, in batches of 4 for both; and through the service,
    # each for itself. (The guide has FILE end in [4] [5], where TensorFlow 2.21 joins what fits.)
    ("FILE", TWO, HALVES, [True, True]),  # an error, as with TensorFlow's own client
    ("AUTO", TWO, HALVES, IN_TURN),  # which is DATA, as it finds no files
    ("DATA", TWO, IN_TURN, IN_TURN),
    ("DATA", ONE, IN_TURN, IN_TURN),
    ("OFF", ONE, EVERYTHING, EVERYTHING),
    # Steps may be smaller than the global batch.
    ("FILE", UNEQUAL, [HALVES[0], [[6, 7], [8], []]], [True, True]),
]

LINES = """
import tensorflow as tf


def lines(directory, *names):
    "What these files of the directory have, one after another, in batches."
    files = tf.data.Dataset.from_tensor_slices([f"{directory}/{name}" for name in names])
    numbers = files.interleave(tf.data.TextLineDataset, cycle_length=1)
    return numbers.map(lambda line: tf.strings.to_number(line, tf.int64)).batch(4)


def with_policy(dataset, name):
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy[name]
    return dataset.with_options(options)
"""


def write_files(directory: Path) -> None:
    """Those of the table, a number a line."""
    for first, last in ((0, 5), (6, 11), (0, 11), (6, 8)):
        lines = "".join(f"{i}\n" for i in range(first, last + 1))
        (directory / f"{first} to {last}").write_text(lines)


Said = Mapping[str, list[Any]]
"""What each process of a cluster said, by the topic."""

BEGINS = """
import json
import logging
import os
import signal
import sys
import time
import types
import tensorflow as tf
from forebay import service

warned = []
log = logging.getLogger("forebay")
log.addHandler(logging.StreamHandler(types.SimpleNamespace(write=warned.append, flush=int)))
resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
if "not in the environment" in sys.argv:
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
        resolver.cluster_spec(),
        task_type=resolver.task_type,
        task_id=resolver.task_id,
        rpc_layer="grpc",
    )
    del os.environ["TF_CONFIG"]
strategy = tf.distribute.MultiWorkerMirroredStrategy(cluster_resolver=resolver)
index = strategy.cluster_resolver.task_id
target, directory = sys.argv[1:3]


def say(topic, what):
    print(json.dumps([topic, what]), flush=True)


@tf.function
def total(batch):
    own = strategy.run(lambda x: tf.reduce_sum(x), args=(batch,))
    return strategy.reduce("SUM", own, axis=None)


def values(batch):
    (own,) = strategy.experimental_local_results(batch)
    return own.numpy().tolist()


def steps(dataset):
    "Of an epoch: what this worker gets, and the sum of what all get."
    for batch in dataset:
        yield values(batch), int(total(batch))


def numbers(context):
    say("built", True)
    return tf.data.Dataset.range(600).batch(context.get_per_replica_batch_size(12))


def read(dataset):
    return dataset.apply(service.distribute("parallel_epochs", target))


def batches(elements):
    plain = tf.data.Dataset.range(elements).batch(4)
    name = f"of {elements}, {strategy.num_replicas_in_sync}"
    shared = service.distribute_across(lambda _: plain, target, strategy, job_name=name)
    strategy.reduce("SUM", tf.constant(0), axis=None)  # nobody reads what others have not found
    for name, dataset in (("plain", plain), ("read", read(plain)), ("shared", shared)):
        distributed = strategy.experimental_distribute_dataset(dataset)
        say(f"{name} batches", [own for own, _ in steps(distributed)])
"""

ENDS = """
say("end", True)
sys.stdin.read()  # TensorFlow ends a cluster with the first that leaves
os._exit(0)
"""


def started(program: str, number: int, target: str, directory: Path, *more: str) -> Any:
    file = directory / f"{number}.py"  # whose loops AutoGraph reads
    file.write_text(program)
    cluster = {"worker": [f"127.0.0.1:{free_port()}" for _ in range(number)]}
    return [start(file, cluster, "worker", i, target, directory, *more) for i in range(number)]


def said_by(tasks: list[Fork]) -> Said:
    """The lines that the processes print before they exit with 0."""
    said: dict[str, list[Any]] = collections.defaultdict(list)
    for task in tasks:
        for line in iter(task.line, '["end", true]'):
            topic, what = json.loads(line or "null")
            said[topic].append(what)
    for task in tasks:
        task.close_input()
    assert [task.finish(60) for task in tasks] == [0] * len(tasks)
    return said


SHARDED = """
def distributed(dataset, policy):
    return strategy.experimental_distribute_dataset(with_policy(dataset, policy))


def own(dataset, policy):
    try:
        return [own for own, _ in steps(distributed(dataset, policy))]
    except tf.errors.NotFoundError as error:
        return "unshardable source" in str(error)


for policy, *names in json.loads(sys.argv[3]):
    for way in (lambda dataset: dataset, read):
        say(f"{policy} of {names}", own(way(lines(directory, *names)), policy))
shared = service.distribute_across(
    lambda _: tf.data.Dataset.range(48).batch(4), target, strategy, job_name="sharded again"
)
strategy.reduce("SUM", tf.constant(0), axis=None)
say("sharded again", sum(own(shared, "DATA"), []))
"""


@pytest.fixture(scope="module")
def two(target: str, tmp_path_factory: pytest.TempPathFactory) -> Said:
    """The output of a cluster of two."""
    directory = tmp_path_factory.mktemp("two")
    write_files(directory)
    rows = json.dumps([[policy, *names] for policy, names, *_ in SHARDING])
    program = BEGINS + LINES + SHARDED + "batches(6)\n" + ENDS
    return said_by(started(program, 2, target, directory, rows))


@pytest.mark.parametrize(("policy", "names", "plain", "read"), SHARDING)
def test_auto_sharding(two: Said, policy: str, names: list[str], plain: Any, read: Any) -> None:
    said = two[f"{policy} of {names}"]
    assert (said[::2], said[1::2]) == (plain, read)


def test_sharding_a_shared_job_again_loses_elements(two: Said) -> None:
    found = [x for own in two["sharded again"] for x in own]
    assert 0 < len(found) < 48 and len(found) == len({*found})


INTERFACE = """
@tf.function
def loop(distributed):
    result = tf.constant(0, tf.int64)
    for batch in distributed:
        result += total(batch)
    return result


def of_a_worker(context):
    found = context.num_input_pipelines, context.input_pipeline_id, context.num_replicas_in_sync
    say("contexts", found)
    plain = tf.data.Dataset.range(30).shard(context.num_input_pipelines, context.input_pipeline_id)
    return read(plain.batch(context.get_per_replica_batch_size(6)))


distributed = strategy.distribute_datasets_from_function(of_a_worker)


@tf.function(input_signature=[distributed.element_spec])
def signed(batch):
    return total(batch)


@tf.function
def two_steps(iterator):
    return signed(next(iterator)) + signed(iterator.get_next())


say("own steps", [values(batch) for batch in distributed])
iterator = iter(distributed)
sums = [int(loop(distributed)), sum(int(signed(batch)) for batch in distributed)]
sums.append(int(two_steps(iterator)) + int(two_steps(iterator)) + int(signed(iterator.get_next())))
say("sums", sums)
for end in (iterator.get_next, lambda: next(iterator)):
    try:
        end()
    except (tf.errors.OutOfRangeError, StopIteration) as error:
        say("ends", type(error).__name__)
iterator = iter(distributed)
found = [iterator.get_next_as_optional() for _ in range(6)]
say("optional", [values(x.get_value()) if x.has_value() else None for x in found])
iterator = read(tf.data.Dataset.range(2)).as_numpy_iterator()
value = strategy.experimental_distribute_values_from_function(
    lambda context: 10 * context.replica_id_in_sync_group + next(iterator)
)
(value,) = strategy.experimental_local_results(value)
say("value", int(value))
say("warned", any("without a job_name each of the 3 tasks" in text for text in warned))
"""

SHARED = """
dataset = service.distribute_across(numbers, target, strategy, job_name="shared")
for distributed in (
    strategy.distribute_datasets_from_function(lambda _: dataset),
    strategy.experimental_distribute_dataset(dataset),
):
    say("shared", [*steps(distributed)])
"""


@pytest.fixture(scope="module")
def three(target: str, tmp_path_factory: pytest.TempPathFactory) -> Said:
    """The output of a cluster of three that the environment does not describe."""
    program = BEGINS + INTERFACE + "batches(8)\n" + SHARED + ENDS
    directory = tmp_path_factory.mktemp("three")
    return said_by(started(program, 3, target, directory, "not in the environment"))


@pytest.mark.parametrize(
    ("cluster", "expected"),
    [
        ("two", [[[0, 1], [2, 3]], [[4], [5]]]),
        ("three", [[[0, 1], [2, 3], []], [[4, 5], [6, 7], []]]),
    ],
)
def test_batches_over_replicas(
    request: pytest.FixtureRequest, cluster: str, expected: list[list[list[int]]]
) -> None:
    """The guide's table, with a replica a process. In a shared job a batch is one trainer's, whose
    parts it has one after another."""
    said = request.getfixturevalue(cluster)
    for way in ("plain", "read"):
        assert [[*step] for step in zip(*said[f"{way} batches"], strict=True)] == expected
    shared = said["shared batches"]
    assert len({len(own) for own in shared}) == 1, "all take part in each step"
    parts = sorted(part for own in shared for part in own if part)
    assert parts == sorted(part for batch in expected for part in batch if part)


def test_a_shared_job(three: Said) -> None:
    """Each element goes to one of them, and all make the same steps, of no elements if need be."""
    assert three["built"] == [True], "by the chief"
    for size, epochs in ((4, three["shared"][::2]), (2, three["shared"][1::2])):
        for step in zip(*epochs, strict=True):
            assert {total for _, total in step} == {sum(sum(own) for own, _ in step)}
            assert {len(own) for own, _ in step} <= {size, 0}  # 4 over 3 replicas are 2, 2 and 0
        own = [x for steps in epochs for elements, _ in steps for x in elements]
        assert sorted(own) == list(range(600))


def test_the_guide_s_ways_to_iterate(three: Said) -> None:
    """Over what a function makes for each worker, which divides it by itself."""
    assert three["contexts"] == [[3, worker, 3] for worker in range(3)], "once each"
    own = [[[i, i + 3] for i in range(worker, 30, 6)] for worker in range(3)]
    assert three["own steps"] == own
    assert three["sums"] == [[sum(range(30))] * 3] * 3
    assert three["ends"] == ["OutOfRangeError", "StopIteration"] * 3
    assert three["optional"] == [[*steps, None] for steps in own]
    assert three["value"] == [0, 10, 20]


def test_a_cluster_that_only_the_strategy_knows_is_warned_of_repeated_elements(three: Said) -> None:
    assert three["warned"] == [True] * 3


HANDLER_FIRST = """
with service.PreemptionHandler(grace_period_s=60, exit_code=None) as first:
    if index == 1:
        os.kill(os.getpid(), signal.SIGTERM)
    give_up_s = time.monotonic() + 20
    while not first.preempted and time.monotonic() < give_up_s:
        time.sleep(0.01)
say("told first of all", first.preempted)
"""

RESTARTED = """
over = tf.Variable(0)
checkpoint = tf.train.Checkpoint(over=over)
checkpoints = tf.train.CheckpointManager(checkpoint, f"{directory}/{index}", max_to_keep=1)
again = tf.train.latest_checkpoint(f"{directory}/0")  # the chief's
if again:
    checkpoint.restore(again).assert_consumed()
say("begins", int(over))
dataset = service.distribute_across(
    numbers, target, strategy, job_name="restarted", initial_epoch=int(over)
)
distributed = strategy.distribute_datasets_from_function(lambda _: dataset)
try:
    for epoch in range(int(over), 3):
        for step, (own, _) in enumerate(steps(distributed)):
            say("step", [epoch, own])
            if not again and (epoch, step, index) == (1, 3, 0):
                os.kill(os.getpid(), 9)
        over.assign_add(1)
        checkpoints.save()
        strategy.reduce("SUM", tf.constant(0), axis=None)  # all have saved
except tf.errors.OpError:  # of the chief's death
    os._exit(3)
"""

PREEMPTED = """
def made(name, number):
    def batched(context):
        elements = tf.data.Dataset.range(3000).repeat(number)
        return elements.batch(context.get_per_replica_batch_size(12))

    ahead = (1, 30, 60)[index]  # of what it trains on
    dataset = service.distribute_across(
        batched, target, strategy, job_name=name, max_outstanding_requests=ahead
    )
    return strategy.distribute_datasets_from_function(lambda _: dataset)


def preempted(name, number, who, leaves, late=()):
    saved, own = [], []
    with service.PreemptionHandler(saved.append, grace_period_s=60, exit_code=None) as preemption:
        distributed = made(name, number)
        if index in late:
            while not os.path.exists(f"{directory}/{name}"):
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGTERM)
        for batch in distributed:
            own.append(values(batch))
            open(f"{directory}/{name}", "w").close()
            total(batch)
            if len(own) == 5 and index in who:
                os.kill(os.getpid(), signal.SIGTERM)
            if leaves(preemption):
                break
    say(name, [own, preemption.preempted, len(saved)])


preempted("an end", 1, [1], lambda preemption: False)
preempted("no end", None, [1, 2], lambda preemption: False)
preempted("checked", None, [0], lambda preemption: preemption.check())
preempted("begins late", None, [], lambda preemption: False, late=[1])


def save(remaining_s):
    time.sleep(0.5 * index)  # the chief would be gone by then
    say("saved", 0 < remaining_s <= 60)


try:
    with service.PreemptionHandler(save, grace_period_s=60):
        say("end", True)
        for batch in made("the process ends", None):
            total(batch)
finally:
    time.sleep(0.5 * index)
    say("ends", True)
"""


@pytest.fixture(scope="module")
def restarted(
    target: str, tmp_path_factory: pytest.TempPathFactory
) -> tuple[list[Any], Said, list[int]]:
    """What a cluster of three says before its chief is killed, and as it begins again and is
    preempted, and its exit codes."""
    program = BEGINS + HANDLER_FIRST + RESTARTED + PREEMPTED
    directory = tmp_path_factory.mktemp("restarted")
    tasks = started(program, 3, target, directory)
    before = [[json.loads(line) for line in iter(task.line, "")] for task in tasks]
    codes = [task.finish(60) for task in tasks]
    assert codes[0] == -9 and 0 not in codes
    tasks = started(program, 3, target, directory)
    said: dict[str, list[Any]] = collections.defaultdict(list)
    for task in tasks:
        for line in iter(task.line, '["end", true]'):
            topic, what = json.loads(line or "null")
            said[topic].append(what)
    tasks[1].terminate()
    for task in tasks:
        said["at last"].append([json.loads(line) for line in iter(task.line, "")])
    return before, said, [task.finish(60) for task in tasks]


def test_a_cluster_restarts_after_its_chief_was_killed(
    restarted: tuple[list[Any], Said, list[int]],
) -> None:
    """From the chief's checkpoint, with what is left of the epoch that it was in."""
    before, after, _ = restarted
    assert [topic for topic, _ in before[0][1:3]] == ["begins", "built"]
    assert after["begins"] == [1, 1, 1] and after["built"] == [True], "by the chief, to compare"
    steps = [what for said in before for topic, what in said if topic == "step"] + after["step"]
    for epoch in range(3):
        own = [x for number, elements in steps if number == epoch for x in elements]
        assert len(own) == len({*own}), f"epoch {epoch} has elements twice"
        assert epoch == 1 or sorted(own) == list(range(600))
    assert any(own for number, own in after["step"] if number == 1), "what is left of it"


@pytest.mark.parametrize("name", ["an end", "no end", "checked", "begins late"])
def test_all_processes_stop_between_the_same_steps_when_one_gets_sigterm(
    restarted: tuple[list[Any], Said, list[int]], target: str, name: str
) -> None:
    """Whether their elements have an end, which would let TensorFlow go on with some, or none.
    Where they have one, what they have not trained on is handed back. The process that gets it may
    begin to read only then, when the others have begun."""
    _, said, _ = restarted
    steps, preempted, saved = zip(*said[name], strict=True)
    assert preempted == (True,) * 3 and saved == (1,) * 3
    (number,) = {len(own) for own in steps}
    own = [x for steps_of_one in steps for elements in steps_of_one for x in elements]
    assert (name == "begins late" or number >= 5) and 1 <= number < 200
    if name == "an end":
        rest = service.read(
            target, f"{name}/across", processing_mode="distributed_epoch", job_name=name
        )
        own += [int(x) for batch in rest for x in batch]
        assert sorted(own) == [*range(3000)]


def test_all_processes_learn_of_a_preemption_through_the_handler_alone(
    restarted: tuple[list[Any], Said, list[int]],
) -> None:
    before, after, _ = restarted
    told = [what for said in before for topic, what in said if topic == "told first of all"]
    assert told + after["told first of all"] == [True] * 6


def test_no_process_ends_before_all_have_saved(
    restarted: tuple[list[Any], Said, list[int]],
) -> None:
    _, said, codes = restarted
    assert said["at last"] == [[["saved", True], ["ends", True]]] * 3
    assert codes == [143] * 3


ORDERED = """
killed_at = int(sys.argv[3])
seen = tf.Variable(0)
position = service.OrderedPosition()
checkpoint = tf.train.Checkpoint(seen=seen, position=position)
manager = tf.train.CheckpointManager(checkpoint, f"{directory}/{index}", max_to_keep=2)
checkpoint.restore(tf.train.latest_checkpoint(f"{directory}/0"))  # the chief's
dataset = service.distribute_across(
    lambda _: tf.data.Dataset.range(595), target, strategy, job_name="ordered", ordered=True,
    seed=1, batch_size=12 // strategy.num_replicas_in_sync, add_position=True,
    start_position=position,
)
batches = strategy.distribute_datasets_from_function(lambda _: dataset)
while int(position) < 595:  # a process without data in the last step has come as far
    for batch, behind in batches:
        total(batch)
        seen.assign_add(1)
        position.assign(behind)
        say("step", [int(seen), values(batch)])
        if seen % 4 == 0:
            manager.save()
        if index == 0 and seen == killed_at:
            os.kill(os.getpid(), signal.SIGKILL)
strategy.reduce("SUM", tf.constant(0), axis=None)
say("end", int(position))
sys.stdin.read()
os._exit(0)
"""


@pytest.mark.timeout(240)
def test_two_processes_are_killed_and_three_go_on_at_the_chief_s_checkpoint(
    target: str, tmp_path: Path
) -> None:
    """In each step they see what an undisturbed training sees."""
    killed_at = random.randint(5, 45)
    steps: dict[int, dict[int, list[Any]]] = collections.defaultdict(dict)
    for number, at in ((2, killed_at), (3, 0)):
        tasks = started(BEGINS + ORDERED, number, target, tmp_path, str(at))
        if at:
            tasks[0].wait(60)
            tasks[1].kill()
        for index, task in enumerate(tasks):
            for line in iter(task.line, '["end", 595]' if not at else ""):
                topic, what = json.loads(line)
                assert topic == "step", line
                steps[number].setdefault(what[0], []).append((index, what[1]))
        for task in tasks:
            task.close_input()
            task.finish(60)
    how: Any = {"ordered": True, "seed": 1, "batch_size": 12}
    undisturbed = [batch.tolist() for batch in service.read(target, "ordered/across", **how)]
    assert len(undisturbed) == 50
    first = killed_at // 4 * 4 + 1
    assert [*steps[3]] == [*range(first, 51)], "it goes on behind the checkpoint"
    assert [*steps[2]] == [*range(1, killed_at + 1)]
    steps[2].pop(killed_at)  # which the second process may not have said
    for found in steps.values():
        for step, parts in found.items():
            numbers = [x for _, part in sorted(parts) for x in part]
            assert numbers == undisturbed[step - 1], step
