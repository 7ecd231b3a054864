"""Each number and text of each request is within bounds, or refused before anything is decided."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from forebay.journal.proto import events_pb2 as ev
from forebay.service.dispatcher import bounds
from forebay.service.dispatcher.dispatcher import Dispatcher
from forebay.service.dispatcher.dispatcher_servicer import DispatcherServicer
from forebay.service.dispatcher.tf_data_dispatcher_servicer import TfDataDispatcherServicer
from forebay.service.errors import ForebayError
from forebay.service.proto import forebay_pb2 as pb
from forebay.service.proto import tf_service_pb2 as tf
from forebay.storage import MemoryStorage

from ..stock import GRAPH
from ..transfer_servers import SERVERS
from .leading import run_dispatcher

OF_WORKERS = {"ProcessTask", "GetElement", "GetWorkerTasks", "GetSnapshotTaskProgresses"}
Path = tuple[FieldDescriptor, ...]


def leaves(message: Any, before: Path = ()) -> Iterator[Path]:
    """The ways to a message's (of its descriptor) numbers and texts."""
    for field in message.fields:
        if field.message_type is None:
            yield (*before, field)
        elif field.message_type not in [other.containing_type for other in before]:
            yield from leaves(field.message_type, (*before, field))


def put(message: Any, path: Path, value: object) -> None:
    """Set the field at the end of the path; repeated ones get one entry."""
    field, *rest = path
    at = getattr(message, field.name)
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        if rest[0].name == "key":
            at[value].SetInParent()
        else:
            put(at["k"], tuple(rest[1:]), value)
    elif rest:
        put(at.add() if field.is_repeated and not at else at[0] if field.is_repeated else at,
            tuple(rest), value)  # fmt: skip
    elif field.is_repeated:
        at.append(value)
    else:
        setattr(message, field.name, value)


def extremes(field: FieldDescriptor) -> list[Any]:
    kinds = {
        FieldDescriptor.CPPTYPE_INT32: (31, True),
        FieldDescriptor.CPPTYPE_INT64: (63, True),
        FieldDescriptor.CPPTYPE_UINT32: (32, False),
        FieldDescriptor.CPPTYPE_UINT64: (64, False),
    }
    if field.type == field.TYPE_STRING:
        return ["x" * (bounds._TEXTS.get(field.name, bounds.MAX_PATH) + 1)]
    if field.type == field.TYPE_ENUM:
        return [77]
    if field.cpp_type not in kinds:
        return []
    bits, signed = kinds[field.cpp_type]
    found = [2**bits - 1, 2**62, 2**62 - 1, 1, *([-1, -(2**62), -(2**bits)] * signed)]
    return [number for number in found if -(2**bits) <= number < 2**bits]


def is_out_of_bounds(field: FieldDescriptor, value: Any) -> bool:
    if isinstance(value, int) and field.enum_type is None:
        return abs(value) > bounds.MAX_NUMBER and field.name not in bounds._ANY_NUMBER
    return True


class Cluster:
    """A dispatcher, with a worker and a consumer of each kind of read."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self.dispatcher = dispatcher
        self.stock_servicer = TfDataDispatcherServicer(dispatcher)
        self.methods = {
            pb: DispatcherServicer(dispatcher).methods(),
            tf: self.stock_servicer.methods(),
        }

    async def call(self, request: Message, module: Any = pb) -> Any:
        name = type(request).__name__.removesuffix("Request")
        return await self.methods[module][name][0](request)

    async def requests(self, number: int) -> dict[Any, dict[str, list[Message]]]:
        """Requests that succeed, by service and method; of another `number`, about other things."""
        call, source, order = self.call, ev.SplitSource(count=100), ev.OrderSpec()
        own, other = f"own{number}", f"other{number}"
        for name in (own, other):
            await call(pb.RegisterDatasetRequest(dataset_id=name, graph=GRAPH, sources=[source]))
        worker = pb.WorkerHeartbeatRequest(transfer_servers=SERVERS, address=f"w:{number}", uid=1)
        worker_id = (await call(worker)).worker_id
        order.cycle_length = order.block_length = 1
        member = ev.GroupMember(consumers=1, batch_size=1)
        named = dict[str, Any](
            plain={"sharding": ev.DYNAMIC},
            ordered={"order": order},
            claimed={"order": ev.OrderSpec(cycle_length=1, block_length=1, claimed=True)},
            rounds={"num_consumers": 1},
        )
        jobs = {
            name: pb.GetOrCreateJobRequest(dataset_id=own, job_name=f"{name}{number}", **how)
            for name, how in named.items()
        }
        joins = {name: pb.JoinIterationRequest(job=job) for name, job in jobs.items()}
        joins["ordered"].member.CopyFrom(member)
        joins["rounds"].consumer_index = 0
        joined = {name: await call(join) for name, join in joins.items()}
        ids = {name: one.consumer_id for name, one in joined.items()}
        assert all(ids.values())
        plain, (task, *_) = joined["plain"], joined["plain"].news.tasks
        heartbeats = [{"consumer_id": n} for n in ids.values()]
        heartbeats += [{"consumer_id": ids["ordered"], key: [1]} for key in ("bundles", "lengths")]
        return {
            pb: {
                "RegisterDataset": [pb.RegisterDatasetRequest(graph=GRAPH, sources=[source])],
                "GetDataset": [pb.GetDatasetRequest(dataset_id=own, with_graph=True)],
                "RemoveDataset": [pb.RemoveDatasetRequest(dataset_id=other)],
                "GetOrCreateJob": [*jobs.values()],
                "JoinIteration": [*joins.values(), pb.JoinIterationRequest(job_id=plain.job_id)],
                "ConsumerHeartbeat": [pb.ConsumerHeartbeatRequest(**h) for h in heartbeats],
                "ClaimBundles": [
                    pb.ClaimBundlesRequest(consumer_id=ids["claimed"], most=1, places=places)
                    for places in ([], [1])
                ],
                "WorkerHeartbeat": [worker],
                "LeaseSplits": [
                    pb.LeaseSplitsRequest(task_id=task.task_id, want=want) for want in (0, 1)
                ],
                "SkipSplit": [pb.SkipSplitRequest(task_id=task.task_id, limit=1)],
                "CompleteTask": [pb.CompleteTaskRequest(task_id=task.task_id)],
                "LeaveService": [pb.LeaveServiceRequest(worker_id=worker_id)],
            },
            tf: {
                "GetOrCreateJob": [tf.GetOrCreateJobRequest(dataset_id=own, num_consumers=2)],
                "GetOrCreateIteration": [tf.GetOrCreateIterationRequest(job_id=plain.job_id)],
                "ClientHeartbeat": [tf.ClientHeartbeatRequest(iteration_client_id=ids["rounds"])],
                "GetSplit": [tf.GetSplitRequest(iteration_id=plain.iteration_id)],
                "MaybeRemoveTask": [tf.MaybeRemoveTaskRequest(task_id=task.task_id)],
            },
        }


async def send_extremes(dispatcher: Dispatcher, messages: Any, method: str) -> None:
    cluster = Cluster(dispatcher)
    answer, kind, _ = cluster.methods[messages][method]
    count = len((await cluster.requests(0))[messages].get(method, [kind()]))
    for number in range(count):
        # What these name is there again for each, as the requests before may have ended it.
        good = (await cluster.requests(number + 1))[messages].get(method, [kind()])[number % count]
        for path in leaves(kind.DESCRIPTOR):
            for value in extremes(path[-1]):
                request = kind()
                request.CopyFrom(good)
                put(request, path, value)
                before, said = dispatcher.journal.sequence, ""
                try:
                    await answer(await bounds.parse(kind, request.SerializeToString()))
                except ForebayError as error:  # any other one is a bug
                    said = str(error)
                assert not dispatcher.stopped.is_set()
                if is_out_of_bounds(path[-1], value):
                    named = path[-2] if path[-1].name == "key" else path[-1]
                    assert named.name in said, said
                    assert len(said) < 500
                    assert dispatcher.journal.sequence == before
    await cluster.stock_servicer.close()


async def nothing(_: Dispatcher) -> None:
    pass


@pytest.mark.parametrize("messages", [pb, tf], ids=["forebay", "tensorflow"])
def test_each_field_is_bounded(messages: Any) -> None:
    kinds = messages.DESCRIPTOR.message_types_by_name
    methods = [name.removesuffix("Request") for name in kinds if name.endswith("Request")]
    for method in methods:
        if f"{method}Response" in kinds and method not in OF_WORKERS:
            storage = MemoryStorage()
            run_dispatcher(storage, partial(send_extremes, messages=messages, method=method))
            run_dispatcher(storage, nothing)  # which replays it
