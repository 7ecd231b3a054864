"""Which source each position picks, position by position: by what the counts grow there."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from forebay.service.picks import Picks


def picked(shares: Sequence[int], first: int, count: int) -> npt.NDArray[np.int64]:
    """The sources of the positions first … first + count - 1."""
    picks, sources = Picks(shares), range(len(shares))
    counts = [picks.count_before(first, source) for source in sources]
    found = np.zeros(count, np.int64)
    for at in range(count):
        now = [picks.count_before(first + at + 1, source) for source in sources]
        (found[at],) = (source for source in sources if now[source] > counts[source])
        counts = now
    return found
