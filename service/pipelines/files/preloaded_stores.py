"""What a fork server imports, too, before it forks children that read object stores: boto3 would
take each of them a tenth of a second. None of it starts a thread."""

import contextlib

with contextlib.suppress(ImportError):
    import obstore.auth.boto3  # noqa: F401
