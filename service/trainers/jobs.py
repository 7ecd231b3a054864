"""The job through which all processes of a training share a dataset, in any framework."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Self, Unpack

from ..client.options import (
    ReadOptions,
    ShardingPolicy,
    TrainingArguments,
    read_options,
    refuse_at_least_once,
    refuse_consumer,
    require_known,
)
from ..client.positions import OrderedRead, StartingPoint
from ..client.progress import EpochIterator, StaysFailed, failing
from ..client.reader import Reader, name_of_job, structure_of
from ..client.saved_states import load, state_of
from ..errors import FailedPrecondition, InvalidArgument
from ..pipelines.definitions import INFINITE_CARDINALITY
from ..task_context import Role, TaskContext

Service = str | tuple[str, str]

IN_STEP_ELEMENTS = 16
"""The smallest bound on a task's outstanding elements: no task must take what others wait for."""


@dataclass(frozen=True)
class TrainingJob:
    """A dataset, and how this process reads it."""

    service: Service
    dataset_id: str
    name: str | None
    options: ReadOptions
    structure: str
    cardinality: int  # of the registered dataset, or the elements that are counted
    processes: int  # that train

    def reader(self, **other: Any) -> Reader:
        """A reader with these options, or `other` ones. It does not warn of an epoch that is over:
        `open_job` checked that, and others may have read all of a short epoch."""
        options = replace(self.options, **other)
        return Reader(self.service, self.dataset_id, self.name, options, expects_epoch=False)

    def in_step(self, batch_size: int) -> TrainingJob:
        """The job with outstanding elements bounded to two batches, for processes that train in
        lockstep. A single process, an infinite dataset or an ordered read needs no bound."""
        alone = self.processes == 1 or self.options.ordered is not None
        if alone or self.cardinality == INFINITE_CARDINALITY:
            return self
        bound = max(IN_STEP_ELEMENTS, 2 * batch_size)
        return replace(self, options=replace(self.options, max_elements=bound))

    def length(self, batch_size: int | None, *, drop_remainder: bool) -> int:
        """Elements or batches of an epoch. Raises TypeError if the registered cardinality is
        unknown, or others may read a part. Of an ordered read, which must know the lengths of all
        bundles, as those of files are, or once an epoch is over."""
        if (ordered := self.options.ordered) is not None:
            if (length := ordered.length()) is None:
                raise TypeError(
                    f"dataset {self.dataset_id} has no len() yet: an ordered read knows how many "
                    "elements an epoch has once all of its bundles were run"
                )
            return length
        policy = self.options.policy
        if self.cardinality < 0 or self.processes > 1 or policy != ShardingPolicy.DYNAMIC:
            raise TypeError(
                f"dataset {self.dataset_id} has no len() here: it has one where a single process "
                "reads it under ShardingPolicy.DYNAMIC, if its cardinality is known where it is "
                f"registered; this is {policy.name}, {self.processes} processes, cardinality "
                f"{self.cardinality}"
            )
        size = batch_size or 1
        return self.cardinality // size if drop_remainder else -(-self.cardinality // size)


class ReadsInOrder:
    """The part of a framework's dataset that an ordered read has.

    Each iteration counts what it gives, and others do not disturb it. But a member of a group, and
    a job with a name, has one place in its iteration: there the newest iteration takes it, and
    older ones raise FailedPrecondition. The next iteration begins behind one that has given all of
    its epoch, or where the one that was left began.
    """

    _job: TrainingJob
    _next_start = StartingPoint()
    _open: weakref.WeakSet[OrderedIteration]  # that may be read on
    _last: OrderedRead | None = None  # of the iteration that began or gave last, or what was loaded
    _begun = StartingPoint()  # where this iteration began
    _advice_if_unordered = "or save the number of epochs for initial_epoch"

    def state_dict(self) -> dict[str, Any]:
        """The position of an ordered read behind what its iteration has given: JSON of under 300
        bytes, the same for all consumers after the same number of steps. Of several iterations it
        is that of the one that gave last.

        Raises FailedPrecondition if that one was left in its midst and another one is still open.
        """
        last = self.ordered_read()
        is_over = last.epoch is not None and last.epoch.over
        unfinished = [each.ordered for each in [*self._open]]
        begun = [each.position() for each in unfinished if each.has_moved]
        if begun and last not in unfinished and not is_over:
            raise FailedPrecondition(
                f"state_dict() of which iteration? The newest one was left at position "
                f"{last.position()}, and another one is open at {begun[0]}: ask before the newer "
                "one begins, or close the older one"
            )
        return state_of(last)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The next iteration begins at the state's position.

        Raises InvalidArgument for what is no state, and FailedPrecondition for the state of another
        dataset, order or global batch.
        """
        ordered = self.ordered_read().copy()
        load(ordered, state)
        self._give_way()
        self._begin_at(ordered)

    def _begin_at(self, ordered: OrderedRead) -> None:
        self._open = weakref.WeakSet()
        self._last, self._next_start = ordered, ordered.start

    def ordered_read(self) -> OrderedRead:
        """Where the trainer is, and in what: of the iteration that began or gave last. Raises
        FailedPrecondition if nothing is in order."""
        if self._last is None:
            raise FailedPrecondition(
                "only an ordered read has a position: give ordered=True, "
                f"{self._advice_if_unordered}"
            )
        return self._last

    def _iteration(
        self,
        items_of: Callable[[Reader], EpochIterator | StaysFailed],
        start: StartingPoint | None = None,
    ) -> OrderedIteration:
        """One that begins at the `start`, by default where the last one ended."""
        self._give_way()
        ordered = self.ordered_read().copy()
        if self._last is not None and self._last.has_given_all():  # and nobody asked for more
            self._move_on(self._last, self._begun)
        ordered.move_to(*(start or self._next_start))
        iteration = OrderedIteration(items_of(self._job.reader(ordered=ordered)), ordered, self)
        self._open.add(iteration)
        self._last, self._begun = ordered, self._next_start
        return iteration

    def _move_on(self, ordered: OrderedRead, begun: StartingPoint) -> None:
        """The next iteration follows this one, which began there and has given all."""
        if self._next_start == begun:  # else another one has come as far, or a state was loaded
            self._next_start = StartingPoint(ordered.position())

    def _give_way(self) -> None:
        """Leave the place in the job to another iteration."""
        name = (self._job.name or "").removeprefix(f"dataset_id=/{self._job.dataset_id}/")
        for each in [*self._open] if name else ():
            each.fail(
                FailedPrecondition(
                    "a newer iteration of this ServiceDataset has taken its place in the job "
                    f"{name!r}, which has one for each consumer: end an iteration before "
                    "another one begins, or look at batches by a dataset with a job_name of its own"
                )
            )


class OrderedIteration:
    """An iteration of a `ReadsInOrder`, to the end of its epoch, which counts what it gives."""

    def __init__(
        self, items: EpochIterator | StaysFailed, ordered: OrderedRead, dataset: ReadsInOrder
    ) -> None:
        self._items: Iterator[Any] = items
        self._error: BaseException | None = None
        self._iteration, self._dataset = items, dataset
        self.ordered, self._begun = ordered, dataset._next_start

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        try:
            item = next(self._items)
        except StopIteration:
            if self._error is not None:  # of `fail`, perhaps by another thread
                self._items = failing(self._error)
                return next(self._items)
            self._dataset._open.discard(self)
            if self.ordered.finish():
                self._dataset._move_on(self.ordered, self._begun)
            raise
        self.ordered.given += 1
        if self._dataset._last is not self.ordered:
            self._dataset._last, self._dataset._begun = self.ordered, self._begun
        return item

    def close(self) -> None:
        """Leave the iteration. Idempotent."""
        self._dataset._open.discard(self)
        self._items = iter(())
        self._iteration.close()

    def fail(self, error: BaseException) -> None:
        """Leave the iteration. It raises this error each time when more is asked for."""
        self._error = error
        self.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def open_job(
    service: Service,
    dataset_id: str,
    processes: int,
    *,
    processing_mode: ShardingPolicy | str,
    bound: int | None,
    unnamed: str | None = None,
    everything: bool = True,
    alone: bool = False,
    rank: int = 0,
    **arguments: Unpack[TrainingArguments],
) -> TrainingJob:
    """Opens the job in one of `processes` processes; asks the dispatcher for the dataset.

    In an ordered read, the process is consumer `rank` of them. At most `bound` elements are on
    their way to the process or buffered in it.

    `unnamed` is the name of a job without one; by default each epoch is a job of its own. With
    `everything`, several processes may read all elements each, under OFF without a job name.
    `alone` is for an evaluator, which reads all elements in an unnamed job from the first epoch on.
    Raises InvalidArgument, FailedPrecondition if more epochs of the job are over than
    `initial_epoch`, and what Reader.definition raises.
    """
    refuse_consumer(arguments, "as the process's rank says it")
    require_known(arguments, TrainingArguments)
    if alone:
        processes, rank = 1, 0
        for argument in ("job_name", "initial_epoch", "start_position", "start_step"):
            arguments.pop(argument, None)  # type: ignore[misc]
    job_name = arguments.get("job_name")
    ordered = arguments.get("ordered", False)
    refuse_at_least_once(
        arguments.get("delivery"),
        "batches are put together ahead of the trainer, and would count as given",
    )
    read_as = read_options(
        processing_mode,
        max_outstanding_requests=bound,
        consumer_index=rank if ordered else None,
        num_consumers=processes if ordered else None,
        **arguments,
    )
    if ordered:
        unnamed = None  # a process alone has a job for each iteration, and a group a name
    elif processes > 1 and job_name is None and (read_as.policy or not everything):
        raise InvalidArgument(
            f"{processes} processes train, and without a job_name each would read everything: "
            "give all of them the same job_name, whose elements they share"
        )
    name = name_of_job(dataset_id, read_as.shared_name or unnamed)
    asked = Reader(service, dataset_id, name, read_as)
    definition = asked.definition()
    if not ordered:
        require_next(job_name, asked.epochs_over, read_as.initial_epoch)
    structure = structure_of(dataset_id, definition)
    return TrainingJob(
        service, dataset_id, name, asked.options, structure, asked.cardinality, processes
    )


def require_next(
    job_name: str | None, over: int, initial_epoch: int, *, goes_on: bool = True
) -> None:
    """Raises FailedPrecondition if more epochs are over: the training would get no elements.
    `goes_on`: whether the message may suggest an initial_epoch."""
    if over > initial_epoch:
        go_on = f"initial_epoch={over} to go on, or " if goes_on else ""
        raise FailedPrecondition(
            f"the job {job_name!r} has read {over} epochs, and initial_epoch is {initial_epoch}: "
            f"give {go_on}another job_name for another training"
        )


def bound_of(max_outstanding_requests: int | str | None) -> tuple[int | None, bool]:
    """The bound that was given, and whether it is "AUTO". Raises InvalidArgument."""
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
