"""Why a worker or a consumer is gone, as WorkerLost and ConsumerLeft say it.

Only these reasons have names, because code compares with them; every other one is text for people.
"""

from __future__ import annotations

SILENT = "no sign of life"
"""The failure detector had not heard of it for too long."""

GOODBYE = "it said goodbye"
"""It left in order."""
