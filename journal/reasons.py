"""Why a worker or a consumer is gone, as WorkerLost and ConsumerLeft say it.

Code compares only with these; every other reason is text for people.
"""

from __future__ import annotations

SILENT = "no sign of life"
"""The failure detector had not heard of it for too long."""

GOODBYE = "it said goodbye"
"""It left in order."""

REPAIRED = "a repair of the journal has cut events off"
"""It may know of events that are no more, and must begin anew. It may have ended before."""

UNREAD = "nobody read the epoch any more"
"""Why the splits of an epoch are lost that nobody may need."""

READ_FAILED = "its read failed: "
"""What a reason begins with that a consumer gave itself: the error follows."""
