"""The datasets of chaos, and the process that registers them, with TensorFlow.

In the trainers' dataset, element i is one split in each of PASSES passes. Those that read at least
once, or in order, have one pass of it. An element holds its id, and a payload that repeats the id,
to reveal damage. A worker sleeps `seconds` for each: processors are scarce with a whole cluster on
one machine.
"""

from __future__ import annotations

import pathlib
import sys

PASSES = 4
"""Several, so that splits returned near a pass's end are leased again in the next one."""

PAYLOAD_LENGTH = 2048
ELEMENT_BYTES = 8 * (1 + PAYLOAD_LENGTH)


def main(service: str, elements: int, seconds: float, answer: pathlib.Path) -> None:
    """Register the datasets; write their ids to the file `answer`."""
    import tensorflow as tf
    from tensorflow.python.data.experimental.ops import testing

    from ..service.client.api import register_dataset

    sleep = testing.sleep(int(seconds * 1e6))

    def element(number: tf.Tensor) -> tf.data.Dataset:
        made = {"id": number, "payload": tf.fill([PAYLOAD_LENGTH], number)}
        return tf.data.Dataset.from_tensors(made).apply(sleep).take(1)

    # Sleep within flat_map: directly after the source, a sleep holds a lock that cancelling needs.
    one_pass = tf.data.Dataset.range(elements).flat_map(element)
    ids = [register_dataset(service, each) for each in (one_pass.repeat(PASSES), one_pass)]
    answer.write_text(" ".join(ids))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), pathlib.Path(sys.argv[4]))
