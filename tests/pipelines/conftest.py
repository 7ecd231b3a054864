from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from forebay.service import pipelines
from forebay.service.client import files as module
from forebay.service.client.file_inspector import fork_server_kept
from forebay.service.client.files import register_files
from forebay.service.pipelines.tf_data import pipeline
from forebay.service.pipelines.tf_data.traces import Traces
from forebay.service.proto import forebay_pb2 as pb


@pytest.fixture(autouse=True, scope="module")
def no_kept_drivers() -> Iterator[None]:
    """These tests look whether threads are left."""
    pipelines.forget_idle()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipeline, "TRACES", Traces(most_with_drivers=0))
        yield
        pipelines.forget_idle()


@pytest.fixture(autouse=True, scope="session")
def one_fork_server_for_all_registrations() -> Iterator[None]:
    with fork_server_kept():
        yield


@pytest.fixture
def register(monkeypatch: pytest.MonkeyPatch) -> Callable[..., pb.RegisterDatasetRequest]:
    """`register_files`, which gives the request that a dispatcher would get."""
    sent: list[pb.RegisterDatasetRequest] = []

    def keep(_: Any, request: pb.RegisterDatasetRequest) -> str:
        sent.append(request)
        return "id"

    monkeypatch.setattr(module, "registered", keep)

    def made(files: Any, **how: Any) -> pb.RegisterDatasetRequest:
        assert register_files("nobody:1", files, **how) == "id"
        return sent.pop()

    return made
