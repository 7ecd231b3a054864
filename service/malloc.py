"""Tunes the C library's malloc for long-lived processes with large tensors.

Only glibc has these controls (mallopt(3), malloc_trim(3)); elsewhere this module does nothing.
"""

from __future__ import annotations

import ctypes
import functools
import os

# The maximum that glibc allows, and reaches itself in a process that frees large buffers.
MMAP_THRESHOLD_BYTES = 32 << 20
TRIM_THRESHOLD_BYTES = 2 * MMAP_THRESHOLD_BYTES

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3

# The environment variables that glibc reads: mallopt(3), and its tunables.
_ENVIRONMENT = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES")

SYSTEM_ALLOCATOR = "TF_ONEDNN_USE_SYSTEM_ALLOCATOR"
"""The variable that TensorFlow reads when it first makes a tensor of 256 KB or more."""

_libc = ctypes.CDLL(None)


def keep_large_buffers_now() -> None:
    """Make malloc reuse freed buffers of up to MMAP_THRESHOLD_BYTES, until its settings change.

    Settings of malloc in the environment take precedence.
    """
    mallopt = getattr(_libc, "mallopt", None)
    if mallopt is not None and not any(name in os.environ for name in _ENVIRONMENT):
        mallopt(_M_MMAP_THRESHOLD, MMAP_THRESHOLD_BYTES)
        mallopt(_M_TRIM_THRESHOLD, TRIM_THRESHOLD_BYTES)


keep_large_buffers = functools.cache(keep_large_buffers_now)
"""The same, once per process. Call it after a process has opened its first `from_generator`: only
then, TensorFlow (2.21) makes malloc take every buffer of 128 KB or more from the system and return
it at once. From then on the kernel must zero the pages of every large tensor of a trainer."""


def manage_large_tensors() -> None:
    """Make TensorFlow use malloc for large tensors, so that `give_back` can release them.

    For a process that works only for the service, before it imports TensorFlow. With oneDNN,
    TensorFlow (2.21) has its own allocator for buffers of 256 KB or more, which never shrinks. A
    worker that 25 trainers read from at once held 2.1 GB after all of them were gone.

    The environment's own setting takes precedence.
    """
    if os.environ.setdefault(SYSTEM_ALLOCATOR, "1") == "1":
        keep_large_buffers()  # until a task ends, so that its tensors need no new pages


def give_back() -> None:
    """Return the free memory of all threads to the system.

    Otherwise malloc keeps a thread's freed memory for later threads. It takes some milliseconds,
    more for more memory.
    """
    if (malloc_trim := getattr(_libc, "malloc_trim", None)) is not None:
        malloc_trim(0)
