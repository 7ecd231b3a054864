"""`forebay audit`: what a job read, from its journal and arithmetic alone."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import typer

from ..errors import InvalidArgument, NotFound
from .journal import STORAGE, opened, time_text
from .options import JSON

JOB = typer.Argument(
    ..., help="The job's name, or its id.", envvar="FOREBAY_JOB", show_default=False
)
STEP = typer.Option(
    None, min=0, help="What each consumer gets in this step, counted over all epochs.",
)  # fmt: skip
ELEMENT = typer.Option(
    None, help="BUNDLE:INDEX: the step and the consumer that get this element.",
)  # fmt: skip
EPOCH = typer.Option(None, min=0, help="With --element: in this epoch; the first is 0.")
BATCH_SIZE = typer.Option(
    None, min=1, help="The batch size of another group than the one that read; needs --consumers.",
)  # fmt: skip
CONSUMERS = typer.Option(None, min=1, help="The number of that other group's consumers.")
DROP_REMAINDER = typer.Option(
    False, help="Whether that other group drops each epoch's last, incomplete step.",
)  # fmt: skip

PARTS = {"readers", "bundles"}
"""The lists within parts of an answer that are shown in words, too."""


def audit(
    storage: str = STORAGE,
    job: str = JOB,
    step: int | None = STEP,
    element: str | None = ELEMENT,
    epoch: int | None = EPOCH,
    batch_size: int | None = BATCH_SIZE,
    consumers: int | None = CONSUMERS,
    drop_remainder: bool = DROP_REMAINDER,
    as_json: bool = JSON,
) -> None:
    """Show who read a job, from where and in which order, and which elements were lost and why.

    With --step or --element: which consumer of an ordered read gets which elements.
    """
    if step is not None and element is not None:
        raise InvalidArgument(f"--step {step} and --element {element}: ask for one of them")
    if epoch is not None and element is None:
        raise InvalidArgument(f"--epoch {epoch} is for --element; leave it out")
    if (batch_size is None) != (consumers is None) or (drop_remainder and not consumers):
        raise InvalidArgument("give both --batch-size and --consumers, or neither")
    with opened(storage) as found:
        state, histories, begins = _replayed(found)
    history = _find(histories, job)
    if not history.job.is_ordered:
        if step is not None or element is not None:
            raise InvalidArgument(
                f"job {history.job.user_name} is not read in order, so the journal does not tell "
                "of its elements: leave out --step and --element"
            )
        answer = _claimed(history) if history.job.is_claimed else _unordered(state, history)
    else:
        from ...journal.proto import events_pb2 as ev

        asked = None if consumers is None else ev.GroupMember(
            consumers=consumers, batch_size=batch_size, drop_remainder=drop_remainder
        )  # fmt: skip
        ordered = _Ordered(histories, history, asked)
        if step is not None:
            answer = ordered.step(step)
        elif element is not None:
            answer = ordered.element(element, epoch)
        else:
            answer = ordered.overview()
    answer = {"job": history.job.user_name, "job_id": history.job.job_id, **answer}
    if begins:
        answer["note"] = f"what came before event {begins + 1} is no longer in the journal"
    print(json.dumps(answer, indent=2) if as_json else "\n".join(_lines(answer)))


def _replayed(storage: Any) -> tuple[Any, Any, int]:
    """The last state, the jobs' histories, and the event behind which those begin."""
    from ...journal.codec import decode
    from ..core.job_history import JobHistories
    from ..core.state import State
    from ..dispatcher.recovery import apply_journaled, recover

    first = storage.extent().first
    begins = min((at for at in storage.snapshots() if at >= first - 1), default=0)
    begins = begins if first > 1 else 0
    state = recover(storage, begins)[0] if begins else State()
    histories = JobHistories(state)
    for record in storage.read(state.sequence):
        event = decode(record.sequence, record.data)
        histories.observe(state, event)
        apply_journaled(state, record.sequence, event)
    histories.follow_end(state)
    return state, histories, begins


def _find(histories: Any, name: str) -> Any:
    jobs = histories.jobs.values()
    exact = [h for h in jobs if name in (h.job.name, str(h.job.job_id))]
    found = exact or [h for h in jobs if name == h.job.user_name]
    if len(found) == 1:
        return found[0]
    known = ", ".join(f"{h.job.user_name} (id {h.job.job_id})" for h in found or jobs)
    if found:
        raise InvalidArgument(f"{len(found)} jobs are named {name}; give an id: {known}")
    raise NotFound(f"job {name!r} is not in the journal; these are: {known or 'none'}")


def _unordered(state: Any, history: Any) -> dict[str, Any]:
    from ...journal.proto import events_pb2 as ev
    from ..core.iterations import lost_splits

    job, twice = history.job, history.leased_twice
    there = (state.iterations.get(number) for number in job.iterations.values())
    lost = job.lost_splits + sum(lost_splits(each) for each in there if each is not None)
    if job.sharding != ev.DYNAMIC:
        promise = "not known: the journal tells of no elements, as no splits are leased"
    elif twice:
        promise = (
            f"broken: {len(twice)} leases are of splits that were given out before, the first one "
            f"of splits {twice[0].first} … {twice[0].first + twice[0].count - 1}"
        )
    else:
        promise = "at most once held: no split was given out twice; " + (
            f"{lost} were lost, and elements of them may have reached nobody"
            if lost
            else "none was lost"
        )
    return {
        "dataset_id": job.dataset_id,
        "sharding": ev.Sharding.Name(job.sharding),
        "readers": [_reader(stay) for stay in history.stays],
        "lost_splits": lost,
        "lost": [asdict(each) for each in history.lost],
        "skipped": [_skip(each) for each in history.skipped],
        "promise": promise,
    }


def _claimed(history: Any) -> dict[str, Any]:
    """Of a job that is read at least once: who claimed what, what returned, and what may have come
    again."""
    from ...journal.reasons import GOODBYE
    from ..core.checksums import describe_mismatches
    from ..order import permuted

    job, order, claims = history.job, history.job.order, history.claims
    bundles = [
        permuted(each.place, order.bundles, order.seed, each.epoch) if order.shuffle else each.place
        for each in claims
    ]
    claimed = defaultdict(list)  # by consumer
    done: Counter[int] = Counter()  # by epoch
    for bundle, claim in zip(bundles, claims, strict=True):
        claimed[claim.consumer_id].append(
            {
                "bundle": bundle,
                "claimed_ms": claim.claimed_ms,
                "start": claim.start or None,
                "done_ms": claim.done_ms,
            }
        )
        done[claim.epoch] += claim.done_ms is not None
    readers = []
    for stay in history.stays:
        mine = claimed[stay.consumer_id]
        readers.append({**_reader(stay), "claimed": len(mine), "bundles": mine})
    next_of: dict[tuple[int, int], int] = {}
    returned = []
    for bundle, claim in reversed([*zip(bundles, claims, strict=True)]):
        key = claim.epoch, claim.place
        if claim.returned_ms is not None:
            returned.append(
                {
                    "epoch": claim.epoch,
                    "bundle": bundle,
                    "cursor": claim.cursor,
                    "consumer_id": claim.consumer_id,
                    "returned_ms": claim.returned_ms,
                    "why": claim.why,
                    "claimed_next_by": next_of.get(key),
                    "may_have_come_twice": claim.why != GOODBYE and key in next_of,
                }
            )
        next_of[key] = claim.consumer_id
    returned.reverse()
    again = sum(each["may_have_come_twice"] for each in returned)
    held = "at least once held: each epoch ends when all of its bundles are done; "
    if skipped := len(history.skipped):
        held = (
            f"at least once did not hold: the rest of {skipped} splits was skipped, as the "
            "function failed there; "
        )
    promise = held + (
        f"of {again} bundles, elements behind the cursor may have come twice, as the consumers "
        "that had them did not leave in order"
        if again
        else "no element came twice"
    )
    if mismatches := describe_mismatches(job):
        promise += f"; {mismatches}"
    return {
        "dataset_id": job.dataset_id,
        "delivery": "at_least_once",
        "bundle_splits": order.bundle_splits,
        "epochs": [
            {"epoch": epoch, "bundles_done": done[epoch], "of": order.bundles}
            for epoch in sorted(done)
        ],
        "readers": readers,
        "returned": returned,
        "skipped": [_skip(each) for each in history.skipped],
        "promise": promise,
    }


def _reader(stay: Any) -> dict[str, Any]:
    said = dict(vars(stay))
    if (member := said.pop("member")) is None:
        return said
    del said["epoch"]  # of its iteration, which has all epochs
    return {"index": member.index, **said}


def _skip(skip: Any) -> dict[str, Any]:
    where = {"split": skip.split, "element": skip.element, "worker": skip.worker_address}
    return {**where, "why": skip.reason}


class _Ordered:
    """Answers about an ordered job, and its groups or the one that was asked for."""

    def __init__(self, histories: Any, history: Any, asked: Any) -> None:
        from ...journal.splits import source_size
        from ..core.bundles import order_message
        from ..steps import GroupSteps, KnownOrder

        self._history, self._order = history, history.job.order
        self._learned = histories.learned.get(
            (history.job.dataset_id, self._order.bundle_splits), []
        )
        self._sources = history.dataset.definition.sources
        self._splits = min(map(source_size, self._sources), default=0)
        self._known = KnownOrder(order_message(self._order), history.lengths)
        self._stays = [[]] if asked is not None else history.groups()
        members = [asked] if asked is not None else [stays[0].member for stays in self._stays]
        self._groups = [GroupSteps(self._known, member) for member in members]

    def overview(self) -> dict[str, Any]:
        from msgspec.structs import asdict as fields

        from ..core.checksums import describe_mismatches

        known, skipped = self._known, self._history.skipped
        count = int((known.lengths >= 0).sum())
        promise = "held, as far as the journal tells: the order and the lengths say what is where"
        if skipped:
            promise = "limited: the rest of each skipped split is missing from the order"
        if mismatches := describe_mismatches(self._history.job):
            promise = f"did not hold: {mismatches}"
        return {
            "dataset_id": self._history.job.dataset_id,
            "order": [fields(self._order)],
            "lengths": f"of {count} of {self._order.bundles} bundles",
            "epoch_elements": known.total,
            "unknown": None if known.total is not None else (
                f"what comes behind {known.why_not(0)}"
            ),
            "learned": [{"learned_ms": ms, "bundles": bundles} for ms, bundles in self._learned],
            "groups": [
                {
                    **self._shape(steps),
                    **self._start(steps),
                    "first_step": steps.first,
                    "readers": [_reader(stay) for stay in stays],
                }
                for steps, stays in zip(self._groups, self._stays, strict=True)
            ],
            "skipped": [_skip(each) for each in skipped],
            "promise": promise,
        }  # fmt: skip

    def _shape(self, steps: Any) -> dict[str, Any]:
        return {
            "group": self._groups.index(steps) + 1,
            "consumers": steps.group.consumers,
            "batch_size": steps.batch,
            "drop_remainder": steps.group.drop_remainder,
        }

    def _at(self, epoch: int, offset: int) -> dict[str, Any]:
        """A position in the training and in its epoch; None while an epoch's size is not known."""
        total = self._known.total
        position = None if epoch and total is None else epoch * (total or 0) + offset
        return {"position": position, "epoch": epoch, "offset": offset}

    def _start(self, steps: Any) -> dict[str, Any]:
        if self._known.total is not None or not steps.start:
            return self._at(steps.epoch, steps.start)
        asked_for_step = steps.group.HasField("start_step")
        return {"position": None if asked_for_step else steps.group.start_position}

    def step(self, step: int) -> dict[str, Any]:
        there = [steps for steps in self._groups if steps.first <= step]
        if not there:
            raise InvalidArgument(
                f"no group has read step {step} of job {self._history.job.user_name}: give another "
                "step, or --batch-size and --consumers, to be told what it would have been"
            )
        steps = there[-1]
        epoch, start, stop = steps.span(step)
        bundles, indexes = self._known.elements(epoch, start, stop)
        given = []
        for at in range(0, steps.size, steps.batch):
            batch = [x[at : at + steps.batch].tolist() for x in (bundles, indexes)]
            given.append(
                {
                    "consumer": at // steps.batch,
                    **(self._at(epoch, start + at) if batch[0] else {}),
                    "count": len(batch[0]),
                    "bundles": list(self._runs(*batch)),
                    "elements": list(zip(*batch, strict=True)),
                }
            )
        others = ", ".join(str(self._groups.index(each) + 1) for each in there[:-1])
        return {
            "step": step,
            **self._shape(steps),
            "earlier_groups": f"{others}, if they came so far" if others else None,
            "given": given,
        }

    def _runs(self, bundles: list[int], indexes: list[int]) -> Iterator[dict[str, Any]]:
        """A batch has consecutive elements of each of its bundles."""
        ends: dict[int, list[int]] = {}
        for bundle, index in zip(bundles, indexes, strict=True):
            ends.setdefault(bundle, [index, index])[1] = index
        for bundle, both in ends.items():
            yield {"bundle": bundle, "indexes": tuple(both), **self._splits_of(bundle)}

    def _splits_of(self, bundle: int) -> dict[str, Any]:
        """The first and the last split, and their values if the journal knows others than these."""
        from ...journal.splits import split_value

        first = bundle * self._order.bundle_splits
        splits = first, min(first + self._order.bundle_splits, self._splits) - 1
        values = [
            tuple(
                source.explicit.splits[n].decode(errors="replace")
                if source.HasField("explicit")
                else split_value(source, n)
                for n in splits
            )
            for source in self._sources
        ]
        return {"splits": splits, "values": [each for each in values if each != splits]}

    def element(self, element: str, epoch: int | None) -> dict[str, Any]:
        bundle, _, index = element.partition(":")
        if not (bundle.isdecimal() and index.isdecimal()):
            raise InvalidArgument(f"--element {element!r} is not of the form BUNDLE:INDEX")
        last = max((steps.epoch for steps in self._groups), default=0)
        found = []
        for number in range(last + 1) if epoch is None else [epoch]:
            offset = self._known.find(number, int(bundle), int(index))
            said = self._at(number, offset)
            for steps in reversed(self._groups):
                if (got := steps.step_of(number, offset)) is not None:
                    said |= {"step": got[0], "consumer": got[1], **self._shape(steps)}
                    break
            found.append(said)
        return {"element": element, **self._splits_of(int(bundle)), "found": found}


def _lines(answer: dict[str, Any], indent: str = "") -> Iterator[str]:
    """The answer in words; lists of parts are indented."""
    for key, value in answer.items():
        if isinstance(value, list) and value and isinstance(value[0], dict):
            yield f"{indent}{key}:"
            for part in value:
                yield f"{indent}  {', '.join(_words(part))}"
                nested = {k: v for k, v in part.items() if k in PARTS and isinstance(v, list)}
                yield from _lines(nested, f"{indent}    ")
        else:
            yield from _words({key: value})


def _words(part: dict[str, Any]) -> Iterator[str]:
    """What is not known, and lists that are for programs, are left out."""
    for key, value in part.items():
        name = key.removesuffix("_ms").replace("_", " ")
        if key == "values" and value:
            yield "values " + " and ".join(_range(*each) for each in value)
        elif isinstance(value, tuple):
            yield f"{name} {_range(*value)}"
        elif isinstance(value, bool):
            yield from [name] * value
        elif value is not None and not isinstance(value, list):
            yield f"{name} {time_text(value) if key.endswith('_ms') else value}"


def _range(first: object, last: object) -> str:
    return f"{first}" if first == last else f"{first} … {last}"
