"""The job by which all processes of a training share a dataset, whatever their framework is."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..client.options import (
    ReadOptions,
    ShardingPolicy,
    check_initial_epoch,
    check_job_name,
    reading,
    sharding_policy,
)
from ..client.reader import Reader, name_of_job, structure_of
from ..errors import FailedPrecondition, InvalidArgument
from ..pipelines.definitions import INFINITE_CARDINALITY
from .context import Role, TaskContext

Service = str | tuple[str, str]

IN_STEP_ELEMENTS = 16
"""How many a task may have to come, at least, lest the first one takes what others wait for."""


@dataclass(frozen=True)
class Job:
    """A dataset, and how this process reads it."""

    service: Service
    dataset_id: str
    policy: ShardingPolicy
    name: str | None
    how: ReadOptions
    structure: str
    cardinality: int  # of the registered dataset
    processes: int  # that train
    epochs_over: int  # as it begins here

    def reader(self, first_epoch: int) -> Reader:
        """Epochs are counted from 1."""
        return Reader(
            self.service, self.dataset_id, self.policy, self.name, self.how,
            first_epoch=first_epoch,
        )  # fmt: skip

    def in_step(self, batch_size: int) -> Job:
        """As processes read that train in step, each on batches of so many elements: no further
        ahead than two of them. Of no concern to a single one, or to a dataset without an end."""
        if self.processes == 1 or self.cardinality == INFINITE_CARDINALITY:
            return self
        bound = max(IN_STEP_ELEMENTS, 2 * batch_size)
        return replace(self, how=replace(self.how, max_elements=bound))

    def length(self, batch_size: int | None, *, drop_remainder: bool) -> int:
        """Elements, or batches, of an epoch. Raises TypeError where the registered dataset does not
        say, or others may have a part of them."""
        if self.cardinality < 0 or self.processes > 1 or self.policy != ShardingPolicy.DYNAMIC:
            raise TypeError(
                f"dataset {self.dataset_id} has no len() here: it has one where a single process "
                "reads it under ShardingPolicy.DYNAMIC, if its cardinality is known where it is "
                f"registered; this is {self.policy.name}, {self.processes} processes, cardinality "
                f"{self.cardinality}"
            )
        size = batch_size or 1
        return self.cardinality // size if drop_remainder else -(-self.cardinality // size)


def open_job(
    service: Service,
    dataset_id: str,
    processes: int,
    *,
    processing_mode: ShardingPolicy | str,
    job_name: str | None,
    initial_epoch: int,
    bound: int | None,
    data_transfer_protocol: str | None,
    target_workers: str,
    unnamed: str | None = None,
    everything: bool = True,
    alone: bool = False,
) -> Job:
    """The job, as it begins in one of so many processes: what was registered is asked for.

    `unnamed` is what a job without a name is called; by default each epoch is a job of its own.
    Without one, processes may read `everything` each under OFF. `alone`: an evaluator's, which
    reads everything by a job of its own, without a name, from the first epoch on. Raises
    InvalidArgument, FailedPrecondition if more epochs of the job are over than `initial_epoch`, and
    as Reader.definition.
    """
    check_job_name(job_name)
    check_initial_epoch(initial_epoch, job_name, cached=False)
    policy = sharding_policy(processing_mode)
    if alone:
        processes, job_name, initial_epoch = 1, None, 0
    if processes > 1 and job_name is None and not (everything and policy == ShardingPolicy.OFF):
        raise InvalidArgument(
            f"{processes} processes train, and without a job_name each would read everything: "
            "give all of them the same job_name, whose elements they share"
        )
    how = reading(
        max_outstanding_requests=bound,
        data_transfer_protocol=data_transfer_protocol,
        target_workers=target_workers,
    )
    name = name_of_job(dataset_id, job_name or unnamed)
    asked = Reader(service, dataset_id, policy, name, how)
    definition = asked.definition()
    require_next(job_name, asked.epochs_over, initial_epoch)
    structure = structure_of(dataset_id, definition)
    return Job(
        service, dataset_id, policy, name, asked.how, structure, asked.cardinality, processes,
        initial_epoch,
    )  # fmt: skip


def require_next(
    job_name: str | None, over: int, initial_epoch: int, *, goes_on: bool = True
) -> None:
    """Raises FailedPrecondition if more epochs are over: who begins would train on nothing.
    `goes_on`: it can be given an initial_epoch."""
    if over > initial_epoch:
        go_on = f"initial_epoch={over} to go on, or " if goes_on else ""
        raise FailedPrecondition(
            f"the job {job_name!r} has read {over} epochs, and initial_epoch is {initial_epoch}: "
            f"give {go_on}another job_name for another training"
        )


def bound_of(max_outstanding_requests: int | str | None) -> tuple[int | None, bool]:
    """What is asked for, and whether it is "AUTO". Raises InvalidArgument."""
    if not isinstance(max_outstanding_requests, str):
        return max_outstanding_requests, False
    if max_outstanding_requests != "AUTO":
        raise InvalidArgument(
            f'max_outstanding_requests={max_outstanding_requests!r}: expected a number, "AUTO" or '
            "None"
        )
    return None, True


def evaluates(context: TaskContext) -> bool:
    """Whether the task is an evaluator. Raises FailedPrecondition for a parameter server."""
    if context.role == Role.PARAMETER_SERVER:
        raise FailedPrecondition(
            f"this task is parameter server {context.index}, which reads nothing by itself"
        )
    return context.role == Role.EVALUATOR
