"""A trainer in a thread, for clusters that are looked at while somebody reads."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Any

from forebay import service


@contextlib.contextmanager
def slow_trainer(target: str, dataset_id: str, step_s: float, **how: Any) -> Iterator[None]:
    """Takes at least `step_s` for an element: elements wait for it, and seldom it for them."""
    elements = service.read(target, dataset_id, processing_mode="distributed_epoch", **how)

    def read() -> None:
        for _ in elements:
            time.sleep(step_s)

    reader = threading.Thread(target=read)
    reader.start()
    try:
        yield
    finally:
        elements.leave()
        reader.join()
