"""Known-bad variants of the product, to prove that the simulation finds what it is there for.

Each is a bug that somebody could make in a few lines, put in for as long as the context lasts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple
from unittest.mock import patch

import msgspec

from forebay.journal.proto import events_pb2 as ev
from forebay.service import ranges
from forebay.service.blocks import strided
from forebay.service.client.claims import ClaimsMode
from forebay.service.client.ordered import OrderedMode, ScheduleHold
from forebay.service.client.positions import OrderedEpoch
from forebay.service.client.slices import Slices
from forebay.service.core import (
    commands,
    consumers,
    machine,
    places,
    read_kinds,
    save_streams,
    splits,
    workers,
)
from forebay.service.core.base import Decision
from forebay.service.core.consumers import left
from forebay.service.core.encoding import encode_state
from forebay.service.core.state import State
from forebay.service.delivery import EndOfSlice, TaskOutput
from forebay.service.delivery.bundles import _SliceSubscription
from forebay.service.delivery.cached import CachedOutput
from forebay.service.delivery.read_requests import MAX_INDEX
from forebay.service.delivery.rounds import RoundsOutput
from forebay.service.dispatcher import decider
from forebay.service.dispatcher.changes import ScheduleChanges
from forebay.service.dispatcher.decider import Decider
from forebay.service.dispatcher.garbage_collector import GarbageCollector
from forebay.service.dispatcher.history import JournalHistory
from forebay.service.dispatcher.leadership import Leadership
from forebay.service.dispatcher.task_removal import TaskRemovals
from forebay.service.order import Deal
from forebay.service.proto import forebay_pb2 as pb
from forebay.service.schedule import Schedule
from forebay.service.transport.messages import Key
from forebay.service.transport.receiving import Receiving
from forebay.service.transport.sending import SendBuffer
from forebay.service.worker.leases import LeaseFeed, _SourceLeases
from forebay.service.worker.saves import StreamWriter
from forebay.service.worker.tasks import DeliveryCounter
from forebay.service.worker.worker import Worker
from forebay.storage.server_log import Meta
from forebay.storage.writer_watch import WriterWatch

from .disk import Disk
from .patches import replaced
from .remote import Server
from .scenario import Scenario


@contextmanager
def both(one: AbstractContextManager[Any], other: AbstractContextManager[Any]) -> Iterator[None]:
    with one, other:
        yield


def answers_before_durable() -> AbstractContextManager[None]:
    """A dispatcher that lets its answers go before the storage has what they say."""

    async def durable(self: Decider) -> None: ...

    return replaced(Decider, durable=durable)


def answers_unproven() -> AbstractContextManager[None]:
    """A dispatcher that answers questions without knowing that it still leads."""

    async def prove(self: Leadership, since_s: float) -> None: ...

    return replaced(Leadership, prove=prove)


def takes_silence_for_death() -> AbstractContextManager[None]:
    """A standby that displaces a leader that is connected, and listened on."""

    watch = WriterWatch.may_displace

    def may_displace(self: WriterWatch, meta: Meta, _: object) -> bool:
        return watch(self, dataclasses.replace(meta, lease_ms=meta.query_ms), None)

    return replaced(WriterWatch, may_displace=may_displace)


def forgets_requests() -> AbstractContextManager[None]:
    """A dispatcher that decides anew when a request comes a second time."""

    def forgetful(state: State, command: commands.Command, now_ms: int) -> Any:
        return machine.decide(msgspec.structs.replace(state, answers={}), command, now_ms)

    return replaced(decider, decide=forgetful)


def leases_returned_splits_twice() -> AbstractContextManager[None]:
    """An `apply` that leaves a range that was handed back, and leased again, in the pool."""
    return replaced(ranges, remove=lambda *_: None)


def resends_what_has_arrived() -> AbstractContextManager[None]:
    """A worker that sends everything again after a reconnect, to a consumer that takes it."""
    received = SendBuffer.received
    accept = Receiving.accept

    def keeps(self: SendBuffer, count: int) -> None:
        if not self.retained or count != self.retained[-1].number:
            received(self, min(count, self.number - len(self.retained)))

    def takes(self: Receiving, key: Key, number: int, block: Any, peer: str) -> bool:
        incoming = self.incoming.get(key)
        if incoming is not None and number <= incoming.received:
            incoming.received = number - 1
        return accept(self, key, number, block, peer)

    return both(replaced(SendBuffer, received=keeps), replaced(Receiving, accept=takes))


def forgets_what_was_sent() -> AbstractContextManager[None]:
    """A worker that takes a block for received once it was sent."""
    following = SendBuffer.next

    def forgets(self: SendBuffer, credit: bool, room: bool, max_elements: int | None) -> Any:
        self.retained.clear()
        return following(self, credit, room, max_elements)

    return replaced(SendBuffer, next=forgets)


def says_once_what_was_taken() -> AbstractContextManager[None]:
    """A consumer that does not say it again after a connection on which it may not have come."""
    resume = Receiving.resume

    def forgets(self: Receiving) -> Iterator[Any]:
        to_report = set(self._to_report)
        reads = [*resume(self)]
        self._to_report = to_report
        return iter(reads)

    return replaced(Receiving, resume=forgets)


def drops_what_is_handed_back() -> AbstractContextManager[None]:
    """A worker that forgets a consumer that leaves, and what it had not taken."""
    return replaced(SendBuffer, hand_back=lambda self, *_: self.close())


def hands_out_again_what_was_taken() -> AbstractContextManager[None]:
    """A worker that gives all of a block to others, of which a trainer has taken some."""
    hand_back = SendBuffer.hand_back

    def hands_back_more(self: SendBuffer, taken: int, elements: int) -> None:
        hand_back(self, taken, 0)

    return replaced(SendBuffer, hand_back=hands_back_more)


def keeps_splits_at_drain() -> AbstractContextManager[None]:
    """A worker that is told to stop, and hands nothing back."""
    return replaced(_SourceLeases, _return_unbegun=lambda *_, **__: None)


def forgets_what_an_earlier_pass_handed_back() -> AbstractContextManager[None]:
    """An `apply` that drops what is handed back once the next pass has begun."""
    returned = splits.EVENTS["lease_returned"].apply

    def forgets(state: State, event: ev.LeaseReturned) -> None:
        ledger = splits.ledger_of(state, state.leases[event.lease_id])
        returned(state, event)
        ledger.left_over.clear()

    return patch.dict(
        machine.EVENTS, lease_returned=splits.EVENTS["lease_returned"]._replace(apply=forgets)
    )


def takes_the_end_of_a_pass_for_the_end() -> AbstractContextManager[None]:
    """A worker that ends its endless pipeline when others had all splits of a pass."""

    def is_over(self: LeaseFeed, _: object) -> bool:
        return any(p._lease._lease is None and p._opening >= 0 for p in self._leases)

    return replaced(LeaseFeed, is_over=is_over)


def cuts_consumers_off_at_drain() -> AbstractContextManager[None]:
    """A worker that is told to stop, and takes it that nobody reads from it."""
    drain = Worker._drain

    def cut(self: Worker) -> bool:
        with replaced(self.consumers, is_read=lambda *_: False):
            return drain(self)

    return replaced(Worker, _drain=cut)


def forgets_the_tasks_of_lost_workers() -> AbstractContextManager[None]:
    """An `apply` after which a worker that was given up, and comes back, begins anew."""
    lost = machine.EVENTS["worker_lost"].apply

    def forgets(state: State, event: Any) -> None:
        lost(state, event)
        state.lost_tasks.clear()

    return patch.dict(
        machine.EVENTS, worker_lost=machine.EVENTS["worker_lost"]._replace(apply=forgets)
    )


def keeps_every_epoch() -> AbstractContextManager[None]:
    """A dispatcher that has its workers go on with every epoch that was left early."""

    async def bound(self: GarbageCollector) -> None: ...

    return replaced(GarbageCollector, _bound_idle_iterations=bound)


def forgets_what_is_finished() -> AbstractContextManager[None]:
    """A dispatcher that begins a finished epoch anew once it has been summarized."""
    return replaced(ranges, holds=lambda *_: False)


def disk_lies() -> AbstractContextManager[None]:
    """A disk that says it has synced, and has not."""
    return replaced(Disk, lies=True)


def storage_does_not_fence() -> AbstractContextManager[None]:
    """A storage that takes appends of writers whose term is over."""
    return replaced(Server, fences=False)


def snapshot_without_answers() -> AbstractContextManager[None]:
    """A snapshot that leaves out what was answered last."""

    def encode(state: State) -> bytes:
        return encode_state(msgspec.structs.replace(state, answers={}))

    return replaced(decider, encode_state=encode)


def refuses_nobody() -> AbstractContextManager[None]:
    """A dispatcher that takes whoever comes from another journal."""

    async def welcome(*_: object) -> None: ...

    return replaced(JournalHistory, _refuse=welcome)


def skips_a_round() -> AbstractContextManager[None]:
    """A worker that leaves a round out, for all consumers alike."""
    put = RoundsOutput.put

    def skips(self: RoundsOutput, block: Any) -> None:
        of = self.num_consumers
        if self._stop and self._stop % of == 0 and block.count > of:
            block = strided(block, of, 1, block.count - of)
        put(self, block)

    return replaced(RoundsOutput, put=skips)


def gives_one_element_to_two_consumers() -> AbstractContextManager[None]:
    """A worker that gives consumer 1 what is consumer 0's."""
    opened = RoundsOutput.open

    def confuses(self: RoundsOutput, request: Any, **how: Any) -> Any:
        subscription = opened(self, request, **how)
        if request.consumer == 1:
            self._at[1] -= 1
        return subscription

    return replaced(RoundsOutput, open=confuses)


def tears_rounds() -> AbstractContextManager[None]:
    """A dispatcher that lets a lost worker's task go from the round on that the first consumer has
    not got."""

    async def hold(self: TaskRemovals, mine: Any, consumer_index: int) -> None:
        state = self._decider.state
        task = state.tasks.get(mine.task_id)
        if task is not None and task.orphan is not None and task.worker_id == mine.lost:
            await self._decider.execute(
                commands.RemoveTask(task_id=mine.task_id, round=mine.received)
            )

    return replaced(TaskRemovals, hold=hold)


def tells_one_consumer() -> AbstractContextManager[None]:
    """A dispatcher that tells only one consumer that all are out of step."""
    held = TaskRemovals.hold

    def eject_one(state: State, command: commands.EjectConsumers) -> Decision:
        first = min(state.iterations[command.iteration_id].consumers)
        return Decision([left(first, command.reason)], None)

    async def forgets(self: TaskRemovals, mine: Any, consumer_index: int) -> None:
        there = len(self._decider.state.consumers)
        await held(self, mine, consumer_index)
        if len(self._decider.state.consumers) < there:
            self._held.clear()

    return both(
        patch.dict(machine.DECIDE, {commands.EjectConsumers: eject_one}),
        replaced(TaskRemovals, hold=forgets),
    )


def ends_shards_early() -> AbstractContextManager[None]:
    """A worker that completes its shard once it has made it, and not when it has arrived."""

    return both(
        replaced(TaskOutput, wait_drained=lambda *_, **__: True),
        replaced(DeliveryCounter, wait=lambda *_: True),
    )


def ends_an_epoch_with_its_first_shard() -> AbstractContextManager[None]:
    """A dispatcher that ends an epoch under static sharding as any other."""
    return replaced(read_kinds.StaticRead, _is_read=read_kinds.ReadKind._is_read)


def gives_a_place_twice() -> AbstractContextManager[None]:
    """A dispatcher that gives a worker a place that another one has."""
    found = places.find_place

    def gives(state: State, address: str, stock: bool) -> int | None:
        return found(msgspec.structs.replace(state, worker_at={}), address, stock)

    return replaced(workers, find_place=gives)


def reads_shards_again() -> AbstractContextManager[None]:
    """A dispatcher that gives out again a shard that was read to its end."""

    def new_task(
        self: read_kinds.StaticRead, iteration: Any, worker: Any, place: int, ids: Any
    ) -> list[ev.TaskCreated]:
        created = read_kinds.task_created_event(
            ids.new(), iteration.iteration_id, worker.worker_id, shard=place
        )
        return [created]

    return replaced(read_kinds.StaticRead, _new_task=new_task)


def hides_what_was_skipped() -> AbstractContextManager[None]:
    """A cache that does not say what a trainer has skipped."""
    given = CachedOutput.give

    def hides(self: CachedOutput, *how: Any) -> Any:
        found = given(self, *how)
        if isinstance(found, tuple):
            found = dataclasses.replace(found[0], skipped=0), found[1]
        return found

    return replaced(CachedOutput, give=hides)


def forgets_positions() -> AbstractContextManager[None]:
    """A cache that takes a trainer that comes back for a new one."""
    opened = CachedOutput.open

    def forgets(self: CachedOutput, request: Any, **how: Any) -> Any:
        self._trainers.pop(request.trainer_id, None)
        return opened(self, request, **how)

    return replaced(CachedOutput, open=forgets)


def drops_what_has_room() -> AbstractContextManager[None]:
    """A cache that keeps nothing which its fastest trainer has got."""
    put = CachedOutput.put

    def drops(self: CachedOutput, block: Any) -> None:
        self._max_bytes = 0
        put(self, block)

    return replaced(CachedOutput, put=drops)


def writes_chunks_again() -> AbstractContextManager[None]:
    """A worker that begins a stream anew which another one had written a part of."""
    began = StreamWriter.write

    def again(self: StreamWriter) -> bool:
        stream = self.stream
        if stream.last_file:
            self._place(stream.last_file, stream.chunks - 1, stream.last_elements)
        stream.elements, stream.last_file = 0, ""
        return began(self)

    return replaced(StreamWriter, write=again)


def ends_a_save_early() -> AbstractContextManager[None]:
    """A dispatcher that ends a save when all streams that there are have ended."""
    return replaced(save_streams, _count_splits=lambda save: save.sources[0].next)


def asks_again_for_what_has_come() -> AbstractContextManager[None]:
    """A consumer that asks another worker for all of a slice, of which a part has come."""
    ask, elsewhere = Slices.ask, Slices._ask_elsewhere

    def asks(self: Slices, request: Any) -> None:
        request.whole = request.runs
        ask(self, request)

    def forgets(self: Slices, requests: Any) -> None:
        requests = list(requests)
        for request in requests:
            request.runs = request.whole
        elsewhere(self, requests)

    return replaced(Slices, ask=asks, _ask_elsewhere=forgets)


def asks_nobody_else() -> AbstractContextManager[None]:
    """A consumer that waits for a worker that is gone."""
    return replaced(Slices, _lose=lambda *_: None)


def answers_a_wrong_length() -> AbstractContextManager[None]:
    """A worker that takes the end of a run for the bundle's, wherever it stopped."""
    answer = _SliceSubscription._answer

    def answers(self: _SliceSubscription) -> Any:
        end = answer(self)
        if isinstance(end, EndOfSlice) and not end.complete and end.length:
            end = EndOfSlice(end.bundle, end.length, True)
        return end

    return replaced(_SliceSubscription, _answer=answers)


def forgets_lengths() -> AbstractContextManager[None]:
    """An `apply` that forgets the lengths of bundles."""
    learned = machine.EVENTS["lengths_learned"]
    return patch.dict(machine.EVENTS, lengths_learned=learned._replace(apply=lambda *_: None))


def counts_what_was_fetched() -> AbstractContextManager[None]:
    """A consumer whose position is behind the blocks that came, and not behind what was given."""
    take, position = OrderedMode.take, OrderedEpoch.position
    fetched: dict[int, int] = {}

    def takes(self: OrderedMode) -> Any:
        taken = take(self)
        if taken is not None:
            fetched[id(self._plan.epoch)] = fetched.get(id(self._plan.epoch), 0) + taken[0].count
        return taken

    def is_at(self: OrderedEpoch, batches: int) -> int:
        return position(self, max(batches, fetched.get(id(self), 0) // self.deal.batch_size))

    return both(replaced(OrderedMode, take=takes), replaced(OrderedEpoch, position=is_at))


def deals_from_the_first_element() -> AbstractContextManager[None]:
    """A consumer that begins in the middle of an epoch, and deals as from its beginning."""
    mine = Deal.mine

    def deals(self: Deal, positions: Any) -> Any:
        numbers = mine(dataclasses.replace(self, start=0), positions)
        return numbers[positions[numbers] >= self.start]

    return replaced(Deal, mine=deals)


def ends_when_nothing_is_here() -> AbstractContextManager[None]:
    """A consumer that takes it for the epoch's end that it has given what it had asked for."""
    ended = OrderedMode.has_ended

    def ends(self: OrderedMode) -> bool:
        portions = self._portions
        idle = self._plan.until > 0 and not portions.is_waiting and not portions._ready
        return ended(self) or idle

    return replaced(OrderedMode, has_ended=ends)


def gives_steps_in_part() -> AbstractContextManager[None]:
    """A consumer that gives what may lie in the epoch's last step before it knows where that ends:
    the next position may be behind the epoch's end."""
    limit = OrderedEpoch.limit

    def limits(self: OrderedEpoch, before: int) -> int:
        return limit(self, before) if self.drop_remainder else MAX_INDEX

    return replaced(OrderedEpoch, limit=limits)


def gives_on_when_asked() -> AbstractContextManager[None]:
    """A consumer that says where it is, and does not hold until a change is decided."""
    heard = ScheduleHold.heard

    def hears(self: ScheduleHold, news: Any) -> bool:
        goes_on = heard(self, news)
        self._proposal = pb.Proposal()
        return goes_on

    return replaced(ScheduleHold, heard=hears)


def holds_for_ever() -> AbstractContextManager[None]:
    """A consumer that is not let go when a change was refused."""
    heard = ScheduleHold.heard

    def hears(self: ScheduleHold, news: Any) -> bool:
        held = self._proposal
        goes_on = heard(self, news)
        if not news.changes and not self._proposal.number:
            self._proposal = held
        return goes_on

    return replaced(ScheduleHold, heard=hears)


def asks_nobody() -> AbstractContextManager[None]:
    """A dispatcher that decides what steps are left out, whoever has them."""

    async def decides(self: ScheduleChanges, job: Any, change: Any, numbered: Any) -> None:
        there = [reader.consumer_id for reader in self.schedules.readers(job)]
        await self._decide(job, change, numbered, there)

    return replaced(ScheduleChanges, _propose=decides)


def leaves_out_where_some_lack() -> AbstractContextManager[None]:
    """A dispatcher that asks those who are there, and not who may come back."""
    return replaced(ScheduleChanges, _require_all=lambda *_: None)


def forks_without_changes() -> AbstractContextManager[None]:
    """A dispatcher that gives who replays a job its order, and no changes."""
    created = machine.EVENTS["job_created"].apply
    forked = machine.EVENTS["job_forked"]._replace(apply=created)
    return patch.dict(machine.EVENTS, job_forked=forked)


def begins_sources_anew() -> AbstractContextManager[None]:
    """A consumer to which a source's elements begin again behind a change of weights."""
    init = Schedule.__init__

    def begins(self: Schedule, *args: Any) -> None:
        init(self, *args)
        self._stretches = [each._replace(counts=[0] * 9) for each in self._stretches]

    return replaced(Schedule, __init__=begins)


def forgets_cursors() -> AbstractContextManager[None]:
    """A dispatcher that gives out the claims of who left from their beginnings."""

    def returns(iteration: Any, consumer: Any) -> None:
        if iteration.claims is not None:
            iteration.claims.returned |= dict.fromkeys(consumer.claims, 0)
            iteration.version += 1

    return replaced(consumers, returned=returns)


def forgets_claims() -> AbstractContextManager[None]:
    """A dispatcher that does not give out again what a consumer had claimed that left."""
    return replaced(consumers, returned=lambda *_: None)


def reports_what_it_has_taken() -> AbstractContextManager[None]:
    """A consumer that leaves and reports all of its last block, of which it gave a part."""
    says = ClaimsMode.final_reports
    return replaced(ClaimsMode, final_reports=lambda self, who, left: says(self, who, 0))


def ends_bundles_early() -> AbstractContextManager[None]:
    """A consumer that takes what it was given of a bundle for all of it."""
    go_on = ClaimsMode._go_on

    def goes_on(self: ClaimsMode, claim: Any) -> None:
        if claim.length is None and claim.cursor > 2:
            claim.length = claim.cursor
        go_on(self, claim)

    return replaced(ClaimsMode, _go_on=goes_on)


class Variant(NamedTuple):
    """A bug, how it shows, and the faults under which it does (none: those of the seed)."""

    put_in: Callable[[], AbstractContextManager[None]]
    shows_as: str  # in the violation
    faults: tuple[str, ...] = ()
    seeds: int = 60  # within which it is found
    fits: Callable[[Scenario], bool] = lambda _: True  # whether a seed's scenario can show it
    mode: str = "shared"
    first: int = 0  # of the seeds: one that is found at once, with the simulation as it is today


BROKEN: dict[str, Variant] = {
    variant.put_in.__name__: variant
    for variant in (
        Variant(answers_before_durable, "which the journal does not say"),
        Variant(
            # Only a standby of a storage on a server displaces a leader that is paused. Trainers
            # that start again send queries, which need no decision, to a leader that was displaced.
            answers_unproven, "when it was asked in term", ("pause dispatcher", "kill trainer"),
            seeds=400, mode="ordered",
            fits=lambda scenario: not scenario.files and scenario.dispatchers > 1 and any(
                fault.kind == "pause dispatcher" and fault.for_s > scenario.lease_ms / 1000
                for fault in scenario.faults
            ),
        ),
        Variant(
            takes_silence_for_death, "was cut short", ("isolate dispatcher",),
            fits=lambda scenario: not scenario.files,
        ),
        Variant(forgets_requests, "answered"),
        Variant(leases_returned_splits_twice, "is leased by", ("drain worker",)),
        Variant(resends_what_has_arrived, "came to", ("cut connections",), mode="cached"),
        Variant(forgets_what_was_sent, "", ("cut connections",)),
        Variant(
            says_once_what_was_taken, "did not come to the end", ("cut connections",), seeds=300,
            first=190,
        ),
        Variant(
            drops_what_is_handed_back, "never delivered", seeds=400,
            fits=lambda scenario: scenario.preempted > 0 and not scenario.faults,
        ),
        Variant(
            hands_out_again_what_was_taken, "came to", seeds=400,
            fits=lambda scenario: scenario.preempted > 0 and not scenario.faults,
        ),
        Variant(keeps_splits_at_drain, "was never delivered", ("drain worker",)),
        Variant(
            forgets_what_an_earlier_pass_handed_back, "nobody was ever given",
            ("drain worker",), 600,
            lambda scenario: scenario.pipeline.passes > 1 and scenario.workers > 1,
        ),
        Variant(takes_the_end_of_a_pass_for_the_end, "that has none", ("kill worker",), first=29),
        Variant(cuts_consumers_off_at_drain, "was never delivered", ("drain worker",)),
        Variant(forgets_the_tasks_of_lost_workers, "came to", ("freeze worker",), first=4),
        Variant(keeps_every_epoch, "epochs that nobody reads go on", seeds=80),
        Variant(
            forgets_what_is_finished, "gives out again", ("kill trainer", "storage slow"), 1_800,
            fits=lambda scenario: scenario.leaves > 0 and scenario.finished_retention_ms < 2_000,
            first=4_700,
        ),
        Variant(disk_lies, "", ("power failure",), first=25),
        Variant(storage_does_not_fence, "term", ("pause dispatcher", "storage slow"), first=22),
        Variant(refuses_nobody, "begins anew on an emptied storage", ("storage emptied",)),
        Variant(snapshot_without_answers, "differs from the replayed one", ("kill dispatcher",)),
        Variant(skips_a_round, "was due", mode="rounds"),
        Variant(gives_one_element_to_two_consumers, "is consumer 0's", mode="rounds"),
        Variant(
            tears_rounds, "another consumer had", ("kill worker",), 200, mode="rounds", first=32
        ),
        Variant(
            tells_one_consumer, "was not told", ("kill worker",), 200,
            lambda scenario: scenario.trainers > 1 and not scenario.together, "rounds", first=68,
        ),
        Variant(
            ends_shards_early, "came to nobody", ("kill worker",), 450,
            lambda scenario: (
                scenario.step_s > 0 and scenario.credit_bytes < 5_000
                and scenario.pipeline.split_s < 2e-3 and scenario.output_bytes > 600
            ), "static",
        ),
        Variant(ends_an_epoch_with_its_first_shard, "was not read", mode="static"),
        Variant(gives_a_place_twice, "and so has worker", ("kill worker",), mode="static"),
        Variant(
            reads_shards_again, "is read again", ("kill worker",), 200,
            lambda scenario: scenario.workers > 1 and not scenario.any_port, "static",
        ),
        Variant(
            hides_what_was_skipped, "was told of 0", seeds=200,
            fits=lambda scenario: scenario.cache_bytes == 2_000 and scenario.trainers > 1,
            mode="cached",
        ),
        Variant(forgets_positions, "twice", ("kill trainer", "cut connections"), mode="cached"),
        Variant(drops_what_has_room, "the window has room", mode="cached"),
        Variant(writes_chunks_again, "more than once", ("kill worker",), mode="save", first=14),
        Variant(ends_a_save_early, "without its elements", mode="save"),
        Variant(asks_again_for_what_has_come, "was due", ("kill worker",), 300, mode="ordered"),
        Variant(asks_nobody_else, "did not come to the end", ("kill worker",), mode="ordered"),
        Variant(answers_a_wrong_length, "bundle", mode="ordered"),
        Variant(forgets_lengths, "was learned twice", mode="ordered"),
        Variant(counts_what_was_fetched, "and should be at", mode="ordered", first=40),
        Variant(deals_from_the_first_element, "was due", mode="ordered"),
        Variant(ends_when_nothing_is_here, "came to the end of epoch", mode="ordered"),
        Variant(gives_steps_in_part, "and should be at", seeds=300, mode="ordered", first=35),
        Variant(gives_on_when_asked, "was due", mode="ordered", first=50),
        Variant(holds_for_ever, "did not come to the end", mode="ordered"),
        Variant(asks_nobody, "was due", mode="ordered"),
        Variant(leaves_out_where_some_lack, "were not asked", mode="ordered"),
        Variant(begins_sources_anew, "was due", mode="ordered"),
        Variant(forks_without_changes, "was replayed as", mode="ordered"),
        Variant(forgets_cursors, "was due", ("kill trainer",), mode="claimed"),
        Variant(forgets_claims, "did not come to the end", ("kill trainer",), mode="claimed"),
        Variant(
            reports_what_it_has_taken, "and was given", seeds=200,
            fits=lambda scenario: scenario.leaves > 0, mode="claimed",
        ),
        Variant(ends_bundles_early, "and was given", mode="claimed"),
    )
}  # fmt: skip
