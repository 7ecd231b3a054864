"""Replay equals live after every event, whatever was commanded, and the invariants hold."""

from __future__ import annotations

from collections import Counter
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from forebay.journal.datasets import stored
from forebay.journal.proto import events_pb2 as ev
from forebay.service import ranges
from forebay.service.core import commands as c
from forebay.service.core import lifecycles
from forebay.service.core.base import Decision
from forebay.service.core.encoding import decode_state, encode_state
from forebay.service.core.machine import apply, decide
from forebay.service.core.places import place_of
from forebay.service.core.read_kinds import BUNDLE_READ, STATIC_READ, can_run, kind_of
from forebay.service.core.state import Claims, Iteration, Job, State, WorkerGrant
from forebay.service.core.status import status
from forebay.service.errors import ForebayError

from ..hypothesis_profiles import examples

SIZE = 23
POOL = (WorkerGrant(("d", "zipped"), ("*",)),)
SOURCES = [
    ev.SplitSource(count=SIZE),
    ev.SplitSource(arithmetic=ev.Arithmetic(start=5, stop=-5, step=-3)),
    ev.SplitSource(endless=ev.Endless()),
    ev.SplitSource(count=SIZE - 4, leased_with=0),
    ev.SplitSource(saved_chunks=ev.SavedChunks(path="/save")),
]
ZIPPED = [ev.SplitSource(count=SIZE), ev.SplitSource(count=SIZE - 4, leased_with=0)]


Arrival = tuple[lifecycles.Entity, int, str]


def transitions(state: State, event: ev.Event) -> list[Arrival]:
    """Whom the event takes to which state, by the tables."""
    kind = event.WhichOneof("event") or ""
    arrivals = []
    for entity in lifecycles.ENTITIES:
        entity_id = getattr(getattr(event, kind), f"{entity.name}_id", 0)
        if kind in entity.table and entity_id:
            to = entity.table[kind][entity.states(state, entity_id)]
            arrivals.append((entity, entity_id, to))
    return arrivals


def assert_arrived(state: State, arrivals: list[Arrival]) -> None:
    several = {
        lifecycles.EITHER: (lifecycles.WAITING, lifecycles.RUNNING),
        lifecycles.GONE: (lifecycles.LOST, lifecycles.ABSENT),
    }
    for entity, entity_id, to in arrivals:
        found = entity.states(state, entity_id)
        assert found in several.get(to, (to,)), (entity.name, entity_id)


class Dispatcher(RuleBasedStateMachine):
    """Random commands; a replayed twin follows event by event, with restarts in between."""

    def __init__(self) -> None:
        super().__init__()
        self.live = State()
        self.twin = State()
        self.time_ms = 1
        self.numbers: Counter[str] = Counter()
        self.handed_out: Counter[tuple[int, int, int, int]] = Counter()
        self.leases: dict[int, ev.SplitsLeased] = {}
        self.over: set[tuple[int, int]] = set()  # jobs and epochs that were summarized
        self.last: tuple[c.Command, Any] | None = None

    def run(self, command: c.Command) -> Any:
        self.time_ms += 1
        before = encode_state(self.live)
        try:
            decision = decide(self.live, command, self.time_ms)
        except ForebayError as error:
            assert str(error)
            decision = Decision([], None)
        assert encode_state(self.live) == before, "decide changed the state"
        epoch_of = {i.iteration_id: (i.job_id, i.epoch) for i in self.live.iterations.values()}
        for event in decision.events:
            expected = transitions(self.live, event)
            self.is_for_one_that_stays(event)
            apply(self.live, event)
            assert_arrived(self.live, expected)
            apply(self.twin, ev.Event.FromString(event.SerializeToString()))
            assert self.twin == self.live
            if event.HasField("splits_leased"):
                self.count(event.splits_leased)
            if event.HasField("iteration_summarized"):
                self.over.add(epoch_of[event.iteration_summarized.iteration_id])
            if event.HasField("iteration_created"):
                made = event.iteration_created
                again = (made.job_id, made.epoch) in self.over
                assert again == decision.events[1].HasField("iteration_finished")
            if event.HasField("iteration_finished"):
                self.was_read(event.iteration_finished.iteration_id)
            if event.HasField("lease_returned"):
                self.uncount(event.lease_returned)
        self.last = (command, decision.answer)
        return decision.answer

    def is_for_one_that_stays(self, event: ev.Event) -> None:
        """A task that is new, or is proposed."""
        kind = event.WhichOneof("event")
        if kind in ("task_created", "task_proposed"):
            task = getattr(event, kind)
            had = task.task_id in self.live.tasks.keys() | self.live.lost_tasks.keys()
            assert had or not self.live.workers[task.worker_id].draining

    def count(self, leased: ev.SplitsLeased) -> None:
        for number in range(leased.first, leased.first + leased.count):
            key = (leased.iteration_id, leased.source, leased.pass_number, number)
            self.handed_out[key] += 1
            if leased.lease_id and leased.source == 0:
                self.handed_out[leased.iteration_id, 3, leased.pass_number, number] += 1
            assert self.handed_out[key] == 1, f"split {key} was leased twice"
        self.leases[leased.lease_id] = leased

    def was_read(self, iteration_id: int) -> None:
        iteration = self.live.iterations[iteration_id]
        if (iteration.job_id, iteration.epoch) in self.over:  # and so it was before
            assert not iteration.ledgers
            return
        if kind_of(self.live.jobs[iteration.job_id]) is STATIC_READ:
            assert iteration.shards_read == set(range(len(self.live.places)))

    def uncount(self, returned: ev.LeaseReturned) -> None:
        leased = self.leases[returned.lease_id]
        stop = leased.first + leased.count
        for number in range(stop - returned.count, stop):
            key = (leased.iteration_id, leased.source, leased.pass_number, number)
            self.handed_out[key] -= 1
            if leased.source == 0:
                self.handed_out[leased.iteration_id, 3, leased.pass_number, number] -= 1

    def numbered(self, caller: str) -> tuple[str, int]:
        self.numbers[caller] += 1
        return caller, self.numbers[caller]

    def pick(self, ids: Any, n: int) -> int:
        known = sorted(ids)
        return known[n % len(known)] if known and n % 7 else n

    @initialize()
    def elect(self) -> None:
        self.run(c.ElectLeader(term=1, address="a:1", version="0", journal_id="j"))
        definition = ev.DatasetDefinition(sources=SOURCES, metadata=b"m")
        self.run(c.RegisterDataset(dataset_id="d", definition=definition))
        self.run(c.RegisterDataset(dataset_id="whole", definition=ev.DatasetDefinition(
            unsplittable="node x of op Y yields no splits")))  # fmt: skip
        # One of each kind that chance seldom makes, with a worker for it.
        self.worker("w:1", 1)
        self.job("rounds", "d", ev.DYNAMIC, 2)
        self.join(max(self.live.jobs), 0, "a")

    @rule(workers=st.sampled_from([None, (), ("w",), ("w", "w:3"), ("w:%port%",) * 2]))
    def restart(self, workers: tuple[str, ...] | None) -> None:
        self.twin = decode_state(encode_state(self.live))
        assert self.twin == self.live
        term = self.live.term + 1
        if workers is None:  # as before
            workers = tuple(place.configured for place in self.live.places)
        elect = c.ElectLeader(
            term=term, address="b:1", version="0", journal_id="other", worker_addresses=workers
        )
        self.run(elect)
        assert self.live.journal_id == "j"

    @rule(
        dataset=st.sampled_from(["", "d", "e"]),
        metadata=st.sampled_from([b"m", b"n"]),
        lost=st.booleans(),
        python=st.sampled_from([False, False, True]),
    )
    def register_dataset(self, dataset: str, metadata: bytes, lost: bool, python: bool) -> None:
        """Each time with a graph that has a name of its own, as a dispatcher does."""
        definition = ev.DatasetDefinition(sources=SOURCES, metadata=metadata)
        if python:
            definition.python_function.SetInParent()
        graph = stored(definition)
        graph.blob, graph.fingerprint = f"blob {self.time_ms}", "" if dataset else "same"
        restores = lost and dataset in self.live.datasets
        registered = c.RegisterDataset(
            dataset_id=dataset, definition=definition, restores=restores, renews=lost
        )
        dataset_id = self.run(registered)
        assert dataset_id is None or dataset_id in self.live.datasets

    @rule(dataset=st.sampled_from(["d", "e", "whole", "zipped", ""]), force=st.booleans())
    def remove_dataset(self, dataset: str, force: bool) -> None:
        dataset_id = dataset or min(self.live.datasets, default="d")
        self.run(c.RemoveDataset(dataset_id=dataset_id, force=force))

    @rule(job=st.integers(0, 50))
    def remove_job(self, job: int) -> None:
        self.run(c.RemoveJob(job_id=self.pick(self.live.jobs, job)))

    @rule()
    def forget_blob(self) -> None:
        for blob in self.live.unused_blobs[:1]:
            self.run(c.ForgetBlob(blob=blob))

    @rule(disable=st.booleans())
    def decide_compression(self, disable: bool) -> None:
        known = self.live.datasets.get("d")
        answer = self.run(c.DecideCompression(dataset_id="d", disable=disable))
        if known is not None:
            first = known.compression_disabled
            assert answer == (disable if first is None else first)

    @rule(
        name=st.sampled_from(["", "x", "y"]),
        dataset=st.sampled_from(["d", "d", "whole", "unknown"]),
        sharding=st.sampled_from([ev.OFF, ev.DYNAMIC, ev.DYNAMIC, ev.FILE, ev.HINT]),
        num_consumers=st.sampled_from([None, None, 0, 1, 2]),
        epoch=st.sampled_from([None, -1, 0, 0, 1]),
    )
    def job(
        self,
        name: str,
        dataset: str,
        sharding: int,
        num_consumers: int | None,
        epoch: int | None = None,
    ) -> None:
        """It alone, or together with one of its epochs."""
        fields: dict[str, Any] = {
            "request": self.numbered("t"),
            "dataset_id": dataset,
            "name": name,
            "sharding": sharding,
            "num_consumers": num_consumers,
        }
        self.run(c.GetOrCreateJob(**fields) if epoch is None else c.JoinJob(epoch=epoch, **fields))

    @rule(
        consumer=st.integers(0, 50),
        current=st.integers(-1, 9),
        blocked=st.sampled_from([None, *range(9)]),
    )
    def report_round(self, consumer: int, current: int, blocked: int | None) -> None:
        """Any, also such as no consumer would send."""
        self.run(
            c.ReportRound(
                consumer_id=self.pick(self.live.consumers, consumer),
                current_round=current,
                blocked_round=blocked,
            )
        )

    @rule(task=st.integers(0, 50), number=st.integers(0, 9))
    def remove_task(self, task: int, number: int) -> None:
        self.run(c.RemoveTask(task_id=self.pick(self.live.tasks, task), round=number))

    @rule(job=st.integers(0, 50), epoch=st.integers(-1, 2), caller=st.sampled_from("ab"))
    def join(self, job: int, epoch: int, caller: str) -> None:
        self.run(
            c.JoinIteration(
                request=self.numbered(caller), job_id=self.pick(self.live.jobs, job), epoch=epoch
            )
        )

    @rule(
        name=st.sampled_from(["", "o", "o", "o", "x"]),
        dataset=st.sampled_from(["zipped", "zipped", "d", "unknown"]),
        splits=st.sampled_from([0, 0, 1, 2, -1]),
        seed=st.sampled_from([0, 0, 0, 1]),
        of=st.integers(0, 3),
        index=st.integers(0, 2),
        alone=st.booleans(),
    )
    def join_in_order(
        self, name: str, dataset: str, splits: int, seed: int, of: int, index: int, alone: bool
    ) -> None:
        gone = sorted(self.live.consumers)[::2]
        order = ev.OrderSpec(seed=seed, cycle_length=2, block_length=1, bundle_splits=splits)
        if dataset == "zipped":
            definition = ev.DatasetDefinition(sources=ZIPPED)
            self.run(c.RegisterDataset(dataset_id=dataset, definition=definition))
        self.run(
            c.JoinJob(
                request=self.numbered("o"), dataset_id=dataset, name=name, sharding=ev.OFF,
                order=order, epoch=0,
                member=None if alone else ev.GroupMember(index=index, consumers=of),
                gone=tuple(gone),
            )
        )  # fmt: skip

    @rule(
        name=st.sampled_from(["", "c", "c", "o"]),
        splits=st.sampled_from([0, 4]),
        epoch=st.integers(0, 1),
    )
    def join_at_least_once(self, name: str, splits: int, epoch: int) -> None:
        order = ev.OrderSpec(cycle_length=1, block_length=1, bundle_splits=splits, claimed=True)
        definition = ev.DatasetDefinition(sources=ZIPPED)
        self.run(c.RegisterDataset(dataset_id="zipped", definition=definition))
        self.run(
            c.JoinJob(
                request=self.numbered("c"), dataset_id="zipped", name=name, sharding=ev.OFF,
                order=order, epoch=epoch,
            )
        )  # fmt: skip

    @rule(
        consumer=st.integers(0, 50),
        most=st.integers(-1, 9),
        cursors=st.dictionaries(st.integers(-1, SIZE), st.integers(-1, 5), max_size=5),
        done=st.lists(st.integers(-1, SIZE), max_size=12),
        uneven=st.sampled_from([False, False, False, True]),
    )
    def claim_bundles(
        self, consumer: int, most: int, cursors: dict[int, int], done: list[int], uneven: bool
    ) -> None:
        self.run(
            c.ClaimBundles(
                consumer_id=self.pick(self.live.consumers, consumer), most=most,
                places=tuple(cursors), cursors=(*cursors.values(), *[1] * uneven),
                done=tuple(done),
            )
        )  # fmt: skip

    @rule(
        consumer=st.integers(0, 50),
        learned=st.lists(st.tuples(st.integers(-1, SIZE - 5), st.integers(-1, 3)), max_size=3),
    )
    def learn_lengths(self, consumer: int, learned: list[tuple[int, int]]) -> None:
        self.run(
            c.LearnLengths(
                consumer_id=self.pick(self.live.consumers, consumer),
                bundles=tuple(bundle for bundle, _ in learned),
                lengths=tuple(length for _, length in learned),
            )
        )

    @rule(
        job=st.integers(0, 20),
        checked=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 2)), max_size=3),
    )
    def check_bundles(self, job: int, checked: list[tuple[int, int]]) -> None:
        self.run(
            c.CheckBundles(
                job_id=self.pick(self.live.jobs, job),
                bundles=tuple(bundle for bundle, _ in checked),
                checksums=tuple(checksum for _, checksum in checked),
            )
        )

    @rule(consumer=st.integers(0, 50))
    def leave(self, consumer: int) -> None:
        consumer_id = self.pick(self.live.consumers, consumer)
        self.run(c.LeaveIteration(consumer_id=consumer_id, reason="r"))

    @rule(
        address=st.sampled_from(["w:1", "w:2", "w:3", ""]),
        uid=st.integers(1, 3),
        draining=st.sampled_from([False, False, False, True]),
        grants=st.sampled_from([(), (), POOL, (WorkerGrant(("*",), ("", "o")),)]),
        holder=st.sampled_from([b"", b"a", b"a", b"b"]),
    )
    def worker(
        self, address: str, uid: int, draining: bool = False, grants: Any = (), holder: bytes = b""
    ) -> None:
        places = {w: place_of(self.live, w) for w in self.live.worker_at if w != address}
        self.run(
            c.RegisterWorker(
                address=address, uid=uid, stock=uid != 2, draining=draining, grants=grants,
                holder=holder,
            )
        )  # fmt: skip
        assert {w: place_of(self.live, w) for w in places} == places, "a place was taken away"

    @rule(worker=st.integers(0, 50))
    def lose(self, worker: int) -> None:
        self.run(c.LoseWorker(worker_id=self.pick(self.live.workers, worker), reason="r"))

    @rule(task=st.integers(0, 50))
    def complete(self, task: int) -> None:
        self.run(c.CompleteTask(task_id=self.pick(self.live.tasks, task)))

    @rule(iteration=st.integers(0, 50), pass_number=st.integers(0, 3), source=st.integers(-1, 5))
    def get_split(self, iteration: int, pass_number: int, source: int) -> None:
        iteration_id = self.pick(self.live.iterations, iteration)
        self.run(c.GetSplit(iteration_id=iteration_id, pass_number=pass_number, source=source))

    @rule(
        task=st.integers(0, 50),
        source=st.integers(0, 4),
        or_later=st.booleans(),
        later=st.sampled_from([0, 0, 0, 1, -1]),
        want=st.integers(-1, 9),
        done=st.integers(0, 3),
        back=st.integers(0, 3),
    )
    def lease(
        self, task: int, source: int, or_later: bool, later: int, want: int, done: int, back: int
    ) -> None:
        task_id = self.pick(self.live.tasks, task)
        held = self.live.tasks[task_id].leases if task_id in self.live.tasks else []
        pass_number = 0
        if held:
            iteration = self.live.iterations[self.live.tasks[task_id].iteration_id]
            pass_number = iteration.ledgers[source].pass_number + later
        request, begun = self.numbered(f"task/{task_id}/{source}"), tuple(held[:done])
        if want > 0:
            command: c.Command = c.LeaseSplits(
                request=request,
                task_id=task_id,
                source=source,
                pass_number=pass_number,
                want=want,
                or_later=or_later,
                begun=begun,
                taken=tuple(held[done:back]),
                lost=tuple(held[back : back + 1]),
                dropped=back,
            )
        elif held:
            returned = tuple((lease, back) for lease in held[-1:])
            command = c.LeaseSplits(
                request=request, task_id=task_id, begun=begun, returned=returned
            )
        else:
            command = c.LeaseSplits(
                request=request,
                task_id=task_id,
                source=source,
                pass_number=pass_number,
                or_later=or_later,
            )
        self.run(command)

    @rule(
        iteration=st.integers(0, 50),
        source=st.sampled_from([4, 4, 4, 0]),
        names=st.lists(st.sampled_from("abcdefgh"), max_size=4, unique=True),
        complete=st.booleans(),
    )
    def find_splits(self, iteration: int, source: int, names: list[str], complete: bool) -> None:
        iteration_id = self.pick(self.live.iterations, iteration)
        found = self.live.iterations.get(iteration_id)
        ledger = found.ledgers[4] if found is not None and found.ledgers else None
        known = list(ledger.names) if ledger is not None else []
        grew = ledger is not None and ledger.grows and source == 4
        self.run(
            c.FindSplits(
                iteration_id=iteration_id, source=source, names=tuple(names), complete=complete
            )
        )
        if ledger is not None:
            assert ledger.names == known + [n for n in names if n not in known] * grew
            assert ledger.grows == (ledger.grows and not (grew and complete))

    @rule()
    def retry(self) -> None:
        if self.last is None or self.last[0].request is None or self.last[1] is None:
            return
        command, answer = self.last
        if isinstance(answer, Job):
            return  # of another dataset; nothing was decided
        if isinstance(answer, ev.SplitsLeased) and not answer.count:
            return  # "no splits" decides nothing: some may have come back since
        if command.request[0] in self.live.answers:  # type: ignore[index]
            sequence = self.live.sequence
            assert self.run(command) == answer
            assert self.live.sequence == sequence, "a retry decided something"

    @rule(iteration=st.integers(0, 50))
    def collect(self, iteration: int) -> None:
        iteration_id = self.pick(self.live.iterations, iteration)
        self.run(c.CollectIteration(iteration_id=iteration_id))

    @invariant()
    def books_balance(self) -> None:
        state = self.live
        assert {i for t in state.tasks.values() for i in t.leases} == set(state.leases)
        for worker in state.workers.values():
            assert state.worker_at[worker.address] == worker.worker_id
            mine = {t.task_id for t in state.tasks.values() if t.worker_id == worker.worker_id}
            assert not any(state.tasks[i].orphan for i in mine)
            assert worker.tasks == {i for i in mine if not state.tasks[i].completed}
        blobs = [stored(d.definition).blob for d in state.datasets.values()]
        assert not set(blobs) & set(state.unused_blobs)
        assert len(set(state.unused_blobs)) == len(state.unused_blobs)
        assert set(state.dataset_by_fingerprint.values()) <= state.datasets.keys()
        assert state.job_by_name == {j.name: j.job_id for j in state.jobs.values() if j.name}
        for job in state.jobs.values():
            assert job.dataset_id in state.datasets
            assert not any(ranges.holds(job.summarized, epoch) for epoch in job.iterations)
        for consumer in state.consumers.values():
            assert consumer.consumer_id in state.iterations[consumer.iteration_id].consumers
        there = [place.address for place in state.places if place.address]
        assert len(set(there)) == len(there)
        for iteration in state.iterations.values():
            shards = [t.shard for t in state.tasks.values()
                      if t.iteration_id == iteration.iteration_id and not t.completed]  # fmt: skip
            if kind_of(state.jobs[iteration.job_id]) is STATIC_READ and not iteration.finished:
                assert len(set(shards)) == len(shards), "two tasks read one shard"
                assert set(shards) <= set(range(len(state.places)))
                for task_id in iteration.tasks:
                    task = state.tasks[task_id]
                    assert task.shard == place_of(state, state.workers[task.worker_id].address)
                if iteration.consumers:
                    job = state.jobs[iteration.job_id]
                    able = [w for w in state.workers.values() if can_run(state, job, w)]
                    stay = [w.address for w in able if not w.draining]
                    known = {place_of(state, address) for address in stay} - {None}
                    assert known <= set(shards) | iteration.shards_read
            if kind_of(state.jobs[iteration.job_id]) is BUNDLE_READ:
                self.is_read_together(iteration)
            if iteration.claims is not None:
                self.are_claimed_once(iteration, iteration.claims)
            running = [i for i in iteration.tasks if not state.tasks[i].completed]
            assert iteration.running_tasks == len(running)
            assert not (iteration.finished and running)
            known = {
                t.task_id for t in state.tasks.values() if t.iteration_id == iteration.iteration_id
            }
            assert known == set(iteration.all_tasks)
            assert len(known) == len(iteration.all_tasks)
            if iteration.barrier is not None:
                assert iteration.barrier.tasks
                assert iteration.barrier.blocked <= iteration.consumers
            for number, ledger in enumerate(iteration.ledgers):
                leased = [
                    (lease.first, lease.first + lease.count)
                    for lease in state.leases.values()
                    if lease.iteration_id == iteration.iteration_id
                    and (lease.source, lease.pass_number) == (number, ledger.pass_number)
                ]
                parts = [*leased, *ledger.returned, *ledger.begun, *ledger.lost]
                covered = sorted(n for part in parts for n in range(*part))
                assert covered == list(range(ledger.next))
                assert ledger.next <= ledger.size
                assert len(set(ledger.names)) == len(ledger.names)
                assert not ledger.names or ledger.size == len(ledger.names)
                for pass_number, left in ledger.left_over.items():
                    assert left
                    assert pass_number < ledger.pass_number
                    assert not any(
                        lease.iteration_id == iteration.iteration_id
                        and (lease.source, lease.pass_number) == (number, pass_number)
                        and lease.first < stop
                        and start < lease.first + lease.count
                        for lease in state.leases.values()
                        for start, stop in left
                    )
        for dataset in state.datasets.values():
            for size, lengths in dataset.lengths.items():
                assert lengths[-1] >= 0
                assert len(lengths) <= -(-(SIZE - 4) // size)
        summary = status(state)
        assert summary["sequence"] == state.sequence
        assert len(summary["jobs"]) == len(state.jobs)

    def are_claimed_once(self, iteration: Iteration, claims: Claims) -> None:
        """Each place was never claimed, or is done, or returned, or some consumer's."""
        held = [
            place for number in iteration.consumers for place in self.live.consumers[number].claims
        ]
        done = [place for part in claims.done for place in range(*part)]
        if (iteration.job_id, iteration.epoch) not in self.over:
            assert sorted([*held, *claims.returned, *done]) == [*range(claims.next)]
            assert claims.next <= claims.bundles
            assert not iteration.finished or len(done) == claims.bundles

    def is_read_together(self, iteration: Iteration) -> None:
        """Or none, if its consumers claim; and each worker that can has one task of it."""
        state, job = self.live, self.live.jobs[iteration.job_id]
        members = [state.consumers[number].member for number in iteration.consumers]
        if iteration.claims is None:
            assert len({member.index for member in members if member}) == len(members)
            assert not iteration.finished
        assert len({member.consumers for member in members if member}) <= 1
        having = [state.tasks[task_id].worker_id for task_id in iteration.tasks]
        able = [i for i, worker in state.workers.items() if can_run(state, job, worker)]
        assert not any(state.workers[i].stock or state.workers[i].draining for i in having)
        if iteration.consumers and not iteration.finished:
            assert sorted(having) == [i for i in sorted(able) if not state.workers[i].draining]
        else:
            assert not having


TestReplay = Dispatcher.TestCase
TestReplay.settings = settings(max_examples=examples(100), stateful_step_count=50, deadline=None)


def test_ranges_are_a_set_of_integers() -> None:
    kept: ranges.Ranges = []
    model: set[int] = set()
    for start, stop in [(5, 7), (0, 2), (7, 9), (2, 5), (20, 21), (12, 15), (9, 12), (3, 3)]:
        ranges.add(kept, start, stop)
        model |= set(range(start, stop))
        assert sorted(model) == [n for part in kept for n in range(*part)]
        assert [n for n in range(-1, 25) if ranges.holds(kept, n)] == sorted(model)
    assert kept == [(0, 15), (20, 21)]
    for start, stop in [(3, 6), (0, 1), (20, 21), (14, 15)]:
        ranges.remove(kept, start, stop)
        model -= set(range(start, stop))
        assert sorted(model) == [n for part in kept for n in range(*part)]
    assert ranges.total(kept) == len(model)
