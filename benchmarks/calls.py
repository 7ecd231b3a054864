"""Raw gRPC calls to a dispatcher: setting up an iteration, and callers that keep it busy.

The callers are in processes of their own, and do as little as they can around a call, so that
what they measure is the dispatcher. Both sides are called by the same code.
"""

from __future__ import annotations

import math
import multiprocessing
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import grpc
from google.protobuf.message import Message

from ..journal.proto import events_pb2 as ev
from ..service.connections.grpc_server import connect
from ..service.errors import ForebayError
from ..service.proto import forebay_pb2 as fb
from ..service.proto import graph_pb2 as graph
from ..service.proto import tf_service_pb2 as tf

CALLERS = 4
TENSORFLOW = "tensorflow.data.DispatcherService"
FOREBAY = "forebay.v1.Dispatcher"
TIMEOUT_S = 120
RECONNECT_MS = 10
ENDLESS = 10**12

GRAPH = graph.GraphDef(
    node=[
        graph.NodeDef(name="source", op="RangeDataset"),
        graph.NodeDef(name="result", op="_Retval", input=["source"]),
    ]
).SerializeToString()
"""The least that passes for a dataset's graph: nobody runs it."""

Response = TypeVar("Response", bound=Message)
Send = Callable[[bytes], bytes]


def open_channel(address: str) -> grpc.Channel:
    """A channel that notices at once when a dispatcher is there again."""
    backoffs = ("initial", "min", "max")
    return connect(
        address,
        [
            ("grpc.max_receive_message_length", -1),
            ("grpc.use_local_subchannel_pool", 1),
            *((f"grpc.{which}_reconnect_backoff_ms", RECONNECT_MS) for which in backoffs),
        ],
    )


def method(channel: grpc.Channel, service: str, name: str) -> Send:
    """A method of a service, from serialized request to serialized response."""
    call = channel.unary_unary(f"/{service}/{name}", None, None)
    return lambda request: call(request, timeout=TIMEOUT_S, wait_for_ready=True)


class Caller:
    """Calls the methods of one dispatcher; for setting things up."""

    def __init__(self, address: str) -> None:
        self._channel = open_channel(address)

    def call(self, request: Message, response: type[Response]) -> Response:
        """Call the method whose request this is, on the face that the message belongs to."""
        service = TENSORFLOW if type(request).__module__ == tf.__name__ else FOREBAY
        name = type(request).__name__.removesuffix("Request")
        send = method(self._channel, service, name)
        return response.FromString(send(request.SerializeToString()))

    def get_version(self) -> int:
        """Of TensorFlow's protocol: the least that a dispatcher can be asked."""
        return self.call(tf.GetVersionRequest(), tf.GetVersionResponse).version

    def close(self) -> None:
        self._channel.close()

    def __enter__(self) -> Caller:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def begin_iteration(caller: Caller) -> int:
    """A DYNAMIC iteration over an endless range, through TensorFlow's protocol; its id."""
    import tensorflow

    graph = tensorflow.data.Dataset.range(ENDLESS)._as_serialized_graph().numpy()
    dataset = caller.call(
        tf.GetOrRegisterDatasetRequest(dataset=tf.DatasetDef(graph=graph)),
        tf.GetOrRegisterDatasetResponse,
    )
    dynamic = tf.ProcessingModeDef(sharding_policy=tf.ProcessingModeDef.DYNAMIC)
    job = caller.call(
        tf.GetOrCreateJobRequest(dataset_id=dataset.dataset_id, processing_mode_def=dynamic),
        tf.GetOrCreateJobResponse,
    )
    caller.call(tf.GetOrCreateIterationRequest(job_id=job.job_id), tf.GetOrCreateIterationResponse)
    # An iteration's id is told to workers only. This one never beats again.
    worker = caller.call(
        tf.WorkerHeartbeatRequest(worker_address="127.0.0.1:1", worker_uid=1),
        tf.WorkerHeartbeatResponse,
    )
    return worker.new_tasks[0].iteration_id


def begin_tasks(caller: Caller, workers: int) -> list[int]:
    """A DYNAMIC iteration over an endless range, on Forebay's face; a task for each worker."""
    endless = ev.SplitSource(arithmetic=ev.Arithmetic(start=0, stop=ENDLESS, step=1))
    dataset = caller.call(
        fb.RegisterDatasetRequest(graph=GRAPH, sources=[endless]),
        fb.RegisterDatasetResponse,
    )
    job = caller.call(
        fb.GetOrCreateJobRequest(dataset_id=dataset.dataset_id, sharding=ev.DYNAMIC),
        fb.GetOrCreateJobResponse,
    )
    joined = caller.call(fb.JoinIterationRequest(job_id=job.job_id), fb.JoinIterationResponse)
    beats = [
        caller.call(
            fb.WorkerHeartbeatRequest(address=f"127.0.0.1:{number}", uid=1),
            fb.WorkerHeartbeatResponse,
        )
        for number in range(1, workers + 1)
    ]
    tasks = [task for beat in beats for task in beat.tasks]
    return [task.task_id for task in tasks if task.iteration_id == joined.iteration_id]


def first_split(channel: grpc.Channel, iteration_id: int) -> None:
    """Ask for a split until there is a dispatcher that gives one."""
    send = method(channel, TENSORFLOW, "GetSplit")
    request = tf.GetSplitRequest(iteration_id=iteration_id).SerializeToString()
    while True:
        try:
            send(request)
            return
        except grpc.RpcError as error:
            if error.code() is not grpc.StatusCode.UNAVAILABLE:
                raise


# -- callers that keep a dispatcher busy -----------------------------------------------------


def get_splits(channel: grpc.Channel, iteration_id: int) -> Iterator[int]:
    """GetSplit again and again; yields the number of splits that each call brought."""
    send = method(channel, TENSORFLOW, "GetSplit")
    request = tf.GetSplitRequest(iteration_id=iteration_id).SerializeToString()
    while send(request):
        yield 1


def lease_splits(channel: grpc.Channel, task_id: int, want: int) -> Iterator[int]:
    """LeaseSplits again and again, as a worker does: each call reports the lease before."""
    send = method(channel, FOREBAY, "LeaseSplits")
    request = fb.LeaseSplitsRequest(task_id=task_id, want=want)
    while True:
        request.request.number += 1
        lease = fb.LeaseSplitsResponse.FromString(send(request.SerializeToString()))
        yield lease.count
        request.begun[:] = [lease.lease_id]


Loop = Callable[..., Iterator[int]]


def splits_per_second(
    address: str, loop: Loop, arguments: Sequence[tuple[int, ...]], seconds: float
) -> float:
    """Splits that the callers get a second, one for each tuple of `arguments`: in processes of
    their own, or as threads of so many."""
    context = multiprocessing.get_context("spawn")
    start = context.Barrier(len(arguments))
    rates = context.SimpleQueue()
    shares = [arguments[number::CALLERS] for number in range(min(CALLERS, len(arguments)))]
    processes = [
        context.Process(target=_share, args=(address, loop, share, seconds, start, rates))
        for share in shares
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        if process.exitcode:
            raise ForebayError(f"a caller ended with exit code {process.exitcode}; see above")
    return math.fsum(rates.get() for _ in arguments)


def _share(
    address: str, loop: Loop, share: Sequence[tuple[int, ...]], seconds: float, start: Any,
    rates: Any,
) -> None:  # fmt: skip
    with ThreadPoolExecutor(len(share), thread_name_prefix="benchmark-caller") as pool:
        callers = [
            pool.submit(_keep_busy, address, loop, own, seconds, start, rates) for own in share
        ]
    for caller in callers:
        caller.result()


def _keep_busy(
    address: str,
    loop: Loop,
    arguments: tuple[int, ...],
    seconds: float,
    start: Any,
    rates: Any,
) -> None:
    with open_channel(address) as channel:
        counts = loop(channel, *arguments)
        next(counts)  # connects
        start.wait(TIMEOUT_S)
        begun = now = time.perf_counter()
        splits = 0
        while now < begun + seconds:
            splits += next(counts)
            now = time.perf_counter()
    rates.put(splits / (now - begun))
