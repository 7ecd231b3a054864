"""Ordered reads by PyTorch, JAX and Keras: the same elements in the same order as `read` gives."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from forebay import service

from ..ordered_numbers import BATCH, NUMBER, ORDER, STEPS, register_numbers, steps_of
from .programs import said_by
from .test_jax import said


@pytest.fixture(scope="module")
def numbers(target: str) -> str:
    return register_numbers(target)


@pytest.fixture(scope="module")
def steps(target: str, numbers: str) -> list[list[int]]:
    """The global batches of two epochs."""
    found = steps_of(target, numbers)
    assert found[:STEPS] != found[STEPS:]
    return found


BEGINS = """
import json
import pickle
import sys
import threading
import warnings

import torch
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from forebay import service
from forebay.torch import ServiceDataset

target, dataset_id, order, steps = sys.argv[1], sys.argv[2], *map(json.loads, sys.argv[3:])
warnings.filterwarnings("ignore", "'set_vital' is deprecated")  # which torchdata calls
STEPS = 13
first, second = steps[:STEPS], steps[STEPS:]


def ours(**how):
    return ServiceDataset(target, dataset_id, ordered=True, **{"batch_size": 4, **order, **how})


def epoch(batches):
    return [batch.tolist() for batch in batches]


def refused(call, *words):
    try:
        call()
    except Exception as error:
        assert all(word in str(error) for word in words), error
    else:
        raise AssertionError(f"no error that says {words}")
"""

ALONE = """
# One that was left begins again where it began, and its state goes on where it stopped.
dataset = ours()
batches = iter(dataset)
found = [next(batches).tolist() for _ in range(3)]
state = json.loads(json.dumps(dataset.state_dict()))
assert state["position"] == 12, state
batches.close()
assert dataset.state_dict() == state
assert next(iter(dataset)).tolist() == first[0]
dataset.load_state_dict(state)
assert dataset.state_dict() == state
assert found + epoch(dataset) == first
assert len(dataset) == STEPS
assert dataset.state_dict()["position"] == 50
assert epoch(pickle.loads(pickle.dumps(dataset))) == second, "a copy begins where it was"
assert epoch(dataset) == second
again = ours()
again.load_state_dict(state)
assert epoch(again) == first[3:]
again.load_state_dict(state)
assert epoch(DataLoader(again, batch_size=None)) == first[3:]
assert epoch(DataLoader(again, batch_size=None)) == second
assert epoch(ours(drop_remainder=True, start_step=12)) == second[:-1], "12 steps an epoch"
by_element = ours(batch_size=None)
loader = DataLoader(by_element, batch_size=4)
assert epoch(loader) == first
assert epoch(ours(start_step=5)) == first[5:]
assert epoch(ours(start_step=STEPS + 5)) == second[5:]
begun = ours(start_step=5).state_dict()
again.load_state_dict(begun)
assert epoch(again) == first[5:], "a state from before the first element"

# Iterations do not disturb each other.
for kind, workers in ((DataLoader, 0), (StatefulDataLoader, 0), (StatefulDataLoader, 1)):
    dataset = ours()
    loader = kind(dataset, batch_size=None, num_workers=workers)
    assert next(iter(loader)).tolist() == first[0]
    found = []
    for batch in loader:
        found.append(batch.tolist())
        if len(found) == 5:
            assert next(iter(loader)).tolist() == first[0]
            if kind is DataLoader:  # the other one keeps its newest iterator
                refused(dataset.state_dict, "left at position 4", "open at 20")
        if len(found) == 6 and not workers:
            assert dataset.state_dict()["position"] == 24
    assert found == first, (kind, workers)
    pairs = [(one.tolist(), other.tolist()) for one, other in zip(loader, loader)]
    assert pairs == [*zip(second, second)], (kind, workers)
dataset = ours()
for due in (first, second):  # nobody asks for more than there is
    batches = iter(dataset)
    assert [next(batches).tolist() for _ in range(STEPS)] == due
named = ours(job_name="of one place")
older = iter(named)
assert [next(older).tolist(), next(iter(named)).tolist()] == [first[0], first[0]]
for _ in range(2):
    refused(lambda: next(older), "newer iteration", "of one place", "job_name of its own")
assert epoch(named) == first
assert named.state_dict()["position"] == 50

# Behind the last batch comes the empty rest of its epoch, and behind the epoch the next one. So a
# loop over epochs, and one over steps, take all steps once, wherever their state was saved.
EPOCHS = 2
for saved_at, workers in ((3, 0), (STEPS, 0), (STEPS, 1), (2 * STEPS, 0)):
    taken = []
    def train(loader, begins):
        for number in range(begins, EPOCHS):
            for batch in loader:
                taken.append(batch.tolist())
                if len(taken) == saved_at:
                    return number, loader.state_dict()
    begins, behind = train(StatefulDataLoader(ours(), batch_size=None, num_workers=workers), 0)
    loader = StatefulDataLoader(ours(), batch_size=None, num_workers=workers)
    loader.load_state_dict(json.loads(json.dumps(behind)))
    assert loader.state_dict() == behind, "what was loaded, before the first batch"
    train(loader, begins)
    assert taken == steps, (saved_at, workers)
    dataset, taken = ours(start_step=saved_at), steps[:saved_at]
    while len(taken) < len(steps):
        taken += epoch(dataset)
    assert taken == steps, saved_at

# With a worker.
dataset = ours()
loader = DataLoader(dataset, batch_size=None, num_workers=1)
assert epoch(loader) == first
assert epoch(loader) == second
refused(dataset.state_dict, "ahead of the trainer", "StatefulDataLoader", "start_step")
dataset.load_state_dict(state)
assert dataset.state_dict()["position"] == 12
for batch in loader:
    break
assert epoch(loader) == first[3:], "one that was left begins again"
persistent = DataLoader(ours(start_step=2), batch_size=None, num_workers=1, persistent_workers=True)
for batch in persistent:
    break
assert epoch(persistent) == first[2:]
assert epoch(persistent) == second
refused(lambda: epoch(DataLoader(ours(), batch_size=None, num_workers=2)), "num_workers=1")

for workers in (0, 1):
    loader = StatefulDataLoader(ours(), batch_size=None, num_workers=workers)
    found = []
    for batch in loader:
        found.append(batch.tolist())
        if len(found) == 4:
            state = loader.state_dict()
            break
    loader = StatefulDataLoader(ours(), batch_size=None, num_workers=workers)
    loader.load_state_dict(state)
    found += epoch(loader)
    assert found == first, (workers, found)
    over = loader.state_dict()
    assert epoch(loader) == second
    loader = StatefulDataLoader(ours(), batch_size=None, num_workers=workers)
    loader.load_state_dict(over)
    assert epoch(loader) == second, workers
    for batch in (loader := StatefulDataLoader(ours(batch_size=None), 4, num_workers=workers)):
        behind = loader.state_dict()  # also if the last batch is smaller
    loader = StatefulDataLoader(ours(batch_size=None), 4, num_workers=workers)
    loader.load_state_dict(behind)
    assert [epoch(loader), epoch(loader)] == [[], second], workers

# What makes no sense.
refused(lambda: ours(processing_mode=service.ShardingPolicy.FILE), "OFF or DYNAMIC")
refused(lambda: ours(initial_epoch=1, job_name="a"), "start_step")
refused(lambda: ours(max_outstanding_requests=3), "max_outstanding_requests=3")
refused(lambda: ours(num_consumers=2), "num_consumers=2", "rank")
refused(lambda: ours(batch_size=None, drop_remainder=True), "batch_size")
refused(lambda: ours().set_epoch(1), "start_step")
refused(lambda: ServiceDataset(target, dataset_id, seed=1), "ordered=True")
refused(lambda: ServiceDataset(target, dataset_id).load_state_dict(begun), "ordered=True")
refused(lambda: ours().load_state_dict(ServiceDataset(target, dataset_id).state_dict()), "no state")
refused(lambda: ours(seed=8).load_state_dict(begun), "another order")
refused(lambda: ours(batch_size=2).load_state_dict(begun), "global batch")
refused(lambda: ours().load_state_dict(begun | {"start_step": 6}), "edited or damaged")
"""

GRAIN = """
import forebay.jax
import numpy as np
from grain.experimental import assert_equal_output_after_checkpoint


class Reading:
    def __init__(self, read):
        self.get_state, self.set_state = read.state_dict, read.load_state_dict
        self.read, self.items = read, None

    def __iter__(self):
        return self

    def __next__(self):
        self.items = self.items or iter(self.read)
        return np.asarray(next(self.items)).tolist()


class Readings:
    def __init__(self, kind, **how):
        self.kind, self.how = kind, {"ordered": True, "batch_size": 4, **order, **how}

    def __iter__(self):
        return Reading(self.kind(target, dataset_id, **self.how))


for kind in (service.read, ServiceDataset, forebay.jax.ServiceDataset):
    assert_equal_output_after_checkpoint(Readings(kind))
    assert_equal_output_after_checkpoint(Readings(kind, start_step=STEPS - 4))
assert_equal_output_after_checkpoint(Readings(service.read, batch_size=None, start_position=60))
assert_equal_output_after_checkpoint(Readings(service.read, drop_remainder=True))
"""

RANKS = """
def together(*datasets):
    found = [[] for _ in datasets]
    threads = [
        threading.Thread(target=lambda i=i: found[i].extend(epoch(datasets[i])))
        for i in range(len(datasets))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    most = max(map(len, found))
    return [sum((each[i] for each in found if i < len(each)), []) for i in range(most)]


def ranks(**how):
    return [ours(batch_size=2, rank=rank, world_size=2, **how) for rank in (0, 1)]


both = ranks()
batches = [iter(each) for each in both]
found = [[x for each in batches for x in next(each).tolist()] for _ in range(3)]
states = [each.state_dict() for each in both]
assert found == first[:3] and states[0] == states[1]
next(iter(both[0]))
refused(lambda: next(batches[0]), "newer iteration", "each consumer")
for each, state in zip(both, states):
    each.load_state_dict(state)
assert together(*both) == first[3:]
assert together(*both) == second
alone = ours()
alone.load_state_dict(states[0])
assert epoch(alone) == first[3:]
both = ranks()
for each in both:
    each.load_state_dict(states[1])
assert together(*both) == first[3:]
assert together(*ranks(drop_remainder=True)) == first[:-1]
"""


MIXED = """
from concurrent.futures import ThreadPoolExecutor
from itertools import islice

JOB = {"job_name": "mixed in torch"}
dataset = ours(**JOB)
batches = iter(dataset)
found = [next(batches).tolist() for _ in range(4)]
state = json.loads(json.dumps(dataset.state_dict()))
batches.close()
refused(lambda: len(dataset), "no")
loader = DataLoader(ours(), batch_size=None, num_workers=1)
assert [batch.tolist() for batch in islice(loader, 6)] == steps[:6]

# Two ranks go on with the state of one, and later one with that of the two, past what is left out.
ranks = [ours(batch_size=2, rank=rank, world_size=2, **JOB) for rank in range(2)]
for rank in ranks:
    rank.load_state_dict(state)
readers = [iter(rank) for rank in ranks]
with ThreadPoolExecutor(2) as pool:
    for _ in range(4):
        found.append([x for batch in pool.map(next, readers) for x in batch.tolist()])
state = ranks[1].state_dict()
assert state == ranks[0].state_dict() and state["position"] == 8 * 4, state
for reader in readers:
    reader.close()
assert found == steps[:8], found
service.skip_steps(target, JOB["job_name"], 10, 13, reason="loss spike")
again = ours(**JOB)
again.load_state_dict(state)
assert [batch.tolist() for batch in islice(again, 5)] == steps[8:10] + steps[13:16]
"""


@pytest.mark.parametrize("program", [ALONE, RANKS, GRAIN], ids=["alone", "ranks", "grain"])
@pytest.mark.timeout(300)
def test_torch(
    frameworks: Path, target: str, numbers: str, steps: list[list[int]], program: str
) -> None:
    order = json.dumps(ORDER), json.dumps(steps)
    told = said_by(frameworks, BEGINS + program, target, numbers, *order, timeout_s=250)
    assert told == []


@pytest.fixture(scope="module")
def mixture(target: str, numbers: str) -> tuple[str, list[list[int]]]:
    """One of two datasets, and its first global batches."""
    others = service.register_dataset(target, tf.data.Dataset.range(1000, 1030))
    mixed = service.register_mixture(target, {"numbers": (numbers, 0.7), "others": (others, 0.3)})
    how: Any = {"ordered": True, "batch_size": BATCH} | ORDER
    with service.read(target, mixed, **how) as batches:
        steps = [batch.tolist() for batch in itertools.islice(batches, 30)]
    assert 30 <= sum(x >= 1000 for step in steps for x in step) <= 42
    return mixed, steps


def test_a_mixture_in_torch(
    frameworks: Path, target: str, mixture: tuple[str, list[list[int]]]
) -> None:
    mixed, steps = mixture
    order = json.dumps(ORDER), json.dumps(steps)
    assert said_by(frameworks, BEGINS + MIXED, target, mixed, *order) == []


def test_a_mixture_in_jax(
    frameworks: Path, target: str, mixture: tuple[str, list[list[int]]]
) -> None:
    said(frameworks, "mixed", target, mixture[0], ORDER, mixture[1], program=TRAINS)


TRAINS = Path(__file__).with_name("ordered_program.py")


def test_jax(frameworks: Path, target: str, numbers: str, steps: list[list[int]]) -> None:
    """Alone, and over the devices of a mesh; what one process saves, two go on with."""
    program = {"program": TRAINS}
    (state,) = said(frameworks, "alone", target, numbers, ORDER, steps, **program)
    assert state["position"] == 3 * BATCH
    both = said(frameworks, "in_two", target, numbers, ORDER, steps, state, processes=2, **program)
    assert both[0] == both[1]
    assert both[0]["position"] == 5 * BATCH
    said(frameworks, "from_two", target, numbers, ORDER, steps, both[0], **program)


@pytest.mark.parametrize("backend", ["jax", "torch"])
def test_keras_trains_on_from_a_step_bit_by_bit(
    frameworks: Path, target: str, backend: str, tmp_path: Path
) -> None:
    source = np.random.default_rng(0)
    examples = source.normal(size=(NUMBER, 4)).astype(np.float32), np.arange(NUMBER)[:, None] % 3
    dataset_id = service.register_dataset(target, tf.data.Dataset.from_tensor_slices(examples))
    arguments = json.dumps([dataset_id, ORDER, str(tmp_path / "model.keras")])
    told = subprocess.check_output(
        [frameworks, TRAINS, "trains", target, arguments],
        text=True,
        timeout=100,
        env={**os.environ, "KERAS_BACKEND": backend},
    )
    assert f"done on {backend}" in told
