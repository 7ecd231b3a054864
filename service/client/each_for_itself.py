"""Warnings for tasks of one training that do not share what they read, or share it twice.

What becomes of their elements is decided behind the dataset, by tf.distribute, when it rewrites the
graph of whatever was made of it: nobody can see that here. That several tasks will read the same
can be seen when the dataset is made; and that what they share will be sharded, when TensorFlow
says that a dataset's policy is changed.
"""

from __future__ import annotations

import logging

from ..errors import InvalidArgument
from ..trainers.context import TaskContext
from . import same_end

log = logging.getLogger(__name__)

CHANGED = "Changing the value of option auto_shard_policy from <AutoShardPolicy.OFF"
"""As TensorFlow says it."""


def warn_if_unshared(job_name: str | None) -> None:
    """Says what doubles if this is one of several tasks that train, by the strategy that they have
    made, or by the environment."""
    if job_name is not None:
        return
    if (others := same_end.find()) is not None:
        trains, number = True, others.number
    else:
        try:
            context = TaskContext.from_env()
        except InvalidArgument:
            return  # it is for who trains by it to say what is wrong
        trains, number = context.trains, context.num_consumers
    if trains and number > 1:
        log.warning(
            "without a job_name each of the %d tasks that train, as its strategy or environment "
            "says, reads all elements for itself, and the service produces them %d times. With "
            "auto_shard_policy AUTO or DATA tf.distribute drops all but a task's part of them; "
            "with OFF, and without tf.distribute, each is trained on %d times; FILE is an error, "
            "as it finds no files. Give a job_name to share them, or call distribute_across",
            number, number, number,
        )  # fmt: skip


class _Explained(logging.Filter):
    """Passes on all that TensorFlow says, and says what a change of the policy does."""

    def filter(self, record: logging.LogRecord) -> bool:
        if record.getMessage().startswith(CHANGED):
            log.warning(
                "auto_shard_policy was OFF, as it is for a dataset that several trainers share: "
                "with DATA each of them drops all but its share of what it alone was given, and "
                "those elements are lost; FILE is an error, as it finds no files"
            )
        return True


_explained = _Explained()


def explain_sharding() -> None:
    """From now on, of what TensorFlow warns of, through absl. Idempotent."""
    logging.getLogger("absl").addFilter(_explained)
