"""`distribute_across`: all tasks of a training job call it, and read one dataset.

The dataset's id is derived from the training's name. The chief registers the dataset under this id,
and the others poll until it exists. A restarted chief finds it too, because the journal keeps it.
Its metadata have the number of replicas and a fingerprint of what the chief built. If a second
chief registers something else, the dispatcher refuses it because the metadata differ.
"""

from __future__ import annotations

import logging
import numbers
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Unpack

import tensorflow as tf

from ...journal.proto import events_pb2 as ev
from ..client import parameter_servers
from ..client.api import from_dataset_id
from ..client.options import (
    IN_LOCKSTEP,
    CrossTrainerCache,
    OrderArguments,
    ShardingPolicy,
    check_job_name,
    refuse_at_least_once,
    refuse_consumer,
)
from ..client.reader import name_of_job
from ..client.registration import checked, definition_of, fingerprint_of, registered
from ..client.tf_errors import raising_tensorflows
from ..connections.dispatcher_client import COMPLAIN_AFTER_S, DispatcherClient
from ..errors import FailedPrecondition, InvalidArgument, NotFound, Unavailable
from ..pipelines.tf_data.element_specs import decode_metadata, plain
from ..proto import forebay_pb2 as pb
from ..task_context import Role, TaskContext, context_of
from .jobs import IN_STEP_ELEMENTS, Service, bound_of, require_next

log = logging.getLogger(__name__)

Dataset = Any

LOOK_AGAIN_S = 0.5


@plain
@raising_tensorflows()
def distribute_across(
    dataset_fn: Callable[[Any], Any],
    service: Service,
    context_or_strategy: TaskContext | Any = None,
    *,
    job_name: str,
    dataset_id: str | None = None,
    processing_mode: ShardingPolicy | str = ShardingPolicy.DYNAMIC,
    compression: str | None = "AUTO",
    cross_trainer_cache: bool = False,
    max_outstanding_requests: int | str | None = "AUTO",
    data_transfer_protocol: str | None = None,
    target_workers: str = "AUTO",
    timeout_s: float | None = 600.0,
    add_position: bool = False,
    **options: Unpack[OrderArguments],
) -> Dataset:
    """A `tf.data.Dataset` of this task's elements of a dataset that all tasks of a cluster share.

    Every task makes the same call. The chief calls `dataset_fn` and registers the result; the
    others wait for it. A restarted chief calls `dataset_fn` again. If that returns another dataset
    now, a warning says so, and the tasks still read the registered one. The tasks that train share
    one job: each element goes to one of them. An evaluator reads all by itself.

    Args:
      dataset_fn: as for `distribute_datasets_from_function`, a function of a
        `tf.distribute.InputContext`. It returns a `tf.data.Dataset`, or whatever else
        `register_dataset` takes alone. The service distributes the elements, so there is one input
        pipeline: `shard(context.num_input_pipelines, context.input_pipeline_id)` drops nothing.
        Batch by `context.get_per_replica_batch_size(…)` for
        `strategy.distribute_datasets_from_function(lambda _: dataset)` or a loop of your own. Batch
        by the global batch size for `experimental_distribute_dataset` and Keras's `fit`, which
        divide batches among replicas.
      service: as in `register_dataset`.
      context_or_strategy: a `TaskContext`, by default that of the environment; or the
        `tf.distribute.Strategy`, which says how many replicas there are. Without a strategy, each
        task that trains is one replica. With parameter servers there is one replica in all.
      job_name: of this training, the same in all tasks and after restarts. Another training, or
        another dataset, needs another name. Each hyperparameter trial is a training of its own,
        unless trials share the cache.
      dataset_id: the id to register under, by default derived from `job_name`. To continue a
        training on another dataset, give all tasks another id: epochs after `initial_epoch` are
        read from it.
      processing_mode, compression, data_transfer_protocol, target_workers: as in
        `register_dataset` and `from_dataset_id`.
      max_outstanding_requests: as in `from_dataset_id`. "AUTO" is 16 where several tasks share a
        finite dataset. They may train in lockstep and need equally many batches: a task whose
        elements run out early trains on nothing. Elsewhere "AUTO" is None. Give None for elements
        that are not batches: with 16 at a time, a small element costs 10 to 50 times as much.
      cross_trainer_cache: whether hyperparameter trials share one training. All trials read the
        same elements, and the trial is the `CrossTrainerCache`'s trainer_id. The dataset must be
        infinite, and must not depend on the trial's parameters.
      initial_epoch: how many epochs are over when all tasks resume from a checkpoint, as in Keras's
        `fit`. The rest of the next epoch comes first. Evaluators need none.
      timeout_s: how long to wait for the dispatcher and the chief, in seconds; None: for ever.
      ordered: read in one global order, whose consumers are the tasks that train. With
        `batch_size`, of a task's batch, `dataset_fn` does not batch, and a training may go on with
        another number of tasks. An evaluator reads the same order from its beginning.
      add_position, and other keywords: as in `from_dataset_id`.

    Its auto-sharding is OFF, because the service distributes the elements. Under a
    `ParameterServerStrategy` only the chief calls this, for `create_per_worker_dataset`, which also
    takes a function that calls it. `initial_epoch` is not allowed there, as in `from_dataset_id`.

    Raises Unavailable if the chief does not register in time, or no dispatcher answers. Raises
    FailedPrecondition
    - if this task trains and, as it begins, more epochs are over than `initial_epoch`,
    - if this task trains and the training began with another number of replicas,
    - if this is the chief and its dataset's elements differ from those the training began with,
    - if another chief has registered something else meanwhile,
    - if this task is a parameter server, or a worker beside parameter servers.
    Also raises what `register_dataset`, `from_dataset_id`, `dataset_fn` and `TaskContext.from_env`
    raise.
    """
    _require_sense(dataset_fn, job_name, dataset_id, timeout_s)
    context, replicas = _cluster_of(context_or_strategy)
    _require_reader(context)
    refuse_consumer(options, "the cluster says it")
    ordered, initial_epoch = options.get("ordered", False), options.get("initial_epoch", 0)
    if ordered and cross_trainer_cache:
        raise InvalidArgument("an ordered read does not go with cross_trainer_cache: leave it out")
    if context.trains and context.num_consumers > 1:
        refuse_at_least_once(options.get("delivery"), IN_LOCKSTEP)
    if not context.trains:
        options["initial_epoch"] = 0
        options.pop("start_position", None)
        options.pop("start_step", None)
    trial = context.trial or "1"
    name = job_name if cross_trainer_cache or not context.trial else f"{job_name}/trial={trial}"
    shared = job_name if context.trains else None  # an evaluator shares no iterations
    with DispatcherClient(service) as client:
        own = dataset_id and (dataset_id if name == job_name else f"{dataset_id}/trial={trial}")
        own = own or f"{name}/across"
        job = name_of_job(own, shared)
        remade = ordered and options.get("batch_size") is not None  # for any number of replicas
        training = _Training(client, name, own, job, replicas, timeout_s, remade)
        found = training.find()
        if found is not None:
            if not ordered and job:  # else this task would train on nothing
                goes_on = not parameter_servers.are_there()
                require_next(name, found.epochs_over, initial_epoch, goes_on=goes_on)
            if context.is_chief:
                same = training.is_same(found, dataset_fn, compression)
                if same and not (initial_epoch or cross_trainer_cache or ordered):
                    log.warning(
                        "%r has had its dataset since it began, and reads it on: if this is "
                        "another training, give it another job_name", name,
                    )  # fmt: skip
        elif context.is_chief:
            found = training.begin(dataset_fn, service, compression)
        else:
            found = training.wait()
    metadata = decode_metadata(found.definition)
    bound, automatic = bound_of(max_outstanding_requests)
    several = context.num_consumers > 1 and not ordered
    if automatic and shared and several and not parameter_servers.are_there():
        bound = IN_STEP_ELEMENTS if metadata.cardinality != tf.data.INFINITE_CARDINALITY else None
    if cross_trainer_cache and not context.trains:
        shared = f"{job_name}/{context.role}"  # a cache is found by its job's name
    dataset = from_dataset_id(
        processing_mode,
        service,
        training.dataset_id,
        metadata.element_spec,
        job_name=shared,
        max_outstanding_requests=bound,
        data_transfer_protocol=data_transfer_protocol,
        cross_trainer_cache=CrossTrainerCache(trial) if cross_trainer_cache else None,
        target_workers=target_workers,
        consumer_index=context.rank if ordered and context.trains else None,
        num_consumers=context.num_consumers if ordered and context.trains else None,
        add_position=add_position,
        **options,
    )
    if shared:
        return dataset
    unsharded = tf.data.Options()
    unsharded.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    return dataset.with_options(unsharded)


def _require_sense(dataset_fn: Any, job_name: Any, dataset_id: Any, timeout_s: Any) -> None:
    """Raises InvalidArgument."""
    if not callable(dataset_fn):
        raise InvalidArgument(
            f"dataset_fn={dataset_fn!r:.100} is no function: give one that takes a "
            "tf.distribute.InputContext and returns the dataset, lambda context: dataset"
        )
    if job_name is None:
        raise InvalidArgument(
            "job_name=None would have each task read all of the dataset: give this training a "
            "name, the same in all tasks"
        )
    check_job_name(job_name)
    if dataset_id is not None and not (isinstance(dataset_id, str) and dataset_id):
        raise InvalidArgument(
            f"dataset_id={dataset_id!r:.100} must be a string with something in it; leave it out "
            "for a name made of job_name"
        )
    is_number = isinstance(timeout_s, numbers.Real) and not isinstance(timeout_s, bool)
    if timeout_s is not None and not (is_number and timeout_s >= 0):
        raise InvalidArgument(
            f"timeout_s={timeout_s!r:.100} must be a number of seconds from 0 on, or None to wait "
            "for ever"
        )


def _cluster_of(given: TaskContext | Any) -> tuple[TaskContext, int]:
    """This task's context, and how many replicas train in sync."""
    if given is None:
        given = TaskContext.from_env()
    if isinstance(given, TaskContext):
        return given, 1 if "ps" in given.cluster else given.num_consumers
    if not isinstance(given, tf.distribute.Strategy):
        raise InvalidArgument(
            f"context_or_strategy={given!r} must be a TaskContext or a tf.distribute.Strategy"
        )
    resolver = given.cluster_resolver
    cluster = resolver and resolver.cluster_spec().as_dict()
    if cluster:  # the environment may not have it
        context = context_of(cluster, resolver.task_type, resolver.task_id, os.environ)
    else:
        context = TaskContext.from_env()
        alone = not parameter_servers.are_there()  # their strategy names no cluster either
        if alone and context.trains and context.num_consumers > 1:
            log.warning(
                "%s trains in this process alone, which is one of %d tasks that train: each of "
                "them learns a model of its own, from its part of the data; "
                "MultiWorkerMirroredStrategy has them learn one", type(given).__name__,
                context.num_consumers,
            )  # fmt: skip
    return context, int(given.num_replicas_in_sync)


def _require_reader(context: TaskContext) -> None:
    """Raises FailedPrecondition for parameter servers and their workers, which read nothing."""
    servers = context.cluster.get("ps", ())
    if context.role == Role.PARAMETER_SERVER:
        said = f"parameter server {context.index} of {len(servers)}"
    elif context.role == Role.WORKER and servers:
        said = f"worker {context.index} of a cluster with parameter servers"
    else:
        return
    raise FailedPrecondition(
        f"this task is {said}, which reads nothing by itself: have it run "
        "tf.distribute.Server(…).join(), and call distribute_across in the chief, whose "
        "ClusterCoordinator hands the dataset to the workers"
    )


@dataclass
class _Training:
    """The dataset registered under a training's name, to find or register within `timeout_s`."""

    client: DispatcherClient
    name: str
    dataset_id: str
    job: str | None  # the whole name of that of the tasks that train; None: this task does not
    replicas: int
    timeout_s: float | None
    any_replicas: bool  # the training may go on with another number of them

    def __post_init__(self) -> None:
        self._give_up_s = None if self.timeout_s is None else time.monotonic() + self.timeout_s

    def find(self) -> pb.GetDatasetResponse | None:
        """The dataset, or None. Raises FailedPrecondition if it is not for this cluster."""
        request = pb.GetDatasetRequest(dataset_id=self.dataset_id, job_name=self.job or "")
        try:
            found = self.client.call(request, pb.GetDatasetResponse, patience_s=self._left_s())
        except NotFound:
            return None
        began = _tag(found).replicas
        if not began:
            raise FailedPrecondition(
                f"dataset {self.dataset_id!r} was not registered by distribute_across: give this "
                "training another job_name"
            )
        if self.job and began != self.replicas and not self.any_replicas:
            raise FailedPrecondition(
                f"{self.name!r} began with {began} replicas, and its batches are made for them; "
                f"this cluster has {self.replicas}: start it as it was, or give a new training "
                "another job_name"
            )
        return found

    def begin(
        self, dataset_fn: Callable[[Any], Any], service: Service, compression: str | None
    ) -> pb.GetDatasetResponse:
        """Registers what the function makes. Raises FailedPrecondition if another is registered."""
        request = self._defined(dataset_fn, compression)
        mine = pb.Training(replicas=self.replicas, fingerprint=fingerprint_of(request))
        request.metadata += mine.SerializeToString()
        failed: InvalidArgument | None = None
        try:
            registered(service, request, self.dataset_id)
        except InvalidArgument as error:  # a bad dataset, or another chief has registered meanwhile
            failed = error
        found = self.find()
        if found is None and failed is not None:
            raise failed
        if found is None or _tag(found).fingerprint != mine.fingerprint:
            raise FailedPrecondition(
                f"another chief of {self.name!r} has registered another dataset at the same time: "
                "give each training a job_name of its own"
            )
        return found

    def is_same(
        self,
        found: pb.GetDatasetResponse,
        dataset_fn: Callable[[Any], Any],
        compression: str | None,
    ) -> bool:
        """Whether the function makes what was found; if not, logs a warning. Raises
        FailedPrecondition if its elements have another spec."""
        made = self._defined(dataset_fn, compression)
        mine = decode_metadata(ev.DatasetDefinition(metadata=made.metadata)).element_spec
        theirs = decode_metadata(found.definition).element_spec
        instead = (
            "to train on with it, give all tasks a dataset_id of its own, and for another training "
            "another job_name"
        )
        if mine != theirs:
            raise FailedPrecondition(
                f"{self.name!r} began with elements of {theirs}, and dataset_fn now makes "
                f"elements of {mine}: {instead}"
            )
        began = _tag(found).fingerprint
        if began and began != fingerprint_of(made):
            log.warning(
                "%r began with another dataset than dataset_fn now makes, and reads the old one "
                "on, %r: %s", self.name, self.dataset_id, instead,
            )  # fmt: skip
            return False
        return True

    def _defined(
        self, dataset_fn: Callable[[Any], Any], compression: str | None
    ) -> pb.RegisterDatasetRequest:
        with tf.init_scope():  # eagerly and once, even where a ClusterCoordinator traces this
            context = tf.distribute.InputContext(num_replicas_in_sync=self.replicas)
            dataset = dataset_fn(context)
            return definition_of(checked(dataset, None, False, {}), compression)

    def wait(self) -> pb.GetDatasetResponse:
        """Polls until the chief has registered the dataset. Raises Unavailable."""
        began_s, said = time.monotonic(), False
        while (found := self.find()) is None:
            left_s = self._left_s()
            if not said and time.monotonic() - began_s > COMPLAIN_AFTER_S:
                log.warning(
                    "waiting for the chief of %r to register its dataset, %r", self.name,
                    self.dataset_id,
                )  # fmt: skip
                said = True
            if left_s == 0:
                raise Unavailable(
                    f"the chief of {self.name!r} has not registered its dataset in "
                    f"{self.timeout_s:g} s: start it, look into its log, or give all tasks the "
                    "same job_name and service"
                )
            time.sleep(LOOK_AGAIN_S if left_s is None else min(LOOK_AGAIN_S, left_s))
        return found

    def _left_s(self) -> float | None:
        return None if self._give_up_s is None else max(0.0, self._give_up_s - time.monotonic())


def _tag(found: pb.GetDatasetResponse) -> pb.Training:
    return pb.Training.FromString(found.definition.metadata)
