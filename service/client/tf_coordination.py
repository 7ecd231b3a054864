"""Messages between the tasks of a `MultiWorkerMirroredStrategy`.

They use the coordination service that such a strategy runs in its first task, as TensorFlow's own
PreemptionCheckpointHandler does.
"""

from __future__ import annotations

import tensorflow as tf
from tensorflow.python.eager import context


class TaskPeers:
    """`Peers` (lockstep.py) through the coordination service."""

    def __init__(self, jobs: dict[str, int], job: str, index: int) -> None:
        """`jobs` maps names to numbers of tasks. This process is task `index` of `job`."""
        tasks = [(name, i) for name, number in jobs.items() for i in range(number)]
        self.me = tasks.index((job, index))
        self.number = len(tasks)

    def publish(self, key: str, text: str) -> None:
        try:
            context.context().set_config_key_value(key, text)
        except tf.errors.OpError:  # the key is set already, or the service is gone
            return

    def receive(self, key: str, timeout_s: float | None) -> str | None:
        timeout_ms = 0 if timeout_s is None else max(1, int(1000 * timeout_s))
        try:
            text: str = context.context().get_config_key_value(key, timeout_ms)
        except tf.errors.OpError:
            return None
        return text


def task_peers() -> TaskPeers | None:
    """The tasks that train in lockstep, this one included; None without such a strategy."""
    # TensorFlow has no public name for any of this.
    own = context.context()._collective_ops_server_def
    service = context.context().coordination_service
    if own is None or service is None:
        return None
    jobs = {job.name: job.num_tasks for job in service.coordinated_job_list}
    if sum(jobs.values()) < 2 or own.job_name not in jobs:
        return None
    return TaskPeers(jobs, own.job_name, own.task_index)
