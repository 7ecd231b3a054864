"""Which source each position picks, position by position: by what the counts grow there."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from forebay.service.picks import Picks


def picked(shares: Sequence[int], first: int, count: int) -> npt.NDArray[np.int64]:
    """The sources of the positions first … first + count - 1."""
    picks = Picks(shares)
    found = []
    for position in range(first, first + count):
        (source,) = (
            source
            for source in range(len(shares))
            if picks.count_before(position + 1, source) > picks.count_before(position, source)
        )
        found.append(source)
    return np.array(found, np.int64)
