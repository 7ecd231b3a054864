"""Proofs of journal positions: a peer can only claim to know of an event that it was told of.

A peer that knows of an event that the journal lacks shows that acknowledged events were lost, and
the dispatcher stops. So it must not be able to invent one. Each position that leaves the dispatcher
has a code (HMAC) made with a key that was made with the journal, and that nobody is told.
"""

from __future__ import annotations

import hmac

from ..proto import forebay_pb2 as pb

PROOF_BYTES = 16


def prove(key: bytes, position: pb.JournalPosition) -> None:
    """Add the proof to the position."""
    position.proof = _proof(key, position)


def is_proved(key: bytes, position: pb.JournalPosition) -> bool:
    """Whether a dispatcher of this journal has told the position."""
    return bool(key) and hmac.compare_digest(position.proof, _proof(key, position))


def _proof(key: bytes, position: pb.JournalPosition) -> bytes:
    told = f"{position.journal_id} {position.sequence}".encode()
    return hmac.digest(key, told, "sha256")[:PROOF_BYTES]
