"""Credentials of a process: the files for TLS and tokens, and who is at the other end.

A process has one `Credentials`, from FOREBAY_TLS_CA, FOREBAY_TLS_CERT, FOREBAY_TLS_KEY and
FOREBAY_TOKEN_FILE, which `use_credentials` sets. All its connections use them, and its servers
unless their own options name others. Without credentials, connections are plain.

A server with a certificate and without tokens admits clients whose certificate its CA has signed
(mutual TLS). With tokens, it asks for a token instead. admission.py says who a peer is.

Files are read again when they change. If new files cannot be used, the old ones stay in force.
"""

from __future__ import annotations

import dataclasses
import functools
import ipaddress
import logging
import os
import ssl
import stat
import time
from typing import NamedTuple

from ..errors import InvalidArgument
from ..options import ServerOptions
from .reloaded import Reloaded

log = logging.getLogger(__name__)

VARIABLES = {
    name: f"FOREBAY_{name.upper()}" for name in ("tls_ca", "tls_cert", "tls_key", "token_file")
}
"""The environment variable of each field of Credentials."""


def _option(name: str) -> str:
    """How errors name a field of Credentials: by its flag and its variable."""
    return f"--{name.replace('_', '-')} ({VARIABLES[name]})"


_CA, _CERT, _KEY, _TOKEN_FILE = map(_option, VARIABLES)

_MAX_TOKEN_BYTES = 4096
_OPEN_TO_OTHERS = stat.S_IRWXG | stat.S_IRWXO
BEARER = "Bearer "
"""Before the token, in the metadata of a call."""


class Token(NamedTuple):
    name: str  # the file's name without its ending
    value: str


@dataclasses.dataclass(frozen=True)
class LoadedCredentials:
    """What the files of credentials hold."""

    ca: bytes
    chain: bytes  # the certificate, and those between it and the CA; b"" without one
    key: bytes
    tokens: tuple[Token, ...]
    client: ssl.SSLContext
    server: ssl.SSLContext | None  # None without a certificate
    http: ssl.SSLContext | None  # likewise, of the HTTP port

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """The metadata of a client's calls."""
        return (("authorization", BEARER + self.token),) if self.tokens else ()

    @property
    def token(self) -> str:
        """The token that a client sends; "" without one."""
        return self.tokens[0].value if self.tokens else ""


@dataclasses.dataclass(frozen=True)
class Credentials:
    """The files by which this process proves who it is, and by which it checks its peers.

    Args:
      tls_ca: certificates of the authorities that sign the peers' certificates (PEM).
      tls_cert, tls_key: this process's certificate, followed by those between it and the CA, and
        its private key without a passphrase (PEM). Servers need them.
      token_file: a file with one token, which only its owner may read; or root's, which only this
        process's own group may read. A client sends it. A server asks its clients for it, instead
        of certificates. A server may have several files, comma-separated: it admits each token,
        and its own calls send the first.

    Raises InvalidArgument.
    """

    tls_ca: str = ""
    tls_cert: str = ""
    tls_key: str = ""
    token_file: str = ""

    def __post_init__(self) -> None:
        for name in VARIABLES:
            given = getattr(self, name)
            try:
                path = os.fspath(given) if given else ""
                paths = path.split(",") if name == "token_file" else [path]
                value = ",".join(map(os.path.abspath, paths)) if path else ""
            except (TypeError, ValueError):
                raise InvalidArgument(f"{name}={given!r} must be the path of a file") from None
            if path and not all(paths):
                raise InvalidArgument(
                    f"{name}={given!r} has a comma beside which there is no file: leave it out"
                )
            object.__setattr__(self, name, value)
        if not self.tls_ca:
            raise InvalidArgument(
                "credentials without tls_ca: a process that knows no authority cannot tell its "
                f"peers from impostors; give tls_ca, {_CA}"
            )
        if bool(self.tls_cert) != bool(self.tls_key):
            has, lacks = ("tls_cert", "tls_key") if self.tls_cert else ("tls_key", "tls_cert")
            raise InvalidArgument(
                f"credentials with {has} {getattr(self, has)} and without {lacks}, "
                f"{_option(lacks)}: give both, or neither"
            )
        if not self.tls_cert and not self.token_file:
            raise InvalidArgument(
                "credentials with tls_ca only prove nobody's identity: give tls_cert and tls_key, "
                f"{_CERT} and {_KEY}, or token_file, {_TOKEN_FILE}"
            )

    def loaded(self) -> LoadedCredentials:
        """What the files hold now. Raises InvalidArgument if they could never be used."""
        return _files_of(self).content()

    def http_context(self) -> ssl.SSLContext:
        """For a server's HTTP port: with the files of the moment in each handshake.

        A client may come without a certificate, as health checks do.
        """

        def renew(tls: ssl.SSLObject, _: str | None, __: ssl.SSLContext) -> None:
            if (newest := self.loaded().http) is not None:
                tls.context = newest

        context = self.loaded().http
        assert context is not None, "a server has a certificate"
        context.sni_callback = renew
        return context

    def files(self) -> dict[str, str]:
        """The fields that are given."""
        return {name: value for name, value in dataclasses.asdict(self).items() if value}

    def environment(self) -> dict[str, str]:
        """The variables that give a child process these credentials."""
        return {VARIABLES[name]: value for name, value in self.files().items()}

    def __str__(self) -> str:
        return ", ".join(f"{name} {value}" for name, value in self.files().items())


def use_credentials(credentials: Credentials | None) -> None:
    """Use them for all connections that this process and its later children begin from now on.

    None: plain connections. Sets `FOREBAY_TLS_CA` and its like, so that processes that are
    spawned, such as those of a DataLoader, have them, too. Raises InvalidArgument if the files
    cannot be used.
    """
    found = {}
    if credentials is not None:
        credentials.loaded()
        found = credentials.environment()
    for variable in VARIABLES.values():
        os.environ.pop(variable, None)
    os.environ.update(found)


def own_credentials() -> Credentials | None:
    """The credentials of this process; None: its connections are plain. Raises InvalidArgument."""
    return _of_environment(*(os.environ.get(variable, "") for variable in VARIABLES.values()))


def token_to_send() -> str:
    """The token of this process; "" without one."""
    credentials = own_credentials()
    return "" if credentials is None else credentials.loaded().token


@functools.lru_cache(16)
def _of_environment(*values: str) -> Credentials | None:
    return Credentials(*values) if any(values) else None


def credentials_of_server(options: ServerOptions) -> Credentials | None:
    """The credentials of a server; None: it serves plain connections.

    Raises InvalidArgument if they cannot be used, and for a server that would listen beyond
    loopback without any, unless `insecure` asks for that.
    """
    given = {name: getattr(options, name) for name in VARIABLES}
    credentials = Credentials(**given) if any(given.values()) else own_credentials()
    if options.insecure:
        if any(given.values()):
            raise InvalidArgument(
                f"--insecure beside {credentials}: leave out --insecure, or the files"
            )
        return None
    if credentials is None:
        if not is_loopback(options.host):
            raise InvalidArgument(
                f"--host {options.host} is not a loopback address, so other machines could reach "
                f"this server, and nothing would keep anybody out: give {_CERT}, {_KEY} and {_CA}, "
                f"for tokens {_TOKEN_FILE}, too, or --insecure if you trust every host that can "
                "reach it"
            )
        return None
    if not credentials.tls_cert:
        raise InvalidArgument(
            f"a server needs a certificate, and has only {credentials}: give {_CERT} and {_KEY}"
        )
    credentials.loaded()
    return credentials


def serves_tensorflow(options: ServerOptions, credentials: Credentials | None) -> bool:
    """Whether a server with these options serves tf.data service's own clients and workers.

    They cannot prove who they are. Raises InvalidArgument for a server that would ask them to.
    """
    if options.allow_tensorflow_clients and credentials is not None:
        raise InvalidArgument(
            "--allow-tensorflow-clients beside TLS: tf.data service's own clients and workers "
            "cannot speak TLS; leave it out, or run a dispatcher of their own for them"
        )
    return credentials is None and (options.allow_tensorflow_clients or is_loopback(options.host))


NO_TENSORFLOW = (
    "this server does not serve tf.data service's own clients and workers, which cannot prove who "
    "they are: it has TLS, or it listens beyond loopback without --allow-tensorflow-clients"
)


def is_loopback(host: str) -> bool:
    """Whether only this machine's programs reach that address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


# -- files -----------------------------------------------------------------------------------------


@functools.cache
def _files_of(credentials: Credentials) -> Reloaded[LoadedCredentials]:
    values = (getattr(credentials, name) for name in VARIABLES)
    paths = [path for value in values if value for path in value.split(",")]
    return Reloaded(f"credentials ({credentials})", paths, functools.partial(_load, credentials))


def _load(credentials: Credentials) -> LoadedCredentials:
    ca = content_of(credentials.tls_ca, _CA)[0]
    chain = content_of(credentials.tls_cert, _CERT)[0] if credentials.tls_cert else b""
    key = content_of(credentials.tls_key, _KEY)[0] if credentials.tls_key else b""
    tokens = [_token(path) for path in credentials.token_file.split(",") if path]
    names = [token.name for token in tokens]
    if len({*names}) < len(names):
        raise InvalidArgument(
            f"{_TOKEN_FILE} {credentials.token_file} has two files whose names differ only in "
            "their folders or endings: a token is known by its file's name; rename one"
        )
    client = client_context(credentials)
    server = http = None
    if chain:
        server = _context(ssl.PROTOCOL_TLS_SERVER, credentials, ca)
        http = _context(ssl.PROTOCOL_TLS_SERVER, credentials, ca)
        server.num_tickets = http.num_tickets = 0  # no connection is resumed
        server.verify_mode = ssl.CERT_NONE if tokens else ssl.CERT_REQUIRED
        http.verify_mode = ssl.CERT_NONE if tokens else ssl.CERT_OPTIONAL
        _warn_of_times(credentials.tls_cert, chain)
    return LoadedCredentials(ca, chain, key, tuple(tokens), client, server, http)


def _warn_of_times(path: str, chain: bytes) -> None:
    """When it is loaded: peers that refuse a certificate do not say so here."""
    from cryptography.x509 import load_pem_x509_certificate

    try:
        own = load_pem_x509_certificate(chain)
    except ValueError:  # of a form that OpenSSL takes, and this library does not
        return
    begins, ends = own.not_valid_before_utc, own.not_valid_after_utc
    if not begins.timestamp() <= time.time() <= ends.timestamp():
        log.error(
            "%s %s: the certificate is valid from %s to %s, and not now: peers will refuse it; "
            "replace the file, or see this host's clock",
            *(_CERT, path, begins.isoformat(), ends.isoformat()),
        )


def client_context(credentials: Credentials) -> ssl.SSLContext:
    """Of connections to servers. Raises InvalidArgument."""
    ca = content_of(credentials.tls_ca, _CA)[0]
    return _context(ssl.PROTOCOL_TLS_CLIENT, credentials, ca)


def _context(protocol: int, credentials: Credentials, ca: bytes) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    try:
        context.load_verify_locations(cadata=ca.decode("ascii", "ignore"))  # names in comments
    except (ssl.SSLError, ValueError) as error:
        raise InvalidArgument(
            f"{_CA} {credentials.tls_ca} holds no certificates in PEM ({error}); give the "
            "file of the authorities that sign your certificates"
        ) from None
    if credentials.tls_cert:
        try:
            context.load_cert_chain(credentials.tls_cert, credentials.tls_key, password=_nobody)
        except (OSError, ValueError) as error:
            reason = str(getattr(error, "reason", "") or error)
            if "MISMATCH" in reason:
                raise InvalidArgument(
                    f"the key {_KEY} {credentials.tls_key} is not that of the certificate "
                    f"{_CERT} {credentials.tls_cert}; give a pair that was issued together"
                ) from None
            raise InvalidArgument(
                f"{_CERT} {credentials.tls_cert} or {_KEY} {credentials.tls_key} cannot be used: "
                f"{reason}; give a certificate and its key in PEM, the key without a passphrase"
            ) from None
    return context


def _nobody() -> bytes:
    raise ValueError("the key has a passphrase")


def content_of(path: str, option: str, most: int = -1) -> tuple[bytes, os.stat_result]:
    """What a file holds, `most` bytes of it, and its state. Raises InvalidArgument."""
    try:
        # A pipe would wait for its writer.
        with open(path, "rb", opener=lambda p, how: os.open(p, how | os.O_NONBLOCK)) as file:
            found = os.fstat(file.fileno())
            if not stat.S_ISREG(found.st_mode):
                raise InvalidArgument(
                    f"{option} {path} is no regular file; give one, as it is read again when it "
                    "changes"
                )
            return file.read(most), found
    except OSError as error:
        raise InvalidArgument(
            f"{option} {path} cannot be read: {error.strerror}; give a file that this user may read"
        ) from None


def _root_gave_it_to_this_group(found: os.stat_result) -> bool:
    """As Kubernetes gives a Secret to a process that is not root: by fsGroup."""
    readable = found.st_mode & _OPEN_TO_OTHERS == stat.S_IRGRP
    return readable and found.st_uid == 0 != os.geteuid() and found.st_gid == os.getegid()


def _token(path: str) -> Token:
    text, found = content_of(path, _TOKEN_FILE, _MAX_TOKEN_BYTES + 2)
    if found.st_mode & _OPEN_TO_OTHERS and not _root_gave_it_to_this_group(found):
        raise InvalidArgument(
            f"{_TOKEN_FILE} {path} has mode {stat.S_IMODE(found.st_mode):04o}, so other users may "
            f"use its token: chmod 600 {path}, or let root own it, with mode 440 and this "
            f"process's own group, {os.getegid()} (Kubernetes: runAsGroup and fsGroup)"
        )
    value = text.removesuffix(b"\n").removesuffix(b"\r")
    if not value:
        raise InvalidArgument(f"{_TOKEN_FILE} {path} is empty; write a token into it, on one line")
    if len(value) > _MAX_TOKEN_BYTES or not all(0x20 < byte < 0x7F for byte in value):
        raise InvalidArgument(
            f"{_TOKEN_FILE} {path} holds more than a token: a token is one line of at most "
            f"{_MAX_TOKEN_BYTES} visible ASCII characters, without spaces"
        )
    name, _ = os.path.splitext(os.path.basename(path))
    return Token(name, value.decode("ascii"))
