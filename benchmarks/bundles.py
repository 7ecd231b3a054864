"""Row `bundles`: a pipeline run bundle by bundle, on an iterator each, beside one long run.

Pipelines run in a separate process, without a service; a split is a file, and so is a bundle. The
process answers questions for elements/s, a line of JSON each:

python -m forebay.benchmarks.bundles DIRECTORY
"""

from __future__ import annotations

import functools
import itertools
import json
import pathlib
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from .contents import IMAGES, JPEGS, Content
from .results import Better, Finding, Result
from .servers import Responder
from .setting import Setting

FILES = 100_000  # too many to finish during the measurement
CONTENTS = {"images": IMAGES, "jpegs": JPEGS}
FIXED = "fixed"  # bundles of one number each
SMALL_BUNDLES = 300


def bundles(setting: Setting) -> list[Finding]:
    for content in CONTENTS.values():
        content.write(setting.files, quick=setting.quick, forms=set())
    with Responder("forebay.benchmarks.bundles", setting.files) as pipelines:
        pipelines.answer()

        def asked(what: str, how: str) -> Callable[[], float]:
            question = {"what": what, "how": how, "seconds": setting.seconds}

            def ask() -> float:
                pipelines.ask(question)
                return float(pipelines.answer())

            return ask

        sides = {
            f"{what} {how} {width}": asked(f"{what} {width}", how)
            for what in CONTENTS
            for width in WIDTHS
            for how in ("bundles", "long")
        }
        figures = setting.alternate(**sides, fixed=asked(FIXED, "bundles"))
    compared = [
        Result(
            row="bundles",
            what=f"{described}, {read}: bundles of a file, one after another; peer: one long run",
            unit="elements/s",
            better=Better.MORE,
            ours=figures[f"{what} bundles {width}"],
            peer=figures[f"{what} long {width}"],
            required_ratio=required,
        )
        for what, described, required in (
            ("jpegs", "JPEG photographs, decoded", 0.97),
            ("images", "150 KB raw images", 0.95),
        )
        for width, (read, _) in WIDTHS.items()
    ]
    cost = Result(
        row="bundles",
        what="a bundle of one number: open, first block, end",
        unit="ms",
        better=Better.LESS,
        ours=figures["fixed"],
        required=3,
    )
    return [*compared, cost]


def _one_by_one(files: Any, records: Callable[[Any], Any]) -> Any:
    return files.flat_map(records)


def _in_parallel(files: Any, records: Callable[[Any], Any]) -> Any:
    import tensorflow as tf

    return files.interleave(records, cycle_length=2, num_parallel_calls=tf.data.AUTOTUNE)


WIDTHS: dict[str, tuple[str, Callable[[Any, Callable[[Any], Any]], Any]]] = {
    "flat": ("flat_map", _one_by_one),
    "parallel": ("interleave in parallel", _in_parallel),
}


# -- the process ----------------------------------------------------------------------------------


def _dataset(content: Content, directory: pathlib.Path, width: str) -> Any:
    import tensorflow as tf

    from .file_pipelines import DECODERS

    files = tf.data.Dataset.range(FILES).map(lambda _: str(content.files(directory)))
    records = WIDTHS[width][1](files, tf.data.TFRecordDataset)
    return records.map(DECODERS[content.name], num_parallel_calls=tf.data.AUTOTUNE)


class _Feed:
    """All splits, one at a time."""

    def __init__(self, sources: Any) -> None:
        self.sources = sources
        self._next = itertools.count()

    def next_range(self, source: int, opening: int, endless: bool) -> Any:
        from ..service.pipelines import SplitRange

        return SplitRange(next(self._next), 1, opening) if opening == 0 else None

    def is_over(self, sources: Iterable[int]) -> bool:
        return False


class _Pipeline:
    """A dataset's pipeline, run in both ways."""

    def __init__(self, dataset: Any) -> None:
        from ..service.client.tf_elements import graph_of
        from ..service.pipelines.tf_data.pipeline import TfDataPipeline
        from ..service.pipelines.tf_data.split_sources import split_sources

        graph = graph_of(dataset)
        self._sources = [source.splits for source in split_sources(graph)]
        self._pipeline = TfDataPipeline(graph, self._sources, element_spec=dataset.element_spec)
        self._numbers = itertools.count()

    def long(self) -> Iterator[int]:
        """Yield the number of elements of each block."""
        run = self._pipeline.run(_Feed(self._sources))
        try:
            for block in run.blocks():
                yield block.count
        finally:
            run.cancel()

    def bundles(self) -> Iterator[int]:
        """Yield the same, for one bundle after another."""
        while True:
            yield from self.bundle()

    def bundle(self) -> Iterator[int]:
        from ..service.pipelines import SplitRange

        number = next(self._numbers) % FILES
        run = self._pipeline.bundle(SplitRange(number, 1, 0), number=number, seed=0)
        yield from (block.count for block in run.blocks())


def _rate(counts: Iterator[int], seconds: float) -> float:
    next(counts)
    begun = time.perf_counter()
    elements = 0
    for count in counts:
        elements += count
        if (took_s := time.perf_counter() - begun) > seconds:
            return elements / took_s
    raise ValueError("the pipeline has come to an end")


def _fixed_ms(pipeline: _Pipeline) -> float:
    sum(pipeline.bundle())
    begun = time.perf_counter()
    for _ in range(SMALL_BUNDLES):
        sum(pipeline.bundle())
    return (time.perf_counter() - begun) / SMALL_BUNDLES * 1e3


def main(directory: str) -> None:
    """Answer questions until the input ends."""
    import tensorflow as tf

    @functools.cache
    def pipeline(what: str) -> _Pipeline:
        if what == FIXED:
            return _Pipeline(tf.data.Dataset.range(FILES).map(lambda number: number + 1))
        name, width = what.split()
        return _Pipeline(_dataset(CONTENTS[name], pathlib.Path(directory), width))

    print("ready", flush=True)
    for line in sys.stdin:
        question = json.loads(line)
        found = pipeline(question["what"])
        if question["what"] == FIXED:
            print(_fixed_ms(found), flush=True)
            continue
        counts = getattr(found, question["how"])()
        print(_rate(counts, question["seconds"]), flush=True)
        counts.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
