"""What a fork server imports before it forks children that read files.

malloc keeps large buffers: pages that go back to the system are cleared for each block. Arrow has
an allocator of its own, which takes large pages, and so a tenth of the page faults.
"""

import contextlib

from ... import malloc
from . import inspecting, reading  # noqa: F401

malloc.keep_large_buffers_now()
with contextlib.suppress(ImportError):
    import pyarrow.compute
    import pyarrow.parquet  # noqa: F401
with contextlib.suppress(ImportError):  # many functions decode images
    from PIL import Image

    Image.preinit()
with contextlib.suppress(ImportError):
    from array_record.python import array_record_module  # noqa: F401
