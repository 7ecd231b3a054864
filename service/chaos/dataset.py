"""The dataset of chaos, and the process that registers it: the only one here with TensorFlow.

Element i is its own split, of which there is one in each of the pipeline's PASSES passes. It holds
its id, and a payload of nothing but its id, so that a damaged one shows. Making it takes a worker
`seconds`, asleep: processors are scarce where a whole cluster runs on one machine.
"""

from __future__ import annotations

import pathlib
import sys

PASSES = 4
"""So that what is handed back near a pass's end is leased again in the next one."""

PAYLOAD_LENGTH = 2048
ELEMENT_BYTES = 8 * (1 + PAYLOAD_LENGTH)


def main(service: str, elements: int, seconds: float, answer: pathlib.Path) -> None:
    """Register it, and write its id to the file `answer`."""
    import tensorflow as tf
    from tensorflow.python.data.experimental.ops import testing

    from ..client.api import register_dataset

    def element(number: tf.Tensor) -> dict[str, tf.Tensor]:
        return {"id": number, "payload": tf.fill([PAYLOAD_LENGTH], number)}

    dataset = tf.data.Dataset.range(elements).map(element)
    dataset = dataset.apply(testing.sleep(int(seconds * 1e6))).repeat(PASSES)
    answer.write_text(register_dataset(service, dataset))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), pathlib.Path(sys.argv[4]))
