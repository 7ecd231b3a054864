"""A warning for tasks of one training that do not share what they read.

What becomes of their elements is decided behind the dataset, by tf.distribute, when it rewrites the
graph of whatever was made of it: nobody can see that here. That several tasks will read the same
can be seen when the dataset is made.
"""

from __future__ import annotations

import logging

from ..errors import InvalidArgument
from ..trainers.context import TaskContext

log = logging.getLogger(__name__)


def warn_if_unshared(job_name: str | None) -> None:
    """Says what doubles if this is one of several tasks that train, by the environment."""
    if job_name is not None:
        return
    try:
        context = TaskContext.from_env()
    except InvalidArgument:
        return  # it is for who trains by it to say what is wrong
    number = context.num_consumers
    if context.trains and number > 1:
        log.warning(
            "without a job_name each of the %d tasks that train, as its environment says, reads "
            "all elements for itself, and the service produces them %d times. With "
            "auto_shard_policy AUTO or DATA tf.distribute drops all but a task's part of them; "
            "with OFF, and without tf.distribute, each is trained on %d times; FILE is an error, "
            "as it finds no files. Give a job_name to share them, or call distribute_across",
            number, number, number,
        )  # fmt: skip
