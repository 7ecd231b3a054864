"""Permissions: whether a caller may call a method, by the access rules.

The role depends on the method, and for the registration of a dataset on what it is. What a call is
about, datasets and jobs, must be covered by the same grant as the role. quotas.py says how much a
grant allows.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from ..connections.access import (
    GRAPHS,
    OPERATOR,
    PYTHON,
    SCHEDULER,
    TRAINER,
    VIEWER,
    WORKER,
    AccessRules,
    Grant,
)
from ..connections.admission import Admission, Identity
from ..connections.grpc_server import current_caller
from ..core.base import Numbered
from ..core.schedules import named
from ..core.state import Grants, State, Worker, WorkerGrant
from ..errors import PermissionDenied, ResourceExhausted
from ..pipelines.definitions import has_no_code
from ..proto import forebay_pb2 as pb
from .quotas import excess_of_datasets, excess_of_jobs, user_name


class Subject(NamedTuple):
    """What a call is about; None: no particular dataset or job."""

    dataset_id: str | None = None
    job_name: str | None = None


EVERYTHING = Subject("", "")
"""Only patterns that match the empty name cover it, such as `*`."""

Describe = Callable[[Any, State], Subject]


def _job(request: pb.GetOrCreateJobRequest) -> Subject:
    """Raises PermissionDenied for a name that is another dataset's."""
    name, own = request.job_name, f"dataset_id=/{request.dataset_id}/"
    if name.startswith("dataset_id=/") and not name.startswith(own):
        raise PermissionDenied(
            f"no job of dataset {request.dataset_id!r} may have the name {name!r}: it is one of "
            "another dataset's jobs"
        )
    return Subject(request.dataset_id, user_name(request.dataset_id, request.job_name))


def _joined(request: pb.JoinIterationRequest, state: State) -> Subject:
    if request.HasField("job"):
        return _job(request.job)
    return _of_job(request.job_id, state)


def _of_job(job_id: int, state: State) -> Subject:
    if (job := state.jobs.get(job_id)) is None:  # the method says so
        return Subject()
    return Subject(job.dataset_id, user_name(job.dataset_id, job.name))


def _of_consumer(request: Any, state: State) -> Subject:
    if (consumer := state.consumers.get(request.consumer_id)) is None:
        return Subject()
    return _of_job(state.iterations[consumer.iteration_id].job_id, state)


def _of_task(request: Any, state: State) -> Subject:
    task = state.tasks.get(request.task_id) or state.lost_tasks.get(request.task_id)
    if task is None:
        return Subject()
    return _of_job(state.iterations[task.iteration_id].job_id, state)


def _of_dataset(request: Any, _: State) -> Subject:
    return Subject(request.dataset_id)


def _of_read(request: pb.GetDatasetRequest, _: State) -> Subject:
    """The answer tells of the job that is named, too."""
    name = user_name(request.dataset_id, request.job_name) if request.job_name else None
    return Subject(request.dataset_id, name)


def _of_schedule(
    request: pb.ChangeScheduleRequest | pb.GetScheduleRequest, state: State
) -> Subject:
    found = named(state, request.job)  # of several, the method says so
    return _of_job(found[0].job_id, state) if len(found) == 1 else Subject()


def _everything(_: Any, __: State) -> Subject:
    return EVERYTHING


def _anything(_: Any, __: State) -> Subject:
    return Subject()


_VIEWER = ((VIEWER, OPERATOR), _everything)
_WORKER = ((WORKER,), _anything)
_OF_TASK = ((WORKER,), _of_task)
_OF_SAVE = ((WORKER,), _everything)

METHODS: dict[str, tuple[tuple[str, ...], Describe]] = {
    "RegisterDataset": ((TRAINER,), _of_dataset),
    "GetDataset": ((TRAINER, WORKER), _of_read),
    "ListDatasets": _VIEWER,
    "RemoveDataset": ((OPERATOR,), _of_dataset),
    "GetOrCreateJob": ((TRAINER,), lambda request, _: _job(request)),
    "JoinIteration": ((TRAINER,), _joined),
    "ConsumerHeartbeat": ((TRAINER,), _of_consumer),
    "ClaimBundles": ((TRAINER,), _of_consumer),
    "LeaveIteration": ((TRAINER,), _of_consumer),
    "WorkerHeartbeat": _WORKER,
    "LeaseSplits": _OF_TASK,
    "SkipSplit": _OF_TASK,
    "CompleteTask": _OF_TASK,
    "LeaveService": _WORKER,
    "FindGoneConsumers": _WORKER,
    "StartSave": ((TRAINER,), _everything),  # of any dataset, into any directory
    "CommitChunk": _OF_SAVE,
    "EndStream": _OF_SAVE,
    "GetStatus": _VIEWER,
    "GetSchedule": ((TRAINER, SCHEDULER), _of_schedule),
    "ChangeSchedule": ((SCHEDULER,), _of_schedule),
}
"""By method: the roles of which each allows it, and what a call of it is about."""


class Permissions:
    """Checks the calls of forebay.v1.Dispatcher."""

    def __init__(self, rules: AccessRules, admission: Admission) -> None:
        self._rules = rules
        self._admission = admission

    def caller(self) -> str:
        """Who has sent the current call, in words."""
        return str(current_caller(self._admission))

    def check_role(self, method: str) -> None:
        """Check the current call before its request is received, and its grants where these do not
        depend on the request. Raises PermissionDenied."""
        roles, describe = METHODS[method]
        subject = EVERYTHING if describe is _everything else Subject()
        if method == "GetStatus":  # of workers only
            roles, subject = (*roles, TRAINER, WORKER), Subject()
        with self._denials_are_counted(method):
            self._require(current_caller(self._admission), f"call {method}", roles, subject)

    def check(self, method: str, request: Any, state: State) -> None:
        """Check the current call. Raises PermissionDenied."""
        with self._denials_are_counted(method):
            caller = current_caller(self._admission)
            (roles, describe), together = METHODS[method], False
            subject = describe(request, state)
            if method == "GetStatus" and request.workers_only:
                roles, subject = (*roles, TRAINER, WORKER), Subject()
            if method == "RegisterDataset" and request.python and not has_no_code(request.python):
                roles, together = (TRAINER, PYTHON), True
            self._require(caller, f"call {method}", roles, subject, together=together)
            worker = _worker_of(request, state)
            if worker is not None and not worker.is_of(*self.of_worker()):
                raise PermissionDenied(
                    f"{caller} may not call {method}: it is about the worker at {worker.address}, "
                    "which has other grants"
                )

    @contextlib.contextmanager
    def _denials_are_counted(self, method: str) -> Iterator[None]:
        try:
            yield
        except PermissionDenied as error:
            self._admission.denials.add(method, "forbidden")
            caller = current_caller(self._admission)
            self._admission.rate_limited_log.warn("refused: %s", error, kind=f"{method} {caller}")
            raise

    def of_worker(self, address: str = "") -> tuple[Grants, bytes]:
        """What the calling worker may run, and a digest of who it is. Raises PermissionDenied if it
        may not run everything, and its certificate does not name the host of its `address`."""
        caller = current_caller(self._admission)
        found = [grant for grant in self._rules.of(caller) if WORKER in grant.roles]
        if not found:  # the file has changed since the call was let in
            raise PermissionDenied(f"{caller} has the role {WORKER} no longer")
        grants: Grants = tuple(WorkerGrant(grant.datasets, grant.jobs) for grant in found)
        if any(grant.covers(*EVERYTHING) for grant in found):
            grants = ()
        host = address.rpartition(":")[0].strip("[]").lower()
        if grants and host and caller.kind == "certificate" and not _names(caller, host):
            raise PermissionDenied(
                f"{caller} may not register a worker at {address}: its certificate does not name "
                "that host"
            )
        return grants, caller.fingerprint

    def check_jobs(self, numbered: Numbered, request: Any, state: State) -> None:
        """Check whether the caller may have what GetOrCreateJob or JoinIteration adds. Raises
        ResourceExhausted."""
        caller = current_caller(self._admission)
        joins = isinstance(request, pb.JoinIterationRequest)
        subject = _joined(request, state) if joins else _job(request)
        grants = self._require(caller, "join it", (TRAINER,), subject)
        self._require_room(f"{caller} may not join it", grants, numbered, request, state)

    def check_fork(
        self, numbered: Numbered, request: pb.ChangeScheduleRequest, state: State
    ) -> None:
        """Check whether the caller may have the job that it forks. Raises PermissionDenied, and
        ResourceExhausted."""
        origin = _of_schedule(request, state)
        created = pb.GetOrCreateJobRequest(dataset_id=origin.dataset_id, job_name=request.fork)
        caller, roles = current_caller(self._admission), (SCHEDULER,)
        grants = self._require(caller, "fork it", roles, Subject(origin.dataset_id, request.fork))
        self._require_room(f"{caller} may not fork it", grants, numbered, created, state)

    def _require_room(
        self, refusal: str, grants: list[Grant], numbered: Numbered, request: Any, state: State
    ) -> None:
        excesses = [excess_of_jobs(grant, numbered, request, state) for grant in grants]
        if all(excesses):
            raise ResourceExhausted(f"{refusal}: {excesses[0]}")

    def check_replay(self, request: pb.GetScheduleRequest, state: State) -> None:
        """Check whether the caller may read what the job reads. Raises PermissionDenied."""
        caller = current_caller(self._admission)
        self._require(caller, "replay it", (TRAINER,), _of_schedule(request, state))

    def check_datasets(self, dataset_id: str, state: State) -> None:
        """Check whether the caller may have one dataset more. Raises ResourceExhausted."""
        caller = current_caller(self._admission)
        grants = self._require(caller, "register it", (TRAINER,), Subject(dataset_id))
        excesses = [excess_of_datasets(grant, state) for grant in grants]
        if all(excesses):
            raise ResourceExhausted(f"{caller} may not register a dataset: {excesses[0]}")

    def check_graph(self, method: str, request: Any, state: State, found: str) -> None:
        """Check whether the caller may register a graph in which this was `found`, as forbidden to
        most. Raises PermissionDenied."""
        caller = current_caller(self._admission)
        with self._denials_are_counted(method):
            subject = METHODS[method][1](request, state)
            grants = self._require(caller, f"call {method}", (TRAINER,), subject)
            if found and not any(grant.roles & {GRAPHS, PYTHON} for grant in grants):
                raise PermissionDenied(
                    f"{caller} may not register this graph: {found}. Read files by datasets of "
                    "records (TFRecordDataset, TextLineDataset, FixedLengthRecordDataset), or have "
                    f"the role {GRAPHS} granted (--access-file {self._rules.path} of the "
                    "dispatcher)"
                )

    def check_metrics(self, caller: Identity) -> None:
        """Check a scrape: metrics tell of all jobs, as the status does. Raises PermissionDenied."""
        self._require(caller, "see metrics", (VIEWER, OPERATOR), EVERYTHING)

    def _require(
        self,
        caller: Identity,
        what: str,
        roles: tuple[str, ...],
        subject: Subject,
        *,
        together: bool = False,
    ) -> list[Grant]:
        """The caller's grants that have one of the roles, or `together` all of them, and cover the
        subject. Raises PermissionDenied without any."""
        grants, wanted = [*self._rules.of(caller)], set(roles)
        able = [g for g in grants if (wanted <= g.roles if together else wanted & g.roles)]
        fitting = [g for g in able if g.covers(*subject)]
        if not fitting:
            needs = f"role{'s' * together} " + (" and " if together else " or ").join(sorted(roles))
            has = ", ".join(sorted({role for grant in grants for role in grant.roles}))
            why = f"it needs the {needs}, and has {has or 'none'}"
            if able:
                why = f"its grants do not cover {_named(subject)}"
            rules = f"--access-file {self._rules.path} of the dispatcher"
            raise PermissionDenied(f"{caller} may not {what}: {why} ({rules})")
        return fitting


def _worker_of(request: Any, state: State) -> Worker | None:
    """Whose call it is; None: of no worker, or of none that is registered."""
    task = state.tasks.get(getattr(request, "task_id", 0))
    return state.workers.get(getattr(request, "worker_id", task.worker_id if task else 0))


def _names(caller: Identity, host: str) -> bool:
    others = (host, f"*.{host.partition('.')[2]}")
    return any(name.lower() in others for name in caller.names)


def _named(subject: Subject) -> str:
    if subject == EVERYTHING:
        return "everything, as this call needs"
    about = []
    if subject.dataset_id is not None:
        unnamed = "a dataset without dataset_id="
        about.append(f"dataset {subject.dataset_id!r}" if subject.dataset_id else unnamed)
    if subject.job_name is not None:
        about.append(f"job {subject.job_name!r}" if subject.job_name else "an anonymous job")
    return " and ".join(about)
