"""Given events, when a command, then events."""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec
import pytest

from forebay.journal.proto import events_pb2 as ev
from forebay.service.core import commands as c
from forebay.service.core.machine import apply, decide
from forebay.service.core.state import State, lease_caller
from forebay.service.errors import FailedPrecondition, InvalidArgument, NotFound, Unavailable


class Given:
    """A state, and what happens to it."""

    def __init__(self) -> None:
        self.state = State()
        self.when(c.ElectLeader(term=1, address="a:1", version="0", journal_id="j"))
        self.register("d", ev.SplitSource(count=100))

    def register(self, dataset_id: str, *sources: ev.SplitSource) -> None:
        definition = ev.DatasetDefinition(sources=sources)
        self.when(c.RegisterDataset(dataset_id=dataset_id, definition=definition))

    def when(self, command: c.Command) -> Any:
        """Carry a command out; its answer."""
        events, answer = decide(self.state, command, 1)
        for event in events:
            apply(self.state, event)
        self.then = [event.WhichOneof("event") for event in events]
        return answer

    def iteration(self, name: str = "", dataset_id: str = "d") -> ev.ConsumerJoined:
        job_id = self.when(c.GetOrCreateJob(dataset_id=dataset_id, name=name, sharding=ev.DYNAMIC))
        joined: ev.ConsumerJoined = self.when(c.JoinIteration(job_id=job_id, epoch=0))
        return joined

    def worker(self, number: int) -> int:
        worker_id: int = self.when(c.RegisterWorker(address=f"w:{number}", uid=number))
        return worker_id

    def task_of(self, worker_id: int) -> int:
        return max(self.state.workers[worker_id].tasks)

    def lease(self, task_id: int, want: int, pass_number: int = 0) -> ev.SplitsLeased | None:
        lease: ev.SplitsLeased = self.when(
            c.LeaseSplits(task_id=task_id, source=0, pass_number=pass_number, want=want)
        )
        return lease if lease.count else None

    def hand_back(self, lease: ev.SplitsLeased, count: int) -> None:
        self.when(
            c.LeaseSplits(
                task_id=lease.task_id, source=0, pass_number=0, want=0,
                returned=((lease.lease_id, count),),
            )
        )  # fmt: skip


def dataset(blob: str, fingerprint: str = "", **fields: Any) -> c.RegisterDataset:
    graph = ev.TfDataGraph(blob=blob, fingerprint=fingerprint)
    definition = ev.DatasetDefinition(tf_data_graph=graph, **fields)
    return c.RegisterDataset(dataset_id="", definition=definition)


def test_graphs_of_one_fingerprint_are_one_dataset_unless_they_are_registered_otherwise() -> None:
    given = Given()
    first = given.when(dataset("a", "same"))
    assert given.when(dataset("b", "same")) == first
    assert given.then == []
    others = {
        given.when(dataset("a", "other")),
        given.when(dataset("a", "same", metadata=b"m")),
        given.when(dataset("a", "same", compression="ZSTD")),
        given.when(dataset("a")),
        given.when(dataset("b")),
    }
    assert len(others) == 5
    assert first not in others


def test_datasets_of_old_journals_are_found_by_their_graphs_themselves() -> None:
    given = Given()
    definition = ev.DatasetDefinition(tf_data_graph=ev.TfDataGraph(blob="a"))
    digest = hashlib.sha256(definition.SerializeToString()).hexdigest()
    assert given.state.dataset_by_fingerprint.get(digest) is None
    assert given.when(dataset("a")) == given.state.dataset_by_fingerprint[digest]


def test_a_dataset_whose_graph_is_lost_is_given_another_one_of_the_same_splits() -> None:
    given = Given()
    lost = dataset("a", "same", sources=[ev.SplitSource(count=9)])
    dataset_id = given.when(lost)
    given.when(c.DecideCompression(dataset_id=dataset_id, disable=True))

    def register(blob: str, restores: bool, count: int = 9) -> c.RegisterDataset:
        again = dataset(blob, sources=[ev.SplitSource(count=count)])
        return msgspec.structs.replace(again, dataset_id=dataset_id, restores=restores)

    assert given.when(register("b", False)) == dataset_id
    assert given.then == []
    with pytest.raises(InvalidArgument, match="other splits or another structure"):
        given.when(register("b", True, count=8))
    assert given.when(register("b", True)) == dataset_id
    assert given.then == ["dataset_registered"]
    restored = given.state.datasets[dataset_id]
    assert restored.definition.tf_data_graph.blob == "b"
    assert restored.compression_disabled, "which workers were told"
    assert given.when(register("b", True)) == dataset_id
    assert given.then == []
    assert given.when(dataset("c", "same", sources=[ev.SplitSource(count=9)])) == dataset_id


def test_a_named_job_is_found_whosever_dataset_it_is() -> None:
    given = Given()
    other = given.when(dataset("a"))
    job_id = given.when(c.GetOrCreateJob(dataset_id="d", name="n", sharding=ev.DYNAMIC))
    for dataset_id in (other, "d", "not registered"):
        again = c.GetOrCreateJob(dataset_id=dataset_id, name="n", sharding=ev.DYNAMIC)
        assert given.when(again) == job_id
        assert given.then == []
    with pytest.raises(InvalidArgument, match="Existing target workers: <0>; got <LOCAL>"):
        given.when(
            c.GetOrCreateJob(dataset_id="d", name="n", sharding=ev.DYNAMIC, target_workers=3)
        )


def test_splits_handed_back_find_another_task_when_all_others_have_completed() -> None:
    given = Given()
    first, second = given.worker(1), given.worker(2)
    given.iteration()
    mine, other = given.task_of(first), given.task_of(second)
    lease = given.lease(mine, 10)
    assert lease is not None
    while given.lease(other, 100) is not None:
        pass
    given.when(c.CompleteTask(task_id=other))
    given.hand_back(lease, 4)
    given.when(c.LoseWorker(worker_id=first, reason="drained"))
    assert given.then == ["worker_lost", "task_created"]
    again = given.lease(given.task_of(second), 10)
    assert again is not None
    assert again.first == lease.first + lease.count - 4
    while given.lease(given.task_of(second), 10) is not None:
        pass
    given.when(c.CompleteTask(task_id=given.task_of(second)))
    assert given.then[-2:] == ["task_completed", "iteration_finished"]


def test_an_iteration_whose_workers_are_all_lost_waits_for_the_next_one() -> None:
    given = Given()
    worker = given.worker(1)
    joined = given.iteration()
    given.when(c.LoseWorker(worker_id=worker, reason="killed"))
    assert given.then == ["worker_lost"]
    given.worker(2)
    assert given.then == ["worker_registered", "task_created"]
    assert not given.state.iterations[joined.iteration_id].finished


@pytest.mark.parametrize("name", ["", "named"])
def test_an_anonymous_iteration_ends_with_its_last_consumer(name: str) -> None:
    given = Given()
    worker = given.worker(1)
    joined = given.iteration(name)
    given.lease(given.task_of(worker), 10)
    given.when(c.LeaveIteration(consumer_id=joined.consumer_id, reason="r"))
    if name:
        assert given.then == ["consumer_left"]
        assert given.state.iterations
    else:
        assert given.then == ["consumer_left", "lease_lost", "iteration_collected"]
        state = given.state
        assert not (state.iterations or state.jobs or state.tasks or state.leases)
        assert not state.workers[worker].tasks


def test_an_epoch_that_was_left_early_goes_on_with_the_splits_that_are_left() -> None:
    given = Given()
    worker_id = given.worker(1)
    joined = given.iteration("named")
    lease = given.lease(given.task_of(worker_id), 10)
    assert lease is not None
    given.when(c.LeaveIteration(consumer_id=joined.consumer_id, reason="r"))
    given.when(c.CollectIteration(iteration_id=joined.iteration_id))
    assert given.then == ["lease_lost", "iteration_paused"]
    state = given.state
    assert not (state.tasks or state.leases or state.workers[worker_id].tasks)
    given.when(c.CollectIteration(iteration_id=joined.iteration_id))
    assert given.then == []
    other = given.worker(2)
    assert given.then == ["worker_registered"]  # nobody reads it
    again = given.iteration("named")
    assert given.then == ["task_created", "task_created", "consumer_joined"]
    assert again.iteration_id == joined.iteration_id
    got = [lease.count]
    for task_id in (given.task_of(worker_id), given.task_of(other)):
        while (lease := given.lease(task_id, 100)) is not None:
            assert lease.first == sum(got)
            got.append(lease.count)
        given.when(c.CompleteTask(task_id=task_id))
    assert sum(got) == 100
    assert given.then == ["task_completed", "iteration_finished"]


def test_a_lost_task_of_an_epoch_that_was_paused_is_not_gone_on_with() -> None:
    given = Given()
    worker_id = given.worker(1)
    joined = given.iteration("named")
    given.worker(2)
    task_id = given.task_of(worker_id)
    given.when(c.LoseWorker(worker_id=worker_id, reason="no sign of life"))
    given.when(c.LeaveIteration(consumer_id=joined.consumer_id, reason="r"))
    given.when(c.CollectIteration(iteration_id=joined.iteration_id))
    given.worker(1)
    assert given.then == ["worker_registered"]
    with pytest.raises(NotFound):
        given.lease(task_id, 1)


def test_a_process_whose_address_was_taken_is_refused() -> None:
    given = Given()
    given.when(c.RegisterWorker(address="w:1", uid=1))
    given.when(c.RegisterWorker(address="w:1", uid=2))
    with pytest.raises(FailedPrecondition, match="of its own"):
        given.when(c.RegisterWorker(address="w:1", uid=1))
    given.when(c.RegisterWorker(address="w:1", uid=2))
    assert given.then == []


def test_a_lease_is_at_most_half_of_an_even_share() -> None:
    given = Given()
    first = given.worker(1)
    given.worker(2)
    given.iteration()
    counts = []
    while (lease := given.lease(given.task_of(first), 1000)) is not None:
        counts.append(lease.count)
    assert counts[0] == 25
    assert counts == sorted(counts, reverse=True)
    assert sum(counts) == 100


def test_a_sweeping_task_ends_the_iteration_whatever_it_left() -> None:
    given = Given()
    first, second = given.worker(1), given.worker(2)
    given.iteration()
    mine, other = given.task_of(first), given.task_of(second)
    lease = given.lease(mine, 10)
    assert lease is not None
    given.when(c.CompleteTask(task_id=other))  # as with take(n): not all splits were asked for
    given.hand_back(lease, 4)
    given.when(c.LoseWorker(worker_id=first, reason="drained"))
    given.when(c.CompleteTask(task_id=given.task_of(second)))
    assert given.then == ["task_completed", "iteration_finished"]


def test_two_journals_do_not_share_ids() -> None:
    ids = set()
    for journal_id in ("a", "b"):
        state = State()
        elect = c.ElectLeader(term=1, address="a:1", version="0", journal_id=journal_id)
        for event in decide(state, elect, 1).events:
            apply(state, event)
        ids.add(state.next_id)
    assert len(ids) == 2


@pytest.mark.parametrize("event_format", [1, 2])
def test_after_a_repair_nobody_goes_on_and_no_id_comes_back(event_format: int) -> None:
    given = Given()
    worker_id = given.worker(1)
    joined = given.iteration("shared")
    task_id = given.task_of(worker_id)
    lease = given.lease(task_id, 10)
    assert lease is not None
    given.when(c.LoseWorker(worker_id=given.worker(2), reason="no sign of life"))
    cut = ev.LeaderElected(term=2, format=event_format, journal_id="k", after_repair=True)
    apply(given.state, ev.Event(leader_elected=cut))
    given.when(c.ElectLeader(term=3, address="a:1", version="0", journal_id="unused"))
    said = ["lease_lost", "consumer_left", "worker_lost", "leader_elected"]
    assert given.then == (said if event_format == 2 else said[-1:])
    state = given.state
    assert not state.lost_tasks
    assert state.predecessors == ["j"]
    given.when(c.ElectLeader(term=4, address="a:1", version="0", journal_id="unused"))
    assert given.then == ["leader_elected"]
    assert not (state.workers or state.worker_at or state.consumers or state.tasks or state.leases)
    assert state.iterations[joined.iteration_id].ledgers[0].lost == [(0, lease.count)]
    again = given.worker(1)
    assert again > lease.lease_id + 1000
    given.iteration("shared")
    lease = given.lease(given.task_of(again), 10)
    assert lease is not None
    assert lease.first == 10


def test_a_heartbeat_that_a_goodbye_has_overtaken_registers_nobody() -> None:
    given = Given()
    worker_id = given.worker(7)
    given.when(c.LoseWorker(worker_id=worker_id, reason="it said goodbye", left=True))
    with pytest.raises(FailedPrecondition, match="has said goodbye"):
        given.worker(7)
    assert given.worker(8)


def test_a_process_that_was_given_up_and_comes_back_goes_on_with_its_task() -> None:
    given = Given()
    worker_id = given.worker(7)
    joined = given.iteration()
    task_id = given.task_of(worker_id)
    lease = given.lease(task_id, 10)
    assert lease is not None
    given.when(c.LoseWorker(worker_id=worker_id, reason="no sign of life"))
    assert given.then == ["lease_lost", "worker_lost"]
    for command in (
        c.LeaseSplits(task_id=task_id, source=0, pass_number=0, want=1),
        c.CompleteTask(task_id=task_id),
    ):
        with pytest.raises(Unavailable, match="registered again"):
            given.when(command)
    again = given.worker(7)
    assert again != worker_id
    assert given.task_of(again) == task_id
    provider = given.state.iterations[joined.iteration_id].ledgers[0]
    assert provider.lost == []
    back = ((lease.lease_id, lease.count),)
    given.when(c.LeaseSplits(task_id=task_id, source=0, pass_number=0, want=0, returned=back))
    assert given.lease(task_id, 10) == lease_like(lease, given)
    assert not given.state.lost_tasks


def test_a_lease_whose_answer_was_lost_with_the_worker_is_found_when_it_comes_back() -> None:
    given = Given()
    worker_id = given.worker(7)
    given.iteration()
    task_id = given.task_of(worker_id)
    request = (lease_caller(task_id, 0), 1)
    ask = c.LeaseSplits(request=request, task_id=task_id, source=0, pass_number=0, want=5)
    lease = given.when(ask)
    given.when(c.LoseWorker(worker_id=worker_id, reason="no sign of life"))
    given.worker(7)
    assert given.when(ask) == lease
    assert given.then == []


def test_another_process_does_not_go_on_with_a_lost_task() -> None:
    given = Given()
    worker_id = given.worker(7)
    given.iteration()
    task_id = given.task_of(worker_id)
    given.when(c.LoseWorker(worker_id=worker_id, reason="no sign of life"))
    assert given.task_of(given.worker(8)) != task_id


@pytest.mark.parametrize("ends", ["finished", "collected", "replaced", "repaired", "departed"])
def test_a_task_that_nobody_can_go_on_with_is_forgotten(ends: str) -> None:
    given = Given()
    worker_id = given.worker(7)
    joined = given.iteration()
    task_id = given.task_of(worker_id)
    given.when(
        c.LeaseSplits(
            request=(lease_caller(task_id, 0), 1), task_id=task_id, source=0, pass_number=0, want=5
        )
    )
    given.when(c.LoseWorker(worker_id=worker_id, reason="r", left=ends == "departed"))
    assert bool(given.state.lost_tasks) == (ends != "departed")
    if ends == "finished":
        given.when(c.CompleteTask(task_id=given.task_of(given.worker(8))))
    elif ends == "collected":
        given.when(c.LeaveIteration(consumer_id=joined.consumer_id, reason="r"))
    elif ends == "replaced":
        given.worker(7)
        given.when(c.RegisterWorker(address="w:7", uid=8))
    elif ends == "repaired":
        apply(given.state, ev.Event(leader_elected=ev.LeaderElected(term=2, journal_id="k")))
    assert not given.state.lost_tasks
    assert lease_caller(task_id, 0) not in given.state.answers


def lease_like(lease: ev.SplitsLeased, given: Given) -> ev.SplitsLeased:
    """The same splits, leased once more."""
    again = ev.SplitsLeased()
    again.CopyFrom(lease)
    again.lease_id = max(given.state.leases)
    return again


def test_splits_handed_back_by_the_last_worker_wait_for_the_next_one() -> None:
    given = Given()
    first = given.worker(1)
    given.iteration()
    mine = given.task_of(first)
    second = given.worker(2)
    other = given.task_of(second)
    given.when(c.CompleteTask(task_id=other))
    given.when(c.LoseWorker(worker_id=second, reason="it said goodbye", left=True))
    lease = given.lease(mine, 10)
    assert lease is not None
    given.hand_back(lease, 4)
    given.when(c.LoseWorker(worker_id=first, reason="it said goodbye", left=True))
    assert given.then == ["worker_lost"]
    again = given.lease(given.task_of(given.worker(3)), 10)
    assert again is not None
    assert again.first == lease.first + lease.count - 4


def test_splits_handed_back_after_the_next_pass_began_are_leased_before_all_others() -> None:
    given = Given()
    first, second = given.worker(1), given.worker(2)
    given.iteration()
    mine, other = given.task_of(first), given.task_of(second)
    lease = given.lease(mine, 10)
    assert lease is not None
    while given.lease(other, 100) is not None:
        pass
    assert given.lease(other, 1, pass_number=1) is not None
    given.hand_back(lease, 4)
    again = given.lease(other, 100, pass_number=1)
    assert again is not None
    assert (again.pass_number, again.first) == (0, lease.first + lease.count - 4)
    given.hand_back(again, again.count)  # and once more, by who got them then
    left = 4
    while left:
        again = given.lease(other, 100, pass_number=1)
        assert again is not None
        assert again.pass_number == 0
        left -= again.count
    again = given.lease(other, 100, pass_number=1)
    assert again is not None
    assert (again.pass_number, again.first) == (1, 1)


def test_what_was_handed_back_before_the_next_pass_began_is_not_forgotten() -> None:
    given = Given()
    worker = given.worker(1)
    given.iteration()
    task = given.task_of(worker)
    lease = given.lease(task, 10)
    assert lease is not None
    given.hand_back(lease, lease.count)
    other = given.task_of(given.worker(2))
    again = given.lease(other, 1, pass_number=1)  # it has left the pass early
    assert again is not None
    assert (again.pass_number, again.first) == (0, 0)


def test_splits_left_over_of_an_earlier_pass_are_swept_up() -> None:
    given = Given()
    first, second = given.worker(1), given.worker(2)
    given.iteration()
    mine, other = given.task_of(first), given.task_of(second)
    lease = given.lease(mine, 10)
    assert lease is not None
    for pass_number in (0, 1):
        while given.lease(other, 100, pass_number) is not None:
            pass
    given.when(c.CompleteTask(task_id=other))
    given.hand_back(lease, 4)
    given.when(c.LoseWorker(worker_id=first, reason="drained"))
    assert given.then == ["worker_lost", "task_created"]
    again = given.lease(given.task_of(second), 100)
    assert again is not None
    assert again.pass_number == 0


def test_who_joins_an_endless_pipeline_late_takes_part_in_the_present_pass() -> None:
    given = Given()
    worker = given.worker(1)
    given.iteration()
    task = given.task_of(worker)
    for pass_number in range(3):
        while given.lease(task, 100, pass_number) is not None:
            pass
    lease = given.lease(task, 10, pass_number=3)
    assert lease is not None
    late = given.task_of(given.worker(2))
    ask = c.LeaseSplits(task_id=late, source=0, pass_number=0, want=1, or_later=True)
    got = given.when(ask)
    assert (got.pass_number, got.first, got.count) == (3, lease.count, 1)
    while given.lease(task, 100, pass_number=3) is not None:
        pass
    end = given.when(ask)
    assert (end.pass_number, end.count) == (3, 0)
    assert given.then == []


def test_passes_of_no_splits_are_no_events() -> None:
    given = Given()
    given.register("empty", ev.SplitSource(count=0))
    given.worker(1)
    given.iteration(dataset_id="empty")
    task = max(given.state.tasks)
    for pass_number in range(3):
        assert given.lease(task, 1, pass_number) is None
        assert given.then == []


def zipped(*sizes: int) -> list[ev.SplitSource]:
    first, *rest = [ev.SplitSource(count=size) for size in sizes]
    for source in rest:
        source.leased_with = 0
    return [first, *rest]


def test_zipped_sources_are_leased_as_one_of_the_size_that_all_have() -> None:
    given = Given()
    given.register("z", *zipped(30, 20))
    given.worker(1)
    given.iteration(dataset_id="z")
    task = max(given.state.tasks)
    total = 0
    while (lease := given.lease(task, 100)) is not None:
        assert lease.first == total
        total += lease.count
    assert total == 20
    with pytest.raises(InvalidArgument, match="zipped with 0"):
        given.when(c.LeaseSplits(task_id=task, source=1, pass_number=0, want=1))


@pytest.mark.parametrize("ours_first", [True, False])
def test_zipped_sources_are_not_leased_to_both_kinds_of_workers(ours_first: bool) -> None:
    given = Given()
    given.register("z", *zipped(30, 30))
    given.worker(1)
    iteration_id = given.iteration(dataset_id="z").iteration_id
    task = max(given.state.tasks)

    def singly() -> None:
        for provider in (1, 0):
            given.when(c.GetSplit(iteration_id=iteration_id, pass_number=0, source=provider))

    def together() -> None:
        assert given.lease(task, 1) is not None

    first, second = (together, singly) if ours_first else (singly, together)
    first()
    first()
    with pytest.raises(FailedPrecondition, match="workers of one kind"):
        second()


def test_a_completed_task_of_a_worker_that_comes_back_is_not_run_again() -> None:
    given = Given()
    first, second = given.worker(1), given.worker(2)
    job_id = given.when(c.GetOrCreateJob(dataset_id="d", name="off", sharding=ev.OFF))
    joined = given.when(c.JoinIteration(job_id=job_id, epoch=0))
    done, other = given.task_of(first), given.task_of(second)
    given.when(c.CompleteTask(task_id=done))
    given.when(c.LoseWorker(worker_id=first, reason="no sign of life"))
    given.when(c.CompleteTask(task_id=done))  # a retry whose answer was lost
    assert given.then == []
    again = given.worker(1)
    iteration = given.state.iterations[joined.iteration_id]
    assert sorted(iteration.tasks) == sorted([done, other])
    assert not given.state.workers[again].tasks
    given.when(c.JoinIteration(job_id=job_id, epoch=0))
    assert given.then == ["consumer_joined"]
    given.when(c.CompleteTask(task_id=other))
    assert given.then == ["task_completed", "iteration_finished"]


def test_lost_tasks_are_not_remembered_without_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forebay.service.core.tasks.MAX_LOST_TASKS", 3)
    given = Given()
    given.iteration()
    for number in range(5):
        given.when(c.LoseWorker(worker_id=given.worker(number), reason="no sign of life"))
    assert [lost.uid for lost in given.state.lost_tasks.values()] == [2, 3, 4]
