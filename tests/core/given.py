"""Given events, when a command, then events."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from forebay.journal.proto import events_pb2 as ev
from forebay.journal.verification import ENDINGS
from forebay.service.core import commands as c
from forebay.service.core.machine import apply, decide
from forebay.service.core.state import State


class Given:
    """A state, and what happens to it."""

    now_ms, step_ms = 1, 0  # the clock, and by how much it goes on with each command

    def __init__(self) -> None:
        self.state = State()
        self._subscribers: list[Callable[[ev.Event], None]] = []
        self.when(c.ElectLeader(term=1, address="a:1", version="0", journal_id="j"))
        self.register("d", ev.SplitSource(count=100))

    def register(self, dataset_id: str, *sources: ev.SplitSource) -> None:
        definition = ev.DatasetDefinition(sources=sources)
        self.when(c.RegisterDataset(dataset_id=dataset_id, definition=definition))

    def subscribe(self, callback: Callable[[ev.Event], None]) -> None:
        """As a decider's."""
        self._subscribers.append(callback)

    def event(self, event: ev.Event) -> None:
        """The next one."""
        apply(self.state, event)

    def when(self, command: c.Command) -> Any:
        """Carry a command out; its answer."""
        self.now_ms += self.step_ms
        events, answer = decide(self.state, command, self.now_ms)
        for event in events:
            self.event(event)
        for tell in self._subscribers:
            for event in events:
                tell(event)
        self.then = [event.WhichOneof("event") for event in events]
        if isinstance(command, c.ElectLeader):
            assert {*self.then[:-1]} <= ENDINGS, "else `journal verify` finds fault with it"
        return answer

    def iteration(self, name: str = "", dataset_id: str = "d") -> ev.ConsumerJoined:
        job_id = self.when(c.GetOrCreateJob(dataset_id=dataset_id, name=name, sharding=ev.DYNAMIC))
        return self.when(c.JoinIteration(job_id=job_id, epoch=0))

    def worker(self, number: int, stock: bool = False, draining: bool = False) -> int:
        registered = c.RegisterWorker(
            address=f"w:{number}", uid=number, stock=stock, draining=draining
        )
        return self.when(registered)

    def task_of(self, worker_id: int) -> int:
        return max(self.state.workers[worker_id].tasks)

    def lease(self, task_id: int, want: int, pass_number: int = 0) -> Any:
        """Splits; None if there are none."""
        lease = self.when(
            c.LeaseSplits(task_id=task_id, source=0, pass_number=pass_number, want=want)
        )
        return lease if lease.count else None

    def hand_back(self, lease: ev.SplitsLeased, count: int) -> None:
        self.when(c.LeaseSplits(task_id=lease.task_id, returned=((lease.lease_id, count),)))


def dataset(blob: str, fingerprint: str = "", **fields: Any) -> c.RegisterDataset:
    graph = ev.TfDataGraph(blob=blob, fingerprint=fingerprint)
    definition = ev.DatasetDefinition(tf_data_graph=graph, **fields)
    return c.RegisterDataset(dataset_id="", definition=definition)
