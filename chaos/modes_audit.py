"""Checks the elements of a crowd's readers in other modes against the promises of each mode.

- Coordinated reads: in each step, each consumer gets its own element of one round of one worker,
  and no worker's round is skipped; they restart only if a worker or a consumer was lost.
- A cache: each trainer gets each of a worker's elements once, in order, from the first one,
  without a gap, since the window is larger than all elements. Elements in flight may be lost if a
  worker was removed for its silence and is back.
- Static sharding: each element comes despite all faults, from the task with its shard, once from
  each task; a started shard is restarted only when its worker is gone.
- A save has each element once, despite all faults.

Workers make the same elements, so a round's worker is unknown. This is pure, as the audit is.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from .audit import Verdict
from .history import History, listed
from .members import TRAINERS, Life
from .modes import STEPS, job_of
from .partitions import Partition
from .records import Got, Joined, ReadToEnd, Record
from .saves import ELEMENTS, Saved

Readers = Sequence[Iterable[Record]]

LINGERS_S = 15.0
"""After this time the dispatcher has removed a consumer that left without a message."""

NEEDED = [
    *(("crowd", "worker"), ("crowd", "dispatcher"), ("worker", "dispatcher")),
    *(("dispatcher", "dispatcher"), ("dispatcher", "redis"), ("dispatcher", "postgres")),
]
"""Between which hosts a partition may end a coordinated read early."""


@dataclass
class ReaderVisit:
    """A reader's visit; `got` has its elements since it joined, as (task, id)."""

    joined_s: float
    got: list[tuple[int, int]] = field(default_factory=list)
    until_s: float = 0.0
    ended: bool = False


def check_modes(
    history: History, name: str, modes: Mapping[str, Readers], lives: Mapping[str, Life],
    *, elements: int, partitions: Sequence[Partition] = (), cut_off: bool = False,
) -> Verdict:  # fmt: skip
    """Find every broken promise to the crowd `name`.

    `modes` are the records of each reader, by its mode, `lives` all processes by name. The static
    mode's dataset has the elements 0 … `elements` − 1. A crowd that was `cut_off` need not come to
    its end.
    """
    verdict = Verdict([])
    visits = {mode: [_visits(records, verdict) for records in modes[mode]] for mode in modes}
    for reader in visits["rounds"] if cut_off else ():
        for visit in reader[-1:]:
            visit.until_s = math.inf  # it waited for more when its process ended
    found = [
        *(("rounds", what) for what in _check_rounds(visits["rounds"], lives, partitions)),
        *(("cached", what) for what in _check_cached(visits["cached"], history)),
        *(
            ("static", what)
            for what in _check_static(visits["static"], history, name, elements, not cut_off)
        ),
    ]
    for mode, readers in visits.items():
        for number, reader in enumerate(readers):
            if not (cut_off or (reader and reader[-1].ended)):
                found.append((mode, f"reader {number} did not come to the end"))
    verdict.broken += [f"{job_of(name, mode)}: {what}" for mode, what in found]
    return verdict


def check_saved(name: str, saved: Saved | None, cut_off: bool = False) -> Verdict:
    """Find every broken promise to the save of the crowd `name`. None: the crowd did not see it
    finish, which only a crowd that was `cut_off` may say.
    """
    if saved is None and cut_off:
        return Verdict([])
    if saved is None:
        return Verdict([f"{name} save: it did not come to its end"])
    verdict = Verdict([], delivered=len(saved.ids), damaged=len(saved.damaged))
    counts = Counter(saved.ids)
    for what, found in (
        ("lost", set(range(ELEMENTS)) - counts.keys()),
        ("saved twice", {i for i, count in counts.items() if count > 1}),
        ("saved that nobody made", counts.keys() - set(range(ELEMENTS))),
        ("damaged", set(saved.damaged)),
    ):
        if found:
            verdict.broken.append(f"{name} save: {listed(sorted(found))} {what}")
    return verdict


def _visits(records: Iterable[Record], verdict: Verdict) -> list[ReaderVisit]:
    visits: list[ReaderVisit] = []
    for record in records:
        match record:
            case Joined():
                visits.append(ReaderVisit(record.at_s))
                continue
            case Got():
                visits[-1].got += [(record.task_id, i) for i in record.ids]
                verdict.delivered += len(record.ids)
                if record.damaged:
                    verdict.damaged += len(record.damaged)
                    verdict.broken.append(f"{listed(record.damaged)} damaged on the way")
            case ReadToEnd():
                visits[-1].ended = True
        visits[-1].until_s = record.at_s
    return visits


def _check_rounds(
    readers: list[list[ReaderVisit]], lives: Mapping[str, Life], partitions: Sequence[Partition]
) -> list[str]:
    found = []
    of = len(readers)
    for attempt, together in enumerate(zip(*readers, strict=False)):
        for step, elements in enumerate(zip(*(visit.got for visit in together), strict=False)):
            ids = [i for _, i in elements]
            if ids != list(range(ids[0], ids[0] + of)) or ids[0] % of:
                found.append(f"step {step} of attempt {attempt} has the elements {ids}")
                break
        for consumer, visit in enumerate(together):
            seen: Counter[int] = Counter()  # rounds; each worker has its own
            for _, i in visit.got:
                round_ = i // of
                seen[round_] += 1
                if round_ and seen[round_] > seen[round_ - 1]:
                    found.append(f"consumer {consumer} has round {round_}, and not the one before")
                    break
        since_s = min(visit.joined_s for visit in together) - LINGERS_S
        until_s = max(visit.until_s for visit in together)
        hit = _was_hit(lives, since_s, until_s) or any(
            p.since_s <= until_s and since_s <= p.until_s and any(p.cuts(*ends) for ends in NEEDED)
            for p in partitions
        )
        if not all(visit.ended for visit in together) and not hit:
            found.append(f"attempt {attempt} ended early, and nobody was hit")
    if all(reader and reader[-1].ended for reader in readers):
        short = [n for n, reader in enumerate(readers) if len(reader[-1].got) < STEPS]
        found += [f"consumer {n} did not get {STEPS} elements" for n in short]
    return found


def _was_hit(lives: Mapping[str, Life], since_s: float, until_s: float) -> bool:
    """Whether a fault hit a process, other than a trainer's, in that time."""
    moments = [
        at_s
        for life in lives.values()
        if life.role not in TRAINERS
        for at_s in (life.killed_s, life.terminated_s, *(b for pause in life.pauses for b in pause))
    ]
    return any(at_s is not None and since_s <= at_s <= until_s for at_s in moments)


def _check_cached(readers: list[list[ReaderVisit]], history: History) -> list[str]:
    found = []
    for number, reader in enumerate(readers):
        of_task: defaultdict[int, list[int]] = defaultdict(list)
        for visit in reader:
            for task, i in visit.got:
                of_task[task].append(i)
        for task, ids in of_task.items():
            worker = history.workers.get(history.worker_of.get(task, 0))
            if sorted(set(ids)) != ids:
                found.append(f"trainer {number} got elements of task {task} twice, or not in order")
            elif ids != list(range(len(ids))) and (worker is None or worker.given_up_ms is None):
                gap = next(at for at, i in enumerate(ids) if at != i)
                found.append(f"trainer {number} did not get element {gap} of task {task}")
    return found


def _check_static(
    readers: list[list[ReaderVisit]], history: History, name: str, elements: int, whole: bool
) -> list[str]:
    found = []
    counts = Counter(one for reader in readers for visit in reader for one in visit.got)
    if twice := sorted({i for (_, i), times in counts.items() if times > 1}):
        found.append(f"{listed(twice)} delivered twice by one task")
    tasks = {
        task: shard
        for epoch in history.jobs.get(job_of(name, "static"), {}).values()
        for task, shard in epoch.shard_of.items()
    }
    num_shards = len(history.places)
    if stray := sorted({i for task, i in counts if tasks.get(task, -1) != i % num_shards}):
        found.append(f"{listed(stray)} delivered by a task that has not their shard")
    lost = sorted(set(range(elements)) - {i for _, i in counts})
    if lost and whole:
        found.append(f"{listed(lost)} lost")
    return found
