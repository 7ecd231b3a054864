"""Orders: what a consumer asks for when it opens a subscription to a task.

Each policy serves one kind of order. A new kind needs a class here and a field of `Read` in
transfer.proto. Carriers don't look into orders.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from ..blocks import Block
from ..errors import InvalidArgument, ProtocolError
from ..proto import transfer_pb2 as pb

MAX_STRIDE = 1 << 16
"""Bounds the readers of a bundle's run: a whole group has one for each remainder of its stride."""

MAX_INDEX = 1 << 62

BundleReader = tuple[int, int]
"""A reader of a bundle: its group's stride, and the remainder of the reader's indexes."""


@dataclass(frozen=True, slots=True)
class Order:
    """Which elements a subscription gives. Immutable."""

    def after(self, block: Block) -> Order:
        """The order for the blocks that follow this one.

        Raises ValueError if this block is not the next one of the order.
        """
        return self


@dataclass(frozen=True, slots=True)
class AnyBlock(Order):
    """Whatever block comes next. Elements not taken at the end may be handed back, for others."""

    hands_back: bool = False


@dataclass(frozen=True, slots=True)
class Addressed(Order):
    """Elements `index`, `index + stride`, … of a bundle, to its end.

    The `generation` grows whenever the readers go back or change, and ends what belongs to older
    ones. Raises ValueError for invalid numbers.
    """

    bundle: int
    index: int = 0
    stride: int = 1
    generation: int = 0

    def __post_init__(self) -> None:
        if not (0 <= self.bundle <= MAX_INDEX and 0 <= self.index <= MAX_INDEX):
            raise ValueError(f"there is no element {self.index} of a bundle {self.bundle}")
        if not 0 <= self.generation <= MAX_INDEX:
            raise ValueError(f"there is no generation {self.generation}")
        if not 1 <= self.stride <= MAX_STRIDE:
            raise ValueError(f"a stride of {self.stride}; it is 1 to {MAX_STRIDE}")

    @property
    def reader(self) -> BundleReader:
        return self.stride, self.index % self.stride

    def together(self) -> list[Addressed]:
        """The orders of all readers of the group, from `index` on."""
        return [dataclasses.replace(self, index=self.index + i) for i in range(self.stride)]

    def after(self, block: Block) -> Addressed:
        if (block.bundle, block.index) != (self.bundle, self.index):
            raise ValueError(
                f"element {block.index} of bundle {block.bundle}, where bundle {self.bundle} from "
                f"{self.index} on was asked for"
            )
        return dataclasses.replace(self, index=block.index + block.count * self.stride)


@dataclass(frozen=True, slots=True)
class Rounds(Order):
    """The elements of consumer `consumer` of `of`, one a round, from `round` on (0: the task's
    first). Raises ValueError for invalid numbers.
    """

    consumer: int
    of: int
    round: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.consumer < self.of <= MAX_STRIDE:
            raise ValueError(f"consumer {self.consumer} of {self.of}; at most {MAX_STRIDE}, from 0")
        if not 0 <= self.round <= MAX_INDEX:
            raise ValueError(f"there is no round {self.round}")

    def after(self, block: Block) -> Rounds:
        if (block.bundle, block.index) != (None, self.round):
            raise ValueError(f"an element of round {block.index}, where {self.round} comes next")
        return dataclasses.replace(self, round=self.round + block.count)


@dataclass(frozen=True, slots=True)
class Cached(Order):
    """The elements that the trainer was not given yet, of a task that every trainer reads whole.

    Raises InvalidArgument without an id.
    """

    trainer_id: str

    def __post_init__(self) -> None:
        if not self.trainer_id:
            raise InvalidArgument(
                "tf.data service cross-trainer cache requires a non-empty trainer ID."
            )


ANY = AnyBlock()


def encode(order: Order, read: pb.Read) -> pb.Read:
    """Write the order into `read`, and return `read`."""
    match order:
        case AnyBlock(hands_back):
            read.any.hands_back = hands_back
            read.any.SetInParent()
        case Addressed(bundle, index, stride, generation):
            addressed = read.addressed
            addressed.bundle, addressed.index, addressed.stride = bundle, index, stride
            addressed.generation = generation
        case Rounds(consumer, of, number):
            rounds = read.rounds
            rounds.consumer, rounds.of, rounds.round = consumer, of, number
        case Cached(trainer_id):
            read.cached.trainer_id = trainer_id
        case _:
            raise TypeError(f"{order!r} has no encoding")
    return read


def decode(read: pb.Read) -> Order:
    """The order of a `read`. Raises ProtocolError."""
    match read.WhichOneof("order"):
        case "any":
            return AnyBlock(read.any.hands_back)
        case "addressed":
            return _of(read, Addressed, ("bundle", "index", "stride", "generation"))
        case "rounds":
            return _of(read, Rounds, ("consumer", "of", "round"))
        case "cached":
            return _of(read, Cached, ("trainer_id",))
        case _:
            raise ProtocolError(f"task {read.task_id} was asked for in an order not known here")


def _of(read: pb.Read, kind: type[Order], fields: tuple[str, ...]) -> Order:
    asked = getattr(read, read.WhichOneof("order") or "")
    try:
        return kind(**{field: getattr(asked, field) for field in fields})
    except ValueError as error:
        raise ProtocolError(f"task {read.task_id} was asked for: {error}") from None
