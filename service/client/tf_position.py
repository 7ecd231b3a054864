"""The position of an ordered read as an object that `tf.train.Checkpoint` saves and restores."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import tensorflow as tf
from tensorflow.python.ops.resource_variable_ops import ResourceVariable

from ..errors import FailedPrecondition, InvalidArgument
from .options import ReadArguments
from .positions import OrderedRead
from .saved_states import description_of, load, state_at


class OrderedPosition(tf.Module):  # type: ignore[misc]
    """How far a training has come in an ordered read; `tf.train.Checkpoint` saves it::

        position = service.OrderedPosition()
        checkpoint = tf.train.Checkpoint(model=model, position=position)
        checkpoint.restore(tf.train.latest_checkpoint(directory))
        dataset = service.from_dataset_id(
            "distributed_epoch", target, dataset_id,
            ordered=True, batch_size=32, add_position=True, start_position=position,
        )
        for batch, behind in dataset.prefetch(2):
            train(batch)
            position.assign(behind)

    It is a number of elements, over all consumers and epochs: 0 at first, and `int(position)`
    then. `from_dataset_id`, `distribute` and `distribute_across` take it as `start_position`,
    together with `add_position=True`. The first iteration begins where the position is then, and so
    does one behind an iteration that was left early. Behind one that was read to its end comes the
    next epoch. All consumers have the same position after the same number of steps. One of them may
    save it for all.

    A checkpoint of it also says what it is a position in. Another dataset, order (`seed`,
    `shuffle`, `cycle_length`, `block_length`, `bundle_splits`) or global batch is refused with
    FailedPrecondition, when the dataset is made or read. To go on with another global batch,
    give `start_position=int(position)`.
    """

    def __init__(self) -> None:
        super().__init__()
        with tf.device("CPU"):
            self._elements = tf.Variable(0, dtype=tf.int64, trainable=False)
            self._read = _Read()

    def assign(self, position: Any) -> None:
        """The training has used all elements before this position.

        Args:
          position: int64, of any shape: what came with the element or batch that was used last. Of
            several, such as those of the replicas of a `tf.distribute.Strategy`, the greatest
            counts. A `tf.function` may call this. In a step in which only other processes have
            data, `MultiWorkerMirroredStrategy` gives 0, which stands for the epoch's end.

        Raises ValueError for another dtype.
        """
        several = isinstance(position, tf.distribute.DistributedValues)
        parts = position.values if several else (position,)
        flat = [tf.reshape(tf.convert_to_tensor(part, tf.int64), [-1]) for part in parts]
        greatest = tf.reduce_max(tf.concat(flat, 0))
        self._elements.assign(tf.where(greatest > 0, greatest, self._read.end))

    def __int__(self) -> int:
        with tf.init_scope():
            return int(self._elements.numpy())

    def begin(self, ordered: OrderedRead) -> None:
        """Have the read begin here. Raises FailedPrecondition for a position in another one, and
        InvalidArgument for a damaged one."""
        if self._read.described:
            load(ordered, state_at(self._read.described, int(self)))
        else:
            ordered.move_to(int(self))

    def describe(self, ordered: OrderedRead) -> None:
        """It is a position in this read, which has begun. Raises FailedPrecondition if it is one in
        another read, too."""
        described, before = description_of(ordered), self._read.described
        if before and state_at(before) != state_at(described):
            raise FailedPrecondition(
                f"one OrderedPosition for two reads, {before} and {described}: make one for each"
            )
        self._read.described = described
        if ordered.epoch is not None and ordered.epoch.over:
            self._read.end.assign(ordered.position())


class _Read(tf.train.experimental.PythonState):  # type: ignore[misc]
    """What the position is one in: the rest of a saved state, as JSON."""

    described = ""

    def __init__(self) -> None:
        super().__init__()
        # The end of the epoch that was read last. No strategy mirrors it, and no checkpoint has it.
        self.end = ResourceVariable(0, dtype=tf.int64, trainable=False)

    def serialize(self) -> str:
        return self.described

    def deserialize(self, string_value: Any) -> None:
        self.described = tf.compat.as_str(string_value)


@runtime_checkable
class KeepsPosition(Protocol):
    """Where the iterations of an ordered dataset begin."""

    def begin(self, ordered: OrderedRead) -> None:
        """Have the read begin here. Raises ForebayError if it cannot."""

    def describe(self, ordered: OrderedRead) -> None:
        """It is a position in this read, which has begun, or has come to its epoch's end."""


def take_position(arguments: ReadArguments, *, add_position: bool) -> KeepsPosition | None:
    """Takes an object that is given as start_position out of the arguments. Raises
    InvalidArgument."""
    position = arguments.get("start_position")
    if not isinstance(position, KeepsPosition):
        return None
    if isinstance(position, OrderedPosition) and not add_position:
        raise InvalidArgument(
            "start_position is an OrderedPosition, which is assigned the positions that come with "
            "the elements: give add_position=True as well, or start_position=int(position)"
        )
    if (start_step := arguments.get("start_step")) is not None:
        raise InvalidArgument(
            f"start_position is an object, and start_step={start_step!r}: give one of them"
        )
    arguments["start_position"] = 0
    return position
