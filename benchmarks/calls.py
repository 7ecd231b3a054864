"""Raw gRPC calls to a dispatcher: sets up iterations, and keeps the dispatcher busy.

The callers run in separate processes, and do as little as possible around a call, so that they
measure the dispatcher. The same code calls both sides.
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
"""The smallest valid graph of a dataset; nobody runs it."""

Response = TypeVar("Response", bound=Message)
Send = Callable[[bytes], bytes]

SERVERS = [ev.TransferServer(protocol="tcp", address="127.0.0.1:1")]


def open_channel(address: str) -> grpc.Channel:
    """A channel that reconnects to a restarted dispatcher at once."""
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
    """Calls the methods of one dispatcher, for setup."""

    def __init__(self, address: str) -> None:
        self._channel = open_channel(address)

    def call(self, request: Message, response: type[Response]) -> Response:
        """Call the method of this request, on the service that the message belongs to."""
        service = TENSORFLOW if type(request).__module__ == tf.__name__ else FOREBAY
        name = type(request).__name__.removesuffix("Request")
        send = method(self._channel, service, name)
        return response.FromString(send(request.SerializeToString()))

    def get_version(self) -> int:
        """The version of TensorFlow's protocol: the cheapest call."""
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
    # Only workers learn an iteration's id. This one sends no more heartbeats.
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
            fb.WorkerHeartbeatRequest(
                transfer_servers=SERVERS, address=f"127.0.0.1:{number}", uid=1
            ),
            fb.WorkerHeartbeatResponse,
        )
        for number in range(1, workers + 1)
    ]
    tasks = [task for beat in beats for task in beat.tasks]
    return [task.task_id for task in tasks if task.iteration_id == joined.iteration_id]


def first_split(channel: grpc.Channel, iteration_id: int) -> None:
    """Retry GetSplit until a dispatcher answers."""
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
    """Call GetSplit repeatedly; yield each call's number of splits."""
    send = method(channel, TENSORFLOW, "GetSplit")
    request = tf.GetSplitRequest(iteration_id=iteration_id).SerializeToString()
    while send(request):
        yield 1


def lease_splits(channel: grpc.Channel, task_id: int, want: int) -> Iterator[int]:
    """Call LeaseSplits repeatedly, as a worker does: each call reports the previous lease."""
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
    """The callers' splits per second; each tuple of `arguments` makes a caller, a thread in one
    of up to CALLERS processes."""
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
