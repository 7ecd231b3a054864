"""TlsSocket: TLS over a blocking socket that one thread reads and another one writes.

Python's own SSLSocket cannot be used by two threads at once, and ignores SO_RCVTIMEO. So the
records are made and read in memory, under a lock that nobody holds while the network is slow. The
system calls stay those of the plain socket, with their timeouts.
"""

from __future__ import annotations

import contextlib
import select
import socket
import ssl
import threading
import time
from collections.abc import Sequence
from typing import Any

from ..errors import InvalidArgument
from .admission import Identity, of_certificate
from .credentials import Credentials, client_context

_SEND_BYTES = 512 << 10
"""How much is encrypted at a time. The interpreter lock is taken a few times for each piece."""

_RECEIVE_BYTES = 256 << 10
_SMALL_BYTES = 4 << 10  # buffers below this share records

_PLAIN_TO_TLS = ("WRONG_VERSION_NUMBER", "HTTP_REQUEST", "RECORD_LAYER_FAILURE")
_CLOCKS = "check the clocks of both hosts"


class TlsError(ConnectionError):
    """The peer has no TLS or no valid certificate, or refuses ours. Says what to do."""

    kind = ""
    """What is wrong, in OpenSSL's words, which are few."""


class PlainPeer(TlsError):
    """The peer does not speak TLS."""


class ClosedEarly(TlsError):
    """The peer closed the connection in the handshake, perhaps because it ends or starts."""


class TlsSocket(socket.socket):
    """A connected socket with TLS. Only `sendmsg` and `recv_into` pass data.

    One thread may receive while another one sends.
    """

    def __init__(
        self,
        sock: socket.socket,
        credentials: Credentials,
        *,
        server_name: str | None,
        peer: str,
        context: ssl.SSLContext | None = None,
    ) -> None:
        """Takes over the socket. `server_name` is the host that a client connects to; None: this
        is the server. `peer` is the other end's name in errors. `context` replaces that of the
        credentials.
        """
        super().__init__(fileno=sock.detach())
        self._credentials = credentials
        self._peer = peer
        self._is_server = server_name is None
        loaded = credentials.loaded()
        context = context or (loaded.server if self._is_server else loaded.client)
        assert context is not None, "a server has a certificate"
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(
            self._incoming, self._outgoing, server_side=self._is_server, server_hostname=server_name
        )
        self._using = threading.Lock()  # of the three above
        self._cipher = memoryview(bytearray(_RECEIVE_BYTES))

    def handshake(self, timeout_s: float) -> None:
        """Raises TlsError, OSError."""
        give_up_s = time.monotonic() + timeout_s
        while True:
            try:
                self._tls.do_handshake()
            except ssl.SSLWantReadError:
                self._flush()
                try:
                    size = super().recv_into(self._cipher)
                except ConnectionResetError:
                    size = 0
                except BlockingIOError:  # SO_RCVTIMEO
                    raise TimeoutError(f"{self._peer} took too long over TLS") from None
                if not size:
                    raise ClosedEarly(self._closed_early()) from None
                if time.monotonic() > give_up_s:
                    raise TimeoutError(f"{self._peer} took too long over TLS") from None
                self._incoming.write(self._cipher[:size])
            except ssl.SSLError as error:
                with contextlib.suppress(OSError):
                    self._flush()  # tells the peer why
                raise self._explained(error) from None
            else:
                self._flush()
                return

    def identity(self) -> Identity:
        """Who the peer is, by its certificate."""
        return of_certificate(self._tls.getpeercert(binary_form=True))

    def sendmsg(  # type: ignore[override] # of ours only
        self, buffers: Sequence[Any], ancdata: Any = (), flags: int = 0
    ) -> int:
        at_once = bool(flags & socket.MSG_DONTWAIT)
        if at_once and not self._has_room():
            raise BlockingIOError("the socket is full")  # a record that is made must be sent
        taken = 0
        small: list[memoryview] = []
        with self._using:
            for buffer in buffers:
                part = memoryview(buffer)[: _SEND_BYTES - taken]
                taken += len(part)
                if len(part) < _SMALL_BYTES:
                    small.append(part)
                else:
                    if small:
                        self._tls.write(b"".join(small))
                        small.clear()
                    self._tls.write(part)
                if taken == _SEND_BYTES:
                    break
            if small:
                self._tls.write(b"".join(small))
            records = self._outgoing.read()
        if at_once:
            try:
                sent = super().send(records, flags)
            except BlockingIOError:
                sent = 0
            if sent < len(records):
                raise ConnectionAbortedError("the connection has no room for a small message")
        else:
            super().sendall(records)
        return taken

    def send_plain(self, data: bytes) -> None:
        """For a peer that does not speak TLS."""
        super().sendall(data)

    def _has_room(self) -> bool:
        poll = select.poll()
        poll.register(self, select.POLLOUT)
        return bool(poll.poll(0))

    def recv_into(self, buffer: Any, nbytes: int = 0, flags: int = 0) -> int:
        """Ignores `flags`: it returns what there is, at least one byte; 0 at the end."""
        target = memoryview(buffer)
        while True:
            with self._using:
                size = self._decrypt(target)
            if size is not None:
                return size
            size = super().recv_into(self._cipher)
            if not size:
                return 0
            with self._using:
                self._incoming.write(self._cipher[:size])

    def _passes_no_data(self, *_: Any, **__: Any) -> Any:
        raise NotImplementedError("use sendmsg or recv_into: others would pass data in plain")

    send = sendall = sendto = recv = recvfrom = recvmsg = recvmsg_into = _passes_no_data
    recvfrom_into = sendfile = makefile = _passes_no_data

    def _decrypt(self, target: memoryview) -> int | None:
        """How many bytes were there; 0 at the end; None if there are none yet."""
        filled = 0
        read: Any = self._tls.read
        try:
            while filled < len(target):
                size = read(len(target) - filled, target[filled:])
                if not size:
                    return filled
                filled += size
        except ssl.SSLWantReadError:
            return filled or None
        except ssl.SSLError as error:
            raise self._explained(error) from None
        return filled

    def _flush(self) -> None:
        if self._outgoing.pending:
            super().sendall(self._outgoing.read())

    def _closed_early(self) -> str:
        if self._is_server:
            return (
                f"{self._peer} closed the connection before it spoke TLS: it may not trust the "
                f"certificate {self._credentials.tls_cert}"
            )
        return (
            f"{self._peer} closed the connection instead of speaking TLS: if it has no "
            "certificate, start it with --tls-cert, --tls-key and --tls-ca, or this process "
            "without credentials"
        )

    def _explained(self, error: ssl.SSLError) -> TlsError:
        return explained(error, self._peer, self._credentials, is_server=self._is_server)


def explained(
    error: ssl.SSLError, peer: str, credentials: Credentials, *, is_server: bool
) -> TlsError:
    """The error with what went wrong with TLS, and what to do about it."""
    cls = PlainPeer if error.reason in _PLAIN_TO_TLS else TlsError
    told = cls(_explanation(error, peer, credentials, is_server))
    told.kind = f"{error.reason} {getattr(error, 'verify_code', '')}"
    return told


def _explanation(error: ssl.SSLError, peer: str, credentials: Credentials, is_server: bool) -> str:
    reason = error.reason or ""
    if isinstance(error, ssl.SSLCertVerificationError):
        return _of_their_certificate(error, peer, credentials)
    if reason in _PLAIN_TO_TLS:
        if is_server:
            return (
                f"{peer} does not speak TLS, and this server does: give it credentials "
                "(FOREBAY_TLS_CA, FOREBAY_TLS_CERT and FOREBAY_TLS_KEY, or FOREBAY_TOKEN_FILE); "
                "tf.data service's own clients and workers have none"
            )
        return (
            f"{peer} does not speak TLS, and this process has credentials ({credentials}): start "
            "the server with --tls-cert, --tls-key and --tls-ca, or this process without them"
        )
    if reason == "PEER_DID_NOT_RETURN_A_CERTIFICATE":
        return (
            f"{peer} has no certificate: give it --tls-cert and --tls-key (FOREBAY_TLS_CERT, "
            "FOREBAY_TLS_KEY)"
        )
    if "ALERT" in reason:
        return _of_our_certificate(reason, peer, credentials)
    return f"{peer} broke TLS ({reason or error}); is it one of Forebay's, and this version's?"


def _of_their_certificate(
    error: ssl.SSLCertVerificationError, peer: str, credentials: Credentials
) -> str:
    said = error.verify_message.rstrip(".")
    match error.verify_code:
        case 10:  # X509_V_ERR_CERT_HAS_EXPIRED
            advice = f"renew it; or {_CLOCKS}"
        case 9:  # X509_V_ERR_CERT_NOT_YET_VALID
            advice = f"wait, or {_CLOCKS}"
        case 62 | 64:  # X509_V_ERR_HOSTNAME_MISMATCH, X509_V_ERR_IP_ADDRESS_MISMATCH
            advice = (
                "have it issued with this name or address as a subject alternative name, or "
                "connect by a name that it has (--address)"
            )
        case _:
            advice = (
                f"give both sides certificates of the authorities in --tls-ca {credentials.tls_ca}"
            )
    return f"the certificate of {peer} is not accepted here: {said}; {advice}"


def _of_our_certificate(reason: str, peer: str, credentials: Credentials) -> str:
    ours = credentials.tls_cert
    if "CERTIFICATE_REQUIRED" in reason or ("HANDSHAKE_FAILURE" in reason and not ours):
        return (
            f"{peer} asks for a certificate, and this process has none: give --tls-cert and "
            "--tls-key (FOREBAY_TLS_CERT, FOREBAY_TLS_KEY)"
        )
    whats = {
        "UNKNOWN_CA": "no authority that it knows has signed it; give it one of those in its "
        "--tls-ca, or add the authority there",
        "CERTIFICATE_EXPIRED": f"it has expired; renew it, or {_CLOCKS}",
    }
    other = f"{reason.lower().replace('_', ' ')}; is it valid yet, for clients, for that host?"
    what = next((text for alert, text in whats.items() if alert in reason), other)
    return f"{peer} does not accept the certificate {ours or 'of this process'}: {what}"


def probe(address: str, credentials: Credentials | None, timeout_s: float = 2.0) -> tuple[str, int]:
    """Why TLS fails with the server at "host:port", and what to do; "" if it does not, or if the
    server does not answer. And how often this must be found in a row before it is believed; 0: it
    may always pass. For errors of gRPC, which do not say it."""
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    peer = f"the server at {address}"
    try:
        with socket.create_connection((host, int(port)), timeout_s) as sock:
            sock.settimeout(timeout_s)
            if credentials is None:
                return _wants_tls(sock, peer), 1
            context = client_context(credentials)
            context.set_alpn_protocols(["h2"])
            with TlsSocket(sock, credentials, server_name=host, peer=peer, context=context) as tls:
                tls.settimeout(timeout_s)
                tls.handshake(timeout_s)
                # The server checks this process's certificate after the client's handshake.
                tls.sendmsg(
                    [b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00"]
                )
                with contextlib.suppress(ConnectionResetError):
                    if tls.recv_into(bytearray(1)):
                        return "", 0
                # gRPC's servers do not say why.
                return _of_closed(peer, credentials), 2
    except ClosedEarly as error:
        return str(error), 0
    except TlsError as error:
        return str(error), 1
    except (OSError, InvalidArgument):  # such as a file that is just being replaced
        return "", 0


def _of_closed(peer: str, credentials: Credentials) -> str:
    """A server has closed the connection after the client's handshake."""
    if not credentials.tls_cert:
        return _of_our_certificate("CERTIFICATE_REQUIRED", peer, credentials)
    fault = _fault_of_own(credentials)
    if "expired" in fault:
        return _of_our_certificate("CERTIFICATE_EXPIRED", peer, credentials)
    if "not yet valid" in fault:
        return (
            f"{peer} does not accept the certificate {credentials.tls_cert}: {fault}; wait, or "
            f"{_CLOCKS}"
        )
    told = _of_our_certificate("UNKNOWN_CA", peer, credentials)
    return f"{told}. gRPC takes certificates with RSA and ECDSA keys only"


def _fault_of_own(credentials: Credentials) -> str:
    """What a server with the same files would say of this process's certificate; "" if nothing."""
    client, server = client_context(credentials), credentials.loaded().server
    assert server is not None
    client.check_hostname, client.verify_mode = False, ssl.CERT_NONE
    to_client, to_server = ssl.MemoryBIO(), ssl.MemoryBIO()
    ours = client.wrap_bio(to_client, to_server)
    theirs = server.wrap_bio(to_server, to_client, server_side=True)
    try:
        for end in (ours, theirs, ours, theirs):
            with contextlib.suppress(ssl.SSLWantReadError):
                end.do_handshake()
    except ssl.SSLCertVerificationError as error:
        return error.verify_message
    except ssl.SSLError:
        pass
    return ""


def _wants_tls(sock: socket.socket, peer: str) -> str:
    """What to do if the server speaks TLS, as its answer to a client's first message shows."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    outgoing, incoming = ssl.MemoryBIO(), ssl.MemoryBIO()
    with contextlib.suppress(ssl.SSLWantReadError):
        context.wrap_bio(incoming, outgoing).do_handshake()
    sock.sendall(outgoing.read())
    if sock.recv(2) not in (b"\x16\x03", b"\x15\x03"):
        return ""
    return (
        f"{peer} speaks TLS, and this process has no credentials: give them (FOREBAY_TLS_CA, "
        "FOREBAY_TLS_CERT and FOREBAY_TLS_KEY, or FOREBAY_TOKEN_FILE; service.use_credentials). "
        "tf.data service's own clients and workers cannot speak TLS"
    )
