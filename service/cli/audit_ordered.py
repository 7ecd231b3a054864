"""What `forebay audit` says of a job that is read in order."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

from ..errors import InvalidArgument, NotFound
from .audit_shared import reader, skip, skips, verdict
from .journal import time_text

GIVEN, NOT_YET, NOT_KNOWN = "given", "not yet", "not known"
DIFFERS = "differs by consumer"


class _Told(NamedTuple):
    """Whether a consumer of a group was given something, and why it is said so."""

    status: str
    why: str | None = None


class OrderedAnswers:
    """Answers about an ordered job and its groups."""

    def __init__(self, history: Any) -> None:
        from ..core.bundles import parts_of
        from ..steps import GroupSteps

        self._history, self._order = history, history.job.order
        self.job = history.job
        self._parts = parts_of(history.dataset, self._order)
        self._datasets = {d.dataset_id: d for d in (history.dataset, *history.sources)}
        self._as_known = functools.cache(self._known_order)
        self.known = self._as_known(len(history.job.changes))
        self._stays = history.groups()
        self._groups = []
        for stays in self._stays:
            knew = [len(history.job.changes) if s.changes is None else s.changes for s in stays]
            self._groups.append(GroupSteps(self._as_known(max(knew)), stays[0].member))

    def _known_order(self, changes: int) -> Any:
        """The order, as who knew so many changes of the schedule knows it."""
        from ..core.bundles import order_message
        from ..core.schedules import change_message
        from ..steps import KnownOrder

        history = self._history
        shares = [source.share for source in history.dataset.outline.mixture.sources]
        known = map(change_message, history.job.changes[:changes])
        return KnownOrder(order_message(self._order), history.lengths, shares, known)

    def about(self) -> dict[str, Any]:
        """What the order depends on, but for what was decided later."""
        from msgspec.structs import asdict as fields

        return {"dataset": self._history.dataset.content, **fields(self._order)}

    def step_at(self, position: int) -> int:
        """The step of a position, as the group counts that joined last."""
        steps, schedule = self._steps(len(self.job.changes)), self.known.schedule
        return int(steps.step_of(schedule.place_of(position) + 1)) - 1

    def position_of_bundle(self, bundle: int) -> int | None:
        """Of its first element, through all epochs; None if that is left out, or not known."""
        epoch = 0 if self.known.is_mixture else bundle // self._order.bundles
        if epoch and self.known.total is None:
            return None
        try:
            found = self.known.find(epoch, bundle - epoch * self._order.bundles, 0)
        except InvalidArgument:
            return None
        return int(self.known.before(epoch)) + int(found)

    def _steps(self, changes: int) -> Any:
        from ..schedule import EpochSteps

        known = self._as_known(changes)
        return EpochSteps(known.schedule, self.job.step, known.total, self.job.drops_remainder)

    def overview(self) -> dict[str, Any]:
        from msgspec.structs import asdict as fields

        from ..schedule import decisions

        known, sources = self.known, self._history.dataset.outline.mixture.sources
        count = int((known.lengths >= 0).sum())
        learned = self._history.learned.get(self._order.bundle_splits, [])
        return {
            "dataset_id": self._history.job.dataset_id,
            "order": [{name: of for name, of in fields(self._order).items() if of != []}],
            "lengths": f"of {count} of {self._order.bundles} bundles",
            "epoch_elements": known.total,
            "unknown": None if known.total is not None or not (why := known.why_not()) else (
                f"what comes behind {why}"
            ),
            "learned": [{"learned_ms": ms, "bundles": bundles} for ms, bundles in learned],
            "groups": [
                {
                    **self._shape(steps),
                    **self._start(steps),
                    "first_step": steps.first,
                    "readers": [reader(self._history, stay) for stay in stays],
                }
                for steps, stays in zip(self._groups, self._stays, strict=True)
            ],
            "changes": [*decisions(self.job, sources, self._steps)],
            "skipped": [skip(each) for each in self._history.skipped],
            **self._verdict(),
        }  # fmt: skip

    def _verdict(self) -> dict[str, str]:
        from ..core.checksums import describe_mismatches

        job, unknown = self._history.job, []
        if not job.checksums:
            unknown.append("no worker has run a bundle from its beginning to its end")
        known = (
            "no later run of a bundle was seen to have other elements than its first one, as far "
            f"as these have a checksum: those of {len(job.checksums)} bundles of all epochs do"
        )
        if self._history.skipped:
            known += f"; {skips(self._history)} skipped, and have no place in the order"
        mismatches = describe_mismatches(job)
        return verdict("one order", [mismatches] if mismatches else [], unknown, known)

    def _shape(self, steps: Any) -> dict[str, Any]:
        return {
            "group": self._groups.index(steps) + 1,
            "consumers": steps.group.consumers,
            "batch_size": steps.batch,
            "drop_remainder": steps.group.drop_remainder,
        }

    def _at(self, epoch: int, offset: int, known: Any = None) -> dict[str, Any]:
        """A position in the training, as states have it, and in its epoch; None while an epoch's
        size is not known. `known` is the order as a group knows it."""
        known = known or self.known
        position = None if epoch and known.total is None else known.place_of(epoch, offset)
        where = {} if known.is_mixture else {"epoch": epoch}
        return {"position": position, **where, "offset": offset}

    def _start(self, steps: Any) -> dict[str, Any]:
        if self.known.total is not None or not steps.start:
            return self._at(steps.epoch, steps.start, steps.known)
        asked_for_step = steps.group.HasField("start_step")
        return {"position": None if asked_for_step else steps.group.start_position}

    # -- what was given ------------------------------------------------------------------------

    def _told(self, steps: Any, step: int, index: int) -> _Told:
        """Whether this consumer of the group was given its batch of the step."""
        stays = self._stays[self._groups.index(steps)]
        mine = [stay for stay in stays if stay.member.index == index]
        said = [steps.status(step, stay.position, stay.is_exact) for stay in mine]
        if GIVEN in said:
            return _Told(GIVEN)
        if NOT_KNOWN in said:
            return _Told(NOT_KNOWN, _why(mine[said.index(NOT_KNOWN)]))
        if self._history.missing:
            return _Told(NOT_KNOWN, self._history.missing)
        if mine:
            return _Told(NOT_YET, _why(mine[-1]))
        return _Told(NOT_YET, f"no consumer {index} of this group has joined")

    def _of_group(self, steps: Any, step: int) -> str:
        """The same of the whole group."""
        told = {self._told(steps, step, n).status for n in range(steps.group.consumers)}
        return told.pop() if len(told) == 1 else DIFFERS

    def _nobody(self) -> dict[str, Any]:
        if self._history.missing:
            return {"status": NOT_KNOWN, "why": self._history.missing}
        why = (
            "no group of the job has it in a step: it is before their start, or dropped with an "
            "epoch's remainder, or nobody has joined"
        )
        return {"status": NOT_YET, "why": why}

    def step(self, step: int) -> dict[str, Any]:
        there = [steps for steps in self._groups if steps.has(step)]
        if not there:
            return {"step": step, **self._nobody()}
        told = [self._of_group(steps, step) for steps in there]
        wanted = next((each for each in (GIVEN, DIFFERS, NOT_KNOWN) if each in told), told[-1])
        steps = there[len(told) - 1 - told[::-1].index(wanted)]
        epoch, start, stop = steps.span(step)
        unknown = None
        try:
            bundles, indexes = steps.known.elements(epoch, start, stop)
        except InvalidArgument as error:
            bundles, indexes = steps.known.elements(epoch, start, start)
            unknown = str(error)
        batches = []
        for at in range(0, steps.size, steps.batch):
            batch = [x[at : at + steps.batch].tolist() for x in (bundles, indexes)]
            batches.append(
                {
                    "consumer": at // steps.batch,
                    **self._told(steps, step, at // steps.batch)._asdict(),
                    **(self._at(epoch, start + at, steps.known) if batch[0] else {}),
                    "count": None if unknown else len(batch[0]),
                    "bundles": list(self._runs(*batch)),
                    "elements": list(zip(*batch, strict=True)),
                }
            )
        return {
            "step": step,
            "status": wanted,
            **self._shape(steps),
            "unknown": unknown,
            "batches": batches,
            "other_groups": [
                {"group": self._groups.index(each) + 1, "status": status}
                for each, status in zip(there, told, strict=True)
                if each is not steps and status != NOT_YET
            ],
        }

    def _runs(self, bundles: list[int], indexes: list[int]) -> Iterator[dict[str, Any]]:
        """A batch has consecutive elements of each of its bundles."""
        ends: dict[int, list[int]] = {}
        for bundle, index in zip(bundles, indexes, strict=True):
            ends.setdefault(bundle, [index, index])[1] = index
        for bundle, both in ends.items():
            yield {"bundle": bundle, "indexes": tuple(both), **self.splits_of(bundle)}

    def splits_of(self, bundle: int) -> dict[str, Any]:
        """The first and the last split, and their values if the journal knows others than these."""
        from ...journal.splits import source_size, split_value

        number, own, source = 0, bundle, {}
        if self._history.sources:
            number, epoch, own = self.known.source_of(bundle)
            name = self._history.dataset.outline.mixture.sources[number].name
            source = {"source": name, "epoch": epoch}
        part = self._parts[number]
        sources = self._datasets[part.dataset_id].definition.sources
        count = min(map(source_size, sources), default=0)
        first = own * part.bundle_splits
        splits = first, min(first + part.bundle_splits, count) - 1
        values = [
            tuple(
                source.explicit.splits[n].decode(errors="replace")
                if source.HasField("explicit")
                else split_value(source, n)
                for n in splits
            )
            for source in sources
        ]
        return {**source, "splits": splits, "values": [each for each in values if each != splits]}

    def element(self, element: str, epoch: int | None) -> dict[str, Any]:
        bundle, _, index = element.partition(":")
        if not (bundle.isdecimal() and index.isdecimal()):
            raise InvalidArgument(f"--element {element!r} is not of the form BUNDLE:INDEX")
        last = max((steps.epoch for steps in self._groups), default=0)
        found: list[dict[str, Any]] = []
        for number in range(last + 1) if epoch is None else [epoch]:
            found += self._found(number, int(bundle), int(index))
        return {"element": element, **self.splits_of(int(bundle)), "found": found}

    def record(self, record: str, epoch: int | None, read_blob: Any) -> dict[str, Any]:
        """The same of a record of a file, by the manifest that was registered; of a mixture in an
        epoch of the source that has the file."""
        file, _, row = record.rpartition(":")
        if not (file and row.isdecimal()):
            raise InvalidArgument(f"--record {record!r} is not of the form FILE:ROW")
        last = 0 if self.known.is_mixture else max((x.epoch for x in self._groups), default=0)
        found: list[dict[str, Any]] = []
        for each in range(last + 1) if epoch is None else [epoch]:
            bundle, index = self._place_of(file, int(row), each, read_blob)
            name = {"element": f"{bundle}:{index}", **self.splits_of(bundle)}
            of_job = 0 if self.known.is_mixture else each
            found += [{**name, **at} for at in self._found(of_job, bundle, index)]
        return {"record": record, "found": found}

    def _place_of(self, file: str, row: int, epoch: int, read_blob: Any) -> tuple[int, int]:
        """The bundle of a record, through the epochs of a mixture's source, and its index there."""
        from ..pipelines.files.record_places import RecordPlaces

        missing = []
        for part in self._parts:
            try:
                blob = self._datasets[part.dataset_id].definition.python_function.blob
                if not blob:
                    raise InvalidArgument("it is a graph, whose files the journal does not know")
                places = RecordPlaces(read_blob(blob))
                rank = places.rank(file, row, self._order.seed, epoch)
            except (InvalidArgument, NotFound) as error:
                missing.append(f"dataset {part.dataset_id}: {error}")
                continue
            split, at = places.split_of(rank)
            bundle = split // part.bundle_splits
            first = bundle * part.bundle_splits
            skips = {(x.split, x.element): x for x in self._history.skipped}  # by each iteration
            gone = [each for (of, _), each in skips.items() if first <= of <= split]
            uneven = gone and (self.known.is_mixture or not all(x.records for x in gone))
            if places.varies or uneven:
                raise InvalidArgument(
                    f"record {row} of {file} is in bundle {bundle}, and not each of its records is "
                    "one element: ask for --element, or for a step"
                )
            for each in gone:
                if each.split == split and 0 <= at - each.element < each.records:
                    raise NotFound(f"record {row} of {file} was skipped: {each.reason}")
            earlier = [x.records for x in gone if (x.split, x.element) < (split, at)]
            index = places.number_in(rank, first) - sum(earlier)
            through = epoch * self._order.bundles if self.known.is_mixture else 0
            return through + part.first + bundle, index
        raise NotFound("; ".join(missing))

    def _found(self, epoch: int, bundle: int, index: int) -> Iterator[dict[str, Any]]:
        """The groups that were given this element, or may have been; else who is to be given it
        next, if anybody is."""
        knowns = {id(known): known for known in (self.known, *(g.known for g in self._groups))}
        offsets, error = {}, None
        for number, known in knowns.items():
            try:
                offsets[number] = known.find(epoch, bundle, index)
            except InvalidArgument as left_out:  # of one schedule, perhaps, and not of another
                error = left_out
        if error is not None and not offsets:
            raise error
        told: list[dict[str, Any]] = []
        for steps in self._groups:
            offset = offsets.get(id(steps.known))
            if offset is not None and (got := steps.step_of(epoch, offset)) is not None:
                where = {"step": got[0], "consumer": got[1], **self._shape(steps)}
                at = self._at(epoch, offset, steps.known)
                told.append({**at, **where, **self._told(steps, *got)._asdict()})
        reached = [each for each in told if each["status"] != NOT_YET]
        offset = offsets.get(id(self.known))
        nobody = {} if offset is None else self._at(epoch, offset)
        yield from reached or told[-1:] or [{**nobody, **self._nobody()}]


def _why(stay: Any) -> str:
    """Why it is not said that this consumer was given something."""
    who = f"consumer {stay.consumer_id}"
    if stay.is_exact:
        return f"{who} left in order at position {stay.position}"
    at = "" if stay.moved_ms is None else f" at {time_text(stay.moved_ms)}"
    what = "nothing" if stay.position is None else f"up to position {stay.position}{at}"
    more = "and may be given more" if stay.left_ms is None else f"and then {stay.why}"
    return f"{who} has reported {what}, {more}"
