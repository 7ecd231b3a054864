"""Row `memory`: the dispatcher's memory, idle and under full load.

The workers are simulated: they send one heartbeat, and lease. Each has a task in every job, so
there are 100,000 tasks, each with one open lease. That is the worst case for so many splits.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from ..journal.proto import events_pb2 as ev
from ..service.proto import forebay_pb2 as fb
from .calls import ENDLESS, GRAPH, SERVERS, Caller
from .results import Better, Result
from .servers import our_dispatcher, peer_dispatcher
from .setting import Setting

CALLERS = 8
LEASE = 10


def memory(setting: Setting) -> list[Result]:
    """Our side idle and loaded, the peer idle. One round: memory does not vary."""
    workers, jobs = (20, 5) if setting.quick else (1_000, 100)
    directory = setting.directory("memory")
    with our_dispatcher(directory) as ours, peer_dispatcher(directory) as peer:
        with Caller(peer.address) as caller:
            caller.get_version()
        with Caller(ours.address) as caller:
            caller.get_version()
            idle = ours.rss_mb()
            splits = fill(caller, workers, jobs)
        loaded = ours.rss_mb()
        peer_idle = peer.rss_mb()
    what = f"{workers:,} workers, {jobs:,} jobs, {splits:,} splits leased"
    return [
        Result(
            row="memory",
            what="dispatcher, idle",
            unit="MB",
            better=Better.LESS,
            ours=[idle],
            peer=[peer_idle],
            required=100,
        ),
        Result(
            row="memory",
            what=f"dispatcher, {what}",
            unit="MB",
            better=Better.LESS,
            ours=[loaded],
            required=300,
        ),
    ]


def fill(caller: Caller, workers: int, jobs: int) -> int:
    """Register workers and begin jobs, and lease splits for every task; how many."""
    source = ev.SplitSource(arithmetic=ev.Arithmetic(start=0, stop=ENDLESS, step=1))
    dataset = caller.call(
        fb.RegisterDatasetRequest(graph=GRAPH, sources=[source]),
        fb.RegisterDatasetResponse,
    )
    beats = [
        fb.WorkerHeartbeatRequest(
            transfer_servers=SERVERS, address=f"127.0.0.1:{number}", uid=number
        )
        for number in range(1, workers + 1)
    ]
    for beat in beats:
        caller.call(beat, fb.WorkerHeartbeatResponse)
    for number in range(jobs):
        job = caller.call(
            fb.GetOrCreateJobRequest(
                dataset_id=dataset.dataset_id, job_name=f"job {number}", sharding=ev.DYNAMIC
            ),
            fb.GetOrCreateJobResponse,
        )
        caller.call(fb.JoinIterationRequest(job_id=job.job_id), fb.JoinIterationResponse)

    def lease(beat: fb.WorkerHeartbeatRequest) -> int:
        splits = 0
        for task in caller.call(beat, fb.WorkerHeartbeatResponse).tasks:
            request = fb.LeaseSplitsRequest(
                request=ev.Request(number=1), task_id=task.task_id, want=LEASE
            )
            splits += caller.call(request, fb.LeaseSplitsResponse).count
        return splits

    with ThreadPoolExecutor(CALLERS, thread_name_prefix="benchmark-worker") as pool:
        return sum(pool.map(lease, beats))
