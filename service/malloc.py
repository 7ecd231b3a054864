"""What processes that live long, and handle large tensors, tell the C library's malloc.

Only glibc has these controls (mallopt(3), malloc_trim(3)); elsewhere nothing happens.
"""

from __future__ import annotations

import ctypes
import functools
import os

# What glibc itself arrives at, in time, in a process that frees large buffers; no more is allowed.
MMAP_THRESHOLD_BYTES = 32 << 20
TRIM_THRESHOLD_BYTES = 2 * MMAP_THRESHOLD_BYTES

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3

# What glibc reads: mallopt(3), and its tunables.
_ENVIRONMENT = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES")

SYSTEM_ALLOCATOR = "TF_ONEDNN_USE_SYSTEM_ALLOCATOR"
"""What TensorFlow reads when it first makes a tensor of 256 KB or more."""

_libc = ctypes.CDLL(None)


@functools.cache
def keep_large_buffers() -> None:
    """`keep_large_buffers_now`, once and for all.

    To be called after the first `from_generator` of a process has been opened: with that one,
    and no other, TensorFlow (2.21) has malloc take every buffer of 128 KB or more from the system
    and give it back at once. From then on *any* step of a trainer that makes a large tensor has
    the kernel zero its pages first.
    """
    keep_large_buffers_now()


def keep_large_buffers_now() -> None:
    """Have malloc use freed buffers of up to MMAP_THRESHOLD_BYTES again, until it is told other.

    Where the environment says something of malloc's, that stays.
    """
    mallopt = getattr(_libc, "mallopt", None)
    if mallopt is not None and not any(name in os.environ for name in _ENVIRONMENT):
        mallopt(_M_MMAP_THRESHOLD, MMAP_THRESHOLD_BYTES)
        mallopt(_M_TRIM_THRESHOLD, TRIM_THRESHOLD_BYTES)


def manage_large_tensors() -> None:
    """Have TensorFlow take large tensors from malloc, from which `give_back` gives them back.

    For a process that does nothing but work for the service, before it imports TensorFlow. With
    oneDNN, TensorFlow (2.21) has an allocator of its own for buffers of 256 KB or more, which keeps
    for good what was ever in use at a time: a worker that 25 trainers read from at once held 2.1 GB
    when all of them were gone.

    Where the environment says something else, that stays.
    """
    if os.environ.setdefault(SYSTEM_ALLOCATOR, "1") == "1":
        keep_large_buffers()  # until a task ends, so that none of its tensors needs new pages


def give_back() -> None:
    """Give memory that is free back to the system, all threads'.

    Otherwise malloc keeps what a thread has freed for threads that come after it. It takes some
    milliseconds, more if there is more to give.
    """
    if (malloc_trim := getattr(_libc, "malloc_trim", None)) is not None:
        malloc_trim(0)
