"""Copies tensors to a GPU while it computes, from memory that its driver reads directly.

A CUDA copy from ordinary memory first goes through a buffer of the driver, at the speed of one
processor. So the memory that workers share with this process (service/shared.py) is registered with
the driver, once for each slab; the GPU then reads the received block itself. Such a copy goes on
after the call that began it, and the worker writes into a slab again as soon as no array refers to
it. Therefore each tensor is kept here until its copy is complete. Trainers never see a tensor in
registered memory: one that they copied with `non_blocking` and dropped would be overwritten.
"""

from __future__ import annotations

import collections
import logging
import mmap
import os
import weakref
from typing import Any

import numpy as np
import torch

from ..errors import InvalidArgument

log = logging.getLogger(__name__)

MOST_PENDING = 2
"""Copies that may be incomplete at a time. They hold slabs, of which a worker has few."""

PORTABLE = 1  # cudaHostRegisterPortable: for the contexts of all devices


def device_of(device: Any) -> torch.device | None:
    """The device that was asked for, with its number. Raises InvalidArgument if there is none."""
    if device is None:
        return None
    try:
        found = torch.device(device)
        torch.empty(0, device=found)
    except (RuntimeError, AssertionError, TypeError) as error:
        raise InvalidArgument(
            f"device={device!r}: this process cannot use it ({str(error).splitlines()[0]}); give "
            'one such as "cuda" or "cuda:1", or leave it out for tensors in ordinary memory'
        ) from None
    if found.type == "cuda" and found.index is None:
        found = torch.device("cuda", torch.cuda.current_device())
    return found


class DeviceCopies:
    """Copies tensors to one device, in a stream of their own. Called by one thread."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._pending: collections.deque[tuple[Any, torch.Tensor]] = collections.deque()
        weakref.finalize(self, _complete, self._pending).atexit = False

    def __call__(self, tensor: Any) -> Any:
        """The tensor on the device. The work that its current stream gets from now on waits for
        the copy; this call does not. Returns anything but a tensor as it is."""
        if not isinstance(tensor, torch.Tensor):
            return tensor
        if self._stream is None:
            return tensor.to(self._device)
        using = torch.cuda.current_stream(self._device)
        with torch.cuda.stream(self._stream):
            copy = tensor.to(self._device, non_blocking=True)
            done = self._stream.record_event()
        using.wait_event(done)
        copy.record_stream(using)
        self._pending.append((done, tensor))
        _complete(self._pending, MOST_PENDING)
        return copy


def _complete(pending: collections.deque[tuple[Any, torch.Tensor]], most: int = 0) -> None:
    """Drop the tensors that were copied; wait until at most so many are left."""
    while pending and (len(pending) > most or pending[0][0].query()):
        pending[0][0].synchronize()
        pending.popleft()


class MapRegistered:
    """Maps shared memory and registers it with the driver of a CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def __call__(self, descriptor: int, size: int) -> mmap.mmap:
        memory = _Registered(descriptor, size)
        memory.register(self._device)
        return memory


class _Registered(mmap.mmap):
    """A mapping that is registered until it ends. A weak reference's callback would come too late:
    mmap.mmap calls it when it has unmapped the memory, whose address may be used again."""

    _registered: tuple[torch.device, int, int] | None = None  # the last: in which process

    def register(self, device: torch.device) -> None:
        address = np.frombuffer(self, np.uint8).ctypes.data
        with torch.cuda.device(device):
            error = torch.cuda.cudart().cudaHostRegister(address, len(self), PORTABLE)
        if int(error):
            log.warning(
                "%d bytes of shared memory cannot be registered with %s (CUDA error %d): they are "
                "copied through the driver's buffer, which is slower",
                len(self), device, int(error),
            )  # fmt: skip
        else:
            self._registered = device, address, os.getpid()

    def __del__(self) -> None:
        if self._registered is not None and self._registered[2] == os.getpid():
            device, address, _ = self._registered
            with torch.cuda.device(device):
                torch.cuda.cudart().cudaHostUnregister(address)
