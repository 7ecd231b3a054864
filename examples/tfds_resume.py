"""Train on a data set of TensorFlow Datasets, in TFDS's own order. Stop in the middle of an epoch,
and go on with another number of workers.

python examples/tfds_resume.py
"""

import contextlib
import tempfile

import numpy as np
import tensorflow_datasets as tfds
from sklearn.datasets import load_digits
from sklearn.linear_model import SGDClassifier

from forebay import service

FILES, STEPS, BATCH = 8, 200, 32
HOW = {"read_config": tfds.ReadConfig(add_tfds_id=True, shuffle_seed=1), "shuffle_files": True}


class Digits(tfds.core.GeneratorBasedBuilder):
    """Handwritten digits, which scikit-learn brings along."""

    VERSION = tfds.core.Version("1.0.0")

    def _info(self):
        features = {
            "pixels": tfds.features.Tensor(shape=(64,), dtype=np.float32),
            "label": tfds.features.ClassLabel(num_classes=10),
        }
        return tfds.core.DatasetInfo(builder=self, features=tfds.features.FeaturesDict(features))

    def _split_generators(self, _):
        return {"train": self._generate_examples()}

    def _generate_examples(self):
        for number, (pixels, label) in enumerate(zip(*load_digits(return_X_y=True), strict=True)):
            yield number, {"pixels": (pixels / 16).astype(np.float32), "label": int(label)}


@contextlib.contextmanager
def cluster(workers: int):
    with service.DispatchServer() as dispatcher, contextlib.ExitStack() as servers:
        for _ in range(workers):
            servers.enter_context(service.WorkerServer(service.WorkerConfig(dispatcher.target)))
        yield dispatcher.target


def train(target: str, builder, model, seen: list, until: int) -> None:
    """From the step that `seen` ends with on."""
    how = service.register_tfds(target, builder, "train[:80%]", **HOW)
    while len(seen) < until:
        # The rest of the epoch that this step is in.
        with service.read(target, **how, batch_size=BATCH, start_step=len(seen)) as batches:
            for batch in batches:
                model.partial_fit(batch["pixels"], batch["label"], classes=range(10))
                seen.append(batch["tfds_id"].tolist())
                if len(seen) == until:
                    break


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        builder = Digits(data_dir=folder)
        builder.download_and_prepare(download_config=tfds.download.DownloadConfig(num_shards=FILES))

        model, seen = SGDClassifier(random_state=0), []
        with cluster(workers=1) as target:
            train(target, builder, model, seen, until=20)  # an epoch has 45 steps
        with cluster(workers=3) as target:
            train(target, builder, model, seen, until=STEPS)

        order = builder.as_dataset(split="train[:80%]", **HOW).batch(BATCH)
        epoch = [batch["tfds_id"].tolist() for batch in order.as_numpy_iterator()]
        assert seen == (epoch * STEPS)[:STEPS], "not the order of TFDS"
        tested = next(iter(builder.as_dataset(split="train[80%:]", batch_size=1000)))
    accuracy = model.score(tested["pixels"].numpy(), tested["label"].numpy())
    assert accuracy > 0.7, accuracy
    unseen = len(tested["label"])
    print(f"learned: {accuracy:.0%} of {unseen} digits that it had not seen are right")


if __name__ == "__main__":
    main()
