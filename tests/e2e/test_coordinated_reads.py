"""Coordinated reads over Forebay's workers: of Forebay's consumers, and of TensorFlow's."""

from __future__ import annotations

import contextlib
import itertools
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import tensorflow as tf

from forebay import service
from forebay.service.client.consumer import Consumer
from forebay.service.client.open_iterations import _open
from forebay.service.client.rounds import RoundsMode
from forebay.service.errors import FailedPrecondition, NotFound, PipelineError

from ..cluster import WorkerProcess
from ..forks import Fork
from ..standbys import wait_until
from ..stock import DispatcherProcess, ServerProcess, stock_consumers

pytestmark = pytest.mark.usefixtures("workers")

NAMES = itertools.count(1)
LENGTHS = 7
UNIT = 4096


def sequences(consumers: int) -> tf.data.Dataset:
    """Of a worker, without an end: as many of a length after one another as there are consumers.
    Each is filled with its own number, and so large that few of them are ahead of a consumer."""
    return tf.data.Dataset.range(1 << 60).map(
        lambda x: tf.fill([UNIT * (1 + x // consumers % LENGTHS)], x)
    ).repeat()  # fmt: skip


class Read:
    """A coordinated read, each of whose consumers has a thread."""

    def __init__(self, target: str, consumers: int, as_dataset: bool = False) -> None:
        self.consumers = consumers
        dataset_id = service.register_dataset(target, sequences(consumers))
        name = f"rounds {next(NAMES)}"
        self._stack = contextlib.ExitStack()
        self._pool = self._stack.enter_context(ThreadPoolExecutor(consumers))
        self._iterators: list[Iterator[Any]] = []
        for index in range(consumers):
            how: dict[str, Any] = {
                "job_name": name, "consumer_index": index, "num_consumers": consumers,
            }  # fmt: skip
            if as_dataset:
                self._iterators.append(
                    iter(service.from_dataset_id("parallel_epochs", target, dataset_id, **how))
                )
            else:
                reader = service.read(target, dataset_id, **how)
                self._iterators.append(self._stack.enter_context(reader))
        self._next: Counter[int] = Counter()  # of the sequences that workers go through

    def __enter__(self) -> Read:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def step(self) -> int:
        """What each consumer got is of one round; which one of its worker's."""
        got = list(map(_array, self._pool.map(next, self._iterators)))
        first = int(got[0][0])
        assert first % self.consumers == 0
        length = UNIT * (1 + first // self.consumers % LENGTHS)
        for number, element in enumerate(got, first):
            assert element.shape == (length,) and (element == number).all()
        return first // self.consumers

    def read(self, steps: int) -> list[int]:
        """That many steps, in which no worker's round is left out or comes twice."""
        numbers = []
        for _ in range(steps):
            number = self.step()
            numbers.append(number)
            if number:
                assert self._next[number] > 0, f"round {number} of no worker"
                self._next[number] -= 1
            self._next[number + 1] += 1
        return numbers

    def lowest(self) -> int:
        """The next round of the worker that is furthest behind, as it counts them."""
        return min(self._next.elements())

    def read_without_one(self) -> None:
        """Until the worker that is furthest behind stays so, as it has gone."""
        behind, unchanged = self.lowest(), 0
        while unchanged < 12:
            self.read(1)
            behind, unchanged = self.lowest(), (unchanged + 1) * (self.lowest() == behind)

    def read_until(self, workers: int) -> None:
        """Wait until so many workers take part."""
        while self._next.total() < workers:
            self.read(1)


def rounds_of(number: int) -> list[RoundsMode]:
    """The modes of the consumers of a read with so many."""
    modes = [consumer.mode for consumer in _open if isinstance(consumer, Consumer)]
    found = [mode for mode in modes if isinstance(mode, RoundsMode) and _consumers(mode) == number]
    assert len(found) == number
    return found


def _consumers(mode: RoundsMode) -> int | None:
    return mode._options.num_consumers


def all_have_heard_of_a_loss(number: int) -> bool:
    return all(
        any(task.lost or task.stop is not None for task in list(consumer._tasks.values()))
        for consumer in rounds_of(number)
    )


def all_have_what_one_has_taken(number: int) -> bool:
    """Of each task."""
    consumers = rounds_of(number)
    tasks = {task_id for consumer in consumers for task_id in consumer._tasks}
    return all(
        max(consumer._tasks[task_id].next_round for consumer in consumers)
        <= min(consumer._tasks[task_id].received for consumer in consumers)
        for task_id in tasks
    )


def _array(element: Any) -> Any:
    return element.numpy() if tf.is_tensor(element) else element


@pytest.mark.parametrize("as_dataset", [False, True])
def test_in_each_step_all_have_elements_of_one_round(
    dispatcher: DispatcherProcess, as_dataset: bool
) -> None:
    with Read(dispatcher.target, 3, as_dataset) as rounds:
        rounds.read(101)


def test_a_dataset_with_an_end_is_refused(dispatcher: DispatcherProcess) -> None:
    target = dispatcher.target
    how: dict[str, Any] = {"consumer_index": 0, "num_consumers": 1}
    dataset = tf.data.Dataset.range(9)
    dataset_id = service.register_dataset(target, dataset)
    with pytest.raises(FailedPrecondition, match="has cardinality 9"):
        service.read(target, dataset_id, job_name="finite", **how)
    dataset_id = service.register_dataset(target, dataset.filter(lambda x: x >= 0))
    with (
        service.read(target, dataset_id, job_name="unknown", **how) as elements,
        pytest.raises(PipelineError, match="Encountered end of sequence"),
    ):
        list(elements)


def test_a_read_survives_workers_that_join_or_die_and_a_restarted_dispatcher(
    dispatcher: DispatcherProcess,
) -> None:
    with Read(dispatcher.target, 2) as rounds, ThreadPoolExecutor(2) as pool:
        stock, alone = (stock_consumers(dispatcher.target, number) for number in (2, 1))

        def stock_step() -> int:
            first, second = (int(number) for number, _ in pool.map(next, stock))
            assert (first % 2, second) == (0, first + 1)
            return first // 2

        rounds.read_until(workers=2)
        begun = begun_alone = 0
        while begun < 2:
            begun += stock_step() == 0
        while begun_alone < 2:
            begun_alone += int(next(alone[0])[0]) == 0
        joins = WorkerProcess(dispatcher.address)
        dispatcher.kill_and_restart()
        rounds.read_until(workers=3)
        while begun < 3:
            begun += stock_step() == 0
        stock.clear()
        while begun_alone < 3:
            begun_alone += int(next(alone[0])[0]) == 0
        # Or who reads on before it has heard could pass a round that the other one lacks.
        wait_until(all_have_what_one_has_taken, 2)
        joins.kill()
        wait_until(all_have_heard_of_a_loss, 2)
        for _ in range(50):  # a single consumer is within no round with another
            next(alone[0])
        alone.clear()
        # The one that joined is behind the others, and its turn does not come again.
        rounds.read_without_one()


TRAINER = """
import sys
from forebay import service

target, dataset_id = sys.argv[1:]
elements = service.read(
    target, dataset_id, job_name="started again", consumer_index=1, num_consumers=2
)
for element in elements:
    print(int(element[0]), flush=True)
    sys.stdin.readline()  # until it is killed
"""


def test_consumers_get_an_error_instead_of_waiting_for_a_restarted_one(
    dispatcher: DispatcherProcess,
) -> None:
    dataset_id = service.register_dataset(dispatcher.target, sequences(2))

    def read() -> service.ElementIterator:
        return service.read(
            dispatcher.target, dataset_id,
            job_name="started again", consumer_index=0, num_consumers=2,
        )  # fmt: skip

    def other() -> ServerProcess:
        return ServerProcess(Fork(["-c", TRAINER, dispatcher.target, dataset_id]))

    with contextlib.ExitStack() as stack:
        killed = other()
        stack.callback(killed.kill)
        mine = stack.enter_context(read())
        assert (int(next(mine)[0]), killed.first_line()) == (0, "1")
        killed.kill()
        again = other()
        stack.callback(again.kill)
        with pytest.raises(NotFound, match=r"consumer_index=1.*start all consumers again"):
            list(mine)
        mine = stack.enter_context(read())
        assert (int(next(mine)[0]), again.first_line()) == (0, "1")
