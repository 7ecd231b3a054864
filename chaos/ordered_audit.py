"""Checks what ordered trainers got (ordered.py) against the one order of all elements.

A trainer that begins at a position must be given its batches of what follows, to the epoch's end:
nothing else, nothing twice, nothing late. The order is computed by service/order.py. Independent of
that, no two trainers may ever have had different elements at one position, every position that all
trainers of a group have passed must have come, and each whole epoch has each element once. The
journal has nothing of an ordered read but who joined, and no fault excuses anything. This is pure,
as the audit is.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from functools import lru_cache

from ..service.order import EpochOrder, permuted
from .audit import Verdict
from .history import History, listed
from .members import Life
from .ordered import BLOCK_LENGTH, CYCLE_LENGTH, JOB, SEED
from .records import Began, OrderedGroup, OrderedStep, Record
from .trainer import BUNDLE_SPLITS


def check_order(trainers: Sequence[Iterable[Record]], *, elements: int) -> Verdict:
    """Find every broken promise to the trainers, whose records are in the order of their indexes.

    The elements of each epoch are 0 … `elements` − 1, one a split. `twice` counts what came again
    because a trainer or group began again before it.
    """
    audit = _OrderAudit(elements)
    for index, records in enumerate(trainers):
        audit.take(index, records)
    audit.check_whole()
    return audit.verdict


def consumers(history: History, lives: Collection[Life], wall_s: float) -> dict[int, str]:
    """The processes of the consumers of ordered reads, by the consumers' ids."""
    return {
        stay.consumer_id: life.name
        for stay in history.stays.values()
        for life in lives
        if stay.member is not None and stay.joined_ms is not None
        if life.role == "ordered" and life.number == stay.member.index
        if life.started_s <= stay.joined_ms / 1000 - wall_s <= (life.ended_s or math.inf)
    }


class _OrderAudit:
    def __init__(self, elements: int) -> None:
        self.verdict = Verdict([])
        self._elements = elements
        self._at: dict[int, int] = {}  # the element that came, by position
        self._groups: dict[int, OrderedGroup] = {}
        self._passed: defaultdict[int, dict[int, int]] = defaultdict(dict)
        """The furthest position, by group and index."""
        self._ended: dict[int, int] = {}  # the group whose epoch an index has read to the end last

    def take(self, index: int, records: Iterable[Record]) -> None:
        """Follow one trainer."""
        group, position, end, follows = None, 0, 0, False
        for record in records:
            match record:
                case Began():
                    group, position, follows = record.group, record.position, True
                    end = (position // self._elements + 1) * self._elements
                    self._groups[group.number] = group
                    self._ended.pop(index, None)
                case OrderedStep() if follows:
                    assert group is not None
                    follows = self._is_due(index, group, position, end, record)
                    position = record.position
                    if follows and not record.ids:
                        self._ended[index] = group.number

    def _is_due(
        self, index: int, group: OrderedGroup, position: int, end: int, step: OrderedStep
    ) -> bool:
        """Whether this is the step at a position of an epoch with that end."""
        who = f"consumer {index} of {group.consumers} (group {group.number})"
        self.verdict.take(step.ids, step.damaged, f"{JOB}: {who}")
        first = min(position + index * group.batch_size, end)
        begin = end - self._elements
        due = self._order(begin // self._elements)[first - begin :][: group.batch_size]
        for at, number in enumerate(step.ids, first):
            if (before := self._at.setdefault(at, number)) != number:
                self._broken(f"position {at} had the element {before}, and {number} for {who}")
        if step.ids != due:
            self._broken(
                f"{who} got {step.ids or 'the end'} at position {first}, where {due or 'the end'} "
                "was due"
            )
            return False
        after = min(position + group.consumers * group.batch_size, end) if due else end
        if step.position != after:
            self._broken(f"{who} is at position {step.position}, and should be at {after}")
            return False
        passed = self._passed[group.number]
        passed[index] = max(after, passed.get(index, 0))
        return True

    def check_whole(self) -> None:
        """Check that nothing is missing, and that the last group came to an end."""
        if not self._groups:
            self._broken("nobody began to read")
            return
        passed = max(
            min(self._passed[group.number].get(i, group.position) for i in range(group.consumers))
            for group in self._groups.values()
        )
        gaps = [position for position in range(passed) if position not in self._at]
        self.verdict.lose(gaps, JOB, "these positions were passed, and nobody had them")
        self.verdict.epochs = passed // self._elements
        for epoch in range(self.verdict.epochs):
            begin = epoch * self._elements
            had = {self._at.get(at) for at in range(begin, begin + self._elements)}
            if lost := sorted({*range(self._elements)} - had):
                self._broken(f"epoch {epoch}: {listed(lost)} lost, and others came twice")
        self.verdict.twice = self.verdict.delivered - len(self._at)
        last = self._groups[max(self._groups)]
        for index in range(last.consumers):
            if self._ended.get(index) != last.number:
                self._broken(f"consumer {index} of group {last.number} did not come to an end")

    @lru_cache(maxsize=64)  # noqa: B019 - as long as the audit
    def _order(self, epoch: int) -> list[int]:
        """The elements of an epoch."""
        size, bundles = BUNDLE_SPLITS, -(-self._elements // BUNDLE_SPLITS)
        sequence = [permuted(place, bundles, SEED, epoch) for place in range(bundles)]
        lengths = [min(size, self._elements - size * bundle) for bundle in sequence]
        order = EpochOrder(bundles, CYCLE_LENGTH, BLOCK_LENGTH, lengths)
        places, indexes = order.elements(0, order.known_until)
        return [
            size * sequence[place] + index
            for place, index in zip(places.tolist(), indexes.tolist(), strict=True)
        ]

    def _broken(self, promise: str) -> None:
        self.verdict.broken.append(f"{JOB}: {promise}")
