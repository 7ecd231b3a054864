"""`distribute_across`: one call by which all tasks of a training job read one dataset.

The dataset's id is made of the run's name and the number of replicas, so whoever knows these finds
it: the chief registers it under this id, the others look until it is there. It is in the journal
like any other, so a chief that is started again finds it as well, and a cluster that has another
number of replicas now finds that the id's number is not its own.
"""

from __future__ import annotations

import json
import logging
import os
import re
import time
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from ..client.api import from_dataset_id, register_dataset
from ..client.datasets import list_datasets
from ..client.options import CrossTrainerCache, ShardingPolicy, check_job_name
from ..client.tf_errors import raising_tensorflows
from ..errors import FailedPrecondition, InvalidArgument, Unavailable
from ..pipelines.tf_data.element_specs import plain
from .context import Role, TaskContext

log = logging.getLogger(__name__)

Dataset = Any
Service = str | tuple[str, str]

LOOK_AGAIN_S = 0.5

IN_STEP = 16
"""How many elements a task may have to come, lest the first one takes what others wait for."""


@plain
@raising_tensorflows()
def distribute_across(
    dataset_fn: Callable[[Any], Any],
    service: Service,
    context_or_strategy: TaskContext | Any = None,
    *,
    job_name: str,
    processing_mode: ShardingPolicy | str = ShardingPolicy.DYNAMIC,
    compression: str | None = "AUTO",
    cross_trainer_cache: bool = False,
    max_outstanding_requests: int | None = IN_STEP,
    data_transfer_protocol: str | None = None,
    target_workers: str = "AUTO",
    initial_epoch: int = 0,
    timeout_s: float | None = 600.0,
) -> Dataset:
    """A `tf.data.Dataset` of what this task gets of a dataset that all tasks of a cluster share.

    Every task makes the same call. The chief calls `dataset_fn` and registers what it returns, if
    that has not been done yet; the others wait for it. The tasks that train share one job: each
    element goes to one of them. An evaluator has a job of its own, and gets all elements.

    Args:
      dataset_fn: what `distribute_datasets_from_function` takes: a function of a
        `tf.distribute.InputContext`. It returns a `tf.data.Dataset`, or whatever else
        `register_dataset` takes alone. The service distributes the elements, so there is one input
        pipeline, and `shard(context.num_input_pipelines, context.input_pipeline_id)` leaves all of
        it. Batch by `context.get_per_replica_batch_size(…)` for
        `strategy.distribute_datasets_from_function(lambda _: dataset)` or a loop of your own, and
        by the global batch size for `experimental_distribute_dataset` and Keras's `fit`, which
        divide batches among replicas.
      service: as in `register_dataset`.
      context_or_strategy: a `TaskContext`, by default that of the environment; or the
        `tf.distribute.Strategy`, which says how many replicas there are. Without a strategy each
        task that trains is one replica.
      job_name: of this run of the training, the same in all tasks. A task that is started again
        gives it again; another run, or another dataset, gives another one. Each hyperparameter
        trial is a run of its own, unless they share the cache.
      processing_mode, compression, data_transfer_protocol, target_workers: as in
        `register_dataset` and `from_dataset_id`.
      max_outstanding_requests: as in `from_dataset_id`. Few, by default, as tasks that train in
        step need equally many batches: one whose elements have come to an end trains on none while
        others have some. None: only their bytes are bounded.
      cross_trainer_cache: hyperparameter trials share one run: what is produced is for all, and
        the trial is the `CrossTrainerCache`'s trainer_id. The dataset must be infinite, and the
        same whatever the trial's parameters.
      initial_epoch: how many epochs are over, when all tasks begin again from a checkpoint: as in
        Keras's `fit`. What is left of the one after them comes first.
      timeout_s: how long to wait for the chief, in seconds; None: for ever.

    Its auto-sharding is OFF, as the service distributes the elements.

    Raises Unavailable if the chief has not registered it in time, FailedPrecondition if the run
    began with another number of replicas or this task is a parameter server, and what
    `register_dataset`, `from_dataset_id`, `dataset_fn` and `TaskContext.from_env` do.
    """
    check_job_name(job_name)
    context, replicas = _cluster_of(context_or_strategy)
    if context.role == Role.PARAMETER_SERVER:
        raise FailedPrecondition(
            f"this task is parameter server {context.index} of {len(context.cluster['ps'])}, which "
            "reads nothing: have it run tf.distribute.Server(…).join(), and call distribute_across "
            "in the chief, whose ClusterCoordinator hands the dataset to the workers"
        )
    trial = context.trial or "1"
    run = job_name if cross_trainer_cache or not context.trial else f"{job_name}/trial={trial}"
    if context.is_chief:
        dataset_id = _registered(dataset_fn, service, run, replicas, compression)
    else:
        dataset_id = _waited_for(service, run, replicas if context.trains else None, timeout_s)
    return from_dataset_id(
        processing_mode,
        service,
        dataset_id,
        job_name=job_name if context.trains else f"{job_name}/{context.role}",
        max_outstanding_requests=max_outstanding_requests,
        data_transfer_protocol=data_transfer_protocol,
        cross_trainer_cache=CrossTrainerCache(trial) if cross_trainer_cache else None,
        target_workers=target_workers,
        initial_epoch=initial_epoch,
    )


def _cluster_of(given: TaskContext | Any) -> tuple[TaskContext, int]:
    """Who this is, and how many replicas train in sync."""
    if given is None:
        given = TaskContext.from_env()
    if isinstance(given, TaskContext):
        return given, given.num_consumers
    if not isinstance(given, tf.distribute.Strategy):
        raise InvalidArgument(
            f"context_or_strategy={given!r} must be a TaskContext or a tf.distribute.Strategy"
        )
    resolver, environ = given.cluster_resolver, dict(os.environ)
    cluster = resolver and resolver.cluster_spec().as_dict()
    if cluster:  # which the environment need not know
        task: dict[str, Any] = {"type": resolver.task_type, "index": resolver.task_id}
        task["trial"] = TaskContext.from_env(environ).trial
        environ = {"TF_CONFIG": json.dumps({"cluster": cluster, "task": task})}
    return TaskContext.from_env(environ), int(given.num_replicas_in_sync)


def _registered(
    dataset_fn: Callable[[Any], Any],
    service: Service,
    run: str,
    replicas: int,
    compression: str | None,
) -> str:
    known = _found(service, run, replicas)
    if known is not None:
        log.warning(
            "run %r has had its dataset since it began, and reads it on: if this is another run, "
            "give it another job_name", run,
        )  # fmt: skip
        return known
    dataset = dataset_fn(tf.distribute.InputContext(num_replicas_in_sync=replicas))
    dataset_id = _dataset_id(run, replicas)
    return register_dataset(service, dataset, compression, dataset_id)


def _waited_for(service: Service, run: str, replicas: int | None, timeout_s: float | None) -> str:
    give_up_s = None if timeout_s is None else time.monotonic() + timeout_s
    while True:
        found = _found(service, run, replicas)
        if found is not None:
            return found
        left_s = None if give_up_s is None else give_up_s - time.monotonic()
        if left_s is not None and left_s <= 0:
            raise Unavailable(
                f"the chief of run {run!r} has not registered its dataset in {timeout_s:g} s: "
                "start it, look into its log, or give all tasks the same job_name and service"
            )
        time.sleep(LOOK_AGAIN_S if left_s is None else min(LOOK_AGAIN_S, left_s))


def _found(service: Service, run: str, replicas: int | None) -> str | None:
    """The id of the run's dataset, for that many replicas, or for any."""
    name = re.compile(re.escape(_dataset_id(run, "")) + "([0-9]+)")
    ids = [dataset.dataset_id for dataset in list_datasets(service)]
    found = {int(match[1]): match[0] for match in map(name.fullmatch, ids) if match}
    if not found:
        return None
    if replicas is None:
        return next(iter(found.values()))
    if replicas not in found:
        began = ", ".join(map(str, found))
        raise FailedPrecondition(
            f"run {run!r} began with {began} replicas, and its batches are made for them; this "
            f"cluster has {replicas}: start it as it was, or give a new run another job_name"
        )
    return found[replicas]


def _dataset_id(run: str, replicas: int | str) -> str:
    return f"{run}/replicas={replicas}"
