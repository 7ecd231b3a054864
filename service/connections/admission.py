"""Who is at the other end of a connection or call, and whether it is let in.

A certificate of the server's authority is checked by TLS itself, so `Admission` only says whose it
is. It checks tokens, and the users of Unix sockets.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import hmac
import logging
import os
import ssl
import threading
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from ..errors import Unauthenticated
from ..rate_limited_log import RateLimitedLog
from .credentials import BEARER, VARIABLES, Credentials

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Identity:
    """Who a peer has proved to be."""

    kind: str  # "certificate", "token", or "user": the one of this host that runs the server
    names: tuple[str, ...] = ()  # of a certificate: its common name, then its alternative names
    token: bytes = dataclasses.field(default=b"", repr=False)  # its digest

    @property
    def fingerprint(self) -> bytes:
        """16 bytes that all servers of a cluster find for this peer, and for no other."""
        parts = [self.kind.encode(), self.token]
        if not self.token:  # else its name is that of a file here
            parts += sorted(name.encode() for name in self.names)
        return hashlib.sha256(b"\0".join(parts)).digest()[:16]

    def __str__(self) -> str:
        return f"{self.kind} {', '.join(self.names)}".strip()


class Denials:
    """How many calls a server has denied, by method and reason. Thread-safe."""

    def __init__(self, methods: Collection[str]) -> None:
        """Calls of other methods, which a stranger may name at will, count together."""
        self._methods = frozenset(methods)
        self._lock = threading.Lock()
        self._counts: Counter[tuple[str, str]] = Counter()

    def add(self, method: str, reason: str) -> None:
        """`method` may have its service before a slash."""
        name = method.rpartition("/")[2]
        with self._lock:
            self._counts[name if name in self._methods else "other", reason] += 1

    def counts(self) -> Mapping[tuple[str, str], int]:
        with self._lock:
            return dict(self._counts)


class Admission:
    """Says who the peers of a server are, and refuses those that prove nothing."""

    def __init__(self, credentials: Credentials, methods: Collection[str] = ()) -> None:
        """`methods` are those of the server's calls, without their services."""
        self.credentials = credentials
        self.denials = Denials(methods)
        self.rate_limited_log = RateLimitedLog(log)
        self.asks_for_token = bool(credentials.token_file)

    def of_token(self, given: str) -> Identity:
        """Raises Unauthenticated. Takes as long whichever token it is."""
        tokens = self.credentials.loaded().tokens
        known = [t for t in tokens if hmac.compare_digest(t.value.encode(), given.encode())]
        if known:
            digest = hashlib.sha256(known[-1].value.encode()).digest()
            return Identity("token", (known[-1].name,), digest)
        what = "the token is not one that is known here" if given else "no token was sent"
        raise Unauthenticated(
            f"{what}: give the client the token's file (--token-file, {VARIABLES['token_file']}, "
            "service.use_credentials)"
        )

    def issue_pass(self, given: str, until_s: int) -> str:
        """A pass for who has this token, until a time (Unix epoch). Only `of_pass` takes it, so it
        opens the HTTP port alone, and nobody learns the token from it. Raises Unauthenticated."""
        self.of_token(given)
        return f"{until_s}.{_proof(given, until_s)}"

    def of_pass(self, shown: str, now_s: int) -> Identity:
        """Who has shown a pass, to any server with the same token. Raises Unauthenticated."""
        until, _, proof = shown.partition(".")
        if shown.isascii() and until.isdecimal() and len(until) < 12 and now_s < int(until):
            for token in self.credentials.loaded().tokens:
                if hmac.compare_digest(_proof(token.value, int(until)).encode(), proof.encode()):
                    return self.of_token(token.value)
        raise Unauthenticated("the pass is no longer valid: sign in with the token")

    def of_metadata(self, metadata: Iterable[Any]) -> Identity:
        """Who has sent a call with these pairs of names and values. Raises Unauthenticated."""
        found = next((value for name, value in metadata if name == "authorization"), "")
        if not isinstance(found, str) or not found.startswith(BEARER):
            found = ""
        return self.of_token(found.removeprefix(BEARER))

    def of_call(self, context: Any) -> Identity:
        """Who has sent the call of a gRPC context; it was admitted."""
        if self.asks_for_token:
            return self.of_metadata(context.invocation_metadata() or ())
        pem = next(iter(context.auth_context().get("x509_pem_cert", ())), b"")
        return of_certificate(ssl.PEM_cert_to_DER_cert(pem.decode()) if pem else None)

    def of_user(self, user: int | None) -> Identity:
        """Who is at the other end of a Unix socket. Raises Unauthenticated."""
        if user != os.geteuid():
            raise Unauthenticated(
                f"user {user} of this host is not the one that runs this server, "
                f"{os.geteuid()}: read over TCP, with credentials"
            )
        return Identity("user", (str(user),))


def _proof(token: str, until_s: int) -> str:
    return hmac.new(token.encode(), b"pass until %d" % until_s, "sha256").hexdigest()


@functools.lru_cache(1024)
def of_certificate(der: bytes | None) -> Identity:
    """The names in a peer's certificate (DER), which TLS has checked. Raises Unauthenticated.

    gRPC and Python's ssl each read other names in some certificates, so neither is asked.
    """
    from cryptography import x509  # takes a while

    if der is None:
        return Identity("certificate")
    try:
        certificate = x509.load_der_x509_certificate(der)
        subject = certificate.subject.get_attributes_for_oid(x509.NameOID.COMMON_NAME)
        names = [str(name.value) for name in subject]
        with contextlib.suppress(x509.ExtensionNotFound):
            others = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName)
            kinds = (x509.DNSName, x509.IPAddress, x509.UniformResourceIdentifier, x509.RFC822Name)
            names += [str(name.value) for name in others.value if isinstance(name, kinds)]
    except ValueError as error:
        raise Unauthenticated(f"the certificate cannot be read: {error}; issue another") from None
    return Identity("certificate", tuple(dict.fromkeys(names)))
