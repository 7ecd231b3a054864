"""Ordered reads: one order of all elements, and each trainer's own part of it, whatever fails.

The order is computed here from the lengths of the pipeline's bundles, with lists. A trainer that
begins at a position must get its part of what follows, to the epoch's end: nothing else, nothing
twice, nothing late. A launcher starts trainers again that were killed: alone, where they had saved
their state, or all together at such a state, which may be old, and in another number.
"""

from __future__ import annotations

import itertools
import json
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from forebay.journal.proto import events_pb2 as ev
from forebay.service.client import (
    bundle_lengths,
    claims,
    order_plan,
    portions,
    read_ahead,
    source_plan,
)
from forebay.service.client.options import ReadOptions
from forebay.service.client.positions import ordered_options
from forebay.service.client.reader import OrderedIterator, Reader, name_of_job
from forebay.service.client.schedules import batch_of, change_weights, skip_steps
from forebay.service.delivery import bundles
from forebay.service.errors import (
    AlreadyExists,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    PipelineError,
    Unavailable,
)
from forebay.service.order import permuted
from forebay.service.worker import worker

from ..picked import picked
from .kernel import Kernel, Process, Violation
from .nodes import Job, Node, Trainer
from .oracle import Element, Oracle
from .patches import replaced
from .pipeline import Pipeline, elements_in
from .scenario import Asked, Scenario
from .threads import WaitingRoom

MAX_STATE = 300
"""Bytes of a saved state."""

TOGETHER_S = 2.0
"""For a launcher to end, and to start, all trainers."""

MOST_EPOCHS = 60
"""In which a step is looked for that is replayed."""

Name = tuple[int, int, int, int]
"""Of an element: its source, the number of its bundle, its split, and its index in the bundle."""

Changes = Sequence[ev.ScheduleChange]


class GlobalOrder:
    """All elements of a dataset, epoch by epoch."""

    epochs = MOST_EPOCHS

    def __init__(self, pipeline: Pipeline, asked: Asked, source: int = 0) -> None:
        self._asked, self._source, self.splits = asked, source, pipeline.splits
        size = asked.bundle_splits or 1  # of so few splits, the dispatcher makes a bundle of each
        self._bundles = [
            [s for s in range(first, min(first + size, pipeline.splits)) for _ in range(kept(s))]
            for first in range(0, pipeline.splits, size)
            for kept in (pipeline.kept,)
        ]
        self.lengths = [len(bundle) for bundle in self._bundles]
        self.total = sum(self.lengths)
        self._epochs: dict[int, list[Name]] = {}

    def epoch(self, number: int, changes: Changes = ()) -> list[Name]:
        if number not in self._epochs:
            self._epochs[number] = list(self._interleaved(number))
        return self._epochs[number]

    def step(self, step: int, size: int, changes: Changes) -> list[Name]:
        """The global batch of this step, of those who know these changes; none: it is far."""
        gone, batches = left_out(changes), []
        for number in range(self.epochs):
            base, elements = number * self.total, self.epoch(number, changes)
            kept = [e for n, e in enumerate(elements) if base + n not in gone]
            stop = len(kept) // size * size if self._asked.drop_remainder else len(kept)
            batches += [kept[first : first + size] for first in range(0, stop, size)]
            if step < len(batches):
                return batches[step]
        return []

    def _interleaved(self, epoch: int) -> Iterator[Name]:
        asked, count = self._asked, len(self._bundles)
        coming = deque(
            permuted(place, count, asked.seed, epoch) if asked.shuffle else place
            for place in range(count)
        )
        slots: list[list[Name] | None] = [None] * asked.cycle_length
        while coming or any(slot is not None for slot in slots):
            for number, slot in enumerate(slots):
                if slot is None:
                    if not coming:
                        continue
                    bundle = coming.popleft()
                    slot = [
                        (self._source, epoch * count + bundle, split, index)
                        for index, split in enumerate(self._bundles[bundle])
                    ]
                visit, rest = slot[: asked.block_length], slot[asked.block_length :]
                yield from visit
                slots[number] = rest if len(visit) == asked.block_length else None


class MixedOrder(GlobalOrder):
    """The elements of several sources. All that is looked at counts as one epoch."""

    epochs = 1

    def __init__(self, pipeline: Pipeline, asked: Asked, total: int) -> None:
        super().__init__(pipeline, asked)
        self.total, self.shares = total, pipeline.shares
        self.sources = [
            GlobalOrder(replace(pipeline, splits=pipeline.splits + number), asked, number)
            for number in range(len(pipeline.shares))
        ]
        self._lines: dict[tuple[tuple[int, tuple[int, ...]], ...], list[Name]] = {}

    def epoch(self, number: int, changes: Changes = ()) -> list[Name]:
        weights = tuple((each.place, tuple(each.shares)) for each in changes if each.shares)
        if weights not in self._lines:
            self._lines[weights] = list(self._line(weights))
        return self._lines[weights]

    def _line(self, weights: Sequence[tuple[int, tuple[int, ...]]]) -> Iterator[Name]:
        stretches = [(0, self.shares)]
        for place, shares in weights:
            stretches = [*(each for each in stretches if each[0] < place), (place, shares)]
        coming = [
            itertools.chain.from_iterable(map(source.epoch, itertools.count()))
            for source in self.sources
        ]
        ends = [*(place for place, _ in stretches[1:]), self.total]
        for (first, shares), end in zip(stretches, ends, strict=True):
            for source in picked(shares, 0, max(0, min(end, self.total) - first)).tolist():
                yield next(coming[source])


def left_out(changes: Changes) -> set[int]:
    return {n for each in changes for n in range(each.place, each.place + each.skipped)}


class Part:
    """What one trainer is to be given, from a position of the training on, of one epoch."""

    def __init__(
        self, group: Group, start: int, in_epoch: bool, index: int, changes: Changes
    ) -> None:
        """With `in_epoch`, the part may be the empty rest of an epoch. Changes may be added."""
        self._group, self._index, self._changes = group, index, changes
        self._size = group.asked.step // group.size or 1
        self._step = self._size * group.size
        self._total = total = group.order.total
        self._given = 0
        self.number, self._offset = divmod(start, total) if total else (0, 0)
        if in_epoch and self.number and not self._offset:
            self.number, self._offset = self.number - 1, total
        if not in_epoch and not self._rest() and any(n < self._offset for n in self._kept()):
            self.number, self._offset = self.number + 1, 0  # the rest is dropped

    def _kept(self) -> list[int]:
        """What is read of the epoch: offsets."""
        base = self.number * self._total
        gone = left_out(self._changes)
        return [n for n in range(self._total) if base + n not in gone]

    def _rest(self) -> list[int]:
        """What all trainers are to be given: offsets."""
        rest = [n for n in self._kept() if n >= self._offset]
        return rest[: len(rest) // self._step * self._step] \
            if self._group.asked.drop_remainder else rest  # fmt: skip

    def _due(self) -> list[int]:
        first = self._given * self._step + self._index * self._size
        return self._rest()[first : first + self._size]

    @property
    def next_epoch(self) -> int:
        """The position behind this epoch."""
        return (self.number + 1) * self._total

    def give(self, name: str, batch: list[Name]) -> None:
        due, elements = self._due(), self._group.order.epoch(self.number, self._changes)
        if not due or [elements[n] for n in due] != batch:
            raise Violation(
                f"{name} got {batch} as batch {self._given} of its part of epoch {self.number} "
                f"from {self._offset} on, where {[elements[n] for n in due] or 'the end'} was due"
            )
        self._given += 1
        self._group.dealt(self.number, due, self._index)

    def check_end(self, name: str) -> None:
        if due := self._due():
            raise Violation(
                f"{name} came to the end of epoch {self.number}, and its part has more batches, "
                f"from {self._group.order.epoch(self.number)[due[0]]} on"
            )

    def check_position(self, name: str, position: int) -> None:
        """It is `position`, as the trainer says: what all trainers have reached by this step."""
        rest = self._rest()
        reached = rest[: self._given * self._step]
        due = {self.number * self._total + (reached[-1] + 1 if reached else self._offset)}
        if self._given and reached == rest:  # what is dropped may be behind it or before it
            due.add(self.next_epoch)
        if position not in due:
            raise Violation(f"{name} is at position {position}, and should be at {sorted(due)}")


class KnownChanges:
    """The changes of the schedule, as the journal says, and which consumers they hold for.

    A change holds for all who are there when it is decided, and has asked them all before; and for
    who joins later, but not for who was given up before, and reads on.
    """

    def __init__(self, oracle: Oracle, group: Group) -> None:
        self._oracle, self._group = oracle, group
        self._of_job: dict[int, list[ev.ScheduleChange]] = {}
        self._forks: set[int] = set()
        self.known: dict[int, list[ev.ScheduleChange]] = {}  # by consumer

    def _consumer_joined(self, event: ev.ConsumerJoined) -> None:
        job, _ = self._oracle.books.epochs[event.iteration_id]
        self.known[event.consumer_id] = [*self._of_job.setdefault(job, [])]

    def _job_forked(self, event: ev.JobCreated) -> None:
        self._of_job[event.job_id] = [*self._of_job[event.fork.origin]]
        self._forks.add(event.job_id)

    def counts(self) -> dict[int, int]:
        """By job that is no fork, how many changes it has had."""
        return {job: len(known) for job, known in self._of_job.items() if job not in self._forks}

    def since(self, counts: dict[int, int]) -> Iterator[Changes]:
        """Those that there were at some time since it had so many."""
        for job, count in self.counts().items():
            for known in range(counts.get(job, 0), count + 1):
                yield self._of_job[job][:known]

    def _schedule_changed(self, event: ev.ScheduleChanged) -> None:
        books, change = self._oracle.books, event.change
        self._of_job.setdefault(event.job_id, []).append(change)
        there = [c for c, i in books.consumers.items() if books.epochs[i][0] == event.job_id]
        there = [c for c in there if c not in books.left]
        if len(there) not in (0, self._group.size):
            raise Violation(f"a change holds for {there}, and the others were not asked")
        if not there:  # it may begin before what some have read
            self._group.agrees = False
        for consumer in there:
            self.known[consumer].append(change)

    def facts(self, name: str, response: Any) -> Iterator[tuple[str, bool]]:
        said = [response.place] if name == "ChangeSchedule" else []
        if name == "ConsumerHeartbeat":
            said = [change.place for change in response.changes]
        known = {each.place for changes in self._of_job.values() for each in changes}
        for place in said:
            yield f"a change at {place}", place in known


class Lengths:
    """The lengths that the journal has, and that the dispatcher answers: the true ones, once."""

    def __init__(self, order: GlobalOrder) -> None:
        self._sources = order.sources if isinstance(order, MixedOrder) else [order]
        self._source_of: dict[str, int] = {}  # by dataset
        self._known: dict[str, dict[int, int]] = {}  # by dataset

    def _dataset_registered(self, event: ev.DatasetRegistered) -> None:
        for source in event.definition.sources:
            (number,) = (n for n, each in enumerate(self._sources) if each.splits == source.count)
            self._source_of[event.dataset_id] = number

    def _dataset_removed(self, event: ev.DatasetRemoved) -> None:
        self._known.pop(event.dataset_id, None)

    def _lengths_learned(self, event: ev.LengthsLearned) -> None:
        known = self._known.setdefault(event.dataset_id, {})
        lengths = self._sources[self._source_of[event.dataset_id]].lengths
        for bundle, length in zip(event.bundles, event.lengths, strict=True):
            if length != lengths[bundle]:
                raise Violation(
                    f"bundle {bundle} has {lengths[bundle]} elements, and the journal says {length}"
                )
            if bundle in known:
                raise Violation(f"the length of bundle {bundle} was learned twice")
            known[bundle] = length

    def facts(self, name: str, response: Any) -> Iterator[tuple[str, bool]]:
        if name == "JoinIteration" and response.consumer_id:
            firsts = [
                *itertools.accumulate((len(each.lengths) for each in self._sources), initial=0)
            ]
            known = {
                (firsts[self._source_of[dataset]] + bundle, length)
                for dataset, lengths in self._known.items()
                for bundle, length in lengths.items()
            }
            for bundle, length in enumerate(response.lengths):
                yield f"length {length} of bundle {bundle}", length < 0 or (bundle, length) in known


class Group:
    """The launcher: it keeps the trainers' states, and starts trainers at them."""

    def __init__(self, this: Kernel, oracle: Oracle, scenario: Scenario) -> None:
        assert scenario.asked is not None
        self.kernel = this
        self.oracle = oracle
        self.asked = scenario.asked
        self.order = GlobalOrder(scenario.pipeline, self.asked)
        self.end = scenario.epochs * self.order.total
        self.is_mixed = bool(scenario.pipeline.shares)
        if self.is_mixed:
            left_out = (20 * len(scenario.skips) + 30) * max(self.asked.step, 3)
            self.order = MixedOrder(scenario.pipeline, self.asked, self.end + left_out)
        self.together = scenario.together
        self.members: list[OrderedTrainer] = []
        self.size = self.asked.consumers  # of the members, these read
        self.ending = False  # and nobody is to be started before all have ended
        self.changed = WaitingRoom()
        self._states: dict[int, Any] = {}  # that were saved, by position
        self.changes = KnownChanges(oracle, self)
        self.agrees = True  # all divide the order alike
        self._dealt: dict[tuple[int, int], int] = {}  # to whom, by epoch and offset

    def dealt(self, epoch: int, offsets: list[int], index: int) -> None:
        """A trainer got these."""
        for offset in offsets if self.agrees else ():
            if (other := self._dealt.setdefault((epoch, offset), index)) != index:
                raise Violation(f"{offset} of epoch {epoch} went to trainers {other} and {index}")

    @property
    def finished(self) -> bool:
        return all(member.done for member in self.members)

    @property
    def slowest(self) -> int:
        """The position that all of them have reached."""
        return min(member.position for member in self.members[: self.size])

    def save(self, position: int, state: Any) -> None:
        self._states[position] = state

    def lost(self) -> None:
        """One of the trainers was killed, or given up. It starts again by itself, or with all."""
        if self.ending or self.finished or self.kernel.rng.random() < 0.5:
            return
        self.ending = True
        self.kernel.at(TOGETHER_S * self.kernel.rng.random(), self._end)

    def _end(self) -> None:
        for member in self.members:
            member.resume()
            member.kill()
        self.kernel.at(TOGETHER_S * self.kernel.rng.random(), self._begin)

    def _begin(self) -> None:
        self.ending = False
        if self.finished:
            return
        rng = self.kernel.rng
        saved = [(self.asked.start, None), *self._states.items()]
        position, state = rng.choice(saved[-4:] if rng.random() < 0.7 else saved)
        self.size = rng.choice(self.asked.sizes[: len(self.members)])
        self.agrees, self._dealt = True, {}
        self.kernel.trace("together", self.size, position)
        for member in self.members:
            member.done = member.index >= self.size
            member.saved = position, state
            member.position = position
            member.start()


class OrderedTrainer(Trainer):
    """One of the trainers of an ordered read."""

    def __init__(self, this: Kernel, name: str, host: str, job: Job, group: Group) -> None:
        super().__init__(this, name, host, job)
        self.index = len(group.members)
        self.position = group.asked.start
        self.saved: tuple[int, Any] = group.asked.start, None  # where it starts again, if alone
        self.done = self.index >= group.size
        self._group = group
        group.members.append(self)

    def start(self) -> None:
        if not self._group.ending:
            super().start()

    def main(self) -> None:
        group = self._group
        try:
            reader, state = self._reader(*self.saved)
            self.reading = True  # from here on it knows the journal
            self.position, _ = self.saved
            while True:
                self._read_epoch(OrderedIterator(reader), state)
                if self.position >= group.end:
                    break
                if self.kernel.rng.random() < 0.5:
                    reader, state = self._reader(*self.saved)
                else:  # it goes on by itself
                    state = None
        except (NotFound, AlreadyExists, Unavailable) as error:
            self.kernel.trace("failed", self.name, error)
            group.lost()
            return  # it was given up, who was there before is not yet, or nobody answers
        except (FailedPrecondition, InvalidArgument, PipelineError) as error:
            if self.saved[1] is not None and "weights changed otherwise" in str(error):
                self.saved = self.saved[0], None
                group.lost()
                return
            self.kernel.fail(f"{self.name} failed without a reason: {error!r}")
            return
        self.done = True
        group.changed.notify_all()

    def _reader(self, position: int, state: Any) -> tuple[Reader, Any]:
        """A reader that begins there, and the state to load if it does not know that yet."""
        job, asked, of = self.job, self._group.asked, self._group.size
        batch_size = asked.step // of or None
        if state is not None and state["step"] != (batch_size or 1) * of:
            state = None
        where = {}
        if state is None:
            step = (batch_size or 1) * of
            first = self._group.order.total - self._group.order.total % step
            if position % step == 0 and position < first and asked.by_steps:
                where["start_step"] = position // step
            else:
                where["start_position"] = position
        given = {
            "seed": asked.seed, "shuffle": asked.shuffle, "cycle_length": asked.cycle_length,
            "block_length": asked.block_length, "bundle_splits": asked.bundle_splits or None,
            "batch_size": batch_size, "drop_remainder": asked.drop_remainder, **where,
        }  # fmt: skip
        options = ordered_options(given, self.index, of)
        dataset_id = job.dataset_id()
        name = name_of_job(dataset_id, job.name or options.group_name)
        how = ReadOptions(ordered=options)
        reader = Reader(job.service, dataset_id, name, how, credit_bytes=job.credit_bytes)
        return reader, state

    def _read_epoch(self, iterator: OrderedIterator, state: Any) -> None:
        group, rng, oracle = self._group, self.kernel.rng, self._group.oracle
        in_epoch = state is not None and state["in_epoch"]

        def begin() -> Part:
            assert self.process is not None
            known = group.changes.known[self.process.local["consumer"]]
            return Part(group, self.position, in_epoch, self.index, known)

        part = None
        with iterator:
            if state is not None:
                iterator.load_state_dict(state)
            for item in iterator:
                part = part or begin()
                elements = elements_in(item.reshape(-1, 5))
                part.give(self.name, names_of(elements))
                oracle.element_count += len(elements)
                self._is_at(iterator, part, rng.random() < 0.2)
                while group.together and self._is_ahead():
                    group.changed.wait(1.0)
                if self.job.step_s:
                    self.kernel.sleep(self.job.step_s * rng.uniform(0.1, 2))
                if group.is_mixed and self.position >= group.end:
                    return
            part = part or begin()
            part.check_end(self.name)
            self.position = iterator.position
            if self.position != part.next_epoch:
                raise Violation(f"{self.name} ended at {self.position}, not {part.next_epoch}")
            self._save(iterator)

    def _is_at(self, iterator: OrderedIterator, part: Part, saves: bool) -> None:
        self.position = iterator.position
        part.check_position(self.name, self.position)
        self._group.changed.notify_all()
        if saves:
            self._save(iterator)

    def _save(self, iterator: OrderedIterator) -> None:
        state = iterator.state_dict()
        if state["position"] != self.position or len(json.dumps(state)) > MAX_STATE:
            raise Violation(f"{self.name} is at {self.position}, and its state is {state}")
        self.saved = self.position, state
        self._group.save(self.position, state)

    def _is_ahead(self) -> bool:
        return self.position > self._group.slowest + 2 * max(self._group.asked.step, 1)

    def killed(self, process: Process) -> None:
        super().killed(process)
        self._group.lost()


class Skipper(Node):
    """Somebody who has steps left out, or weights changed, whoever reads: ahead of the trainers, or
    behind some."""

    def __init__(
        self, this: Kernel, host: str, trainer: OrderedTrainer, at: list[int],
        faults: Sequence[Callable[[], None]],
    ) -> None:  # fmt: skip
        """Some `faults` come while a change is under way."""
        super().__init__(this, "skipper", host)
        self._job, self._group, self._at = trainer.job, trainer._group, at
        self._faults = faults

    def main(self) -> None:
        rng, group = self.kernel.rng, self._group
        for position in self._at:
            while group.slowest < position and not group.finished:
                group.changed.wait(1.0)
            if group.finished:
                break
            self.kernel.sleep(self._job.step_s * rng.uniform(0, 5))
            now = group.slowest // max(group.asked.step, group.size)
            first = max(0, now + rng.choice([-2, 0, 1, 2, 4, 8, 16]))
            if self._faults and rng.random() < 0.5:
                soon_s = self.kernel.network.weather.delay_s * rng.uniform(1, 10)
                self.kernel.at(soon_s, rng.choice(self._faults))
            stop, patience_s = first + rng.choice([1, 2, 5, 20]), rng.choice([1.0, 30.0])
            try:
                if group.is_mixed and rng.random() < 0.6:
                    weights = {
                        str(n): rng.choice([0, 1, 5]) for n in range(len(self._job.pipeline.shares))
                    }
                    from_step = rng.choice([None, first])
                    change_weights(
                        self._job.service, "job", weights, from_step=from_step, timeout_s=patience_s
                    )
                else:
                    skip_steps(self._job.service, "job", first, stop, timeout_s=patience_s)
            except (
                *(AlreadyExists, FailedPrecondition, InvalidArgument, NotFound),
                Unavailable,  # then it may hold
            ) as error:
                self.kernel.trace("refused", error)
            if rng.random() < 0.5:
                self._replay(max(0, now + rng.choice([-3, 0, 5])), patience_s)
        self.done = True

    def _replay(self, step: int, patience_s: float) -> None:
        """A global batch is made anew, whoever reads: as of a moment while it was asked for."""
        group = self._group
        before = group.changes.counts()
        try:
            batch = batch_of(self._job.service, "job", step, timeout_s=patience_s)
        except (
            *(AlreadyExists, FailedPrecondition, InvalidArgument, NotFound),
            *(PipelineError, Unavailable),
        ) as error:
            self.kernel.trace("no replay", error)
            return
        got = names_of(elements_in(batch.reshape(-1, 5)))
        sizes = {(group.asked.step // of or 1) * of for of in group.asked.sizes}
        for changes in group.changes.since(before):
            if any(got == group.order.step(step, size, changes) for size in sizes):
                self.kernel.trace("replayed", step, len(changes))
                return
        raise Violation(f"step {step} was replayed as {got}, which nobody is given in it")


def names_of(elements: list[Element]) -> list[Name]:
    return [(e.provider, e.pass_number, e.split, e.number) for e in elements]


@contextmanager
def scaled(scenario: Scenario) -> Iterator[None]:
    """What is kept and asked for at a time, in proportion to elements of a few bytes."""
    asked = scenario.asked
    with ExitStack() as stack:
        if asked is not None:
            of_window = replaced(
                read_ahead, WINDOW_BYTES=asked.window_bytes, FIRST_WINDOW=asked.first_window
            )
            of_portions = replaced(
                portions,
                PORTION_BYTES=asked.portion_bytes,
                LARGE_BYTES=asked.large_bytes,
                RECENT_BYTES=asked.window_bytes // 8,
            )
            stack.enter_context(of_window)
            is_scarce = asked.ahead == 1  # few are asked for at a time
            stack.enter_context(replaced(source_plan, AHEAD=asked.ahead))
            if is_scarce:
                for module in (source_plan, order_plan):
                    stack.enter_context(replaced(module, MAX_REQUESTS=5))
                stack.enter_context(replaced(bundle_lengths, MAX_QUERIES=3))
                often = property(lambda ahead: ahead.given % 7 == 1)  # it plans anew
                stack.enter_context(replaced(read_ahead.ReadAhead, is_exceeded=often))
            stack.enter_context(of_portions)
            stack.enter_context(replaced(claims, WINDOW_BYTES=asked.window_bytes))
            of_runs = replaced(
                bundles, AHEAD_BYTES=asked.ahead_bytes, FIRST_AHEAD_BYTES=asked.ahead_bytes // 8
            )
            stack.enter_context(of_runs)
            small = partial(bundles.BundlesOutput, scenario.output_bytes)
            stack.enter_context(replaced(worker, BundlesOutput=small))
        yield
