"""Saved states of ordered reads: JSON that has a version and a checksum.

A *description* is the part of a state that says what a position is one in.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from typing import Any

from ...journal.datasets import MAX_POSITION
from ..errors import FailedPrecondition, InvalidArgument
from .positions import OrderedRead

VERSION = 2
"""In 1, a start_step of 0 was a step to begin at; in 2 it is none."""


def state_of(read: OrderedRead) -> dict[str, Any]:
    """Its position, and what it is a position in: JSON of under 300 bytes."""
    position, step, in_epoch = read.start
    start: dict[str, Any] = {"position": position, "start_step": step or 0, "in_epoch": in_epoch}
    if read.sources:
        is_read = read.changes is not None
        before = read.schedule().weights_before(position) if is_read else None
        start["weights"] = before if is_read or read.weights is None else read.weights[1]
    return sealed({**start, **_described(read)})


def description_of(read: OrderedRead) -> str:
    """What a position of this read is one in: JSON."""
    return json.dumps(sealed(_described(read)))


def state_at(description: str, position: int = 0, **start: Any) -> dict[str, Any]:
    """The state at this position in what was described, by whichever version. Raises
    InvalidArgument for what is no description."""
    try:
        described = json.loads(description)
    except (ValueError, RecursionError):
        raise no_state(description) from None
    return sealed({**opened(described), "position": position, **start})


def _described(read: OrderedRead) -> dict[str, Any]:
    spec = read.epoch.spec if read.epoch is not None else read.spec
    return {
        "dataset": read.dataset,
        "order": [
            *(spec.seed, int(spec.shuffle), spec.cycle_length, spec.block_length),
            *(spec.bundle_splits, spec.bundles or read.bundles),
        ],
        "step": (read.batch_size or 1) * read.num_consumers,
    }


def load(read: OrderedRead, state: Any) -> None:
    """Have the read go on at the state's position. Raises InvalidArgument for what is no such
    state, and FailedPrecondition for one of another dataset, order or global batch."""
    state = opened(state)
    position: Any = state.get("position")
    start_step, order = state.get("start_step"), state.get("order")
    in_epoch = state.get("in_epoch", False)  # older states do not say it
    numbers = [position, 0 if start_step is None else start_step]
    if not (
        isinstance(order, list)
        and len(order) == 6
        and isinstance(in_epoch, bool)
        and all(
            type(number) is int and 0 <= number <= MAX_POSITION for number in (*numbers, *order[1:])
        )
    ):
        raise no_state(state)
    mine = [read.seed, int(read.shuffle), read.cycle_length, read.block_length]
    if read.bundle_splits:
        mine.append(read.bundle_splits)
    begin = f"start_position={position}"
    if start_step:  # it counts batches of another size, or of another dataset
        begin = "start_position, in elements,"
    for what, saved, here in (
        ("dataset", state.get("dataset"), read.dataset),
        ("order (seed, shuffle, cycle_length, block_length, bundle_splits)",
         order[: len(mine)], mine),
        ("global batch (batch_size × num_consumers)", state.get("step"),
         (read.batch_size or 1) * read.num_consumers),
    ):  # fmt: skip
        if saved != here:
            raise FailedPrecondition(
                f"the state is of another {what}: {saved!r}, and this read has {here!r}: read "
                f"as the saved read did, or give {begin} instead of the state"
            )
    read.bundle_splits, read.bundles = order[4], order[5]
    if read.bundles not in (0, len(read.lengths)):  # copies share those of bundles of one size
        read.lengths = [-1]
    read.move_to(position, start_step or None, in_epoch)
    weights = state.get("weights")
    read.weights = None if weights is None else (position, weights)


def sealed(content: Mapping[str, Any]) -> dict[str, Any]:
    """The content with its version and checksum."""
    state = {"forebay": VERSION, **content}
    return {**state, "crc32": _checksum(_canonical(state))}


def opened(state: Any) -> dict[str, Any]:
    """What was sealed, by whichever version, as JSON has it. Raises InvalidArgument for anything
    else."""
    if not (isinstance(state, dict) and "forebay" in state):
        raise no_state(state)
    version = state["forebay"]
    if type(version) is not int or not 1 <= version <= VERSION:
        raise InvalidArgument(
            f"the state is of version {_shown(version)}, and this is version {VERSION}: read it "
            "with the Forebay that saved it"
        )
    try:
        canonical = _canonical({key: part for key, part in state.items() if key != "crc32"})
    except (TypeError, ValueError, RecursionError):
        raise no_state(state) from None
    if state.get("crc32") != (checksum := _checksum(canonical)):
        raise InvalidArgument(
            f"the state was edited or damaged: it says that its checksum is "
            f"{_shown(state.get('crc32'))}, and the rest of it has {checksum!r}. Give what "
            "state_dict() returned; to begin elsewhere, leave the state out, and give "
            "start_position= or start_step="
        )
    content: dict[str, Any] = json.loads(canonical)
    del content["forebay"]
    return content


def no_state(state: Any) -> InvalidArgument:
    """The error for what no state_dict() has returned."""
    return InvalidArgument(
        f"{_shown(state)} is no state of an ordered read: give what state_dict() returned"
    )


def _canonical(content: Mapping[str, Any]) -> str:
    return json.dumps(content, sort_keys=True, separators=(",", ":"))


def _checksum(canonical: str) -> str:
    return f"{zlib.crc32(canonical.encode()):08x}"


def _shown(value: Any) -> str:
    try:
        return f"{value!r:.200}"
    except (ValueError, RecursionError):  # an integer of thousands of digits, or nested too deeply
        return f"a value of type {type(value).__name__} that cannot be written"
