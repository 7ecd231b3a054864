"""Credentials of data connections: the dispatcher signs them, and workers check them.

A consumer gets one with each answer to its heartbeats. It names the consumer's iteration and its
certificate or token, and is signed for the consumer's number. So a worker serves no other
consumer, no other peer and no task of another iteration with it.

Each pool of workers (those with the same grants in the access file) has keys of its own, and a
credential has a signature for each pool that may run its iteration. So what a pool's worker signs
opens that pool's workers alone.

Credentials expire with the key that signed them, so nobody compares clocks. The dispatcher tells
its keys to the workers with their heartbeats, each key one period before it signs with it. It keeps
them in memory only: the next dispatcher has keys of its own. Workers keep what they know while no
dispatcher answers.
"""

from __future__ import annotations

import hmac
import secrets
import struct
import threading
import time
from collections.abc import Iterable

from ..errors import Unauthenticated
from .admission import Identity

PERIOD_S = 300.0
"""A key signs for one period. It is valid for two more, and while no dispatcher answers."""

WAIT_S = 5.0
"""How long a worker waits for a key that a new dispatcher is about to tell it."""

_ID_BYTES, _SECRET_BYTES = 8, 32
_CREDENTIAL = struct.Struct(f"<{_ID_BYTES}sq16s32s")  # key, iteration, holder, signature


class UnfitCredential(Unauthenticated):
    """The peer is nobody known here, or it is no credential of this consumer and peer: waiting for
    a key does not help."""


class SigningKeys:
    """The keys of a dispatcher, which signs credentials. For one thread."""

    def __init__(self) -> None:
        self._keys = [_new_key(), _new_key()]  # the oldest first: the last but one signs
        self._renew_at = time.monotonic() + PERIOD_S

    def all(self) -> list[bytes]:
        """The keys that workers must know."""
        while (now := time.monotonic()) >= self._renew_at:
            self._keys = [*self._keys[-2:], _new_key()]
            self._renew_at = max(self._renew_at + PERIOD_S, now - PERIOD_S)
        return self._keys

    def sign(self, consumer_id: int, iteration_id: int, holder: Identity) -> bytes:
        """A credential for this consumer's data connections."""
        key = self.all()[-2]
        signature = _signature(key, consumer_id, iteration_id, holder.fingerprint)
        return _CREDENTIAL.pack(key[:_ID_BYTES], iteration_id, holder.fingerprint, signature)


class KnownKeys:
    """The keys that a worker knows. Thread-safe."""

    def __init__(self) -> None:
        self._keys: dict[bytes, tuple[bytes, float]] = {}  # by id; and when it was told last
        self._told = threading.Condition()

    def learn(self, keys: Iterable[bytes]) -> None:
        """Add what the dispatcher has told, and drop what it has not told for a period."""
        now = time.monotonic()
        with self._told:
            self._keys.update({key[:_ID_BYTES]: (key, now) for key in keys})
            self._keys = {
                number: (key, told_s)
                for number, (key, told_s) in self._keys.items()
                if told_s + PERIOD_S > now
            }
            self._told.notify_all()

    def check(self, credential: bytes, consumer_id: int, peer: Identity) -> int:
        """The iteration that the credential is for. Raises UnfitCredential; or Unauthenticated, if
        its key is not known.

        Waits for a key that is not known yet. A peer over a Unix socket is of this process's user,
        and may hold any credential.
        """
        try:
            signed = [*_CREDENTIAL.iter_unpack(credential)]  # one for each pool
            if not signed:
                raise struct.error
        except struct.error:
            what = "a credential of another form" if credential else "no credential"
            raise UnfitCredential(
                f"{what} of the dispatcher's for data connections was sent: read by a client of "
                "this version, whose dispatcher has TLS, too"
            ) from None
        with self._told:
            self._told.wait_for(lambda: any(one[0] in self._keys for one in signed), WAIT_S)
            known = next((one for one in signed if one[0] in self._keys), signed[0])
            number, iteration_id, holder, signature = known
            key, _ = self._keys.get(number, (b"", 0.0))
        if not key:
            raise Unauthenticated(
                "the credential for data connections has expired, or is another dispatcher's: the "
                "next answer to the consumer's heartbeat brings a new one"
            )
        if not hmac.compare_digest(
            signature, _signature(key, consumer_id, iteration_id, holder)
        ) or (peer.kind != "user" and not hmac.compare_digest(holder, peer.fingerprint)):
            raise UnfitCredential(
                f"the credential for data connections is not that of consumer {consumer_id} and "
                f"{peer}: it was changed, or given to somebody else (or the dispatcher asks for "
                "tokens and the worker for certificates, or the consumer's certificate was "
                "replaced by one of another name)"
            )
        return int(iteration_id)


def _new_key() -> bytes:
    return secrets.token_bytes(_ID_BYTES + _SECRET_BYTES)


def _signature(key: bytes, consumer_id: int, iteration_id: int, holder: bytes) -> bytes:
    message = struct.pack("<qq", consumer_id, iteration_id) + holder
    return hmac.digest(key[_ID_BYTES:], message, "sha256")
