"""Rows for kinds of elements, beside tf.data service by default and without compression: their
rate at a trainer, and the processor time of worker and client.

Row `first_element`: how long a trainer waits for its first element. The time begins with the call
of `from_dataset_id`. The process has imported everything, its dataset is registered, and the worker
has run other jobs. *Cold*: the trainer has read nothing yet, and nobody has read a dataset of such
a graph and element_spec. *Warm*: both have run it before.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from .cases import TOGETHER
from .cluster import shared_clusters
from .contents import RECORDS, TOKENS
from .results import Result, compared
from .setting import Setting

HOW = {"peer": "by default", "uncompressed": "compression=None"}
FIRST = {"cold": 1.0, "warm": 1.5}  # the ratios that are required


@dataclass(frozen=True)
class Kind:
    """A case to read, with the required ratios to tf.data service by default and uncompressed."""

    case: str
    what: str
    least: tuple[float | None, float | None] = (None, None)
    size: int = 0  # 0: endless
    workers: int = 1
    readers: int = 1
    alone: bool = False  # in new processes, for peaks of memory and further workers


_SEQUENCES = "sequences of 50–2,000 int64 tokens of files, batched in-graph"
_ROUNDS = f"{TOGETHER} consumers, 2 workers, batches of 16 sequences of one bucket each"
_rounds = partial(Kind, least=(3, 3), size=2_000, workers=2, readers=TOGETHER, alone=True)
KINDS = {
    "scalars": (Kind("scalars", "scalars, batched in-graph", (200, 200)),),
    "records": (Kind("records", "1 KB records of TFRecord files, batched in-graph", (30, 30)),),
    "numpy": (Kind("numpy", "scalars, one by one into NumPy", (500, 500)),),
    "tokens": (
        Kind("tokens", "sequences of 1–512 int32 tokens, batched in-graph (ragged)"),
        Kind("file_tokens, padded", f"{_SEQUENCES} (padded)", (20, 20)),
        Kind("file_tokens, ragged", f"{_SEQUENCES} (ragged)", (20, 20)),
    ),
    "dicts": (Kind("dicts", "nested dicts of an image, numbers and a string, batched in-graph"),),
    "fine_splits": (  # our journal is fsynced, the peer's is not
        Kind("splits", "DYNAMIC, splits of one element, batched in-graph", (50, 50), 1_000_000),
    ),
    "images": (Kind("images", "150 KB uint8 images, eager", (4, 3)),),
    "batches": (Kind("batches", "4.8 MB uint8 batches, eager", (4, 2)),),
    "big_batches": (Kind("big batches", "19 MB float32 batches, eager", (4, 2), alone=True),),
    "rounds": (
        _rounds("rounds", f"{_ROUNDS}, eager"),
        _rounds("rounds into NumPy", f"{_ROUNDS}, into NumPy"),
    ),
    "workers": tuple(  # under OFF: each worker makes the whole dataset
        Kind("medium", f"16 KB uint8 elements, {n} worker(s), eager", workers=n, alone=True)
        for n in (1, 4)
    ),
}


def element_row(row: str, setting: Setting) -> list[Result]:
    """Our side beside either setting of the peer."""
    for content in (RECORDS, TOKENS):
        if content.name == row:
            content.write(setting.files, quick=setting.quick)
    results: list[Result] = []
    for kind in KINDS[row]:
        if kind.alone and kind is KINDS[row][0]:
            setting.release()
        size = kind.size // 100 if setting.quick else kind.size
        sides = shared_clusters(setting, workers=kind.workers, readers=kind.readers)
        measures = {
            side: partial(each.measure, kind.case, size=size) for side, each in sides.items()
        }
        readings = setting.alternate(**measures)
        figures = ["elements_per_s", "cpu_us"]
        figures += ["worker_peak_mb", "client_peak_mb"] if kind.alone else []
        results += [
            compared(row, f"{kind.what}; peer: {how}", figure, readings["ours"], readings[peer],
                     least if figure == "elements_per_s" else None)
            for figure in figures
            for (peer, how), least in zip(HOW.items(), kind.least, strict=True)
        ]  # fmt: skip
    if KINDS[row][0].alone:
        setting.release()
    return results


def first_element(setting: Setting) -> list[Result]:
    """Images: a single one is large enough to be sent at once. Each width is new to the worker."""
    widths = iter(range(300, 10_000))
    waits = setting.alternate(
        **{
            side: lambda of=cluster: of.first_s("images of a width", next(widths), len(FIRST))
            for side, cluster in shared_clusters(setting).items()
        }
    )
    return [
        Result(
            row="first_element",
            what=f"{state}: time to the first of 150 KB uint8 images; peer: {how}",
            unit="s",
            less=True,
            ours=[wait[number] for wait in waits["ours"]],
            peer=[wait[number] for wait in waits[peer]],
            required_ratio=least,
        )
        for number, (state, least) in enumerate(FIRST.items())
        for peer, how in HOW.items()
    ]
