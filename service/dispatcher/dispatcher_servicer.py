"""Forebay's own protocol (service/proto/forebay.proto): translate, execute, translate back."""

from __future__ import annotations

import asyncio
import functools
import itertools
import logging
from collections.abc import Hashable, Iterator
from contextlib import nullcontext
from typing import Any, TypeVar

import grpc
from google.protobuf.message import Message
from msgspec.structs import replace

from ...journal.datasets import stored
from ...journal.proto import events_pb2 as ev
from ...journal.reasons import GOODBYE, READ_FAILED
from ...storage.errors import Missing
from ..connections.admission import Admission
from ..connections.data_keys import SigningKeys
from ..connections.grpc_server import Method, current_caller, generic_handler
from ..connections.protocols import SERVED
from ..core import commands as c
from ..core.base import Numbered, find_dataset, find_iteration
from ..core.bundles import order_message
from ..core.checksums import describe_mismatches
from ..core.claims import Claimed
from ..core.datasets import mixture
from ..core.jobs import epochs_over
from ..core.lengths import elements_of, lengths_of
from ..core.read_kinds import why_no_task
from ..core.state import (
    Dataset,
    Grants,
    Iteration,
    Job,
    Save,
    State,
    Task,
    Worker,
    covers,
    fields_of,
    lease_caller,
    same_fields,
    skip_caller,
)
from ..core.status import encoded_datasets, encoded_status
from ..core.workers import require_own
from ..errors import InvalidArgument, Unavailable, cut_error
from ..pipelines import definitions
from ..pipelines.definitions import (
    INFINITE_CARDINALITY,
    compresses,
    encode_metadata,
    forbidden,
    has_no_code,
    metadata_of,
    require_bytes,
    sanitize,
    without_compression,
)
from ..proto import forebay_pb2 as pb
from ..proto import tf_service_pb2 as tf
from ..proto.metrics_pb2 import TaskMetrics
from ..slicing import in_slices
from . import bounds
from .answering import Rpc, answering
from .dispatcher import Dispatcher
from .group_progress import GroupProgress
from .permissions import METHODS, Permissions

log = logging.getLogger(__name__)

C = TypeVar("C", bound=c.Command)

SERVICE = "forebay.v1.Dispatcher"
MAX_WAIT_MS = 30_000

MAX_CALLER = 100
"""The most characters of a caller's name."""

TARGET_WORKERS_AUTO = 1  # the default of stock clients, so that both kinds share jobs


_DECIDES = {
    *("RegisterDataset", "RemoveDataset", "GetOrCreateJob", "JoinIteration", "LeaveIteration"),
    *("ClaimBundles", "LeaseSplits", "SkipSplit", "CompleteTask", "LeaveService", "StartSave"),
    *("CommitChunk", "EndStream", "ChangeSchedule"),
}
_READS = {"GetDataset", "ListDatasets", "FindGoneConsumers", "GetStatus", "GetSchedule"}
_RPCS = {name: Rpc(decides=name in _DECIDES, reads=name in _READS) for name in METHODS}


class DispatcherServicer:
    """The methods of forebay.v1.Dispatcher, one each."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        admission: Admission | None = None,
        permissions: Permissions | None = None,
    ) -> None:
        """Without `admission`, nobody proves who he is; without `permissions`, all may do all."""
        self._dispatcher = dispatcher
        self._admission = admission
        self._permissions = permissions
        pools = {(), *(worker.grants for worker in dispatcher.state.workers.values())}
        self._data_keys = {} if admission is None else {pool: SigningKeys() for pool in pools}
        self._progress = GroupProgress(dispatcher)
        self._warned_of_lengths: set[str] = set()  # datasets
        # By a dataset's blob, and whether it was read in order.
        self._doubts: dict[tuple[str, bool, bool], list[str]] = {}

    def handlers(self) -> grpc.GenericRpcHandler[Any, Any]:
        """The service, for a grpc.aio server."""
        return generic_handler(
            SERVICE,
            self.methods(),
            of_datasets=("RegisterDataset", "StartSave"),
            admit=self._admit,
            parse=bounds.parse,
        )

    def _admit(self, method: str, call: Any) -> Hashable:
        """Who calls it. Raises PermissionDenied."""
        if self._permissions is not None:
            self._permissions.check_role(method)
        return call.peer() if self._admission is None else current_caller(self._admission)

    def methods(self) -> dict[str, Method]:
        """By name."""
        return answering(self, self._dispatcher, pb, _RPCS, self._permissions)

    async def register_dataset(
        self, request: pb.RegisterDatasetRequest
    ) -> pb.RegisterDatasetResponse:
        if request.mixture:
            return await self._register_mixture(request)
        definition = ev.DatasetDefinition(
            sources=request.sources,
            unsplittable=request.unsplittable,
            metadata=request.metadata,
            structure=request.structure,
            compression=request.compression,
        )
        graph = request.python or request.graph  # each access copies it
        require_bytes(graph)
        if not graph:
            raise InvalidArgument("a dataset without a graph; register a tf.data.Dataset")
        await asyncio.to_thread(bounds.check_dataset, request)
        if request.python:
            definition.python_function.SetInParent()
            definition.python_function.no_code = await asyncio.to_thread(has_no_code, graph)
        else:
            graph = await self._sanitized("RegisterDataset", request)
        is_believed = self._permissions is None  # else about its own dataset only

        def admit() -> None:
            nonlocal is_believed
            self._admit_dataset(request.dataset_id)
            is_believed = True

        dataset_id = await self._dispatcher.graphs.register(
            request.dataset_id, definition, graph, admit
        )
        is_believed &= self._dispatcher.graphs.is_registered(dataset_id, definition)
        if request.lengths and is_believed:
            await self._dispatcher.execute(
                c.DeclareLengths(dataset_id=dataset_id, lengths=tuple(request.lengths))
            )
        differs = ""
        if request.dataset_id:  # without an id, only an equal dataset is reused
            differs = await self._dispatcher.graphs.difference(dataset_id, definition, graph)
        return pb.RegisterDatasetResponse(dataset_id=dataset_id, differs=differs)

    async def _register_mixture(
        self, request: pb.RegisterDatasetRequest
    ) -> pb.RegisterDatasetResponse:
        state, graphs = self._dispatcher.state, self._dispatcher.graphs
        if self._permissions is not None:
            for source in request.mixture:
                read = pb.GetDatasetRequest(dataset_id=source.dataset_id)
                self._permissions.check("GetDataset", read, state)
        definition = mixture(state, request.mixture)
        found = [find_dataset(state, source.dataset_id) for source in request.mixture]
        if packed := [dataset.dataset_id for dataset in found if compresses(dataset.outline)]:
            raise InvalidArgument(
                f"datasets {packed} compress their elements themselves, and no source of a mixture "
                'may: register them with another compression than "SNAPPY"'
            )
        first = found[0]
        spec = metadata_of(first.outline.metadata).element_spec
        definition.metadata = encode_metadata(spec, INFINITE_CARDINALITY)
        stored_sources = ev.Mixture(sources=definition.mixture.sources).SerializeToString()
        admit = functools.partial(self._admit_dataset, request.dataset_id)
        dataset_id = await graphs.register(request.dataset_id, definition, stored_sources, admit)
        differs = ""
        if request.dataset_id:
            differs = await graphs.difference(dataset_id, definition, stored_sources)
        return pb.RegisterDatasetResponse(dataset_id=dataset_id, differs=differs)

    def _admit_dataset(self, dataset_id: str) -> None:
        """Raises ResourceExhausted if the caller may have no further dataset."""
        if self._permissions is not None:
            self._permissions.check_datasets(dataset_id, self._dispatcher.state)

    async def _sanitized(
        self, method: str, request: pb.RegisterDatasetRequest | pb.StartSaveRequest
    ) -> bytes:
        """The graph to keep. Raises PermissionDenied if the caller may not have such a one."""
        graph = await asyncio.to_thread(sanitize, request.graph)
        if self._permissions is not None:
            found = await asyncio.to_thread(forbidden, graph)
            self._permissions.check_graph(method, request, self._dispatcher.state, found)
        return graph

    def _numbered(self, request: ev.Request) -> Numbered:
        """The caller and the number. Callers of one peer cannot repeat another's requests, and get
        its answers; nor do they number those of a task."""
        caller = request.caller
        if not request.number:
            return None
        if not caller or len(caller) > MAX_CALLER or caller.startswith("task/"):
            raise InvalidArgument(
                f"request {request.number} names its caller {caller[:MAX_CALLER]!r}; give one of 1 "
                f"to {MAX_CALLER} characters that does not begin with task/"
            )
        if self._admission is None:
            return caller, request.number
        peer = current_caller(self._admission)
        return f"{peer.fingerprint.hex()}/{caller}", request.number

    def _admit_job(self, request: pb.GetOrCreateJobRequest | pb.JoinIterationRequest) -> None:
        """Call it in one turn of the event loop with the decision. Raises ResourceExhausted."""
        if self._permissions is not None:
            caller = self._numbered(request.request)
            self._permissions.check_jobs(caller, request, self._dispatcher.state)

    async def get_dataset(self, request: pb.GetDatasetRequest) -> pb.GetDatasetResponse:
        dataset = find_dataset(self._dispatcher.state, request.dataset_id)
        plain = False
        if compresses(dataset.outline):
            # Readers and workers must agree, so the first request decides, as in TensorFlow.
            undecided = c.DecideCompression(dataset_id=dataset.dataset_id, disable=False)
            plain = await self._dispatcher.execute(undecided)
        response = pb.GetDatasetResponse()
        if request.with_graph:
            graph, digest = await self._dispatcher.graphs.pieces.of(dataset, plain=plain)
            begin = request.offset if request.digest == digest else 0
            end = begin + request.piece_bytes if request.piece_bytes else len(graph)
            if not 0 <= begin <= end:
                raise InvalidArgument(
                    f"a piece of {request.piece_bytes} bytes from {begin} on is none of a graph"
                )
            response.graph, response.graph_bytes = graph[begin:end], len(graph)
            response.digest = digest
            if begin:
                return response
        response.definition.CopyFrom(
            without_compression(dataset.definition) if plain else dataset.definition
        )
        response.colocated = self._dispatcher.options.deployment_mode == "COLOCATED"
        response.epochs_over = epochs_over(self._dispatcher.state, request.job_name)
        if (elements := elements_of(dataset)) is not None:
            response.elements = elements
        return response

    async def list_datasets(self, _: pb.ListDatasetsRequest) -> pb.ListDatasetsResponse:
        return pb.ListDatasetsResponse(datasets=encoded_datasets(self._dispatcher.state))

    async def remove_dataset(self, request: pb.RemoveDatasetRequest) -> pb.RemoveDatasetResponse:
        removed: ev.DatasetRemoved = await self._dispatcher.execute(
            _command(c.RemoveDataset, request, self._numbered(request.request))
        )
        await self._dispatcher.graphs.delete_unused()
        return pb.RemoveDatasetResponse(jobs=removed.jobs)

    async def get_or_create_job(
        self, request: pb.GetOrCreateJobRequest
    ) -> pb.GetOrCreateJobResponse:
        await self._warnings_for(request)
        self._admit_job(request)
        numbered = {"request": self._numbered(request.request)}
        command = c.GetOrCreateJob(**self._job(request) | numbered)
        job_id = await self._dispatcher.execute(command)
        job = self._dispatcher.state.jobs.get(job_id)  # None: a retry, and it was removed
        return pb.GetOrCreateJobResponse(job_id=job_id, dataset_id=job.dataset_id if job else "")

    async def join_iteration(self, request: pb.JoinIterationRequest) -> pb.JoinIterationResponse:
        state = self._dispatcher.state
        how: dict[str, Any] = {"request": self._numbered(request.request), "epoch": request.epoch}
        if request.HasField("consumer_index"):
            how["consumer_index"] = request.consumer_index
        joins_job = request.HasField("job")
        warnings = await self._warnings_for(request.job) if joins_job else []
        if request.HasField("member"):
            free = self._dispatcher.failure_detector.may_be_replaced
            how |= {"member": request.member, "gone": tuple(filter(free, state.consumers))}
        command: c.Command
        if joins_job:
            command = c.JoinJob(**self._job(request.job) | how)
        else:
            command = c.JoinIteration(**how, job_id=request.job_id)
        self._admit_job(request)
        joined: ev.ConsumerJoined | Job = await self._dispatcher.execute(command)
        if isinstance(joined, Job):  # of another dataset; it may have been removed
            return pb.JoinIterationResponse(job_id=joined.job_id, dataset_id=joined.dataset_id)
        self._dispatcher.failure_detector.saw(joined.consumer_id)
        response = pb.JoinIterationResponse(
            iteration_id=joined.iteration_id,
            consumer_id=joined.consumer_id,
            epoch=request.epoch,
            doubts=warnings,
        )
        iteration = self._iteration_of(joined.consumer_id)  # it may have been removed meanwhile
        job = state.jobs[iteration.job_id]
        if job.order is not None:
            response.order.CopyFrom(order_message(job.order))
        if job.is_ordered:
            response.lengths.extend(lengths_of(state, job))
        # In a coordinated read consumers report their round before they get tasks.
        if job.num_consumers is None:
            response.news.CopyFrom(self._news(iteration, joined.consumer_id))
            self._dispatcher.changes.tell(iteration, 0, response.news)
        return response

    def _job(self, request: pb.GetOrCreateJobRequest) -> dict[str, Any]:
        """The arguments of a command that identify and define a job. Raises PermissionDenied,
        NotFound."""
        fork = None
        if request.schedule_of:
            if self._permissions is not None:
                of = pb.GetScheduleRequest(job=request.schedule_of)
                self._permissions.check_replay(of, self._dispatcher.state)
            fork = self._dispatcher.changes.schedules.replay(request.schedule_of, self._who())
        target_workers = request.target_workers or TARGET_WORKERS_AUTO
        name = "" if fork else request.job_name
        found = same_fields(c.GetOrCreateJob, request)
        return found | {"name": name, "target_workers": target_workers, "fork": fork}

    async def _warnings_for(self, job: pb.GetOrCreateJobRequest) -> list[str]:
        """Warnings for the reader of an ordered read; empty for other reads.

        Raises NotSplittable, naming the node, if the dataset cannot be run bundle by bundle.
        """
        datasets = self._dispatcher.state.datasets
        dataset = datasets.get(job.dataset_id)
        if not job.HasField("order") or dataset is None:
            return []
        sources = [datasets[source.dataset_id] for source in dataset.outline.mixture.sources]
        return [
            warning for each in sources or [dataset] for warning in await self._doubts_of(each, job)
        ]

    async def _doubts_of(self, dataset: Dataset, job: pb.GetOrCreateJobRequest) -> list[str]:
        blob, ordered = stored(dataset.outline).blob, not job.order.claimed
        asked = blob, ordered, job.within_bundles
        if asked not in self._doubts:
            try:
                graph = await self._dispatcher.graphs.read(dataset)
            except Missing:  # it was lost: workers say so, and how to register it again
                return []
            self._doubts[asked] = await asyncio.to_thread(
                definitions.doubts_of, dataset.outline, graph,
                ordered=ordered, within_bundles=job.within_bundles,
            )  # fmt: skip
        return self._doubts[asked]

    async def consumer_heartbeat(
        self, request: pb.ConsumerHeartbeatRequest
    ) -> pb.ConsumerHeartbeatResponse:
        dispatcher, state = self._dispatcher, self._dispatcher.state
        consumer_id = request.consumer_id
        iteration = self._iteration_of(consumer_id)
        refusing = dict.fromkeys(request.never_answered, False)
        refusing |= dict.fromkeys(request.refused, True)
        for task_id in iteration.tasks if refusing else ():
            worker = state.workers.get(state.tasks[task_id].worker_id)
            if worker is not None and worker.uid in refusing:
                dispatcher.failure_detector.refuses(worker.worker_id, refusing[worker.uid])
        dispatcher.failure_detector.saw(consumer_id)
        if request.HasField("load"):
            dispatcher.loads.consumer_told(consumer_id, request.load)
        if request.HasField("rounds"):
            await self._report_round(consumer_id, request.rounds)
            self._iteration_of(consumer_id)
        if (request.bundles or request.lengths) and self._permissions is None:
            await self._learn_lengths(iteration.job_id, _command(c.LearnLengths, request))
            self._iteration_of(consumer_id)
        if request.HasField("position"):
            await self._progress.report(iteration.iteration_id, consumer_id, request.position)
            self._iteration_of(consumer_id)
        if request.HasField("answer"):
            dispatcher.changes.answered(iteration.iteration_id, consumer_id, request.answer)
        if self._admission is not None:
            current_caller(self._admission)  # while its token is valid, which may be replaced
        wait_ms = _wait_ms(request.wait_ms, dispatcher.options.client_timeout_ms)
        # A heartbeat that does not wait may run beside a poll, so it does not count as one.
        with dispatcher.failure_detector.poll(consumer_id) if wait_ms else nullcontext():
            await dispatcher.wait_until(
                lambda: (
                    iteration.version != request.version
                    or consumer_id not in state.consumers
                    or dispatcher.changes.is_news(iteration.iteration_id, request)
                ),
                wait_ms,
            )
            self._iteration_of(consumer_id)
            response = self._news(iteration, consumer_id, told=request.version)
            dispatcher.changes.tell(iteration, request.changes, response)
            # Without a block_round the consumer continues, with the tasks of the same answer.
            if iteration.barrier is not None and iteration.barrier.target_round:
                response.block_round = iteration.barrier.target_round
            await dispatcher.settled()  # within the poll, which may break meanwhile
        return response

    async def _report_round(self, consumer_id: int, report: pb.RoundReport) -> None:
        consumer, tasks = self._dispatcher.find_consumer(consumer_id), self._dispatcher.state.tasks
        for held in report.held:
            task = tasks.get(held.task_id)
            if task is not None and task.iteration_id != consumer.iteration_id:
                raise InvalidArgument(
                    f"task {held.task_id} is not one of the iteration of consumer {consumer_id}"
                )
        if report.held and consumer.index not in (None, report.consumer_index):
            raise InvalidArgument(
                f"consumer {consumer_id} has the index {consumer.index}, and not "
                f"{report.consumer_index}"
            )
        blocked = report.blocked if report.HasField("blocked") else None
        await self._dispatcher.execute(
            c.ReportRound(
                consumer_id=consumer_id, current_round=report.current, blocked_round=blocked
            )
        )
        for held in report.held:
            await self._dispatcher.removals.hold(held, report.consumer_index)

    async def _learn_lengths(self, job_id: int, command: c.LearnLengths | c.CountBundles) -> None:
        job = self._dispatcher.state.jobs.get(job_id)
        dataset_id = "" if job is None else job.dataset_id
        mismatches = await self._dispatcher.execute(command)
        if mismatches and dataset_id not in self._warned_of_lengths:
            self._warned_of_lengths.add(dataset_id)
            log.warning(
                "bundles of dataset %s have had other lengths before: %s. It yields other elements "
                "each time it runs, so an order of them has no meaning, and its readers fail",
                dataset_id, mismatches[:10],
            )  # fmt: skip

    async def claim_bundles(self, request: pb.ClaimBundlesRequest) -> pb.ClaimBundlesResponse:
        iteration = self._iteration_of(request.consumer_id)
        self._dispatcher.failure_detector.saw(request.consumer_id)
        version = iteration.version
        claimed: Claimed = await self._dispatcher.execute(_command(c.ClaimBundles, request))
        return pb.ClaimBundlesResponse(
            places=claimed.claims.keys(),
            cursors=claimed.claims.values(),
            unclaimed=claimed.unclaimed,
            version=version,
        )

    def _news(
        self, iteration: Iteration, consumer_id: int, told: int = 0
    ) -> pb.ConsumerHeartbeatResponse:
        """The consumer was told of version `told`. It needs no tasks if that is the present one:
        with many workers they would be most of the dispatcher's work."""
        tasks, is_new = self._dispatcher.state.tasks, iteration.version != told
        listed = iteration.tasks if is_new else ()
        credential = b""
        if self._admission is not None:
            caller = current_caller(self._admission)
            job = self._dispatcher.state.jobs[iteration.job_id]
            credential = b"".join(
                keys.sign(consumer_id, iteration.iteration_id, caller)
                for pool, keys in self._data_keys.items()
                if covers(pool, job)
            )
        return pb.ConsumerHeartbeatResponse(
            version=iteration.version,
            finished=iteration.finished,
            tasks=[self._task_info(tasks[task_id]) for task_id in listed],
            removed=iteration.removed if is_new else {},
            no_task=why_no_task(self._dispatcher.state, iteration),
            warning=describe_mismatches(self._dispatcher.state.jobs[iteration.job_id]),
            data_credential=credential,
        )

    def _task_info(self, task: Task) -> pb.TaskInfo:
        info = pb.TaskInfo(
            task_id=task.task_id, completed=task.completed, starting_round=task.starting_round
        )
        if task.orphan is not None:
            info.worker_address, info.worker_uid = task.orphan.address, task.orphan.uid
            info.lost = task.worker_id
            return info
        worker = self._dispatcher.state.workers[task.worker_id]
        info.worker_address, info.worker_uid = worker.address, worker.uid
        info.worker_tags.extend(worker.tags)
        info.stock = worker.stock
        info.transfer_servers.extend(map(ev.TransferServer.FromString, worker.transfer_servers))
        return info

    def _iteration_of(self, consumer_id: int) -> Iteration:
        consumer = self._dispatcher.find_consumer(consumer_id)
        return self._dispatcher.state.iterations[consumer.iteration_id]

    async def leave_iteration(self, request: pb.LeaveIterationRequest) -> None:
        reason = READ_FAILED + cut_error(request.error) if request.error else GOODBYE
        await self._dispatcher.execute(_command(c.LeaveIteration, request, reason=reason))

    async def worker_heartbeat(
        self, request: pb.WorkerHeartbeatRequest
    ) -> pb.WorkerHeartbeatResponse:
        dispatcher, registration = self._dispatcher, self._registration(request)
        dispatcher.user_metrics.told(request.known, request.metrics)
        dispatcher.loads.worker_told(request.address, request.uid, request)
        dispatcher.job_reports.worker_told(request.address, request.uid, request)
        wait_ms = _wait_ms(request.wait_ms, dispatcher.options.worker_timeout_ms)
        state = dispatcher.state
        known = state.workers.get(state.worker_at.get(request.address, 0))
        if known is None or known.uid != request.uid:
            wait_ms = 0  # its version is of an earlier registration
        worker_id = await dispatcher.execute(registration)
        if (worker := state.workers.get(worker_id)) is None:
            raise Unavailable(f"worker {request.address} was replaced; beat again")
        with dispatcher.failure_detector.poll(worker_id):
            may_write_more = dispatcher.saves.watch(worker)
            await dispatcher.wait_until(
                lambda: (
                    worker.version != request.version
                    or worker_id not in state.workers
                    or may_write_more()
                ),
                wait_ms,
            )
            streams, are_all = await dispatcher.saves.write(worker_id)
            if worker_id not in state.workers:  # an empty list would make it drop its tasks
                raise Unavailable(f"worker {request.address} was given up meanwhile; beat again")
            response = pb.WorkerHeartbeatResponse(
                worker_id=worker_id,
                version=worker.version if are_all else 0,  # 0: it polls again at once
                tasks=self._tasks(worker),
                streams=[_stream(save, number) for save, number in streams],
                streams_are_partial=not are_all,  # the directories of some are not ready yet
            )
            if self._admission is not None:
                response.data_keys.extend(self._data_keys[registration.grants].all())
            for checked in request.checked:
                await self._check_bundles(checked)
            await dispatcher.settled()  # within the poll, which may break meanwhile
        return response

    def _registration(self, request: pb.WorkerHeartbeatRequest) -> c.RegisterWorker:
        """Of the worker, as far as it may. Raises InvalidArgument, PermissionDenied."""
        if not any(server.protocol in SERVED for server in request.transfer_servers):
            raise InvalidArgument(
                f"the worker {request.address} serves no elements to other processes: let it have "
                f"a transfer server, of {', '.join(SERVED)}"
            )
        registration = _command(c.RegisterWorker, request)
        if self._permissions is not None:
            grants, holder = self._permissions.of_worker(request.address)
            registration = replace(registration, grants=grants, holder=holder)
            require_own(self._dispatcher.state, registration)  # before anything it says is kept
            self._leave_out_others(request, grants)
            if grants not in self._data_keys:  # before anybody hears of its tasks
                self._data_keys[grants] = SigningKeys()
        return registration

    def _leave_out_others(self, request: pb.WorkerHeartbeatRequest, grants: Grants) -> None:
        """Drop from a heartbeat what it says of jobs that its worker may not run, and of tasks that
        it does not have: what it had may have been granted until now."""
        state = self._dispatcher.state

        def is_granted(report: pb.JobLoad | pb.BundleChecksums | pb.ReadError) -> bool:
            return report.job_id in state.jobs and covers(grants, state.jobs[report.job_id])

        def is_had(metrics: TaskMetrics) -> bool:
            task = state.tasks.get(metrics.task_id)
            worker = state.workers.get(task.worker_id) if task is not None else None
            return worker is not None and worker.address == request.address

        if grants:
            kept = pb.WorkerHeartbeatRequest(
                loads=[load for load in request.loads if is_granted(load)],
                checked=[checked for checked in request.checked if is_granted(checked)],
                errors=[error for error in request.errors if is_granted(error)],
                metrics=[metrics for metrics in request.metrics if is_had(metrics)],
            )
            for reports in ("loads", "checked", "errors", "metrics"):
                request.ClearField(reports)
            request.MergeFrom(kept)

    async def _check_bundles(self, checked: pb.BundleChecksums) -> None:
        mismatches = await self._dispatcher.execute(_command(c.CheckBundles, checked))
        if mismatches:
            job = self._dispatcher.state.jobs[checked.job_id]
            log.warning("%s", describe_mismatches(job, mismatches))
        if checked.lengths:
            await self._learn_lengths(checked.job_id, _command(c.CountBundles, checked))

    def _tasks(self, worker: Worker) -> Iterator[pb.Task]:
        state = self._dispatcher.state
        for task_id in sorted(worker.tasks):
            task = state.tasks[task_id]
            iteration = state.iterations[task.iteration_id]
            job = state.jobs[iteration.job_id]
            yield pb.Task(
                task_id=task_id,
                iteration_id=iteration.iteration_id,
                **fields_of(job, "job_id", "dataset_id", "cross_trainer_cache"),
                sharding=ev.Sharding.Name(job.sharding),
                num_sources=len(iteration.ledgers),
                num_shards=len(state.places) if task.shard is not None else 0,
                shard=task.shard or 0,
                num_consumers=job.num_consumers or 0,
                graph=stored(state.datasets[job.dataset_id].outline).blob,
                order=None if job.order is None else order_message(job.order),
            )

    async def lease_splits(self, request: pb.LeaseSplitsRequest) -> pb.LeaseSplitsResponse:
        self._dispatcher.failure_detector.saw_worker_of(request.task_id)
        command = lease_command(request)
        leased: ev.SplitsLeased | None = await self._dispatcher.execute(command)
        wants = request.want > 0
        if leased is None and wants:
            if (task := self._dispatcher.state.tasks.get(request.task_id)) is not None:
                await self._dispatcher.growing_sources.wait(task.iteration_id, request.source)
            leased = await self._dispatcher.execute(command)
        if leased is None:
            return pb.LeaseSplitsResponse(not_yet=wants)
        response = pb.LeaseSplitsResponse(
            lease_id=leased.lease_id,
            first=leased.first,
            count=leased.count,
            end_of_splits=not leased.count,
            pass_number=leased.pass_number,
        )
        if leased.count:  # the task may be lost by now, if this is a retry
            ledgers = find_iteration(self._dispatcher.state, leased.iteration_id).ledgers
            names = ledgers[leased.source].names
            response.names.extend(names[leased.first : leased.first + leased.count])
        return response

    async def skip_split(self, request: pb.SkipSplitRequest) -> pb.SkipSplitResponse:
        self._dispatcher.failure_detector.saw_worker_of(request.task_id)
        numbered = skip_caller(request.task_id), request.request.number
        skip = _command(c.SkipSplit, request, numbered)
        return pb.SkipSplitResponse(skipped=await self._dispatcher.execute(skip))

    async def complete_task(self, request: pb.CompleteTaskRequest) -> None:
        if request.HasField("metrics"):
            self._dispatcher.user_metrics.told(request.known, [request.metrics])
        await self._dispatcher.execute(c.CompleteTask(task_id=request.task_id))

    async def leave_service(self, request: pb.LeaveServiceRequest) -> None:
        self._dispatcher.user_metrics.told(request.known, request.metrics)
        await self._dispatcher.execute(
            c.LoseWorker(worker_id=request.worker_id, reason=GOODBYE, left=True)
        )

    async def find_gone_consumers(
        self, request: pb.FindGoneConsumersRequest
    ) -> pb.FindGoneConsumersResponse:
        state, failure_detector = self._dispatcher.state, self._dispatcher.failure_detector
        grants = () if self._permissions is None else self._permissions.of_worker()[0]

        def is_others(iteration_id: int) -> bool:
            return not covers(grants, state.jobs[state.iterations[iteration_id].job_id])

        def is_gone(consumer_id: int) -> bool:
            consumer = state.consumers.get(consumer_id)
            if consumer is not None and is_others(consumer.iteration_id):
                return True  # as any number: a pool does not learn which ones others have
            if request.left:
                return consumer_id not in state.consumers
            return failure_detector.is_gone(consumer_id)

        def is_read(task_id: int) -> bool:
            task = state.tasks.get(task_id)
            return (
                task is None
                or is_others(task.iteration_id)
                or bool(state.iterations[task.iteration_id].consumers)
            )

        return pb.FindGoneConsumersResponse(
            gone=filter(is_gone, request.consumer_ids),
            unread_task_ids=itertools.filterfalse(is_read, request.task_ids),
        )

    async def start_save(self, request: pb.StartSaveRequest) -> None:
        if not request.graph:
            raise InvalidArgument("a dataset without a graph; save a tf.data.Dataset")
        require_bytes(request.graph)
        graph = await self._sanitized("StartSave", request)
        await self._dispatcher.saves.start(
            request.path, graph, request.sources, request.metadata, self._numbered(request.request)
        )

    async def commit_chunk(self, request: pb.CommitChunkRequest) -> None:
        await self._dispatcher.execute(_command(c.CommitChunk, request))

    async def end_stream(self, request: pb.EndStreamRequest) -> None:
        kind = c.FailSave if request.code else c.CompleteStream
        await self._dispatcher.execute(_command(kind, request))

    async def get_schedule(self, request: pb.GetScheduleRequest) -> pb.GetScheduleResponse:
        schedules = self._dispatcher.changes.schedules
        job = schedules.find(request.job)
        schedules.steps(job)  # raises FailedPrecondition if the job was never read
        assert job.order is not None
        return pb.GetScheduleResponse(
            dataset_id=job.dataset_id,
            order=order_message(job.order),
            step=job.step,
            drops_remainder=schedules.drops_remainder(job),
        )

    async def change_schedule(self, request: pb.ChangeScheduleRequest) -> pb.ChangeScheduleResponse:
        numbered = self._numbered(request.request)
        if self._permissions is not None and request.fork:
            self._permissions.check_fork(numbered, request, self._dispatcher.state)
        return await self._dispatcher.changes.change(request, numbered, self._who())

    def _who(self) -> str:
        return "" if self._permissions is None else self._permissions.caller()

    async def get_status(self, request: pb.GetStatusRequest) -> pb.GetStatusResponse:
        dispatcher = self._dispatcher
        if request.workers_only:
            workers = State(workers={**dispatcher.state.workers})
            return pb.GetStatusResponse(status=b"".join(encoded_status(workers)).decode())

        found = await in_slices(dispatcher.encoded_status())
        return pb.GetStatusResponse(status=b"".join(found).decode())


def lease_command(request: pb.LeaseSplitsRequest) -> c.LeaseSplits:
    caller, number = lease_caller(request.task_id, request.source), request.request.number
    returned = tuple((r.lease_id, r.count) for r in request.returned)
    numbered = (caller, number) if number else None
    return _command(c.LeaseSplits, request, numbered, returned=returned)


def _command(kind: type[C], message: Message, numbered: Numbered = None, **others: Any) -> C:
    """The command whose fields are those of the message with the same names, and `others`."""
    found = same_fields(kind, message) | {"request": numbered} | others
    if missing := {*kind.__struct_fields__} - found.keys() - _NOT_IN_MESSAGES:
        name = message.DESCRIPTOR.name
        raise TypeError(f"{name} has no {missing} for {kind.__name__}: was one renamed?")
    return kind(**{n: tuple(v) if isinstance(v, list) else v for n, v in found.items()})


_NOT_IN_MESSAGES = {
    *("stock", "worker_address"),  # of TensorFlow's service
    *("grants", "holder"),
}


def _stream(save: Save, number: int) -> pb.Stream:
    stream = save.streams[number]
    return pb.Stream(
        save_id=save.save_id,
        path=save.path,
        stream=number,
        sources=save.definition.sources,
        compression=tf.DistributedSnapshotMetadata.FromString(save.metadata).compression,
        assignment=stream.assignments,
        **fields_of(stream, "first", "count", "chunks", "elements", "last_elements", "last_file"),
    )


def _wait_ms(wanted: int, timeout_ms: int) -> int:
    """How long a heartbeat may wait: it must end well before its sender's timeout."""
    return min(wanted, MAX_WAIT_MS, timeout_ms // 3 if timeout_ms >= 0 else MAX_WAIT_MS)
