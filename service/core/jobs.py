"""Jobs: a dataset read under one processing mode. Consumers share a job by its name alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ...journal.proto import events_pb2 as ev
from ...journal.splits import grows
from ..errors import AlreadyExists, FailedPrecondition, InvalidArgument, NotFound, Unimplemented
from .base import Bodies, Command, Decision, EventKind, Ids, find_dataset, reserve_id
from .bundles import complete_order, is_same_order, order_message
from .consumers import JoinIteration, join, left
from .iterations import collected
from .ordered import MAX_CONSUMERS
from .places import require_list
from .state import STATIC, BundleSpec, Dataset, Fork, Job, State, fields_of


class GetOrCreateJob(Command, frozen=True, kw_only=True):
    """→ JobCreated, unless a job of that name exists, for any dataset. Answers its id."""

    dataset_id: str
    name: str  # empty: a new anonymous job
    sharding: int  # ev.Sharding
    num_consumers: int | None = None
    cross_trainer_cache: bool = False
    target_workers: int = 0
    order: ev.OrderSpec | None = None  # of a read in bundles; bundle_splits 0: choose
    content: str = ""  # the content_fingerprint that the dataset must have; empty: any
    one_dataset: bool = False  # nobody may be reading another one under the user's name
    schedules: bool = False  # whether the trainer knows mixtures, and changes of schedules
    fork: ev.Fork | None = None  # → JobForked instead: a new job, as its origin in all else


class JoinJob(GetOrCreateJob, frozen=True, kw_only=True):
    """→ (JobCreated,) and the events of JoinIteration. Answers the ConsumerJoined event.

    If that name's job has another dataset, the command joins nothing and answers that Job: the
    consumer must check its elements first.
    """

    epoch: int
    consumer_index: int | None = None  # of a coordinated read
    member: ev.GroupMember | None = None  # of an ordered read
    gone: tuple[int, ...] = ()  # as JoinIteration's


class RemoveJob(Command, frozen=True, kw_only=True):
    """Remove a job without consumers. → LeaseLost …, IterationCollected …, JobRemoved

    The next consumer of that name creates a new job, which begins with the first split.
    """

    job_id: int


def _get_or_create_job(state: State, command: GetOrCreateJob) -> Decision:
    if command.fork is not None:
        return _fork(state, command.name, command.fork)
    known = state.datasets.get(command.dataset_id)
    if command.content and known is not None and known.content != command.content:
        raise FailedPrecondition(
            f"dataset {command.dataset_id} was removed, and another one has its id now: make the "
            "read again, and begin it without the state of the old one"
        )
    if known is not None and known.outline.HasField("mixture"):
        _check_mixed(command)
    if command.name and command.name in state.job_by_name:
        job = state.jobs[state.job_by_name[command.name]]
        _require_same_parameters(job, command)
        if job.changes and not command.schedules:
            raise Unimplemented(
                f"steps of job {job.user_name} were left out, and this trainer's Forebay would "
                "read them: read it with a newer one"
            )
        return Decision([], job.job_id)
    dataset = find_dataset(state, command.dataset_id)
    if command.one_dataset:
        _require_one_dataset(state, dataset, command.name)
    if command.order is not None:
        _check_in_bundles(command, command.order)
    if command.num_consumers is not None:
        _check_coordinated(command, command.num_consumers)
    if command.sharding not in ev.Sharding.values():
        raise InvalidArgument(
            f"{_sharding(command.sharding)} is no sharding; use one of {ev.Sharding.keys()}"
        )
    require_list(state, command.sharding)
    if command.sharding == ev.DYNAMIC and (why := dataset.outline.unsplittable):
        raise Unimplemented(f"dataset {command.dataset_id} cannot be sharded dynamically: {why}")
    loaded = filter(grows, dataset.outline.sources)
    if command.sharding in STATIC and (saved := next(loaded, None)):
        raise Unimplemented(
            f"dataset {command.dataset_id} cannot be sharded by {_sharding(command.sharding)}: it "
            f"is loaded from the distributed save at {saved.saved_chunks.path}, and each worker "
            "would number its chunks in the order in which it found them; use OFF or DYNAMIC"
        )
    created = ev.JobCreated(
        job_id=state.next_id,
        sharding=ev.Sharding.Name(command.sharding),
        **fields_of(command, "name", "dataset_id", "num_consumers"),
        **fields_of(command, "cross_trainer_cache", "target_workers"),
        order=None
        if command.order is None
        else complete_order(state.datasets, dataset, command.order),
    )
    return Decision([created], created.job_id)


def _fork(state: State, name: str, fork: ev.Fork) -> Decision:
    origin = ordered_job(state, fork.origin)
    if name and name in state.job_by_name:
        existing = state.jobs[state.job_by_name[name]]
        raise AlreadyExists(
            f"there is a job {existing.user_name} already, of dataset {existing.dataset_id}: give "
            "another name"
        )
    assert origin.order is not None
    forked = ev.JobCreated(
        job_id=state.next_id,
        name=name,
        **fields_of(origin, "dataset_id", "sharding", "target_workers"),
        order=order_message(origin.order),
        fork=fork,
    )
    return Decision([ev.Event(job_forked=forked)], forked.job_id)


def ordered_job(state: State, job_id: int) -> Job:
    """Raises NotFound, or FailedPrecondition for a job that has no schedule."""
    job = state.jobs.get(job_id)
    if job is None:
        raise NotFound(f"job {job_id} is not known: it was removed")
    if not job.is_ordered:
        raise FailedPrecondition(
            f"job {job.user_name} is not read in order, so it has no schedule to change"
        )
    if not job.name:
        raise FailedPrecondition(
            f"job {job.job_id} has no name, and goes with its reader: read with a job_name"
        )
    return job


def _join_job(state: State, command: JoinJob) -> Decision:
    created, job_id = _get_or_create_job(state, command)
    ids = Ids(state)
    if created:
        job = _job(created[0] if command.fork is None else created[0].job_forked)
        assert job.job_id == ids.new()
    else:
        job = state.jobs[job_id]
        if job.dataset_id != command.dataset_id:
            return Decision([], job)
    how = fields_of(command, "epoch", "consumer_index", "member", "gone")
    joined = join(state, job, JoinIteration(job_id=job.job_id, **how), ids)
    return Decision([*created, *joined.events], joined.answer)


def _require_one_dataset(state: State, dataset: Dataset, name: str) -> None:
    """Raises FailedPrecondition if a job that has the same name to its users, and another dataset,
    is being read. As names of clients' jobs have the dataset's id, each would have all elements."""
    name = name.removeprefix(f"dataset_id=/{dataset.dataset_id}/")
    for job in state.jobs.values():
        if job.user_name != name or job.dataset_id == dataset.dataset_id:
            continue
        if readers_of(state, job):
            other = state.datasets[job.dataset_id]
            raise FailedPrecondition(
                f"the job {name!r} is being read of dataset {job.dataset_id} (fingerprint "
                f"{other.content}), and this trainer comes with dataset {dataset.dataset_id} "
                f"({dataset.content}): each would read all elements. Give both the same pipeline, "
                "or this id of the first to the second, or another job_name to what is another job"
            )


def _check_mixed(command: GetOrCreateJob) -> None:
    if command.order is None or command.order.claimed:
        raise Unimplemented(
            f"dataset {command.dataset_id} is a mixture, whose sources have a place in one order: "
            "read it with ordered=True"
        )
    if not command.schedules:
        raise Unimplemented(
            f"dataset {command.dataset_id} is a mixture, and this trainer's Forebay knows none: "
            "read it with a newer one"
        )


def _check_coordinated(command: GetOrCreateJob, num_consumers: int) -> None:
    if not 1 <= num_consumers <= MAX_CONSUMERS:
        raise InvalidArgument(f"num_consumers={num_consumers} must be from 1 to {MAX_CONSUMERS}")
    wrong = {
        "a job without a name; set job_name, by which the consumers find each other": (
            not command.name
        ),
        "the cross-trainer cache; leave out one of them": command.cross_trainer_cache,
        f"static sharding ({_sharding(command.sharding)}); use OFF or DYNAMIC": (
            command.sharding not in (ev.OFF, ev.DYNAMIC)
        ),
        'target_workers "LOCAL". Coordinated reads require non-local workers: all consumers have '
        "to read from the same ones": _targets(command.target_workers) == "LOCAL",
    }
    _refuse(f"a coordinated read (num_consumers={num_consumers})", wrong)


def _check_in_bundles(command: GetOrCreateJob, order: ev.OrderSpec) -> None:
    wrong = {
        f"{_sharding(command.sharding)} sharding; use OFF: its bundles divide the dataset": (
            command.sharding != ev.OFF
        ),
        f"a coordinated read (num_consumers={command.num_consumers}); leave out one of them": (
            command.num_consumers is not None
        ),
        "the cross-trainer cache; leave out one of them": command.cross_trainer_cache,
        'target_workers "LOCAL": any consumer has to reach all workers; use "AUTO" or "ANY"': (
            _targets(command.target_workers) == "LOCAL"
        ),
    }
    _refuse("a read at least once" if order.claimed else "an ordered read", wrong)


def _refuse(read: str, wrong: Mapping[str, bool]) -> None:
    for what, found in wrong.items():
        if found:
            raise InvalidArgument(f"{read} does not go with {what}")


def _require_same_parameters(job: Job, command: GetOrCreateJob) -> None:
    order = job.order if is_same_order(job.order, command.order) else command.order
    compared: tuple[tuple[str, Callable[[Any], str], object, object], ...] = (
        ("processing mode", _sharding, job.sharding, command.sharding),
        ("number of consumers", str, job.num_consumers, command.num_consumers),
        ("cross-trainer cache", _enabled, job.cross_trainer_cache, command.cross_trainer_cache),
        ("target workers", _targets, job.target_workers, command.target_workers),
        ("order", _order, job.order, order),
    )
    for what, shown, existing, got in compared:
        if shown(existing) != shown(got):
            raise InvalidArgument(
                f"Tried to create job with name {job.user_name}, but found an existing job with "
                f"different parameters: Existing {what}: <{shown(existing)}>; got <{shown(got)}>"
            )


def _sharding(number: int) -> str:
    known = number in ev.Sharding.values()
    return ev.Sharding.Name(number) if known else f"policy {number}"


def _enabled(flag: bool) -> str:
    return "enabled" if flag else "disabled"


def _order(order: BundleSpec | ev.OrderSpec | None) -> str:
    if order is None:
        return "none"
    names: tuple[str, ...] = ("seed", "shuffle", "cycle_length", "block_length", "bundle_splits")
    if order.claimed:
        names = ("seed", "shuffle", "bundle_splits")
    delivery = "at least once, " if order.claimed else ""
    return delivery + ", ".join(f"{name}={getattr(order, name)}" for name in names)


def _targets(number: int) -> str:
    return {1: "AUTO", 2: "ANY", 3: "LOCAL"}.get(number, str(number))


def _job(event: ev.JobCreated, used_ms: int = 0) -> Job:
    order = BundleSpec.of(event.order) if event.HasField("order") else None
    return Job.of(event, order=order, fork=None, used_ms=used_ms)


def _job_created(state: State, event: ev.JobCreated) -> None:
    job_id = reserve_id(state, event.job_id)
    state.jobs[job_id] = _job(event, state.time_ms)
    state.datasets[event.dataset_id].used_ms = state.time_ms
    if event.name:
        state.job_by_name[event.name] = job_id


def _job_forked(state: State, event: ev.JobCreated) -> None:
    fork, origin = event.fork, state.jobs[event.fork.origin]
    _job_created(state, event)
    job = state.jobs[event.job_id]
    job.changes = [change for change in origin.changes if change.place < fork.place]
    job.step, job.drops_remainder = origin.step, origin.drops_remainder
    job.fork = Fork.of(fork, time_ms=state.time_ms)


def _remove_job(state: State, command: RemoveJob) -> Decision:
    if (job := state.jobs.get(command.job_id)) is None:
        return Decision([], None)
    if readers := readers_of(state, job):
        raise FailedPrecondition(
            f"job {job.user_name} has {len(readers)} consumers; only a job that nobody "
            "reads is removed"
        )
    return Decision(removed(state, job, ""), None)


def epochs_over(state: State, job_name: str) -> int:
    """The job's last finished epoch; 0 if none is finished, or the job does not exist."""
    if (job := state.jobs.get(state.job_by_name.get(job_name, 0))) is None:
        return 0
    finished = (epoch for epoch, i in job.iterations.items() if state.iterations[i].finished)
    return max([0, *finished, *(stop - 1 for _, stop in job.summarized)])


def readers_of(state: State, job: Job, *, unfinished: bool = False) -> list[int]:
    """Its consumers, of all epochs, or of the unfinished ones."""
    its = (state.iterations[number] for number in job.iterations.values())
    return [i for each in its if not (unfinished and each.finished) for i in each.consumers]


def removed(state: State, job: Job, reason: str) -> Bodies:
    """Remove the job with its iterations. Its consumers learn the `reason`."""
    events: Bodies = [left(consumer_id, reason) for consumer_id in sorted(readers_of(state, job))]
    for iteration_id in job.iterations.values():
        events += collected(state, state.iterations[iteration_id])
    if job.name or not job.iterations:  # else the last IterationCollected removes it
        events.append(ev.JobRemoved(job_id=job.job_id))
    return events


def _job_removed(state: State, event: ev.JobRemoved) -> None:
    job = state.jobs.pop(event.job_id)
    if job.name:
        del state.job_by_name[job.name]


DECIDE = {GetOrCreateJob: _get_or_create_job, JoinJob: _join_job, RemoveJob: _remove_job}
EVENTS = {
    "job_created": EventKind(_job_created, answer=lambda body: body.job_id),
    "job_forked": EventKind(_job_forked, answer=lambda body: body.job_id),
    "job_removed": EventKind(_job_removed),
}
