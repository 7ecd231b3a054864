"""Train on handwritten digits with Keras: `fit` and `evaluate` read by the service.

python examples/digits_keras.py
"""

import keras
import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits

from forebay import service

EPOCHS, TESTED, BATCH = 10, 300, 32


def main() -> None:
    pixels, labels = load_digits(return_X_y=True)
    pixels = (pixels / 16).astype(np.float32)
    training = (
        tf.data.Dataset.from_tensor_slices((pixels[TESTED:], labels[TESTED:]))
        .shuffle(2000)
        .batch(BATCH)
    )
    tested = tf.data.Dataset.from_tensor_slices((pixels[:TESTED], labels[:TESTED])).batch(BATCH)
    model = keras.Sequential(
        [keras.Input([64]), keras.layers.Dense(64, "relu"), keras.layers.Dense(10, "softmax")]
    )
    model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    with (
        service.DispatchServer() as dispatcher,
        service.WorkerServer(service.WorkerConfig(dispatcher.target)),
        service.WorkerServer(service.WorkerConfig(dispatcher.target)),
    ):
        dynamic = service.ShardingPolicy.DYNAMIC
        model.fit(
            training.apply(service.distribute(dynamic, dispatcher.target)),
            validation_data=tested.apply(service.distribute(dynamic, dispatcher.target)),
            epochs=EPOCHS,
            shuffle=False,
            verbose=2,
        )
        read = tested.apply(service.distribute(dynamic, dispatcher.target))
        _, accuracy = model.evaluate(read, verbose=0)
    assert accuracy > 0.7, accuracy
    print(f"learned: {accuracy:.0%} of {TESTED} digits that it had not seen are right")


if __name__ == "__main__":
    main()
