"""Orders: what a consumer asks for when it opens a subscription of a task.

A policy serves one kind of order. Another kind is another class here, with its field of `Read`
in transfer.proto; who carries orders does not look into them.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from ..blocks import Block
from ..errors import InvalidArgument, ProtocolError
from ..proto import transfer_pb2 as pb

MAX_STRIDE = 1 << 16
"""For a run of a bundle is begun for as many readers, if a whole group reads it."""

MAX_INDEX = 1 << 62

BundleReader = tuple[int, int]
"""Which of those that read a bundle together: their stride, and the remainder of its indexes."""


@dataclass(frozen=True, slots=True)
class Order:
    """What a subscription gives. Immutable."""

    def after(self, block: Block) -> Order:
        """The order of who has received this block of it, and now wants what follows.

        Raises ValueError if the block is not what comes next in this order.
        """
        return self


@dataclass(frozen=True, slots=True)
class AnyBlock(Order):
    """Whatever block comes next. What is not taken in the end may be handed back, for others."""

    hands_back: bool = False


@dataclass(frozen=True, slots=True)
class Addressed(Order):
    """Elements `index`, `index + stride`, … of a bundle, to its end.

    The `generation` grows whenever its readers go back, or are others: what is of an older one is
    ended. Raises ValueError for numbers that cannot be.
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
        """The orders of all that read the bundle together, from `index` on."""
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
    """From `round` on, which counts a task's from 0, one element a round: what is consumer
    `consumer`'s of `of`. Raises ValueError for numbers that cannot be.
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
    """What a trainer has not been given of a task that every trainer reads all of.

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
    """Writes the order into `read`, and returns it."""
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
