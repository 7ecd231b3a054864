"""Prints what finished epochs leave behind: `python scripts/state_size.py [JOBS] [EPOCHS]`.

Each of JOBS named jobs (100) is read for EPOCHS epochs (100), each by two trainers over four
workers. The state is in this process, as a dispatcher has it in its own; a summary is made of each
epoch when it has been left, as after `finished_retention_ms`.
"""

from __future__ import annotations

import itertools
import sys
from typing import Any

from forebay.journal.proto import events_pb2 as ev
from forebay.service.core import commands as c
from forebay.service.core.encoding import encode_state
from forebay.service.core.machine import apply, decide
from forebay.service.core.state import State

WORKERS, TRAINERS, SPLITS = 4, 2, 1000


class Cluster:
    """Commands, decided and applied."""

    def __init__(self) -> None:
        self.state = State()
        self.events = self.journal_bytes = 0
        self._times = itertools.count(1_000, 10)

    def do(self, command: c.Command) -> Any:
        decision = decide(self.state, command, next(self._times))
        for event in decision.events:
            apply(self.state, event)
            self.events += 1
            self.journal_bytes += event.ByteSize()
        return decision.answer

    def read(self, name: str, epoch: int) -> None:
        """One epoch of a job, to its end."""
        joined = []
        for trainer in range(TRAINERS):
            caller = f"{name}-{epoch}-{trainer}".ljust(36, "-")  # as long as a UUID
            job = c.GetOrCreateJob(
                request=(caller, 1), dataset_id="d", name=name, sharding=ev.DYNAMIC
            )
            join = c.JoinIteration(request=(caller, 2), job_id=self.do(job), epoch=epoch)
            joined.append(self.do(join))
        iteration_id = joined[0].iteration_id
        for task_id in list(self.state.iterations[iteration_id].tasks):
            for number in itertools.count(1):
                lease = c.LeaseSplits(
                    request=(f"task/{task_id}/0", number), task_id=task_id, source=0,
                    pass_number=0, want=SPLITS,
                )  # fmt: skip
                if not self.do(lease).count:
                    break
            self.do(c.CompleteTask(task_id=task_id))
        for consumer in joined:
            self.do(c.LeaveIteration(consumer_id=consumer.consumer_id, reason="it said goodbye"))
        self.do(c.CollectIteration(iteration_id=iteration_id))


def main(jobs: int = 100, epochs: int = 100) -> None:
    cluster = Cluster()
    cluster.do(c.ElectLeader(term=1, address="a:1", version="0", journal_id="j"))
    definition = ev.DatasetDefinition(sources=[ev.SplitSource(count=SPLITS)])
    cluster.do(c.RegisterDataset(dataset_id="d", definition=definition))
    for worker in range(1, 1 + WORKERS):
        cluster.do(c.RegisterWorker(address=f"w:{worker}", uid=worker))
    for epoch in range(1, 1 + epochs):
        for job in range(jobs):
            cluster.read(f"dataset_id=/d/job-{job}", epoch)
        if epoch * 5 % epochs == 0:
            snapshot = len(encode_state(cluster.state))
            print(
                f"{jobs * epoch} finished epochs of {jobs} jobs: a snapshot of "
                f"{snapshot / 1e6:.3f} MB, this process {resident_mb():.0f} MB; "
                f"{cluster.events} events of {cluster.journal_bytes / 1e6:.0f} MB"
            )


def resident_mb() -> float:
    """Of this process, by Linux."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096 / 1e6


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
