"""Which process has which splits, and what becomes of those that fail: without a process."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest

from forebay.service.errors import PipelineError
from forebay.service.pipelines import SkipReport, SplitRange
from forebay.service.pipelines.python.child_connections import Died, ElementPlace, Failed
from forebay.service.pipelines.python.run_states import (
    SILENT_S,
    Ask,
    EndLate,
    FailureRules,
    Instruction,
    RunStates,
    StartRun,
)
from forebay.service.proto.python_pb2 import RAISE, RETRY, SKIP, OnError


def states(
    on_error: OnError = RAISE, limit: int = 100, width: int = 2, **how: Any
) -> tuple[RunStates, Any]:
    """And how to tell it of an event, at second 0."""
    made = RunStates(FailureRules(on_error, limit, how.pop("timeout_s", 0), "w:1"), width, **how)

    def tell(event: str, *what: Any, now_s: float = 0) -> list[Instruction]:
        told: list[Instruction] = getattr(made, event)(*what, now_s)
        return told

    return made, tell


def test_a_range_is_asked_for_when_a_slot_has_nothing_to_do_and_not_before() -> None:
    made, tell = states()
    assert tell("begun") == [Ask()]
    assert tell("granted", SplitRange(0, 3, 0)) == [StartRun(0, 0, 3, 0), Ask()]
    assert tell("granted", SplitRange(3, 1, 0)) == [StartRun(1, 3, 1, 0)]
    made.received(0, 5, ElementPlace(1, 2))
    assert tell("done", 1) == [Ask()]
    assert tell("granted", None) == []
    assert not made.is_over
    assert tell("done", 0) == []
    assert made.is_over


@pytest.mark.parametrize("on_error", [RETRY, SKIP])  # no split is to blame for a start
def test_starts_that_fail_count_for_their_own_splits(on_error: OnError) -> None:
    """All processes end at once if their fork server does."""
    _, tell = states(on_error, 1)
    tell("begun")
    tell("granted", SplitRange(0, 3, 0))
    tell("granted", SplitRange(3, 3, 0))
    died = Died("with the worker's fork server", ElementPlace(-1, -1), ElementPlace(-1, 0))
    assert tell("failed", 0, died) == [StartRun(0, 0, 3, 0)]
    assert tell("failed", 1, died) == [StartRun(1, 3, 3, 0)]
    with pytest.raises(PipelineError, match="its start: the process that ran it ended"):
        tell("failed", 0, died)


def test_who_takes_too_long_is_ended_once_and_not_for_what_others_wait(
    caplog: pytest.LogCaptureFixture,
) -> None:
    made, tell = states(timeout_s=5)
    tell("begun")
    tell("granted", SplitRange(0, 9, 0))
    assert tell("polled", {0: ElementPlace(-1, -1)}, now_s=6) == []  # its start may take a minute
    assert tell("polled", {0: ElementPlace(0, 0)}, now_s=10) == []
    made.stalled(20)
    assert tell("polled", {0: ElementPlace(0, 0)}, now_s=34) == []
    assert tell("polled", {0: ElementPlace(0, 0)}, now_s=35) == [EndLate(0)]
    assert tell("polled", {0: ElementPlace(0, 0)}, now_s=60) == []
    with pytest.raises(PipelineError, match="0: it has taken longer than 5 s") as raised:
        tell("failed", 0, Died("it was killed by SIGKILL", ElementPlace(0, 0), ElementPlace(0, 0)))
    assert raised.value.code == "DEADLINE_EXCEEDED"
    assert made.patience_s == 5

    made, _ = states()
    made.begun(0)
    made.granted(SplitRange(0, 9, 0), 0)
    for now_s in (1, 1 + SILENT_S, 100):
        assert made.polled({0: ElementPlace(0, 0)}, now_s) == []
    (said,) = caplog.messages
    assert said == "a Python dataset's function is in split 0, element 0 for 60 s"


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("on_error", [RETRY, SKIP])
def test_whatever_fails_when_each_element_comes_once(on_error: OnError, seed: int) -> None:
    """But for the rest of what was skipped."""
    rng = random.Random(seed)
    size = {split: rng.randrange(4) for split in range(30)}
    made, tell = states(on_error, 1000, width=rng.randint(1, 3))
    firsts = iter(range(0, 30, 5))
    running: dict[int, list[ElementPlace]] = {}  # what is to come yet
    asked, reports, came = 0, [], Counter[ElementPlace]()
    skipped: dict[int, int] = {}
    todo = tell("begun")
    while not made.is_over:
        for instruction in todo:
            match instruction:
                case Ask():
                    asked += 1
                case SkipReport(split, element):
                    reports.append(split)
                    skipped[split] = element
                case StartRun(slot, first, count, start):
                    assert slot not in running
                    running[slot] = [
                        ElementPlace(s, e)
                        for s in range(first, first + count)
                        for e in range(start if s == first else 0, size[s])
                    ]
        assert asked <= 1
        event = rng.choice(["ask"] * asked + ["report"] * bool(reports) + ["run"] * len(running))
        if event == "ask":
            asked = 0
            begins = next(firsts, None)
            todo = tell("granted", None if begins is None else SplitRange(begins, 5, 0))
        elif event == "report":
            reports.pop(0)
            todo = tell("answered", True)
        else:
            slot = rng.choice([*running])
            left = running[slot]
            taken = rng.randint(0, len(left))
            if taken:
                came.update(left[:taken])
                behind = ElementPlace(left[taken - 1].split, left[taken - 1].element + 1)
                made.received(slot, taken, behind)
                del left[:taken]
            todo = []
            if not left:
                del running[slot]
                todo = tell("done", slot)
            elif rng.random() < 0.3:
                del running[slot]
                lost = rng.randrange(len(left)) if rng.random() < 0.5 else 0
                at = left[lost]  # what is before it was made and not sent, if it died
                died = Died("exit code 7", at, ElementPlace(left[0].split, 0))
                failed = Failed("UNKNOWN", "why", at)
                todo = tell("failed", slot, died if lost or on_error == SKIP else failed)
    wanted = {
        ElementPlace(split, element)
        for split in range(30)
        for element in range(skipped.get(split, size[split]))
    }
    assert came == dict.fromkeys(wanted, 1)


def test_a_range_is_made_once_all_of_it_came_whatever_failed() -> None:
    complete: list[int] = []
    made, tell = states(RETRY, width=1)
    tell("begun")
    whole = SplitRange(0, 6, 0, made=complete.append)
    assert tell("granted", whole) == [StartRun(0, 0, 6, 0)]
    made.received(0, 3, ElementPlace(2, 1))
    failure = Failed("UNKNOWN", "text", ElementPlace(2, 1))
    assert tell("failed", 0, failure) == [StartRun(0, 2, 4, 1)]
    assert complete == []
    tell("done", 0)
    assert complete == [6]
