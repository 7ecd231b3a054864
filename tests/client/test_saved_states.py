"""Saved states of ordered reads: what they hold, and what is refused."""

from __future__ import annotations

import json
import random
import string
from typing import Any

import numpy as np
import pytest

from forebay.journal.datasets import MAX_POSITION, SHARES
from forebay.journal.proto import events_pb2 as ev
from forebay.service.client.positions import OrderedRead
from forebay.service.client.saved_states import (
    description_of,
    load,
    opened,
    sealed,
    state_at,
    state_of,
)
from forebay.service.core.bundles import MAX_BUNDLES
from forebay.service.core.ordered import MAX_CONSUMERS
from forebay.service.errors import FailedPrecondition, InvalidArgument

DATASET = "0123456789abcdef"
MAX_BYTES = 300
PARTS = {"position": 4, "dataset": DATASET, "order": [0, 1, 16, 1, 0, 0], "step": 1}
STATE = sealed(PARTS)


def read(**how: Any) -> OrderedRead:
    return OrderedRead(dataset=DATASET, **how)


def loaded(state: Any) -> int:
    """The position that a read with the default order goes on at."""
    ordered = read()
    load(ordered, state)
    return ordered.position()


def test_a_state_is_what_another_read_loads() -> None:
    saved = read(seed=3, batch_size=4, start_position=12)
    assert state_of(saved) == {
        "forebay": 2, "position": 12, "start_step": 0, "in_epoch": False, "dataset": DATASET,
        "order": [3, 1, 16, 1, 0, 0], "step": 4, "crc32": state_of(saved)["crc32"],
    }  # fmt: skip
    again = read(seed=3, batch_size=2, num_consumers=2)
    load(again, json.loads(json.dumps(state_of(saved))))
    assert again.position() == 12 and state_of(again) == state_of(saved)
    begun = read(start_step=5)
    again = read()
    load(again, state_of(begun))
    assert again.start_step == 5 and state_of(again) == state_of(begun)


@pytest.mark.parametrize(("position", "drop"), [(10, False), (10, True), (8, True), (20, False)])
def test_behind_the_last_batch_comes_the_empty_rest(position: int, drop: bool) -> None:
    """Unless the epoch's end was seen. Epochs of 10 elements in two bundles, in batches of 4."""
    spec = ev.OrderSpec(cycle_length=16, block_length=1, bundle_splits=1, bundles=2)
    how = {"batch_size": 4, "drop_remainder": drop}
    saved = {**state_of(read(**how)), "position": position, "order": [0, 1, 16, 1, 1, 2]}
    del saved["crc32"], saved["forebay"]
    next_epoch = -(-position // 10)
    for in_epoch, expected in ((True, next_epoch - 1), (False, next_epoch)):
        again = read(**how)
        state = sealed({**saved, "in_epoch": in_epoch})
        load(again, state)
        assert state_of(again) == state, "it is the state that was loaded, bundles included"
        assert state_of(again.copy()) == state
        again.learn(spec, [5, 5])
        epoch = again.begin(spec)
        assert (epoch.number, epoch.batches() > 0) == (expected, not in_epoch)
        assert state_of(again)["position"] == position
        epoch.complete = True
        assert again.finish() == in_epoch, "it was given all that there is"
        if in_epoch:
            assert again.start == (next_epoch * 10, None, False)


def test_a_read_that_goes_on_with_other_bundles_leaves_its_copies_theirs() -> None:
    opened_before = read()
    opened_before.learn(ev.OrderSpec(bundles=2), [3, 4])
    again = opened_before.copy()
    load(again, sealed({**PARTS, "order": [0, 1, 16, 1, 1, 7]}))
    again.learn(ev.OrderSpec(bundles=7), [1] * 7)
    assert (opened_before.total, again.total) == (7, 7) and opened_before.lengths == [3, 4]


def test_a_state_that_says_nothing_of_its_epoch_is_at_the_next_one() -> None:
    ordered = read()
    load(ordered, STATE)
    assert ordered.start == (4, None, False)


def test_the_form_in_which_a_state_was_kept_does_not_count() -> None:
    backwards = {key: STATE[key] for key in reversed(STATE)}
    assert loaded({**backwards, "order": tuple(STATE["order"])}) == 4
    assert opened(STATE) == PARTS


@pytest.mark.parametrize("begun", [True, False])
def test_the_largest_state(begun: bool) -> None:
    largest = read(
        seed=-(1 << 63),
        cycle_length=MAX_POSITION,
        block_length=MAX_POSITION,
        batch_size=MAX_POSITION,
        num_consumers=MAX_CONSUMERS,
        start_position=0 if begun else MAX_POSITION,
        start_step=MAX_POSITION if begun else None,
    )
    state = opened(state_of(largest))
    state["order"][4:] = MAX_POSITION, MAX_BUNDLES  # as a dispatcher may answer
    assert len(json.dumps(sealed(state))) < MAX_BYTES
    assert len(description_of(largest)) < MAX_BYTES


def test_random_edits_are_noticed() -> None:
    rng = random.Random(1)
    text = json.dumps(STATE)
    parsed = 0
    for _ in range(20_000):
        edited = list(text)
        for _ in range(rng.randint(1, 4)):
            at = rng.randrange(len(edited))
            edited[at : at + rng.randint(0, 2)] = rng.choices(string.printable, k=rng.randint(0, 2))
        try:
            state = json.loads("".join(edited))
        except ValueError:
            continue
        parsed += 1
        try:
            loaded(state)
        except (InvalidArgument, FailedPrecondition):
            continue
        assert opened(state) == opened(STATE)
    assert parsed > 1_000


CIRCULAR: dict[str, Any] = {**STATE}
CIRCULAR["more"] = CIRCULAR
DEEP: list[Any] = []
for _ in range(100_000):
    DEEP = [DEEP]


@pytest.mark.parametrize(
    ("edits", "says"),
    [
        ({"position": 5}, "edited or damaged.*start_position= or start_step="),
        ({"position": "4"}, "edited or damaged"),
        ({"step": True}, "edited or damaged"),
        ({"more": 1}, "edited or damaged"),
        ({1: 1}, "no state"),
        ({"order": [0, 1, 16, 1, 0, 1]}, "edited or damaged"),
        ({"crc32": None}, "its checksum is None"),
        ({"crc32": STATE["crc32"].upper() + " "}, "edited or damaged"),
        ({"position": 10**6_000}, "no state"),
        ({"crc32": 10**6_000}, "cannot be written"),
        ({"forebay": 10**6_000}, "version a value of type int that"),
        ({"forebay": 3}, "of version 3, and this is version 2: read it with the Forebay that"),
        ({"forebay": True}, "of version True"),
        ({"forebay": np.arange(2)}, "of version array"),
        ({"position": np.int64(4)}, "no state"),
        ({"position": {4}}, "no state"),
        ({"position": float("nan")}, "edited or damaged"),
        ({"position": "\ud800"}, "edited or damaged"),
        ({"more": CIRCULAR}, "no state"),
    ],
)
def test_edited_states(edits: Any, says: str) -> None:
    with pytest.raises(InvalidArgument, match=says):
        loaded({**STATE, **edits})


@pytest.mark.parametrize("missing", STATE)
def test_states_that_lack_a_part(missing: str) -> None:
    with pytest.raises(InvalidArgument, match=r"no state|edited or damaged"):
        loaded({key: part for key, part in STATE.items() if key != missing})


@pytest.mark.parametrize("state", [None, "", "{}", json.dumps(STATE), {}, [], 4, [STATE], b"\0"])
def test_what_is_no_state(state: Any) -> None:
    with pytest.raises(InvalidArgument, match="no state"):
        loaded(state)


def test_what_is_nested_too_deeply() -> None:
    with pytest.raises(InvalidArgument, match="no state"):
        loaded({**STATE, "order": DEEP})


@pytest.mark.parametrize(
    "parts",
    [
        {"position": -1}, {"position": MAX_POSITION + 1}, {"position": True}, {"position": "4"},
        {"position": None}, {"start_step": -1}, {"start_step": True}, {"start_step": 1 << 70},
        {"order": [0, 1, 16, 1, 0]}, {"order": [0, 1, 16, 1, -1, 0]}, {"order": None},
        {"order": [0, 1, 16, 1, 0, False]}, {"order": [0, 1, 16, 1, 0, 1 << 70]},
    ],
)  # fmt: skip
def test_impossible_parts_with_a_checksum(parts: Any) -> None:
    with pytest.raises(InvalidArgument, match="no state"):
        loaded(sealed({**PARTS, **parts}))


@pytest.mark.parametrize(
    ("parts", "says"),
    [
        ({"dataset": "another"}, "another dataset: 'another'.*start_position=4 instead"),
        ({"dataset": None}, "another dataset: None"),
        ({"order": [1, 1, 16, 1, 0, 0]}, "another order"),
        ({"order": ["0", 1, 16, 1, 0, 0]}, "another order"),
        ({"order": [0, 0, 16, 1, 0, 0]}, "another order"),
        (
            {"step": 2, "start_step": 3},
            "another global batch.*give start_position, in elements, instead",
        ),
        ({"step": "1"}, "another global batch"),
    ],
)
def test_states_of_other_reads(parts: Any, says: str) -> None:
    with pytest.raises(FailedPrecondition, match=says):
        loaded(sealed({**PARTS, **parts}))


@pytest.mark.parametrize("text", ["", "{", "[]", "4", "null", '{"forebay": 1}', "[" * 100_000])
def test_what_describes_no_read(text: str) -> None:
    """As TensorFlow's checkpoints have it, without the position."""
    with pytest.raises(InvalidArgument, match=r"no state|edited or damaged"):
        state_at(text, 4)


def test_a_description_is_of_a_read_and_not_of_a_position() -> None:
    description = description_of(read(start_position=12))
    assert description == description_of(read())
    ordered = read()
    load(ordered, state_at(description, 9))
    assert ordered.position() == 9
    with pytest.raises(FailedPrecondition, match=r"another order.*start_position=9"):
        load(read(seed=1), state_at(description, 9))
    assert state_at(description) != state_at(description_of(read(seed=1)))
    with pytest.raises(InvalidArgument, match="edited or damaged"):
        state_at(description.replace('"step": 1', '"step": 2'), 9)


def test_a_state_of_a_mixture_knows_its_weights_in_each_copy() -> None:
    """PyTorch's and JAX's datasets read by copies, which begin where they are told."""
    sources = ("a", SHARES // 2), ("b", SHARES // 2)
    change = ev.ScheduleChange(place=360, shares=[SHARES, 0])
    state = state_of(OrderedRead(sources=sources, start_position=720, changes=[change]))
    loaded = OrderedRead(sources=sources)
    load(loaded, state)
    spec = ev.OrderSpec(cycle_length=1, block_length=1, bundles=2, source_bundles=[1, 1])
    for changes in ([change], []):
        copy = loaded.copy()
        copy.move_to(*loaded.start)
        copy.changes = changes
        assert state_of(copy)["weights"] == copy.schedule().weights_before(720)
        if changes:
            assert copy.begin(spec).start == 720
        else:
            with pytest.raises(FailedPrecondition, match="weights changed otherwise"):
                copy.begin(spec)
