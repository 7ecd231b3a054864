"""What is registered of a PCollection: a chain of DoFns, as a function of splits."""

from __future__ import annotations

import sys
from typing import Any

from ... import pickles
from ..python.fork_server import BEAM
from .functions import PythonDataset, package_names

FOREBAY = "forebay"
"""The distribution. Workers need its version: Beam chains are pickled with class names only."""


def is_pcollection(dataset: Any) -> bool:
    """Whether it is a PCollection, or the several outputs of one transform."""
    if "apache_beam" not in sys.modules:
        return False
    from apache_beam import pvalue

    return isinstance(dataset, pvalue.PCollection | pvalue.DoOutputsTuple)


def beam_dataset(pcollection: Any, split_bytes: int | None = None, **how: Any) -> PythonDataset:
    """The dataset of a PCollection that was built and not run; `how` is as for `python_dataset`.

    Raises InvalidArgument for anything but a chain of ParDos behind bounded reads, and for
    `split_bytes` that are invalid or would have no effect.
    """
    from ..beam.translation import translate

    with pickles.by_value():  # splits and side inputs are pickled there
        chain, splits = translate(pcollection, split_bytes)
    how["packages"] = (BEAM, FOREBAY, *package_names(how.get("packages", ())))
    return PythonDataset(chain, splits, **how)
