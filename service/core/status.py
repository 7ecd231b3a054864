"""The status: a summary of the state that `forebay status` and `journal show --at` print.

A status is of one position in the journal. Encoding thousands of jobs at once would block the event
loop, so `encoded_status` copies what it needs and yields the JSON piece by piece. Copies and pieces
are bytes: thousands of dictionaries would make the garbage collector scan the whole state.
"""

from __future__ import annotations

import copy
import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import msgspec
from msgspec.structs import asdict, replace

from ...journal.proto import events_pb2 as ev
from ...journal.splits import ENDLESS
from .. import ranges
from ..errors import cut_error
from . import saves
from .bundles import parts_of
from .checksums import describe_mismatches
from .iterations import first_epoch
from .job_states import NOTHING, JobObservations, job_state
from .jobs import readers_of
from .ledger import Ledger
from .lengths import count_known
from .read_kinds import why_no_task
from .state import BundleSpec, Claims, Dataset, EndedSave, Iteration, Job, Save, State, fields_of

Counted = Callable[[int], dict[str, Any] | None]
"""Returns an iteration's user metrics, by its id."""

JobObservationsOf = Callable[[int], JobObservations]
"""Returns what is told of a job, by its id."""

Known = dict[str, dict[int, int]]
"""How many lengths are known, by dataset and by the size of bundles."""

_encode = msgspec.json.encode
_copy = msgspec.msgpack.Encoder().encode
_parts_of = msgspec.msgpack.Decoder(list[msgspec.Raw]).decode
_job_of = msgspec.msgpack.Decoder(Job).decode
_iteration_of = msgspec.msgpack.Decoder(Iteration).decode


def status(state: State) -> dict[str, Any]:
    """A JSON-ready summary. Its size follows workers, jobs and iterations, not splits."""
    found: dict[str, Any] = msgspec.json.decode(b"".join(encoded_status(state)))
    return found


def encoded_status(
    state: State,
    counted: Counted = lambda _: None,
    measured: Mapping[str, Any] | None = None,
    observations: JobObservationsOf = lambda _: NOTHING,
) -> Iterator[bytes]:
    """The status as JSON, in pieces, with data from outside the state: the other arguments.

    The pieces stay the same when the state changes after the return.
    """
    pieces = [_encode({**_numbers(state), **(measured or {})})[:-1]]
    for name, parts in _lists(state).items():
        pieces += (b',"%b":' % name.encode(), _list(parts))
    jobs = _copy([*state.jobs.values()])
    iterations = _copy([*map(_nameless, state.iterations.values())])
    workers = {number: copy.copy(worker) for number, worker in state.workers.items()}
    members = {
        number: replace(c, claims={**c.claims})
        for number, c in state.consumers.items()
        if c.member is not None or state.iterations[c.iteration_id].claims is not None
    }
    copied = State(datasets={**state.datasets}, workers=workers, consumers=members)
    known, numbers = _known(state), [*state.iterations]

    def with_jobs() -> Iterator[bytes]:
        """The copied state has one job at a time."""
        yield from pieces
        copies = dict(zip(numbers, _parts_of(iterations), strict=True))
        separator = b',"jobs":['
        for job in map(_job_of, _parts_of(jobs)):
            copied.jobs = {job.job_id: job}
            its = [_iteration_of(copies[number]) for number in sorted(job.iterations.values())]
            found = _job(copied, job, its, counted, known, observations(job.job_id))
            yield separator + _encode(found)
            separator = b","
        yield b"]}" if copied.jobs else b',"jobs":[]}'

    return with_jobs()


def _list(parts: Iterable[dict[str, Any]]) -> bytes:
    return b"[%b]" % b",".join([_encode(part) for part in parts])


def _known(state: State) -> Known:
    return {d.dataset_id: count_known(d) for d in state.datasets.values() if d.lengths}


def _nameless(iteration: Iteration) -> Iteration:
    """The iteration without the names of found splits: there may be a million."""
    if not any(ledger.names for ledger in iteration.ledgers):
        return iteration
    ledgers = [replace(ledger, names=[]) for ledger in iteration.ledgers]
    return replace(iteration, ledgers=ledgers)


def _numbers(state: State) -> dict[str, Any]:
    return {
        **fields_of(state, "journal_id", "born_ms", "sequence", "time_ms", "leader", "term"),
        "worker_addresses": [place.configured for place in state.places],
        "leases": len(state.leases),
    }


def _lists(state: State) -> dict[str, Iterator[dict[str, Any]]]:
    """The lists' parts, computed lazily."""
    places = {place.address: number for number, place in reversed([*enumerate(state.places)])}
    return {
        "datasets": (
            {"dataset_id": d.dataset_id, "unsplittable": cut_error(d.outline.unsplittable) or None}
            for d in state.datasets.values()
        ),
        "workers": (
            {
                **fields_of(w, "worker_id", "address", "stock", "draining", "tags"),
                "data_addresses": [
                    f"{server.protocol} {server.address}"
                    for server in map(ev.TransferServer.FromString, w.transfer_servers)
                ],
                "running_tasks": len(w.tasks),
                "place": places.get(w.address),
            }
            for w in state.workers.values()
        ),
        "saves": itertools.chain(
            (_save(state, save) for save in state.saves.values()),
            map(_ended_save, state.ended_saves.values()),
        ),
    }


def _job(
    state: State,
    job: Job,
    its: list[Iteration],
    counted: Counted,
    known: Known,
    observations: JobObservations,
) -> dict[str, Any]:
    return {
        **fields_of(job, "job_id", "used_ms", "dataset_id", "lost_splits", "skipped_splits"),
        **fields_of(job, "cross_trainer_cache", "num_consumers"),
        "state": job_state(job, its, observations),
        "errors": observations.errors,
        "gone": observations.gone,
        "left": observations.left,
        "losses": observations.losses,
        "name": job.name or None,
        "sharding": ev.Sharding.Name(job.sharding),
        "summarized": [
            [first - first_epoch(job), stop - 1 - first_epoch(job)]
            for first, stop in job.summarized
        ],  # epochs count from 0 here
        "order": None
        if job.order is None
        else _order(state.datasets[job.dataset_id], job.order, known),
        "checked_bundles": len(job.checksums),
        "checksum_mismatches": [
            divmod(bundle - first_epoch(job) * job.order.bundles, job.order.bundles)
            for bundle in job.differing
            if job.order is not None
        ],  # epoch, bundle
        "warning": describe_mismatches(job) or None,
        "iterations": [
            _iteration(state, job, each) | {"metrics": counted(each.iteration_id)} for each in its
        ],
    }


def _order(dataset: Dataset, order: BundleSpec, known: Known) -> dict[str, Any]:
    parts = parts_of(dataset, order)
    lengths = sum(known.get(part.dataset_id, {}).get(part.bundle_splits, 0) for part in parts)
    return {**asdict(order), "known_lengths": lengths}


def _group(state: State, iteration: Iteration) -> list[dict[str, Any]]:
    """The consumers of an ordered read, with the places that they said that they have."""
    there = [state.consumers[number] for number in iteration.consumers]
    group = [(c.member, c.consumer_id, c.position) for c in there if c.member is not None]
    return [
        {"consumer_id": consumer_id, **asdict(member), "position": position}
        for member, consumer_id, position in sorted(group, key=lambda each: each[0].index)
    ]


def _claims(state: State, claims: Claims, iteration: Iteration) -> dict[str, Any]:
    """The bundles, and how many of them each consumer has claimed."""
    return {
        "bundles": claims.bundles,
        "done": ranges.total(claims.done),
        "unclaimed": claims.unclaimed,
        "consumers": {
            number: len(state.consumers[number].claims) for number in sorted(iteration.consumers)
        },
    }


def _save(state: State, save: Save) -> dict[str, Any]:
    sizes = [source.size for source in save.sources]
    return {
        "path": save.path,
        "state": "being written",
        "waits_for": saves.waits_for(state, save) or None,
        "streams": len(save.streams),
        "completed_streams": ranges.total(saves.completed_streams(save)),
        "splits": [None if size == ENDLESS else size for size in sizes],
        "assigned": saves.given_out(save),
        "written": saves.written_splits(save),
        "expected_elements": saves.expected_elements(save),
        "elements": saves.elements_of(save),
    }


def _ended_save(save: EndedSave) -> dict[str, Any]:
    if save.failed:
        error = f"{save.failed}: {save.message}"
        return {"path": save.path, "state": "failed", "error": error}
    return {
        **fields_of(save, "path", "streams", "assigned", "elements"),
        "state": "finished",
        "completed_streams": ranges.total(save.completed),
    }


def encoded_datasets(state: State) -> str:
    """The registered datasets, with their jobs and consumers, as JSON."""
    jobs: dict[str, list[Job]] = {}
    for job in state.jobs.values():
        jobs.setdefault(job.dataset_id, []).append(job)
    made = (_dataset(state, d, jobs.get(d.dataset_id, [])) for d in state.datasets.values())
    return _list(made).decode()


MOST_LISTED = 8_192
"""Characters of a structure in a list of datasets."""


def _listed(structure: str) -> str:
    """Its begin, if it is long, as a node of which people see the text (service/structure.py)."""
    if len(structure) <= MOST_LISTED:
        return structure
    begin = f"{structure[:1_000]} … ({len(structure)} characters)"
    return json.dumps({"opaque": begin, "shape": None})


def _dataset(state: State, dataset: Dataset, jobs: list[Job]) -> dict[str, Any]:
    return {
        "dataset_id": dataset.dataset_id,
        "structure": _listed(dataset.outline.structure) or None,
        "graph_bytes": dataset.graph_bytes or None,
        "registered_ms": dataset.registered_ms or None,
        "used_ms": dataset.used_ms or None,
        "jobs": [job.name for job in jobs if job.name],
        "consumers": sum(len(readers_of(state, job)) for job in jobs),
    }


def _iteration(state: State, job: Job, iteration: Iteration) -> dict[str, Any]:
    sources = state.datasets[job.dataset_id].outline.sources if iteration.ledgers else ()
    return {
        **fields_of(iteration, "iteration_id", "finished", "running_tasks", "completed_tasks"),
        "epoch": iteration.epoch - first_epoch(job),
        "consumers": len(iteration.consumers),
        "group": _group(state, iteration) if job.is_ordered else [],
        "claims": None if iteration.claims is None else _claims(state, iteration.claims, iteration),
        "skipped": iteration.skipped,
        "skips": [asdict(skip) for skip in iteration.skips],
        "no_task": (not iteration.finished and why_no_task(state, iteration)) or None,
        "sources": [
            {**_ledger(x, iteration.size_of(x)), "waits_for": _waits_for(iteration, x, source)}
            for x, source in zip(iteration.ledgers, sources, strict=False)  # or none
            if iteration.counts(x)
        ],
    }


def _waits_for(iteration: Iteration, ledger: Ledger, source: ev.SplitSource) -> str | None:
    """The path of an incomplete save whose chunks so far are all leased, and that has readers."""
    all_given_out = ledger.next >= ledger.size and not ledger.owes
    waits = ledger.grows and all_given_out and bool(iteration.consumers)
    return source.saved_chunks.path if waits else None


def _ledger(ledger: Ledger, size: int) -> dict[str, Any]:
    return {
        "pass": ledger.pass_number,
        "splits": None if size == ENDLESS else size,
        "leased": ledger.leased,
        "begun": ranges.total(ledger.begun),
        "lost": ranges.total(ledger.lost),
        "returned": ranges.total(ledger.returned),
    }
