"""Quotas: how many datasets, jobs and consumers a grant of the access rules allows.

What is counted is what the grant's patterns cover, whoever made it.
"""

from __future__ import annotations

from typing import Any

from ..connections.access import Grant
from ..core.base import Numbered
from ..core.state import Consumer, State
from ..proto import forebay_pb2 as pb


def user_name(dataset_id: str, job_name: str) -> str:
    """A job's name as its user gave it; "" for an anonymous one."""
    return job_name.removeprefix(f"dataset_id=/{dataset_id}/")


def excess_of_datasets(grant: Grant, state: State) -> str:
    """Why the grant does not allow one dataset more; "" if it does."""
    if grant.max_datasets is None:
        return ""
    count = sum(grant.covers(dataset_id, None) for dataset_id in state.datasets)
    return _reached("datasets", count, grant.max_datasets)


def excess_of_jobs(grant: Grant, numbered: Numbered, request: Any, state: State) -> str:
    """Why the grant does not allow the job or the consumer that GetOrCreateJob or JoinIteration
    would add; "" if it does, or nothing is added."""
    if grant.max_jobs is None and grant.max_consumers is None:
        return ""
    caller, number = numbered or ("", 0)
    answer = state.answers.get(caller)
    if answer is not None and number == answer.number:
        return ""  # a retry
    covered = {
        job_id: job
        for job_id, job in state.jobs.items()
        if grant.covers(job.dataset_id, user_name(job.dataset_id, job.name))
    }
    joins = isinstance(request, pb.JoinIterationRequest)
    job = request.job if joins else request
    named = job.job_name
    joined = [job_id for job_id, other in covered.items() if named and other.name == named]
    if joins and not request.HasField("job"):
        joined = [request.job_id]
    full = ""
    if grant.max_jobs is not None and not joined:
        full = _reached("jobs", len(covered), grant.max_jobs)
    if grant.max_consumers is not None and joins:
        count = 0
        for consumer in state.consumers.values():
            job_id = state.iterations[consumer.iteration_id].job_id
            replaced = job_id in joined and _takes_the_place_of(request, consumer)
            count += job_id in covered and not replaced
        full = full or _reached("consumers", count, grant.max_consumers)
    return full


def _takes_the_place_of(request: pb.JoinIterationRequest, consumer: Consumer) -> bool:
    """Whether the consumer's index in its group is the one that joins."""
    if request.HasField("member"):
        return consumer.member is not None and consumer.member.index == request.member.index
    return request.HasField("consumer_index") and consumer.index == request.consumer_index


def _reached(what: str, count: int, most: int) -> str:
    if count < most:
        return ""
    return f"its grant covers {count} {what} already, and allows {most} (max_{what})"
