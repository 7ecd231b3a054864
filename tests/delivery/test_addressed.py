"""What is peculiar to the policy *addressed*: bundles, who is waited for, generations, and ends."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.service.block_limits import cost
from forebay.service.blocks import Block
from forebay.service.delivery import (
    ANY,
    Addressed,
    AddressedOutput,
    BundleForgotten,
    BundleRun,
    EndOfBundle,
    EndOfTask,
    OutputCancelled,
    Part,
    Superseded,
    TaskFailed,
    TaskUnknown,
)
from forebay.service.delivery.orders import MAX_STRIDE, decode, encode
from forebay.service.errors import ProtocolError
from forebay.service.proto import transfer_pb2 as pb

from .contract import TIMEOUT_S, Ledger, Reader, block

BUNDLE = 3
COST = cost(block(0, 4))


def together(readers: int, bundle: int = BUNDLE, generation: int = 0) -> list[Addressed]:
    return Addressed(bundle, 0, readers, generation).together()


def produce(run: BundleRun, blocks: int = 3) -> None:
    """A bundle of `blocks` blocks of 4 elements, from where the run begins."""
    for number in range(run.index // 4, blocks):
        first = max(run.index, 4 * number)
        run.put(block(first, 4 * number + 4 - first, run.bundle))
    run.finish()


def ended(readers: list[Addressed], ledger: Ledger | None = None) -> AddressedOutput:
    output = AddressedOutput(1 << 30, ledger)
    produce(output.begin(readers))
    return output


def read_all(reader: Reader) -> object:
    while isinstance(item := reader.next(), Block):
        pass
    return item


# -- who reads ---------------------------------------------------------------------------------


def test_readers_together_in_any_order() -> None:
    """Whoever comes first does not have the elements of the others forgotten."""
    output = ended(together(3))
    output.finish()
    for i in (2, 0, 1):
        reader = Reader(output, Addressed(BUNDLE, i, 3))
        assert not output.wait_drained(0)
        assert read_all(reader) == EndOfBundle(BUNDLE, 12)
        assert reader.got == [*range(i, 12, 3)]
        if i != 1:
            reader.close()
    assert output.wait_drained(0) and output.waiting_elements == 0


def test_blocks_say_where_they_are_from() -> None:
    reader = Reader(ended(together(3)), Addressed(BUNDLE, 1, 3))
    read_all(reader)
    assert [(b.bundle, b.index, b.count) for b in reader.lacking] == [
        (BUNDLE, 1, 1), (BUNDLE, 4, 2), (BUNDLE, 10, 1),
    ]  # fmt: skip


def test_who_goes_on_after_a_block_asks_for_what_follows() -> None:
    order = Addressed(BUNDLE, 1, 3, generation=2)
    reader = Reader(ended(order.together()), order)
    for expected in (4, 10, 13):
        item = reader.next()
        assert isinstance(item, Block)
        order = order.after(item)
        assert order == Addressed(BUNDLE, expected, 3, generation=2)


def test_readers_may_begin_in_the_middle_and_be_more_than_the_elements() -> None:
    orders = Addressed(BUNDLE, 2, 8).together()
    output = AddressedOutput()
    run = output.begin(orders)
    assert run.index == 2
    produce(run, blocks=1)
    output.finish()
    readers = [Reader(output, orders[i]) for i in (5, 0, 7, 1, 2, 3, 4, 6)]
    assert {read_all(reader) for reader in readers} == {EndOfBundle(BUNDLE, 4)}
    assert [reader.got for reader in readers if reader.got] == [[2], [3]]
    assert output.wait_drained(0)


def test_readers_begin_where_they_said_or_later() -> None:
    ledger = Ledger()
    output = ended([Addressed(BUNDLE, 4)], ledger)
    reader = Reader(output, Addressed(BUNDLE, 9))
    assert ledger.dropped_parts == [Part(4, BUNDLE, 4)]
    assert read_all(reader) == EndOfBundle(BUNDLE, 12) and reader.got == [9, 10, 11]


def test_a_bundle_that_has_not_begun_is_waited_for() -> None:
    output = AddressedOutput()
    early, too_early = Reader(output, Addressed(BUNDLE, 2)), Reader(output, Addressed(BUNDLE, 1, 2))
    other, gone = (Reader(output, Addressed(BUNDLE, 9, stride)) for stride in (3, 4))
    never = Reader(output, Addressed(BUNDLE + 1))
    assert [r.next() for r in (early, too_early, other, never)] == [None] * 4
    gone.close()
    run = output.begin([Addressed(BUNDLE, 2), Addressed(BUNDLE, 3, 2)])
    assert too_early.next() == BundleForgotten(BUNDLE, 1)
    assert other.next() == BundleForgotten(BUNDLE, 9), "it is not run for that one"
    run.put(block(2, 4, BUNDLE))
    early.next()
    assert early.got == [2, 3, 4, 5]
    run.finish()
    output.finish()
    assert early.next() == EndOfBundle(BUNDLE, 6)
    assert never.next() == EndOfTask()


def test_an_empty_bundle_has_a_length() -> None:
    output = AddressedOutput()
    waiting = Reader(output, Addressed(BUNDLE, 1, 2))
    output.begin(together(2)).finish()
    assert waiting.next() == Reader(output, Addressed(BUNDLE, 0, 2)).next()
    assert waiting.next() == EndOfBundle(BUNDLE, 0)


def test_a_bundle_that_failed() -> None:
    output = AddressedOutput()
    run = output.begin(together(1))
    run.put(block(0, 4, BUNDLE))
    run.fail("DATA_LOSS", "torn")
    other = output.begin(together(1, BUNDLE + 1))
    reader = Reader(output, Addressed(BUNDLE))
    assert read_all(reader) == TaskFailed("DATA_LOSS", "torn") and reader.got == [0, 1, 2, 3]
    produce(other)
    assert read_all(Reader(output, Addressed(BUNDLE + 1))) == EndOfBundle(BUNDLE + 1, 12)


def test_the_last_that_comes_for_a_place_has_it() -> None:
    """A trainer that was started again, while its worker still knows the one before."""
    output = ended(together(1))
    before = Reader(output, Addressed(BUNDLE))
    before.next(max_elements=2)
    after = Reader(output, Addressed(BUNDLE, 1))
    assert before.next() == Superseded(0)
    before.close()
    assert read_all(after) == EndOfBundle(BUNDLE, 12) and after.got == [*range(1, 12)]


# -- who is waited for -------------------------------------------------------------------------


def test_one_that_leaves_holds_up_nobody() -> None:
    ledger = Ledger()
    output = AddressedOutput(COST, ledger)
    run = output.begin(together(2))
    stays, leaves = (Reader(output, Addressed(BUNDLE, i, 2)) for i in range(2))
    run.put(block(0, 4, BUNDLE))
    stays.next()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(run.put, block(4, 4, BUNDLE))
        leaves.close()
        waiting.result(TIMEOUT_S)
    assert ledger.dropped_parts == [Part(1, BUNDLE, 1), Part(1, BUNDLE, 3)]
    stays.next()
    assert stays.got == [0, 2, 4, 6]


def test_who_wants_nothing_of_what_is_put_holds_up_nobody() -> None:
    output = AddressedOutput(1)
    run = output.begin([Addressed(BUNDLE, 0, 2), Addressed(BUNDLE, 9, 2)])
    first, late = Reader(output, Addressed(BUNDLE, 0, 2)), Reader(output, Addressed(BUNDLE, 9, 2))
    for number in range(3):
        run.put(block(4 * number, 4, BUNDLE))
        first.next()
    late.next()
    assert (first.got, late.got) == ([*range(0, 12, 2)], [9, 11])


def test_a_rerun_waits_for_nobody_but_who_went_back() -> None:
    """One fellow has all that it wants; the other still reads the first run."""
    output = AddressedOutput(COST)
    first = output.begin(together(3))
    readers = [Reader(output, Addressed(BUNDLE, i, 3)) for i in range(3)]
    first.put(block(0, 4, BUNDLE))
    for reader in readers:
        reader.next()
    readers[0].close()
    readers[1].close()
    first.put(block(4, 4, BUNDLE))
    assert output.open(Addressed(BUNDLE, 0, 3)) == BundleForgotten(BUNDLE, 0)

    again = output.begin([Addressed(BUNDLE, 0, 3)])
    back = Reader(output, Addressed(BUNDLE, 0, 3))
    for number in range(3):
        again.put(block(4 * number, 4, BUNDLE))
        back.next()
    again.finish()
    assert back.next() == EndOfBundle(BUNDLE, 12) and back.got == [0, 3, 6, 9]
    readers[2].next()
    first.put(block(8, 4, BUNDLE))
    first.finish()
    assert read_all(readers[2]) == EndOfBundle(BUNDLE, 12) and readers[2].got == [2, 5, 8, 11]


def test_a_rerun_of_a_part() -> None:
    output = ended(together(1))
    reader = Reader(output, Addressed(BUNDLE))
    reader.next(max_elements=3)
    reader.close()
    assert output.open(Addressed(BUNDLE, 3)) == BundleForgotten(BUNDLE, 3)
    again = output.begin([Addressed(BUNDLE, 3)])
    assert again.index == 3
    back = Reader(output, Addressed(BUNDLE, 3))
    produce(again)
    assert read_all(back) == EndOfBundle(BUNDLE, 12) and back.got == [*range(3, 12)]


def test_a_rerun_from_behind_the_end() -> None:
    """Its reader learns of the length."""
    output = AddressedOutput()
    run = output.begin([Addressed(BUNDLE, 14, 4)])
    with pytest.raises(ValueError, match="bundle 3 has 15 elements, and was put up to 14"):
        run.finish(15)
    run.finish(12)
    assert Reader(output, Addressed(BUNDLE, 14, 4)).next() == EndOfBundle(BUNDLE, 12)
    run = output.begin([Addressed(BUNDLE, 2, 4)])
    run.put(block(2, 4, BUNDLE))
    with pytest.raises(ValueError, match="bundle 3 has 5 elements, and was put up to 6"):
        run.finish(5)


def test_who_is_given_a_new_run_asks_again() -> None:
    """The run before goes on for the others."""
    output = AddressedOutput()
    before = output.begin(together(2))
    readers = [Reader(output, Addressed(BUNDLE, i, 2)) for i in range(2)]
    before.put(block(0, 4, BUNDLE))
    readers[1].next()
    produce(output.begin([Addressed(BUNDLE, 1, 2)]))
    assert readers[1].next() == BundleForgotten(BUNDLE, 5)
    again = Reader(output, Addressed(BUNDLE, 5, 2))
    assert read_all(again) == EndOfBundle(BUNDLE, 12) and again.got == [5, 7, 9, 11]
    before.finish()
    assert read_all(readers[0]) == EndOfBundle(BUNDLE, 4)


def test_bundles_are_bounded_each() -> None:
    """One that is full holds up no other."""
    output = AddressedOutput(COST)
    runs = [output.begin(together(1, bundle)) for bundle in range(5)]
    for run in runs:
        run.put(block(0, 4, run.bundle))
    with ThreadPoolExecutor(5) as pool:
        waiting = [pool.submit(run.put, block(4, 4, run.bundle)) for run in runs]
        for bundle in (4, 1):
            Reader(output, Addressed(bundle)).next()
            waiting[bundle].result(TIMEOUT_S)
        assert [future.done() for future in waiting] == [False, True, False, False, True]
        output.cancel()


# -- producers ---------------------------------------------------------------------------------


def is_displaced(run: BundleRun) -> bool:
    """Whatever it does raises OutputCancelled, and changes nothing."""
    waiting = run._output.waiting_elements
    actions: list[Callable[[], None]] = [
        lambda: run.put(block(0, 4, run.bundle)),
        lambda: run.put(block(4, 4, run.bundle)),
        run.finish,
        lambda: run.fail("INTERNAL", "by one that is displaced"),
    ]
    for action in actions:
        with pytest.raises(OutputCancelled, match=f"bundle {run.bundle}"):
            action()
    run.cancel()
    return run._output.waiting_elements == waiting


@pytest.mark.parametrize("how", ["begun again", "given up", "generation", "nobody reads"])
def test_a_displaced_producer_changes_nothing(how: str) -> None:
    output = AddressedOutput()
    old = output.begin(together(1))
    old.put(block(0, 4, BUNDLE))
    generation = 0
    match how:
        case "given up":
            old.cancel()
        case "generation":
            generation = 1
        case "nobody reads":
            Reader(output, Addressed(BUNDLE)).close()
    new = output.begin(together(1, generation=generation))
    reader = Reader(output, Addressed(BUNDLE, 0, 1, generation))
    assert is_displaced(old)
    new.put(block(0, 4, BUNDLE))
    assert is_displaced(old)
    reader.next()
    assert reader.next() is None and reader.got == [0, 1, 2, 3]
    new.put(block(4, 4, BUNDLE))
    new.finish()
    assert read_all(reader) == EndOfBundle(BUNDLE, 8) and reader.got == [*range(8)]


def test_a_producer_that_waits_is_stopped_when_its_run_is_given_up() -> None:
    ledger = Ledger()
    output = AddressedOutput(COST, ledger)
    run = output.begin(together(2))
    reader = Reader(output, Addressed(BUNDLE, 0, 2))
    run.put(block(0, 4, BUNDLE))
    other = output.begin(together(1, BUNDLE + 1))
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(run.put, block(4, 4, BUNDLE))
        run.cancel()
        with pytest.raises(OutputCancelled, match="bundle 3"):
            waiting.result(TIMEOUT_S)
    assert reader.next() == BundleForgotten(BUNDLE, 0)
    assert ledger.dropped_parts == [Part(4, BUNDLE, 0)]
    produce(other, blocks=1)
    assert read_all(Reader(output, Addressed(BUNDLE + 1))) == EndOfBundle(BUNDLE + 1, 4)


def test_what_the_producer_does_wrong() -> None:
    output = AddressedOutput()
    with pytest.raises(TypeError, match="put to a run"):
        output.put(block(0, 4, BUNDLE))
    run = output.begin(together(1))
    for wrong in (block(0, 4), block(0, 4, BUNDLE + 1), block(1, 1, BUNDLE)):
        with pytest.raises(ValueError, match="those from 0 on of bundle 3 are to be put"):
            run.put(wrong)
    run.finish()
    with pytest.raises(RuntimeError, match="bundle 3 goes on after"):
        run.finish()
    with pytest.raises(RuntimeError, match="bundle 3 goes on after"):
        run.put(block(0, 1, BUNDLE))


@pytest.mark.parametrize(
    ("readers", "said"),
    [
        ([], "one bundle and generation"),
        ([Addressed(1, 0, 2), Addressed(2, 1, 2)], "one bundle and generation"),
        ([Addressed(1, 0, 2), Addressed(1, 1, 2, 1)], "one bundle and generation"),
        ([Addressed(1, 0, 2), Addressed(1, 2, 2)], "one place"),
    ],
)
def test_readers_that_a_run_cannot_be_for(readers: list[Addressed], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        AddressedOutput().begin(readers)


def test_a_task_that_has_ended_begins_nothing() -> None:
    output = AddressedOutput()
    run = output.begin(together(1))
    output.finish()
    assert is_displaced(run)
    with pytest.raises(OutputCancelled, match="the task has ended"):
        output.begin(together(1))


# -- generations -------------------------------------------------------------------------------


def test_a_late_reader_of_an_older_generation_harms_nobody() -> None:
    output = ended(together(3, generation=2))
    first = Reader(output, Addressed(BUNDLE, 0, 3, 2))
    read_all(first)
    assert output.open(Addressed(BUNDLE, 0, 1, generation=1)) == Superseded(2)
    for i in (1, 2):
        reader = Reader(output, Addressed(BUNDLE, i, 3, 2))
        assert read_all(reader) == EndOfBundle(BUNDLE, 12) and reader.got == [*range(i, 12, 3)]


@pytest.mark.parametrize("by", ["a reader", "a run"])
def test_a_newer_generation_ends_what_is_older(by: str) -> None:
    ledger = Ledger()
    output = AddressedOutput(1 << 30, ledger)
    run, other = output.begin(together(2)), output.begin(together(1, BUNDLE + 1))
    run.put(block(0, 4, BUNDLE))
    reads = Reader(output, Addressed(BUNDLE, 0, 2))
    waits = Reader(output, Addressed(BUNDLE + 2))
    newer = Addressed(BUNDLE, 0, 3, 1)
    if by == "a reader":
        reader = Reader(output, newer)
        assert reader.next() is None, "it waits for the bundle to be begun in its generation"
        again = output.begin(newer.together())
    else:
        again = output.begin(newer.together())
        reader = Reader(output, newer)
    assert reads.next() == waits.next() == Superseded(1)
    assert output.open(Addressed(BUNDLE)) == Superseded(1)
    assert is_displaced(run) and is_displaced(other)
    assert ledger.dropped_parts == [Part(4, BUNDLE, 0)]
    with pytest.raises(OutputCancelled, match="generation 0, after 1"):
        output.begin(together(2))
    reads.close()
    waits.close()
    produce(again)
    assert read_all(reader) == EndOfBundle(BUNDLE, 12) and reader.got == [0, 3, 6, 9]


# -- memory ------------------------------------------------------------------------------------


def test_what_was_read_is_forgotten() -> None:
    """Until every reader has heard of its end, a bundle is there for those who lack that."""
    ledger = Ledger()
    output = AddressedOutput(1 << 30, ledger)
    for bundle in range(10_000):
        run = output.begin(together(2, bundle))
        run.put(block(0, 4, bundle))
        run.finish()
        for i in range(2):
            reader = Reader(output, Addressed(bundle, i, 2))
            assert read_all(reader) == EndOfBundle(bundle, 4)
            assert [run] == [*output._all_runs()]
            reader.receive(1)
            reader.close()
        assert not output._runs and not output._waiting
    assert output.open(Addressed(77, 0, 2)) == BundleForgotten(77, 0)
    assert output.waiting_elements == 0 and not ledger.dropped_parts


def test_reports_say_which_elements() -> None:
    ledger = Ledger()
    output = ended(together(2), ledger)
    one, other = (Reader(output, Addressed(BUNDLE, i, 2)) for i in range(2))
    read_all(one)
    read_all(other)
    one.receive(3)
    other.receive(1)
    other.close()
    assert ledger.acknowledged_parts == [Part(6, BUNDLE, 0, 2), Part(2, BUNDLE, 1, 2)]
    assert ledger.dropped_parts == [Part(4, BUNDLE, 5, 2)]


# -- orders ------------------------------------------------------------------------------------


def test_orders_of_others() -> None:
    refused = AddressedOutput().open(ANY)
    assert isinstance(refused, TaskFailed) and "AnyBlock(" in refused.message
    output = ended(together(1))
    output.cancel()
    assert output.open(Addressed(BUNDLE)) == TaskUnknown()


NUMBERS = st.integers(0, 1 << 62)


@given(st.builds(Addressed, NUMBERS, NUMBERS, st.integers(1, MAX_STRIDE), NUMBERS) | st.just(ANY))
def test_orders_travel(order: Addressed) -> None:
    read = encode(order, pb.Read(task_id=5))
    assert decode(pb.Read.FromString(read.SerializeToString())) == order


@pytest.mark.parametrize(
    ("read", "said"),
    [
        (pb.Read(task_id=5), "task 5 was asked for in an order not known here"),
        (pb.Read(addressed=pb.Addressed(bundle=1)), "a stride of 0"),
        (pb.Read(addressed=pb.Addressed(stride=MAX_STRIDE + 1)), "a stride of 65537"),
        (pb.Read(addressed=pb.Addressed(index=1 << 63, stride=1)), "there is no element"),
        (pb.Read(addressed=pb.Addressed(stride=1, generation=1 << 63)), "no generation 92233"),
    ],
)
def test_absurd_orders_are_refused(read: pb.Read, said: str) -> None:
    with pytest.raises(ProtocolError, match=said):
        decode(read)
