"""What test_jax.py has programs of JAX do: python jax_program.py NAME TARGET ARGUMENTS.

ARGUMENTS is JSON. What each says is JSON behind SAYS, as gloo prints, too.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

import forebay.jax
from forebay import service
from forebay.service import ForebayError
from forebay.service.trainers import jax_arrays

SAYS = "said: "


def say(what: Any) -> None:
    print(SAYS + json.dumps(what), flush=True)


@contextlib.contextmanager
def refused(*words: str) -> Iterator[None]:
    """With an error that says all of these."""
    try:
        yield
    except ForebayError as error:
        assert all(word in str(error) for word in words), error
        return
    raise AssertionError(f"no error that says {words}")


def mesh(*names: str, shape: tuple[int, ...] = (-1,)) -> jax.sharding.Mesh:
    return jax.sharding.Mesh(np.array(jax.devices()).reshape(shape), names)


def do_not_train(target: str, numbers: str) -> Any:
    """How many elements are read by which task, as TF_CONFIG says that this is."""

    def become(task: str) -> None:
        cluster = {"worker": ["w:1", "w:2"], "ps": ["p:1"]}
        config = {"cluster": cluster, "task": {"type": task, "index": 0}}
        os.environ["TF_CONFIG"] = json.dumps(config)

    def read(**how: Any) -> int:
        dataset = forebay.jax.ServiceDataset(
            target, numbers, batch_size=8, job_name="training", **how
        )
        return sum(len(batch["x"]) for batch in dataset)

    become("ps")
    with refused("parameter server 0, which reads nothing"):
        read()
    become("evaluator")
    found: dict[str, Any] = {"evaluator": [read(sharding=mesh("data")), read(initial_epoch=3)]}
    become("worker")
    found["worker"] = read()
    return found


# -- a process alone -------------------------------------------------------------------------------


def batches(target: str, numbers: str) -> Any:
    """{"x": float32 [16], each value the element's number; "y": (int64, uint8)}, 100 of them."""
    dataset = forebay.jax.ServiceDataset(target, numbers, batch_size=32)
    assert len(dataset) == 4
    kept = [batch for _ in range(2) for batch in dataset]  # all at once, so that none is reused
    assert [len(batch["x"]) for batch in kept] == 2 * [32, 32, 32, 4]
    for epoch in (kept[:4], kept[4:]):
        found = np.concatenate([batch["x"] for batch in epoch])
        assert np.array_equal(np.sort(found[:, 5]), np.arange(100)), found
        assert found.shape == (100, 16)
        assert (found == found[:, :1]).all()
    wide, narrow = kept[0]["y"]
    assert (wide.dtype, narrow.dtype) == (np.int32, np.uint8)
    assert np.array_equal(kept[0]["x"][:, 0], wide)
    assert np.array_equal(wide % 256, narrow)

    for remainder, sizes in (("drop", [32, 32, 32]), ("keep", [32, 32, 32, 4])):
        each = forebay.jax.ServiceDataset(target, numbers, batch_size=32, remainder=remainder)
        assert len(each) == len(sizes)
        assert [len(batch["x"]) for batch in each] == sizes
    padded = forebay.jax.ServiceDataset(target, numbers, batch_size=32, remainder="pad")
    pairs = list(padded)
    assert [int(mask.sum()) for _, mask in pairs] == [32, 32, 32, 4]
    last, mask = pairs[-1]
    assert last["x"].shape == (32, 16)
    assert mask.dtype == bool and not last["x"][~mask].any()

    elements = forebay.jax.ServiceDataset(target, numbers)
    assert len(elements) == 100
    assert sorted(int(element["y"][0]) for element in elements) == [*range(100)]
    with contextlib.closing(iter(elements)) as left:
        next(left)
    assert len([*elements]) == 100


def lent(target: str, numbers: str) -> Any:
    """What shares memory with the service's blocks stays as it is, whatever XLA does with it."""
    places = []

    def look(batch: Any) -> Any:
        places.append(batch["x"].ctypes.data)
        return batch

    dataset = forebay.jax.ServiceDataset(target, numbers, batch_size=10, map=look)
    overwrite = jax.jit(lambda x: x * 0 - 1, donate_argnums=0)
    shared, kept = 0, []
    for batch in dataset:
        seen = np.array(batch["x"])
        shared += batch["x"].unsafe_buffer_pointer() in places
        kept.append((seen, batch["x"] + 0))
        donated = batch.pop("x")
        overwrite(donated).block_until_ready()
        assert donated.is_deleted()
    assert shared, "no batch was shared, and nothing was shown"
    assert np.array_equal(np.sort(np.concatenate([x[:, 0] for x, _ in kept])), np.arange(100))
    assert all(np.array_equal(seen, copied) for seen, copied in kept)


def global_arrays(target: str, numbers: str, whole_batches: str) -> Any:
    """Over four devices of one process."""
    spec, named = jax.sharding.PartitionSpec, jax.sharding.NamedSharding
    square = mesh("data", "model", shape=(2, 2))
    for sharding, rows in (
        (mesh("data"), 8),
        (square, 8),  # all axes
        (named(square, spec("data")), 16),
        (named(square, spec(("model", "data"))), 8),
        (named(square, spec()), 32),
    ):
        dataset = forebay.jax.ServiceDataset(target, numbers, batch_size=32, sharding=sharding)
        found = [*dataset]
        assert len(found) == len(dataset) == 3
        for batch in found:
            x, (wide, _) = batch["x"], batch["y"]
            assert x.shape == (32, 16) and wide.shape == (32,)
            assert {shard.data.shape for shard in x.addressable_shards} == {(rows, 16)}
            assert wide.sharding.spec == x.sharding.spec
            for shard in x.addressable_shards:
                assert np.array_equal(shard.data, np.asarray(x)[shard.index])
            assert np.array_equal(np.asarray(x)[:, 3], wide)
        numbers_of = np.concatenate([batch["y"][0] for batch in found])
        assert len(np.unique(numbers_of)) == 96
    padded = forebay.jax.ServiceDataset(
        target, numbers, batch_size=32, sharding=square, remainder="pad"
    )
    total = sum(float((batch["x"][:, 0] * mask).sum()) for batch, mask in padded)
    assert total == sum(range(100))
    by_rows = forebay.jax.ServiceDataset(  # which says more than the mask, and labels, have
        target, numbers, batch_size=32, sharding=named(square, spec("data", None)), remainder="pad"
    )
    for batch, mask in by_rows:
        assert batch["x"].sharding.spec == spec("data", None)
        for array in (mask, batch["y"][0]):
            assert jax.device_put(array, array.sharding).shape == (32,)

    whole = forebay.jax.ServiceDataset(target, whole_batches, sharding=square)
    assert sorted(np.concatenate([*whole]).tolist()) == [*range(100)]
    assert {batch.shape for batch in whole} == {(20,)}

    for size, words in ((30, ("30", "4", "data")), (2, ("2 elements", "4"))):
        with refused(*words):
            forebay.jax.ServiceDataset(target, numbers, batch_size=size, sharding=mesh("data"))
    with refused("first dimensions", "16"):
        forebay.jax.ServiceDataset(target, numbers, sharding=square)
    with refused("no rows"):
        jax_arrays._Places(square, None, 0)
    with refused("divides more than the batch"):
        sharding = named(square, spec("data", "model"))
        forebay.jax.ServiceDataset(target, numbers, batch_size=32, sharding=sharding)
    with refused("keep", "smaller batch"):
        forebay.jax.ServiceDataset(
            target, numbers, batch_size=32, sharding=square, remainder="keep"
        )
    with refused("must be a Mesh"):
        device: Any = jax.devices()[0]
        forebay.jax.ServiceDataset(target, numbers, batch_size=32, sharding=device)


def odd(target: str, mixed: str, sequences: str, failing: str) -> Any:
    """What JAX has no arrays for."""

    def first(dataset_id: str, **how: Any) -> Any:
        with contextlib.closing(
            iter(forebay.jax.ServiceDataset(target, dataset_id, batch_size=4, **how))
        ) as found:
            return next(found)

    with refused("element['name']", "strings", "map="):
        first(mixed, map=lambda batch: {"name": batch["name"]})
    with refused("element['wide'] has 1099511627776", "int32", "jax_enable_x64"):
        first(mixed, map=lambda batch: {"wide": batch["wide"]})
    found = first(mixed, map=lambda batch: {k: batch[k] for k in ("half", "precise", "maybe")})
    assert {key: str(array.dtype) for key, array in found.items() if array is not None} == {
        "half": "bfloat16", "precise": "float32"
    }  # fmt: skip
    with refused("element['tokens']", "pad_value"):
        first(sequences)
    tokens = first(sequences, pad_value=-1)["tokens"]
    assert tokens.shape == (4, 3)
    assert np.array_equal(tokens, [[-1] * 3, [1, -1, -1], [2, 2, -1], [3, 3, 3]])
    with refused("element['tokens']", "[None]", "different shapes"):
        first(sequences, pad_value=-1, sharding=mesh("data"))
    fixed = first(
        sequences, pad_value=-1, sharding=mesh("data"),
        map=lambda batch: np.pad(batch["tokens"], [(0, 0), (0, 10)])[:, :10],
    )  # fmt: skip
    assert fixed.shape == (4, 10)
    with refused("element", "4 elements", "[2]"):
        first(sequences, map=lambda batch: np.zeros(2))
    with refused("remainder='pad'", "batch_size"):
        forebay.jax.ServiceDataset(target, sequences, remainder="pad")
    with refused("remainder='all'"):
        forebay.jax.ServiceDataset(target, sequences, remainder="all", batch_size=2)
    with refused("prefetch=-1"):
        forebay.jax.ServiceDataset(target, sequences, prefetch=-1)
    taken = 0
    with refused("not finite"):
        for batch in forebay.jax.ServiceDataset(target, failing, batch_size=4):
            taken += len(batch)
    assert taken == 8, taken  # what was whole before

    jax.config.update("jax_enable_x64", True)
    wide = first(mixed, map=lambda batch: batch["wide"])
    assert wide.dtype == np.int64 and int(wide[1]) == 1 << 40


# -- two processes, of two devices each ------------------------------------------------------------


def epoch_of(dataset: forebay.jax.ServiceDataset, *, pads: bool) -> dict[str, Any]:
    """Each step's sum over all processes' elements, and the numbers of this one's."""
    total = jax.jit(lambda x, mask: (x[:, 0] * mask).sum())
    sums, mine = [], []
    mask: Any
    for batch in dataset:
        x, mask = (batch[0]["x"], batch[1]) if pads else (batch["x"], np.ones(len(batch["x"])))
        sums.append(float(total(x, mask)))
        held: list[float] = []
        for place, shard in enumerate(x.addressable_shards):
            valid = mask.addressable_shards[place].data if pads else np.ones(len(shard.data))
            held += np.asarray(shard.data)[np.asarray(valid, bool), 0].tolist()
        mine.append(held)
        if jax.process_index():
            time.sleep(0.002)
    return {"sums": sums, "mine": mine}


def in_step(target: str, numbers: str, few: str, rows: int) -> Any:
    spec, named = jax.sharding.PartitionSpec, jax.sharding.NamedSharding
    said: dict[str, Any] = {}
    for name, dataset_id in (("numbers", numbers), ("few", few)):
        for remainder in ("drop", "pad"):
            dataset = forebay.jax.ServiceDataset(
                target, dataset_id, batch_size=rows, sharding=mesh("data"), remainder=remainder,
                job_name=f"{name} {remainder}",
            )  # fmt: skip
            pads = remainder == "pad"
            said[f"{name} {remainder}"] = [epoch_of(dataset, pads=pads) for _ in range(2)]
    across = mesh("data", "model", shape=(2, 2))  # a row of it is a process
    for axes, held in (("data", rows // 2), (("model", "data"), rows // 4)):
        dataset = forebay.jax.ServiceDataset(
            target, numbers, batch_size=rows, sharding=named(across, spec(axes)), job_name=f"{axes}"
        )
        for batch in dataset:
            assert {shard.data.shape for shard in batch["x"].addressable_shards} == {(held, 16)}
            x, wide = [
                [np.asarray(shard.data).reshape(held, -1)[:, 0] for shard in each]
                for each in (batch["x"].addressable_shards, batch["y"][0].addressable_shards)
            ]
            assert np.array_equal(np.concatenate(x), np.concatenate(wide))
    with refused("[0, 1] hold", "no other one has", "model"):
        forebay.jax.ServiceDataset(
            target, numbers, batch_size=rows, sharding=named(across, spec("model")), job_name="same"
        )
    with refused("2 processes", "job_name"):
        forebay.jax.ServiceDataset(target, numbers, batch_size=rows, sharding=across)
    own = forebay.jax.ServiceDataset(target, numbers, batch_size=rows, job_name="each its own")
    said["own"] = [number for batch in own for number in np.asarray(batch["y"][0]).tolist()]
    other = jax.sharding.Mesh(jax.devices()[2 - 2 * jax.process_index() :][:1], "data")
    with refused("and none of process"):
        forebay.jax.ServiceDataset(
            target, numbers, batch_size=rows, sharding=other, job_name="other"
        )
    return said


def out_of_step(target: str, numbers: str) -> Any:
    """What one process does wrong, all are told: none hangs."""
    me = jax.process_index()
    steps = 0

    def failing(batch: Any) -> Any:
        nonlocal steps
        steps += 1
        if me and steps == 3:
            raise ZeroDivisionError("of process 1")
        return batch

    def read(**how: Any) -> forebay.jax.ServiceDataset:
        return forebay.jax.ServiceDataset(
            target, numbers, batch_size=8, sharding=mesh("data"), **how
        )

    for remainder in ("drop", "pad"):
        steps = 0
        try:
            [*read(map=failing, job_name=f"failing {remainder}", remainder=remainder)]
        except (ForebayError, ZeroDivisionError) as error:
            assert me == isinstance(error, ZeroDivisionError), error
            assert "of process 1" in str(error)
        else:
            raise AssertionError("it has ended")
    with refused("differ in shape or dtype"):
        [*read(map=lambda batch: batch["x"][:, : 1 + me], job_name="other shapes")]
    told = []
    for job, remainder in (("told", "drop"), ("told too", "pad")):
        dataset = read(job_name=job, remainder=remainder)
        with contextlib.ExitStack() as stack:
            catches = me or job == "told"
            if catches:
                handler = stack.enter_context(service.PreemptionHandler(exit_code=None))
            else:
                stack.enter_context(refused("process 1 was told to stop"))
            for number, batch in enumerate(dataset):
                if job == "told":
                    for shard in batch["y"][0].addressable_shards:
                        told += np.asarray(shard.data).tolist()
                if me and number == 2:
                    signal.raise_signal(signal.SIGTERM)
            assert catches and handler.preempted and number < 10, (job, number)
    taken = 0
    try:
        for _ in read(job_name="leaving", timeout_s=2, prefetch=0):
            taken += 1
            if me and taken == 2:
                break
    except ForebayError as error:
        assert not me and "taken another number of steps" in str(error), error
    else:
        assert me
    return {"taken": taken, "told": told}


def until_killed(target: str, numbers: str, pace_s: float) -> Any:
    """Says each batch's numbers, for the test to see how far it is."""
    dataset = forebay.jax.ServiceDataset(
        target, numbers, batch_size=8, sharding=mesh("data"), job_name="killed", remainder="pad"
    )
    count = jax.jit(lambda mask: mask.sum())
    for batch, mask in dataset:
        parts = zip(batch["x"].addressable_shards, mask.addressable_shards, strict=True)
        mine = [np.asarray(x.data)[np.asarray(valid.data), 0].tolist() for x, valid in parts]
        say([*mine[0], *mine[1]])
        count(mask).block_until_ready()
        time.sleep(pace_s)
    return "ended"


def main() -> None:
    name, target, arguments = sys.argv[1:4]
    devices = 4
    if len(sys.argv) > 4:
        coordinator, process = sys.argv[4:]
        jax.distributed.initialize(coordinator, 2, int(process))
        devices = 2
    jax.config.update("jax_num_cpu_devices", devices)
    said = globals()[name](target, *json.loads(arguments))
    assert not {"tensorflow", "torch"} & sys.modules.keys()
    say(said)


if __name__ == "__main__":
    main()
