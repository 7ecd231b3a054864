"""Images and Secrets that tests share."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from . import manifests
from .images import Images


@pytest.fixture(scope="session")
def images() -> Iterator[Images]:
    """They are large: on a disk, and not kept."""
    with tempfile.TemporaryDirectory(dir="/var/tmp", ignore_cleanup_errors=True) as directory:
        yield Images(Path(directory))


@pytest.fixture(scope="session")
def secrets(tmp_path_factory: pytest.TempPathFactory) -> tuple[manifests.Object, ...]:
    """Those that deploy/certificates makes."""
    return manifests.secrets(tmp_path_factory.mktemp("secrets"))
