"""What a fork server imports before it forks children that read files.

Arrow's own allocator returns large buffers to the system, whose pages are then cleared for each
block: reading strings took 1.7 times as long. So Arrow uses malloc, which keeps them.
"""

import contextlib
import os

from ... import malloc
from . import inspecting, reading  # noqa: F401

os.environ.setdefault("ARROW_DEFAULT_MEMORY_POOL", "system")  # read when Arrow is imported
malloc.keep_large_buffers_now()
with contextlib.suppress(ImportError):
    import pyarrow.compute
    import pyarrow.parquet  # noqa: F401
with contextlib.suppress(ImportError):
    from array_record.python import array_record_module  # noqa: F401
