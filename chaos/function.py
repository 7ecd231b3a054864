"""The Python dataset of crowds: a function that kills its process now and then, at any point."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Iterator

import numpy as np

PAYLOAD_LENGTH = 2048
"""Numbers in the payload, for every dataset of chaos."""

KILLED = 0.2
"""The fraction of calls that kill the process."""

ELEMENT_S = 0.004
SPLIT_ELEMENTS = 5
"""Several, so that a process is also killed within a split, and the next one continues there."""

RETRIES = 1_000


def elements(split: int) -> Iterator[dict[str, object]]:
    """Yield the split's elements, like those of all datasets of chaos."""
    if random.random() < KILLED:
        # The kill may come in the next split, or after the last one.
        within_s = random.uniform(0, 2 * SPLIT_ELEMENTS * ELEMENT_S)
        threading.Timer(within_s, os.kill, (os.getpid(), signal.SIGKILL)).start()
    for number in range(SPLIT_ELEMENTS * split, SPLIT_ELEMENTS * (split + 1)):
        time.sleep(ELEMENT_S)
        yield {"id": number, "payload": np.full(PAYLOAD_LENGTH, number)}
