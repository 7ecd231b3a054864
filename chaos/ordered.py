"""An ordered trainer of chaos: one of a group that reads in one global order, epoch after epoch.

It records each batch with the position behind its step, and now and then its saved state. A process
that was killed is followed by one that goes on at one of its states in this group, not always the
last one, or where the group began. All trainers of a group may be ended at once, and another group
begins at a state that all had passed (`next_group`), perhaps with another number of consumers.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import random
import signal
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import msgspec

from ..service.client.options import OrderArguments, read_options
from ..service.client.reader import OrderedIterator, Reader, name_of_job
from ..service.errors import Unavailable
from .records import Began, OrderedGroup, OrderedStep, Record, Recorder, Started, read_records
from .trainer import BUNDLE_SPLITS, cut_connections

JOB = "chaos ordered"
SEED, CYCLE_LENGTH, BLOCK_LENGTH = 7, 4, 3
MOST_CONSUMERS = 3
GLOBAL_BATCH = 12
"""Elements of a step, of any number of consumers, unless each has OTHER_BATCH in its batch."""

OTHER_BATCH = 5
FIRST_GROUP = OrderedGroup(number=1, consumers=2, batch_size=GLOBAL_BATCH // 2)
STEP_S = 0.05
"""What a trainer works on each batch."""

SAVES = 0.1
"""The fraction of steps after which a trainer saves its state."""

OLDER = 10
"""A trainer or group goes on at one of so many latest states."""

Saved = tuple[int, dict[str, Any] | None]
"""A position, and the state that was saved there; None: at the training's beginning."""


class OrderedTask(msgspec.Struct, frozen=True):
    """The arguments of an ordered trainer's process."""

    name: str  # of the process
    service: str
    dataset_id: str
    elements: int  # of an epoch
    index: int  # among the consumers of the group
    group: OrderedGroup
    records: str  # the path of its file
    stop: str  # once this path exists, the present epoch is the last


def main(task: OrderedTask) -> None:
    path, group = pathlib.Path(task.records), task.group
    position, state = _own_state(list(read_records(path)), group)
    recorder = Recorder(path)
    recorder.add(Started(task.name))
    where, state = _beginning(position, state, group, task.elements)
    order: OrderArguments = {
        "ordered": True, "seed": SEED, "cycle_length": CYCLE_LENGTH, "block_length": BLOCK_LENGTH,
        "bundle_splits": BUNDLE_SPLITS, "batch_size": group.batch_size,
    }  # fmt: skip
    order.update(where)
    options = read_options(
        job_name=JOB, consumer_index=task.index, num_consumers=group.consumers, **order
    )
    name = name_of_job(task.dataset_id, JOB)
    # One reader for all epochs: it knows the journal, as a trainer of a framework does.
    reader = Reader(task.service, task.dataset_id, name, options)
    while True:
        with _opened(reader) as batches:
            if state is not None:
                batches.load_state_dict(state)
            recorder.add(Began(group, position))
            position, state = _read_epoch(batches, recorder), None
        if os.path.exists(task.stop):
            break
    recorder.close()


def _opened(reader: Reader) -> OrderedIterator:
    while True:
        with contextlib.suppress(Unavailable):  # a partition lasts longer than it has patience
            return OrderedIterator(reader)


def _read_epoch(batches: OrderedIterator, recorder: Recorder) -> int:
    """Read to the epoch's end, and record all. Returns the position there."""

    def step(ids: list[int], damaged: list[int]) -> None:
        state = batches.state_dict() if random.random() < SAVES else None
        recorder.add(OrderedStep(batches.position, ids, damaged, state))
        time.sleep(STEP_S)

    for batch in batches:
        ids = batch["id"]
        whole = (batch["payload"] == ids[:, None]).all(axis=1)
        step(ids.tolist(), ids[~whole].tolist())
    step([], [])
    return batches.position


def _own_state(records: list[Record], group: OrderedGroup) -> Saved:
    """Where a trainer with these records goes on in this group."""
    states: list[Saved] = [(group.position, group.state)]
    states += [
        (step.position, step.state)
        for of, step in steps(records)
        if of.number == group.number and step.state is not None
    ]
    return random.choice(states[-OLDER:])


def _beginning(
    position: int, state: dict[str, Any] | None, group: OrderedGroup, elements: int
) -> tuple[OrderArguments, dict[str, Any] | None]:
    """One of the ways to begin there: arguments of the read, or a state to load."""
    of_step = group.consumers * group.batch_size
    epoch, offset = divmod(position, elements)
    is_over = state is not None and state["in_epoch"] and not offset  # with an empty rest before
    if state is not None and state["step"] == of_step and not is_over and random.random() < 0.6:
        return {}, state
    ways: list[OrderArguments] = [{"start_position": position}]
    if offset % of_step == 0:
        ways.append({"start_step": epoch * -(-elements // of_step) + offset // of_step})
    return random.choice(ways), None


def steps(records: Iterable[Record]) -> Iterator[tuple[OrderedGroup, OrderedStep]]:
    """A trainer's steps, with the group in which it took them."""
    group = FIRST_GROUP
    for record in records:
        if isinstance(record, Began):
            group = record.group
        elif isinstance(record, OrderedStep):
            yield group, record


def next_group(
    group: OrderedGroup, consumers: int, trainers: Sequence[list[Record]]
) -> OrderedGroup:
    """A group of so many consumers, which goes on at a state that the whole group has passed."""
    passed = min(
        max(
            (step.position for of, step in steps(records) if of.number == group.number),
            default=group.position,
        )
        for records in trainers[: group.consumers]
    )
    states: list[Saved] = [
        (step.position, step.state)
        for records in trainers
        for _, step in steps(records)
        if step.state is not None and step.position <= passed
    ]
    states = sorted([(group.position, group.state), *states], key=lambda saved: saved[0])
    position, state = random.choice(states[-OLDER:])
    batch_size = random.choice([*[GLOBAL_BATCH // consumers] * 3, OTHER_BATCH])
    return OrderedGroup(group.number + 1, consumers, batch_size, position, state)


if __name__ == "__main__":
    signal.signal(signal.SIGUSR1, cut_connections)
    main(msgspec.json.decode(sys.argv[1], type=OrderedTask))
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # see trainer.py
