"""Row `shares`: the share of one job that each of several trainers gets.

Trainers in *lockstep* take each step together, as in a collective operation. A trainer
without a batch waits for the others, and the step counts as starved.

Each trainer is

python -m forebay.benchmarks.shares SIDE SERVICE
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import os
import pathlib
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from .results import Better, Finding, Result
from .servers import Responder, Server, our_dispatcher, our_worker, peer_dispatcher, peer_worker
from .setting import Setting

STEP_S = 1e-3
LEAST_SHARE, MOST_SHARE = 0.7, 1.3
MOST_STARVED = 2.0  # percent of the steps
FEW_STARVED = 4  # steps, however few there are
RESOLUTION = 0.01  # of a step, or of a share
MOST_OF_PEER = 50_000  # elements: it sends some 3,000 a second


@dataclass(frozen=True, kw_only=True)
class Scene:
    """A dataset, and how its trainers go about it."""

    elements: int
    element_bytes: int = 8
    batch: int = 8
    trainers: int = 2
    workers: int = 1
    mode: str = "DYNAMIC"
    lockstep: bool = True
    delay_s: float = 0  # of the last trainer
    steps_s: tuple[float, ...] = ()  # how long each trainer's step takes; STEP_S
    by_read: bool = False  # without TensorFlow; Forebay's only

    def __str__(self) -> str:
        size = f"{self.element_bytes:,} B" if self.element_bytes < 1024 else (
            f"{self.element_bytes // 1024} KB"
        )  # fmt: skip
        how = "in lockstep" if self.lockstep else "each for itself"
        late = f", one {self.delay_s:g} s late" if self.delay_s else ""
        slow = f", steps of {', '.join(f'{1e3 * s:g}' for s in self.steps_s)} ms"
        return (
            f"{self.elements:,} × {size}, {self.mode}, {self.workers} worker(s), {self.trainers} "
            f"trainers {how}{late}{slow if self.steps_s else ''}{', read' * self.by_read}"
        )

    def step_s(self, index: int) -> float:
        return self.steps_s[index] if self.steps_s else STEP_S


LOCKSTEP = (
    Scene(elements=1_003),
    Scene(elements=5_000),
    Scene(elements=50_000, batch=32),
    Scene(elements=1_000_000, batch=64),
    Scene(elements=5_000, element_bytes=1024),
    Scene(elements=20_000, element_bytes=1024, batch=32),
    Scene(elements=1_003, mode="OFF"),
    Scene(elements=5_000, element_bytes=1024, mode="OFF"),
    Scene(elements=1_003, trainers=4, workers=2),
    Scene(elements=20_000, element_bytes=1024, trainers=4, workers=2),
    Scene(elements=5_000, delay_s=1),
    Scene(elements=5_000, element_bytes=1024, delay_s=3),
)
EACH_FOR_ITSELF = (
    *(
        Scene(elements=elements, trainers=trainers, lockstep=False, steps_s=(0,) * trainers)
        for trainers in (2, 4, 8)
        for elements in (1_000, 100_000, 1_000_000)
    ),
    Scene(elements=10_000, element_bytes=1024, trainers=4, lockstep=False, by_read=True),
    Scene(elements=1_000_000, trainers=4, lockstep=False, by_read=True, steps_s=(0,) * 4),
    Scene(elements=2_000, element_bytes=150_000, trainers=4, lockstep=False, steps_s=(0,) * 4),
)
UNEQUAL = Scene(elements=5_000, element_bytes=1024, batch=1, lockstep=False, steps_s=(1e-3, 20e-3))


def shares(setting: Setting) -> list[Finding]:
    """The smallest and largest share, over the even one; what of the steps was starved."""
    findings: list[Finding] = []
    directory = setting.directory("shares")
    scenes = (LOCKSTEP[0], UNEQUAL) if setting.quick else (*LOCKSTEP, *EACH_FOR_ITSELF, UNEQUAL)
    with contextlib.ExitStack() as stack:
        sides = {
            side: stack.enter_context(contextlib.closing(_Side(side, directory)))
            for side in ("ours", "peer")
        }
        for scene in scenes:
            asked = {s: functools.partial(each.run, scene) for s, each in sides.items()}
            if scene.by_read or scene.elements > MOST_OF_PEER:
                del asked["peer"]
            findings += _findings(scene, setting.alternate(**asked))
    return findings


def _findings(scene: Scene, rounds: dict[str, list[dict[str, float]]]) -> Iterator[Finding]:
    def result(figure: str, what: str, unit: str, better: Better, bound: float | None) -> Result:
        return Result(
            row="shares",
            what=f"{scene}: {what}",
            unit=unit,
            better=better,
            ours=[each[figure] for each in rounds["ours"]],
            peer=[each[figure] for each in rounds.get("peer", ())],
            required=bound,
        )

    if scene.steps_s and len(set(scene.steps_s)) > 1:
        yield result("least", "the slow one's share", "%", Better.MORE, None)
        yield result("late", "that ends later than the other by its steps", "", Better.LESS, 1)
        return
    yield result("least", "the smallest share, of an even one", "", Better.MORE, LEAST_SHARE)
    yield result("most", "the largest", "", Better.LESS, MOST_SHARE)
    if scene.lockstep:
        steps = scene.elements / scene.batch / scene.trainers
        bound = max(MOST_STARVED, 100 * FEW_STARVED / steps)
        yield result("fed", "steps in which all had a batch", "%", Better.MORE, 100 - bound)
    yield result("per_s", "all together", "elements/s", Better.MORE, None)


class _Side:
    """A service with its trainers, which are kept from scene to scene."""

    def __init__(self, side: str, directory: pathlib.Path) -> None:
        self._ours = side == "ours"
        self._directory = directory / side
        self._directory.mkdir()
        self._clusters: dict[int, Server] = {}  # dispatchers, by their number of workers
        self._trainers: dict[int, list[Responder]] = {}
        self._stack = contextlib.ExitStack()
        self._rounds = itertools.count()

    def close(self) -> None:
        self._stack.close()

    def run(self, scene: Scene) -> dict[str, float]:
        trainers = self._trainers_of(scene)[: scene.trainers]
        job = f"round {next(self._rounds)}"
        for index, trainer in enumerate(trainers):
            delay_s = scene.delay_s if index == scene.trainers - 1 else 0.0
            trainer.ask(
                {"scene": {**vars(scene), "delay_s": delay_s}, "job": job, "index": index}
            )  # fmt: skip
        while True:
            answers = [json.loads(trainer.answer()) for trainer in trainers]
            if "elements" in answers[0]:
                return _figures(scene, answers)
            have = sum(answer["has_batch"] for answer in answers)
            for trainer in trainers:  # they may take their step
                trainer.ask({"have": have})

    def _trainers_of(self, scene: Scene) -> list[Responder]:
        if scene.workers not in self._clusters:
            directory = self._directory / str(scene.workers)
            directory.mkdir()
            dispatch, work = (our_dispatcher, our_worker) if self._ours else (
                peer_dispatcher, peer_worker
            )  # fmt: skip
            dispatcher = self._stack.enter_context(dispatch(directory, collect=True))
            for _ in range(scene.workers):
                self._stack.enter_context(work(dispatcher)).wait_until_serving()
            self._clusters[scene.workers] = dispatcher
            self._trainers[scene.workers] = []
        trainers = self._trainers[scene.workers]
        while len(trainers) < scene.trainers:
            address = self._clusters[scene.workers].address
            side = "ours" if self._ours else "peer"
            trainer = Responder("forebay.benchmarks.shares", side, address)
            trainers.append(self._stack.enter_context(trainer))
            trainer.answer()  # it is ready
        return trainers


def _figures(scene: Scene, answers: list[dict[str, Any]]) -> dict[str, float]:
    """Shares are of what was read since all were there."""
    came_s = max(answer["came_s"] for answer in answers)
    counts = []
    for answer in answers:
        before = [n for at_s, n in answer["progress"] if at_s <= came_s]
        counts.append(answer["elements"] - (0 if scene.lockstep else max(before, default=0)))
    total, even = sum(counts), max(1.0, sum(counts) / len(counts))
    ended_s = [answer["ended_s"] for answer in answers]
    figures = {
        "least": max(RESOLUTION, min(counts) / even),
        "most": max(counts) / even,
        "fed": 100 - 100 * answers[0]["starved"] / max(1, answers[0]["steps"]),
        "per_s": sum(a["elements"] for a in answers) / (max(ended_s) - came_s),
    }
    if scene.steps_s and len(set(scene.steps_s)) > 1:
        slow = max(range(scene.trainers), key=scene.step_s)
        others_s = max(s for i, s in enumerate(ended_s) if i != slow)
        figures["least"] = 100 * counts[slow] / total
        figures["late"] = max(RESOLUTION, (ended_s[slow] - others_s) / scene.step_s(slow))
    return figures


def _serve() -> None:
    side, service = sys.argv[1:]
    import numpy as np
    import tensorflow as tf

    from ..service import ShardingPolicy, distribute, read, register_dataset

    theirs = tf.data.experimental.service

    def dataset_of(scene: Scene) -> Any:
        width = scene.element_bytes
        dataset = tf.data.Dataset.range(scene.elements)
        if width == 8:
            return dataset
        return dataset.map(lambda i: tf.fill([width], tf.cast(i, tf.uint8)))

    def batches_of(scene: Scene, job: str) -> Iterator[int]:
        """How many elements each batch has."""
        if scene.by_read:
            name = f"{scene.elements} of {scene.element_bytes}"
            dataset_id = register_dataset(service, dataset_of(scene), dataset_id=name)
            elements = read(
                service, dataset_id, processing_mode=ShardingPolicy[scene.mode], job_name=job
            )
            while count := sum(1 for _ in itertools.islice(elements, scene.batch)):
                yield count
            return
        if side == "ours":
            apply = distribute(ShardingPolicy[scene.mode], service, job_name=job)
        else:
            policy = getattr(theirs.ShardingPolicy, scene.mode)
            apply = theirs.distribute(policy, f"grpc://{service}", job_name=job)
        for batch in dataset_of(scene).apply(apply).batch(scene.batch):
            yield int(np.shape(batch)[0])

    print(json.dumps("ready"), flush=True)
    while line := sys.stdin.readline():
        question = json.loads(line)
        scene = Scene(**question["scene"])
        print(json.dumps(_train(scene, question, batches_of)), flush=True)
    os._exit(0)  # TensorFlow may wait for threads of its own


def _train(
    scene: Scene, question: dict[str, Any], batches_of: Callable[[Scene, str], Iterator[int]]
) -> dict[str, Any]:
    def together(has_batch: bool) -> int:
        """How many have one, once all have said whether they do."""
        print(json.dumps({"has_batch": has_batch}), flush=True)
        return int(json.loads(sys.stdin.readline())["have"])

    time.sleep(scene.delay_s)
    batches = batches_of(scene, question["job"])
    step_s = scene.step_s(question["index"])
    elements = steps = starved = 0
    progress = []
    came_s = 0.0
    while True:
        count = next(batches, 0)
        if not came_s:
            if not scene.lockstep:
                together(True)  # all go on at the same time
            came_s = time.monotonic()
        if scene.lockstep:
            have = together(bool(count))
            if not have:
                break
            starved += have < scene.trainers
        elif not count:
            break
        steps += 1
        elements += count
        if steps % 16 == 1 or scene.elements < 20_000:
            progress.append((time.monotonic(), elements - count))
        if step_s:
            time.sleep(step_s)
    return {
        "elements": elements, "steps": steps, "starved": starved, "progress": progress,
        "came_s": came_s, "ended_s": time.monotonic(),
    }  # fmt: skip


if __name__ == "__main__":
    _serve()
