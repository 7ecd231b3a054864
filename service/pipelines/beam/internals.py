"""All non-public names of Beam that Forebay uses. They may change with any version of Beam.

tests/pipelines/test_beam.py compares what is made of them with Beam's own runner.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from apache_beam.io import filebasedsource, iobase
from apache_beam.pvalue import AsSideInput
from apache_beam.transforms.core import DoFn

SourceRestriction = iobase._SDFBoundedSourceRestriction
"""The part of a bounded source to read."""

SourceRestrictionProvider = iobase._SDFBoundedSourceRestrictionProvider
"""The restriction provider of the DoFn with which Beam reads bounded sources."""

ReadRange = filebasedsource._ReadRange
"""The DoFn of ReadAllFrom… that reads a range of a file, given with the file's metadata."""

ExpandIntoRanges = filebasedsource._ExpandIntoRanges
"""The DoFn that makes these ranges."""


def with_range_bytes(fn: DoFn, size: int) -> DoFn:
    """Set the size of the ranges that an ExpandIntoRanges makes; returns it."""
    fn._desired_bundle_size = size
    return fn


def file_read(source: iobase.BoundedSource) -> str | None:
    """The path of a part of a source of files, if it is one."""
    if isinstance(source, filebasedsource._SingleFileSource):
        return str(source._file_name)
    return None


def has_batches(fn: DoFn) -> bool:
    """Whether a DoFn takes or yields batches in place of elements."""
    return bool(fn._process_yields_batches or not fn._process_defined)


def view_options(side: AsSideInput) -> Mapping[str, Any]:
    """The options with which to make the SideInputMap of this side input."""
    return dict(side._view_options())


class PassedOn(Exception):
    """An exception that passes through a step unchanged: Beam does not add the step's label."""

    _tagged_with_step = True
