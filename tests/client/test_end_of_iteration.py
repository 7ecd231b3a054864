"""When a consumer has read all that there is for it."""

from __future__ import annotations

import pytest

from forebay.journal.proto import events_pb2 as ev
from forebay.service.client import consumer as consumer_module
from forebay.service.client.consumer import Consumer
from forebay.service.client.options import AS_EVER, ReadOptions, TargetWorkers
from forebay.service.delivery import EndOfTask
from forebay.service.proto import forebay_pb2 as pb

from .connections import Client, Dispatcher


def task(task_id: int, *tags: str) -> pb.TaskInfo:
    served = [ev.TransferServer(protocol="tcp", address="h:1")]
    return pb.TaskInfo(
        task_id=task_id, worker_uid=10 + task_id, transfer_servers=served, worker_tags=tags,
        worker_address=f"h:{task_id}",
    )  # fmt: skip


@pytest.mark.parametrize("dynamic", [False, True])
def test_beside_workers_of_other_trainers(monkeypatch: pytest.MonkeyPatch, dynamic: bool) -> None:
    """What one of them has lost may come from ours, if they share splits."""
    monkeypatch.setattr(consumer_module, "BlockClient", Client)
    monkeypatch.setattr(Client, "all", {}, raising=False)
    reading = ReadOptions(targets=TargetWorkers.AUTO, dynamic=dynamic)
    joined = pb.JoinIterationResponse(consumer_id=1)
    consumer = Consumer(Dispatcher(), joined, credit_bytes=1, reading=reading)  # type: ignore[arg-type]
    try:
        consumer._update(pb.ConsumerHeartbeatResponse(tasks=[task(1), task(2, "colocated")]))
        consumer._end(1, EndOfTask())
        assert consumer._has_ended() == (not dynamic)
        if dynamic:
            consumer._update(pb.ConsumerHeartbeatResponse(tasks=[task(1), task(3)], finished=True))
            assert not consumer._has_ended() and Client.all[13].reads == [3]
            consumer._end(3, EndOfTask())
            assert consumer._has_ended()
    finally:
        consumer.close()


def test_who_waits_for_long_says_what_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(consumer_module, "BlockClient", Client)
    monkeypatch.setattr(Client, "all", {}, raising=False)
    joined = pb.JoinIterationResponse(consumer_id=1)
    consumer = Consumer(Dispatcher(), joined, credit_bytes=1, reading=AS_EVER)  # type: ignore[arg-type]

    def said(at_s: float) -> str:
        caplog.clear()
        consumer._warn_of_waiting(at_s)
        return "".join(caplog.messages)

    try:
        consumer._update(pb.ConsumerHeartbeatResponse(tasks=[task(1), task(2)]))
        assert said(100) == said(159) == ""
        silent, refusing = Client.all[11], Client.all[12]
        silent.silence, refusing.silence = (False, 7), (True, 8)
        assert said(160) == (
            "no element for 60 s: waiting for task 1 of worker h:1, which sends nothing (for 7 s); "
            "task 2 of worker h:2, which refuses connections (for 8 s)"
        )
        assert said(219) == "", "not until it has waited for twice as long"
        consumer._held_by_others.add(1)
        consumer._update(pb.ConsumerHeartbeatResponse(tasks=[task(1)]))
        assert said(220) == (
            "no element for 120 s: waiting for task 2 of worker h:2, which refuses connections "
            "(for 8 s), given up by the dispatcher; task 1 of worker h:1, of which other trainers "
            "have the rest, and have not used it"
        )
        consumer._given_up.clear()
        consumer._end(1, EndOfTask())
        assert said(340).endswith("for the other readers of the epoch, to come to its end")
        silent.send(1, 5)
        while not isinstance(consumer._next_delivered(), tuple):
            pass
        assert said(1000) == said(1059) == "", "it waits anew"
    finally:
        consumer.close()
