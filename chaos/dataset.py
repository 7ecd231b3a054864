"""The datasets of chaos, and the process that registers them, with TensorFlow.

In the trainers' dataset, element i is one split in each of PASSES passes. Those that read at least
once have one pass of it. Crowds read a dataset
with one pass, an infinite one, and a Python dataset whose splits have several elements; they save
one with one pass. An element holds its id, and a payload that repeats the id, to reveal damage. A
worker sleeps `seconds` for each: processors are scarce with a whole cluster on one machine.
"""

from __future__ import annotations

import pathlib
import sys

from . import crowd, saves
from .function import PAYLOAD_LENGTH

PASSES = 4
"""Several, so that splits returned near a pass's end are leased again in the next one."""

ELEMENT_BYTES = 8 * (1 + PAYLOAD_LENGTH)


def main(service: str, elements: int, seconds: float, answer: pathlib.Path) -> None:
    """Register the trainers' and the crowds' datasets; write their ids to the file `answer`, and a
    save's request to another file."""
    import tensorflow as tf
    from tensorflow.python.data.experimental.ops import testing

    from ..service.client.api import register_dataset
    from ..service.client.saves import save_request
    from .function import RETRIES, SPLIT_ELEMENTS
    from .function import elements as elements_of

    sleep = testing.sleep(int(seconds * 1e6))

    def element(number: tf.Tensor) -> tf.data.Dataset:
        made = {"id": number, "payload": tf.fill([PAYLOAD_LENGTH], number)}
        return tf.data.Dataset.from_tensors(made).apply(sleep).take(1)

    # Sleep within flat_map: directly after the source, a sleep holds a lock that cancelling needs.
    of_trainers = tf.data.Dataset.range(elements).flat_map(element).repeat(PASSES)
    of_claimers = tf.data.Dataset.range(elements).flat_map(element)
    of_crowds = tf.data.Dataset.range(crowd.ELEMENTS).flat_map(element)
    endless = tf.data.Dataset.counter().flat_map(element)
    datasets = (of_trainers, of_claimers, of_crowds, endless)
    ids = [register_dataset(service, dataset) for dataset in datasets]
    to_save = tf.data.Dataset.range(saves.ELEMENTS).flat_map(element)
    request = save_request(to_save, str(answer.parent), "AUTO")
    saves.request_in(answer.parent).write_bytes(request.SerializeToString())
    spec = {
        "id": tf.TensorSpec([], tf.int64),
        "payload": tf.TensorSpec([PAYLOAD_LENGTH], tf.int64),
    }
    python = register_dataset(  # does not call the function, which would kill this process
        service, elements_of, splits=range(crowd.ELEMENTS // SPLIT_ELEMENTS),
        element_spec=spec, on_error="retry", limit=RETRIES,
    )  # fmt: skip
    answer.write_text(" ".join([*ids, python]))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), pathlib.Path(sys.argv[4]))
