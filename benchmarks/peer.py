"""tf.data service's servers, as processes: each prints its address, and runs until stopped.

python -m forebay.benchmarks.peer dispatcher PORT WORK_DIR COLLECT_MS
python -m forebay.benchmarks.peer worker DISPATCHER
"""

from __future__ import annotations

import sys

from ..service.pipelines import without_keras

with without_keras():  # as our worker, whose memory is compared with this one's
    from tensorflow.data.experimental import service


def main(kind: str, *arguments: str) -> None:
    if kind == "dispatcher":
        port, work_dir, collect_ms = arguments
        config = service.DispatcherConfig(
            port=int(port),
            work_dir=work_dir,
            fault_tolerant_mode=True,
            job_gc_check_interval_ms=int(collect_ms),
            job_gc_timeout_ms=int(collect_ms),
        )
        server = service.DispatchServer(config)
        print(server.target, flush=True)
    else:
        server = service.WorkerServer(service.WorkerConfig(*arguments))
        print(server._address, flush=True)
    sys.stdin.read()  # until the parent closes it, or is gone


if __name__ == "__main__":
    main(*sys.argv[1:])
