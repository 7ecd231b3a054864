from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from forebay.service import pipelines
from forebay.service.pipelines.kinds.file_inspector import fork_server_kept
from forebay.service.pipelines.kinds.files import definition
from forebay.service.pipelines.tf_data import pipeline
from forebay.service.pipelines.tf_data.traces import Traces
from forebay.service.proto import forebay_pb2 as pb

pytest.register_assert_rewrite("forebay.service.formats.contract")


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
def register() -> Callable[..., pb.RegisterDatasetRequest]:
    """What a dispatcher gets of files of records."""
    return definition
