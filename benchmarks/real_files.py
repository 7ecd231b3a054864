"""Rows `file_…`: what it costs to read real files, beside their pipeline itself.

From real files the pipeline is what takes the time, wherever it runs. So the measure of a way
of reading is the processor time that it takes altogether, user and system, of worker and
trainer; beside that of the same pipeline driven in C++, by `reduce`, in one process. `reduce` calls
a function for each element, which costs more than a small element does; so the pipeline is driven
by `skip`, too, which calls none. Rates say how much of the machine a way gets to use.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from .cluster import SIDES, shared_clusters
from .contents import FILE_CASES, READ
from .results import Reading, Result, compared
from .servers import Responder
from .setting import Setting

WITHOUT_SERVICE = ("bare", "skipped", "eager")
WAYS = {
    "bare": "the bare pipeline, by reduce",
    "skipped": "the bare pipeline, by skip",
    "eager": "tf.data in process, eager",
    "read": "read",
    "ours": "from_dataset_id",
    "peer": SIDES["peer"].label,
    "uncompressed": SIDES["uncompressed"].label,
}
RATE, CPU = "elements_per_s", "cpu_us"
PAIRS = (  # what is compared with what, and the least ratio
    ("read", "bare", CPU, 1 / 1.15),
    ("read", "skipped", CPU, None),
    ("ours", "eager", CPU, 1 / 1.1),
    ("ours", "peer", RATE, 1.2),
    ("ours", "uncompressed", RATE, 1.2),
    ("ours", "peer", CPU, None),
)


def file_row(row: str, setting: Setting) -> list[Result]:
    """One case, in all ways that there are."""
    case = FILE_CASES[row]
    case.content.write(setting.files, quick=setting.quick)
    seconds = setting.seconds / 2  # there are many ways
    sides, alone = shared_clusters(setting), _process(setting)
    measures: dict[str, Callable[[], Reading]] = {
        **{way: partial(_measure, alone, way, row, setting, seconds) for way in WITHOUT_SERVICE},
        "read": partial(sides["ours"].measure, row + READ, seconds=seconds),
        **{side: partial(cluster.measure, row, seconds=seconds) for side, cluster in sides.items()},
    }
    found = setting.alternate(**{way: measures[way] for way in WAYS})
    return [
        compared(row, f"{case.what}: {WAYS[way]}; peer: {WAYS[peer]}", figure,
                 found[way], found[peer], least)
        for way, peer, figure, least in PAIRS
    ]  # fmt: skip


def _process(setting: Setting) -> Responder:
    """A process that reads without a service, for several rows."""
    if "in process" not in setting.shared:
        process = Responder("forebay.benchmarks.in_process", setting.files)
        setting.shared["in process"] = process
    found: Responder = setting.shared["in process"]
    found.wait_until_ready()
    return found


def _measure(process: Responder, way: str, row: str, setting: Setting, seconds: float) -> Reading:
    process.ask(way=way, row=row, warm_up_s=setting.warm_up_s, seconds=seconds)
    return Reading(**process.answer_json())
