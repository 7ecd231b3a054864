"""The audit can fail: it finds each broken promise, and each loss that the journal does not tell.

The journal is made by the dispatcher's own decisions, but for contradictions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from forebay.chaos.audit import DROPPED, IN_HAND, Verdict, check, check_lives
from forebay.chaos.history import History, read_history
from forebay.chaos.members import Life
from forebay.chaos.partitions import Partition, failed_cut_off
from forebay.chaos.records import Got, Joined, Left, ReadToEnd, Record, Started
from forebay.journal.proto import events_pb2 as ev
from forebay.journal.reasons import GOODBYE, SILENT
from forebay.service.core import commands as c
from forebay.service.core.machine import apply, decide
from forebay.service.core.state import State

ELEMENTS = 10
HELD = 2  # elements of a block
TRAINERS = ("trainer0.1", "trainer1.1")


class Run:
    """An epoch of ten elements: worker 0 has those below five, worker 1 the others, each pass."""

    def __init__(self, passes: int = 1) -> None:
        self.passes = passes
        self.state, self.events = State(), list[tuple[int, ev.Event]]()  # with their term
        self.lives = {
            name: Life(name, name[:-3], int(name[-3]), 0.0, ended_s=100.0, code=0)
            for name in ("worker0.1", "worker1.1", *TRAINERS)
        }
        self.partitions: list[Partition] = []
        self.do(c.ElectLeader(term=1, address="d:1", version="0", journal_id="j"))
        source = ev.SplitSource(count=ELEMENTS)
        definition = ev.DatasetDefinition(sources=[source])
        dataset = self.do(c.RegisterDataset(dataset_id="", definition=definition))
        self.job = self.do(c.GetOrCreateJob(dataset_id=dataset, name="chaos", sharding=ev.DYNAMIC))
        joined = [self.do(c.JoinIteration(job_id=self.job, epoch=1)) for _ in TRAINERS]
        self.consumers = [each.consumer_id for each in joined]
        self.iteration: int = joined[0].iteration_id
        self.workers = [self.register(number) for number in range(2)]
        self.tasks = [*self.state.tasks]
        self.leases = [
            self.lease(worker, 5 * worker, 5, in_pass=in_pass)
            for in_pass in range(passes) for worker in (0, 1)
        ]  # fmt: skip

    def do(self, command: c.Command) -> Any:
        events, answer = decide(self.state, command, 1000)
        for event in events:
            self.add(event)
        return answer

    def add(self, event: ev.Event) -> None:
        if not event.time_ms:
            event.time_ms = 12_000
        apply(self.state, event)
        self.events.append((self.state.term, event))

    def register(self, number: int) -> int:
        address = f"w{number}:1"
        return self.do(
            c.RegisterWorker(address=address, uid=number + 1, tags=(f"worker{number}.1",))
        )

    def lease(self, worker: int, first: int, count: int, in_pass: int = 0) -> int:
        task = self.tasks[worker]
        ledger = self.state.iterations[self.iteration].ledgers[0]
        if ledger.pass_number < in_pass:
            started = ev.PassStarted(iteration_id=self.iteration, pass_number=in_pass)
            self.add(ev.Event(pass_started=started))
        lease_id = self.state.next_id
        self.add(ev.Event(splits_leased=ev.SplitsLeased(
            lease_id=lease_id, iteration_id=self.iteration, task_id=task,
            pass_number=in_pass, first=first, count=count)))  # fmt: skip
        return lease_id

    def give_back(self, lease_id: int, count: int) -> None:
        self.add(ev.Event(lease_returned=ev.LeaseReturned(lease_id=lease_id, count=count)))

    def report(self, worker: int, **what: Any) -> None:
        self.do(c.LeaseSplits(task_id=self.tasks[worker], **what))

    def lose(self, worker: int, reason: str = SILENT) -> None:
        self.do(c.LoseWorker(worker_id=self.workers[worker], reason=reason))

    def history(self, finished: bool = True) -> History:
        iteration = self.state.iterations[self.iteration]
        if finished and not iteration.finished:
            for task_id in [*iteration.tasks]:
                completed = ev.TaskCompleted(task_id=task_id)
                if not self.state.tasks[task_id].completed:
                    self.add(ev.Event(task_completed=completed))
            over = ev.IterationFinished(iteration_id=self.iteration)
            self.add(ev.Event(iteration_finished=over))
        return read_history((n, term, event) for n, (term, event) in enumerate(self.events, 1))

    def verdict(self, *trainers: list[Record], finished: bool = True) -> Verdict:
        return check(
            self.history(finished), "chaos", trainers, self.lives, elements=ELEMENTS,
            passes=self.passes, in_hand=HELD, partitions=self.partitions,
        )  # fmt: skip

    def reader(
        self, number: int, *ids: int, end: type[ReadToEnd] | type[Left] | None = ReadToEnd
    ) -> list[Record]:
        """A trainer that got these; None: it was killed."""
        got = [
            Got(1, task, [i for i in ids if i // 5 == worker])
            for worker, task in enumerate(self.tasks)
        ]
        ended = [] if end is None else [end(1)]
        return [Started(TRAINERS[number]), Joined(1, self.consumers[number]), *got, *ended]

    def all_but(self, *ids: int, number: int = 0) -> list[Record]:
        return self.reader(number, *(i for i in range(ELEMENTS) if i not in ids))


@pytest.fixture
def run() -> Run:
    return Run()


def broken(verdict: Verdict) -> str:
    """The one promise that was broken."""
    (promise,) = verdict.broken
    return promise


def test_all_is_well(run: Run) -> None:
    verdict = run.verdict(run.reader(0, 0, 1, 2, 5, 6), run.reader(1, 3, 4, 7, 8, 9))
    assert verdict == Verdict([], 1, 10, 0, 0, {}, 0)


class TestDelivery:
    def test_more_often_than_leased(self, run: Run) -> None:
        verdict = run.verdict(run.reader(0, *range(10), 5), run.reader(1, 4, 4))
        assert "2 elements (4, 5) delivered more often than they were leased" in broken(verdict)
        assert verdict.twice == 3

    def test_never_leased(self, run: Run) -> None:
        records = run.reader(0, *range(10))
        records.insert(2, Got(1, run.tasks[0], [10]))
        assert "(10) delivered by a task that had no lease" in broken(run.verdict(records))

    def test_by_a_worker_that_had_handed_it_back(self, run: Run) -> None:
        run.give_back(run.leases[0], 1)
        run.lease(1, 4, 1)
        verdict = run.verdict(run.all_but())
        assert any("(4) delivered by a task that had no lease" in b for b in verdict.broken)

    def test_of_no_epoch(self, run: Run) -> None:
        stray: list[Record] = [Joined(2, 77), Got(2, run.tasks[0], [3]), ReadToEnd(2)]
        verdict = run.verdict([*run.all_but(), *stray])
        assert "epoch 2" in broken(verdict) and "not in the journal" in broken(verdict)

    def test_damaged(self, run: Run) -> None:
        records = run.all_but()
        records[3] = Got(1, run.tasks[1], list(range(5, 10)), [7])
        verdict = run.verdict(records)
        assert "(7) damaged" in broken(verdict) and verdict.damaged == 1


class TestLosses:
    def test_that_nobody_tells_of(self, run: Run) -> None:
        verdict = run.verdict(run.all_but(9), run.reader(1, end=Left))
        assert "1 elements (9) lost: worker1.1 had them, and the journal does" in broken(verdict)
        assert verdict.lost_unexplained == 1 and verdict.lost == {}

    def test_with_a_worker(self, run: Run) -> None:
        run.lose(1)
        run.lives["worker1.1"].killed_s = 20.0
        assert run.verdict(run.reader(0, *range(6))).lost == {SILENT: 4}
        verdict = run.verdict(run.reader(0, *range(1, 6)))
        assert "(0) lost: worker0.1 had them" in broken(verdict), "another one's"

    def test_with_a_worker_to_which_nothing_had_happened(self, run: Run) -> None:
        run.lose(1)
        assert "no fault hit it or a trainer" in broken(run.verdict(run.reader(0, *range(6))))

    @pytest.mark.parametrize("fault", ["paused", "cut off", "another was cut off"])
    def test_with_a_worker_that_was_given_up(self, run: Run, fault: str) -> None:
        run.lose(1)
        if fault == "paused":
            run.lives["worker1.1"].pauses = [(3.0, 11.0)]
        else:
            host = "worker1" if fault == "cut off" else "worker0"
            run.partitions = [Partition(((host,), ("trainer0", "dispatcher0")), 2.0, 20.0)]
        verdict = run.verdict(run.reader(0, *range(6)))
        assert bool(verdict.broken) == fault.startswith("another")

    def test_that_a_worker_came_back_with(self, run: Run) -> None:
        run.lose(1)
        run.register(1)
        run.lives["worker1.1"].pauses = [(3.0, 11.0)]
        assert "(9) lost: worker1.1 had them" in broken(run.verdict(run.all_but(9)))

    @pytest.mark.parametrize("begun", [False, True])
    def test_that_a_worker_came_back_with_and_was_killed(self, run: Run, begun: bool) -> None:
        """Also of what it had begun: nobody knows whether that was taken."""
        if begun:
            run.report(1, begun=(run.leases[1],))
        run.lose(1)
        run.workers[1] = run.register(1)
        run.lose(1)
        run.lives["worker1.1"].killed_s = 20.0
        assert run.verdict(run.all_but(9)).broken == []

    def test_that_a_worker_has_dropped(self, run: Run) -> None:
        run.report(1, dropped=2)
        run.lives["worker1.1"].terminated_s = 20.0
        assert run.verdict(run.all_but(8, 9)).lost == {DROPPED: 2}
        assert run.verdict(run.all_but(0)).lost_unexplained == 1, "another one's"
        assert run.verdict(run.all_but(7, 8, 9)).lost_unexplained == 1, "no more than that"

    def test_in_the_hands_of_a_killed_trainer(self, run: Run) -> None:
        """A block, and no more; nothing, of one that left in order."""
        assert run.verdict(run.all_but(8, 9), run.reader(1, end=None)).lost == {IN_HAND: HELD}
        verdict = run.verdict(run.all_but(0, 8, 9), run.reader(1, end=None))
        assert verdict.lost == {IN_HAND: HELD} and verdict.lost_unexplained == 1
        assert run.verdict(run.all_but(9), run.reader(1, end=Left)).lost_unexplained == 1

    def test_when_nobody_read(self, run: Run) -> None:
        for consumer in run.consumers:
            run.do(c.LeaveIteration(consumer_id=consumer, reason=SILENT))
        run.do(c.CollectIteration(iteration_id=run.iteration))
        verdict = run.verdict(run.reader(0, end=None), run.reader(1, 0, 1, end=None))
        assert not verdict.broken and sum(verdict.lost.values()) == 8

    def test_never_handed_out(self, run: Run) -> None:
        run.give_back(run.leases[1], 2)
        run.lives["worker1.1"].killed_s = 20.0  # which has nothing to do with it
        verdict = run.verdict(run.reader(0, *range(8)))
        assert "finished without handing them out" in broken(verdict)
        assert verdict.lost_unexplained == 2


class TestPasses:
    """Each element comes as often as the pipeline passes over it."""

    @pytest.fixture
    def run(self) -> Run:
        return Run(passes=2)

    def test_each_comes_twice(self, run: Run) -> None:
        verdict = run.verdict(run.all_but(), run.all_but(number=1))
        assert verdict == Verdict([], 1, 20, 0, 0, {}, 0)

    def test_more_often_than_there_are_passes(self, run: Run) -> None:
        verdict = run.verdict(run.all_but(), run.reader(1, *range(10), 7))
        assert "(7) delivered more often" in broken(verdict) and verdict.twice == 1

    def test_twice_of_one_pass_when_the_other_was_lost_with_its_worker(self, run: Run) -> None:
        """As often as it should come, but not from whom."""
        run.give_back(run.leases[2], 1)
        run.lease(1, 4, 1, in_pass=1)
        run.lose(1)
        run.lives["worker1.1"].killed_s = 20.0
        verdict = run.verdict(run.all_but(), run.all_but(number=1))
        assert "(4) delivered more often than they were leased" in broken(verdict)
        assert verdict.lost == {SILENT: 1}

    def test_returned_at_the_end_of_a_pass(self, run: Run) -> None:
        run.give_back(run.leases[1], 1)
        trainers = run.all_but(), run.all_but(9, number=1)
        assert "(9) lost: it finished without" in broken(run.verdict(*trainers))
        run = Run(passes=2)
        run.give_back(run.leases[1], 1)
        run.lease(1, 9, 1)
        assert run.verdict(run.all_but(), run.all_but(number=1)).broken == []

    def test_a_pass_too_many(self, run: Run) -> None:
        run.lease(0, 0, 1, in_pass=2)
        verdict = run.verdict(run.all_but(), run.reader(1, *range(10), 0))
        assert "(0) leased that it does not have" in broken(verdict)


class TestJournal:
    def test_an_epoch_that_never_finished(self, run: Run) -> None:
        verdict = run.verdict(run.reader(0, *range(4), end=None), finished=False)
        assert "epoch 1 never finished: 6 elements (4, 5, 6, 7, 8, …)" in broken(verdict)

    @pytest.mark.parametrize(
        ("lie", "what"),
        [
            (lambda events: events.append((9, *events.pop()[1:])), "has the sequence 9"),
            (lambda events: events.append((events[-1][0], 3, events.pop()[2])), "of term 3 was"),
            (
                lambda events: events.append(
                    (len(events) + 1, 1, ev.Event(leader_elected=ev.LeaderElected(term=1)))
                ),
                "term 1 follows term 1",
            ),
        ],
    )
    def test_a_contradiction(self, run: Run, lie: Callable[[Any], None], what: str) -> None:
        events = [(n, term, event) for n, (term, event) in enumerate(run.events, 1)]
        assert read_history(events).broken == []
        lie(events)
        assert any(what in promise for promise in read_history(events).broken)

    def test_a_split_leased_twice(self, run: Run) -> None:
        again = ev.Event(time_ms=1)
        again.CopyFrom(run.events[-1][1])
        again.splits_leased.lease_id = run.state.next_id
        records = [(n, term, event) for n, (term, event) in enumerate(run.events, 1)]
        history = read_history([*records, (len(records) + 1, 1, again)])
        assert any("of pass 0 leased again" in promise for promise in history.broken)


class TestProcesses:
    @pytest.mark.parametrize("name", ["worker0.1", "trainer1.1"])
    @pytest.mark.parametrize("cut_off", [False, True])
    def test_one_that_ends_by_itself(self, run: Run, name: str, cut_off: bool) -> None:
        run.lives[name].code = 1
        found = check_lives(run.lives.values(), [name] if cut_off else [])
        assert found == [f"{name} ended by itself, with 1"][cut_off:]

    @pytest.mark.parametrize(
        ("name", "life", "what"),
        [
            ("worker0.1", {"code": -9, "killed_s": 20.0}, None),
            ("worker0.1", {"code": 1, "terminated_s": 20.0}, "told to stop, and ended with 1"),
            ("worker0.1", {"code": 3, "terminated_s": 20.0}, None),  # it dropped elements
            ("trainer0.1", {"code": 3, "terminated_s": 20.0}, "told to stop, and ended with 3"),
            ("worker0.1", {"code": -9, "terminated_s": 1.0, "killed_s": 60.0, "stuck": True},
             "had to be killed"),
        ],
    )  # fmt: skip
    def test_one_that_was_told_to_end(
        self, run: Run, name: str, life: dict[str, Any], what: str | None
    ) -> None:
        for key, value in life.items():
            setattr(run.lives[name], key, value)
        found = check_lives(run.lives.values(), [])
        assert found == [] if what is None else what in found[0]


def test_who_is_cut_off() -> None:
    partition = Partition((("worker1", "trainer0"), ("worker10", "dispatcher0")), 2.0, 20.0)
    assert partition.cuts("worker1", "dispatcher") and partition.cuts("dispatcher0", "worker1")
    assert partition.cuts("trainer0", "worker") and partition.cuts("trainer0", "worker10")
    assert not partition.cuts("trainer0", "worker1") and not partition.cuts("worker2", "worker")


def test_only_a_partition_of_its_host_excuses_a_trainer_that_failed(run: Run) -> None:
    run.do(c.LeaveIteration(consumer_id=run.consumers[0], reason=SILENT))
    run.do(c.LeaveIteration(consumer_id=run.consumers[1], reason=GOODBYE))
    for _, event in run.events[-2:]:
        event.time_ms = 12_000
    names = dict(zip(run.consumers, TRAINERS, strict=True))
    hosts = {name: name[:-2] for name in TRAINERS}

    def failed(*sides: tuple[str, ...], until_s: float = 11.0) -> set[str]:
        partition = Partition(sides, until_s - 10, until_s)  # type: ignore[arg-type]
        return failed_cut_off(run.history(finished=False), names, hosts, [partition], 0.0)

    assert failed(("dispatcher0",), ("trainer0", "trainer1")) == {"trainer0.1"}
    assert failed(("dispatcher0",), ("trainer0",), until_s=23.0) == set()
    assert failed(("dispatcher0",), ("worker0",)) == set()
