"""What an operator is told 10, 30 and 90 s after each fault, by simulated clusters' statuses."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import pytest

from forebay.service.client.options import ShardingPolicy
from forebay.service.diagnosis import findings
from forebay.service.errors import PipelineError
from forebay.service.findings import Finding

from . import remote
from .network import Weather
from .patches import replaced, simulated
from .pipeline import Computed
from .run import Run, prepared
from .scenario import Scenario, draw

WARM_S = 30
MOMENTS_S = (10, 30, 90)
HEALTHY = r"note job job: trainers wait \d% of the time: they are what is slow"


def healthy(**more: Any) -> Scenario:
    """Two workers make 10 elements a second, and two trainers take 4, with nothing in their way."""
    scenario = draw(0, mode="shared")
    pipeline = replace(
        scenario.pipeline, splits=100_000, providers=1, passes=1, split_s=0.2, block_elements=1,
        endless=False, python=False,
    )  # fmt: skip
    values: dict[str, Any] = {
        "files": False, "dispatchers": 1, "workers": 2, "trainers": 2, "named": True, "epochs": 1,
        "policy": ShardingPolicy.DYNAMIC, "pipeline": pipeline, "step_s": 0.6, "faults": [],
        "credit_bytes": 400, "output_bytes": 400, "preemption": 0, "preempted": 0, "leaves": 0,
        "weather": Weather(1e-3, pipe_bytes=64 << 10), "memory_budget": 1 << 30, "lease_ms": 2_000,
        "worker_timeout_ms": 60_000, "client_timeout_ms": 120_000, "reconnect_grace_ms": 5_000,
        "removals": [], "neighbours": False, "finished_retention_ms": 300_000,
    }  # fmt: skip
    return replace(scenario, **(values | more))


def status(run: Run) -> dict[str, Any]:
    """Of the dispatcher that leads."""
    found: list[bytes] = []

    def ask(of: Any) -> None:
        found.extend(of.encoded_status())

    for node in run.dispatchers:
        dispatcher = None if node.process is None else node.process.local.get("dispatcher")
        if node.alive and node.process is not None and dispatcher is not None:
            node.process.spawn("asks", partial(ask, dispatcher))  # by its own clock
    assert run.kernel.run(lambda: bool(found), 0)
    return json.loads(b"".join(found))


DELETED = -1.0
ELEMENTS = Computed._elements


def elements(run: Computed) -> Iterator[Any]:
    for element in ELEMENTS(run):
        if run._pipeline.split_s == DELETED:
            raise PipelineError("NOT_FOUND", "/data/7.tfrecord; No such file or directory")
        yield element


def said(finding: Finding) -> str:
    return f"{finding.severity} {finding.subject}: {finding.what}; {finding.advice}"


def mutate(run: Run, **values: float) -> None:
    for name, value in values.items():
        object.__setattr__(run.scenario.pipeline, name, value)


def storage_hangs(run: Run) -> None:
    run.storages.remote.hangs_until_s = run.kernel.now + 40


def disk_hangs(run: Run) -> None:
    assert run.disk is not None
    run.disk.stall_s = 40.0
    run.kernel.at(1, lambda: setattr(run.disk, "stall_s", 0.0))


def source_hangs(run: Run) -> None:
    mutate(run, split_s=1e6)


def source_is_slow(run: Run) -> None:
    mutate(run, split_s=2.0)


def worker_is_killed(run: Run) -> None:
    run.workers[0].kill()


def worker_stops(run: Run) -> None:
    run.workers[0].pause()


def worker_is_cut_off(run: Run) -> None:
    for node in run.nodes:
        run.network.cut(run.workers[0].host, node.host)


def worker_drains(run: Run) -> None:
    run.workers[0].done = True
    run.workers[0].stop(drain=True)


def trainer_is_killed(run: Run) -> None:
    run.trainers[0].kill()


def trainers_are_killed(run: Run) -> None:
    for trainer in run.trainers:
        trainer.kill()


def trainer_stops(run: Run) -> None:
    run.trainers[0].pause()


def trainers_are_slow(run: Run) -> None:
    run.job.step_s = 3.0


def clock_jumps(run: Run) -> None:
    run.workers[0].kill()
    process = run.dispatchers[0].process
    assert process is not None
    run.kernel.at(6, lambda: setattr(process, "wall_offset_s", -3600.0))


def files_are_deleted(run: Run) -> None:
    run.oracle.failed.add(0)  # trainers may fail
    mutate(run, split_s=DELETED)


def leader_is_killed(run: Run) -> None:
    run.dispatchers[0].kill()


def nothing(run: Run) -> None: ...


class Case(NamedTuple):
    """A fault, and the first finding at each of MOMENTS_S."""

    strike: Callable[[Run], None]
    first: tuple[str, str, str]
    scenario: dict[str, Any] = {}  # noqa: RUF012 - nobody changes it


STORAGE = r"problem storage .*: it does not answer.*all go on by themselves.*bring nothing"
ANSWERS = r"note storage .*: it answers again, and did not for \d+ s"
SILENT = r"problem worker 10\.0\.0\.3:6000: it says nothing"
GIVEN_UP = r"problem worker 10\.0\.0\.3:6000: it was given up"
GONE = r"problem job job: 1 of its 2 trainers says nothing any more: killed, stopped or cut off"
ALL_GONE = GONE.replace("1 of its 2 trainers says", "2 of its 2 trainers say")
STALLED = r" job job: trainers wait 100%.*none makes an element.*does not answer.*bring nothing"
FAILED = (
    r"problem job job: its read failed at worker .*: .*NOT_FOUND: /data/7.tfrecord; No such file"
)
TERM_2 = "note dispatcher: it leads in term 2"
BUDGET = r"note worker .*: its --memory-budget is 100,000 bytes"
UNEVEN = r"note job job: trainers wait \d%"
BEGINS = r"slow job job: .*look again in half a minute"
FAST = {"step_s": 0.0}
CASES = {
    "nothing": Case(nothing, (HEALTHY, HEALTHY, HEALTHY)),
    "storage hangs": Case(storage_hangs, (STORAGE, STORAGE, ANSWERS)),
    "disk hangs": Case(disk_hangs, (STORAGE, STORAGE, ANSWERS), {"files": True}),
    "source hangs": Case(source_hangs, (BEGINS, "slow" + STALLED, "problem" + STALLED), FAST),
    "source is slow": Case(source_is_slow, (HEALTHY, "slow job .* profile", "slow job .* profile")),
    "worker killed": Case(worker_is_killed, (GIVEN_UP, GIVEN_UP, GIVEN_UP)),
    "worker stopped": Case(worker_stops, (SILENT, SILENT, GIVEN_UP)),
    "worker cut off": Case(worker_is_cut_off, (SILENT, SILENT, GIVEN_UP)),
    "worker drained": Case(worker_drains, (UNEVEN, UNEVEN, UNEVEN)),
    "trainer killed": Case(trainer_is_killed, (GONE, GONE, GONE)),
    "trainers killed": Case(trainers_are_killed, (ALL_GONE, ALL_GONE, ALL_GONE)),
    "trainer stopped": Case(trainer_stops, (HEALTHY, GONE, GONE)),
    "trainers slow": Case(trainers_are_slow, (HEALTHY, HEALTHY, HEALTHY)),
    "clock jumps": Case(clock_jumps, (GIVEN_UP, GIVEN_UP, GIVEN_UP)),
    "files deleted": Case(files_are_deleted, (FAILED, FAILED, FAILED)),
    "leader killed": Case(leader_is_killed, (TERM_2, TERM_2, TERM_2), {"dispatchers": 2}),
    "small budget": Case(nothing, (BUDGET, BUDGET, BUDGET), {"memory_budget": 100_000}),
}


@pytest.mark.parametrize("name", CASES)
def test_what_is_said_of_each_fault(name: str) -> None:
    case = CASES[name]
    with contextlib.ExitStack() as stack:
        stack.enter_context(simulated())
        stack.enter_context(replaced(Computed, _elements=elements))
        run = stack.enter_context(prepared(1, healthy(**case.scenario)))
        this = run.kernel
        for node in run.nodes:
            node.start()
        stack.enter_context(replaced(remote, TIMEOUT_S=60.0))
        this.run(lambda: False, WARM_S)
        began_s = this.now
        case.strike(run)
        for at_s, first in zip(MOMENTS_S, case.first, strict=True):
            this.run(lambda: False, began_s + at_s - this.now)
            told = status(run)
            found = [*map(said, findings(told))]
            assert re.match(first, found[0]), (at_s, found)
            growth = [each for each in found if re.search(r"start \d+ more worker", each)]
            # Within 10 s, workers have not told yet that they make nothing.
            assert not growth or "is slow" in name or at_s == 10, (at_s, found)
            assert not [each for each in found if "TensorFlow's own clients" in each]
            if name == "clock jumps":
                lost, *_ = findings(told)
                assert at_s - 7 < (lost.since_s or 0) <= at_s, "it does not stand at 0 s"
