"""`decide`: what a command leads to, given the state.

Pure and synchronous: it reads the state, changes nothing, and returns the events that
`apply` will fold in, with the answer for whoever asked. Commands that ask for what is so
already lead to no event, so they can be repeated freely; commands that make something new
carry a request number, and a retry is answered by the event that answered it first.

Leases. A task asks for splits of one provider's current repetition and gets the next range
of them. How many is what it wants, but never more than half of its even share of what is
left, so that the last splits spread over all tasks whatever their speed. The first request
for a later repetition starts it; a request for an earlier one finds it ended, or, if it says so,
takes from the present one. What was handed back of an earlier repetition goes to whoever asks next.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from ...journal.codec import FORMAT
from ...journal.proto import events_pb2 as ev
from ..errors import FailedPrecondition, InvalidArgument, NotFound, Unavailable, Unimplemented
from . import commands as c
from . import ranges
from .apply import fingerprint
from .state import Iteration, Job, Provider, State, Task, Worker


class Decision(NamedTuple):
    """Events to journal and apply, in order, and the answer to the command."""

    events: list[ev.Event]
    answer: Any


def decide(state: State, command: c.Command, now_ms: int) -> Decision:
    """Decide a command. Raises the errors of service/errors.py; then nothing has happened."""
    if command.request is not None:
        caller, number = command.request
        last = state.answers.get(caller)
        if last is not None and number == last.number:
            return Decision([], _answer(ev.Event.FromString(last.event)))
        if last is not None and number < last.number:
            raise InvalidArgument(
                f"request {number} of caller {caller!r} comes after its request {last.number} "
                "was answered; number the requests of one caller upwards, one at a time"
            )
    return _DECIDE[type(command)](state, command, now_ms)


def _answer(event: ev.Event) -> Any:
    """The answer that an event gives to the command that led to it."""
    kind = event.WhichOneof("event")
    if kind == "job_created":
        return event.job_created.job_id
    if kind == "consumer_joined":
        return event.consumer_joined
    if kind == "splits_leased":
        return event.splits_leased
    raise AssertionError(f"{kind} answers no command")


def _request(command: c.Command) -> ev.Request | None:
    if command.request is None:
        return None
    return ev.Request(caller=command.request[0], number=command.request[1])


class _Ids:
    """New ids for the events of one decision."""

    def __init__(self, state: State) -> None:
        self._next = state.next_id

    def new(self) -> int:
        self._next += 1
        return self._next - 1


# -- datasets and jobs ---------------------------------------------------------------------


def _elect_leader(state: State, command: c.ElectLeader, now_ms: int) -> Decision:
    elected = ev.LeaderElected(
        term=command.term,
        address=command.address,
        format=FORMAT,
        version=command.version,
        journal_id=state.journal_id or command.journal_id,
    )
    return Decision([ev.Event(time_ms=now_ms, leader_elected=elected)], elected)


def _register_dataset(state: State, command: c.RegisterDataset, now_ms: int) -> Decision:
    for number, source in enumerate(command.definition.sources):
        kind = source.WhichOneof("source")
        if not kind or source.count < 0 or (kind == "arithmetic" and source.arithmetic.step == 0):
            raise InvalidArgument(
                f"a dataset with the split source <{source}>, which yields no splits: name "
                "a kind, a count of at least 0, a step other than 0"
            )
        first = source.leased_with
        if source.HasField("leased_with") and (
            not 0 <= first < number or command.definition.sources[first].HasField("leased_with")
        ):
            raise InvalidArgument(
                f"split source {number} is leased with source {first}: name one before it that is "
                "leased on its own"
            )
    dataset_id = command.dataset_id
    if dataset_id and (known := state.datasets.get(dataset_id)):
        if (known.definition.metadata, known.definition.compression) != (
            command.definition.metadata,
            command.definition.compression,
        ):
            raise InvalidArgument(
                "Datasets with the same ID should have the same structure: dataset "
                f"{dataset_id!r} is registered with another element_spec, compression or "
                "cardinality; register the new one under another id"
            )
        if not command.restores or known.definition == command.definition:
            return Decision([], dataset_id)
        if _without_graph(known.definition) != _without_graph(command.definition):
            raise InvalidArgument(
                f"dataset {dataset_id!r}, whose graph is lost, has other splits or another "
                "structure than this one; register the new one under another id"
            )
    if not dataset_id:
        equal = state.dataset_by_fingerprint.get(fingerprint(command.definition))
        if equal is not None:
            return Decision([], equal)
        dataset_id = _free_dataset_id(state)
    registered = ev.DatasetRegistered(dataset_id=dataset_id, definition=command.definition)
    return Decision([ev.Event(time_ms=now_ms, dataset_registered=registered)], dataset_id)


def _without_graph(definition: ev.DatasetDefinition) -> ev.DatasetDefinition:
    rest = ev.DatasetDefinition()
    rest.CopyFrom(definition)
    rest.ClearField("tf_data_graph")
    return rest


def _free_dataset_id(state: State) -> str:
    number = state.next_id
    while str(number) in state.datasets:
        number += 1
    return str(number)


def _decide_compression(state: State, command: c.DecideCompression, now_ms: int) -> Decision:
    dataset = state.datasets.get(command.dataset_id)
    if dataset is None:
        raise NotFound(f"Dataset id {command.dataset_id} not found")
    if dataset.compression_disabled is not None:
        return Decision([], dataset.compression_disabled)
    decided = ev.CompressionDecided(dataset_id=command.dataset_id, disabled=command.disable)
    return Decision([ev.Event(time_ms=now_ms, compression_decided=decided)], command.disable)


def _get_or_create_job(state: State, command: c.GetOrCreateJob, now_ms: int) -> Decision:
    if command.name and command.name in state.job_by_name:
        job = state.jobs[state.job_by_name[command.name]]
        _require_same_parameters(job, command)
        return Decision([], job.job_id)
    dataset = state.datasets.get(command.dataset_id)
    if dataset is None:
        raise NotFound(
            f"Dataset id {command.dataset_id} not found; register it with this dispatcher first"
        )
    if command.sharding not in (ev.OFF, ev.DYNAMIC) or command.num_consumers is not None:
        what = (
            f"static sharding ({_sharding(command.sharding)})"
            if command.num_consumers is None
            else "a coordinated read (num_consumers)"
        )
        raise Unimplemented(f"this version does not do {what}; use sharding OFF or DYNAMIC")
    if command.sharding == ev.DYNAMIC and (why := dataset.definition.unsplittable):
        raise Unimplemented(f"dataset {command.dataset_id} cannot be sharded dynamically: {why}")
    created = ev.JobCreated(
        job_id=state.next_id,
        name=command.name,
        dataset_id=command.dataset_id,
        sharding=ev.Sharding.Name(command.sharding),
        num_consumers=command.num_consumers,
        cross_trainer_cache=command.cross_trainer_cache,
        target_workers=command.target_workers,
    )
    event = ev.Event(time_ms=now_ms, request=_request(command), job_created=created)
    return Decision([event], created.job_id)


def _sharding(number: int) -> str:
    known = number in ev.Sharding.values()
    return ev.Sharding.Name(number) if known else f"policy {number}"


def _require_same_parameters(job: Job, command: c.GetOrCreateJob) -> None:
    """A name is the job's whole identity: whose dataset it is does not matter."""
    for what, existing, got in (
        ("processing mode", _sharding(job.sharding), _sharding(command.sharding)),
        ("number of consumers", job.num_consumers, command.num_consumers),
        (
            "cross-trainer cache",
            _enabled(job.cross_trainer_cache),
            _enabled(command.cross_trainer_cache),
        ),
        ("target workers", _targets(job.target_workers), _targets(command.target_workers)),
    ):
        if existing != got:
            raise InvalidArgument(
                f"Tried to create job with name {job.name}, but found an existing job with "
                f"different parameters: Existing {what}: <{existing}>; got <{got}>"
            )


def _enabled(flag: bool) -> str:
    return "enabled" if flag else "disabled"


def _targets(number: int) -> str:
    return {1: "AUTO", 2: "ANY", 3: "LOCAL"}.get(number, str(number))


# -- iterations and consumers ----------------------------------------------------------------


def _join_iteration(state: State, command: c.JoinIteration, now_ms: int) -> Decision:
    job = state.jobs.get(command.job_id)
    if job is None:
        raise NotFound(
            f"Job id {command.job_id} not found: it was collected, or this dispatcher lost its "
            "state; read the dataset again"
        )
    if command.repetition < 0:
        raise InvalidArgument(f"repetition {command.repetition} is negative; the first one is 0")
    ids = _Ids(state)
    events = []
    iteration = state.iterations.get(job.iterations.get(command.repetition, -1))
    if iteration is None:
        iteration_id = ids.new()
        created = ev.IterationCreated(
            iteration_id=iteration_id, job_id=job.job_id, repetition=command.repetition
        )
        events.append(ev.Event(time_ms=now_ms, iteration_created=created))
        without = set(state.workers)
    else:
        iteration_id = iteration.iteration_id
        without = state.workers.keys() - {state.tasks[t].worker_id for t in iteration.tasks}
    if iteration is None or not iteration.finished:
        events += [
            _task_created(ids.new(), iteration_id, worker_id, now_ms)
            for worker_id in state.workers
            if worker_id in without
        ]
    joined = ev.ConsumerJoined(consumer_id=ids.new(), iteration_id=iteration_id)
    events.append(ev.Event(time_ms=now_ms, request=_request(command), consumer_joined=joined))
    return Decision(events, joined)


def _leave_iteration(state: State, command: c.LeaveIteration, now_ms: int) -> Decision:
    if command.consumer_id not in state.consumers:
        return Decision([], None)
    left = ev.ConsumerLeft(consumer_id=command.consumer_id, reason=command.reason)
    events = [ev.Event(time_ms=now_ms, consumer_left=left)]
    iteration = state.iterations[state.consumers[command.consumer_id].iteration_id]
    if len(iteration.consumers) == 1 and not state.jobs[iteration.job_id].name:
        events += _collected(state, iteration, now_ms)  # nobody can find it again
    return Decision(events, None)


def _collect_iteration(state: State, command: c.CollectIteration, now_ms: int) -> Decision:
    iteration = _iteration(state, command.iteration_id)
    if iteration.consumers:
        raise FailedPrecondition(
            f"iteration {iteration.iteration_id} has {len(iteration.consumers)} consumers; "
            "only an iteration that nobody reads is collected"
        )
    if iteration.providers:
        return Decision(_paused(state, iteration, now_ms), None)
    return Decision(_collected(state, iteration, now_ms), None)


def _collected(state: State, iteration: Iteration, now_ms: int) -> list[ev.Event]:
    collected = ev.IterationCollected(iteration_id=iteration.iteration_id)
    return [
        *_lost_leases(state, iteration.tasks, now_ms),
        ev.Event(time_ms=now_ms, iteration_collected=collected),
    ]


def _paused(state: State, iteration: Iteration, now_ms: int) -> list[ev.Event]:
    if not iteration.tasks:
        return []
    paused = ev.IterationPaused(iteration_id=iteration.iteration_id)
    return [
        *_lost_leases(state, iteration.tasks, now_ms),
        ev.Event(time_ms=now_ms, iteration_paused=paused),
    ]


def _iteration(state: State, iteration_id: int) -> Iteration:
    iteration = state.iterations.get(iteration_id)
    if iteration is None:
        raise NotFound(
            f"Iteration id {iteration_id} not found: it was collected, or this dispatcher lost its "
            "state; read the dataset again"
        )
    return iteration


def _finished(iteration: Iteration, now_ms: int) -> ev.Event:
    finished = ev.IterationFinished(iteration_id=iteration.iteration_id)
    return ev.Event(time_ms=now_ms, iteration_finished=finished)


# -- workers and tasks -----------------------------------------------------------------------


def _register_worker(state: State, command: c.RegisterWorker, now_ms: int) -> Decision:
    if not command.address:
        raise InvalidArgument("a worker without an address; give it one that clients can reach")
    if command.uid in state.departed:  # a heartbeat that was overtaken by the goodbye
        raise FailedPrecondition(
            f"the worker process {command.uid} at {command.address} has said goodbye; start "
            "another one"
        )
    events: list[ev.Event] = []
    ids = _Ids(state)
    known = state.workers.get(state.worker_at.get(command.address, 0))
    if known is not None:
        if known.uid == command.uid:
            return Decision([], known.worker_id)
        if known.replaced_uid == command.uid:
            raise FailedPrecondition(
                f"another worker process has taken the address {command.address}: give each "
                "worker a host, port and address of its own"
            )
        reason = "another process took its address"
        events += _worker_lost(state, known, reason, ids, now_ms)
    finished = {event.iteration_finished.iteration_id for event in events}
    registered = ev.WorkerRegistered(
        worker_id=ids.new(),
        address=command.address,
        uid=command.uid,
        tags=command.tags,
        transfer_servers=command.transfer_servers,
        stock=command.stock,
        replaced_uid=known.uid if known is not None else 0,
    )
    events.append(ev.Event(time_ms=now_ms, worker_registered=registered))
    lost = [x.task for x in state.lost_tasks.values() if x.uid == command.uid]
    for iteration in state.iterations.values():
        if iteration.finished or iteration.iteration_id in finished:
            continue
        number, worker_id = iteration.iteration_id, registered.worker_id
        mine = [task for task in lost if task.iteration_id == number]
        for task in mine:  # which the process still has
            created = _task_created(task.task_id, number, worker_id, now_ms)
            created.task_created.sweeps = task.sweeps
            events.append(created)
        if not mine and iteration.consumers:  # or when somebody joins
            events.append(_task_created(ids.new(), number, worker_id, now_ms))
    return Decision(events, registered.worker_id)


def _lose_worker(state: State, command: c.LoseWorker, now_ms: int) -> Decision:
    worker = state.workers.get(command.worker_id)
    if worker is None:
        return Decision([], None)
    ids = _Ids(state)
    events = _worker_lost(state, worker, command.reason, ids, now_ms, left=command.left)
    return Decision(events, None)


def _worker_lost(
    state: State, worker: Worker, reason: str, ids: _Ids, now_ms: int, left: bool = False
) -> list[ev.Event]:
    events = list(_lost_leases(state, sorted(worker.tasks), now_ms))
    lost = ev.WorkerLost(worker_id=worker.worker_id, reason=reason, left=left)
    events.append(ev.Event(time_ms=now_ms, worker_lost=lost))
    others = [w for w in state.workers if w != worker.worker_id]
    for task_id in sorted(worker.tasks):
        iteration = state.iterations[state.tasks[task_id].iteration_id]
        seen_the_end = iteration.completed_tasks > 0
        events += _after_task(iteration, seen_the_end, others, ids, now_ms)
    return events


def _complete_task(state: State, command: c.CompleteTask, now_ms: int) -> Decision:
    task = _task(state, command.task_id)
    if task is None or task.completed:
        return Decision([], None)
    events = [_lease_completed(lease_id, now_ms) for lease_id in task.leases]
    completed = ev.TaskCompleted(task_id=task.task_id)
    events.append(ev.Event(time_ms=now_ms, task_completed=completed))
    iteration = state.iterations[task.iteration_id]
    workers = None if task.sweeps else list(state.workers)  # it swept what it could
    events += _after_task(iteration, True, workers, _Ids(state), now_ms)
    return Decision(events, None)


def _after_task(
    iteration: Iteration, seen_the_end: bool, workers: list[int] | None, ids: _Ids, now_ms: int
) -> list[ev.Event]:
    """What follows when one of an iteration's running tasks completes or is lost.

    The iteration ends with its last task, unless splits were handed back that nobody is left
    to ask for: then one of `workers` gets another task, once (None: that was it), or, if there
    are none, the next worker. Somebody must have seen the end of the data, too: an iteration
    whose workers are all lost waits for the next worker.
    """
    if iteration.finished or iteration.running_tasks > 1:
        return []
    if workers is not None and any(p.returned or p.left_over for p in iteration.providers):
        if not workers:
            return []
        sweeper = _task_created(ids.new(), iteration.iteration_id, workers[0], now_ms)
        sweeper.task_created.sweeps = True
        return [sweeper]
    return [_finished(iteration, now_ms)] if seen_the_end else []


def _task(state: State, task_id: int) -> Task | None:
    """Raises Unavailable for one that runs, if its worker was given up and may come back."""
    lost = state.lost_tasks.get(task_id)
    if lost is not None and lost.task.completed:
        return lost.task
    if lost is not None:
        raise Unavailable(
            f"the worker of task {task_id} was given up after too long a silence; it goes on "
            "once the worker has registered again"
        )
    return state.tasks.get(task_id)


def _task_created(task_id: int, iteration_id: int, worker_id: int, now_ms: int) -> ev.Event:
    created = ev.TaskCreated(task_id=task_id, iteration_id=iteration_id, worker_id=worker_id)
    return ev.Event(time_ms=now_ms, task_created=created)


# -- splits ----------------------------------------------------------------------------------


def _get_split(state: State, command: c.GetSplit, now_ms: int) -> Decision:
    iteration = _iteration(state, command.iteration_id)
    provider = _provider(state, iteration, command.provider)
    _require_one_way(state, iteration, command.provider, singly=True)
    waiting = _waiting(provider, provider.size, command.repetition)
    return _lease(state, waiting, 1, iteration, command, None, [], now_ms)


def _lease_splits(state: State, command: c.LeaseSplits, now_ms: int) -> Decision:
    task = _task(state, command.task_id)
    if task is None or task.completed:
        raise NotFound(f"Task {command.task_id} not found: it has ended, or its worker was lost")
    iteration = state.iterations[task.iteration_id]
    events = [
        _lease_completed(lease_id, now_ms)
        for lease_id in dict.fromkeys(command.completed)
        if lease_id in task.leases
    ]
    freed = 0
    for lease_id, count in dict(command.returned).items():
        if lease_id in task.leases and lease_id not in command.completed:
            lease = state.leases[lease_id]
            if not 0 < count <= lease.count:
                raise InvalidArgument(
                    f"lease {lease_id} holds {lease.count} splits; {count} cannot be returned"
                )
            freed += count
            returned = ev.LeaseReturned(lease_id=lease_id, count=count)
            events.append(ev.Event(time_ms=now_ms, lease_returned=returned))
    if command.want <= 0:
        return Decision(events, None)
    if freed:
        raise InvalidArgument("a request that returns splits cannot want others; want 0")
    provider = _provider(state, iteration, command.provider)
    if provider.leased_with is not None:
        raise InvalidArgument(
            f"split provider {command.provider} is zipped with {provider.leased_with}, and leased "
            "with it: ask for that one's splits"
        )
    size = provider.size_together
    waiting = _waiting(provider, size, command.repetition, command.or_later)
    _require_one_way(state, iteration, command.provider, singly=False)
    share = -(-waiting.total // (2 * max(1, iteration.running_tasks)))
    want = min(command.want, share)
    return _lease(state, waiting, want, iteration, command, task, events, now_ms)


class _Waiting(NamedTuple):
    """The splits that a request can have next: a range, and how many there are in all."""

    repetition: int
    first: int
    stop: int
    total: int
    starts: bool = False  # the repetition is a new one


def _waiting(provider: Provider, size: int, repetition: int, or_later: bool = False) -> _Waiting:
    """What a request for that repetition of `size` splits can have.

    Splits of earlier repetitions that were handed back come first, whatever was asked for: who
    had them is gone, and nobody else need ask for theirs.
    """
    left_over = provider.left_over
    if not left_over and repetition > provider.repetition and provider.returned:
        left_over = {provider.repetition: provider.returned}
    if left_over:
        earliest = min(left_over)
        left = left_over[earliest]
        return _Waiting(earliest, *left[0], ranges.total(left))
    if repetition > provider.repetition and size:  # of nothing none need begin
        return _Waiting(repetition, 0, size, size, starts=True)
    if repetition < provider.repetition and not or_later:
        return _Waiting(provider.repetition, 0, 0, 0)
    total = size - provider.next + ranges.total(provider.returned)
    first, stop = provider.returned[0] if provider.returned else (provider.next, size)
    return _Waiting(provider.repetition, first, stop, total)


def _require_one_way(state: State, iteration: Iteration, number: int, *, singly: bool) -> None:
    """Zipped sources are leased together by our workers, and each on its own by TensorFlow's."""
    provider = iteration.providers[number]
    zipped = provider.shared_size is not None or provider.leased_with is not None
    if zipped and iteration.leased_singly is not None and iteration.leased_singly != singly:
        job = state.jobs[iteration.job_id]
        raise FailedPrecondition(
            f"dataset {job.dataset_id} zips several sources, and iteration "
            f"{iteration.iteration_id} reads it on Forebay's workers and on tf.data service's own: "
            "together they would pair what does not belong together. Run workers of one kind"
        )


def _lease(
    state: State,
    waiting: _Waiting,
    want: int,
    iteration: Iteration,
    command: c.GetSplit | c.LeaseSplits,
    task: Task | None,
    events: list[ev.Event],
    now_ms: int,
) -> Decision:
    """Lease up to `want` of the splits, to `task` or (GetSplit) to nobody known."""
    if waiting.starts:
        started = ev.RepetitionStarted(
            iteration_id=iteration.iteration_id,
            provider=command.provider,
            repetition=waiting.repetition,
        )
        events.append(ev.Event(time_ms=now_ms, repetition_started=started))
    count = min(want, waiting.stop - waiting.first)
    if count <= 0:
        return Decision(events, ev.SplitsLeased(repetition=waiting.repetition))
    leased = ev.SplitsLeased(
        lease_id=0 if task is None else state.next_id,
        iteration_id=iteration.iteration_id,
        task_id=0 if task is None else task.task_id,
        provider=command.provider,
        repetition=waiting.repetition,
        first=waiting.first,
        count=count,
    )
    events.append(ev.Event(time_ms=now_ms, request=_request(command), splits_leased=leased))
    return Decision(events, leased)


def _provider(state: State, iteration: Iteration, number: int) -> Provider:
    if not iteration.providers:
        raise FailedPrecondition(
            f"iteration {iteration.iteration_id} hands out no splits: its job is not sharded "
            "dynamically"
        )
    if not 0 <= number < len(iteration.providers):
        raise InvalidArgument(
            f"iteration {iteration.iteration_id} has {len(iteration.providers)} split providers; "
            f"there is no number {number}"
        )
    return iteration.providers[number]


def _lease_completed(lease_id: int, now_ms: int) -> ev.Event:
    return ev.Event(time_ms=now_ms, lease_completed=ev.LeaseCompleted(lease_id=lease_id))


def _lost_leases(state: State, task_ids: Iterable[int], now_ms: int) -> Iterator[ev.Event]:
    for task_id in task_ids:
        for lease_id in state.tasks[task_id].leases:
            yield ev.Event(time_ms=now_ms, lease_lost=ev.LeaseLost(lease_id=lease_id))


_DECIDE: dict[type[c.Command], Callable[[State, Any, int], Decision]] = {
    c.ElectLeader: _elect_leader,
    c.RegisterDataset: _register_dataset,
    c.DecideCompression: _decide_compression,
    c.GetOrCreateJob: _get_or_create_job,
    c.JoinIteration: _join_iteration,
    c.LeaveIteration: _leave_iteration,
    c.CollectIteration: _collect_iteration,
    c.RegisterWorker: _register_worker,
    c.LoseWorker: _lose_worker,
    c.CompleteTask: _complete_task,
    c.GetSplit: _get_split,
    c.LeaseSplits: _lease_splits,
}
