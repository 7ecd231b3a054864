"""How far saves are, and how fast they are written, in the status."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest

from forebay.service.core import commands as c
from forebay.service.core.status import status
from forebay.service.dispatcher import save_rates as module
from forebay.service.dispatcher.decider import Decider
from forebay.service.dispatcher.save_rates import SaveRates

from ..core.test_saves import Saves


def test_a_save_from_its_first_chunk_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 100.0
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now_s))
    given = Saves()
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
