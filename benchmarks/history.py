"""Row `history`: a dispatcher's memory after finished epochs of named jobs.

The worker and the trainers are simulated: they join, complete and leave, and read nothing.
"""

from __future__ import annotations

import json
import pathlib
import time
from concurrent.futures import ThreadPoolExecutor

from ..journal.proto import events_pb2 as ev
from ..service.errors import ForebayError
from ..service.proto import forebay_pb2 as fb
from .calls import GRAPH, SERVERS, TIMEOUT_S, Caller
from .results import Better, Result
from .servers import COLLECT_MS, OURS, our_dispatcher
from .setting import Setting

CALLERS = 8
SNAPSHOT_EVENTS = 100


def history(setting: Setting) -> list[Result]:
    """Only our side. One round: memory does not vary."""
    jobs, epochs = (10, 3) if setting.quick else (100, 100)
    directory = setting.directory("history")
    options = ("--finished-retention-ms", COLLECT_MS, "--snapshot-events", SNAPSHOT_EVENTS)
    with (
        our_dispatcher(directory, 0, *options, collect=True) as ours,
        Caller(ours.address) as caller,
    ):
        finish(caller, jobs, epochs)
        _wait_until_summarized(caller, jobs, epochs)
        held = ours.rss_mb()
    snapshots = (directory / OURS / "snapshots").glob("*.snapshot")
    snapshot = max(snapshots, key=lambda path: int(path.stem), default=pathlib.Path())
    what = f"after {jobs * epochs:,} finished epochs of {jobs} named jobs"
    sizes = {"dispatcher's memory": (held, 100), "its snapshot": (_mb(snapshot), 5)}
    return [
        Result(
            row="history",
            what=f"{name} {what}",
            unit="MB",
            better=Better.LESS,
            ours=[mb],
            required=most,
        )
        for name, (mb, most) in sizes.items()
    ]


def finish(caller: Caller, jobs: int, epochs: int) -> None:
    """Read `epochs` epochs of each job to their end."""
    dataset = caller.call(fb.RegisterDatasetRequest(graph=GRAPH), fb.RegisterDatasetResponse)
    beat = fb.WorkerHeartbeatRequest(transfer_servers=SERVERS, address="127.0.0.1:1", uid=1)
    caller.call(beat, fb.WorkerHeartbeatResponse)

    def join(job: int, epoch: int) -> int:
        named = fb.GetOrCreateJobRequest(
            dataset_id=dataset.dataset_id, job_name=f"job {job}", sharding=ev.OFF
        )
        request = fb.JoinIterationRequest(job=named, epoch=epoch)
        return caller.call(request, fb.JoinIterationResponse).consumer_id

    def complete(task_id: int) -> None:
        caller.call(fb.CompleteTaskRequest(task_id=task_id), fb.CompleteTaskResponse)

    def leave(consumer_id: int) -> None:
        caller.call(fb.LeaveIterationRequest(consumer_id=consumer_id), fb.LeaveIterationResponse)

    with ThreadPoolExecutor(CALLERS, thread_name_prefix="benchmark-caller") as pool:
        for epoch in range(1, epochs + 1):
            consumers = list(pool.map(join, range(jobs), [epoch] * jobs))
            tasks = [task.task_id for task in caller.call(beat, fb.WorkerHeartbeatResponse).tasks]
            list(pool.map(complete, tasks))
            list(pool.map(leave, consumers))


def _wait_until_summarized(caller: Caller, jobs: int, epochs: int) -> None:
    give_up_s = time.monotonic() + TIMEOUT_S
    while True:
        status = json.loads(caller.call(fb.GetStatusRequest(), fb.GetStatusResponse).status)
        kept = [job["summarized"] for job in status["jobs"]]
        if kept == [[[1, epochs]]] * jobs:
            return
        if time.monotonic() > give_up_s:
            raise ForebayError(f"after {TIMEOUT_S} s there is more than summaries: {kept[:3]} …")
        time.sleep(1)  # frequent status calls would add to the cost


def _mb(path: pathlib.Path) -> float:
    if not path.is_file():
        raise ForebayError("the dispatcher has written no snapshot")
    return path.stat().st_size / 1e6
