"""Invalid transitions are refused with the recent events; the state stays as it is."""

from __future__ import annotations

from typing import Any

import pytest

from forebay.journal.proto import events_pb2 as ev
from forebay.service.core import commands as c
from forebay.service.core import lifecycles
from forebay.service.core.encoding import encode_state
from forebay.service.core.lifecycles import Entity, WrongTransition
from forebay.service.core.machine import apply

from .make_fold import Cluster


def cluster_with_one_in_each_state() -> tuple[Cluster, dict[str, dict[str, Any]]]:
    """A cluster, and the id of a dataset, job, lease … in each state, by the two."""
    cluster = Cluster()
    cluster.elect(1)
    sources = [ev.SplitSource(count=100)]
    definition = ev.DatasetDefinition(sources=sources)
    for dataset_id in ("d", "nobody's"):
        cluster.do(c.RegisterDataset(dataset_id=dataset_id, definition=definition))
    workers = [cluster.worker(uid, stock=True) for uid in (1, 2, 3, 4)]
    finished = cluster.join(cluster.job("d", "finished"), caller="a")
    for worker_id in workers:
        cluster.do(c.CompleteTask(task_id=cluster.task(worker_id)))
    cluster.join(cluster.job("d", "rounds", num_consumers=1), caller="r")
    pending = cluster.task(cluster.worker(5, stock=True))
    orphaned = cluster.task(workers[2])
    running = cluster.join(cluster.job("d", "running"), caller="b")
    tasks = [cluster.task(worker_id) for worker_id in workers]
    leases = [cluster.lease(task_id, 3, 1).lease_id for task_id in tasks]
    cluster.do(c.CompleteTask(task_id=tasks[1]))
    cluster.do(c.CompleteTask(task_id=tasks[3]))
    waiting = cluster.join(cluster.job("d", "waiting"), caller="c")
    cluster.leave(waiting.consumer_id)
    cluster.do(c.CollectIteration(iteration_id=waiting.iteration_id))
    for worker_id in workers[2:]:
        cluster.do(c.LoseWorker(worker_id=worker_id, reason="r"))
    started = [
        cluster.do(c.StartSave(path=f"/{n}", definition=definition, metadata=b"", prepared=""))
        for n in range(3)
    ]
    writes, finishes, fails = (save.save_id for save in started)
    for save_id in (fails, finishes):
        cluster.do(c.FailSave(save_id=save_id, code="UNKNOWN", message="why"))
    cluster.state.ended_saves[finishes].finished = True
    return cluster, {
        "dataset": {"empty": "nobody's", "not empty": "d", "absent": "other"},
        "job": {
            "empty": cluster.job("d", "empty"), "not empty": cluster.job("d", "running"),
            "absent": 10**9,
        },
        "lease": {"leased": leases[0], "lost": leases[2], "absent": leases[1]},
        "task": {
            "running": tasks[0], "completed": tasks[1], "lost": tasks[2],
            "completed and lost": tasks[3], "absent": 10**9,
            "pending": pending, "orphaned": orphaned,
        },
        "iteration": {
            "running": running.iteration_id, "waiting": waiting.iteration_id,
            "finished": finished.iteration_id, "absent": 10**9,
        },
        "save": {
            "being written": writes, "finished": finishes, "failed": fails, "absent": 10**9,
        },
        "worker": {"registered": workers[0], "absent": workers[2]},
        "consumer": {"reading": running.consumer_id, "absent": waiting.consumer_id},
    }  # fmt: skip


def wrong_steps() -> list[tuple[str, str, str]]:
    _, ids = cluster_with_one_in_each_state()
    return [
        (entity.name, state, kind)
        for entity in lifecycles.ENTITIES
        for kind, steps in entity.table.items()
        for state in ids[entity.name].keys() - steps.keys()
    ]


@pytest.mark.parametrize(("name", "found", "kind"), sorted(wrong_steps()))
def test_invalid_transitions_are_refused(name: str, found: str, kind: str) -> None:
    cluster, ids = cluster_with_one_in_each_state()
    state = cluster.state
    entity: Entity = next(e for e in lifecycles.ENTITIES if e.name == name)
    entity_id = ids[name][found]
    assert entity.states(state, entity_id) == found
    event = ev.Event(time_ms=9)
    body = getattr(event, kind)
    body.SetInParent()
    right = {e.name: ids[e.name][next(iter(e.table[kind]))] for e in lifecycles.ENTITIES
             if kind in e.table}  # fmt: skip
    for other, other_id in {**right, name: entity_id}.items():
        setattr(body, f"{other}_id", other_id)
    before = encode_state(state)
    with pytest.raises(WrongTransition, match=rf"{kind}.* {name} {entity_id} is {found}") as error:
        apply(state, event)
    assert encode_state(state) == before
    if found != "absent":
        shown = f'"{entity_id}"'.replace("'", "\\'") if name == "dataset" else entity_id
        created = "iteration_created" if name == "iteration" else f"{name}_id: {shown}"
        assert created in str(error.value)


def test_the_story_is_what_happened_to_that_lease() -> None:
    cluster, ids = cluster_with_one_in_each_state()
    lost = ids["lease"]["lost"]
    gone = ev.LeaseBegun(lease_id=lost)
    with pytest.raises(WrongTransition) as error:
        apply(cluster.state, ev.Event(lease_begun=gone))
    story = str(error.value).partition("What happened to it: ")[2].split("; ")
    assert [step.split()[1] for step in story] == ["splits_leased", "lease_lost"]
    of_another = ev.LeaseBegun(lease_id=10**9)
    with pytest.raises(WrongTransition, match=r"None of the last \d+ events is of it"):
        apply(cluster.state, ev.Event(lease_begun=of_another))
