from __future__ import annotations

from collections.abc import Iterator

import pytest

from forebay.service import pipelines
from forebay.service.pipelines.tf_data import pipeline
from forebay.service.pipelines.tf_data.traces import Traces


@pytest.fixture(autouse=True, scope="module")
def no_kept_drivers() -> Iterator[None]:
    """These tests look whether threads are left."""
    pipelines.forget_idle()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipeline, "TRACES", Traces(most_with_drivers=0))
        yield
        pipelines.forget_idle()
