"""Raw gRPC calls of TensorFlow's protocol: sets up iterations, and keeps a dispatcher busy.

The callers run in separate processes, and do as little as possible around a call, so that they
measure the dispatcher. The same code calls both sides.
"""

from __future__ import annotations

import math
import multiprocessing
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import grpc
from google.protobuf.message import Message

from ..service.connections.grpc_server import connect
from ..service.errors import ForebayError
from ..service.proto import tf_service_pb2 as tf

PROCESSES = 4
SERVICE = "tensorflow.data.DispatcherService"
TIMEOUT_S = 120
RECONNECT_MS = 10
ENDLESS = 10**12

Response = TypeVar("Response", bound=Message)
Send = Callable[[bytes], bytes]


def open_channel(address: str) -> grpc.Channel:
    """A channel that reconnects to a restarted dispatcher at once."""
    backoffs = ("initial", "min", "max")
    channel: grpc.Channel = connect(
        address,
        [
            ("grpc.max_receive_message_length", -1),
            ("grpc.use_local_subchannel_pool", 1),
            *((f"grpc.{which}_reconnect_backoff_ms", RECONNECT_MS) for which in backoffs),
        ],
    )
    return channel


def method(channel: grpc.Channel, name: str) -> Send:
    """A method, from serialized request to serialized response."""
    call = channel.unary_unary(f"/{SERVICE}/{name}", None, None)
    return lambda request: call(request, timeout=TIMEOUT_S, wait_for_ready=True)


def begin_iteration(address: str) -> int:
    """A DYNAMIC iteration over an endless range; its id."""
    import tensorflow

    with open_channel(address) as channel:

        def call(request: Message, response: type[Response]) -> Response:
            name = type(request).__name__.removesuffix("Request")
            return response.FromString(method(channel, name)(request.SerializeToString()))

        graph = tensorflow.data.Dataset.range(ENDLESS)._as_serialized_graph().numpy()
        dataset = call(
            tf.GetOrRegisterDatasetRequest(dataset=tf.DatasetDef(graph=graph)),
            tf.GetOrRegisterDatasetResponse,
        )
        dynamic = tf.ProcessingModeDef(sharding_policy=tf.ProcessingModeDef.DYNAMIC)
        job = call(
            tf.GetOrCreateJobRequest(dataset_id=dataset.dataset_id, processing_mode_def=dynamic),
            tf.GetOrCreateJobResponse,
        )
        call(tf.GetOrCreateIterationRequest(job_id=job.job_id), tf.GetOrCreateIterationResponse)
        # Only workers learn an iteration's id. This one sends no more heartbeats.
        worker = call(
            tf.WorkerHeartbeatRequest(worker_address="127.0.0.1:1", worker_uid=1),
            tf.WorkerHeartbeatResponse,
        )
    return worker.new_tasks[0].iteration_id


def get_split(channel: grpc.Channel, iteration_id: int) -> Callable[[], bytes]:
    """A function that asks for a split."""
    send = method(channel, "GetSplit")
    request = tf.GetSplitRequest(iteration_id=iteration_id).SerializeToString()
    return lambda: send(request)


def first_split(channel: grpc.Channel, iteration_id: int) -> None:
    """Retry GetSplit until a dispatcher answers."""
    while True:
        try:
            get_split(channel, iteration_id)()
            return
        except grpc.RpcError as error:
            if error.code() is not grpc.StatusCode.UNAVAILABLE:
                raise


def splits_per_second(address: str, iteration_id: int, callers: int, seconds: float) -> float:
    """The splits per second of so many callers, which are threads in up to PROCESSES processes."""
    context = multiprocessing.get_context("spawn")
    start = context.Barrier(callers)
    rates = context.SimpleQueue()
    arguments = (address, iteration_id, seconds, start, rates)
    processes = [
        context.Process(target=_share, args=(len(range(number, callers, PROCESSES)), arguments))
        for number in range(min(PROCESSES, callers))
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        if process.exitcode:
            raise ForebayError(f"a caller ended with exit code {process.exitcode}; see above")
    return math.fsum(rates.get() for _ in range(callers))


def _share(callers: int, arguments: tuple[Any, ...]) -> None:
    with ThreadPoolExecutor(callers, thread_name_prefix="benchmark-caller") as pool:
        for caller in [pool.submit(_keep_busy, *arguments) for _ in range(callers)]:
            caller.result()


def _keep_busy(address: str, iteration_id: int, seconds: float, start: Any, rates: Any) -> None:
    with open_channel(address) as channel:
        split = get_split(channel, iteration_id)
        split()  # connects
        start.wait(TIMEOUT_S)
        begun = now = time.perf_counter()
        splits = 0
        while now < begun + seconds:
            splits += bool(split())
            now = time.perf_counter()
    rates.put(splits / (now - begun))
