"""`ServiceDataset`: a dataset of the service in PyTorch, without TensorFlow.

All processes that read one share a job: the ranks of a training, and the workers of each rank's
DataLoader. The service gives each element to one of them. What a rank and its workers have to agree
on is in `loaders.py`.
"""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterableDataset

from ..blocks import Component, Strings
from ..client.options import ShardingPolicy
from ..client.taking import Taking
from ..errors import InvalidArgument
from .batches import Layout, check_batch_size, laid_out
from .context import TaskContext
from .jobs import Service, bound_of, evaluates, open_job
from .loaders import LoaderWords

AT_ONCE = 1024
"""Elements that are made tensors of at a time: a block may have a million of them."""


class ServiceDataset(IterableDataset):  # type: ignore[misc]
    """Reads a registered dataset as tensors: an `IterableDataset`, for a DataLoader or alone.

    Args:
      service: as in `forebay.service.read`.
      dataset_id: what `register_dataset` returned.
      processing_mode: as in `read`; by default DYNAMIC, by which each element comes once an epoch.
      job_name: of this training, the same in all its ranks, which share the elements, and when it
        is started again. By default one of this object's own; with several ranks it is needed.
      batch_size: elements in a batch, which is made here, by the block: give the DataLoader
        `batch_size=None` then. By default elements come one by one, as they were registered.
      drop_remainder: leave out what makes no whole batch at the end, of each reading process.
      pad_value: what elements whose shapes differ are filled up with in a batch, to the largest of
        it; or values nested like the elements, as in `{"tokens": 0, "labels": -100}`. Without one
        they come as lists, as do all components whose shape was not registered in full.
      rank, world_size: of this process among those that train. By default what
        `torch.distributed` says, if it is initialized, else the environment (`TaskContext`). Who
        is an evaluator by that reads everything, alone: its job is its own, whatever `job_name`
        and `initial_epoch` are.
      initial_epoch: how many epochs of the job are over, for who goes on from a checkpoint.
      max_outstanding_requests: at most so many elements are on their way to each reading process,
        or here. "AUTO" is no bound for one rank, or a dataset without an end, and otherwise two
        batches, or 16 elements if that is more, lest one rank takes what the others wait for.
      data_transfer_protocol, target_workers: as in `read`.

    Each iteration is the job's next epoch, in the DataLoader's workers as in this process, however
    they are started; `set_epoch` says another. It can be pickled, and a copy goes on by itself. One
    dataset is for one DataLoader at a time. Under a `PreemptionHandler`, SIGTERM ends the workers'
    iterations as well, and what they had not given is handed back.

    Components are tensors, which share memory with the block that was received if that may be
    written to; what a worker in this very process hands over is copied. Strings are `bytes`, in
    lists with as many levels as dimensions. bfloat16 and float8 are PyTorch's own. A ragged tensor
    is a named tuple (values, row_splits), which `torch.nested.nested_tensor_from_jagged` takes, a
    sparse one (indices, values, dense_shape); batches have lists of them. An element is a view
    of its block: clone what is kept for long, or saved.

    Raises NotFound for an unknown dataset, Unimplemented if it cannot be split as processing_mode
    asks, InvalidArgument (a ValueError) for arguments that make no sense, and FailedPrecondition
    if more epochs of the job are over than `initial_epoch`, or this is a parameter server.
    """

    def __init__(
        self,
        service: Service,
        dataset_id: str,
        *,
        processing_mode: ShardingPolicy | str = ShardingPolicy.DYNAMIC,
        job_name: str | None = None,
        batch_size: int | None = None,
        drop_remainder: bool = False,
        pad_value: Any = None,
        rank: int | None = None,
        world_size: int | None = None,
        initial_epoch: int = 0,
        max_outstanding_requests: int | str | None = "AUTO",
        data_transfer_protocol: str | None = None,
        target_workers: str = "AUTO",
    ) -> None:
        super().__init__()
        check_batch_size(batch_size)
        self.rank, self.world_size, alone = _place(rank, world_size)
        bound, automatic = bound_of(max_outstanding_requests)
        job = open_job(
            service,
            dataset_id,
            self.world_size,
            processing_mode=processing_mode,
            job_name=job_name,
            initial_epoch=initial_epoch,
            bound=bound,
            data_transfer_protocol=data_transfer_protocol,
            target_workers=target_workers,
            unnamed=f"torch/{uuid.uuid4().hex}",  # the workers of a DataLoader share it
            alone=alone,
        )
        self._job = job.in_step(batch_size or 1) if automatic else job
        self.batch_size, self.drop_remainder = batch_size, drop_remainder
        self._pad_value = pad_value
        self._layout()  # raises for a pad_value that does not fit
        self._common = LoaderWords(job.epochs_over)

    def __iter__(self) -> Taking:
        """The next epoch's elements or batches. Raises PipelineError when the pipeline fails."""
        reader = self._job.reader(self._common.next())
        give = partial(
            laid_out,
            layout=self._layout(),
            batch_size=self.batch_size,
            drop_remainder=self.drop_remainder,
        )
        return self._common.read(reader, give)

    def __len__(self) -> int:
        """Elements, or batches, of an epoch, by what the registered dataset says of itself: each of
        several DataLoader workers has a remainder of its own. Raises TypeError where it does not
        say, or others may have a part of them.
        """
        return self._job.length(self.batch_size, drop_remainder=self.drop_remainder)

    def set_epoch(self, epoch: int) -> None:
        """The next iteration is this epoch, from 0, and those behind it go on from there: as with
        a DistributedSampler, whose users call it before each. While none is under way. An epoch
        that was read to its end is empty."""
        if isinstance(epoch, bool) or not isinstance(epoch, int) or epoch < 0:
            raise InvalidArgument(f"epoch={epoch!r} must be an integer from 0 on")
        self._common.set(epoch)

    def _layout(self) -> Layout:
        return Layout(self._job.structure, tensor_of, self._pad_value, _tensors_of)


def _place(rank: int | None, world_size: int | None) -> tuple[int, int, bool]:
    """Of this process among those that train; and whether it is none of them, but an evaluator."""
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
    """A tensor of an array or a NumPy scalar, which shares its memory if that may be written to;
    strings as `bytes`, or lists of them. Raises InvalidArgument for a dtype that PyTorch lacks.
    """
    if isinstance(value, bytes):
        return value
    array = np.asarray(value)
    if array.dtype == object:
        return array.tolist()
    if not array.flags.writeable:  # PyTorch has no such tensors, and what is written would be kept
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


def _tensors_of(component: Component) -> Iterator[Any]:
    """Of each element."""
    if component.shapes is not None or isinstance(component.values, Strings):
        return map(tensor_of, component.elements())
    parts = tensor_of(component.values).split(AT_ONCE)
    return itertools.chain.from_iterable(part.unbind() for part in parts)
