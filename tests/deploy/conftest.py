"""Images and Secrets that tests share."""

from __future__ import annotations

import pytest

from . import manifests
from .images import Images


@pytest.fixture(scope="session")
def images(tmp_path_factory: pytest.TempPathFactory) -> Images:
    return Images(tmp_path_factory.mktemp("images"))


@pytest.fixture(scope="session")
def secrets(tmp_path_factory: pytest.TempPathFactory) -> tuple[manifests.Object, ...]:
    """Those that deploy/certificates makes."""
    return manifests.secrets(tmp_path_factory.mktemp("secrets"))
