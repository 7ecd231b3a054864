"""Warnings for tasks of one training that share no elements, or that shard shared elements again.

tf.distribute decides about sharding only later, when it rewrites the dataset's graph. Two mistakes
show before. Making the dataset shows that several tasks will read the same elements. TensorFlow's
warning that it changes a dataset's policy shows that it will shard shared elements.
"""

from __future__ import annotations

import logging

from ..errors import InvalidArgument
from ..task_context import TaskContext
from . import lockstep

log = logging.getLogger(__name__)

CHANGED = "Changing the value of option auto_shard_policy from <AutoShardPolicy.OFF"
"""The start of TensorFlow's warning."""


def warn_if_unshared(job_name: str | None) -> None:
    """Warns of duplicate elements if this is one of several tasks that train. The strategy that was
    made says so, or else the environment."""
    if job_name is not None:
        return
    if (others := lockstep.find_peers()) is not None:
        trains, number = True, others.number
    else:
        try:
            context = TaskContext.from_env()
        except InvalidArgument:
            return  # whoever trains by this environment reports the error
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
    """Passes on all TensorFlow logs, and explains what a change of the policy does."""

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
    """From now on, explain TensorFlow's warning, which absl logs. Idempotent."""
    logging.getLogger("absl").addFilter(_explained)
