"""Static sharding: who has which place on the list of workers, and when all shards are read."""

from __future__ import annotations

import copy

import pytest

from forebay.journal.proto import events_pb2 as ev
from forebay.service.core import commands as c
from forebay.service.core.machine import apply
from forebay.service.core.places import place_of
from forebay.service.errors import FailedPrecondition, NotFound, Unavailable

from .given import Given

STATIC = [ev.FILE, ev.DATA, ev.FILE_OR_DATA, ev.HINT]


class Listed(Given):
    """A dispatcher with a list of workers."""

    def __init__(self, *addresses: str) -> None:
        super().__init__()
        if addresses:
            self.elect(*addresses)

    def elect(self, *addresses: str) -> None:
        elect = c.ElectLeader(
            term=self.state.term + 1, address="a:1", version="0", journal_id="j",
            worker_addresses=addresses,
        )  # fmt: skip
        self.when(elect)

    def comes(self, address: str, uid: int, stock: bool = False) -> int:
        """A worker registers; its id."""
        return self.when(c.RegisterWorker(address=address, uid=uid, stock=stock))

    def index(self, address: str) -> int | None:
        return place_of(self.state, address)

    def read(self, sharding: int = ev.DATA, name: str = "x") -> int:
        """Somebody joins an iteration; its id."""
        job_id = self.when(c.GetOrCreateJob(dataset_id="d", name=name, sharding=sharding))
        joined: ev.ConsumerJoined = self.when(c.JoinIteration(job_id=job_id, epoch=0))
        return joined.iteration_id

    def shards(self, iteration_id: int) -> dict[int, int | None]:
        """Of the iteration's tasks, by their workers."""
        tasks = [self.state.tasks[i] for i in self.state.iterations[iteration_id].tasks]
        return {task.worker_id: task.shard for task in tasks}


def test_places_are_exact_or_go_to_whoever_of_the_host_comes_first() -> None:
    given = Listed("a", "b:%port%", "b:%port_worker%", "c:1", "b:7", "/job/0")
    for number, address in enumerate(["b:9", "c:1", "b:7", "a:3", "b:8", "/job/0:worker"]):
        given.comes(address, number + 1)
    assert [given.index(a) for a in ("a:3", "b:9", "b:8", "c:1", "b:7", "/job/0:worker")] == [
        0, 1, 2, 3, 4, 5,
    ]  # fmt: skip


@pytest.mark.parametrize("address", ["d:1", "a:2", "aa:1", "a", "b", "b:1:2"])
def test_a_worker_that_is_not_listed_is_refused(address: str) -> None:
    given = Listed("a:1", "b:%port%")
    with pytest.raises(FailedPrecondition, match=r"a:1, b:%port%.*address is not configured"):
        given.comes(address, 1)


def test_there_are_no_more_workers_of_a_host_than_places() -> None:
    given = Listed("a:%port%", "a:%port%")
    given.comes("a:1", 1)
    second = given.comes("a:2", 2)
    with pytest.raises(FailedPrecondition, match=r"workers are already running.*a:1.*a:2"):
        given.comes("a:3", 3, stock=True)
    with pytest.raises(Unavailable, match="already running"):  # and asks again
        given.comes("a:3", 3)
    given.when(c.LoseWorker(worker_id=second, reason="no sign of life"))
    given.comes("a:3", 3)
    assert given.index("a:3") == 1
    with pytest.raises(Unavailable, match="already running"):  # its place is another's
        given.comes("a:2", 2)


def test_a_worker_finds_its_place_again() -> None:
    given = Listed("a", "a", "a")
    ids = {n: given.comes(f"a:{n}", n) for n in (1, 2)}
    for n in (1, 2):
        given.when(c.LoseWorker(worker_id=ids[n], reason="no sign of life"))
    given.comes("a:9", 9)  # nobody has had the third one
    given.comes("a:2", 2)
    given.comes("a:1", 11)  # another process
    assert [given.index(f"a:{n}") for n in (1, 2, 9)] == [0, 1, 2]
    given.elect("a", "a", "a")
    given.comes("a:2", 22)
    assert [given.index(f"a:{n}") for n in (1, 2, 9)] == [0, 1, 2]


@pytest.mark.parametrize("sharding", STATIC)
def test_each_worker_has_the_shard_of_its_place(sharding: int) -> None:
    given = Listed("a:1", "a:2", "a:3")
    third, first = given.comes("a:3", 3), given.comes("a:1", 1)
    iteration_id = given.read(sharding)
    second = given.comes("a:2", 2)
    assert given.shards(iteration_id) == {first: 0, second: 1, third: 2}


def test_a_task_has_the_shard_that_was_decided() -> None:
    """And not one that a later version would conclude from its worker's address."""
    given = Listed("a:1", "a:2")
    worker_id = given.comes("a:2", 2)
    iteration_id = given.read()
    (created,) = [e.task_created for _, e in given.state.recent if e.HasField("task_created")]
    assert created.shard == 1
    created = copy.copy(created)
    created.task_id, created.shard = 10**9, 0
    apply(given.state, ev.Event(task_created=created))
    assert given.state.tasks[10**9].shard == 0
    assert given.shards(iteration_id) == {worker_id: 0}


def test_an_iteration_is_finished_when_every_shard_was_read() -> None:
    given = Listed("a:1", "a:2", "a:3")
    one, two = given.comes("a:1", 1), given.comes("a:2", 2)
    iteration_id = given.read()
    given.when(c.CompleteTask(task_id=given.task_of(one)))
    given.when(c.CompleteTask(task_id=given.task_of(two)))
    assert given.then == ["task_completed"]  # the third shard has not been read
    three = given.comes("a:3", 3)
    given.when(c.LoseWorker(worker_id=three, reason="no sign of life"))
    assert given.then == ["worker_lost"]
    three = given.comes("a:3", 33)  # begins the shard anew
    assert given.shards(iteration_id) == {one: 0, two: 1, three: 2}
    given.when(c.CompleteTask(task_id=given.task_of(three)))
    assert given.then == ["task_completed", "iteration_finished"]


def test_a_shard_that_was_read_is_not_read_again() -> None:
    given = Listed("a:1", "a:2")
    one, two = given.comes("a:1", 1), given.comes("a:2", 2)
    iteration_id = given.read()
    given.when(c.CompleteTask(task_id=given.task_of(one)))
    given.when(c.LoseWorker(worker_id=one, reason="no sign of life", left=True))
    assert given.comes("a:1", 11)
    assert given.then == ["worker_registered"]
    given.read()
    assert given.then == ["consumer_joined"]
    given.when(c.CompleteTask(task_id=given.task_of(two)))
    assert given.state.iterations[iteration_id].finished


def test_a_worker_that_returns_to_another_place_begins_that_places_shard() -> None:
    given = Listed("a", "a")
    one, two = given.comes("a:1", 1), given.comes("a:2", 2)
    iteration_id = given.read()
    before = given.task_of(one)
    given.when(c.LoseWorker(worker_id=one, reason="no sign of life"))
    given.comes("a:3", 3)
    assert given.index("a:3") == 0
    given.when(c.LoseWorker(worker_id=two, reason="no sign of life"))
    one = given.comes("a:1", 1)
    assert given.task_of(one) != before
    assert given.shards(iteration_id)[one] == 1


def test_a_worker_that_returns_to_its_place_resumes_its_shard() -> None:
    given = Listed("a", "a")
    one = given.comes("a:1", 1)
    given.read()
    before = given.task_of(one)
    given.when(c.LoseWorker(worker_id=one, reason="no sign of life"))
    assert given.task_of(given.comes("a:1", 1)) == before


def test_static_sharding_needs_a_list_of_workers() -> None:
    given = Listed()
    given.worker(1)
    with pytest.raises(NotFound, match=r"Worker w:1 is not in the workers list.*worker_addresses"):
        given.read()
    given.read(ev.OFF, "y")


def test_another_list_divides_anew() -> None:
    given = Listed("a:1", "a:2")
    one = given.comes("a:1", 1)
    dynamic = given.iteration("dynamic").iteration_id
    static = given.read()
    told: list[ev.Event] = []
    given.subscribe(told.append)
    given.elect("a:2", "a:1")
    assert given.then == ["consumer_left", "iteration_collected", "leader_elected"]
    assert "another list of workers" in told[0].consumer_left.reason
    assert list(given.state.iterations) == [dynamic]
    assert given.state.workers[one].tasks == {given.task_of(one)}
    assert given.index("a:1") == 1
    again = given.read()
    assert again != static
    assert given.shards(again) == {one: 1}
    given.elect("a:2", "a:1")
    assert given.then == ["leader_elected"]
    given.elect("a:3")
    assert given.index("a:1") is None
    given.read()
    assert given.then == ["iteration_created", "consumer_joined"]
