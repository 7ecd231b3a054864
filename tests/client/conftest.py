"""No test leaves TensorFlow's global seed behind: graphs of other tests would draw by it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import tensorflow as tf


@pytest.fixture(autouse=True)
def no_global_seed() -> Iterator[None]:
    yield
    tf.random.set_seed(None)
