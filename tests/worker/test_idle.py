"""Tasks that nobody reads: which of them are parked or give their memory, and how they end."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.journal.proto import events_pb2 as ev
from forebay.service.blocks import Block, Component
from forebay.service.delivery import ANY, EndOfTask, FirstComeOutput, Subscription
from forebay.service.memory_limit import memory_limit
from forebay.service.pipelines import SplitFeed
from forebay.service.proto import forebay_pb2 as pb
from forebay.service.worker import idle as idle_module
from forebay.service.worker.idle import Decided, IdleTask, IdleTasks, decide
from forebay.service.worker.task_pipeline import Pipelines
from forebay.service.worker.task_states import Complete
from forebay.service.worker.tasks import TaskDependencies, TaskRunner

from ..standbys import wait_until

TIMEOUT_S = 30
MOST = 100


def idle(task_id: int, held: int, *, parked: bool = True, cached: bool = False) -> IdleTask:
    return IdleTask(task_id, held, parked, cached)


def test_the_pipelines_left_last_are_not_parked() -> None:
    tasks = [idle(i, 1, parked=False) for i in range(5)]
    assert decide(tasks, 2, MOST, 0) == Decided([0, 1, 2], [])


def test_tasks_left_first_give_their_memory_first() -> None:
    tasks = [idle(1, 50), idle(2, 50, parked=False), idle(3, 50), idle(4, 50)]
    assert decide(tasks, 2, MOST, 0) == Decided([2], [1])
    assert decide(tasks, 2, 200, 120) == Decided([2], [1, 3])


def test_a_cache_gives_its_memory_only_if_others_need_it() -> None:
    tasks = [idle(1, 500, parked=False, cached=True), idle(2, 50)]
    assert decide(tasks, 1, MOST, 0) == Decided([], [])
    assert decide(tasks, 1, MOST, 10) == Decided([1], [])


@given(
    st.lists(st.builds(idle, st.integers(), st.integers(0, 60), parked=st.booleans()), max_size=8),
    st.integers(0, 4), st.integers(0, 200),
)  # fmt: skip
def test_idle_tasks_give_as_much_memory_as_is_needed(
    tasks: list[IdleTask], kept: int, needed: int
) -> None:
    tasks = [task._replace(task_id=i) for i, task in enumerate(tasks)]
    decided = decide(tasks, kept, MOST, needed)
    stays = [task for task in tasks if task.task_id not in (*decided.park, *decided.shed)]
    total = sum(task.held_bytes for task in tasks)
    left = sum(task.held_bytes for task in stays)
    assert left <= MOST and (not stays or total - left >= needed or not left)
    assert sum(not task.is_parked for task in stays) <= kept


class Splits:
    """A dispatcher that leases splits one by one, up to a number; others take the rest."""

    def __init__(self, mine: int) -> None:
        self.mine = mine
        self.leased = 0
        self.is_over = False
        self.completed = threading.Event()
        self.numbers: list[int] = []  # of requests

    def get_dataset(self, dataset_id: str, *, with_graph: bool) -> Any:
        definition = ev.DatasetDefinition(sources=[ev.SplitSource(count=1000, singly=True)])
        return SimpleNamespace(definition=definition, graph=b"")

    def call(self, request: Any, *_: Any, **__: Any) -> Any:
        if isinstance(request, pb.CompleteTaskRequest):
            self.completed.set()
            return None
        assert isinstance(request, pb.LeaseSplitsRequest)
        if request.request.number:
            self.numbers.append(request.request.number)
        if not request.want:
            return pb.LeaseSplitsResponse(end_of_splits=self.is_over)
        if self.is_over or self.leased == self.mine:
            return pb.LeaseSplitsResponse(end_of_splits=True)
        self.leased += 1
        return pb.LeaseSplitsResponse(lease_id=self.leased, first=self.leased - 1, count=1)


class OneAnElement(Pipelines):
    """Each split is an element."""

    def open(self, *_: Any) -> Any:
        def run(feed: SplitFeed) -> Any:
            def blocks() -> Iterator[Block]:
                while (found := feed.next_range(0, 0, False)) is not None:
                    yield Block(1, (Component(np.array([found.first])),))

            return SimpleNamespace(blocks=blocks, cancel=lambda: None, needs=0, waiting=0, most=0)

        return SimpleNamespace(run=run, close=lambda: None)


@pytest.fixture
def make() -> Iterator[Callable[[Splits], tuple[TaskRunner, IdleTasks, set[int]]]]:
    made: list[tuple[TaskRunner, IdleTasks]] = []

    def make(splits: Splits) -> tuple[TaskRunner, IdleTasks, set[int]]:
        runner = TaskRunner(
            pb.Task(task_id=1, num_sources=1), FirstComeOutput(1000),
            TaskDependencies(
                splits,  # type: ignore[arg-type]
                threading.Semaphore(), OneAnElement(), lambda *_: [Complete(1)],
            ),
        )  # fmt: skip
        read: set[int] = set()
        tasks = IdleTasks(lambda: [runner], lambda: set(read), lambda: None, 1 << 30, 0, 0)
        made.append((runner, tasks))
        runner.start()
        return runner, tasks, read

    yield make
    for runner, tasks in made:
        tasks.stop()
        runner.cancel()
        assert runner.join(TIMEOUT_S)


def test_a_task_that_nobody_reads_completes_once_other_workers_took_all_splits(make: Any) -> None:
    """The task was parked before its pipeline began."""
    splits = Splits(10)
    runner, tasks, _ = make(splits)
    tasks.start()
    wait_until(lambda: runner.is_parked)
    assert runner.join(0)
    splits.is_over = True
    assert splits.completed.wait(TIMEOUT_S)
    assert not splits.leased


def test_a_task_that_was_left_goes_on_for_the_next_reader(make: Any) -> None:
    splits = Splits(10)
    runner, tasks, read = make(splits)
    read.add(1)
    tasks.start()
    got: list[int] = []

    def take(count: int) -> None:
        opened: Any = runner.output.open(ANY)
        for _ in range(count):
            item: Any = opened.wait(TIMEOUT_S)
            got.extend(np.asarray(item.components[0].values).tolist())
        if len(got) == 10:
            assert opened.wait(TIMEOUT_S) == EndOfTask()
        opened.close()

    for count in (2, 1, 3):
        take(count)
        read.clear()
        wait_until(lambda: runner.is_parked)
        read.add(1)
    take(4)
    assert got == [*range(10)]
    assert splits.completed.wait(TIMEOUT_S)
    assert splits.numbers == sorted(set(splits.numbers)), "each request has a number of its own"


def test_a_reader_that_comes_while_a_task_is_parked_gets_every_element(make: Any) -> None:
    splits = Splits(10)
    runner, _, _ = make(splits)
    runner.park(runner.output.opens, 0)
    opened: Any = runner.output.open(ANY)  # at any point of it
    got = 0
    while isinstance(opened.wait(TIMEOUT_S), Block):
        got += 1
    assert got == 10


def test_a_parked_task_resumes_although_its_first_thread_could_not_start(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    splits = Splits(3)
    runner, tasks, read = make(splits)
    tasks.start()
    wait_until(lambda: runner.is_parked)
    read.add(1)
    new_thread, refused = runner._new_thread, threading.Event()

    def no_thread() -> threading.Thread:
        thread: threading.Thread = new_thread()
        if not refused.is_set():
            monkeypatch.setattr(thread, "start", refuse)
        return thread

    def refuse() -> None:
        refused.set()
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(runner, "_new_thread", no_thread)
    carrier = threading.Lock()  # as a carrier's, which holds it as it opens

    def changed(*_: object) -> None:
        with carrier:
            pass

    runner.output.on_change = changed
    with carrier:
        opened = runner.output.open(ANY)
    assert isinstance(opened, Subscription) and refused.is_set()
    assert [type(opened.wait(TIMEOUT_S)) for _ in range(4)] == [Block] * 3 + [EndOfTask]


def test_a_parked_task_completes_when_its_last_elements_are_dropped(make: Any) -> None:
    splits = Splits(1)
    runner, _, _ = make(splits)
    opened: Any = runner.output.open(ANY)
    wait_until(lambda: runner.output.ended)
    opened.close()
    runner.park(runner.output.opens, 0)
    wait_until(lambda: runner.is_parked)
    assert runner.shed() == 1
    assert splits.completed.wait(TIMEOUT_S)


@pytest.mark.parametrize("stops", [False, True])
def test_each_check_asks_a_silent_dispatcher_only_once(
    monkeypatch: pytest.MonkeyPatch, stops: bool
) -> None:
    """A call takes seconds; meanwhile no memory is freed, and the worker cannot stop."""
    monkeypatch.setattr(idle_module, "POLL_S", -1)
    monkeypatch.setattr(idle_module, "MAX_POLL_S", -1)
    asked: list[int] = []

    def parked(task_id: int) -> Any:
        def is_pass_over() -> bool | None:
            asked.append(task_id)
            if stops:
                tasks.stop()
            return False if stops else None

        return SimpleNamespace(
            task=pb.Task(task_id=task_id), output=SimpleNamespace(opens=1, held_bytes=0),
            is_parked=True, is_being_parked=lambda: False, is_pass_over=is_pass_over,
        )  # fmt: skip

    runners = [parked(task_id) for task_id in range(3)]
    tasks = IdleTasks(lambda: runners, set, lambda: None, 1 << 30, 0, 0)
    tasks._check(False)
    assert len(asked) == 1
    if not stops:
        tasks._check(False)
        tasks._check(False)
        assert sorted(asked) == [0, 1, 2], "in turn"


@pytest.mark.parametrize(
    ("line", "file"),
    [
        ("0::/pods/mine", "sys/fs/cgroup/pods/mine/memory.max"),
        ("0::/pods/mine", "sys/fs/cgroup/pods/memory.max"),
        ("0::/pods/of/the/host", "sys/fs/cgroup/memory.max"),
        ("4:cpu,memory:/mine", "sys/fs/cgroup/memory/mine/memory.limit_in_bytes"),
    ],
)
def test_the_memory_limit_of_a_cgroup_is_respected(tmp_path: Any, line: str, file: str) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(f"7:cpuset:/\n{line}\n")
    machine = memory_limit(tmp_path)
    limit = tmp_path / file
    limit.parent.mkdir(parents=True)
    limit.write_text("max\n")
    assert memory_limit(tmp_path) == machine
    limit.write_text(f"{100 << 20}\n")
    assert memory_limit(tmp_path) == 100 << 20
