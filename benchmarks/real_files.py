"""Rows `file_…`: what it costs to read real files, beside their pipeline itself.

From real files the pipeline is what takes the time, wherever it runs. So the measure of a way
of reading is the processor time that it takes altogether, user and system: of worker and
trainer, of a loader's processes and their parent; beside that of the same pipeline driven in
C++, by `reduce`, in one process. `reduce` calls a function for each element, which costs more
than a small element does; so the pipeline is driven by `skip`, too, which calls none. Rates say
how much of the machine a way gets to use: whatever has several processes may use several cores.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable

from .cluster import SIDES, shared_clusters
from .contents import FILE_CASES, READ
from .results import Reading, Result, compared
from .servers import Responder
from .setting import Setting

LIBRARIES = {  # by way without a service
    "bare": "tensorflow",
    "skipped": "tensorflow",
    "eager": "tensorflow",
    "torch": "torch",
    "grain": "grain",
}
MODULES = {"torch": ("torch",), "grain": ("grain", "array_record")}  # that may be missing
WAYS = {
    "bare": "the bare pipeline, by reduce",
    "skipped": "the bare pipeline, by skip",
    "eager": "tf.data in process, eager",
    "read": "read",
    "ours": "from_dataset_id",
    "peer": SIDES["peer"].label,
    "uncompressed": SIDES["uncompressed"].label,
    "torch": "PyTorch DataLoader",
    "grain": "Grain",
}
RATE, CPU = "elements_per_s", "cpu_us"
PAIRS = (  # what is compared with what, and the least ratio
    ("read", "bare", CPU, 1 / 1.15),
    ("read", "skipped", CPU, None),
    ("ours", "eager", CPU, 1 / 1.1),
    ("ours", "peer", RATE, 1.2),
    ("ours", "uncompressed", RATE, 1.2),
    ("ours", "peer", CPU, None),
    ("read", "torch", RATE, 1.0),
    ("read", "grain", RATE, 1.0),
)
"""The rates are of who has the same: NumPy arrays, or a tf.data.Dataset."""


def installed() -> set[str]:
    """The loaders of others that can be measured here."""
    return {w for w, modules in MODULES.items() if all(map(importlib.util.find_spec, modules))}


def file_row(row: str, setting: Setting) -> list[Result]:
    """One case, in all ways that there are."""
    case = FILE_CASES[row]
    case.content.write(setting.files, quick=setting.quick, forms=installed())
    seconds = setting.seconds / 2  # there are many ways
    sides, loaders = shared_clusters(setting), _loaders(setting)
    measures: dict[str, Callable[[], Reading]] = {
        **{side: functools.partial(c.measure, row, seconds=seconds) for side, c in sides.items()},
        "read": functools.partial(sides["ours"].measure, row + READ, seconds=seconds),
        **{
            way: functools.partial(_measure, loaders[library], way, row, setting.warm_up_s, seconds)
            for way, library in LIBRARIES.items()
            if library in loaders
        },
    }
    found = setting.alternate(**{way: measures[way] for way in WAYS if way in measures})
    return [
        compared(
            row,
            f"{case.what}: {WAYS[way]}; peer: {WAYS[peer]}",
            figure,
            found[way],
            found[peer],
            least,
        )
        for way, peer, figure, least in PAIRS
        if peer in found
    ]


def _loaders(setting: Setting) -> dict[str, Responder]:
    """Processes that read without a service, for several rows."""
    for library in ("tensorflow", *sorted(installed())):
        if library not in setting.shared:
            setting.shared[library] = Responder(
                "forebay.benchmarks.loaders", library, setting.files
            )
        setting.shared[library].wait_until_ready()
    return setting.shared


def _measure(loader: Responder, way: str, row: str, warm_up_s: float, seconds: float) -> Reading:
    loader.ask(way=way, row=row, warm_up_s=warm_up_s, seconds=seconds)
    return Reading(**loader.answer_json())
