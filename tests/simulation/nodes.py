"""The simulated machines' programs: what runs in each process, and who starts it again."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import closing
from functools import partial

from forebay.service.client.datasets import remove_dataset
from forebay.service.client.options import ReadOptions, ShardingPolicy
from forebay.service.client.reader import Reader
from forebay.service.connections.dispatcher_client import DispatcherClient
from forebay.service.errors import FailedPrecondition, NotFound, PipelineError, Unavailable
from forebay.service.proto import forebay_pb2 as pb
from forebay.service.worker import WorkerOptions
from forebay.service.worker.worker import Worker

from .kernel import Kernel, Process
from .oracle import Element, Oracle
from .pipeline import GRAPH, PYTHON, Computation, Pipeline, elements_of
from .threads import SimpleQueue

RESTART_S = 0.5


class Node(ABC):
    """A program that is kept running: its process, and the next one when that is over."""

    def __init__(self, this: Kernel, name: str, host: str) -> None:
        self.kernel = this
        self.name = name
        self.host = host
        self.process: Process | None = None
        self.processes: list[Process] = []
        self.done = False  # its work is finished, and it is not started again
        self.disturbed = False  # it was killed, paused or cut off
        self.held = False  # it is not to be started now

    @property
    def alive(self) -> bool:
        return self.process is not None and self.process.alive

    def start(self) -> None:
        if self.alive or self.done or self.held:
            return
        self.process = Process(self.kernel, f"{self.name}.{len(self.processes)}", self.host)
        self.processes.append(self.process)
        self.kernel.trace("start", self.process.name)
        self.process.spawn("main", self._run)

    def _run(self) -> None:
        mine = self.process
        self.main()
        assert mine is not None
        self.kernel.trace("exit", mine.name)
        mine.kill()
        if not self.done:
            self.kernel.at(RESTART_S * self.kernel.rng.random(), self.start)

    @property
    def began(self) -> bool:
        """Whether it has been told anything by a dispatcher."""
        return True

    @abstractmethod
    def main(self) -> None:
        """What its process does, from its start to its end."""

    def kill(self, *, vanish: bool = False) -> None:
        """SIGKILL; with `vanish` its host is gone as well, and nobody says goodbye for it."""
        if self.alive and self.process is not None:
            self.disturbed = True
            self.process.vanished = vanish
            self.killed(self.process)
            self.process.kill()

    def killed(self, process: Process) -> None:  # noqa: B027 - most keep none
        """For subclasses: keep the books."""

    def pause(self) -> None:
        if self.alive and self.process is not None and not self.process.paused:
            self.disturbed = True
            self.process.pause()

    def resume(self) -> None:
        if self.process is not None and self.process.paused:
            self.process.resume()


class WorkerNode(Node):
    """A worker's place."""

    def __init__(
        self, this: Kernel, name: str, host: str, options: WorkerOptions, pipeline: Pipeline
    ) -> None:
        super().__init__(this, name, host)
        self.options = options
        self._pipelines = Computation(pipeline)
        self._commands: SimpleQueue = SimpleQueue()
        self._worker: Worker | None = None

    def start(self) -> None:
        if not self.alive:
            self._commands, self._worker = SimpleQueue(), None
        super().start()

    @property
    def began(self) -> bool:
        return self._worker is not None and self._worker.journal_id != ""

    @property
    def uid(self) -> int:
        """Of the present process; 0 if there is none."""
        return self._worker.uid if self._worker is not None else 0

    def main(self) -> None:
        self._worker = running = Worker(self.options, pipelines=self._pipelines)
        try:
            running.start()
        except Unavailable:
            return  # it exits, and is started again
        except FailedPrecondition:
            # So does it if a killed process's first heartbeat came late, and took its address.
            assert len(self.kernel.oracle.dead_uids)
            self.kernel.oracle.dead_uids.add(running.uid)
            return
        drain = self._commands.get()
        self.kernel.oracle.leaving_uids.add(running.uid)
        # It does not wait for consumers that have not come yet, so these lose what it has begun.
        self.kernel.oracle.unread.update(running.unread() if drain else [])
        delivered = running.stop(drain=drain)
        if not (drain and delivered):
            self.kernel.oracle.dead_uids.add(running.uid)
        assert self.process is not None
        left = [f"{t.name} in {t.where()}" for t in self.process.threads if t.name != "main"]
        if left:
            self.kernel.fail(f"{self.name} was stopped, and left the threads {left}")

    def killed(self, process: Process) -> None:
        if self._worker is not None:
            self.kernel.oracle.dead_uids.add(self._worker.uid)

    def stop(self, *, drain: bool) -> None:
        """SIGTERM, which drains, or stopping without."""
        if self.alive:
            self.kernel.trace("stop", self.name, drain)
            self._commands.put(drain)


class Preempted(Exception):
    """The trainer was told to stop."""


class Trainer(Node):
    """A training program: reads the job's epochs through the product's client."""

    def __init__(self, this: Kernel, name: str, host: str, job: Job) -> None:
        super().__init__(this, name, host)
        self.job = job
        self.epoch = 1
        self.reading = False

    @property
    def began(self) -> bool:
        return self.reading

    def start(self) -> None:
        if not self.alive:
            self.reading = False
        super().start()

    def main(self) -> None:
        job = self.job
        reader = Reader(
            job.service, job.dataset_id(), job.name,
            ReadOptions(policy=job.policy, initial_epoch=self.epoch - 1),
            credit_bytes=job.credit_bytes,
        )  # fmt: skip
        while self.epoch <= job.epochs:
            self.reading = True
            try:
                enough = self._read(reader)
            except Preempted:
                return  # and is started again
            except NotFound:
                return  # it was given up: it begins again
            except PipelineError as error:
                if not self.kernel.oracle.failed:
                    self.kernel.fail(f"{self.name} failed without a reason: {error!r}")
                self.kernel.oracle.excused_consumers += 1  # what is on its way to it
                enough = True
            if self.job.pipeline.endless and not enough:
                self.kernel.fail(f"{self.name} came to the end of a pipeline that has none")
            self.reading = False
            self.kernel.trace("epoch", self.name, self.epoch)
            self.epoch += 1
        self.done = True

    def _read(self, reader: Reader) -> bool:
        """Read an epoch; of one without an end, enough, and say whether it was."""
        rng = self.kernel.rng
        left = len(self.job.pipeline.places()) if self.job.pipeline.endless else -1
        with closing(reader.iterate()) as blocks:
            for block in blocks:
                for element in elements_of(block):
                    self.job.deliver(self.name, element)
                self.job.seen.add(element.iteration_id)
                if self.job.leaves and rng.random() < self.job.leaves:
                    self._hands_back()
                    return True
                if self.job.preempted and rng.random() < self.job.preempted:
                    self.kernel.trace("preempted", self.name)
                    self._hands_back()
                    raise Preempted
                if self.job.step_s:
                    self.kernel.sleep(self.job.step_s * rng.uniform(0.1, 2))
                if left >= 0 and (left := left - block.count) <= 0:
                    return True
        return False

    def _hands_back(self) -> None:
        """It leaves in order, and what it has not taken is for others."""
        oracle = self.kernel.oracle
        if not self.job.hands_back or oracle.elements_may_not_come_back:
            oracle.excused_consumers += 1  # what is on its way to it

    def killed(self, process: Process) -> None:
        if self.reading:
            self.kernel.oracle.excused_consumers += 1


class Operator(Node):
    """Somebody who removes the job's dataset now and then, whoever reads it."""

    def __init__(
        self, this: Kernel, name: str, host: str, job: Job, removals: list[tuple[float, bool]]
    ) -> None:
        super().__init__(this, name, host)
        self._job = job
        self._removals = removals

    def main(self) -> None:
        for at_s, force in self._removals:
            self.kernel.sleep(max(0.0, at_s - self.kernel.now))
            for dataset_id in sorted(self._job.registered):
                try:
                    remove_dataset(self._job.service, dataset_id, force=force, timeout_s=1)
                except (NotFound, FailedPrecondition, Unavailable) as error:
                    self.kernel.trace("refused", type(error).__name__)
                else:
                    self._job.registered.discard(dataset_id)
        self.done = True


class Job:
    """What the trainers of a run read together."""

    def __init__(
        self,
        oracle: Oracle,
        service: str,
        pipeline: Pipeline,
        policy: ShardingPolicy,
        name: str | None,
        epochs: int,
        credit_bytes: int,
        step_s: float,
        leaves: float = 0,
        preempted: float = 0,
    ) -> None:
        self.service = service
        self.pipeline = pipeline
        self.policy = policy
        self.name = name
        self.epochs = epochs
        self.credit_bytes = credit_bytes
        self.step_s = step_s  # a trainer's time for a block
        self.leaves = leaves  # the chance that it leaves the epoch after a block
        self.preempted = preempted  # that it is told to stop
        self.structure = ""  # of elements
        self.hands_back = name is not None and policy in (
            ShardingPolicy.OFF,
            ShardingPolicy.DYNAMIC,
        )
        self.seen: set[int] = set()  # iterations of which a trainer had an element
        self.registered: set[str] = set()  # ids of datasets
        is_dynamic = policy is ShardingPolicy.DYNAMIC
        self.deliver: Callable[[str, Element], None] = partial(oracle.deliver, dynamic=is_dynamic)

    def dataset_id(self) -> str:
        """Registers it; every trainer does, as in life."""
        shares = self.pipeline.shares
        with DispatcherClient(self.service) as dispatcher:
            ids = [self._register(dispatcher, number) for number in range(len(shares) or 1)]
            if not shares:
                return ids[0]
            request = pb.RegisterDatasetRequest()
            for number, share in enumerate(shares):
                request.mixture.add(name=str(number), dataset_id=ids[number], share=share)
            return dispatcher.call(request, pb.RegisterDatasetResponse).dataset_id

    def _register(self, dispatcher: DispatcherClient, number: int) -> str:
        request = pb.RegisterDatasetRequest(
            sources=self.pipeline.sources(number), structure=self.structure
        )
        if self.pipeline.python:
            request.python = PYTHON
        else:
            request.graph = GRAPH
        dataset_id: str = dispatcher.call(request, pb.RegisterDatasetResponse).dataset_id
        self.registered.add(dataset_id)
        return dataset_id
