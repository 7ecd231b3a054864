"""Which task this process is, as each launcher of training jobs tells it in the environment."""

from __future__ import annotations

import json
from typing import Any

import pytest
import tensorflow as tf

from forebay.service import Role, TaskContext
from forebay.service.errors import FailedPrecondition, InvalidArgument
from forebay.service.task_context import context_of

CHIEF, WORKER = Role.CHIEF, Role.WORKER
PS, EVALUATOR = Role.PARAMETER_SERVER, Role.EVALUATOR

WITH_CHIEF = {"chief": ["c:1"], "worker": ["w0:1", "w1:1"], "ps": ["p:1"]}
WITHOUT_CHIEF = {"worker": ["w0:1", "w1:1", "w2:1"]}
WITH_MASTER = {"master": ["m:1"], "worker": ["w0:1"]}


def tf_config(cluster: Any, kind: Any = None, index: Any = 0, **task: Any) -> dict[str, str]:
    if kind is not None:
        task |= {"type": kind, "index": index}
    own = {"environment": "cloud", "job": {"scale_tier": "CUSTOM"}}  # the platform's
    return {"TF_CONFIG": json.dumps({"cluster": cluster, "task": {"cloud": "x", **task}, **own})}


@pytest.mark.parametrize(
    ("cluster", "kind", "index", "role", "rank", "consumers"),
    [
        (WITH_CHIEF, "chief", 0, CHIEF, 0, 3),
        (WITH_CHIEF, "worker", 0, WORKER, 1, 3),
        (WITH_CHIEF, "worker", 1, WORKER, 2, 3),
        (WITH_CHIEF, "ps", 0, PS, None, 3),
        (WITH_CHIEF, "evaluator", 0, EVALUATOR, None, 3),
        (WITHOUT_CHIEF, "worker", 0, CHIEF, 0, 3),
        (WITHOUT_CHIEF, "worker", 2, WORKER, 2, 3),
        (WITHOUT_CHIEF, "worker", "1", WORKER, 1, 3),
        (WITHOUT_CHIEF, "evaluator", 0, EVALUATOR, None, 3),
        (WITH_MASTER, "master", 0, CHIEF, 0, 2),
        (WITH_MASTER, "worker", 0, WORKER, 1, 2),
        ({"chief": ["c:1"]}, "chief", 0, CHIEF, 0, 1),
        ({"chief": ["c:1"]}, None, 0, CHIEF, 0, 1),
        ({"worker": ["w:1"]}, None, 0, CHIEF, 0, 1),
        ({"worker": ["w:1"], "evaluator": ["e:1"]}, "evaluator", 0, EVALUATOR, None, 1),
        ({}, None, 0, CHIEF, 0, 1),
        ({}, "worker", 0, CHIEF, 0, 1),
        ({}, "evaluator", 0, EVALUATOR, None, 1),
        (None, None, 0, CHIEF, 0, 1),
    ],
)
def test_a_task_of_tf_config(
    cluster: Any, kind: Any, index: Any, role: Role, rank: int | None, consumers: int
) -> None:
    context = TaskContext.from_env(tf_config(cluster, kind, index))
    assert (context.role, context.rank, context.num_consumers) == (role, rank, consumers)
    assert context.index == int(index) and context.trial is None
    assert context.is_chief == (role == CHIEF) and context.trains == (rank is not None)
    if rank is not None:
        assert context.consumer_index == rank


def test_a_cluster_has_its_addresses_and_a_chief_under_one_name() -> None:
    context = TaskContext.from_env(tf_config(WITH_MASTER, "worker", 0, trial="7"))
    assert context.cluster == {"chief": ("m:1",), "worker": ("w0:1",)}
    assert context.trial == "7"
    for trial in ("1", 1):
        assert TaskContext.from_env(tf_config({}, trial=trial)).trial == "1"
    assert TaskContext.from_env(tf_config(WITH_CHIEF, "ps")).cluster["ps"] == ("p:1",)


@pytest.mark.parametrize("cluster", [WITH_CHIEF, WITHOUT_CHIEF, {}])
def test_a_cluster_is_one_for_tensorflow(cluster: Any) -> None:
    """TensorFlow's cluster never has an evaluator, whose own task is not part of it."""
    context = TaskContext.from_env(tf_config(cluster, "evaluator"))
    assert tf.train.ClusterSpec(context.cluster).as_dict() == cluster
    assert tf.train.ClusterSpec(cluster) == tf.train.ClusterSpec(context.cluster)


@pytest.mark.parametrize(
    ("kind", "index", "role", "rank"),
    [
        ("workerpool0", 0, CHIEF, 0),
        ("workerpool1", 1, WORKER, 2),
        ("workerpool2", 0, PS, None),
        ("workerpool3", 0, EVALUATOR, None),
    ],
)
def test_worker_pools_are_roles(kind: str, index: int, role: Role, rank: int | None) -> None:
    """As Vertex AI's documentation of distributed training assigns them."""
    pools = {
        "workerpool0": ["pool0-0:2222"],
        "workerpool1": ["pool1-0:2222", "pool1-1:2222"],
        "workerpool2": ["pool2-0:2222"],
        "workerpool3": ["pool3-0:2222"],
    }
    task = {"type": kind, "index": index, "trial": "3"}
    spec = {"cluster": pools, "task": task, "environment": "cloud", "open_ports": [3333, 4444]}
    context = TaskContext.from_env({"CLUSTER_SPEC": json.dumps(spec), "TF_CONFIG": ""})
    assert (context.role, context.index, context.rank) == (role, index, rank)
    assert (context.num_consumers, context.trial) == (3, "3")
    assert context.cluster["worker"] == ("pool1-0:2222", "pool1-1:2222")


TORCHRUN = {"GROUP_RANK": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "h", "MASTER_PORT": "29500"}
TORCHELASTIC = {"TORCHELASTIC_RUN_ID": "x"}
RANKED = {"RANK": "3", "WORLD_SIZE": "4"}
MPIRUN = {"OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "4"}
ONE_POOL = {"CLUSTER_SPEC": json.dumps({"cluster": {"workerpool0": ["a:1"]}})}
TWO_POOLS = {
    "CLUSTER_SPEC": json.dumps(
        {
            "cluster": {"workerpool0": ["a:1"], "workerpool1": ["b:1"]},
            "task": {"type": "workerpool1", "index": 0},
        }
    )
}
PYTORCHJOB = {
    "MASTER_ADDR": "job-master-0",
    "MASTER_PORT": "23456",
    "PYTHONUNBUFFERED": "1",
    "PET_MASTER_ADDR": "job-master-0",
    "PET_MASTER_PORT": "23456",
    "PET_NNODES": "4",
    "PET_NPROC_PER_NODE": "1",
    "PET_NODE_RANK": "2",
}
SLURM = {"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_NODELIST": "n[1-2]"}


@pytest.mark.parametrize(
    ("environ", "role", "rank", "consumers"),
    [
        ({}, CHIEF, 0, 1),
        ({"TF_CONFIG": ""}, CHIEF, 0, 1),
        ({"TF_CONFIG": "{}"}, CHIEF, 0, 1),
        (TORCHRUN | {"RANK": "0", "WORLD_SIZE": "4"}, CHIEF, 0, 4),
        (TORCHRUN | {"RANK": "3", "WORLD_SIZE": "4"}, WORKER, 3, 4),
        (SLURM, CHIEF, 0, 1),  # the batch script itself, before srun
        (SLURM | {"SLURM_PROCID": "5", "SLURM_STEP_NUM_TASKS": "8"}, WORKER, 5, 8),
        # Each node's torchrun was started by srun.
        (
            SLURM | {"SLURM_STEP_NUM_TASKS": "2"} | TORCHRUN | {"RANK": "9", "WORLD_SIZE": "16"},
            *(WORKER, 9, 16),
        ),
        (SLURM | {"SLURM_STEP_NUM_TASKS": "2"} | MPIRUN, WORKER, 2, 4),
        # A launcher inside of a platform that has started it as one task knows better.
        (tf_config({}, trial="3") | RANKED, WORKER, 3, 4),
        # All that Kubeflow's PyTorchJob sets.
        (PYTORCHJOB | {"RANK": "2", "WORLD_SIZE": "4"}, WORKER, 2, 4),
        (PYTORCHJOB | TORCHELASTIC | {"RANK": "5", "WORLD_SIZE": "8"}, WORKER, 5, 8),
        # Vertex AI sets both: the chief of three, and not the worker of two.
        (tf_config(WITHOUT_CHIEF, "worker", 0) | TWO_POOLS, CHIEF, 0, 3),
        (tf_config({"worker": ["w:1"]}, "worker") | RANKED, WORKER, 3, 4),
        (tf_config({"chief": ["c:1"]}, "chief") | MPIRUN, WORKER, 2, 4),
        (ONE_POOL | RANKED, WORKER, 3, 4),
        (tf_config(WITHOUT_CHIEF, "worker", 1) | RANKED, WORKER, 1, 3),
        (tf_config(WITHOUT_CHIEF, "worker", 1) | {"RANK": "0"}, WORKER, 1, 3),
        (tf_config(WITHOUT_CHIEF, "worker", 1) | TORCHELASTIC | RANKED, WORKER, 3, 4),
    ],
)
def test_launchers(environ: dict[str, str], role: Role, rank: int, consumers: int) -> None:
    context = TaskContext.from_env(environ)
    assert (context.role, context.rank, context.num_consumers) == (role, rank, consumers)


def test_ranks_within_a_platform_s_task_keep_its_trial() -> None:
    assert TaskContext.from_env(tf_config({}, trial="3") | RANKED).trial == "3"
    evaluator = tf_config({"worker": ["w:1"]}, "evaluator") | RANKED
    assert TaskContext.from_env(evaluator).role == EVALUATOR


def test_by_default_it_is_this_process_s_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TF_CONFIG", tf_config(WITHOUT_CHIEF, "worker", 2)["TF_CONFIG"])
    assert TaskContext.from_env().consumer_index == 2


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        ({"TF_CONFIG": "{cluster"}, ["TF_CONFIG={cluster", "no JSON"]),
        ({"TF_CONFIG": "[1]"}, ["[1]: expected a JSON object"]),
        (tf_config(["w:1"]), ["\"cluster\", ['w:1']: expected a JSON object"]),
        (tf_config({"worker": "w:1"}), ["'w:1' as its 'worker'", "HOST:PORT"]),
        (tf_config({"worker": {"1": "w:1"}}, "worker", 1), ["{'1': 'w:1'}", "all their addresses"]),
        (tf_config({"trainer": ["w:1"]}), ["'trainer' in its cluster", "chief, master, worker"]),
        (tf_config(WITHOUT_CHIEF), ["3 tasks that train", '"type" and "index"']),
        (tf_config(WITHOUT_CHIEF, "chief"), ["of type 'chief', of which its cluster has none"]),
        (tf_config(WITHOUT_CHIEF, "ps"), ["of type 'ps', of which its cluster has none"]),
        (tf_config({}, "ps"), ["its cluster has none; there are no tasks at all"]),
        (
            tf_config(WITHOUT_CHIEF, "trainer"),
            ["'trainer' as this task's type", "expected chief, master"],
        ),
        (tf_config(WITHOUT_CHIEF, ["worker"]), ["['worker'] as this task's type"]),
        (tf_config(WITHOUT_CHIEF, "worker", 3), ["worker 3, of 3", "from 0 to 2"]),
        (tf_config({}, "worker", 1), ["worker 1, of 1", "from 0 to 0"]),
        (tf_config(WITHOUT_CHIEF, "worker", -1), ["-1 as the task's index"]),
        (tf_config(WITHOUT_CHIEF, "worker", "x"), ["'x' as the task's index"]),
        (tf_config(WITHOUT_CHIEF, "worker", True), ["True as the task's index"]),
        (tf_config({"chief": ["a:1", "b:1"]}, "chief"), ["2 chiefs, a:1, b:1"]),
        (tf_config({"chief": ["a:1"], "master": ["b:1"]}, "chief"), ["2 chiefs, a:1, b:1"]),
        ({"TF_CONFIG": '{"sparseCluster": {}}'}, ["sparseCluster", "enableDynamicWorker"]),
        ({"CLUSTER_SPEC": '{"cluster": {"worker": ["w"]}}'}, ["CLUSTER_SPEC=", "workerpool0"]),
        ({"RANK": "1"}, ["RANK=1 without WORLD_SIZE"]),
        ({"WORLD_SIZE": "1"}, ["WORLD_SIZE=1 without RANK"]),
        ({"RANK": "4", "WORLD_SIZE": "4"}, ["RANK=4 WORLD_SIZE=4", "from 0 to WORLD_SIZE - 1"]),
        ({"RANK": "-1", "WORLD_SIZE": "4"}, ["RANK=-1"]),
        ({"RANK": "one", "WORLD_SIZE": "4"}, ["RANK=one", "numbers"]),
    ],
)
def test_wrong_environments_are_refused(environ: dict[str, str], said: list[str]) -> None:
    with pytest.raises(InvalidArgument) as raised:
        TaskContext.from_env(environ)
    for text in [*said, next(iter(environ.values()))]:
        assert text in str(raised.value)


@pytest.mark.parametrize("kind", ["ps", "evaluator"])
def test_a_task_that_does_not_train_is_no_consumer(kind: str) -> None:
    context = TaskContext.from_env(tf_config(WITH_CHIEF, kind))
    with pytest.raises(FailedPrecondition, match=f"{kind} 0 .* among the 3 that do"):
        _ = context.consumer_index


@pytest.mark.parametrize(
    ("cluster", "kind", "index", "role", "rank", "consumers"),
    [
        (WITH_CHIEF, "worker", 1, WORKER, 2, 3),
        ({"coordinator": ["c:1"], "worker": ["w:1"]}, "coordinator", 0, CHIEF, 0, 2),
        ({"coordinator": ["c:1"], "worker": ["w:1"]}, "coordinator", None, CHIEF, 0, 2),
        ({"worker": ["w0:1", "w1:1"]}, None, None, CHIEF, 0, 1),
        ({"worker": ["w0:1", "w1:1"]}, "", None, CHIEF, 0, 1),
        ({"worker": ["w0:1", "w1:1"]}, "localhost", 0, CHIEF, 0, 1),
        ({"worker": {0: "w0:1", 2: "w2:1"}}, "worker", 2, WORKER, 1, 2),
    ],
)
def test_a_task_of_a_strategy_s_cluster(
    cluster: Any, kind: Any, index: Any, role: Role, rank: int, consumers: int
) -> None:
    """The strategy's cluster wins over the environment, except for the trial."""
    context = context_of(cluster, kind, index, {"RANK": "7", **tf_config({}, trial="3")})
    assert (context.role, context.rank, context.num_consumers) == (role, rank, consumers)
    assert context.trial == "3"


def test_a_strategy_s_cluster_is_quoted_as_what_it_is() -> None:
    with pytest.raises(InvalidArgument, match=r"the strategy's cluster .*'tpu_worker' in its"):
        context_of({"tpu_worker": ["t:1"]}, "tpu_worker", 0, {})
