"""What `forebay audit` says of a job that consumers share: read at most once, or at least once."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

BROKEN = "did not hold"


def verdict(
    promise: str, broken: Sequence[str], unknown: Sequence[str], known: str
) -> dict[str, str]:
    """Whether a promise held; the reasons if it did not, or if that is not known; what is known."""
    if broken:
        return {"verdict": BROKEN, "promise": f"{promise} did not hold: {'; '.join(broken)}"}
    if unknown:
        because = f"{promise} is not known, because {'; '.join(unknown)}"
        return {"verdict": "not known", "promise": f"{because}; as far as it is, {known}"}
    return {"verdict": "held", "promise": f"{promise} held: {known}"}


def unordered(state: Any, history: Any) -> dict[str, Any]:
    """Of a job that is first come, first served."""
    from ...journal.proto import events_pb2 as ev
    from ..core.iterations import lost_splits

    job, twice = history.job, history.leased_twice
    there = (state.iterations.get(number) for number in job.iterations.values())
    lost = sum(1 + x.splits[1] - x.splits[0] for x in history.lost if not x.found)
    if history.missing:  # the state has a sum of what was lost before
        known_lost = sum(lost_splits(each) for each in there if each is not None)
        lost = max(lost, job.lost_splits + known_lost)
    dropped = sum(each.elements for each in history.dropped)
    broken, unknown = [], _unfinished(history)
    if job.sharding != ev.DYNAMIC:
        unknown = ["no splits are leased, so the journal tells of no elements"]
    elif history.missing:
        unknown.insert(0, history.missing)
    if twice:
        broken.append(
            f"{len(twice)} leases are of splits that were given out before, the first one of "
            f"splits {twice[0].first} … {twice[0].first + twice[0].count - 1}"
        )
    known = "no split was given out twice; " + (
        f"{lost} were lost, and elements of them may have reached nobody"
        if lost
        else "none was lost"
    )
    if dropped:
        known += f"; {dropped} elements that workers had made may have reached nobody"
    if mixed := sum(x.elements for x in history.dropped if x.task_id not in history.telling):
        known += f", and of {mixed} the journal does not tell the splits, as a pipeline mixed them"
    return {
        "dataset_id": job.dataset_id,
        "sharding": ev.Sharding.Name(job.sharding),
        "epochs": [
            {"epoch": _shown(history, epoch), "finished": each.finished}
            for epoch, each in sorted(history.epochs.items())
        ],
        "readers": [reader(history, stay) for stay in history.stays],
        "lost_splits": lost,
        "lost": [{**asdict(each), "epoch": _shown(history, each.epoch)} for each in history.lost],
        "dropped": [
            {**asdict(each), "epoch": _shown(history, each.epoch)} for each in history.dropped
        ],
        "skipped": [skip(each) for each in history.skipped],
        **verdict("at most once", broken, unknown, known),
    }


def _unfinished(history: Any) -> list[str]:
    """Why a promise of whole epochs is not known yet."""
    if not history.epochs:
        return ["nobody has read it"]
    return [
        f"epoch {_shown(history, epoch)} is not finished"
        for epoch, each in sorted(history.epochs.items())
        if not each.finished
    ]


def claimed(history: Any) -> dict[str, Any]:
    """Of a job that is read at least once: who claimed what, what returned, and what may have come
    again."""
    from ..order import permuted

    job, order, claims = history.job, history.job.order, history.claims
    bundles = [
        permuted(each.place, order.bundles, order.seed, each.epoch) if order.shuffle else each.place
        for each in claims
    ]
    of_consumer = defaultdict(list)
    for bundle, claim in zip(bundles, claims, strict=True):
        of_consumer[claim.consumer_id].append(
            {
                "bundle": bundle,
                "claimed_ms": claim.claimed_ms,
                "start": claim.start or None,
                "done_ms": claim.done_ms,
            }
        )
    readers = []
    for stay in history.stays:
        mine = of_consumer[stay.consumer_id]
        readers.append({**reader(history, stay), "claimed": len(mine), "bundles": mine})
    returned = _returned(history, bundles)
    return {
        "dataset_id": job.dataset_id,
        "delivery": "at_least_once",
        "bundle_splits": order.bundle_splits,
        "epochs": [
            {
                "epoch": _shown(history, epoch), "bundles_done": each.done, "of": order.bundles,
                "finished": each.finished,
            }
            for epoch, each in sorted(history.epochs.items())
        ],
        "readers": readers,
        "returned": returned,
        "skipped": [skip(each) for each in history.skipped],
        **_at_least_once(history, sum(each["may_have_come_twice"] for each in returned)),
    }  # fmt: skip


def _returned(history: Any, bundles: Sequence[int]) -> list[dict[str, Any]]:
    """The claims that returned, and who claimed these bundles next."""
    from ...journal.reasons import GOODBYE

    next_of: dict[tuple[int, int], int] = {}
    returned = []
    for bundle, claim in reversed([*zip(bundles, history.claims, strict=True)]):
        key = claim.epoch, claim.place
        if claim.returned_ms is not None:
            returned.append(
                {
                    "epoch": _shown(history, claim.epoch),
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
    return returned[::-1]


def _at_least_once(history: Any, again: int) -> dict[str, str]:
    """`again`: bundles of which elements may have come twice."""
    from ..core.checksums import describe_mismatches

    job, broken = history.job, []
    broken += [
        f"epoch {_shown(history, epoch)} is finished, and {each.done} of {job.order.bundles} of "
        "its bundles are done"
        for epoch, each in sorted(history.epochs.items())
        if each.finished and each.done not in (None, job.order.bundles)
    ]
    if mismatches := describe_mismatches(job):
        broken.append(mismatches)
    done = sum(each.done or 0 for each in history.epochs.values())
    twice = "no element came twice"
    if again:
        twice = (
            f"of {again} bundles, elements behind the cursor may have come twice, as the consumers "
            "that had them did not leave in order"
        )
    if history.missing:
        seen = f"since then {twice}" if history.claims else "no claims are left"
        twice = f"what came twice is not known, because {history.missing}; {seen}"
    known = f"{done} bundles were done; {twice}"
    if history.skipped:
        known += f"; {skips(history)} skipped, as on_error says"
    elif job.skipped_splits:  # in epochs that are summarized
        known += f"; {job.skipped_splits} splits or records were skipped, as on_error says"
    return verdict("at least once", broken, _unfinished(history), known)


def reader(history: Any, stay: Any) -> dict[str, Any]:
    said = dict(vars(stay))
    if (member := said.pop("member")) is None:
        for name in ("position", "moved_ms", "is_exact"):
            del said[name]
        return {**said, "epoch": _shown(history, stay.epoch)}
    del said["epoch"]  # of its iteration, which has all epochs
    return {"index": member.index, **said}


def _shown(history: Any, epoch: int) -> int:
    """Counted from 0, whatever the number that events have for the job's first epoch."""
    return epoch - int(history.first_epoch)


def skip(skipped: Any) -> dict[str, Any]:
    where = {"split": skipped.split, "element": skipped.element, "worker": skipped.worker_address}
    return {**where, "records": skipped.records or "the rest", "why": skipped.reason}


def skips(history: Any) -> str:
    """In words, how much was skipped."""
    rests = sum(not each.records for each in history.skipped)
    records = sum(each.records for each in history.skipped)
    parts = [f"the rest of {rests} splits was"] * bool(rests)
    return " and ".join([*parts, *[f"{records} records were"] * bool(records)])
