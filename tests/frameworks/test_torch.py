"""`forebay.torch.ServiceDataset`, in programs such as users write."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest
import tensorflow as tf

from forebay import service

from ..trainers.conftest import target
from .programs import said_by

__all__ = ["target"]

BEGINS = """
import json
import sys

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset

from forebay import service
from forebay.torch import ServiceDataset

target, *ids = sys.argv[1:]


def say(what):
    sys.stdout.write(json.dumps(what) + "\\n")  # at once, as others write there, too
    sys.stdout.flush()
"""


def mixed(i: tf.Tensor) -> dict[str, tf.Tensor]:
    """Of each kind that PyTorch has something for."""
    numbers = tf.fill([2, 3], i)
    return {
        "scalar": i,
        "pair": (tf.cast(numbers, tf.float32) / 3, i % 2 == 0),
        **{
            name: tf.cast(numbers, getattr(tf, name))
            for name in ("uint8", "uint16", "uint32", "uint64", "bfloat16", "float16", "complex64")
        },
        "text": tf.strings.as_string(i),
    }


MIXED = """
class Plain(IterableDataset):
    def __iter__(self):
        for i in range(101):
            numbers = np.full([2, 3], i)
            dtypes = ("uint8", "uint16", "uint32", "uint64", "float16", "complex64")
            yield {
                "scalar": torch.tensor(i),
                "pair": (numbers.astype(np.float32) / np.float32(3), torch.tensor(i % 2 == 0)),
                **{name: numbers.astype(name) for name in dtypes},
                "bfloat16": torch.tensor(numbers).to(torch.bfloat16),
                "text": b"%d" % i,
            }


def same(one, other):
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        one, other = [*one.values()], [other[key] for key in one]
    if isinstance(one, (list, tuple)):
        assert len(one) == len(other), (one, other)
        for pair in zip(one, other):
            same(*pair)
    elif isinstance(one, torch.Tensor):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        assert torch.equal(one, other)
    else:
        assert one == other, (one, other)


def ours(**how):
    return ServiceDataset(target, ids[0], processing_mode="parallel_epochs", **how)


for workers in (0, 1):
    whole = [*DataLoader(Plain(), batch_size=None)]
    same([*DataLoader(ours(), batch_size=None, num_workers=workers)], whole)
    for size, drop in ((1, False), (7, False), (7, True), (1000, False), (1000, True)):
        plain = [*DataLoader(Plain(), batch_size=size, drop_last=drop)]
        loader = DataLoader(ours(), batch_size=size, drop_last=drop, num_workers=workers)
        same([*loader], plain)
        batched = ours(batch_size=size, drop_remainder=drop)
        same([*DataLoader(batched, batch_size=None, num_workers=workers)], plain)
        same([*batched], plain)
meta = torch.device("meta")  # the one beside the CPU that is everywhere
for size in (None, 7):
    for placed, here in zip(ours(batch_size=size, device=meta), ours(batch_size=size)):
        assert placed.pop("text") == here.pop("text")
        for one, other in zip(
            [*placed.pop("pair"), *placed.values()], [*here.pop("pair"), *here.values()]
        ):
            assert (one.device, one.shape, one.dtype) == (meta, other.shape, other.dtype)
"""


def test_batches_are_those_of_a_plain_loader(frameworks: Path, target: str) -> None:
    """Over the same data: dtypes, shapes, nesting, order, and remainders."""
    dataset_id = service.register_dataset(target, tf.data.Dataset.range(101).map(mixed))
    assert said_by(frameworks, BEGINS + MIXED, target, dataset_id) == []


STATEFUL = """
import warnings

from torchdata.stateful_dataloader import StatefulDataLoader

warnings.filterwarnings("ignore", "'set_vital' is deprecated")  # which torchdata calls


def numbers(batches):
    return [x for batch in batches for x in batch.tolist()]


for workers in (0, 1, 2):
    job = {"job_name": f"stateful {workers}", "batch_size": 4}
    loader = StatefulDataLoader(
        ServiceDataset(target, ids[0], **job), batch_size=None, num_workers=workers
    )
    found = []
    for batch in loader:
        found += batch.tolist()
        if len(found) == 8 and workers < 2:
            midst = loader.state_dict()
            break
    if workers < 2:
        loader = StatefulDataLoader(
            ServiceDataset(target, ids[0], **job), batch_size=None, num_workers=workers
        )
        loader.load_state_dict(midst)
        found += numbers(loader)  # what the job has left of the epoch
    over = loader.state_dict()
    say([workers, sorted(found)])
    loader.load_state_dict(over)
    say([workers, sorted(numbers(loader))])
"""


def test_a_stateful_loader_of_what_is_read_in_no_order(frameworks: Path, target: str) -> None:
    """Its state is the epoch, of which the job knows the rest."""
    dataset_id = service.register_dataset(target, tf.data.Dataset.range(50))
    said = said_by(frameworks, BEGINS + STATEFUL, target, dataset_id)
    ahead = said.pop(2)[1]  # what a worker had read ahead of the loop that was left is missing
    assert len({*ahead}) == len(ahead) >= 50 - 3 * 4
    assert said == [[workers, [*range(50)]] for workers in (0, 0, 1, 2, 2)]


SHAPES = """
def seen(value):
    if isinstance(value, torch.Tensor):
        return [str(value.dtype), value.float().tolist()]
    if hasattr(value, "_fields"):
        return {name: seen(getattr(value, name)) for name in value._fields}
    return [*map(seen, value)] if isinstance(value, list) else value.decode()


def first(**how):
    dataset = ServiceDataset(target, ids[0], processing_mode="parallel_epochs", **how)
    found = next(iter(DataLoader(dataset, batch_size=None, num_workers=1)))
    say({key: seen(value) for key, value in found.items()})


first()
first(batch_size=3)
first(batch_size=3, pad_value=-1)
first(batch_size=3, pad_value={"tokens": 7})
"""


def test_shapes_that_differ(frameworks: Path, target: str) -> None:
    def shapes(i: tf.Tensor) -> dict[str, tf.Tensor]:
        return {
            "float8": tf.cast(tf.fill([i], 0.5), tf.dtypes.experimental.float8_e4m3fn),
            "point": tf.sparse.from_dense(tf.one_hot(i, 2)),
            "rows": tf.RaggedTensor.from_row_lengths(tf.range(i + 1), [i, 1]),
            "tokens": tf.range(i),
            "words": tf.fill([1, 2], b"w"),
        }

    dataset_id = service.register_dataset(target, tf.data.Dataset.range(1, 9).map(shapes))
    element, lists, padded, mixed = said_by(frameworks, BEGINS + SHAPES, target, dataset_id)
    halves = [["torch.float8_e4m3fn", [0.5] * i] for i in (1, 2, 3)]
    points = [
        {
            "indices": ["torch.int64", [[1.0]] if i == 1 else []],
            "values": ["torch.float32", [1.0] if i == 1 else []],
            "dense_shape": ["torch.int64", [2.0]],
        }
        for i in (1, 2, 3)
    ]
    rows = [
        {"values": ["torch.int64", [*range(i + 1)]], "row_splits": ["torch.int64", [0, i, i + 1]]}
        for i in (1, 2, 3)
    ]
    tokens = [["torch.int64", [*range(i)]] for i in (1, 2, 3)]
    expected = {"float8": halves, "point": points, "rows": rows, "tokens": tokens}
    assert lists == {**expected, "words": [[["w", "w"]]] * 3}
    assert element == {key: values[0] for key, values in lists.items()}
    filled = ["torch.int64", [[0, -1, -1], [0, 1, -1], [0, 1, 2]]]
    assert padded == {
        **lists,
        "float8": ["torch.float8_e4m3fn", [[0.5, -1, -1], [0.5, 0.5, -1], [0.5] * 3]],
        "tokens": filled,
    }
    assert mixed == {**lists, "tokens": [filled[0], [[0, 7, 7], [0, 1, 7], [0, 1, 2]]]}


MEMORY = """
from forebay.service.blocks import buffers
from forebay.service.trainers import jobs

blocks = []
iterate = jobs.Reader.iterate


def kept(reader, **how):
    for block in iterate(reader, **how):
        blocks.append(block)
        yield block


jobs.Reader.iterate = kept


def within(tensor):
    begin, end = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
    arrays = [array for block in blocks for c in block.components for array in buffers(c)]
    return any(a.ctypes.data <= begin and end <= a.ctypes.data + a.nbytes for a in arrays)


def shared(dataset_id, **how):
    blocks.clear()
    found = [within(x) for x in ServiceDataset(target, dataset_id, batch_size=how.get("size"))]
    return [sum(found), len(found), len(blocks)]


say([shared(ids[0]), shared(ids[0], size=4)])
with service.WorkerServer(service.WorkerConfig(target)):
    say(0)
"""


def test_tensors_share_memory_with_the_block(frameworks: Path, target: str) -> None:
    """All that are of one block, and no others."""
    images = tf.data.Dataset.range(200).map(lambda i: tf.fill([100, 1000], tf.cast(i, tf.uint8)))
    dataset_id = service.register_dataset(target, images)
    found, _ = said_by(frameworks, BEGINS + MEMORY, target, dataset_id)
    (shared, elements, _), (batches, among, blocks) = found
    assert (shared, elements) == (200, 200)
    assert among == 50 and 50 - blocks < batches <= 50


LOADERS = """
import contextlib
import multiprocessing
import os
import signal
import time
import warnings

from forebay.service.trainers import loaders

warnings.filterwarnings("ignore", "This DataLoader will create 4 worker processes")
loaders.SAID_S = 0.2
multiprocessing.set_forkserver_preload(["forebay.torch"])


def epoch(loader):
    return sorted(x for batch in loader for x in batch.tolist())


def rank(dataset, said, both):
    epochs = []
    for _ in range(2):
        both.wait()
        epochs.append(epoch(DataLoader(dataset, batch_size=None, num_workers=1)))
    said.put(epochs)


if __name__ == "__main__":
    everything = [*range(1000)]
    starts = (("fork", False, 2), ("spawn", True, 2), ("forkserver", True, 4))
    for context, persistent, workers in starts:
        dataset = ServiceDataset(target, ids[0], batch_size=10)
        loader = DataLoader(
            dataset, batch_size=None, num_workers=workers, multiprocessing_context=context,
            persistent_workers=persistent,
        )
        for number in range(2):
            torch.manual_seed(0)  # as some do before each epoch
            assert epoch(loader) == everything, (context, persistent, number)
        for batch in loader:
            break  # leaves this one
        assert epoch(loader) == everything, (context, persistent, "behind one that was left")
        assert epoch(dataset) == everything, "in this process, which has read none of them"
        assert epoch(loader) == everything, "and in the loader again"
        dataset.set_epoch(0)
        assert epoch(loader) == [], "an epoch that is over"
        assert len(dataset) == len(loader) == 100
    named = ServiceDataset(target, ids[0], batch_size=32, job_name="named", drop_remainder=True)
    assert len(named) == 31
    sizes = [len(batch) for batch in DataLoader(named, batch_size=None, num_workers=2)]
    assert {*sizes} == {32} and len(sizes) >= 30
    assert epoch(ServiceDataset(target, ids[0], batch_size=1, job_name="named", initial_epoch=1))
    for method in ("forkserver", "fork"):  # ranks that are handed the dataset, each with loaders
        context = multiprocessing.get_context(method)
        dataset = ServiceDataset(target, ids[0], batch_size=10, job_name=method)
        said, both = context.SimpleQueue(), context.Barrier(2)
        ranks = [context.Process(target=rank, args=(dataset, said, both)) for _ in range(2)]
        for each in ranks:
            each.start()
        found = [numbers for _ in ranks for numbers in said.get()]
        assert [sorted(found[0] + found[2]), sorted(found[1] + found[3])] == [everything] * 2
        for each in ranks:
            each.join()
    with service.PreemptionHandler(exit_code=None) as preemption:  # a worker alone is told to stop
        batches = iter(DataLoader(ServiceDataset(target, ids[0]), batch_size=None, num_workers=1))
        next(batches)
        os.kill(batches._workers[0].pid, signal.SIGTERM)
        whole = False
        with contextlib.suppress(RuntimeError, OSError, EOFError):  # PyTorch has several ways
            try:
                for _ in batches:
                    time.sleep(0.01)
                whole = True
            finally:  # PyTorch's SIGCHLD handler raises wherever the program is: be here by then
                batches._workers[0].join()
        assert not whole, "an epoch that lacks elements looks like a whole one"
        assert not preemption.preempted
"""


@pytest.mark.timeout(300)
def test_each_epoch_is_whole_in_any_loader(frameworks: Path, target: str) -> None:
    """However its workers are started, and whatever happened to the epoch before."""
    dataset_id = service.register_dataset(target, tf.data.Dataset.range(1000))
    assert said_by(frameworks, BEGINS + LOADERS, target, dataset_id, timeout_s=250) == []


COPIES = """
import copy
import logging
import pickle

said = []
handler = logging.Handler()
handler.emit = lambda record: said.append(record.getMessage())
logging.getLogger("forebay").addHandler(handler)

for job_name in ("of copies", None):
    dataset = ServiceDataset(target, ids[0], job_name=job_name)
    copies = [pickle.loads(pickle.dumps(dataset)), copy.deepcopy(dataset)]
    all_of_it = [int(e) for e in dataset]
    say([sorted(all_of_it), len(said)])
    say([[len([*each]) for _ in range(2)] for each in copies])
    say([sum("is a copy of one of the job" in text for text in said), said[:1]])
    said.clear()
    ranks = [
        pickle.loads(pickle.dumps(ServiceDataset(
            target, ids[0], job_name=f"of ranks {job_name}", rank=rank, world_size=2)))
        for rank in (0, 1)
    ]
    say([sum(len([*each]) for each in ranks), said])
for how in ({}, {"multiprocessing_context": "spawn"}):
    loaded = DataLoader(ServiceDataset(target, ids[0]), batch_size=None, num_workers=2, **how)
    say([len([*loaded]), len([*loaded]), said])
"""


def test_a_copy_says_whose_epochs_it_shares(frameworks: Path, target: str) -> None:
    """One that was pickled for ranks, or for a DataLoader's workers, is meant to."""
    dataset_id = service.register_dataset(target, tf.data.Dataset.range(8))
    program = BEGINS + "if __name__ == '__main__':\n" + textwrap.indent(COPIES, "    ")
    said = said_by(frameworks, program, target, dataset_id)
    *of_copies, loaded, spawned = said
    assert loaded == spawned == [8, 8, []]
    for first, others, (warnings, texts), (of_ranks, by_ranks) in (of_copies[:4], of_copies[4:]):
        assert first == [[*range(8)], 0]
        assert others == [[0, 8], [0, 0]]
        assert warnings == 2 and "job_name of its own" in texts[0]
        assert of_ranks == 8 and by_ranks == []


ERRORS = """
import os
import pickle


def error(*arguments, **how):
    try:
        ServiceDataset(target, *arguments, **how)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


for size in (0, -1, 2.0, True, "2"):
    say(error(ids[0], batch_size=size))
say(error("nothing"))
say(error(ids[0], rank=2, world_size=2))
say(error(ids[0], rank=0))
say(error(ids[0], rank=1, world_size=2))
say(error(ids[0], job_name=""))
say(error(ids[0], initial_epoch=1))
say(error(ids[0], batch_size=2, pad_value="x"))
say(error(ids[0], device="cuda"))
say(error(ids[0], device="gpu"))
try:
    [*DataLoader(ServiceDataset(target, ids[0], device="cpu"), batch_size=None, num_workers=1)]
except Exception as elsewhere:
    say(str(elsewhere))
os.environ.update(RANK="1", WORLD_SIZE="3")
say(error(ids[0]))
dataset = ServiceDataset(target, ids[0], job_name="ranks")
say([dataset.rank, dataset.world_size])
try:
    len(dataset)
except TypeError as missing:
    say(str(missing))
del os.environ["RANK"], os.environ["WORLD_SIZE"]
again = pickle.loads(pickle.dumps(dataset))
say([len([*again]), len([*dataset])])
say(error(ids[0], job_name="ranks"))
cluster = {"worker": ["w:1", "w:2"]}
os.environ["TF_CONFIG"] = json.dumps(
    {"cluster": cluster, "task": {"type": "evaluator", "index": 0}}
)
evaluator = ServiceDataset(target, ids[0], job_name="ranks", initial_epoch=1)
read = [len([*DataLoader(evaluator, batch_size=None, num_workers=n)]) for n in (0, 2)]
os.environ["TF_CONFIG"] = json.dumps({"cluster": cluster, "task": {"type": "worker", "index": 0}})
trains = ServiceDataset(target, ids[0], job_name="ranks", initial_epoch=1)
say([[evaluator.rank, evaluator.world_size, len(evaluator)], read, trains.world_size])
say(len([*trains]))
del os.environ["TF_CONFIG"]
try:
    [*ServiceDataset(target, ids[1])]
except ValueError as lacking:
    say(str(lacking))
"""


def test_errors_say_what_to_do(frameworks: Path, target: str) -> None:
    ids = [
        service.register_dataset(target, tf.data.Dataset.range(1, 9).map(tf.range)),
        service.register_dataset(
            target,
            tf.data.Dataset.range(3).map(lambda i: tf.cast([i], tf.dtypes.experimental.int4)),
        ),
    ]
    *sizes, unknown, above, half, nameless, empty, nothing_over, pad, of_three = [
        *(said := said_by(frameworks, BEGINS + ERRORS, target, *ids))[:12],
        said.pop(15),
    ]
    assert len(sizes) == 5
    for size, text in zip(("0", "-1", "2.0", "True", "'2'"), sizes, strict=True):
        assert text.startswith(f"InvalidArgument: batch_size={size} must be an integer from 1 to")
    assert unknown.startswith("NotFound: ") and "nothing" in unknown
    assert "rank=2 world_size=2: expected a rank from 0 to world_size - 1" in above
    assert "rank=0 world_size=None: give both, or neither" in half
    assert "2 processes train, and without a job_name" in nameless
    assert "3 processes train, and without a job_name" in of_three
    assert "`job_name` must not be empty" in empty
    assert "initial_epoch=1 needs a job_name" in nothing_over
    assert "pad_value='x' is no value of element, which is of int64" in pad
    no_cuda, no_device, elsewhere = said[12:15]
    assert "device='cuda': this process cannot use it (Torch not compiled with CUDA" in no_cuda
    assert "device='gpu': this process cannot use it" in no_device and '"cuda:1"' in no_device
    assert "device='cpu' in a DataLoader's worker, which is another process: use" in elsewhere
    place, length, counts, over, evaluator, left_to_train, lacking = said[15:]
    assert place == [1, 3]
    assert "has no len() here" in length and "DYNAMIC, 3 processes, cardinality 8" in length
    assert sorted(counts) == [0, 8], "a copy that was pickled reads the same job"
    assert over.startswith("FailedPrecondition: the job 'ranks' has read 1 epochs, and")
    assert evaluator == [[0, 1, 8], [8, 8], 2], "an evaluator reads everything, alone"
    assert left_to_train == 8, "and takes nothing from those that train"
    assert "PyTorch has no int4" in lacking
