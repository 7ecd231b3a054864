"""One run: build the cluster, let it work through the faults, heal them, and require the end."""

from __future__ import annotations

import concurrent.futures.thread
import gc
import shutil
import sys
import tempfile
import traceback
import warnings
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from weakref import WeakKeyDictionary

from forebay.journal.reasons import GOODBYE, SILENT
from forebay.service.client.first_come import DEAD_IF_SILENT_S
from forebay.service.core.state import Iteration
from forebay.service.delivery import bundles
from forebay.service.dispatcher.options import DispatcherOptions
from forebay.service.transport import local
from forebay.service.worker import WorkerOptions

from . import dispatchers
from .cached import CachedTrainer, Caches
from .claimed import ClaimingTrainer, Claims
from .coordinated import Consumer, Gang, Rounds
from .disk import Disk
from .kernel import Kernel, Violation, running
from .network import Network, Weather
from .nodes import Job, Node, Operator, Trainer, WorkerNode
from .oracle import Oracle
from .ordered import Group, Lengths, OrderedTrainer, Skipper, scaled
from .patches import replaced
from .pipeline import STRUCTURE, ChecksumOfSplits
from .saves import Saver, SharedFiles, stood_in_for
from .scenario import Fault, Scenario, draw
from .static import Shards

END_S = 900.0
"""Of virtual time after the faults are healed: by then the job must have finished. The longest
that anything waits is a consumer's timeout."""

STOP_S = 120.0
MAX_IDLE = 2
"""Epochs without a reader that workers keep."""
IDLE_S = 30.0
MEMORY = Path("/dev/shm")

TROUBLE = {"storage trouble", "storage slow", "stop dispatcher", "kill dispatcher", "partition"}
"""Faults during which a dispatcher may not answer a call for seconds."""


@dataclass
class Outcome:
    """What a run came to."""

    digest: str
    steps: int
    seconds: float  # of virtual time
    elements: int
    missing: int
    events: int


class Run:
    """One run of a scenario. A context manager, because it takes place in the product's modules."""

    def __init__(
        self, this: Kernel, scenario: Scenario, directory: Path | None, shared: Path | None
    ) -> None:
        self.kernel = this
        self.scenario = scenario
        self.network = this.network = Network(this, scenario.weather, rejects=scenario.rejects)
        self.oracle = this.oracle = Oracle(this)
        self.storages = dispatchers.Storages(this, directory)
        self.disk = this.disk = None if directory is None else Disk(this, directory)
        hosts = [f"10.0.0.{i}" for i in range(1, 10)]
        self._worker_hosts = hosts[2 : 2 + scenario.workers]
        if scenario.spare:
            self._worker_hosts[-1] = hosts[2]
        self.dispatchers = [
            dispatchers.DispatcherNode(
                this, f"dispatcher-{i}", hosts[0 if scenario.files else i], self._options(i, hosts)
            )
            for i in range(scenario.dispatchers)
        ]
        service = ",".join(f"{d.host}:{d.options.port}" for d in self.dispatchers)
        self.shared = this.shared = None if shared is None else SharedFiles(this, shared)
        self.workers = [
            WorkerNode(
                this, f"worker-{i}", host, self._worker_options(host, service), scenario.pipeline
            )
            for i, host in enumerate(self._worker_hosts)
        ]
        self.job = Job(
            self.oracle, service, scenario.pipeline, scenario.policy,
            "job" if scenario.named else None, scenario.epochs, scenario.credit_bytes,
            scenario.step_s, scenario.leaves, scenario.preempted,
        )  # fmt: skip
        self.shards: Shards | None = None
        places = [hosts[(2 if scenario.neighbours else 5) + i] for i in range(scenario.trainers)]
        self.trainers = self._make_trainers(places)
        self.nodes: list[Node] = [*self.dispatchers, *self.workers, *self.trainers]
        self.readers: list[Node] = [*self.trainers]  # whose end is waited for
        if self.shared is not None:
            self.readers.append(
                Saver(this, "saver", hosts[8], service, self.shared, scenario.saved_splits)
            )
            self.nodes.append(self.readers[-1])
        if scenario.removals:
            self.nodes.append(Operator(this, "operator", hosts[8], self.job, scenario.removals))
        if scenario.skips and isinstance(first := self.trainers[0], OrderedTrainer):
            faults = [partial(self._strike, f) for f in scenario.faults if "dispatcher" in f.kind]
            self.nodes.append(Skipper(this, hosts[8], first, scenario.skips, faults))
        self._healed = False

    def _make_trainers(self, hosts: list[str]) -> list[Trainer]:
        """One on each host, as the scenario has them read."""
        this, job, scenario = self.kernel, self.job, self.scenario
        names = [(f"trainer-{i}", host) for i, host in enumerate(hosts)]
        match scenario.mode:
            case "rounds":
                rounds = Rounds(self.oracle, scenario.trainers)
                gang = Gang(this, rounds, scenario.steps, scenario.together)
                return [Consumer(this, name, host, job, gang) for name, host in names]
            case "cached":
                dynamic = scenario.policy.name == "DYNAMIC"
                caches = Caches(self.oracle, scenario.cache_bytes, dynamic)
                ids = ["a", "a" if scenario.pairs else "b", "c"]
                return [
                    CachedTrainer(
                        this, name, host, job, caches, scenario.steps, trainer_id,
                        ids[: scenario.trainers].count(trainer_id) == 1,
                    )
                    for (name, host), trainer_id in zip(names, ids, strict=False)
                ]  # fmt: skip
            case "ordered":
                group = Group(this, self.oracle, scenario)
                self.oracle.rules += [Lengths(group.order), group.changes]
                job.structure = STRUCTURE
                return [OrderedTrainer(this, name, host, job, group) for name, host in names]
            case "claimed":
                assert scenario.asked is not None
                claims = Claims(self.oracle, scenario.pipeline, scenario.asked)
                self.oracle.rules.append(claims)
                return [
                    ClaimingTrainer(this, name, host, job, claims, scenario) for name, host in names
                ]
            case "static":
                self.shards = Shards(self.oracle, len(self._places()))
                self.oracle.rules.append(self.shards)
                job.deliver = self.shards.deliver
        return [Trainer(this, name, host, job) for name, host in names]

    def _places(self) -> tuple[str, ...]:
        """The list of workers, if there is one."""
        scenario = self.scenario
        if scenario.mode != "static":
            return ()
        port = "%port%" if scenario.any_port else "6000"
        return tuple(f"{host}:{port}" for host in dict.fromkeys(self._worker_hosts))

    def _options(self, i: int, hosts: list[str]) -> DispatcherOptions:
        scenario = self.scenario
        unused_s = scenario.unused_retention_s
        return DispatcherOptions(
            max_idle_iterations=MAX_IDLE,
            finished_retention_ms=scenario.finished_retention_ms,
            unused_retention_hours=unused_s / 3600 if unused_s > 0 else -1,
            job_gc_check_interval_ms=1_000 if scenario.finished_retention_ms < 2_000 else 60_000,
            storage="simulated:",
            insecure=True,
            host=hosts[0 if scenario.files else i],
            port=5050 + i,
            standby=scenario.dispatchers > 1,
            leader_lease_ms=scenario.lease_ms,
            workers=self._places(),
            worker_timeout_ms=scenario.worker_timeout_ms,
            client_timeout_ms=scenario.client_timeout_ms,
            reconnect_grace_ms=scenario.reconnect_grace_ms,
            snapshot_events=scenario.snapshot_events,
            retention_hours=scenario.retention_hours,
        )

    def _worker_options(self, host: str, service: str) -> WorkerOptions:
        return WorkerOptions(
            allow_python=self.scenario.pipeline.python,
            insecure=True,
            processes=2,
            dispatcher=service,
            host=host,
            port=0 if self.scenario.any_port else 6000,
            data_port=7000 if self.scenario.same_ports and not self.scenario.spare else 0,
            output_bytes=self.scenario.output_bytes,
            cross_trainer_cache_size_bytes=self.scenario.cache_bytes,
            save_chunk_bytes=self.scenario.chunk_bytes,
            save_chunk_s=1.0,
            memory_budget=self.scenario.memory_budget,
            kept_pipelines=self.scenario.kept_pipelines,
            expected_s=self.scenario.expected_s,
        )

    # -- the course of a run -----------------------------------------------------------------

    def go(self) -> Outcome:
        this, rng = self.kernel, self.kernel.rng
        this.preemption = self.scenario.preemption
        harmless = {"drain worker", "pause trainer", "kill trainer", "cut connections"}
        self.oracle.hand_back_may_fail = self.scenario.weather.lost > 0 or any(
            fault.kind not in harmless for fault in self.scenario.faults
        )
        nearby = {"pause trainer", "kill trainer", "kill dispatcher", "pause dispatcher"}
        self.oracle.elements_may_not_come_back = (
            self.scenario.weather.lost > 0
            or self.scenario.weather.late > 0
            or any(fault.kind not in nearby for fault in self.scenario.faults)
        )
        cuts = {"partition", "cut connections"}
        self.oracle.readers_may_be_cut_off = self.scenario.weather.lost > 0 or any(
            fault.kind in cuts for fault in self.scenario.faults
        )
        for node in self.nodes:
            this.at(rng.choice([0, rng.uniform(0, self.scenario.work_s / 2)]), node.start)
        for fault in self.scenario.faults:
            this.at(fault.at_s, this.after_steps, fault.steps, lambda f=fault: self._strike(f))
        healing_s = max((f.at_s + f.for_s for f in self.scenario.faults), default=0.0)
        this.at(healing_s + 0.1, self._heal)
        if not this.run(self._finished, healing_s + END_S + 20 * self.scenario.work_s):
            waiting = [node.name for node in self.readers if not node.done]
            raise Violation(f"{waiting} did not come to the end of the job:\n{self._where()}")
        self._heal()
        if not this.run(self._few_are_idle, IDLE_S):
            raise Violation(f"epochs that nobody reads go on:\n{self._idle()}")
        if not this.run(self._all_is_read, IDLE_S):
            raise Violation(f"what was handed back was given to nobody:\n{self._unread()}")
        missing = self._account()
        self._stop()
        self._examine()
        return Outcome(
            this.digest(), this.steps, this.now, self.oracle.element_count, missing,
            len(self.oracle.records),
        )  # fmt: skip

    def _finished(self) -> bool:
        return all(reader.done for reader in self.readers)

    def _idle(self) -> list[Iteration]:
        """The epochs of the job that nobody reads, and that workers still have tasks of."""
        iterations = self.oracle.state.iterations.values()
        return [i for i in iterations if i.tasks and not i.consumers]

    def _unread(self) -> list[int]:
        """The iterations that did not finish, though all of their trainers left in order and came
        again, or came to the end."""
        scenario = self.scenario
        is_shared = scenario.mode in ("shared", "save") and scenario.named
        partly = scenario.pipeline.endless or scenario.leaves or scenario.removals
        harmed = scenario.faults or self.oracle.elements_may_not_come_back or self.oracle.failed
        if partly or harmed or not is_shared:
            return []
        return sorted(self.job.seen - self.oracle.books.finished)

    def _all_is_read(self) -> bool:
        return not self._unread()

    def _few_are_idle(self) -> bool:
        return len(self._idle()) <= MAX_IDLE

    def _account(self) -> int:
        scenario, pipeline = self.scenario, self.scenario.pipeline
        most = scenario.credit_bytes // 512 + 2  # blocks, with one worker's process
        on_their_way = most * pipeline.block_elements * sum(len(w.processes) for w in self.workers)
        books = self.oracle.books
        unheard = set()  # workers that left, perhaps when nobody was there to say goodbye to
        if {"stop dispatcher", "kill dispatcher"} & {fault.kind for fault in scenario.faults}:
            leaving = self.oracle.leaving_uids
            unheard = {worker for worker, uid in books.workers.items() if uid in leaving}
        for node, lost in ((self.workers, books.lost_workers), (self.trainers, books.left)):
            if scenario.weather.lost == 0 and not any(n.disturbed for n in self.nodes):
                # A late heartbeat may make a worker known again that has left, for a while.
                fine = {GOODBYE, "another process took its address"}
                if self.oracle.failed:  # splits that a pipeline may not skip any more
                    fine |= {why for why in lost.values() if why.startswith("its read failed: ")}
                # A goodbye found nobody for longer than it waits for that.
                if TROUBLE & {fault.kind for fault in scenario.faults}:
                    fine |= {why for why in lost.values() if "took its place in the ordered" in why}
                    if scenario.mode in ("claimed", "ordered"):
                        fine.add(SILENT)
                reasons = {why for who, why in lost.items() if who not in unheard} - fine
                if any(not reason.endswith("was removed") for reason in reasons):
                    raise Violation(f"one of {node} was given up without a cause: {reasons}")
        account = partial(self.oracle.account, dynamic=scenario.policy.name == "DYNAMIC")
        return sum(
            (account if self.shards is None else self.shards.account)(
                iteration_id, wanted=pipeline.places(), on_their_way=on_their_way
            )
            for iteration_id in sorted(self.job.seen & books.finished)
            if scenario.named or iteration_id not in self._abandoned()
        )

    def _abandoned(self) -> set[int]:
        """Anonymous iterations whose only trainer did not read them to their end."""
        books = self.oracle.books
        return {
            iteration
            for consumer, iteration in books.consumers.items()
            if books.left.get(consumer) != GOODBYE
        }

    def _stop(self) -> None:
        """Everybody ends in an orderly way."""
        for node in self.nodes:
            node.done = True  # not to be started again
        for worker in self.workers:
            worker.stop(drain=self.kernel.rng.random() < 0.5)
        if not self.kernel.run(lambda: not any(w.alive for w in self.workers), STOP_S):
            raise Violation(f"a worker does not stop:\n{self._where()}")
        for dispatcher in self.dispatchers:
            dispatcher.terminate()
        if not self.kernel.run(lambda: not any(d.alive for d in self.dispatchers), STOP_S):
            raise Violation(f"a dispatcher does not stop:\n{self._where()}")

    def _examine(self) -> None:
        examiner = Examiner(self.kernel, "examiner", self.dispatchers[0].host, self.storages)
        examiner.start()
        if not self.kernel.run(lambda: examiner.done, STOP_S):
            raise Violation("the storage cannot be read")

    def _where(self) -> str:
        """Who is where, for the message of a run that does not end."""
        lines = []
        for node in self.nodes:
            lines.append(f"{node.name}: {'alive' if node.alive else 'dead'}")
            if node.alive and node.process is not None:
                lines += [f"  {thread.name}: {thread.where()}" for thread in node.process.threads]
        return "\n".join(lines)

    # -- faults ------------------------------------------------------------------------------

    def _strike(self, fault: Fault) -> None:
        if self._healed:
            return
        what, _, whom = fault.kind.partition(" ")
        rng, this = self.kernel.rng, self.kernel
        this.trace("fault", fault.kind)
        nodes: dict[str, Iterable[Node]] = {
            "dispatcher": self.dispatchers, "worker": self.workers, "trainer": self.trainers,
        }  # fmt: skip
        node = rng.choice(list(nodes.get(whom, self.nodes)))
        match fault.kind:
            case "power failure":
                self._power_failure(fault.for_s)
            case "partition":
                self._partition(fault.for_s)
            case "cut connections":
                for stream in [s for s in self.network.streams if rng.random() < 0.7]:
                    stream.reset()
            case "storage trouble":
                self._trouble(True)
                this.at(fault.for_s, self._trouble, False)
            case "storage slow":
                self._slow(10 ** rng.uniform(-2, 0.3))
                this.at(fault.for_s, self._slow, 0.0)
            case "isolate dispatcher":
                assert isinstance(node, dispatchers.DispatcherNode)
                self._isolate(node, fault.for_s)
            case "storage emptied":
                self._mount(False)
                this.at(fault.for_s, self._mount, True)
            case "stop dispatcher":
                assert isinstance(node, dispatchers.DispatcherNode)
                node.terminate()
            case "drain worker":
                assert isinstance(node, WorkerNode)
                node.stop(drain=True)
            case "freeze worker":
                assert isinstance(node, WorkerNode)
                if fault.for_s > DEAD_IF_SILENT_S:
                    self.oracle.mute_uids.add(node.uid)
                node.pause()
                this.at(fault.for_s, node.resume)
            case _ if what == "kill":
                node.kill()
                this.at(fault.for_s, node.start)
            case _:
                node.pause()
                if isinstance(node, dispatchers.DispatcherNode):
                    node.fall_silent()
                this.at(fault.for_s, node.resume)

    def _power_failure(self, for_s: float) -> None:
        """Of the host of the first dispatcher, and of the storage's disk."""
        host = self.dispatchers[0].host
        for node in self.nodes:
            if node.host == host:
                node.resume()
                node.kill(vanish=True)
                self.kernel.at(for_s, node.start)
        if self.disk is not None:
            self.disk.lose_power()

    def _partition(self, for_s: float) -> None:
        rng = self.kernel.rng
        hosts = list(dict.fromkeys(node.host for node in self.nodes))
        lonely = rng.choice(hosts)
        others = rng.choice([hosts, [rng.choice(hosts)]])
        for other in others:
            self.network.cut(lonely, other)
        for node in self.nodes:
            node.disturbed |= for_s > 1 and (node.host == lonely or node.host in others)
        for dispatcher in self.dispatchers:
            dispatcher.fall_silent()
        self.kernel.at(for_s, self.network.heal)

    def _isolate(self, dispatcher: dispatchers.DispatcherNode, for_s: float) -> None:
        """From the storage, which notices, and from the other dispatchers; but not from members."""
        self.storages.remote.cut_off = dispatcher.host
        self.storages.remote.hang_up()
        for other in self.dispatchers:
            self.network.cut(dispatcher.host, other.host)
        dispatcher.disturbed = True
        self.kernel.at(for_s, self._reconnect)

    def _reconnect(self) -> None:
        self.storages.remote.cut_off = ""
        self.network.heal()

    def _trouble(self, begins: bool) -> None:
        rng = self.kernel.rng
        if self.shared is not None:
            self.shared.full = rng.choice([0, 0, 0.1, 1]) if begins else 0
        if self.disk is not None:
            self.disk.trouble = rng.choice([0.05, 1]) if begins else 0
        else:
            self.storages.remote.down = begins and rng.random() < 0.4
            self.storages.remote.lost = rng.choice([0.05, 0.5]) if begins else 0
            self.storages.remote.hang_up()

    def _mount(self, whole: bool) -> None:
        """Have the dispatchers restarted on the storage, or on an empty one in its place.

        While that lasts nobody begins, since who begins there stays there.
        """
        if self.storages.emptied is not whole:
            return
        self.storages.emptied = not whole
        for node in self.nodes:
            if isinstance(node, dispatchers.DispatcherNode):
                node.kill()
            else:
                node.held = not whole
                if not node.began:
                    node.kill()
        for node in self.nodes:
            node.start()

    def _slow(self, more_s: float) -> None:
        if self.disk is not None:
            self.disk.stall_s = more_s / 10
        else:
            self.storages.remote.delay_s = max(self.storages.remote.delay_s, more_s / 5) \
                if more_s else 1e-3  # fmt: skip

    def _heal(self) -> None:
        """From now on nothing goes wrong any more."""
        if self._healed:
            return
        self._healed = True
        self.kernel.trace("heal")
        calm = self.network.weather
        self.network.weather = Weather(calm.delay_s, pipe_bytes=calm.pipe_bytes)
        self._reconnect()
        self._trouble(False)
        self._slow(0)
        self._mount(True)
        for node in self.nodes:
            node.resume()
            node.start()


class Examiner(Node):
    """Reads the storage when everybody else has ended."""

    def __init__(self, this: Kernel, name: str, host: str, storages: dispatchers.Storages) -> None:
        super().__init__(this, name, host)
        self._storages = storages

    def main(self) -> None:
        dispatchers.examine(self._storages)
        self.done = True


def simulate(seed: int, *, scenario: Scenario | None = None, verbose: bool = False) -> Outcome:
    """Run a seed. Raises Violation. To be called within `patches.simulated`."""
    gc.disable()  # what it would finalize, and when, no seed rules
    gc.freeze()
    try:
        return _simulate(seed, scenario or draw(seed), verbose)
    except Violation as violation:
        violation.add_note("".join(traceback.format_tb(violation.__traceback__)))
        broken = violation.with_traceback(None)  # whose frames keep all of the run
    finally:
        # All of the run goes now, or the next `freeze` keeps it: hundreds of tasks, and each later
        # asyncio.run of this process looks through them all.
        with _quiet():
            for _ in range(2):  # coroutines that are finalized by the first leave cycles
                gc.collect()
        gc.enable()
    raise broken


def _simulate(seed: int, scenario: Scenario, verbose: bool) -> Outcome:
    with prepared(seed, scenario, verbose) as run:
        return run.go()


@contextmanager
def prepared(seed: int, scenario: Scenario, verbose: bool = False) -> Iterator[Run]:
    """The cluster of a scenario, in which nothing runs yet. To be used within
    `patches.simulated`."""
    this = Kernel(seed, verbose=verbose)
    with ExitStack() as stack:
        directory = _make_directory(stack) if scenario.files else None
        shared = _make_directory(stack) if scenario.mode == "save" else None
        stack.enter_context(stood_in_for())
        stack.enter_context(replaced(bundles, Checksum=ChecksumOfSplits))
        # Threads and workers that are killed stay in what Python and Forebay know of a process's.
        stack.enter_context(
            replaced(concurrent.futures.thread, _threads_queues=WeakKeyDictionary())
        )
        stack.enter_context(replaced(local, running={}))
        stack.enter_context(scaled(scenario))
        stack.enter_context(running(this))
        run = Run(this, scenario, directory, shared)
        stack.enter_context(dispatchers.on(run.storages))
        stack.callback(_end, run)
        yield run


def _make_directory(stack: ExitStack) -> Path:
    place = MEMORY if MEMORY.is_dir() else None
    directory = Path(tempfile.mkdtemp(prefix="forebay-simulation-", dir=place))
    stack.callback(shutil.rmtree, directory)
    return directory


def _end(run: Run) -> None:
    """Take the run apart."""
    with _quiet():
        for node in run.nodes:
            for process in node.processes:
                process.kill()
        if run.disk is not None:
            run.disk.close()
        run.kernel.close()  # before the loops: their threads are in it
        for dispatcher in run.dispatchers:
            for loop in dispatcher.loops:
                loop.abandon()
    sys.set_asyncgen_hooks(None, None)  # each loop set its own, and put back another's


@contextmanager
def _quiet() -> Iterator[None]:
    """What generators and coroutines say when a run is taken apart means nothing."""
    hook = sys.unraisablehook
    sys.unraisablehook = lambda _: None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        sys.unraisablehook = hook
