"""Looks at elements of further splits, where a dataset's elements are inferred.

The process that registers runs the function for its first split only. Another split may take long,
fail, or end the process: so it runs as on a worker, in a process of its own that is ended in time.
"""

from __future__ import annotations

import contextlib
import json
import logging
import threading
import time
from collections.abc import Iterator
from typing import Any

from ...blocks import Block, Component
from ...errors import ForebayError
from ...proto import forebay_pb2 as pb
from ...structure import leaves_of
from ..files.formats import written
from ..files.record_ranges import column_facts
from ..python.pipeline import PythonPipeline
from ..splits import SplitRange

log = logging.getLogger(__name__)

LOOK_S = 2.0
"""For all splits together, with the start of their process the first time."""

MOST_SPLITS = 8


def widened(request: pb.RegisterDatasetRequest, structure: str, function: Any) -> str:
    """The structure, in which dimensions are unknown that differ among elements of further splits.
    Whatever else those splits do says nothing: reads name it. A function with a `setup`, and a
    Beam chain, is not run again for it: what it sets up may be large, or shared."""
    nodes = json.loads(structure)
    shapes = [node["shape"] for _, node in leaves_of(nodes)]
    known = any(size is not None for shape in shapes for size in shape)
    if not known or hasattr(function, "setup") or hasattr(function, "run_bundle"):
        return structure
    splits = request.sources[0].count
    far = {splits * part // MOST_SPLITS - 1 for part in range(1, MOST_SPLITS + 1)}
    give_up_s = time.monotonic() + LOOK_S
    pipeline = PythonPipeline(request.python, request.sources, structure, may_skip=lambda _: True)
    with contextlib.closing(pipeline):
        for split in sorted((at for at in far if at > 0), reverse=True):
            for block in _first_blocks(pipeline, split, give_up_s):
                for shape, component in zip(shapes, block.components, strict=True):
                    _widen(shape, component)
    return written(nodes)


def _first_blocks(pipeline: PythonPipeline, split: int, give_up_s: float) -> Iterator[Block]:
    """Some first blocks of a split; none once the time is over."""
    if (left_s := give_up_s - time.monotonic()) <= 0:
        return
    run = pipeline.bundle(SplitRange(split, 1, 0), number=split, seed=0)
    timer = threading.Timer(left_s, run.cancel)
    timer.start()
    try:
        with contextlib.closing(run.blocks()) as blocks:
            for count, block in enumerate(blocks, 1):
                yield block
                if count == 2:  # the first one has one element
                    break
    except ForebayError as error:
        log.info("split %d failed as its elements were looked at: %s", split, error)
    finally:
        timer.cancel()
        timer.join()


def _widen(shape: list[int | None], component: Component) -> None:
    _, _, found = column_facts(component)
    for sizes in found.tolist():
        shape[:] = [a if a == b else None for a, b in zip(shape, sizes, strict=True)]
