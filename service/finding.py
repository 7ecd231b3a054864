"""Finding: a conclusion from a status, and how it is told."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

Severity = Literal["problem", "slow", "note"]
SEVERITIES: tuple[Severity, ...] = ("problem", "slow", "note")

Status = Mapping[str, Any]
"""As of `GetStatus`, decoded from JSON. An earlier version's lacks some of it."""


class Finding(NamedTuple):
    """A conclusion."""

    severity: Severity
    """problem: something is lost or stands still. slow: trainers wait. note: nothing to do."""
    subject: str  # such as "job resnet", "worker 10.0.0.6:5051", "dispatcher"
    what: str
    advice: str  # "": none
    gain: float | None = None
    """By how much the job's elements a second would be multiplied, at most; None: not known."""
    since_s: float | None = None  # so many seconds ago it began; None: not known


def job_name(job: Mapping[str, Any]) -> str:
    """The user's own name of a job: tf.data service's clients prefix it with the dataset."""
    name: str = job["name"] or str(job["job_id"])
    return name.removeprefix(f"dataset_id=/{job['dataset_id']}/")


def duration(seconds: float | None) -> str:
    """12 s; 3 min; 2 h 10 min; 3 d 4 h."""
    if seconds is None or math.isinf(seconds):
        return "–"
    if seconds < 10 and seconds != round(seconds):
        return f"{seconds:.1f} s"
    if seconds < 120:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 60:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours < 48 else f"{hours // 24} d {hours % 24} h"
