"""Row `mirrored`: how long the steps of two synchronous processes wait for data.

They also read tf.data in their own processes, which shows TensorFlow's own waits.

Each of the two is

python -m forebay.benchmarks.mirrored TF_CONFIG
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import statistics
import sys
import time
from typing import Any

from ..service.processes import free_port
from .machine import process_cpu_s
from .results import Better, Finding, Result
from .servers import Responder, our_dispatcher, our_worker, peer_dispatcher, peer_worker
from .setting import Setting

PROCESSES = 2
FEATURES, HIDDEN, CLASSES, BATCH = 1024, 512, 10, 128  # a replica's batch has 512 KB
STEPS, QUICK_STEPS, WARM_UP_STEPS = 200, 10, 10
MOST_WAITED = 2.0
BESIDE = "beside tf.data in the trainers' own processes"
WHAT = f"MultiWorkerMirroredStrategy, {PROCESSES} processes, a step of {HIDDEN} hidden units"


def mirrored(setting: Setting) -> list[Finding]:
    """The fraction of its time that a step waits, and the worker's CPU use meanwhile."""
    directory = setting.directory("mirrored")
    steps = QUICK_STEPS if setting.quick else STEPS
    with contextlib.ExitStack() as stack:
        sides = {}
        for side, dispatch, work in (
            ("ours", our_dispatcher, our_worker),
            ("peer", peer_dispatcher, peer_worker),
        ):
            dispatcher = stack.enter_context(dispatch(directory, collect=True))
            worker = stack.enter_context(work(dispatcher))
            worker.wait_until_serving()
            sides[side] = {"side": side, "service": dispatcher.address, "worker": worker.pid}
        sides["in_process"] = {**sides["ours"], "side": "in_process"}  # whose worker does nothing
        cluster = {"worker": [f"127.0.0.1:{free_port()}" for _ in range(PROCESSES)]}
        trainers = []
        for index in range(PROCESSES):
            config = {"cluster": cluster, "task": {"type": "worker", "index": index}}
            trainer = Responder("forebay.benchmarks.mirrored", json.dumps(config))
            trainers.append(stack.enter_context(trainer))
        rounds = setting.alternate(
            **{side: functools.partial(_ask, trainers, sides[side], steps) for side in sides}
        )
    return [
        Result(
            row="mirrored",
            what=f"{WHAT}: {what}",
            unit=unit,
            better=better,
            ours=[each[figure] for each in rounds["ours"]],
            peer=[each[figure] for each in rounds[beside]],
            required=required,
        )
        for figure, what, unit, better, required, beside in (
            ("waited", "of its time it waits for data", "%", Better.LESS, MOST_WAITED, "peer"),
            ("busy", "processor time of the worker", "% of a core", Better.LESS, None, "peer"),
            ("per_s", "steps", "steps/s", Better.MORE, None, "peer"),
            ("waited", f"the first {BESIDE}", "%", Better.LESS, None, "in_process"),
            ("per_s", f"the last {BESIDE}", "steps/s", Better.MORE, None, "in_process"),
        )
    ]


def _ask(trainers: list[Responder], side: dict[str, Any], steps: int) -> dict[str, float]:
    """The mean of both trainers' figures."""
    question = {**side, "job": f"round {time.monotonic_ns()}", "steps": steps}
    for trainer in trainers:
        trainer.ask(question)
    answers = [json.loads(trainer.answer()) for trainer in trainers]
    return {name: statistics.mean(answer[name] for answer in answers) for name in answers[0]}


def _serve() -> None:
    os.environ["TF_CONFIG"] = sys.argv[1]
    import tensorflow as tf

    from ..service import distribute_across

    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    with strategy.scope():
        weights = [
            tf.Variable(tf.random.stateless_normal(shape, seed=(1, 2)) / 30)
            for shape in ((FEATURES, HIDDEN), (HIDDEN, CLASSES))
        ]

    def dataset_fn(_: Any) -> Any:
        def example(i: Any) -> Any:
            return tf.random.stateless_uniform([FEATURES], (i, i)), i % CLASSES

        return tf.data.Dataset.range(10_000).map(example).cache().repeat().batch(BATCH)

    def gradients(inputs: Any, labels: Any) -> Any:
        with tf.GradientTape() as tape:
            found = tf.nn.relu(inputs @ weights[0]) @ weights[1]
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, found)
            loss = tf.reduce_mean(losses)
        return tape.gradient(loss, weights)

    def update(batch: Any) -> None:
        for variable, own in zip(weights, strategy.run(gradients, args=batch), strict=True):
            variable.assign_sub(0.01 * strategy.reduce("MEAN", own, axis=None))

    step = tf.function(update)

    def distributed(side: str, service: str, job: str) -> Any:
        if side == "ours":
            return distribute_across(dataset_fn, service, strategy, job_name=job)
        if side == "in_process":
            off = tf.data.Options()
            off.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
            return dataset_fn(None).prefetch(tf.data.AUTOTUNE).with_options(off)
        theirs = tf.data.experimental.service
        return dataset_fn(None).apply(
            theirs.distribute(theirs.ShardingPolicy.OFF, f"grpc://{service}", job_name=job)
        )

    while line := sys.stdin.readline():
        question = json.loads(line)
        steps, worker = question.pop("steps"), question.pop("worker")
        dataset = distributed(**question)
        iterator = iter(strategy.distribute_datasets_from_function(lambda _, d=dataset: d))
        for _ in range(WARM_UP_STEPS):
            step(next(iterator))
        waited_s, cpu_s, begun = 0.0, process_cpu_s(worker), time.perf_counter()
        for _ in range(steps):
            asked = time.perf_counter()
            batch = next(iterator)
            waited_s += time.perf_counter() - asked
            step(batch)
        took_s = time.perf_counter() - begun
        busy = 100 * (process_cpu_s(worker) - cpu_s) / took_s
        answer = {"waited": 100 * waited_s / took_s, "busy": busy, "per_s": steps / took_s}
        print(json.dumps(answer), flush=True)
    os._exit(0)  # TensorFlow would wait for the other to leave


if __name__ == "__main__":
    _serve()
