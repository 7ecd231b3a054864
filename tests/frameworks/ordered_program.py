"""What test_ordered.py has JAX and Keras do: python ordered_program.py NAME TARGET ARGUMENTS.

ARGUMENTS is JSON. With COORDINATOR PROCESS it is one of two processes of JAX.
"""

from __future__ import annotations

import json
import sys
from importlib import import_module
from itertools import islice
from typing import Any

from forebay.service import ShardingPolicy

STEPS, BATCH = 13, 4


def epoch(dataset: Any) -> list[list[int]]:
    import numpy as np

    return [np.asarray(batch).tolist() for batch in dataset]


def mesh() -> Any:
    import jax
    import numpy as np

    return jax.sharding.Mesh(np.array(jax.devices()), "data")


def dataset_of(target: str, dataset_id: str, **how: Any) -> Any:
    import forebay.jax

    return forebay.jax.ServiceDataset(target, dataset_id, ordered=True, **{"batch_size": 4} | how)


def alone(target: str, dataset_id: str, order: dict[str, Any], steps: list[list[int]]) -> Any:
    first, second = steps[:STEPS], steps[STEPS:]
    for prefetch in (0, 3):
        dataset = dataset_of(target, dataset_id, prefetch=prefetch, **order)
        batches = iter(dataset)
        found = [next(batches).tolist() for _ in range(3)]
        state = dataset.state_dict()
        assert next(iter(dataset)).tolist() == first[0], "one that was left begins again"
        assert found + epoch(batches) == first, "the other one does not disturb it"
        assert len(dataset) == STEPS
        pairs = [
            (one.tolist(), other.tolist()) for one, other in zip(dataset, dataset, strict=True)
        ]
        assert pairs == [(each, each) for each in second]
        again = dataset_of(target, dataset_id, prefetch=prefetch, **order)
        again.load_state_dict(state)
        assert again.state_dict() == state
        batches = iter(again)
        near_the_end = [next(batches).tolist() for _ in range(STEPS - 5)]
        assert again.state_dict()["position"] == 4 * (STEPS - 2), "what is ahead is not given"
        assert near_the_end + epoch(batches) == first[3:]
        assert epoch(again) == second
        for _ in again:  # the third epoch
            behind_the_last = again.state_dict()
        again.load_state_dict(behind_the_last)
        assert [len(epoch(again)) for _ in range(2)] == [0, STEPS]
    by_step = dataset_of(target, dataset_id, start_step=STEPS + 2, **order)
    assert epoch(by_step) == second[2:]
    over_devices = dataset_of(target, dataset_id, sharding=mesh(), **order)
    assert epoch(over_devices) == first[:-1], "the remainder is dropped"
    assert epoch(over_devices) == second[:-1]
    assert len(over_devices) == STEPS - 1
    padded = dataset_of(target, dataset_id, sharding=mesh(), remainder="pad", **order)
    assert [batch[mask].tolist() for batch, mask in padded] == first
    for words, how in (
        ("remainder=", {"drop_remainder": True}),
        ("start_step", {"initial_epoch": 1, "job_name": "job"}),
        ("OFF or DYNAMIC", {"processing_mode": ShardingPolicy.FILE}),
    ):
        try:
            dataset_of(target, dataset_id, **order | how)
        except ValueError as error:
            assert words in str(error), error
        else:
            raise AssertionError(words)
    return state


def mixed(target: str, dataset_id: str, order: dict[str, Any], steps: list[list[int]]) -> Any:
    """A mixture, which has no end."""
    first = dataset_of(target, dataset_id, **order)
    batches = iter(first)
    found = [next(batches).tolist() for _ in range(5)]
    again = dataset_of(target, dataset_id, sharding=mesh(), **order)
    again.load_state_dict(first.state_dict())
    batches.close()
    found += epoch(islice(again, 5))
    assert found == steps[:10], (found, steps)
    return again.state_dict()["position"]


def in_two(
    target: str, dataset_id: str, order: dict[str, Any], steps: list[list[int]], state: Any
) -> Any:
    """Two processes, which take the same steps."""
    import jax
    import numpy as np

    me = jax.process_index()

    def mine(batch: Any) -> list[int]:
        return [x for shard in batch.addressable_shards for x in np.asarray(shard.data).tolist()]

    first, second = ([s[2 * me : 2 * me + 2] for s in steps[i : i + STEPS]] for i in (0, STEPS))
    dropped = dataset_of(target, dataset_id, sharding=mesh(), **order)
    assert [mine(batch) for batch in dropped] == first[:-1]
    assert [mine(batch) for batch in dropped] == second[:-1]
    padded = dataset_of(target, dataset_id, sharding=mesh(), remainder="pad", **order)
    padded.load_state_dict(state)
    found = [
        [x for x, valid in zip(mine(batch), mine(mask), strict=True) if valid]
        for batch, mask in padded
    ]
    assert found == first[3:], (found, first)
    padded.load_state_dict(state)
    batches = iter(padded)
    assert [mine(next(batches)[0]) for _ in range(2)] == first[3:5]
    state = padded.state_dict()
    batches.close()
    own = dataset_of(target, dataset_id, batch_size=2, **order)
    assert [np.asarray(batch).tolist() for batch in own] == [each for each in first if each]
    return state


def from_two(
    target: str, dataset_id: str, order: dict[str, Any], steps: list[list[int]], state: Any
) -> Any:
    dataset = dataset_of(target, dataset_id, **order)
    try:
        dataset.load_state_dict(state | {"position": state["position"] + 1})
    except ValueError as error:
        assert "edited or damaged" in str(error), error
    else:
        raise AssertionError("an edited state was taken")
    dataset.load_state_dict(state)
    assert epoch(dataset) == steps[5:STEPS]


def trains(target: str, dataset_id: str, order: dict[str, Any], saved: str) -> Any:
    import keras

    import forebay.keras

    kind = import_module(f"forebay.{keras.backend.backend()}").ServiceDataset
    losses: list[float] = []

    class Losses(keras.callbacks.Callback):  # type: ignore[misc]
        def __init__(self, stop_after: int = 0) -> None:
            super().__init__()
            self.left = stop_after

        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            self.model.reset_metrics()  # so that each loss is its step's

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            losses.append(float(logs["loss"]))
            self.left -= 1
            if not self.left:
                self.model.stop_training = True

    def model() -> Any:
        keras.utils.set_random_seed(0)
        made = keras.Sequential([keras.layers.Dense(8), keras.layers.Dense(1)])
        made.compile(keras.optimizers.Adam(0.01), "mse")
        return made

    def fit(made: Any, epochs: int, start_step: int, stop_after: int = 0) -> list[float]:
        losses.clear()
        read = kind(
            target, dataset_id, ordered=True, batch_size=BATCH, start_step=start_step, **order
        )
        made.fit(
            forebay.keras.Epochs(read), epochs=epochs, verbose=0, callbacks=[Losses(stop_after)]
        )
        return [*losses]

    undisturbed = fit(model(), 2, 0)
    assert len(undisturbed) == 2 * STEPS, len(undisturbed)
    stopped = model()  # is not built yet, which takes a batch
    resumed = fit(stopped, 2, 0, stop_after=8)
    assert len(resumed) == 8
    stopped.save(saved)
    resumed += fit(keras.models.load_model(saved), 2, 8)
    assert json.dumps(resumed) == json.dumps(undisturbed), (resumed, undisturbed)
    print("done on", keras.backend.backend())


def main() -> None:
    name, target, arguments = sys.argv[1:4]
    if name != "trains":
        import jax

        devices = 4
        if len(sys.argv) > 4:
            coordinator, process = sys.argv[4:]
            jax.distributed.initialize(coordinator, 2, int(process))
            devices = 2
        jax.config.update("jax_num_cpu_devices", devices)
    found = globals()[name](target, *json.loads(arguments))
    assert "tensorflow" not in sys.modules
    print("said: " + json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
