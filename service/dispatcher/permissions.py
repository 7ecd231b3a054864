"""Permissions: whether a caller may call a method, by the access rules.

The role depends on the method, and for the registration of a dataset on what it is. What a call is
about, datasets and jobs, must be covered by the same grant as the role.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from ..connections.access import OPERATOR, PYTHON, TRAINER, VIEWER, WORKER, AccessRules, Grant
from ..connections.admission import Admission, Identity
from ..core.state import State
from ..errors import PermissionDenied, ResourceExhausted
from ..pipelines.definitions import has_no_code
from ..proto import forebay_pb2 as pb

log = logging.getLogger(__name__)


class _Subject(NamedTuple):
    """What a call is about; None: no particular one."""

    dataset_id: str | None = None
    job_name: str | None = None


Describe = Callable[[Any, State], _Subject]


def _job(request: pb.GetOrCreateJobRequest) -> _Subject:
    return _Subject(request.dataset_id, _user_name(request.dataset_id, request.job_name))


def _user_name(dataset_id: str, job_name: str) -> str:
    return job_name.removeprefix(f"dataset_id=/{dataset_id}/")


def _joined(request: pb.JoinIterationRequest, state: State) -> _Subject:
    if request.HasField("job"):
        return _job(request.job)
    return _of_job(request.job_id, state)


def _of_job(job_id: int, state: State) -> _Subject:
    job = state.jobs.get(job_id)
    if job is None:  # the method says so
        return _Subject()
    return _Subject(job.dataset_id, _user_name(job.dataset_id, job.name))


def _of_consumer(request: Any, state: State) -> _Subject:
    consumer = state.consumers.get(request.consumer_id)
    if consumer is None:
        return _Subject()
    return _of_job(state.iterations[consumer.iteration_id].job_id, state)


def _of_dataset(request: Any, _: State) -> _Subject:
    return _Subject(request.dataset_id)


def _nothing(_: Any, __: State) -> _Subject:
    return _Subject()


def _roles_to_register(request: pb.RegisterDatasetRequest) -> set[str]:
    has_code = request.python and not has_no_code(request.python)
    return {TRAINER, PYTHON} if has_code else {TRAINER}


_TRAINER, _WORKER = ((TRAINER,), _nothing), ((WORKER,), _nothing)

METHODS: dict[str, tuple[tuple[str, ...], Describe]] = {
    "RegisterDataset": ((TRAINER,), _of_dataset),
    "GetDataset": ((TRAINER, WORKER), _of_dataset),
    "ListDatasets": ((VIEWER, OPERATOR), _nothing),
    "RemoveDataset": ((OPERATOR,), _of_dataset),
    "GetOrCreateJob": ((TRAINER,), lambda request, _: _job(request)),
    "JoinIteration": ((TRAINER,), _joined),
    "ConsumerHeartbeat": ((TRAINER,), _of_consumer),
    "ClaimBundles": ((TRAINER,), _of_consumer),
    "LeaveIteration": ((TRAINER,), _of_consumer),
    "WorkerHeartbeat": _WORKER,
    "LeaseSplits": _WORKER,
    "SkipSplit": _WORKER,
    "CompleteTask": _WORKER,
    "LeaveService": _WORKER,
    "FindGoneConsumers": _WORKER,
    "StartSave": _TRAINER,
    "CommitChunk": _WORKER,
    "EndStream": _WORKER,
    "GetStatus": ((VIEWER, OPERATOR), _nothing),
}
"""By method: the roles of which each allows it, and what a call of it is about."""


class Permissions:
    """Checks the calls of forebay.v1.Dispatcher."""

    def __init__(self, rules: AccessRules, admission: Admission) -> None:
        self._rules = rules
        self._admission = admission

    def check(self, call: Any, method: str, request: Any, state: State) -> None:
        """Check a call, given its gRPC context. Raises PermissionDenied, or ResourceExhausted if
        the caller has as much as it may."""
        caller = self._admission.of_call(call)
        roles, describe = METHODS[method]
        wanted = set(roles)
        together = method == "RegisterDataset"  # it needs all of the roles
        if together:
            wanted = _roles_to_register(request)
        elif method == "GetStatus" and request.workers_only:
            wanted |= {TRAINER, WORKER}
        subject = describe(request, state)
        grants = [*self._rules.of(caller)]
        able = [g for g in grants if (wanted <= g.roles if together else wanted & g.roles)]
        fitting = [g for g in able if g.covers(*subject)]
        if not fitting:
            needs = f"role{'s' * (len(wanted) > 1 and together)} "
            needs += (" and " if together else " or ").join(sorted(wanted))
            reason = f"{caller} may not call {method}: {_why(grants, able, needs, subject)}"
            reason += f" (--access-file {self._rules.path} of the dispatcher)"
            log.warning("refused: %s", reason)
            raise PermissionDenied(reason)
        excesses = [_excess(grant, method, request, state) for grant in fitting]
        if all(excesses):
            raise ResourceExhausted(f"{caller} may not call {method}: {excesses[0]}")

    def check_metrics(self, caller: Identity) -> None:
        """Check a scrape: metrics tell of all jobs, as the status does. Raises PermissionDenied."""
        wanted = {VIEWER, OPERATOR}
        grants = [*self._rules.of(caller)]
        if not any(wanted & grant.roles for grant in grants):
            why = _why(grants, [], f"role {' or '.join(sorted(wanted))}", _Subject())
            raise PermissionDenied(
                f"{caller} may not see metrics: {why} (--access-file {self._rules.path} of the "
                "dispatcher)"
            )


def _why(grants: list[Grant], able: list[Grant], needs: str, subject: _Subject) -> str:
    if not able:
        has = sorted({role for grant in grants for role in grant.roles})
        return f"it needs the {needs}, and has {', '.join(has) or 'none'}"
    about = []
    if subject.dataset_id is not None:
        about.append(
            f"dataset {subject.dataset_id!r}"
            if subject.dataset_id
            else "a dataset without dataset_id="
        )
    if subject.job_name is not None:
        about.append(f"job {subject.job_name!r}" if subject.job_name else "an anonymous job")
    return f"its grants do not cover {' and '.join(about)}"


def _excess(grant: Grant, method: str, request: Any, state: State) -> str:
    """Which limit of the grant a call would exceed; "" if none."""
    if method == "RegisterDataset":
        if grant.max_datasets is None or request.dataset_id in state.datasets:
            return ""
        count = sum(grant.covers(dataset_id, None) for dataset_id in state.datasets)
        return _reached("datasets", count, grant.max_datasets)
    if method not in ("GetOrCreateJob", "JoinIteration"):
        return ""
    jobs = dict(_jobs(grant, state))
    joins = method == "JoinIteration"
    job = request.job if joins else request
    is_new = job.dataset_id and (not job.job_name or job.job_name not in jobs.values())
    full = ""
    if grant.max_jobs is not None and is_new:
        full = _reached("jobs", len(jobs), grant.max_jobs)
    if grant.max_consumers is not None and joins:
        iterations, consumers = state.iterations, state.consumers.values()
        count = sum(iterations[c.iteration_id].job_id in jobs for c in consumers)
        full = full or _reached("consumers", count, grant.max_consumers)
    return full


def _jobs(grant: Grant, state: State) -> Iterator[tuple[int, str]]:
    for job_id, job in state.jobs.items():
        if grant.covers(job.dataset_id, _user_name(job.dataset_id, job.name)):
            yield job_id, job.name


def _reached(what: str, count: int, most: int) -> str:
    if count < most:
        return ""
    return f"its grant covers {count} {what} already, and allows {most} (max_{what})"
