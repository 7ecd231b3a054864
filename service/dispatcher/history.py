"""Journal history checks: detect lost acknowledged events, and peers of another journal.

Workers and clients send the newest journal position that they know. So a dispatcher notices that
acknowledged events were lost, or that its storage came back empty.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import re
import time
from datetime import UTC, datetime
from typing import NamedTuple

from ...storage import Fenced, StorageError, Writer
from ...storage.errors import REPAIR
from ..core.state import State
from ..errors import AnotherJournal, InvalidArgument
from ..proto import forebay_pb2 as pb
from ..rate_limited_log import RateLimitedLog
from . import positions
from .decider import Decider

log = logging.getLogger(__name__)

REFUSAL_PAUSE_MS = 1_000
MAX_REFUSED_PEERS = 10_000
MAX_OF_CALLER = 16  # of them, where callers prove who they are
MAX_NAME = 200  # characters of what a refused peer says of itself
STRANGER_MS = 60_000
"""A refused peer that is silent for this long has ended or restarted."""

_JOURNAL_ID = re.compile("[0-9a-f]{32}")


class RefusedPeer(NamedTuple):
    """A peer that was refused because it knows another journal, as the status tells it."""

    who: str
    journal_id: str
    sequence: int  # the newest event that it knows in that journal
    time_ms: int  # of its last request


class JournalHistory:
    """Checks the journal positions that peers know."""

    def __init__(self, decider: Decider, writer: Writer) -> None:
        self._decider = decider
        self._writer = writer
        # By caller, then by what it says that it is, the latest last.
        self._refused_peers: dict[str, dict[str, RefusedPeer]] = {}
        self._rate_limited_log = RateLimitedLog(log)
        self._condemning: asyncio.Task[None] | None = None

    async def check(self, who: str, known: pb.JournalPosition, caller: str = "") -> None:
        """Check the position that a peer claims to know, which says that it is `who`, and has
        proved that it is `caller` ("": nobody proves it).

        If this journal lacks that event, and a dispatcher has told the peer of it, acknowledged
        events were lost: condemns the storage, stops this dispatcher, and raises Unavailable. A
        position that nobody has told raises InvalidArgument.

        Refuses a peer of another lasting journal, unless this journal continues that one after a
        repair: either the storage came back empty, or the peer belongs to another cluster, or
        invents it. Then raises AnotherJournal, after a pause, since peers retry at once.
        """
        state, last = self._decider.state, self._decider.position().sequence
        who = who[:MAX_NAME]
        if known.journal_id != state.journal_id:
            if known.journal_id and known.lasting and not continues(state, known.journal_id):
                if not _JOURNAL_ID.fullmatch(known.journal_id):
                    raise InvalidArgument(
                        f"{who} claims to know the journal {known.journal_id[:MAX_NAME]!r}: ids of "
                        "journals have 32 hexadecimal digits; restart whoever claims it"
                    )
                await self._refuse(who, known, caller)
            return
        if known.sequence <= last:
            return
        if not positions.is_proved(state.position_key, known):
            raise InvalidArgument(
                f"{who} claims to know of event {known.sequence}, and the journal ends at {last}: "
                "no dispatcher of this journal has said so; restart whoever claims it"
            )
        reason = (
            f"{who} was told of event {known.sequence}, and the journal ends at {last}: events "
            "that were acknowledged are gone"
        )
        if self._condemning is None:
            self._condemning = asyncio.create_task(self._condemn(reason), name="forebay-condemn")
        await asyncio.shield(self._condemning)
        raise self._decider.unavailable()

    @property
    def condemns(self) -> bool:
        """Whether a peer has shown that the journal lacks acknowledged events."""
        return self._condemning is not None

    async def _refuse(self, who: str, known: pb.JournalPosition, caller: str) -> None:
        state, journal_id = self._decider.state, known.journal_id
        by = f" ({caller})" if caller else ""
        reason = (
            f"{who}{by} claims to know the journal {journal_id} up to event {known.sequence}, and "
            f"this dispatcher has the journal {state.journal_id}, which {beginning(state)}. If "
            "workers say so, too, the storage came back empty or was replaced: stop the dispatcher "
            f"and bring the right one back, or, if that is gone for good, restart {who}"
        )
        self._rate_limited_log.warn("refused: %s", reason, kind=caller)
        refused_peers = self._refused_peers.setdefault(caller, {})
        refused_peers.pop(who, None)
        now_ms = time.time_ns() // 1_000_000
        refused_peers[who] = RefusedPeer(f"{who}{by}", journal_id, known.sequence, now_ms)
        if len(refused_peers) > (MAX_OF_CALLER if caller else MAX_REFUSED_PEERS):
            del refused_peers[next(iter(refused_peers))]
        await self._decider.wait_until(lambda: False, REFUSAL_PAUSE_MS)
        raise AnotherJournal(reason)

    def refused_peers(self) -> list[RefusedPeer]:
        """The recently refused peers of other journals."""
        since_ms = time.time_ns() // 1_000_000 - STRANGER_MS
        everyone = itertools.chain(*(of.values() for of in self._refused_peers.values()))
        return [peer for peer in everyone if peer.time_ms > since_ms]

    async def _condemn(self, reason: str) -> None:
        try:
            await self._decider.storage_threads.run(self._writer.condemn, reason)
        except Fenced as error:
            self._decider.displace(error)  # a later leader acknowledged them
            return
        except StorageError as error:
            log.error("could not record that the journal lacks events: %s", error)
        log.critical("%s; restore the storage from a backup, %s", reason, REPAIR)
        self._decider.stop()


def continues(state: State, journal_id: str) -> bool:
    """Whether a repair made this state's journal from that one."""
    # "": the repair found nothing, not even an id, and a person accepted that as complete.
    return journal_id in state.predecessors or "" in state.predecessors


def beginning(state: State) -> str:
    """When the journal of this state began, in words."""
    born = datetime.fromtimestamp(state.born_ms / 1000, UTC).isoformat(" ", "seconds")
    return f"began on {born}"
