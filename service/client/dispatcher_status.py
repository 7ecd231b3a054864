"""Fetches the dispatcher's status, and waits until workers are registered. Without TensorFlow."""

from __future__ import annotations

import json
import time
from typing import Any

from ..connections.dispatcher_client import DispatcherClient
from ..errors import InvalidArgument, Unavailable
from ..proto import forebay_pb2 as pb

LOOK_AGAIN_S = 0.2


def fetch_status(
    client: DispatcherClient, patience_s: float | None, *, workers_only: bool = False
) -> dict[str, Any]:
    """The dispatcher's status (service/core/status.py). Raises Unavailable."""
    request = pb.GetStatusRequest(workers_only=workers_only)
    try:
        answer = client.call(request, pb.GetStatusResponse, patience_s=patience_s)
    except Unavailable as error:
        if workers_only:
            raise
        # Perhaps it is the storage that hangs: then the status of memory says so.
        request.unproved = True
        try:
            answer = client.call(request, pb.GetStatusResponse, timeout_s=2, patience_s=2)
        except Unavailable:
            raise error from None
    return dict(json.loads(answer.status))


def wait_for_workers(
    service: str | tuple[str, str], count: int, *, timeout_s: float | None = 60.0
) -> None:
    """Wait for the dispatcher, and then until at least `count` workers are registered.

    Args:
      service: as in `read`.
      count: how many, Forebay's workers and tf.data service's own together; at least 1.
      timeout_s: how long to wait, in seconds; None: for ever.

    Raises Unavailable if there are fewer after that time, InvalidArgument for invalid arguments.
    """
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise InvalidArgument(f"count={count!r} must be a positive integer, the number of workers")
    if timeout_s is not None and not timeout_s >= 0:
        raise InvalidArgument(f"timeout_s={timeout_s!r} must be 0 seconds or more, or None")
    give_up_s = None if timeout_s is None else time.monotonic() + timeout_s
    with DispatcherClient(service) as client:
        while True:
            left_s = None if give_up_s is None else max(0.0, give_up_s - time.monotonic())
            found = len(fetch_status(client, left_s, workers_only=True)["workers"])
            if found >= count:
                return
            if left_s == 0:
                raise Unavailable(
                    f"{found} of {count} workers are registered after {timeout_s:g} s; start "
                    "more, or look into the logs of those that should be there"
                )
            time.sleep(LOOK_AGAIN_S if left_s is None else min(LOOK_AGAIN_S, left_s))
