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

from .cluster import SIDES, ReaderProcess, shared_clusters
from .contents import FILE_CASES, READ
from .results import Feeding, Finding, Reading
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
    "bare": "bare pipeline, by reduce",
    "skipped": "  by skip",
    "eager": "tf.data in process, eager",
    "read": "Forebay, read",
    "ours": "Forebay, from_dataset_id",
    "peer": SIDES["peer"].label,
    "uncompressed": "  compression=None",
    "torch": "PyTorch DataLoader",
    "grain": "Grain",
}
_NAMES = {**WAYS, "uncompressed": SIDES["uncompressed"].label}
REQUIRED = {"read": ("bare", 1.15), "ours": ("eager", 1.1)}
RATES = {"read": {"torch": 1.0, "grain": 1.0}, "ours": {"peer": 1.2, "uncompressed": 1.2}}
"""At least, of who has the same: NumPy arrays, or a tf.data.Dataset."""


def installed() -> set[str]:
    """The loaders of others that can be measured here."""
    return {w for w, modules in MODULES.items() if all(map(importlib.util.find_spec, modules))}


def file_row(row: str, setting: Setting) -> list[Finding]:
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
    readings = setting.alternate(**{way: measures[way] for way in WAYS if way in measures})
    findings: list[Finding] = []
    for way in readings:
        beside, at_most = REQUIRED.get(way, ("bare", None))
        findings.append(
            Feeding(
                row=row,
                what=case.what,
                way=WAYS[way],
                readings=readings[way],
                bare=readings["bare"],
                beside=beside,
                others=readings[beside],
                at_most=at_most,
                at_least={
                    _NAMES[other]: (least, readings[other])
                    for other, least in RATES.get(way, {}).items()
                    if other in readings
                },
            )
        )
    return findings


def _loaders(setting: Setting) -> dict[str, ReaderProcess]:
    """Processes that read without a service, for several rows."""
    if not setting.loaders:
        for library in ("tensorflow", *sorted(installed())):
            setting.loaders[library] = ReaderProcess("loaders", library, setting.files)
        for loader in setting.loaders.values():
            loader.wait_until_ready()
    return setting.loaders


def _measure(
    loader: ReaderProcess, way: str, row: str, warm_up_s: float, seconds: float
) -> Reading:
    how = {"warm_up_s": warm_up_s, "seconds": seconds}
    loader.ask({"way": way, "row": row, **how})
    return loader.reading()
