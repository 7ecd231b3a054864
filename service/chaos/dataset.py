"""The datasets of chaos, and the process that registers them: the only one here with TensorFlow.

Element i is its own split, of which there is one in each of the pipeline's PASSES passes; a crowd's
dataset has one pass, as has what it saves, another one of crowds no end, and one of crowds is a
Python dataset, whose splits have several elements. It holds its id, and a payload of nothing but
its id, so that a damaged one shows. Making it takes a worker `seconds`, asleep: processors are
scarce where a whole cluster runs on one machine.
"""

from __future__ import annotations

import pathlib
import sys

from . import crowd, saves
from .function import PAYLOAD_LENGTH

PASSES = 4
"""So that what is handed back near a pass's end is leased again in the next one."""

ELEMENT_BYTES = 8 * (1 + PAYLOAD_LENGTH)


def main(service: str, elements: int, seconds: float, answer: pathlib.Path) -> None:
    """Register the trainers' and the crowds', and write their ids to the file `answer`, and how to
    ask for a save to another one."""
    import tensorflow as tf
    from tensorflow.python.data.experimental.ops import testing

    from ..client.api import register_dataset
    from ..client.saves import save_request
    from .function import RETRIES, SPLIT_ELEMENTS
    from .function import elements as elements_of

    sleep = testing.sleep(int(seconds * 1e6))

    def element(number: tf.Tensor) -> tf.data.Dataset:
        made = {"id": number, "payload": tf.fill([PAYLOAD_LENGTH], number)}
        return tf.data.Dataset.from_tensors(made).apply(sleep).take(1)

    # Not asleep on top of the source, which keeps a lock, that cancelling needs, while it waits.
    of_trainers = tf.data.Dataset.range(elements).flat_map(element).repeat(PASSES)
    of_crowds = tf.data.Dataset.range(crowd.ELEMENTS).flat_map(element)
    endless = tf.data.Dataset.counter().flat_map(element)
    datasets = (of_trainers, of_crowds, endless)
    ids = [register_dataset(service, dataset) for dataset in datasets]
    to_save = tf.data.Dataset.range(saves.ELEMENTS).flat_map(element)
    request = save_request(to_save, str(answer.parent), "AUTO")
    saves.request_in(answer.parent).write_bytes(request.SerializeToString())
    spec = {
        "id": tf.TensorSpec([], tf.int64),
        "payload": tf.TensorSpec([PAYLOAD_LENGTH], tf.int64),
    }
    python = register_dataset(  # it is not called here, where it would kill us
        service, elements_of, splits=range(crowd.ELEMENTS // SPLIT_ELEMENTS),
        element_spec=spec, on_error="retry", limit=RETRIES,
    )  # fmt: skip
    answer.write_text(" ".join([*ids, python]))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), pathlib.Path(sys.argv[4]))
