"""What a program writes to a terminal."""

from __future__ import annotations

import os


def written_to(master: int) -> bytes:
    """All that comes until the other end is closed; closes this one."""
    shown = b""
    try:
        while more := os.read(master, 1 << 16):
            shown += more
    except OSError:  # of a terminal whose other end is closed; a pipe has an end
        pass
    os.close(master)
    return shown
