"""What a fork server imports before it forks children that read files."""

import contextlib

from . import reading  # noqa: F401

with contextlib.suppress(ImportError):
    import pyarrow.compute
    import pyarrow.parquet  # noqa: F401
with contextlib.suppress(ImportError):
    from array_record.python import array_record_module  # noqa: F401
