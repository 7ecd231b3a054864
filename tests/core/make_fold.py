"""Makes golden folds: `python -m tests.core.make_fold NAME`, into golden/folds/NAME-….json.

A golden fold has the events that a version wrote, a snapshot in their midst, and the state that
they lead to. From the first release on it is never made again: every later version comes to that
state, from the snapshot and from the first event. Make another one when events say something that
none of these says.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from forebay.journal.codec import FORMAT, encode
from forebay.journal.datasets import SHARES
from forebay.journal.proto import events_pb2 as ev
from forebay.journal.snapshots import encode_snapshot
from forebay.service.core import commands as c
from forebay.service.core.datasets import mixture
from forebay.service.core.encoding import encode_state
from forebay.service.core.machine import apply, decide
from forebay.service.core.state import State

from .make_golden import described

FOLDS = Path(__file__).parent / "golden" / "folds"


class Cluster:
    """Commands, decided and applied; `events` keeps what they led to."""

    def __init__(self) -> None:
        self.state = State()
        self.events: list[ev.Event] = []
        self._times = itertools.count(1_000, 10)

    def do(self, command: c.Command) -> Any:
        decided = decide(self.state, command, next(self._times))
        for event in decided.events:
            self.take(event)
        return decided.answer

    def take(self, event: ev.Event) -> None:
        self.events.append(event)
        apply(self.state, event)

    def elect(self, term: int, *workers: str) -> None:
        self.do(
            c.ElectLeader(
                term=term, address=f"d:{term}", version="1", journal_id="golden",
                worker_addresses=workers,
            )
        )  # fmt: skip

    def worker(self, uid: int, address: str = "", stock: bool = False) -> int:
        where = address or f"w:{uid}"
        stock = stock or uid == 9
        return self.do(c.RegisterWorker(address=where, uid=uid, tags=("a",), stock=stock))

    def task(self, worker_id: int) -> int:
        return max(self.state.workers[worker_id].tasks)

    def job(
        self,
        dataset: str,
        name: str = "",
        sharding: int = ev.DYNAMIC,
        num_consumers: int | None = None,
    ) -> int:
        command = c.GetOrCreateJob(
            dataset_id=dataset, name=name, sharding=sharding, num_consumers=num_consumers
        )
        return self.do(command)

    def join(
        self, job_id: int, epoch: int = 0, caller: str = "t", index: int | None = None
    ) -> ev.ConsumerJoined:
        request = (caller, 1 + epoch)
        return self.do(
            c.JoinIteration(request=request, job_id=job_id, epoch=epoch, consumer_index=index)
        )

    def lease(self, task_id: int, want: int, number: int, pass_number: int = 0, **more: Any) -> Any:
        request = (f"task/{task_id}/0", number)
        return self.do(
            c.LeaseSplits(
                request=request, task_id=task_id, source=0, pass_number=pass_number, want=want,
                **more,
            )
        )  # fmt: skip

    def report(self, task_id: int, number: int, **what: Any) -> None:
        """What was begun and what is returned, where no further splits are wanted."""
        self.do(c.LeaseSplits(request=(f"task/{task_id}/0", number), task_id=task_id, **what))

    def leave(self, consumer_id: int) -> None:
        self.do(c.LeaveIteration(consumer_id=consumer_id, reason="it said goodbye"))


def live(cluster: Cluster) -> None:
    """Something of everything that a cluster goes through."""
    do, count = cluster.do, ev.SplitSource
    cluster.elect(1)
    for dataset_id, sources in (
        ("plain", [count(count=100)]),
        ("zipped", [count(count=50), count(count=40, leased_with=0)]),
        ("", [count(endless=ev.Endless())]),
    ):
        definition = ev.DatasetDefinition(sources=sources, metadata=b"m", structure="s")
        do(c.RegisterDataset(dataset_id=dataset_id, definition=definition))
    do(c.DecideCompression(dataset_id="plain", disable=True))
    one, two = cluster.worker(1), cluster.worker(2)
    shared = cluster.job("plain", "shared")
    reader = cluster.join(shared)
    first, second = cluster.task(one), cluster.task(two)
    a, b = cluster.lease(first, 9, 1), cluster.lease(second, 9, 1)
    cluster.report(first, 2, begun=(a.lease_id,))
    cluster.report(second, 2, returned=((b.lease_id, 4),))
    c2, d2 = cluster.lease(first, 5, 3), cluster.lease(second, 30, 3)
    do(c.LoseWorker(worker_id=one, reason="no sign of life"))  # with c2, and comes back
    one = cluster.worker(1)
    cluster.report(first, 4, begun=(c2.lease_id,))
    e = cluster.lease(first, 2, 5, pass_number=1)
    cluster.report(second, 4, returned=((d2.lease_id, 3),))  # of the pass before
    cluster.lease(first, 9, 6, pass_number=1, or_later=True, begun=(e.lease_id,))
    do(c.LoseWorker(worker_id=two, reason="it said goodbye", left=True))
    two = cluster.worker(3, "w:1")  # in the place of the first
    zipped = cluster.join(cluster.job("zipped"), caller="z")
    cluster.lease(cluster.task(two), 7, 1)
    stock = cluster.worker(9)
    singly = cluster.join(cluster.job("zipped", "singly"), caller="s")
    for source in (0, 1, 1):
        do(c.GetSplit(iteration_id=singly.iteration_id, pass_number=0, source=source))
    whole = cluster.join(cluster.job("plain", "whole", ev.OFF), caller="w")
    for worker_id in (two, stock):
        do(c.CompleteTask(task_id=cluster.task(worker_id)))
    cluster.leave(whole.consumer_id)
    do(c.CollectIteration(iteration_id=whole.iteration_id))
    epoch = cluster.join(shared, 1)
    cluster.lease(cluster.task(two), 3, 1)
    cluster.leave(epoch.consumer_id)
    do(c.CollectIteration(iteration_id=epoch.iteration_id))  # paused
    cluster.join(shared, 1, "again")
    cluster.leave(zipped.consumer_id)
    do(c.LoseWorker(worker_id=two, reason="no sign of life"))
    drains = c.RegisterWorker(address="w:5", uid=5, draining=True, no_python=True)
    cluster.worker(5)
    do(c.LoseWorker(worker_id=do(drains), reason="no sign of life"))
    do(drains)
    cluster.leave(reader.consumer_id)
    cluster.elect(2)


def repaired(cluster: Cluster) -> None:
    """A journal that a repair has cut, and the leader after it."""
    live(cluster)
    cluster.worker(4)
    cut = ev.LeaderElected(term=3, format=FORMAT, journal_id="cut", after_repair=True)
    cluster.take(ev.Event(time_ms=5_000, leader_elected=cut))
    cluster.elect(4)
    cluster.worker(4)
    cluster.join(cluster.job("plain", "shared"), 1, "later")


def divided(cluster: Cluster) -> None:
    """Static sharding, before and after a change of the list of workers."""
    live(cluster)
    for worker_id in list(cluster.state.workers):
        cluster.do(c.LoseWorker(worker_id=worker_id, reason="it said goodbye", left=True))
    cluster.elect(3, "h:%port%", "h:%port%", "h:1")
    ends = cluster.worker(31, "h:1")
    read = cluster.join(cluster.job("plain", "divided", ev.FILE), caller="d")
    goes, stays = cluster.worker(32, "h:2"), cluster.worker(33, "h:3")
    for worker_id in (ends, stays):
        cluster.do(c.CompleteTask(task_id=cluster.task(worker_id)))
    cluster.do(c.LoseWorker(worker_id=goes, reason="no sign of life"))
    cluster.do(c.CompleteTask(task_id=cluster.task(cluster.worker(34, "h:4"))))
    cluster.leave(read.consumer_id)
    cluster.join(cluster.job("plain", "again", ev.HINT), caller="e")
    cluster.elect(4, "h:3", "h:1")
    cluster.join(cluster.job("plain", "again", ev.HINT), caller="f")
    cluster.do(c.CompleteTask(task_id=cluster.task(stays)))


def coordinated(cluster: Cluster) -> None:
    """Coordinated reads: workers that join, are lost, come back and are done without."""
    live(cluster)
    one, two = cluster.worker(11, stock=True), cluster.worker(12, stock=True)
    job = cluster.job("plain", "rounds", num_consumers=2)
    consumers = [cluster.join(job, caller=f"r{i}").consumer_id for i in range(2)]

    def report(index: int, current: int, blocked: int | None = None) -> None:
        cluster.do(
            c.ReportRound(
                consumer_id=consumers[index], current_round=current, blocked_round=blocked
            )
        )

    first, second = cluster.task(one), cluster.task(two)
    cluster.worker(13, stock=True)
    report(0, 3)
    report(1, 6)
    report(0, 4, 8)
    cluster.elect(3)
    report(1, 7, 8)
    cluster.do(c.LoseWorker(worker_id=one, reason="no sign of life"))
    cluster.do(c.RemoveTask(task_id=first, round=9))
    cluster.do(c.LoseWorker(worker_id=two, reason="no sign of life"))
    cluster.worker(14, "w:12", stock=True)
    assert cluster.state.tasks[second].starting_round == 0
    cluster.worker(15, "w:13", stock=True)
    late = cluster.worker(16, stock=True)
    report(1, 20)
    cluster.do(c.LoseWorker(worker_id=late, reason="it said goodbye", left=True))
    cluster.worker(17, stock=True)
    report(1, 21)
    report(0, 20, 22)
    cluster.leave(consumers[1])
    other = cluster.join(cluster.job("plain", "whole rounds", ev.OFF, num_consumers=1), caller="o")
    cluster.leave(other.consumer_id)
    cluster.worker(18)
    cluster.do(c.RegisterWorker(address="w:18", uid=18, draining=True))
    again = cluster.job("plain", "started again", num_consumers=2)
    for caller, index in (("p", 0), ("q", 1), ("s", 1)):
        cluster.join(again, caller=caller, index=index)


def begun_rounds(cluster: Cluster) -> None:
    """A coordinated read that consumers with indices have begun, and one has left."""
    cluster.elect(1)
    definition = ev.DatasetDefinition(
        sources=[ev.SplitSource(count=100)], metadata=b"m", structure="s"
    )
    cluster.do(c.RegisterDataset(dataset_id="plain", definition=definition))
    one = cluster.worker(1)
    rounds = cluster.job("plain", "rounds", ev.OFF, num_consumers=2)
    there = [cluster.join(rounds, caller=f"r{i}", index=i).consumer_id for i in range(2)]
    for consumer_id in there:
        cluster.do(c.ReportRound(consumer_id=consumer_id, current_round=0))
    for number in range(4):  # so that the snapshot, in the midst of all, has them begun
        cluster.join(cluster.job("plain", f"other {number}"), caller=f"o{number}")
        cluster.lease(cluster.task(one), 5, 1)
    cluster.leave(there[1])
    cluster.elect(2)


def rejoined(cluster: Cluster) -> None:
    """Consumers of coordinated reads that come back: before they began, after, and once gone."""
    live(cluster)
    cluster.worker(71)
    for name, sharding in (("rounds", ev.OFF), ("leased rounds", ev.DYNAMIC)):
        job = cluster.job("plain", name, sharding, num_consumers=2)
        for number, (index, begins, leaves) in enumerate(
            (
                *((0, True, False), (1, False, False), (1, True, False)),
                *((0, True, True), (0, False, False), (1, True, False), (0, True, True)),
            )
        ):
            joined = cluster.join(job, caller=f"{name} {number}", index=index)
            if begins:
                cluster.do(c.ReportRound(consumer_id=joined.consumer_id, current_round=0))
            if leaves:
                cluster.leave(joined.consumer_id)
    cluster.elect(3)


def removed(cluster: Cluster) -> None:
    """Epochs of which a summary is left, and datasets and jobs that go."""
    live(cluster)
    for dataset_id, blob in (("goes", "one"), ("stays", "two"), ("read", "three")):
        graph = ev.TfDataGraph(blob=blob)
        definition = ev.DatasetDefinition(sources=[ev.SplitSource(count=9)], tf_data_graph=graph)
        register = c.RegisterDataset(
            dataset_id=dataset_id, definition=definition, graph_bytes=len(blob), renews=True
        )
        cluster.do(register)
        cluster.do(register)
    worker_id = cluster.worker(41)
    for dataset_id in ("goes", "stays"):
        job_id = cluster.job(dataset_id, f"job of {dataset_id}", ev.OFF)
        for epoch in (0, 1, 3):
            joined = cluster.join(job_id, epoch, dataset_id)
            for other in list(cluster.state.iterations[joined.iteration_id].tasks):
                cluster.do(c.CompleteTask(task_id=other))
            cluster.leave(joined.consumer_id)
            cluster.do(c.CollectIteration(iteration_id=joined.iteration_id))
    cluster.join(job_id, 1, "late")
    cluster.do(c.RemoveDataset(dataset_id="goes"))
    cluster.do(c.ForgetBlob(blob="one"))
    unread = cluster.join(cluster.job("read", "given up"), caller="unread")
    cluster.leave(unread.consumer_id)
    cluster.do(c.RemoveJob(job_id=cluster.state.job_by_name["given up"]))
    cluster.join(cluster.job("read", "by force"), caller="force")
    cluster.lease(cluster.task(worker_id), 3, 1)
    cluster.elect(3)
    cluster.do(c.RemoveDataset(dataset_id="read", force=True))


def saved(cluster: Cluster) -> None:
    """Saves: by both kinds of workers, lost in between, finished and failed."""
    do = cluster.do
    cluster.elect(1)
    definition = ev.DatasetDefinition(sources=[ev.SplitSource(count=10)])

    def start(path: str, is_gone: bool = False) -> int:
        command = c.StartSave(
            path=path, definition=definition, metadata=b"m", prepared=f"{path}.p", is_gone=is_gone
        )
        return do(command).save_id

    def assign(worker_id: int) -> None:
        do(c.AssignStream(worker_id=worker_id, most=3))

    def split(path: str, stream: int, address: str, pass_number: int = 0) -> None:
        do(
            c.AssignSplit(
                path=path, stream=stream, source=0, pass_number=pass_number, worker_address=address
            )
        )

    def complete(save_id: int, stream: int, worker: int) -> None:
        do(
            c.CompleteStream(
                save_id=save_id, stream=stream, worker_address=f"w:{worker}", worker_uid=worker
            )
        )

    def commit(save_id: int, stream: int, chunk: int, worker: int) -> None:
        do(
            c.CommitChunk(
                save_id=save_id, stream=stream, worker_uid=worker, chunk=chunk, elements=5,
                file=f"{worker}-{chunk}",
            )
        )  # fmt: skip

    stock = [cluster.worker(uid, stock=True) for uid in (1, 2)]
    singly = start("/singly")
    for worker_id in stock:
        assign(worker_id)
    for stream in (0, 1, 0, 0):
        split("/singly", stream, f"w:{stream + 1}")
    cluster.elect(2)
    split("/singly", 1, "w:2", 1)
    do(c.LoseWorker(worker_id=stock[0], reason="no sign of life"))
    third = cluster.worker(3, stock=True)
    assign(third)
    split("/singly", 0, "w:3", 1)
    complete(singly, 1, 2)
    one, two = cluster.worker(4), cluster.worker(5)
    ranged = start("/ranged")
    for worker_id in (one, two):
        assign(worker_id)
    commit(ranged, 0, 0, 4)
    commit(ranged, 0, 1, 4)
    complete(ranged, 0, 4)
    do(c.LoseWorker(worker_id=two, reason="no sign of life"))
    assign(one)
    commit(ranged, 1, 0, 4)
    failed = start("/failed")
    assign(one)
    do(c.FailSave(save_id=failed, code="INTERNAL", message="why", stream=0, worker_uid=4))
    again = start("/failed", is_gone=True)
    assign(third)
    complete(again, 0, 3)
    start("/waiting")


def loaded(cluster: Cluster) -> None:
    """What is read while it is saved."""
    live(cluster)
    source = ev.SplitSource(saved_chunks=ev.SavedChunks(path="/save"))
    definition = ev.DatasetDefinition(sources=[source])
    cluster.do(c.RegisterDataset(dataset_id="loaded", definition=definition))
    cluster.worker(61)
    ours, stock = (cluster.join(cluster.job("loaded"), caller=f"l{i}") for i in range(2))

    def find(joined: ev.ConsumerJoined, *names: str, complete: bool = False) -> None:
        cluster.do(
            c.FindSplits(iteration_id=joined.iteration_id, source=0, names=names, complete=complete)
        )

    def get() -> None:
        cluster.do(c.GetSplit(iteration_id=stock.iteration_id, pass_number=0, source=0))

    task = min(cluster.state.iterations[ours.iteration_id].tasks)
    find(ours, "chunk_0_0_5", "chunk_1_0_5")
    find(stock, "chunk_0_0_5")
    cluster.lease(task, 1, 1)
    get()
    cluster.elect(3)
    get()
    find(ours, "chunk_0_1_3", complete=True)
    cluster.lease(task, 9, 2)
    cluster.lease(task, 9, 3, pass_number=1)
    find(stock, "chunk_1_0_5", "chunk_0_1_3")
    get()


def python(cluster: Cluster) -> None:
    """A Python dataset, which a stock worker gets no task of, and its end."""
    live(cluster)
    function = ev.PythonFunction(blob="python.3-1", fingerprint="same")
    definition = ev.DatasetDefinition(
        sources=[ev.SplitSource(count=20)], python_function=function, structure="s"
    )
    dataset_id = cluster.do(c.RegisterDataset(dataset_id="", definition=definition, graph_bytes=7))
    cluster.do(c.RegisterDataset(dataset_id="named", definition=definition, graph_bytes=7))
    cluster.worker(51, stock=True)
    reader = cluster.join(cluster.job("named", "of python"), caller="p")
    worker_id = cluster.worker(52)
    cluster.worker(53, stock=True)
    task_id = cluster.task(worker_id)
    cluster.lease(task_id, 3, 1)
    for number in (1, 2):
        cluster.do(
            c.SkipSplit(
                request=(f"task/{task_id}/skips", number), task_id=task_id, split=number,
                element=7, reason="why", limit=5,
            )
        )  # fmt: skip
    cluster.elect(3)
    cluster.do(c.RemoveDataset(dataset_id=dataset_id))
    cluster.leave(reader.consumer_id)


def ordered(cluster: Cluster) -> None:
    """Ordered reads: a group whose workers come and go, and another that begins where it was."""
    live(cluster)
    order = ev.OrderSpec(seed=-3, shuffle=True, cycle_length=4, block_length=2, bundle_splits=30)

    def join(index: int, of: int, start: int, name: str = "ordered") -> ev.ConsumerJoined:
        member = ev.GroupMember(index=index, consumers=of, start_position=start, batch_size=8)
        return cluster.do(
            c.JoinJob(
                request=(f"{name} {index} of {of}", 1), dataset_id="plain", name=name,
                sharding=ev.OFF, order=order, epoch=0, member=member,
            )
        )  # fmt: skip

    def learn(joined: ev.ConsumerJoined, **lengths: int) -> None:
        bundles = tuple(int(name[1:]) for name in lengths)
        cluster.do(
            c.LearnLengths(
                consumer_id=joined.consumer_id, bundles=bundles, lengths=tuple(lengths.values())
            )
        )

    lost, drains = cluster.worker(81), cluster.worker(82)
    group = [join(index, 2, 0) for index in range(2)]
    learn(group[0], b2=30, b0=29)
    cluster.worker(83)
    cluster.do(c.LoseWorker(worker_id=lost, reason="no sign of life"))
    cluster.worker(81)
    cluster.do(c.RegisterWorker(address="w:82", uid=82, draining=True))
    cluster.do(c.LoseWorker(worker_id=drains, reason="it said goodbye", left=True))
    learn(group[1], b2=30, b3=10)
    job_id = cluster.state.iterations[group[0].iteration_id].job_id
    for checksums in ((1, 2, 3), (1, 5, 3)):
        cluster.do(c.CheckBundles(job_id=job_id, bundles=(0, 2, 300), checksums=checksums))
    for joined in group:
        cluster.leave(joined.consumer_id)
    cluster.leave(join(0, 1, 0, "").consumer_id)
    cluster.elect(3)
    join(2, 3, 1600)


def claimed(cluster: Cluster) -> None:
    """Reads at least once: consumers that leave and are given up, whose claims others take over."""
    live(cluster)
    order = ev.OrderSpec(seed=5, shuffle=True, cycle_length=1, block_length=1, claimed=True)

    def join(caller: str, epoch: int = 0) -> ev.ConsumerJoined:
        return cluster.do(
            c.JoinJob(
                request=(caller, 1), dataset_id="plain", name="claimed", sharding=ev.OFF,
                order=order, epoch=epoch,
            )
        )  # fmt: skip

    def claim(joined: ev.ConsumerJoined, most: int, *done: int, **cursors: int) -> None:
        cluster.do(
            c.ClaimBundles(
                consumer_id=joined.consumer_id, most=most, done=done,
                places=tuple(int(name[1:]) for name in cursors), cursors=tuple(cursors.values()),
            )
        )  # fmt: skip

    cluster.worker(91)
    one, other, third = (join(f"claims {number}") for number in range(3))
    claim(one, 4)
    claim(other, 2)
    claim(one, 4, 0, 2, p1=3)
    cluster.leave(one.consumer_id)
    cluster.elect(3)
    claim(other, 3, 4, p5=1)
    claim(third, 1)
    cluster.leave(other.consumer_id)
    join("claims 3", 1)


def moved(cluster: Cluster) -> None:
    """An ordered read whose consumers report how far they are: one leaves, one is given up."""
    live(cluster)
    order = ev.OrderSpec(seed=4, cycle_length=2, block_length=3, bundle_splits=10)
    cluster.worker(86)
    group = [
        cluster.do(
            c.JoinJob(
                request=(f"moved {index}", 1), dataset_id="plain", name="moved", sharding=ev.OFF,
                order=order, epoch=0,
                member=ev.GroupMember(
                    index=index, consumers=3, batch_size=4, start_step=2, drop_remainder=True
                ),
            )
        )
        for index in range(3)
    ]  # fmt: skip

    def move(*positions: int) -> None:
        found = {j.consumer_id: at for j, at in zip(group, positions, strict=True)}
        cluster.do(c.MoveConsumers(iteration_id=group[0].iteration_id, positions=found))

    move(36, 48, 24)
    cluster.elect(3)
    move(60, 48, 24)
    leave = c.LeaveIteration(consumer_id=group[0].consumer_id, reason="goodbye", position=72)
    cluster.do(leave)
    cluster.do(c.LeaveIteration(consumer_id=group[1].consumer_id, reason="no sign of life"))


def mixed(cluster: Cluster) -> None:
    """A mixture: its weights change while it is read, and steps are left out once nobody does."""
    live(cluster)
    definition = ev.DatasetDefinition(
        sources=[ev.SplitSource(count=40)], metadata=b"m", structure="s"
    )
    cluster.do(c.RegisterDataset(dataset_id="more", definition=definition))
    shares = {"plain": SHARES // 4, "more": SHARES // 4 * 3}
    sources = [ev.MixtureSource(name=f"of {n}", dataset_id=n, share=s) for n, s in shares.items()]
    mix = mixture(cluster.state, sources)
    cluster.do(c.RegisterDataset(dataset_id="mix", definition=mix))
    cluster.worker(87)
    order = ev.OrderSpec(seed=4, cycle_length=2, block_length=3)
    member = ev.GroupMember(consumers=1, batch_size=4)
    joined = cluster.do(
        c.JoinJob(
            request=("mixed", 1), dataset_id="mix", name="mixed", sharding=ev.OFF, order=order,
            epoch=0, member=member, schedules=True,
        )
    )  # fmt: skip
    learn = c.LearnLengths(consumer_id=joined.consumer_id, bundles=(1, 99, 100), lengths=(3, 4, 5))
    cluster.do(learn)
    job_id = cluster.state.iterations[joined.iteration_id].job_id
    half = ev.ScheduleChange(place=40, shares=[SHARES // 2] * 2, reason="more", who="somebody")
    cluster.do(c.ChangeSchedule(job_id=job_id, change=half, readers=(joined.consumer_id,)))
    cluster.leave(joined.consumer_id)
    cluster.elect(3)
    skip = ev.ScheduleChange(place=24, skipped=8)
    cluster.do(c.ChangeSchedule(request=("skips", 1), job_id=job_id, change=skip, readers=()))


def forked(cluster: Cluster) -> None:
    """A job parts from that of `mixed`, and is read; another one, without a name, replays it."""
    mixed(cluster)
    (origin,) = (job.job_id for job in cluster.state.jobs.values() if job.name == "mixed")
    fork = ev.Fork(origin=origin, place=40, reason="another end", who="somebody")
    how: dict[str, Any] = {"dataset_id": "mix", "sharding": ev.OFF, "schedules": True}
    cluster.do(c.GetOrCreateJob(request=("forks", 1), name="forked", fork=fork, **how))
    order = ev.OrderSpec(seed=4, cycle_length=2, block_length=3)
    member = ev.GroupMember(consumers=1, batch_size=4, start_position=36)
    joined = cluster.do(c.JoinJob(name="forked", order=order, epoch=0, member=member, **how))
    replay = ev.Fork(origin=origin, place=1_000, reason="replay")
    cluster.do(c.JoinJob(name="", fork=replay, epoch=0, member=member, **how))
    cluster.leave(joined.consumer_id)


def delivered(cluster: Cluster) -> None:
    """What workers say of the elements that trainers have taken, or that were dropped."""
    definition = ev.DatasetDefinition(sources=[ev.SplitSource(count=100)], metadata=b"m")
    cluster.elect(1)
    cluster.do(c.RegisterDataset(dataset_id="plain", definition=definition))
    worker = cluster.worker(91)
    cluster.join(cluster.job("plain", "delivered"))
    task = cluster.task(worker)
    a, b, d = (cluster.lease(task, 5, number) for number in (1, 2, 3))
    cluster.lease(task, 5, 4, begun=(a.lease_id,), taken=(b.lease_id,), lost=(d.lease_id,))
    cluster.report(task, 5, dropped=7)
    cluster.report(task, 6, all_taken=True)
    cluster.do(c.LoseWorker(worker_id=worker, reason="no sign of life"))
    cluster.worker(91)  # it comes back, without the lease of which elements were dropped


LIVES: dict[str, Callable[[Cluster], None]] = {
    "live": live,
    "repaired": repaired,
    "divided": divided,
    "coordinated": coordinated,
    "begun": begun_rounds,
    "rejoined": rejoined,
    "removed": removed,
    "saved": saved,
    "loaded": loaded,
    "python": python,
    "ordered": ordered,
    "claimed": claimed,
    "moved": moved,
    "mixed": mixed,
    "forked": forked,
    "delivered": delivered,
}


def write(cluster: Cluster, path: Path) -> None:
    """The events, a snapshot in their midst, and the state at their end."""
    middle, state = len(cluster.events) // 2, State()
    for event in cluster.events[:middle]:
        apply(state, event)
    fold = {
        "events": [encode(event).hex() for event in cluster.events],
        "snapshot_at": middle,
        "snapshot": encode_snapshot(encode_state(state), state.time_ms).hex(),
        "state": described(cluster.state),
    }
    path.write_text(json.dumps(fold, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    for name, life in LIVES.items():
        path = FOLDS / f"{sys.argv[1]}-{name}.json"
        if path.exists():
            sys.exit(f"{path} exists, and stays as it is")
        begun = Cluster()
        life(begun)
        write(begun, path)
