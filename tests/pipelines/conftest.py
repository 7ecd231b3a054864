from __future__ import annotations

from collections.abc import Iterator

import pytest

from forebay.service import pipelines
from forebay.service.pipelines.tf_data.pipeline import TRACES


@pytest.fixture(autouse=True, scope="module")
def ends_with_its_pipeline() -> Iterator[None]:
    """What drives bundles: these tests look whether threads are left."""
    pipelines.forget_idle()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TRACES, "_most_driven", 0)
        yield
