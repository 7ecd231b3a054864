"""`ServiceDataset`: a dataset of the service in PyTorch, without TensorFlow.

All processes that read one share a job: the ranks of a training, and the workers of each rank's
DataLoader. The service gives each element to one of them. `loaders.py` has the state that a rank
shares with its workers.
"""

from __future__ import annotations

import itertools
import logging
import uuid
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, Unpack

import numpy as np
import torch
from torch.utils.data import IterableDataset, get_worker_info

from ..blocks import Component, Rows, Strings
from ..client.batches import Layout, laid_out
from ..client.options import ShardingPolicy, TrainingArguments, take_batches
from ..client.positions import OrderedRead, StartingPoint
from ..client.progress import EpochIterator
from ..client.saved_states import opened, sealed
from ..errors import FailedPrecondition, InvalidArgument
from ..task_context import TaskContext
from .jobs import OrderedIteration, ReadsInOrder, Service, bound_of, evaluates, open_job
from .loaders import SharedLoaderState
from .pytorch_device import DeviceCopies, MapRegistered, device_of

log = logging.getLogger(__name__)

AT_ONCE = 1024
"""How many elements become tensors at a time: a block may have a million."""


class ServiceDataset(ReadsInOrder, IterableDataset):  # type: ignore[misc]
    """Reads a registered dataset as tensors: an `IterableDataset`, for a DataLoader or alone.

    Args:
      service: as in `forebay.service.read`.
      dataset_id: what `register_dataset` returned.
      processing_mode: as in `read`; by default DYNAMIC, which reads each element once per epoch.
      job_name: of this training, the same in all its ranks and after restarts. All ranks share its
        elements. By default this object has a job of its own. Several ranks need a name.
      batch_size: elements in a batch, which is made here, from blocks: give the DataLoader
        `batch_size=None` then. By default elements come one by one, as they were registered.
      drop_remainder: leave out the last, smaller batch of each reading process.
      pad_value: the value that pads elements of different shapes to the largest of their batch; or
        values nested like the elements, as in `{"tokens": 0, "labels": -100}`. Without one, a batch
        has a list for each component whose shape was not registered in full.
      rank, world_size: of this process among those that train. By default `torch.distributed` says
        it, if it is initialized, else the environment (`TaskContext`). An evaluator reads all
        elements, in a job of its own, and ignores `job_name` and `initial_epoch`.
      initial_epoch: how many epochs of the job are over, to resume from a checkpoint.
      max_outstanding_requests: the maximum number of elements on their way to each reading process
        or buffered in it. "AUTO" is unbounded for one rank or an infinite dataset. Otherwise it is
        two batches, or 16 elements if that is more, so that no rank takes what others wait for.
      device: where the tensors shall be, such as "cuda"; by default in ordinary memory. Copies to a
        GPU run while it computes, from pinned memory if the worker is on this host; the current
        stream waits for them. Strings stay where they are. A DataLoader needs `num_workers=0`.
      ordered: read in one global order, whose consumers are the ranks. With it, drop_remainder
        leaves out the last, smaller global batch.
      **options: as in `read`.

    In an ordered read, an iteration that was read to its end is followed by the next epoch, and one
    that was left early begins again where it began. `state_dict` has the position, and the next
    iteration goes on at it after `load_state_dict`. Several iterations do not disturb each other;
    with several ranks or a job_name, the newest one takes the place of older ones, which raise
    FailedPrecondition. An ordered read takes a DataLoader with at most one worker.

    Otherwise each iteration is the job's next epoch, in this process and in the DataLoader's
    workers, however they are started. `set_epoch` chooses another one.

    Use one dataset for one DataLoader at a time. Under a `PreemptionHandler`, SIGTERM also ends the
    workers' iterations, which hand back the elements that they had not given.

    It can be pickled. A copy counts its own epochs and reads the same job, so each element comes to
    only one of the copies, as with ranks. With one rank, a warning says so.

    Components are tensors. They share memory with the received block if that is writable; blocks
    from a worker in this process are copied. Strings are `bytes`, in lists with as many levels as
    dimensions. bfloat16 and float8 are PyTorch's own. A ragged tensor is a named tuple (values,
    row_splits), which `torch.nested.nested_tensor_from_jagged` takes. A sparse one is (indices,
    values, dense_shape). Batches have lists of them. An element is a view of its block: clone
    elements that you keep for long or save.

    Raises NotFound for an unknown dataset, Unimplemented if processing_mode cannot split it, and
    InvalidArgument (a ValueError) for invalid arguments. Raises FailedPrecondition if more epochs
    of the job are over than `initial_epoch`, or on a parameter server.
    """

    _loaded: StartingPoint | None = None  # by a DataLoader's worker, for its next iteration

    def __init__(
        self,
        service: Service,
        dataset_id: str,
        *,
        processing_mode: ShardingPolicy | str = ShardingPolicy.DYNAMIC,
        pad_value: Any = None,
        rank: int | None = None,
        world_size: int | None = None,
        max_outstanding_requests: int | str | None = "AUTO",
        device: torch.device | str | int | None = None,
        **options: Unpack[TrainingArguments],
    ) -> None:
        super().__init__()
        self.device = device_of(device)
        self.batch_size, self.drop_remainder = take_batches(options)
        self.rank, self.world_size, alone = _place(rank, world_size)
        bound, automatic = bound_of(max_outstanding_requests)
        job = open_job(
            service,
            dataset_id,
            self.world_size,
            processing_mode=processing_mode,
            bound=bound,
            unnamed=f"torch/{uuid.uuid4().hex}",  # the workers of a DataLoader share it
            alone=alone,
            rank=self.rank,
            **options,
        )
        job = job.in_step(self.batch_size or 1) if automatic else job
        if self.device is not None and self.device.type == "cuda":
            job = replace(job, options=replace(job.options, map_memory=MapRegistered(self.device)))
        self._job = job
        self._pad_value = pad_value
        self._layout()  # raises for a pad_value that does not fit
        self._common = SharedLoaderState(job.options.initial_epoch)
        self._copied = False
        read = job.options.ordered
        self.ordered = read is not None
        if read is not None:
            self._begin_at(read)

    def __getstate__(self) -> dict[str, Any]:
        if (last := self._last) is not None:
            last = last.copy()
            last.move_to(*self._next_start)  # there, the next iteration of the copy begins
        return self.__dict__ | {"_open": None, "_last": last}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._copied = True
        self._open = weakref.WeakSet()

    def __iter__(self) -> EpochIterator | OrderedIteration:
        """The next epoch's elements or batches. Raises PipelineError when the pipeline fails."""
        if self.ordered:
            return self._read_in_order()
        if self._copied and self.world_size == 1 and get_worker_info() is None:
            self._copied = False  # warn only once
            log.warning(
                "this ServiceDataset is a copy of one of the job %r, and both read that job: each "
                "element of an epoch comes to one of them only. Make a ServiceDataset with a "
                "job_name of its own for what shall read everything", self._job.name,
            )  # fmt: skip
        epoch = self._common.next()
        reader = self._job.reader(initial_epoch=epoch - 1)
        give = partial(
            laid_out,
            layout=self._layout(),
            batch_size=self.batch_size,
            drop_remainder=self.drop_remainder,
        )
        iteration = self._common.read(reader, give)
        if not (by_worker := get_worker_info() is not None):  # else the loop may not be at the end
            iteration.at_end = partial(self._common.end, epoch)
        self._common.read_by_worker = by_worker
        return iteration

    def __len__(self) -> int:
        """Elements or batches of an epoch, from the registered cardinality. Each of several
        DataLoader workers adds a remainder of its own. Raises TypeError if the cardinality is
        unknown, or others may read a part.
        """
        return self._job.length(self.batch_size, drop_remainder=self.drop_remainder)

    def set_epoch(self, epoch: int) -> None:
        """Makes the next iteration this epoch, from 0; later ones continue from there. Call it
        while no iteration runs, as before each epoch with a DistributedSampler. An epoch that was
        read to its end is empty."""
        if isinstance(epoch, bool) or not isinstance(epoch, int) or epoch < 0:
            raise InvalidArgument(f"epoch={epoch!r} must be an integer from 0 on")
        if self.ordered:
            raise FailedPrecondition(
                f"set_epoch({epoch}) of an ordered read, which goes on by itself: leave it out, or "
                "give start_step or start_position, or load_state_dict()"
            )
        self._common.set(epoch)

    # -- ordered reads -------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The position of an ordered read behind what it has given here: JSON of under 300 bytes.
        Of several iterations it is that of the one that gave last. Of another read, the number of
        epochs that are over: the job knows what was read of the next one.

        torchdata's StatefulDataLoader calls it where the dataset is read, so that it is that of the
        batch that the trainer was given. In the trainer's process it raises FailedPrecondition once
        a DataLoader's worker has read: the worker is ahead of the trainer. It also does if the
        newest iteration was left in its midst, and another one is still open.
        """
        if get_worker_info() is None and self._common.read_by_worker:
            raise FailedPrecondition(
                "state_dict() where a DataLoader's worker has read ahead of the trainer: use "
                "num_workers=0, or torchdata's StatefulDataLoader and its state_dict(); with a "
                "constant global batch, start_step= needs only the number of steps"
            )
        if not self.ordered:
            return sealed({"epochs_over": self._common.epochs_over})
        return super().state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The next iteration begins at the state's position, or reads the epoch behind those that
        are over, or what the job has left of it.

        Raises InvalidArgument for what is no state, and FailedPrecondition for the state of another
        dataset, order or global batch.
        """
        if self.ordered:
            super().load_state_dict(state)
        elif (over := opened(state).get("epochs_over")) is not None:
            self.set_epoch(over)
        else:
            raise FailedPrecondition("the state is of an ordered read: give ordered=True")

    @property
    def _next_start(self) -> StartingPoint:
        return self._common.next_start

    @_next_start.setter
    def _next_start(self, start: StartingPoint) -> None:
        self._common.next_start = start

    def _begin_at(self, ordered: OrderedRead) -> None:
        super()._begin_at(ordered)
        self._common.read_by_worker = False
        self._loaded = None
        if get_worker_info() is not None:
            # Of an epoch that was read to its end, a StatefulDataLoader has a worker load the state
            # behind the last batch, and begins another worker for the next epoch.
            self._loaded = ordered.start
            self._next_start = self._loaded._replace(in_epoch=False)

    def _move_on(self, ordered: OrderedRead, begun: StartingPoint) -> None:
        super()._move_on(ordered, begun)
        if get_worker_info() is not None and ordered.epoch is not None:
            ordered.epoch.over = False  # the trainer's loop has the last batch, and may save there

    def _read_in_order(self) -> OrderedIteration:
        loader = get_worker_info()
        if loader is not None and loader.num_workers > 1:
            raise InvalidArgument(
                f"num_workers={loader.num_workers} of an ordered read: each would read all of this "
                "rank's elements. Use num_workers=1 or 0; the pipeline already runs on the "
                "service's workers"
            )
        if loader is not None:
            self._open.clear()  # those of the process that was forked
        self._common.read_by_worker = loader is not None
        give = partial(laid_out, layout=self._layout(), batch_size=self.batch_size)
        start, self._loaded = self._loaded, None
        return self._iteration(partial(self._common.read, give=give), start)

    def _layout(self) -> Layout:
        if self.device is None:
            return Layout(self._job.structure, tensor_of, self._pad_value, _tensors_of)
        if get_worker_info() is not None:
            raise InvalidArgument(
                f"device={str(self.device)!r} in a DataLoader's worker, which is another process: "
                "use num_workers=0, as the pipeline runs on the service's workers; or leave device "
                "out"
            )
        place = DeviceCopies(self.device)
        return Layout(
            self._job.structure,
            lambda value: place(tensor_of(value)),
            self._pad_value,
            partial(_tensors_of, place=place),
        )


def _place(rank: int | None, world_size: int | None) -> tuple[int, int, bool]:
    """The rank and world size of this process, and whether it is an evaluator."""
    if (rank is None) != (world_size is None):
        raise InvalidArgument(f"rank={rank} world_size={world_size}: give both, or neither")
    if rank is not None and world_size is not None:
        if not 0 <= rank < world_size:
            raise InvalidArgument(
                f"rank={rank} world_size={world_size}: expected a rank from 0 to world_size - 1"
            )
        return rank, world_size, False
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
        if world_size > 1:
            return rank, world_size, False
        return rank, world_size, evaluates(TaskContext.from_env())
    context = TaskContext.from_env()
    if evaluates(context) or context.rank is None:
        return 0, 1, True
    return context.rank, context.num_consumers, False


# -- tensors ---------------------------------------------------------------------------------------


def tensor_of(value: Any) -> Any:
    """A tensor of an array or a NumPy scalar, which shares its memory if that is writable. Strings
    become `bytes`, or lists of them. Raises InvalidArgument for a dtype that PyTorch lacks.
    """
    if isinstance(value, bytes):
        return value
    array = np.asarray(value)
    if array.dtype == object:
        return array.tolist()
    if not array.flags.writeable:  # PyTorch has no read-only tensors; writes would hit the owner
        array = array.copy()
    if array.dtype.isbuiltin == 1:
        return torch.from_numpy(array)
    dtype = getattr(torch, array.dtype.name, None)
    if dtype is None or dtype.itemsize != array.itemsize or not (dtype.is_floating_point):
        raise InvalidArgument(
            f"PyTorch has no {array.dtype.name}: map the dataset to another dtype before it is "
            "registered"
        )
    return torch.from_numpy(array.view(f"u{array.itemsize}")).view(dtype)


def _tensors_of(
    component: Component, place: Callable[[Any], Any] = lambda tensor: tensor
) -> Iterator[Any]:
    """The tensors of each element, where `place` puts them."""
    if (
        isinstance(component, Rows)
        or component.shapes is not None
        or isinstance(component.values, Strings)
    ):
        return map(place, map(tensor_of, component.elements()))
    parts = tensor_of(component.values).split(AT_ONCE)
    return itertools.chain.from_iterable(place(part).unbind() for part in parts)
