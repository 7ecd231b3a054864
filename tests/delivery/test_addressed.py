"""What is peculiar to the policy *addressed*: bundles, what is kept of them, and their ends."""

from __future__ import annotations

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
    EndOfBundle,
    EndOfTask,
    OutputCancelled,
    Part,
    TaskFailed,
    TaskUnknown,
)
from forebay.service.delivery.orders import MAX_STRIDE, decode, encode
from forebay.service.errors import ProtocolError
from forebay.service.proto import transfer_pb2 as pb

from .contract import TIMEOUT_S, Ledger, Reader, block

BUNDLE = 3


def ended(blocks: int = 3, ledger: Ledger | None = None, bundle: int = BUNDLE) -> AddressedOutput:
    """A bundle of `blocks` blocks of 4 elements, which has ended."""
    output = AddressedOutput(1 << 30, ledger)
    for number in range(blocks):
        output.put(block(4 * number, 4, bundle))
    output.end(bundle)
    return output


def read_all(reader: Reader) -> object:
    while isinstance(item := reader.next(), Block):
        pass
    return item


def test_any_number_of_readers_from_anywhere() -> None:
    output = ended()
    late, last = Reader(output, Addressed(BUNDLE, 5, 2)), Reader(output, Addressed(BUNDLE, 8, 2))
    assert read_all(late) == read_all(last) == EndOfBundle(BUNDLE, 12)
    assert (late.got, last.got) == ([5, 7, 9, 11], [8, 10])


def test_blocks_say_where_they_are_from() -> None:
    output = ended()
    reader = Reader(output, Addressed(BUNDLE, 1, 3))
    read_all(reader)
    assert [(b.bundle, b.index, b.count) for b in reader.lacking] == [
        (BUNDLE, 1, 1), (BUNDLE, 4, 2), (BUNDLE, 10, 1),
    ]  # fmt: skip


def test_who_goes_on_after_a_block_asks_for_what_follows() -> None:
    order = Addressed(BUNDLE, 1, 3)
    reader = Reader(ended(), order)
    for expected in (4, 10, 13):
        item = reader.next()
        assert isinstance(item, Block)
        order = order.after(item)
        assert order == Addressed(BUNDLE, expected, 3)


def test_a_bundle_is_kept_for_all_that_read_it_together() -> None:
    """Whoever comes first does not have the elements of the others forgotten."""
    output = ended()
    output.finish()
    for i in (2, 0, 1):
        reader = Reader(output, Addressed(BUNDLE, i, 3))
        assert not output.wait_drained(0)
        assert read_all(reader) == EndOfBundle(BUNDLE, 12)
        assert reader.got == [*range(i, 12, 3)]
        if i != 1:
            reader.close()
    assert output.wait_drained(0) and output.waiting_elements == 0


def test_a_group_may_begin_in_the_middle_and_be_larger_than_the_bundle() -> None:
    output = ended(blocks=1)
    output.finish()
    readers = [Reader(output, Addressed(BUNDLE, 2 + i, 8)) for i in (5, 0, 7, 1, 2, 3, 4, 6)]
    assert {read_all(reader) for reader in readers} == {EndOfBundle(BUNDLE, 4)}
    assert [reader.got for reader in readers if reader.got] == [[2], [3]]
    assert output.wait_drained(0)


def test_what_was_forgotten_has_to_be_run_again() -> None:
    ledger = Ledger()
    output = ended(ledger=ledger)
    read_all(Reader(output, Addressed(BUNDLE, 4)))
    assert ledger.dropped_parts == [Part(4, BUNDLE, 0)], "nobody asked for the first block"
    assert output.open(Addressed(BUNDLE, 6)) == BundleForgotten(BUNDLE, 6, 12)
    assert read_all(Reader(output, Addressed(BUNDLE, 12))) == EndOfBundle(BUNDLE, 12)

    output.begin(BUNDLE)
    again = Reader(output, Addressed(BUNDLE, 6))
    assert again.next() is None
    for number in range(3):
        output.put(block(4 * number, 4, BUNDLE))
    output.end(BUNDLE)
    assert read_all(again) == EndOfBundle(BUNDLE, 12)
    assert again.got == [*range(6, 12)]


def test_one_that_is_behind_stays_with_its_run() -> None:
    output = ended()
    slow = Reader(output, Addressed(BUNDLE, 0))
    slow.next()
    assert output.open(Addressed(BUNDLE, 0)) == BundleForgotten(BUNDLE, 0, 4)
    output.begin(BUNDLE)
    output.put(block(0, 4, BUNDLE))
    again = Reader(output, Addressed(BUNDLE, 0))
    assert read_all(slow) == EndOfBundle(BUNDLE, 12)
    assert slow.got == [*range(12)]
    assert read_all(again) is None and again.got == [0, 1, 2, 3]


def test_a_bundle_that_has_not_begun_is_waited_for() -> None:
    output = AddressedOutput()
    early = Reader(output, Addressed(BUNDLE, 2))
    too_early = Reader(output, Addressed(BUNDLE, 1))
    gone = Reader(output, Addressed(BUNDLE, 2))
    never = Reader(output, Addressed(BUNDLE + 1))
    assert [r.next() for r in (early, too_early, never)] == [None] * 3
    gone.close()
    output.begin(BUNDLE, 2)
    assert too_early.next() == BundleForgotten(BUNDLE, 1, 2)
    output.put(block(2, 4, BUNDLE))
    early.next()
    assert early.got == [2, 3, 4, 5]
    output.end(BUNDLE)
    output.finish()
    assert early.next() == EndOfBundle(BUNDLE, 6)
    assert never.next() == EndOfTask()


def test_an_empty_bundle_has_a_length() -> None:
    output = AddressedOutput()
    waiting = Reader(output, Addressed(BUNDLE, 1, 2))
    output.end(BUNDLE)
    assert waiting.next() == Reader(output, Addressed(BUNDLE, 0, 2)).next()
    assert waiting.next() == EndOfBundle(BUNDLE, 0)


def test_one_that_leaves_holds_up_nobody() -> None:
    ledger = Ledger()
    output = AddressedOutput(cost(block(0, 4)), ledger)
    stays, leaves = (Reader(output, Addressed(BUNDLE, i, 2)) for i in range(2))
    output.put(block(0, 4, BUNDLE))
    stays.next()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(output.put, block(4, 4, BUNDLE))
        leaves.close()
        waiting.result(TIMEOUT_S)
    assert ledger.dropped_parts == [Part(1, BUNDLE, 1), Part(1, BUNDLE, 3)]
    stays.next()
    assert stays.got == [0, 2, 4, 6]


def test_who_wants_nothing_of_what_is_put_holds_up_nobody() -> None:
    output = AddressedOutput(1)
    reader = Reader(output, Addressed(BUNDLE, 8))
    for number in range(3):
        output.put(block(4 * number, 4, BUNDLE))
    reader.next()
    assert reader.got == [8, 9, 10, 11]


def test_while_nobody_reads_all_is_kept() -> None:
    output = ended()
    reader = Reader(output, Addressed(BUNDLE))
    reader.next(max_elements=2)
    reader.close()
    again = Reader(output, Addressed(BUNDLE, 2))
    assert read_all(again) == EndOfBundle(BUNDLE, 12)
    assert again.got == [*range(2, 12)]


def test_another_group_takes_the_place_of_one() -> None:
    """With another stride, the fellows of before are not awaited any more."""
    output = ended()
    output.finish()
    one = Reader(output, Addressed(BUNDLE, 0, 3))
    one.next()
    one.close()
    for i in range(2):
        assert read_all(Reader(output, Addressed(BUNDLE, 2 + i, 2))) == EndOfBundle(BUNDLE, 12)
    assert output.wait_drained(0)


def test_a_bundle_that_nobody_wants_any_more() -> None:
    ledger = Ledger()
    output = AddressedOutput(cost(block(0, 4)), ledger)
    reader = Reader(output, Addressed(BUNDLE, 0, 2))
    output.put(block(0, 4, BUNDLE))
    other = Reader(output, Addressed(BUNDLE + 1))
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(output.put, block(4, 4, BUNDLE))
        output.forget(BUNDLE)
        with pytest.raises(OutputCancelled, match="bundle 3"):
            waiting.result(TIMEOUT_S)
    assert reader.next() == BundleForgotten(BUNDLE, 0, 4)
    assert ledger.dropped_parts == [Part(4, BUNDLE, 0)]
    output.put(block(0, 4, BUNDLE + 1))
    other.next()
    assert other.got == [0, 1, 2, 3]
    assert output.open(Addressed(BUNDLE, 9)) == BundleForgotten(BUNDLE, 9, 9)
    output.begin(BUNDLE)
    anew = [Reader(output, Addressed(BUNDLE, i)) for i in (0, 9)]
    assert [r.next() for r in anew] == [None, None]
    for number in range(3):
        output.put(block(4 * number, 4, BUNDLE))
        anew[0].next()
    anew[1].next()
    assert [r.got for r in anew] == [[*range(12)], [9, 10, 11]]


def test_bundles_are_bounded_each() -> None:
    """One that is full holds up no other."""
    output = AddressedOutput(cost(block(0, 4)))
    for bundle in range(5):
        output.put(block(0, 4, bundle))
    with ThreadPoolExecutor(5) as pool:
        waiting = [pool.submit(output.put, block(4, 4, bundle)) for bundle in range(5)]
        for bundle in (4, 1):
            Reader(output, Addressed(bundle)).next()
            waiting[bundle].result(TIMEOUT_S)
        assert [future.done() for future in waiting] == [False, True, False, False, True]
        output.cancel()


def test_reports_say_which_elements() -> None:
    ledger = Ledger()
    output = ended(ledger=ledger)
    one, other = (Reader(output, Addressed(BUNDLE, i, 2)) for i in range(2))
    read_all(one)
    read_all(other)
    one.receive(3)
    other.receive(1)
    other.close()
    assert ledger.acknowledged_parts == [Part(6, BUNDLE, 0, 2), Part(2, BUNDLE, 1, 2)]
    assert ledger.dropped_parts == [Part(4, BUNDLE, 5, 2)]


def test_what_the_producer_does_wrong() -> None:
    output = AddressedOutput()
    with pytest.raises(ValueError, match="of no bundle"):
        output.put(block(0, 4))
    output.put(block(0, 4, BUNDLE))
    with pytest.raises(ValueError, match="elements from 5 on of bundle 3, after 4"):
        output.put(block(5, 1, BUNDLE))
    with pytest.raises(RuntimeError, match="being run already"):
        output.begin(BUNDLE)


def test_orders_of_others() -> None:
    refused = AddressedOutput().open(ANY)
    assert isinstance(refused, TaskFailed) and "AnyBlock()" in refused.message
    output = ended()
    output.cancel()
    assert output.open(Addressed(BUNDLE)) == TaskUnknown()


@given(st.builds(
    Addressed, st.integers(0, 1 << 62), st.integers(0, 1 << 62), st.integers(1, MAX_STRIDE)
) | st.just(ANY))  # fmt: skip
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
    ],
)
def test_absurd_orders_are_refused(read: pb.Read, said: str) -> None:
    with pytest.raises(ProtocolError, match=said):
        decode(read)
