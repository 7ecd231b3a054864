"""RayWorkers: workers of Forebay as actors of Ray.

    ray.init("auto")
    with RayWorkers(WorkerConfig("10.0.0.5:5050", insecure=True), resources={"CPU": 8}):
        …  # each node has a worker
    # they have drained

Ray keeps them: a placement group reserves their resources, and finds another place if a node dies;
actors that die are restarted. Each worker is a child process of its actor, and ends with it.
"""

from __future__ import annotations

import os
import threading
import time
import traceback
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Self

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError
from ray.util import get_node_ip_address
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from ..errors import ForebayError, InvalidArgument, Unavailable
from ..servers import WorkerConfig
from .node_worker import AFTER_DRAIN_S, NodeWorker

ONE_CPU = MappingProxyType({"CPU": 1.0})

AGAIN_S = 5.0
"""The pause before an actor whose worker could not start ends, for Ray to start both again."""


class RayWorkers:
    """Workers on the Ray cluster to which this process is connected. A context manager.

    If this process ends without `stop`, Ray ends the workers, too, and they do not drain.
    """

    def __init__(
        self,
        config: WorkerConfig,
        *,
        workers: int | None = None,
        resources: Mapping[str, float] = ONE_CPU,
        timeout_s: float = 600.0,
    ) -> None:
        """Returns when the workers are registered.

        `config` is that of each worker. Without a `host`, it listens on the address of its node,
        and then beyond loopback needs TLS or `insecure`; files for TLS lie under the same paths on
        all nodes. With a port other than 0, a node can have one worker.

        Each worker reserves `resources` of Ray, such as {"CPU": 8, "forebay": 1}. By default, each
        node that has them, free or in use, gets one worker: Ray waits until they are free. After a
        node's death it waits for a new node.
        With a number of `workers`, Ray spreads them over its nodes, and a node can have several.

        Raises InvalidArgument; Unavailable if Ray does not reserve the resources within `timeout_s`
        seconds, in which an autoscaler may start nodes, or if the workers are not registered within
        as long again; and ForebayError with the reason if a worker cannot start.
        """
        worker = NodeWorker(config)
        if not resources or any(not amount > 0 for amount in resources.values()):
            raise InvalidArgument(
                f"each of `resources` must be more than 0, such as {{'CPU': 8}}, not "
                f"{dict(resources)}"
            )
        number = _num_nodes_with(resources) if workers is None else workers
        if workers is not None and workers < 1:
            raise InvalidArgument(f"`workers` must be at least 1, not {workers}")
        if not number:
            raise InvalidArgument(
                f"no node of the Ray cluster has the `resources` {dict(resources)}: ask for less"
            )
        self._stop_timeout_s = worker.stop_timeout_s + AFTER_DRAIN_S
        self._actors: list[Any] = []
        self._group = placement_group(
            [dict(resources)] * number, strategy="STRICT_SPREAD" if workers is None else "SPREAD"
        )
        try:
            if not self._group.wait(timeout_s):
                raise Unavailable(
                    f"Ray did not reserve {dict(resources)} for each of {number} workers within "
                    f"{timeout_s:g} s: `ray status` shows what is free; ask for less, or give a "
                    "number of `workers`: by default each node gets one, also if it is in use"
                )
            made = ray.remote(_Actor)
            for index in range(number):
                actor = made.options(
                    # Of those that the group has reserved. Ray sets OMP_NUM_THREADS to it.
                    num_cpus=resources.get("CPU", 0),
                    max_restarts=-1,
                    scheduling_strategy=PlacementGroupSchedulingStrategy(self._group, index),
                )
                self._actors.append(actor.remote(worker))
            ray.get([actor.start.remote() for actor in self._actors], timeout=timeout_s)
        except BaseException as error:
            self.stop()
            if isinstance(error, GetTimeoutError):
                raise Unavailable(
                    f"{number} workers were not all registered within {timeout_s:g} s: `ray logs` "
                    "shows what they wait for"
                ) from None
            if isinstance(error, RayActorError):
                raise Unavailable(
                    f"a worker's actor ended: {error}; is Forebay installed on each node?"
                ) from error
            if isinstance(error, RayTaskError) and isinstance(error.cause, ForebayError):
                raise error.cause from None
            raise

    def stop(self) -> None:
        """The workers drain, all at once, and end. Idempotent."""
        actors, self._actors = self._actors, []
        if actors:
            drained = [actor.drain.remote() for actor in actors]
            ray.wait(drained, num_returns=len(drained), timeout=self._stop_timeout_s)
        remove_placement_group(self._group)  # Ray kills the actors

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


class _Actor:
    """Ray calls it in its process's main thread, so the worker lives as long as the process."""

    def __init__(self, worker: NodeWorker) -> None:
        self._worker = worker
        self._started = self._draining = False
        if ray.get_runtime_context().was_current_actor_reconstructed:
            try:
                self.start()
            except Exception:  # noqa: BLE001 - Ray restarts no actor whose `__init__` raises
                traceback.print_exc()
                time.sleep(AGAIN_S)
                os._exit(1)

    def start(self) -> None:
        if self._started:  # this call was for an earlier process of the actor
            return
        self._started = True
        self._worker.launch(get_node_ip_address())
        self._worker.wait_until_registered()
        threading.Thread(target=self._watch, name="forebay-worker-watch", daemon=True).start()

    def _watch(self) -> None:
        """Ends the actor with its worker, so that Ray starts both again."""
        self._worker.wait_until_ended()
        if not self._draining:
            os._exit(1)

    def drain(self) -> None:
        self._draining = True
        self._worker.stop()


def _num_nodes_with(resources: Mapping[str, float]) -> int:
    return sum(
        all(node["Resources"].get(name, 0) >= amount for name, amount in resources.items())
        for node in ray.nodes()
        if node["Alive"]
    )
