"""Reads from the environment which task of a training job this process is.

This is a pure function from an environment to a frozen value, without any framework. The first of
these variables that is set decides:

    TF_CONFIG          of TensorFlow; Kubeflow's TFJob, Vertex AI and AI Platform set it too
    CLUSTER_SPEC       of Vertex AI, in the same form; its task types are the worker pools
    RANK, WORLD_SIZE   of torchrun and Kubeflow's PyTorchJob
    OMPI_COMM_WORLD_RANK, OMPI_COMM_WORLD_SIZE
                       of Open MPI's mpirun
    SLURM_PROCID, SLURM_STEP_NUM_TASKS
                       of a step that srun started; a batch script is not a step, but one task

An inner launcher overrides a platform's variables: torchrun (TORCHELASTIC_RUN_ID), and any launcher
that gives ranks to the processes of a platform's only task that trains.

Without any of them the process is alone, and chief.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Self

from .errors import FailedPrecondition, InvalidArgument


class Role(StrEnum):
    """The role of a task; the values are TF_CONFIG's names."""

    CHIEF = "chief"  # trains, and does what must be done only once
    WORKER = "worker"  # trains
    PARAMETER_SERVER = "ps"  # keeps variables, and reads nothing
    EVALUATOR = "evaluator"  # reads on its own, beside the training


Cluster = Mapping[str, tuple[str, ...]]


@dataclass(frozen=True, kw_only=True)
class TaskContext:
    """A task of a training job. By default, the only one.

    `index` counts from 0 among the tasks of its type. `rank` counts among all `num_consumers` tasks
    that train: the chief, then the workers in order. It is None if this task does not train.
    `trial` is the number of the hyperparameter trial, as text, from "1"; None outside of tuning.
    `cluster` maps "chief", "worker", "ps", and "evaluator" if the platform lists it, to addresses,
    HOST:PORT. It is empty if a launcher gives ranks only.
    """

    role: Role = Role.CHIEF
    index: int = 0
    rank: int | None = 0
    num_consumers: int = 1
    trial: str | None = None
    cluster: Cluster = field(default_factory=dict, hash=False)

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> Self:
        """The context that `environ` gives, by default this process's environment.

        Raises InvalidArgument, which quotes the variable and says what was expected.
        """
        environ = os.environ if environ is None else environ
        for variable, types in (("TF_CONFIG", TF_CONFIG_TYPES), ("CLUSTER_SPEC", POOLS)):
            if text := environ.get(variable, ""):
                context = _Spec(*_parsed(variable, text), types).context()
                trains = context["rank"] is not None
                if trains and (context["num_consumers"] <= 1 or "TORCHELASTIC_RUN_ID" in environ):
                    return cls(**context | _ranked(environ, complete=True))
                return cls(**context)
        return cls(**_ranked(environ))

    @property
    def is_chief(self) -> bool:
        return self.role == Role.CHIEF

    @property
    def trains(self) -> bool:
        return self.rank is not None

    @property
    def consumer_index(self) -> int:
        """The `rank`, for a coordinated read. Raises FailedPrecondition if it does not train."""
        if self.rank is None:
            raise FailedPrecondition(
                f"{self.role} {self.index} is no task that trains, and has no consumer_index among "
                f"the {self.num_consumers} that do: an evaluator reads by a job_name of its own, "
                "and a parameter server reads nothing"
            )
        return self.rank


RANKS = (
    ("RANK", "WORLD_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
)

TRAINING = ("chief", "worker")
_KINDS = (*TRAINING, "ps", "evaluator")
TF_CONFIG_TYPES = {"chief": "chief", "master": "chief"} | {kind: kind for kind in _KINDS}
"""A chief's older name is master."""

POOLS = {f"workerpool{number}": kind for number, kind in enumerate(_KINDS)}
"""Vertex AI's pools, which it numbers in this order."""


def context_of(
    cluster: Mapping[str, Any], kind: str | None, index: int | None, environ: Mapping[str, str]
) -> TaskContext:
    """The context of a task in a strategy's cluster; the environment gives only the trial.

    `cluster` is what `tf.train.ClusterSpec.as_dict` returns. A process without a task type drives
    the whole cluster, as with TPUs, and is alone. Raises InvalidArgument.
    """
    trial = None
    for variable in ("TF_CONFIG", "CLUSTER_SPEC"):
        if trial is None and (text := environ.get(variable, "")):
            _, spec = _parsed(variable, text)
            trial = ((spec or {}).get("task") or {}).get("trial")
    if kind in (None, "", "localhost"):
        return TaskContext(trial=None if trial is None else str(trial))
    addresses: dict[str, list[str]] = {}
    for name, found in cluster.items():
        if isinstance(found, Mapping):  # sparse: some indices are missing
            if name == kind:
                index = sorted(found).index(index)
            found = [found[i] for i in sorted(found)]
        addresses[name] = list(found)
    task = {"type": kind, "index": index or 0, "trial": trial}
    types = TF_CONFIG_TYPES | {"coordinator": "chief"}
    said = f"the strategy's cluster {addresses}, of which this is {kind!r} {index},"
    return TaskContext(**_Spec(said, {"cluster": addresses, "task": task}, types).context())


def _parsed(variable: str, text: str) -> tuple[str, Any]:
    """The variable as errors quote it, and its JSON. Raises InvalidArgument."""
    said = f"{variable}={text:.1000}"
    try:
        return said, json.loads(text)
    except ValueError as error:
        raise InvalidArgument(f"{said} is no JSON ({error})") from error


class _Spec:
    """Parses a cluster and a task, whose types are in `types`; errors quote `said`."""

    def __init__(self, said: str, spec: Any, types: Mapping[str, str]) -> None:
        self._said = said
        self._types = types
        self._spec = self._object(spec, "is")
        if "sparseCluster" in self._spec:
            raise self._wrong(
                'has a "sparseCluster", which does not say how many tasks train: start the job '
                "without enableDynamicWorker"
            )
        self._cluster = self._read_cluster()
        self._task = self._object(self._spec.get("task"), 'has, as "task",')

    def context(self) -> dict[str, Any]:
        """The arguments of a TaskContext."""
        trial = self._task.get("trial")
        found: dict[str, Any] = {
            "trial": None if trial in (None, "") else str(trial),
            "cluster": self._cluster,
        }
        kind, index = self._read_task()
        first = len(self._cluster.get("chief", ()))
        workers = len(self._cluster.get("worker", ()))
        found |= {"index": index, "num_consumers": max(1, first + workers)}
        if kind not in TRAINING:
            return found | {"role": Role(kind), "rank": None}
        rank = index if kind == "chief" else first + index
        return found | {"role": Role.CHIEF if rank == 0 else Role.WORKER, "rank": rank}

    def _read_cluster(self) -> Cluster:
        cluster: dict[str, tuple[str, ...]] = {}
        for kind, addresses in self._object(
            self._spec.get("cluster"), 'has, as "cluster",'
        ).items():
            if kind not in self._types:
                raise self._wrong(f"has {kind!r} in its cluster, which is {self._no_type()}")
            if not isinstance(addresses, list) or not all(
                isinstance(address, str) and address for address in addresses
            ):
                raise self._wrong(
                    f"has {addresses!r} as its {kind!r}: expected the list of all their addresses, "
                    '["HOST:PORT", …]'
                )
            known = self._types[kind]
            cluster[known] = (*cluster.get(known, ()), *addresses)
        if len(chiefs := cluster.get("chief", ())) > 1:
            raise self._wrong(f"has {len(chiefs)} chiefs, {', '.join(chiefs)}: expected one")
        return {kind: found for kind, found in cluster.items() if found}

    def _read_task(self) -> tuple[str, int]:
        """The task's type, as in `Role`, and its index."""
        trainers = sum(len(self._cluster.get(kind, ())) for kind in TRAINING)
        kind = self._task.get("type")
        if kind is None:
            if trainers > 1:
                raise self._wrong(
                    f"has {trainers} tasks that train, and does not say which one this is: "
                    'expected a "task" with "type" and "index"'
                )
            kind = next((kind for kind in TRAINING if kind in self._cluster), "chief")
        elif not isinstance(kind, str) or kind not in self._types:
            raise self._wrong(f"has {kind!r} as this task's type, which is {self._no_type()}")
        known, index = self._types.get(kind, kind), self._read_index()
        there = len(self._cluster.get(known, ()))
        if known == "evaluator" and not there:
            return known, index  # an evaluator need not be in the training cluster
        if not self._cluster and known in TRAINING:
            there = 1  # alone
        if not there:
            raise self._wrong(
                f"says that this is a task of type {kind!r}, of which its cluster has none; there "
                f"are {', '.join(self._cluster) or 'no tasks at all'}"
            )
        if index >= there:
            raise self._wrong(
                f"says that this is {kind} {index}, of {there}: expected an index from 0 to "
                f"{there - 1}"
            )
        return known, index

    def _read_index(self) -> int:
        index = self._task.get("index", 0)
        if isinstance(index, str) and index.isdecimal():
            index = int(index)
        if not isinstance(index, int) or isinstance(index, bool) or index < 0:
            raise self._wrong(f"has {index!r} as the task's index: expected a number from 0 on")
        return index

    def _object(self, value: Any, what: str) -> dict[str, Any]:
        if value is None:
            return {}
        if not isinstance(value, dict):
            raise self._wrong(f"{what} {value!r}: expected a JSON object")
        return value

    def _no_type(self) -> str:
        return f"no type of task; expected {', '.join(self._types)}"

    def _wrong(self, what: str) -> InvalidArgument:
        return InvalidArgument(f"{self._said} {what}")


def _ranked(environ: Mapping[str, str], *, complete: bool = False) -> dict[str, Any]:
    """The arguments of a TaskContext from a launcher's ranks; {} without a launcher. Raises
    InvalidArgument for one of torchrun's variables without the other, unless `complete`."""
    for rank, size in RANKS:
        found = {name: environ[name] for name in (rank, size) if name in environ}
        if len(found) == 2 or (found and rank == "RANK" and not complete):
            return _checked(rank, size, found)
    return {}


def _checked(rank: str, size: str, found: Mapping[str, str]) -> dict[str, Any]:
    said = " ".join(f"{name}={value}" for name, value in found.items())
    if len(found) < 2:
        missing = size if rank in found else rank
        raise InvalidArgument(
            f"{said} without {missing}: expected both, as torchrun sets them, or neither"
        )
    if not all(value.isdecimal() for value in found.values()) or not (
        0 <= int(found[rank]) < int(found[size])
    ):
        raise InvalidArgument(f"{said}: expected {rank} from 0 to {size} - 1, and both numbers")
    index = int(found[rank])
    role = Role.WORKER if index else Role.CHIEF
    return {"role": role, "index": index, "rank": index, "num_consumers": int(found[size])}
