"""A warning for tasks of one training that do not share what they read.

What becomes of their elements is decided behind the dataset, by tf.distribute, when it rewrites the
graph of whatever was made of it: nobody can see that here. That several tasks will read the same
can be seen when the dataset is made.
"""

from __future__ import annotations

import logging

import tensorflow as tf

log = logging.getLogger(__name__)


def warn_of_it(job_name: str | None) -> None:
    """Says what doubles if this is one of several tasks that train, by TF_CONFIG."""
    number = _tasks_that_train() if job_name is None else 1
    if number > 1:
        log.warning(
            "without a job_name each of the %d tasks that train, as TF_CONFIG says, reads all "
            "elements for itself, and the service produces them %d times. With auto_shard_policy "
            "AUTO or DATA tf.distribute drops all but a task's part of them; with OFF, and without "
            "tf.distribute, each is trained on %d times; FILE is an error, as it finds no files. "
            "Give a job_name to share them, or call distribute_across", number, number, number,
        )  # fmt: skip


def _tasks_that_train() -> int:
    """How many they are; 0 if this is none of them."""
    try:
        resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
        cluster, kind = resolver.cluster_spec().as_dict(), resolver.task_type
    except (ValueError, TypeError, KeyError, AttributeError):
        return 0  # it is for who trains by it to say what is wrong
    if kind not in ("chief", "worker"):
        return 0
    return sum(len(cluster.get(kind, ())) for kind in ("chief", "worker"))
