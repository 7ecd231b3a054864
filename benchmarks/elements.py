"""Rows for kinds of elements: their rate at a trainer, and their cost on both ends."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

from .cases import TOGETHER
from .cluster import SIDES, BenchmarkCluster, grow, own_clusters, shared_clusters
from .contents import FILE_CASES, RECORDS
from .machine import require
from .photographs import write_photographs
from .real_files import installed
from .results import Better, Costs, Finding, Reading, Result
from .setting import Setting

Readings = dict[str, list[Reading]]  # by side, round by round
FINE_SPLITS = 1_000_000
QUICK_SPLITS = 10_000
STEPS = 2_000  # that each consumer of a coordinated read takes
QUICK_STEPS = 200
HOW = {"peer": "by default", "uncompressed": "compression=None"}


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A case to read, with the required ratios to tf.data service, if any."""

    case: str
    what: str
    over_default: float | None = None
    over_uncompressed: float | None = None
    size: int = 0  # 0: endless
    unit: str = "elements"
    peak: bool = False  # whether to compare peaks of memory, too
    cpu: bool = False  # whether to compare the CPU time per element, too


def scalars(setting: Setting) -> list[Finding]:
    """Integers."""
    what = "scalars, batched in-graph"
    return _row("scalars", setting, Kind(
        case="scalars", what=what, over_default=200, over_uncompressed=200
    ))  # fmt: skip


def records(setting: Setting) -> list[Finding]:
    """From files, and from memory."""
    RECORDS.write(setting.files, quick=setting.quick, forms=installed())
    return _row(
        "records",
        setting,
        Kind(
            case="records",
            what="1 KB records of TFRecord files, batched in-graph",
            over_default=30,
            over_uncompressed=30,
        ),
        Kind(
            case="fixed records",
            what="uint8[1024], batched in-graph",
            over_default=30,
            over_uncompressed=30,
        ),
    )


def numpy(setting: Setting) -> list[Finding]:
    """Integers again, without tf.data at the end."""
    what = "scalars, one by one into NumPy"
    return _row("numpy", setting, Kind(
        case="numpy", what=what, over_default=500, over_uncompressed=500
    ))  # fmt: skip


def images(setting: Setting) -> list[Finding]:
    """Pixels are random."""
    what = "150 KB uint8 images, eager"
    return _row("images", setting, Kind(
        case="images", what=what, over_default=4, over_uncompressed=3
    ))  # fmt: skip


def batches(setting: Setting) -> list[Finding]:
    """Of images."""
    what = "4.8 MB uint8 batches, eager"
    return _row("batches", setting, Kind(
        case="batches", what=what, over_default=4, over_uncompressed=2, unit="batches"
    ))  # fmt: skip


def big_batches(setting: Setting) -> list[Finding]:
    """Batches of float images; and the peaks of memory, in processes that do nothing else."""
    kind = Kind(
        case="big batches",
        what="19 MB float32 batches, eager",
        over_default=4,
        over_uncompressed=2,
        unit="batches",
        peak=True,
    )
    with own_clusters(setting, "big_batches") as sides:
        return findings_of("big_batches", kind, _read(setting, sides, kind))


def tokens(setting: Setting) -> list[Finding]:
    """Of variable length, from memory and from files."""
    FILE_CASES["file_tokens"].content.write(setting.files, quick=setting.quick, forms=installed())
    return _row(
        "tokens",
        setting,
        Kind(case="tokens", what="sequences of 1–512 int32 tokens, batched in-graph (ragged)"),
        *(
            Kind(
                case=f"file_tokens, {how}",
                what=f"sequences of 50–2,000 int64 tokens of files, batched in-graph ({how})",
                over_default=20,
                over_uncompressed=20,
            )
            for how in ("padded", "ragged")
        ),
    )


def rounds(setting: Setting) -> list[Finding]:
    """A coordinated read: in each step all consumers have batches of one length."""
    steps = QUICK_STEPS if setting.quick else STEPS
    what = f"{TOGETHER} consumers, 2 workers, batches of 16 sequences of one bucket each"
    findings: list[Finding] = []
    with own_clusters(setting, "rounds") as sides:
        grow(sides, workers=2, readers=TOGETHER)
        for case, into in (("rounds", "eager"), ("rounds into NumPy", "into NumPy")):
            kind = Kind(
                case=case,
                what=f"{what}, {into}",
                over_default=3,
                over_uncompressed=3,
                size=steps,
                unit="batches",
            )
            findings += findings_of("rounds", kind, _read(setting, sides, kind))
    return findings


def dicts(setting: Setting) -> list[Finding]:
    """Nested, of mixed types."""
    what = "nested dicts of an image, numbers and a string, batched in-graph"
    return _row("dicts", setting, Kind(case="dicts", what=what))


def fine_splits(setting: Setting) -> list[Finding]:
    """DYNAMIC at its finest. Our journal is fsynced, the peer's is not."""
    size = QUICK_SPLITS if setting.quick else FINE_SPLITS
    what = f"DYNAMIC, {size:,} splits of one element, batched in-graph"
    return _row("fine_splits", setting, Kind(
        case="splits", what=what, over_default=50, over_uncompressed=50, size=size
    ))  # fmt: skip


def jpeg(setting: Setting) -> list[Finding]:
    """A real pipeline that is bound by its worker, with a real training step."""
    require("sklearn")
    write_photographs(setting.files)
    what = "batches of 32 JPEG photographs, augmented, into a Keras step"
    return _row("jpeg", setting, Kind(
        case="jpeg", what=what, over_default=1, over_uncompressed=1, unit="batches", cpu=True
    ))  # fmt: skip


def static(setting: Setting) -> list[Finding]:
    """The only shard of static sharding, of images and of photographs."""
    require("sklearn")
    write_photographs(setting.files)
    kinds = (
        Kind(
            case="images, static",
            what="a shard of DATA: 150 KB uint8 images, eager",
            over_default=4,
            over_uncompressed=3,
        ),
        Kind(
            case="jpeg, static",
            what="a shard of DATA: batches of 32 JPEG photographs, augmented, into a Keras step",
            over_default=1,
            over_uncompressed=1,
            unit="batches",
            cpu=True,
        ),
    )
    findings: list[Finding] = []
    with own_clusters(setting, "static", listed=True) as sides:
        for kind in kinds:
            findings += findings_of("static", kind, _read(setting, sides, kind))
    return findings


def _row(row: str, setting: Setting, *kinds: Kind) -> list[Finding]:
    findings: list[Finding] = []
    for kind in kinds:
        findings += findings_of(row, kind, _read(setting, shared_clusters(setting), kind))
    return findings


def _read(setting: Setting, sides: dict[str, BenchmarkCluster], kind: Kind) -> Readings:
    return setting.alternate(
        **{
            side: functools.partial(cluster.measure, kind.case, size=kind.size)
            for side, cluster in sides.items()
        }
    )


def findings_of(row: str, kind: Kind, readings: Readings) -> list[Finding]:
    """Our side beside either setting of the peer, and each side's costs."""
    findings: list[Finding] = []

    def compare(
        what: str, unit: str, better: Better, figure: str, required: Sequence[float | None]
    ) -> None:
        findings.extend(
            Result(
                row=row,
                what=f"{kind.what}{what}; peer: {how}",
                unit=unit,
                better=better,
                ours=[getattr(reading, figure) for reading in readings["ours"]],
                peer=[getattr(reading, figure) for reading in readings[peer]],
                required_ratio=ratio,
            )
            for (peer, how), ratio in zip(HOW.items(), required, strict=True)
        )

    rates = [kind.over_default, kind.over_uncompressed]
    compare("", f"{kind.unit}/s", Better.MORE, "elements_per_s", rates)
    if kind.peak:
        for end in ("worker", "client"):
            compare(f": peak memory of the {end}", "MB", Better.LESS, f"{end}_peak_mb", [1, 1])
    if kind.cpu:
        what = ": CPU for each, of worker and client"
        compare(what, "ms", Better.LESS, "cpu_ms_per_element", [None, None])
    findings += [
        Costs(row=row, what=kind.what, side=side.label, readings=readings[name])
        for name, side in SIDES.items()
    ]
    return findings
