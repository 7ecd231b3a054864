"""The wrapper around every RPC method: no answer leaves that a crash or a new leader could undo.

    request → permitted? → history? → the method
            → durable, and still the leader → answer, position

So a method only translates: it reads the state or executes a command, and returns the response.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Awaitable, Callable, Mapping
from types import ModuleType
from typing import Any, NamedTuple

from .. import tracing
from ..connections.grpc_server import Method, current_metadata
from ..errors import ForebayError, Unavailable
from .dispatcher import Dispatcher
from .permissions import Permissions

Function = Callable[[Any], Awaitable[Any]]
_WORDS = re.compile("(?<!^)(?=[A-Z])")  # where a word of a name begins

_SENDERS = {
    "consumer_id": "consumer",
    "task_id": "task",
    "address": "worker",
    "worker_id": "worker",
    "save_id": "a worker that writes save",
    "dataset_id": "a reader of dataset",
    "job_id": "a trainer of job",
}
"""By the field of a request that says who sends it."""


class Rpc(NamedTuple):
    """How a method is answered."""

    decides: bool = False
    """It answers its own decision: that one's append proves that this dispatcher leads."""
    reads: bool = False
    """It decides nothing, and does not wait: if the storage hangs, it fails soon, and says so."""


def answering(
    servicer: object,
    dispatcher: Dispatcher,
    messages: ModuleType,
    rpcs: Mapping[str, Rpc],
    permissions: Permissions | None = None,
) -> dict[str, Method]:
    """The methods of a service, by name, for `generic_handler` and a grpc.aio server.

    `servicer` has the method do_it for the name DoIt; without content, it may answer None.
    `messages` has <name>Request and <name>Response. A request with `unproved` is answered without
    proof. Without `permissions`, whoever was let in may call all methods.
    """
    tracer = tracing.tracer("dispatcher")

    def method(name: str, rpc: Rpc) -> Method:
        function: Function = getattr(servicer, _WORDS.sub("_", name).lower())
        request_class = getattr(messages, f"{name}Request")
        response_class = getattr(messages, f"{name}Response")
        says_known = "known" in request_class.DESCRIPTOR.fields_by_name
        says_position = "journal" in response_class.DESCRIPTOR.fields_by_name

        async def settled(since_s: float) -> None:
            proof = dispatcher.settled(since_s)
            await (dispatcher.storage_watch.bound(proof) if rpc.reads else proof)

        async def answer(request: Any) -> Any:
            since_s = time.monotonic() if rpc.decides else math.inf
            try:
                if permissions is not None:
                    permissions.check(name, request, dispatcher.state)
                if says_known:
                    caller = "" if permissions is None else permissions.caller()
                    await dispatcher.history.check(_sender(request), request.known, caller)
                if (response := await function(request)) is None:
                    response = response_class()
            except Unavailable:
                raise
            except ForebayError:  # an error describes the state, so it must be settled, too
                await settled(since_s)
                raise
            if not getattr(request, "unproved", False):
                await settled(since_s)
            if says_position:
                response.journal.CopyFrom(dispatcher.position())
            return response

        traced = answer if tracer is None else _traced(tracer, dispatcher, name, answer)
        return traced, request_class, response_class

    return {name: method(name, rpc) for name, rpc in rpcs.items()}


def _sender(request: Any) -> str:
    """Who has sent it, as it says itself."""
    known = request.DESCRIPTOR.fields_by_name
    if "job" in known and request.HasField("job"):
        return f"a trainer of dataset {request.job.dataset_id}"
    found = (f"{who} {getattr(request, name)}" for name, who in _SENDERS.items() if name in known)
    return next(found, "a worker")


def _traced(tracer: Any, dispatcher: Dispatcher, name: str, answer: Function) -> Function:
    """`answer` within a span, for callers that have one."""

    async def in_span(request: Any) -> Any:
        parent = tracing.parent(str(current_metadata().get(tracing.KEY, "")))
        if parent is None:
            return await answer(request)
        with tracer.start_as_current_span(f"forebay.{name}", parent) as span:
            task = dispatcher.state.tasks.get(getattr(request, "task_id", 0))
            if task is not None and (worker := dispatcher.state.workers.get(task.worker_id)):
                span.set_attribute("forebay.task", task.task_id)
                span.set_attribute("forebay.worker", worker.address)
            response = await answer(request)
            if name == "LeaseSplits":
                span.set_attribute("forebay.splits", response.count)
            return response

    return in_span
