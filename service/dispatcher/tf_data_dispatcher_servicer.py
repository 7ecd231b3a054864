"""TensorFlow's protocol (service/proto/tf_service.proto): translate, execute, translate back.

Unmodified clients and C++ workers of TensorFlow's tf.data service use it. They retry only
UNAVAILABLE, ABORTED and CANCELLED; any other status ends a trainer's iterator.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import grpc

from ...journal.proto import events_pb2 as ev
from ...journal.reasons import GOODBYE
from ...journal.splits import grows, split_value
from .. import ranges
from ..connections.credentials import NO_TENSORFLOW
from ..connections.grpc_server import Method, generic_handler, refusing_handler
from ..core import commands as c
from ..core.base import find_dataset, find_save
from ..core.save_streams import is_orphaned
from ..core.saves import completed_streams
from ..core.splits import running_tasks
from ..core.state import Dataset, EndedSave, Worker
from ..errors import (
    ForebayError,
    InvalidArgument,
    NotFound,
    PermissionDenied,
    Unavailable,
    Unimplemented,
    cut_error,
)
from ..pipelines.definitions import (
    Evaluate,
    evaluate_in_subprocess,
    metadata_of,
    require_bytes,
    sanitize,
    split_sources,
)
from ..proto import tf_service_pb2 as pb
from ..saved_chunks import chunk_path
from . import bounds
from .answering import Rpc, answering
from .dispatcher import Dispatcher
from .save_directory import split_tensor
from .task_pusher import TaskPusher

SERVICE = "tensorflow.data.DispatcherService"
PROTOCOL_VERSION = 9

MAX_EVALUATIONS = 2
"""The most helper processes at once; each of them imports TensorFlow."""

_RPCS = {
    "WorkerHeartbeat": Rpc(),
    "WorkerUpdate": Rpc(decides=True),
    "GetDatasetDef": Rpc(),
    "GetSplit": Rpc(decides=True),
    "GetVersion": Rpc(reads=True),
    "GetOrRegisterDataset": Rpc(),
    "GetDataServiceMetadata": Rpc(reads=True),
    "GetDataServiceConfig": Rpc(reads=True),
    "GetOrCreateJob": Rpc(decides=True),
    "GetOrCreateIteration": Rpc(decides=True),
    "MaybeRemoveTask": Rpc(),
    "ReleaseIterationClient": Rpc(decides=True),
    "ClientHeartbeat": Rpc(),
    "GetWorkers": Rpc(reads=True),
    "DisableCompressionAtRuntime": Rpc(),
    "Snapshot": Rpc(decides=True),
    "GetSnapshotSplit": Rpc(decides=True),
    "GetSnapshotStreams": Rpc(),
}


class TfDataDispatcherServicer:
    """The methods of tensorflow.data.DispatcherService. `close` ends its background work."""

    def __init__(self, dispatcher: Dispatcher, evaluate: Evaluate | None = None) -> None:
        self._dispatcher = dispatcher
        libraries = dispatcher.options.load_op_library
        self._evaluate = evaluate or partial(evaluate_in_subprocess, op_libraries=libraries)
        self._evaluations = asyncio.Semaphore(MAX_EVALUATIONS)
        mode = dispatcher.options.deployment_mode or "UNSPECIFIED"
        self._deployment_mode = f"DEPLOYMENT_MODE_{mode}"
        self.pusher = TaskPusher(dispatcher, self._task_def, self._turn)

    def handlers(self) -> grpc.GenericRpcHandler[Any, Any]:
        """For `grpc.aio.Server.add_generic_rpc_handlers`."""
        of_datasets = ("GetOrRegisterDataset", "Snapshot")
        return generic_handler(SERVICE, self.methods(), of_datasets=of_datasets, parse=bounds.parse)

    def methods(self) -> dict[str, Method]:
        """By name."""
        return answering(self, self._dispatcher, pb, _RPCS)

    @staticmethod
    def refusing() -> grpc.GenericRpcHandler[Any, Any]:
        """In place of `handlers`, for a dispatcher that does not serve this."""
        return refusing_handler(SERVICE, pb, PermissionDenied(NO_TENSORFLOW), is_async=True)

    async def close(self) -> None:
        """Stop pushing tasks to workers."""
        await self.pusher.close()

    # -- datasets ------------------------------------------------------------------------------

    async def get_or_register_dataset(
        self, request: pb.GetOrRegisterDatasetRequest
    ) -> pb.GetOrRegisterDatasetResponse:
        known = self._dispatcher.state.datasets.get(request.dataset_id)
        lost = known is None or await self._dispatcher.graphs.is_lost(known)
        if not lost and self._dispatcher.state.datasets.get(request.dataset_id) is known:
            assert known is not None
            _require_same_structure(known, request.metadata)
            await self._dispatcher.graphs.renew(known)
            return pb.GetOrRegisterDatasetResponse(dataset_id=known.dataset_id)
        require_bytes(request.dataset.graph)
        graph = await asyncio.to_thread(sanitize, request.dataset.graph)
        definition = ev.DatasetDefinition(metadata=request.metadata)
        try:
            async with self._evaluations:
                sources = await asyncio.to_thread(split_sources, graph, self._evaluate)
        except ForebayError as error:  # consumers can still read it unsharded
            definition.unsplittable = cut_error(str(error))
        else:
            definition.sources.extend(sources)
        dataset_id = await self._dispatcher.graphs.register(request.dataset_id, definition, graph)
        return pb.GetOrRegisterDatasetResponse(dataset_id=dataset_id)

    async def _graph(self, dataset: Dataset) -> bytes:
        return (await self._dispatcher.graphs.pieces.of(dataset, plain=False)).graph

    async def get_dataset_def(self, request: pb.GetDatasetDefRequest) -> pb.GetDatasetDefResponse:
        dataset = find_dataset(self._dispatcher.state, request.dataset_id)
        if (kind := dataset.outline.WhichOneof("kind")) != "tf_data_graph":
            what = "mixture" if kind == "mixture" else "Python dataset"
            raise Unimplemented(
                f"dataset {request.dataset_id} is a {what}, which has no graph: run it on "
                "Forebay's workers"
            )
        async with self._dispatcher.graphs.pieces.turn(dataset.graph_bytes):
            response = pb.GetDatasetDefResponse()
            response.dataset_def.graph = await self._graph(dataset)
            return response

    async def get_data_service_metadata(
        self, request: pb.GetDataServiceMetadataRequest
    ) -> pb.GetDataServiceMetadataResponse:
        dataset = find_dataset(self._dispatcher.state, request.dataset_id)
        return pb.GetDataServiceMetadataResponse(metadata=dataset.outline.metadata)

    async def disable_compression_at_runtime(
        self, request: pb.DisableCompressionAtRuntimeRequest
    ) -> pb.DisableCompressionAtRuntimeResponse:
        dataset = find_dataset(self._dispatcher.state, request.dataset_id)
        compression = metadata_of(dataset.outline.metadata).compression
        if compression == pb.DataServiceMetadata.COMPRESSION_OFF:
            return pb.DisableCompressionAtRuntimeResponse(no_compression_to_disable=True)
        disabled = await self._dispatcher.execute(
            c.DecideCompression(
                dataset_id=request.dataset_id, disable=request.disable_compression_at_runtime
            )
        )
        return pb.DisableCompressionAtRuntimeResponse(compression_disabled_at_runtime=disabled)

    # -- jobs, iterations and their clients ------------------------------------------------------

    async def get_or_create_job(
        self, request: pb.GetOrCreateJobRequest
    ) -> pb.GetOrCreateJobResponse:
        num_consumers = request.num_consumers if request.HasField("num_consumers") else None
        job_id = await self._dispatcher.execute(
            c.GetOrCreateJob(
                dataset_id=request.dataset_id,
                name=request.job_name,
                sharding=request.processing_mode_def.sharding_policy,
                num_consumers=num_consumers,
                cross_trainer_cache=request.use_cross_trainer_cache,
                target_workers=request.target_workers,
            )
        )
        return pb.GetOrCreateJobResponse(job_id=job_id)

    async def get_or_create_iteration(
        self, request: pb.GetOrCreateIterationRequest
    ) -> pb.GetOrCreateIterationResponse:
        joined: ev.ConsumerJoined = await self._dispatcher.execute(
            c.JoinIteration(job_id=request.job_id, epoch=request.repetition, stock=True)
        )
        self._dispatcher.failure_detector.expects(joined.consumer_id)
        iteration = self._dispatcher.state.iterations.get(joined.iteration_id)
        if iteration is not None:  # so the workers have their tasks before the client asks
            await self.pusher.wait_until_pushed(iteration.tasks)
        return pb.GetOrCreateIterationResponse(iteration_client_id=joined.consumer_id)

    async def release_iteration_client(self, request: pb.ReleaseIterationClientRequest) -> None:
        await self._dispatcher.execute(
            c.LeaveIteration(consumer_id=request.iteration_client_id, reason=GOODBYE)
        )

    async def client_heartbeat(
        self, request: pb.ClientHeartbeatRequest
    ) -> pb.ClientHeartbeatResponse:
        state = self._dispatcher.state
        consumer = self._dispatcher.find_consumer(request.iteration_client_id)
        self._dispatcher.failure_detector.saw(consumer.consumer_id)
        barrier = state.iterations[consumer.iteration_id].barrier
        if barrier is not None:  # a client asks to remove a task that its worker lacks
            await self.pusher.wait_until_pushed(barrier.tasks)
            consumer = self._dispatcher.find_consumer(request.iteration_client_id)
        if request.HasField("current_round"):
            blocked = request.blocked_round if request.HasField("blocked_round") else None
            await self._dispatcher.execute(
                c.ReportRound(
                    consumer_id=consumer.consumer_id,
                    current_round=request.current_round,
                    blocked_round=blocked,
                )
            )
        if (iteration := state.iterations.get(consumer.iteration_id)) is None:
            raise Unavailable(f"iteration {consumer.iteration_id} has just ended; ask again")
        response = pb.ClientHeartbeatResponse(
            iteration_finished=iteration.finished, deployment_mode=self._deployment_mode
        )
        # Without a block_round the consumer continues, with the tasks of the same answer.
        if iteration.barrier is not None and iteration.barrier.target_round:
            response.block_round = iteration.barrier.target_round
        for task_id in iteration.tasks:  # completed ones too: a client drops what is missing
            task = state.tasks[task_id]
            info = response.task_info.add(
                task_id=task_id,
                iteration_id=iteration.iteration_id,
                starting_round=task.starting_round,
            )
            if task.orphan is not None:
                info.worker_address, info.worker_uid = task.orphan.address, task.orphan.uid
                info.transfer_servers.append(_grpc_server(task.orphan.address))
                continue
            worker = state.workers[task.worker_id]
            info.worker_address, info.worker_uid = worker.address, worker.uid
            info.worker_tags.extend(worker.tags)
            info.transfer_servers.extend(_transfer_servers(worker))
        return response

    async def maybe_remove_task(
        self, request: pb.MaybeRemoveTaskRequest
    ) -> pb.MaybeRemoveTaskResponse:
        removed = await self._dispatcher.removals.ask(
            request.task_id, request.consumer_index, request.round
        )
        return pb.MaybeRemoveTaskResponse(removed=removed)

    # -- workers and tasks -----------------------------------------------------------------------

    async def worker_heartbeat(
        self, request: pb.WorkerHeartbeatRequest
    ) -> pb.WorkerHeartbeatResponse:
        worker_id = await self._dispatcher.execute(
            c.RegisterWorker(
                address=request.worker_address,
                uid=request.worker_uid,
                tags=tuple(request.worker_tags),
                transfer_servers=tuple(
                    ev.TransferServer.FromString(server.SerializeToString())
                    for server in request.transfer_servers
                ),
                stock=True,
            )
        )
        self._dispatcher.failure_detector.saw(worker_id)
        saves = self._dispatcher.saves
        for path, progress in request.snapshot_task_progress.items():
            await saves.report(request.worker_address, path, progress)
        streams, _ = await saves.write(worker_id)
        if (worker := self._dispatcher.state.workers.get(worker_id)) is None:
            raise Unavailable(f"worker {request.worker_address} was replaced; beat again")
        # A restarted worker has none of its tasks, and gets all of them again.
        tasks, running = set(worker.tasks), set(request.current_tasks)
        new = sorted(tasks - running)
        async with self._turn(new):
            definitions = [await self._task_def(task_id) for task_id in new]
        return pb.WorkerHeartbeatResponse(
            new_tasks=[task for task in definitions if task is not None],
            tasks_to_delete=sorted(running - tasks),
            snapshot_tasks=[
                pb.SnapshotTaskDef(
                    base_path=save.path,
                    stream_index=number,
                    num_sources=len(save.sources),
                    metadata=save.metadata,
                )
                for save, number in saves.told(streams, request.snapshot_task_progress)
            ],
        )

    async def worker_update(self, request: pb.WorkerUpdateRequest) -> None:
        # CompleteTask ignores unknown tasks: they are not the worker's fault.
        await asyncio.gather(
            *(
                self._dispatcher.execute(c.CompleteTask(task_id=update.task_id))
                for update in request.updates
                if update.completed
            )
        )

    async def get_workers(self, _: pb.GetWorkersRequest) -> pb.GetWorkersResponse:
        workers = [
            pb.WorkerInfo(address=worker.address)
            for worker in self._dispatcher.state.workers.values()
        ]
        return pb.GetWorkersResponse(workers=workers)

    def _turn(self, task_ids: Iterable[int]) -> contextlib.AbstractAsyncContextManager[None]:
        """A turn to send these tasks: it limits the large graphs in flight."""
        state = self._dispatcher.state
        tasks = [state.tasks[i] for i in task_ids if i in state.tasks]
        jobs = [state.jobs[state.iterations[task.iteration_id].job_id] for task in tasks]
        graph_bytes = sum(state.datasets[job.dataset_id].graph_bytes for job in jobs)
        return self._dispatcher.graphs.pieces.turn(graph_bytes)

    async def _task_def(self, task_id: int) -> pb.TaskDef | None:
        """The worker's definition of a task; None if the task has ended, its worker is lost, or its
        dataset was removed meanwhile."""
        state = self._dispatcher.state
        task = state.tasks.get(task_id)
        if task is None or task.completed or task.orphan is not None:
            return None
        iteration = state.iterations[task.iteration_id]
        job = state.jobs[iteration.job_id]
        definition = pb.TaskDef(
            dataset_id=job.dataset_id,
            task_id=task_id,
            iteration_id=iteration.iteration_id,
            num_split_providers=len(iteration.ledgers),
            worker_address=state.workers[task.worker_id].address,
            processing_mode_def=pb.ProcessingModeDef(
                sharding_policy=job.sharding  # type: ignore[arg-type]
            ),
            use_cross_trainer_cache=job.cross_trainer_cache,
            num_workers=len(state.places) if task.shard is not None else 0,
            worker_index=task.shard or 0,
            num_consumers=job.num_consumers,
        )
        try:
            definition.dataset_def.graph = await self._graph(state.datasets[job.dataset_id])
        except NotFound:
            return None
        return definition

    # -- splits ----------------------------------------------------------------------------------

    async def get_split(self, request: pb.GetSplitRequest) -> pb.GetSplitResponse:
        # Look these up first: the iteration may be gone once the decision is durable.
        state = self._dispatcher.state
        iteration = state.iterations.get(request.iteration_id)
        sources: Sequence[ev.SplitSource] = ()
        if iteration is not None:
            sources = state.datasets[state.jobs[iteration.job_id].dataset_id].sources
        get = c.GetSplit(
            iteration_id=request.iteration_id,
            pass_number=request.repetition,
            source=request.split_provider_index,
        )
        # TensorFlow's worker never cancels this call, and its heartbeats wait for it.
        waits = any(map(grows, sources))
        asking = running_tasks(state, request.iteration_id) if waits else set()
        leased: ev.SplitsLeased | None
        while (leased := await self._dispatcher.execute(get)) is None:
            await self._dispatcher.growing_sources.wait(get.iteration_id, get.source)
            if not asking & running_tasks(state, request.iteration_id):
                return pb.GetSplitResponse(end_of_splits=True)
        if not leased.count:
            return pb.GetSplitResponse(end_of_splits=True)
        source = sources[leased.source]
        if grows(source):
            assert iteration is not None
            name = iteration.ledgers[leased.source].names[leased.first]
            return pb.GetSplitResponse(
                split=file_tensor(chunk_path(source.saved_chunks.path, name))
            )
        return pb.GetSplitResponse(split=split_tensor(split_value(source, leased.first)))

    # -- the service itself ----------------------------------------------------------------------

    async def get_version(self, _: pb.GetVersionRequest) -> pb.GetVersionResponse:
        return pb.GetVersionResponse(version=PROTOCOL_VERSION)

    async def get_data_service_config(
        self, _: pb.GetDataServiceConfigRequest
    ) -> pb.GetDataServiceConfigResponse:
        config = pb.DataServiceConfig(deployment_mode=self._deployment_mode)
        return pb.GetDataServiceConfigResponse(config=config)

    # -- saves -----------------------------------------------------------------------------------

    async def snapshot(self, request: pb.SnapshotRequest) -> None:
        graph = await asyncio.to_thread(sanitize, request.dataset.graph)
        async with self._evaluations:
            sources = await asyncio.to_thread(split_sources, graph, self._evaluate)
        await self._dispatcher.saves.start(request.path, graph, sources, request.metadata)

    async def get_snapshot_split(
        self, request: pb.GetSnapshotSplitRequest
    ) -> pb.GetSnapshotSplitResponse:
        return await self._dispatcher.saves.split(request)

    async def get_snapshot_streams(
        self, request: pb.GetSnapshotStreamsRequest
    ) -> pb.GetSnapshotStreamsResponse:
        state = self._dispatcher.state
        save = find_save(state, request.path)
        completed = completed_streams(save)
        response = pb.GetSnapshotStreamsResponse()
        for number in range(save.streams if isinstance(save, EndedSave) else len(save.streams)):
            stream = response.streams.add(index=number, state=pb.SnapshotStreamInfo.ASSIGNED)
            if ranges.holds(completed, number):
                stream.state = stream.DONE
            elif isinstance(save, EndedSave) or is_orphaned(state, save, save.streams[number]):
                stream.state = stream.ORPHAN
        return response


def file_tensor(path: str) -> bytes:
    """A file's split for TensorFlow's workers: a serialized TensorProto.

    A scalar string: dtype 7, an empty shape, tensor_content of the length and the bytes.
    """
    content = _prefixed(path.encode())
    return b"\x08\x07\x12\x00\x22" + _prefixed(content)


def _prefixed(data: bytes) -> bytes:
    """The data behind its length as a varint."""
    length, rest = bytearray(), len(data)
    while rest > 0x7F:
        length.append(rest & 0x7F | 0x80)
        rest >>= 7
    return bytes([*length, rest]) + data


def _require_same_structure(known: Dataset, metadata: bytes) -> None:
    existing, got = metadata_of(known.outline.metadata), metadata_of(metadata)
    differ = [
        field.name
        for field in pb.DataServiceMetadata.DESCRIPTOR.fields
        if getattr(existing, field.name) != getattr(got, field.name)
    ]
    if differ:
        raise InvalidArgument(
            "Datasets with the same ID should have the same structure: dataset "
            f"{known.dataset_id!r} is registered with another {' and '.join(differ)}; register "
            "this one under another id"
        )


def _transfer_servers(worker: Worker) -> list[pb.DataTransferServerInfo]:
    """The servers from which a stock client can fetch elements. It requires one for gRPC."""
    if worker.stock:
        return [pb.DataTransferServerInfo.FromString(data) for data in worker.transfer_servers]
    # Our worker also serves TensorFlow's GetElement; stock clients cannot use its own protocol.
    return [_grpc_server(worker.address)]


def _grpc_server(address: str) -> pb.DataTransferServerInfo:
    return pb.DataTransferServerInfo(protocol="grpc", address=address)
