"""All names of Beam's that are not public, and so may change with its next version.

`test_what_of_beam_is_not_public` has each do what it is used for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from apache_beam.io import filebasedsource, iobase, tfrecordio
from apache_beam.pvalue import AsSideInput
from apache_beam.transforms.core import DoFn

SourceRestriction = iobase._SDFBoundedSourceRestriction
"""What of a bounded source is to be read."""

SourceRestrictionProvider = iobase._SDFBoundedSourceRestrictionProvider
"""That of the DoFn that Beam reads bounded sources with."""

ReadRange = filebasedsource._ReadRange
"""The DoFn that reads a range of a file, given with the file's metadata: of ReadAllFrom…"""

ExpandIntoRanges = filebasedsource._ExpandIntoRanges
"""The DoFn that makes these ranges."""


def with_range_bytes(fn: DoFn, size: int) -> DoFn:
    """Has an ExpandIntoRanges make ranges of this size; the same one."""
    fn._desired_bundle_size = size
    return fn


def file_read(source: iobase.BoundedSource) -> str | None:
    """The path, of one of the sources that a source of files is split into."""
    if isinstance(source, filebasedsource._SingleFileSource):
        return str(source._file_name)
    return None


TFRecordSource: TypeAlias = tfrecordio._TFRecordSource
"""A source of TFRecord files."""


def tfrecord_file(source: iobase.BoundedSource) -> tuple[TFRecordSource, str] | None:
    """If it is one file of a source of TFRecord files, and not of one that was derived of it."""
    if isinstance(source, filebasedsource._SingleFileSource):
        whole = source._file_based_source
        if type(whole) is TFRecordSource:
            return whole, str(source._file_name)
    return None


def tfrecord_decoder(source: TFRecordSource) -> Callable[[bytes], Any]:
    """What makes elements of its records."""
    decode: Callable[[bytes], Any] = source._coder.decode
    return decode


def has_batches(fn: DoFn) -> bool:
    """Whether a DoFn takes or yields batches in place of elements."""
    return bool(fn._process_yields_batches or not fn._process_defined)


def view_options(side: AsSideInput) -> Mapping[str, Any]:
    """What a SideInputMap of this side input is made with."""
    return dict(side._view_options())


class PassedOn(Exception):
    """Raised behind a step, it leaves that step as it is, without the step's label."""

    _tagged_with_step = True
