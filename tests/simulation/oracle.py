"""What must be true in every run, checked as it happens: the oracle sees all and knows no mercy.

It keeps the log as the storage has it, folds it into a state of its own, and keeps books of
splits, answers and elements beside it that owe nothing to the product's code. Each record that
is stored, each answer that leaves a dispatcher and each element that reaches a trainer is held
against them. `account` says at the end why every missing element may be missing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from forebay.journal.codec import decode
from forebay.journal.proto import events_pb2 as ev
from forebay.journal.reasons import GOODBYE
from forebay.service import ranges
from forebay.service.core.encoding import encode_state
from forebay.service.core.machine import apply
from forebay.service.core.state import State
from forebay.service.dispatcher.failure_detector import GONE
from forebay.service.proto import forebay_pb2 as pb
from forebay.storage import Record

from .calls import Call
from .kernel import Kernel, Process, Violation


class Element(NamedTuple):
    """What a simulated pipeline makes of a split."""

    task_id: int
    iteration_id: int
    provider: int
    pass_number: int
    split: int
    number: int = 0  # in its run
    run: int = 0  # of the pipeline, of all that there were

    @property
    def place(self) -> tuple[int, int, int, int]:
        """Its iteration, and where it is in that."""
        return self.iteration_id, self.provider, self.pass_number, self.split


SKIPPED_MOST = 4
"""Of an iteration's splits."""


@dataclass
class Run:
    """Of a pipeline: what it has made."""

    task_id: int
    elements: int = 0
    blocks: list[tuple[int, int]] = field(default_factory=list)  # stop, cost


@dataclass
class Lease:
    lease_id: int
    task_id: int
    place: tuple[int, int, int]  # iteration, source, pass
    first: int
    count: int


@dataclass
class Books:
    """What the journal's events say, kept apart from the state that the product makes of them."""

    jobs: set[int] = field(default_factory=set)
    removed_jobs: set[int] = field(default_factory=set)
    datasets: set[str] = field(default_factory=set)
    consumers: dict[int, int] = field(default_factory=dict)  # iteration, by consumer
    left: dict[int, str] = field(default_factory=dict)  # why, by consumer
    workers: dict[int, int] = field(default_factory=dict)  # uid, by worker
    lost_workers: dict[int, str] = field(default_factory=dict)  # why, by worker
    tasks: dict[int, tuple[int, int]] = field(default_factory=dict)  # iteration, worker
    pauses: Counter[int] = field(default_factory=Counter)  # by iteration
    reads: dict[int, tuple[int, int]] = field(default_factory=dict)  # iteration, pauses; by task
    completed: set[int] = field(default_factory=set)  # tasks
    finished: set[int] = field(default_factory=set)  # iterations
    left_behind: set[int] = field(default_factory=set)  # tasks that these finished without
    collected: set[int] = field(default_factory=set)
    epochs: dict[int, tuple[int, int]] = field(default_factory=dict)  # job, epoch, by iteration
    summarized: set[tuple[int, int]] = field(default_factory=set)  # (job, epoch)
    paused: set[int] = field(default_factory=set)  # leases
    leases: dict[int, Lease] = field(default_factory=dict)
    holder: dict[tuple[int, int, int, int], Lease] = field(default_factory=dict)  # by split
    skipped: set[tuple[int, int]] = field(default_factory=set)  # (task, split)
    skips: Counter[int] = field(default_factory=Counter)  # by iteration


class Oracle:
    """One a journal: that of the run, and an Elsewhere if its storage is emptied."""

    def __init__(self, this: Kernel) -> None:
        self.records: list[Record] = []
        self.state = State()
        self.books = Books()
        self.term = 0
        self.delivered: dict[Any, str] = {}  # the consumer, by element
        self.element_count = 0
        self.answers: dict[tuple[str, int], tuple[Any, ...]] = {}
        self.counts: Counter[str] = Counter()
        self.dead_uids: set[int] = set()  # workers whose process was killed
        self.mute_uids: set[int] = set()  # workers that were frozen until readers let them go
        self.leaving_uids: set[int] = set()  # workers that were told to stop
        self.hand_back_may_fail = False  # because the dispatcher may be out of reach for long
        self.elements_may_not_come_back = False  # to the worker that made them, for it is not there
        self.readers_may_be_cut_off = False  # from a worker, when the dispatcher gives that up
        self.not_handed_back: set[int] = set()  # tasks whose drained worker could not
        self.heard: set[int] = set()  # leases of which their workers know
        self.unread: set[int] = set()  # tasks that nobody read yet as their worker was drained
        self.failed: set[int] = set()  # tasks of which a split was not to be skipped
        self.let_go: set[int] = set()  # tasks that nobody read, of which something was dropped
        self.dropped: set[int] = set()  # tasks of which a worker says that it dropped something
        self.excused_consumers = 0  # that were killed, or given up, with elements on their way
        self.runs: list[Run] = []
        self.rules: list[Any] = []  # of what is read otherwise: told of events, by their names
        self._kernel = this

    # -- the log -----------------------------------------------------------------------------

    def opened(self, term: int) -> None:
        """A writer has begun a term."""
        if term <= self.term:
            raise Violation(f"term {term} began after term {self.term}")
        self.term = term
        self._kernel.trace("term", term)

    def stored(self, term: int, first: int, records: Sequence[bytes]) -> None:
        """A batch is durable."""
        if first != len(self.records) + 1:
            self._kernel.fail(f"record {first} of term {term} follows {len(self.records)}")
            return
        if self.records and term < self.records[-1].term:
            self._kernel.fail(f"a batch of term {term} follows one of {self.records[-1].term}")
            return
        for sequence, data in enumerate(records, first):
            self.records.append(Record(sequence, term, data))
            event = decode(sequence, data)
            kind = event.WhichOneof("event") or ""
            self.counts[kind] += 1
            self._kernel.trace("event", sequence, term, kind)
            self._kernel.note(event)
            try:
                self._enter(event, kind)
                apply(self.state, event)
            except Violation as violation:
                self._kernel.fail(f"event {sequence}: {violation}")
                return
            except Exception as bug:  # noqa: BLE001 - whatever it is, it is reported
                self._kernel.crashed(f"applying event {sequence}: {event}", bug)
                return

    def found(self, first: int, log: Iterable[Record]) -> None:
        """Somebody recovered from a log that is durable, from `first` on. All of it must be there;
        what nobody was told of may be as well.
        """
        last = first - 1
        for record in log:
            last = record.sequence
            if last > len(self.records):
                self.stored(record.term, last, [record.data])
            elif self.records[last - 1] != record:
                self._kernel.fail(f"record {last} is not what was acknowledged")
                return
        if last < len(self.records):
            self._kernel.fail(f"records {last + 1} to {len(self.records)} were lost")

    def _enter(self, event: ev.Event, kind: str) -> None:
        for entries in (self, *self.rules):
            entry = getattr(entries, f"_{kind}", None)
            if entry is not None:
                entry(getattr(event, kind))

    def _leader_elected(self, event: ev.LeaderElected) -> None:
        if event.term <= self.state.term:
            raise Violation(f"term {event.term} was elected after {self.state.term}")

    def _dataset_registered(self, event: ev.DatasetRegistered) -> None:
        self.books.datasets.add(event.dataset_id)

    _mixture_registered = _dataset_registered

    def _job_created(self, event: ev.JobCreated) -> None:
        self.books.jobs.add(event.job_id)

    _job_forked = _job_created

    def _job_removed(self, event: ev.JobRemoved) -> None:
        self.books.removed_jobs.add(event.job_id)

    def _iteration_created(self, event: ev.IterationCreated) -> None:
        self.books.epochs[event.iteration_id] = (event.job_id, event.epoch)

    def _iteration_summarized(self, event: ev.IterationSummarized) -> None:
        books = self.books
        if event.iteration_id not in books.finished:
            raise Violation(f"iteration {event.iteration_id} was summarized unfinished")
        books.summarized.add(books.epochs[event.iteration_id])

    def _dataset_removed(self, event: ev.DatasetRemoved) -> None:
        readers = self.books.consumers.keys() - self.books.left.keys()
        jobs = {self.books.epochs[self.books.consumers[reader]][0] for reader in readers}
        if any(self.state.jobs[job].dataset_id == event.dataset_id for job in jobs):
            raise Violation(f"the dataset {event.dataset_id} was removed under its readers")

    def _iteration_finished(self, event: ev.IterationFinished) -> None:
        books = self.books
        books.finished.add(event.iteration_id)
        there = {uid for worker, uid in books.workers.items() if worker not in books.lost_workers}
        books.left_behind |= {
            task
            for task, (iteration, worker) in books.tasks.items()
            if iteration == event.iteration_id and books.workers[worker] not in there
        }

    def _bundles_checked(self, event: ev.BundlesChecked) -> None:
        """Every pipeline here gives the same each time."""
        if event.differing:
            raise Violation(f"bundles {event.differing} had other elements when run again")

    def _iteration_collected(self, event: ev.IterationCollected) -> None:
        self.books.collected.add(event.iteration_id)

    def _iteration_paused(self, event: ev.IterationPaused) -> None:
        """What its tasks had begun is lost, as far as nobody has taken it."""
        books = self.books
        readers = {c for c, i in books.consumers.items() if i == event.iteration_id}
        claims = self.state.iterations[event.iteration_id].claims
        is_read = claims is not None and ranges.total(claims.done) == claims.bundles
        if readers - books.left.keys() and not is_read:
            raise Violation(f"iteration {event.iteration_id} was paused under its readers")
        tasks = {t for t, (i, _) in books.tasks.items() if i == event.iteration_id}
        books.pauses[event.iteration_id] += 1
        books.paused |= {i for i, lease in books.leases.items() if lease.task_id in tasks}

    def _consumer_joined(self, event: ev.ConsumerJoined) -> None:
        self.books.consumers[event.consumer_id] = event.iteration_id

    def _consumer_left(self, event: ev.ConsumerLeft) -> None:
        self.books.left[event.consumer_id] = event.reason
        if event.reason != GOODBYE:
            self.excused_consumers += 1

    def _worker_registered(self, event: ev.WorkerRegistered) -> None:
        self.books.workers[event.worker_id] = event.uid

    def _worker_lost(self, event: ev.WorkerLost) -> None:
        self.books.lost_workers[event.worker_id] = event.reason
        uid = self.books.workers[event.worker_id]
        if event.reason == GONE:
            self.counts[GONE] += 1
            if uid not in self.dead_uids | self.leaving_uids:
                raise Violation(f"worker {uid} lives, and was given up as gone")

    def _task_created(self, event: ev.TaskCreated) -> None:
        if self.books.epochs[event.iteration_id] in self.books.summarized:
            raise Violation(f"task {event.task_id} gives out again what is finished")
        self._task_begun(event)

    def _task_proposed(self, event: ev.TaskProposed) -> None:
        self._task_begun(event)

    def _task_begun(self, event: ev.TaskCreated | ev.TaskProposed) -> None:
        books, iteration = self.books, event.iteration_id
        books.tasks[event.task_id] = (iteration, event.worker_id)
        books.reads[event.task_id] = (iteration, books.pauses[iteration])

    def _task_completed(self, event: ev.TaskCompleted) -> None:
        self.books.completed.add(event.task_id)

    def _splits_leased(self, event: ev.SplitsLeased) -> None:
        books = self.books
        place = (event.iteration_id, event.source, event.pass_number)
        lease = Lease(event.lease_id, event.task_id, place, event.first, event.count)
        if event.lease_id in books.leases:
            raise Violation(f"lease {event.lease_id} was given twice")
        books.leases[event.lease_id] = lease
        for split in range(event.first, event.first + event.count):
            if (held := books.holder.get((*place, split))) is not None:
                raise Violation(f"split {split} of {place} is leased by {held} and by {lease}")
            books.holder[*place, split] = lease

    def _lease_returned(self, event: ev.LeaseReturned) -> None:
        books = self.books
        lease = books.leases[event.lease_id]
        stop = lease.first + lease.count
        for split in range(stop - event.count, stop):
            del books.holder[*lease.place, split]

    def _split_skipped(self, event: ev.SplitSkipped) -> None:
        books = self.books
        if (skipped := (event.task_id, event.split)) in books.skipped:
            raise Violation(f"split {event.split} of task {event.task_id} is skipped twice")
        books.skipped.add(skipped)
        books.skips[event.iteration_id] += 1
        if books.skips[event.iteration_id] > SKIPPED_MOST:
            raise Violation(f"more than {SKIPPED_MOST} splits are skipped")

    # -- answers -----------------------------------------------------------------------------

    def answered(self, server: Process, call: Call, reply: bytes, term_before: int) -> None:
        """A dispatcher lets an answer go. `term_before` was the term as it heard the question."""
        term = server.local.get("term", 0)
        if term < term_before:
            raise Violation(
                f"{server.name} answered {call.method} in term {term}, when it was asked in "
                f"term {term_before}"
            )
        name = call.method.rpartition("/")[2]
        response = getattr(pb, f"{name}Response").FromString(reply)
        request = getattr(pb, f"{name}Request").FromString(call.request)
        facts = list(self._facts(name, request, response))
        for what, known in facts:
            if not known:
                raise Violation(
                    f"{server.name} answered {name} with {what}, which the journal does not say"
                )
        self._same_answer(name, request, response)
        self.counts[f"answer {name}"] += 1
        self.check_state(server)

    def _facts(self, name: str, request: Any, response: Any) -> Iterable[tuple[str, bool]]:
        """(statement, whether the journal says so) for everything that an answer says."""
        books = self.books
        if "journal" in response.DESCRIPTOR.fields_by_name:
            last = response.journal.sequence
            yield f"sequence {last}", last <= len(self.records)
        for rule in self.rules:
            if (facts := getattr(rule, "facts", None)) is not None:
                yield from facts(name, response)
        match name:
            case "RegisterDataset":
                yield response.dataset_id, response.dataset_id in books.datasets
            case "GetOrCreateJob":
                yield f"job {response.job_id}", response.job_id in books.jobs
            case "JoinIteration" if response.consumer_id:
                joined = (response.consumer_id, response.iteration_id)
                yield f"consumer {joined}", joined in books.consumers.items()
                for task in response.news.tasks:
                    known = books.tasks.get(task.task_id, (0, 0))[0] == response.iteration_id
                    yield f"task {task.task_id}", known
            case "WorkerHeartbeat":
                registered = books.workers.get(response.worker_id)
                yield f"worker {response.worker_id}", registered == request.uid
                for task in response.tasks:
                    owner = books.tasks.get(task.task_id)
                    yield f"task {task.task_id}", owner == (task.iteration_id, response.worker_id)
            case "ConsumerHeartbeat":
                iteration = books.consumers.get(request.consumer_id, 0)
                if response.finished:
                    yield f"the end of iteration {iteration}", iteration in books.finished
                for task in response.tasks:
                    known = books.tasks.get(task.task_id, (0, 0))[0] == iteration
                    yield f"task {task.task_id}", known
                    if task.completed:
                        ended = task.task_id in books.completed
                        yield f"the end of task {task.task_id}", ended
            case "LeaseSplits" if response.lease_id:
                lease = books.leases.get(response.lease_id)
                told = (request.task_id, response.first, response.count)
                same = lease is not None and (lease.task_id, lease.first, lease.count) == told
                yield f"lease {response.lease_id} of {told}", same

            case "SkipSplit" if response.skipped:
                skipped = (request.task_id, request.split)
                yield f"the skip of {skipped}", skipped in books.skipped
            case "SkipSplit":
                iteration, _ = books.tasks[request.task_id]
                yield "that no more may be skipped", books.skips[iteration] >= SKIPPED_MOST

    def _same_answer(self, name: str, request: Any, response: Any) -> None:
        if "request" not in request.DESCRIPTOR.fields_by_name or not request.request.number:
            return
        number = request.request.number
        if name == "LeaseSplits":
            if not response.lease_id:
                number = -number  # "no splits" decides nothing: splits may have come back since
            caller = f"task {request.task_id} source {request.source}"
            answer: tuple[Any, ...] = (response.lease_id,)
            if number < 0 and (caller, -number) in self.answers:
                raise Violation(f"request {-number} of {caller}: a lease, and then none")
        elif name == "SkipSplit":
            caller, answer = f"task {request.task_id} skips", (response.skipped,)
        else:
            caller = request.request.caller
            as_of_now = (
                "journal",
                "dataset_id",
                "news",
                "order",
                "lengths",
                "step",
            )  # the rest is what was decided
            fields = response.ListFields()
            answer = tuple(value for field, value in fields if field.name not in as_of_now)
            before = self.answers.get((caller, number), ())
            if name == "GetOrCreateJob" and self.books.removed_jobs.intersection(before):
                del self.answers[caller, number]  # a late copy: nobody waits for its answer
        if self.answers.setdefault((caller, number), answer) != answer:
            before = self.answers[caller, number]
            raise Violation(f"request {number} of {caller}: answered {before}, then {answer}")

    def believed(self, call: Call) -> None:
        """A client has got an answer."""
        self.counts["believed"] += 1
        if call.method.endswith("/LeaseSplits") and call.reply is not None:
            self.heard.add(pb.LeaseSplitsResponse.FromString(call.reply).lease_id)
        if call.method.endswith("/JoinIteration") and call.reply is not None:
            joined = pb.JoinIterationResponse.FromString(call.reply)
            call.client.local["consumer"] = joined.consumer_id

    def check_state(self, server: Process) -> None:
        """If the dispatcher's state is wholly in the journal, it must be what the journal says."""
        dispatcher = server.local.get("dispatcher")
        if dispatcher is None or server.local.get("term") != self.term:
            return
        live = dispatcher.state
        settled = dispatcher.position().sequence == live.sequence == self.state.sequence
        if settled and self._kernel.rng.random() < 0.05:
            self.require_same(live, f"{server.name}'s state")

    def require_same(self, state: State, whose: str) -> None:
        self.counts["states compared"] += 1
        if state != self.state:
            raise Violation(
                f"{whose} at {state.sequence} differs from the replayed one:\n"
                f"{encode_state(state)!r}\n{encode_state(self.state)!r}"
            )

    # -- elements ----------------------------------------------------------------------------

    def began_run(self, task_id: int) -> int:
        self.runs.append(Run(task_id))
        return len(self.runs) - 1

    def made(self, run: int, stop: int, cost: int) -> None:
        """A pipeline has made another block."""
        self.runs[run].elements = stop
        self.runs[run].blocks.append((stop, cost))

    def process_of(self, task_id: int) -> int:
        """The uid of the worker's process that has the task."""
        return self.books.workers[self.books.tasks[task_id][1]]

    def deliver(self, consumer: str, element: Element, dynamic: bool) -> None:
        """A trainer has taken an element. Without sharding each process of a worker gives each
        element once, whatever the dispatcher thinks of it meanwhile.
        """
        key: tuple[Any, ...] = element.place
        if not dynamic:
            key = (self.process_of(element.task_id), *key)
        if (other := self.delivered.get(key)) is not None:
            raise Violation(f"{element} came to {other} and to {consumer}")
        if dynamic:
            lease = self.books.holder.get(key)
            if lease is None or lease.task_id != element.task_id:
                raise Violation(f"{element} came to {consumer}, but its split is of {lease}")
        self.delivered[key] = consumer
        self.element_count += 1

    def account(
        self, iteration_id: int, *, dynamic: bool, wanted: Iterable[tuple[int, int, int]],
        on_their_way: int,
    ) -> int:  # fmt: skip
        """Every split's element of a finished iteration was delivered, or may be missing. Returns
        how many are. At most `on_their_way` went down with each consumer.
        """
        tasks = [0]
        if not dynamic:
            tasks = [t for t, (i, _) in self.books.tasks.items() if i == iteration_id]
            tasks = [t for t in tasks if t in self.books.completed]
        missing, with_consumers = 0, 0
        for task_id in tasks:
            for place in wanted:
                key = (iteration_id, *place)
                uid = self.books.workers[self.books.tasks[task_id][1]] if not dynamic else 0
                if (key if dynamic else (uid, *key)) in self.delivered:
                    continue
                missing += 1
                lease = self.books.holder.get(key)
                task_of = lease.task_id if lease is not None else task_id
                if task_of and self._died(task_of):
                    continue
                if lease is not None and lease.lease_id in self.books.paused:
                    continue
                unheard = lease is not None and lease.lease_id not in self.heard
                if unheard and task_of in self.books.left_behind and self._lost(task_of):
                    continue  # its worker was told of it neither then nor when it came back
                if dynamic and lease is None:
                    raise Violation(f"nobody was ever given the split {key}")
                with_consumers += 1
                if with_consumers > on_their_way * self.excused_consumers:
                    raise Violation(
                        f"{key}, leased as {lease}, was never delivered; its worker lived, and "
                        f"{self.excused_consumers} consumers can explain only "
                        f"{on_their_way * self.excused_consumers} such elements"
                    )
        return missing

    def _died(self, task_id: int) -> bool:
        """Whether the task's worker was killed, was cut off from a consumer as the dispatcher gave
        it up, could not reach it to hand back what it had leased, was drained before anybody read
        the task, dropped what nobody read of it, failed in it, or was silent for so long that its
        readers let it go, with all else read. That it was given up is no excuse: it comes back, and
        goes on.
        """
        if task_id in self.not_handed_back and self.hand_back_may_fail:
            return True
        if task_id in self.unread & self.dropped | self.let_go | self.failed:
            return True
        worker_id = self.books.tasks[task_id][1]
        uid = self.books.workers[worker_id]
        if uid in self.dead_uids:
            return True
        if uid in self.mute_uids and task_id in self.books.left_behind:
            return self._lost(task_id)
        return self._lost(task_id) and self.readers_may_be_cut_off

    def _lost(self, task_id: int) -> bool:
        """Whether the task's worker was given up."""
        worker_id = self.books.tasks[task_id][1]
        return self.books.lost_workers.get(worker_id, GOODBYE) != GOODBYE


class Elsewhere(Oracle):
    """Of the journal that a dispatcher begins while the storage is empty: nobody joins it who knows
    the one before.
    """

    def __init__(self, this: Kernel, before: Oracle) -> None:
        super().__init__(this)
        self._before = before

    def _worker_registered(self, event: ev.WorkerRegistered) -> None:
        if event.uid in self._before.books.workers.values():
            raise Violation(f"the worker {event.address} begins anew on an emptied storage")
        super()._worker_registered(event)
