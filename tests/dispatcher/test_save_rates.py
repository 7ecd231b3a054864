"""How far saves are, and how fast they are written, in the status."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from forebay.journal.proto import events_pb2 as ev
from forebay.service.core import commands as c
from forebay.service.core.machine import apply, decide
from forebay.service.core.status import status
from forebay.service.dispatcher import save_rates as module
from forebay.service.dispatcher.decider import Decider
from forebay.service.dispatcher.save_rates import SaveRates

from ..core.test_saves import Saves


class Told(Saves):
    """Tells subscribers of its events, as a Decider does."""

    def __init__(self) -> None:
        self.subscribers: list[Callable[[ev.Event], None]] = []
        super().__init__()

    def subscribe(self, callback: Callable[[ev.Event], None]) -> None:
        self.subscribers.append(callback)

    def when(self, command: c.Command) -> Any:
        events, answer = decide(self.state, command, 1)
        for event in events:
            apply(self.state, event)
            for subscriber in self.subscribers:
                subscriber(event)
        self.then = [event.WhichOneof("event") for event in events]
        return answer


def test_a_save_from_its_first_chunk_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 100.0
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now_s))
    given = Told()
    rates = SaveRates(cast(Decider, given))
    save = given.start(sizes=(160,))
    given.worker(1)
    given.worker(2)
    for worker_id in [*given.state.workers]:
        given.assign(worker_id)
    assert rates.status() == []
    now_s += 10
    given.commit(save, 0, 0, 1)
    (rate,) = rates.status()
    assert rate == {"path": "/s", "elements_per_s": 0.5, "left_s": None}
    given.complete(save, 0, 1)
    (shown,) = status(given.state)["saves"]
    splits = save.streams[0].count
    assert (shown["written"], shown["splits"]) == (splits, [160])
    assert shown["expected_elements"] == 160 * 5 // splits
    (rate,) = rates.status()
    assert rate["left_s"] == (shown["expected_elements"] - 5) / 0.5
    later = SaveRates(cast(Decider, given))  # of another leader
    now_s += 2
    given.commit(save, 1, 0, 2)
    assert [rate["elements_per_s"] for rate in later.status()] == [2.5]
    given.when(c.FailSave(save_id=save.save_id, code="INTERNAL", message="why"))
    assert rates.status() == later.status() == []
