"""Read requests: what a consumer asks for when it opens a subscription to a task.

Each policy serves one kind of request. A new kind needs a class here, a field of `Read` in
transfer.proto that has the class's fields, and its line in `_KINDS`. Carriers don't look into
requests.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from ..blocks import Block
from ..errors import InvalidArgument, ProtocolError
from ..proto import transfer_pb2 as pb

MAX_CONSUMERS = 1 << 16
"""Bounds the consumers that read together."""

MAX_TRAINER_ID = 1_000
"""Characters. A task remembers many of them."""

MAX_INDEX = 1 << 62

UNNEEDED = MAX_INDEX
"""The position of what nobody needs yet: its run begins behind all others, and delays none."""

MAX_SLICE_RUNS = 1 << 12
"""Bounds the runs of one slice: a worker takes only small messages."""


@dataclass(frozen=True, slots=True)
class ReadRequest:
    """Which elements a subscription gives. Immutable."""

    def after(self, block: Block) -> ReadRequest:
        """The request for the blocks that follow this one.

        Raises ValueError if this block is not the next one of the request.
        """
        return self


@dataclass(frozen=True, slots=True)
class AnyBlock(ReadRequest):
    """Whatever block comes next. Elements not taken at the end may be handed back, for others."""

    hands_back: bool = False


@dataclass(frozen=True, slots=True)
class Slice(ReadRequest):
    """Elements of a bundle, and then how many elements it is known to have (bundles.py).

    `runs` are pairs of an index and a count, one behind another: ascending, disjoint. They may be
    empty: such a slice is a query, which ends when the bundle has more than `known` elements, and
    `enough` of them or a moment later, or has ended. As many as `enough` are made if there is room.
    Elements before `until` are made without regard to what readers have taken. The reader needs no
    element of the bundle before `keep`, from where on others may need some, and nothing of bundles
    whose place is before `floor`. `reader`: its number among `readers`. `alone`: no other reader
    shares the bundle, so delivered blocks may be freed. `position`: the approximate global index of
    the first requested element, for scheduling; UNNEEDED: no reader needs it yet. Raises ValueError
    for invalid numbers.
    """

    bundle: int
    place: int = 0
    runs: tuple[int, ...] = ()  # pairs, at most MAX_SLICE_RUNS
    until: int = 0
    known: int = 0
    keep: int = 0
    floor: int = 0
    reader: int = 0
    readers: int = 1
    alone: bool = False
    enough: int = 0
    position: int = 0

    def __post_init__(self) -> None:
        numbers = [self.bundle, self.place, self.until, self.known, self.keep, self.floor]
        numbers += [self.stop, self.enough, self.position]
        if not all(0 <= number <= MAX_INDEX for number in numbers):
            raise ValueError(f"a slice has numbers from 0 to {MAX_INDEX}, not {numbers}")
        if not 0 <= self.reader < self.readers <= MAX_CONSUMERS:
            raise ValueError(f"reader {self.reader} of {self.readers}; at most {MAX_CONSUMERS}")
        if len(self.runs) % 2:
            raise ValueError(f"{len(self.runs)} numbers, where each run has an index and a count")
        if len(self.runs) > 2 * MAX_SLICE_RUNS:
            raise ValueError(
                f"a slice of {len(self.runs) // 2} runs; at most {MAX_SLICE_RUNS}: ask for several"
            )
        stop = 0
        for start, count in zip(self.runs[::2], self.runs[1::2], strict=True):
            if start < stop or count < 1:
                raise ValueError(f"a run of {count} elements from {start} on, after {stop}")
            stop = start + count

    @property
    def counts(self) -> bool:
        """Whether it is a query that ends only with the bundle; no elements are kept for it."""
        return not self.runs and self.known >= MAX_INDEX

    @property
    def stop(self) -> int:
        """Behind the last of its elements."""
        return sum(self.runs[-2:])

    def after(self, block: Block) -> Slice:
        if block.bundle != self.bundle or self.runs[:1] != (block.index,):
            raise ValueError(
                f"elements from {block.index} on of bundle {block.bundle}, where those from "
                f"{self.runs[:1]} on of bundle {self.bundle} come next"
            )
        return dataclasses.replace(self, runs=runs_after(self.runs, block.count))


def runs_after(runs: tuple[int, ...], count: int) -> tuple[int, ...]:
    """The runs without their first `count` elements. Raises ValueError if they have fewer."""
    at = 0
    while count and at < len(runs) and runs[at + 1] <= count:
        count -= runs[at + 1]
        at += 2
    if not count:
        return runs[at:]
    if at == len(runs):
        raise ValueError(f"{count} elements more than a slice has")
    return (runs[at] + count, runs[at + 1] - count, *runs[at + 2 :])


@dataclass(frozen=True, slots=True)
class Rounds(ReadRequest):
    """The elements of consumer `consumer` of `of`, one a round, from `round` on (0: the task's
    first). Raises ValueError for invalid numbers.
    """

    consumer: int
    of: int
    round: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.consumer < self.of <= MAX_CONSUMERS:
            raise ValueError(
                f"consumer {self.consumer} of {self.of}; at most {MAX_CONSUMERS}, from 0"
            )
        if not 0 <= self.round <= MAX_INDEX:
            raise ValueError(f"there is no round {self.round}")

    def after(self, block: Block) -> Rounds:
        if (block.bundle, block.index) != (None, self.round):
            raise ValueError(f"an element of round {block.index}, where {self.round} comes next")
        return dataclasses.replace(self, round=self.round + block.count)


@dataclass(frozen=True, slots=True)
class Cached(ReadRequest):
    """The elements that the trainer was not given yet, of a task that every trainer reads whole.

    Raises InvalidArgument without an id.
    """

    trainer_id: str

    def __post_init__(self) -> None:
        if not self.trainer_id:
            raise InvalidArgument(
                "tf.data service cross-trainer cache requires a non-empty trainer ID."
            )
        if len(self.trainer_id) > MAX_TRAINER_ID:
            raise InvalidArgument(
                f"trainer_id {self.trainer_id!r:.50} has {len(self.trainer_id)} characters, and "
                f"may have {MAX_TRAINER_ID}"
            )


ANY = AnyBlock()

_KINDS: dict[str, type[ReadRequest]] = {
    "any": AnyBlock,
    "slice": Slice,
    "rounds": Rounds,
    "cached": Cached,
}
"""By field of `Read`, whose message has the fields of the class."""


def encode(request: ReadRequest, read: pb.Read) -> pb.Read:
    """Write the request into `read`, and return `read`."""
    field = next((name for name, kind in _KINDS.items() if type(request) is kind), None)
    if field is None:
        raise TypeError(f"{request!r} has no encoding")
    asked = getattr(read, field)
    asked.SetInParent()
    for name in request.__dataclass_fields__:
        if name == "runs":
            asked.runs.extend(getattr(request, name))
        else:
            setattr(asked, name, getattr(request, name))
    return read


def decode(read: pb.Read) -> ReadRequest:
    """The request of a `read`. Raises ProtocolError."""
    if (field := read.WhichOneof("order") or "") not in _KINDS:
        raise ProtocolError(
            f"task {read.task_id} was asked for by a request of a kind not known here"
        )
    asked, kind = getattr(read, field), _KINDS[field]
    values = {name: getattr(asked, name) for name in kind.__dataclass_fields__}
    if "runs" in values:
        values["runs"] = tuple(values["runs"])
    try:
        return kind(**values)
    except ValueError as error:
        raise ProtocolError(f"task {read.task_id} was asked for: {error}") from None
