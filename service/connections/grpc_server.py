"""gRPC without generated stubs: a service is a table of its methods.

This module creates every channel (`connect`) and binds every port, with the credentials of
credentials.py; tls_socket.py has the data connections'. A server with tokens admits only calls that
bring one (`interceptors`). A server without tokens leaves it to gRPC's TLS.

It also parses and serializes the messages: in gRPC's own hooks, a malformed request would look
like a bug of the server.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import socket
import typing
from collections.abc import Awaitable, Callable, Collection, Hashable, Mapping, Sequence
from contextvars import ContextVar
from types import ModuleType
from typing import Any
from urllib.parse import unquote

import grpc
from google.protobuf.message import DecodeError, Message

from ..address_forms import in_brackets, is_wildcard
from ..errors import AddressInUse, ForebayError, InvalidArgument, Unauthenticated, status_of
from ..rate_limited_log import RateLimitedLog
from .admission import Admission, Identity
from .credentials import Credentials, own_credentials
from .proxies import proxy_options
from .requests import MAX_DATASET_BYTES, MAX_REQUEST_BYTES, PIECE_BYTES, RequestReceiver

log = logging.getLogger(__name__)

Method = tuple[Callable[..., Any], type[Message], type[Message]]
"""The function that answers a request, the request's class, and the answer's class."""

_UNLIMITED = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]

_LEAST_CONNECT = "grpc.min_reconnect_backoff_ms"
"""The option for how long gRPC tries to connect before it gives up and tries again."""

TLS_CONNECT_MS = 2_000
"""That time with TLS: a handshake takes two round trips and some processor time at both ends."""

CHANNEL_OPTIONS: list[tuple[str, Any]] = [
    *_UNLIMITED,
    ("grpc.initial_reconnect_backoff_ms", 50),
    (_LEAST_CONNECT, 50),
    ("grpc.max_reconnect_backoff_ms", 500),
]
"""For every channel: a dataset's graph may have any size, and clients reconnect quickly to a
restarted server."""

DISPATCHER_CHANNEL_OPTIONS: list[tuple[str, Any]] = [
    *CHANNEL_OPTIONS,
    ("grpc.keepalive_time_ms", 1_000),
    ("grpc.keepalive_timeout_ms", 1_200),
    ("grpc.http2.ping_timeout_ms", 1_200),
    ("grpc.http2.max_pings_without_data", 0),
]
"""For long-polling calls: keepalives detect a peer that is paused or silently cut off."""


def server_options(
    credentials: Credentials | None, *, datasets: bool = True
) -> list[tuple[str, Any]]:
    """For every server. Without SO_REUSEPORT, a used port is an error. Clients may ping.

    One with credentials serves Forebay's clients only, which send large requests in pieces. Nobody
    compresses a message: gRPC before 1.80 bounds it before it is inflated, and not behind that.
    """
    most = MAX_DATASET_BYTES if credentials is None and datasets else PIECE_BYTES
    return [
        ("grpc.max_send_message_length", -1),
        ("grpc.max_receive_message_length", most),
        ("grpc.compression_enabled_algorithms_bitset", 1),  # none but "identity"
        ("grpc.so_reuseport", 0),
        ("grpc.http2.min_ping_interval_without_data_ms", 500),
        ("grpc.http2.max_ping_strikes", 0),
        ("grpc.server_handshake_timeout_ms", 10_000),
    ]


LEADER_KEY = "forebay-leader"
"""The metadata key with which a standby dispatcher gives the leader's address."""


def advertised_address(address: str, bound: str, option: str = "--address") -> str:
    """The advertised address: `address` with the port of `bound` for "%port%", else `bound`.

    Raises InvalidArgument if nobody could connect to it.
    """
    told = address.replace("%port%", bound.rpartition(":")[2]) or bound
    host = told.rpartition(":")[0]
    if is_wildcard(host):
        raise InvalidArgument(
            f"clients cannot connect to {host!r}, which is to listen on every address of this "
            f"host: say the one that they reach it at, {option} HOST:%port%"
        )
    return told


def resolved(address: str) -> str:
    """HOST:PORT with an IP address for the host; "" if the name is not known. May take seconds."""
    host, _, port = address.rpartition(":")
    try:
        ip = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)[0][4][0]
    except (OSError, ValueError):
        return ""
    return f"[{ip}]:{port}" if ":" in str(ip) else f"{ip}:{port}"


def is_listened_on(address: str, timeout_s: float) -> bool | None:
    """Whether a HOST:PORT accepts connections; None if that cannot be told."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout_s).close()
    except ConnectionRefusedError:
        return False
    except (OSError, ValueError):
        return None
    return True


def connect(
    address: str,
    options: Sequence[tuple[str, Any]] = CHANNEL_OPTIONS,
    credentials: Credentials | None = None,
    *,
    is_async: bool = False,
) -> Any:
    """A channel to a dispatcher or a worker, for blocking calls, or for coroutines.

    It has the files' content of now; a later one needs another channel. By default with the
    process's own credentials. Calls bring `metadata_of` them.
    """
    kind: Any = grpc.aio if is_async else grpc
    options = [*options, *proxy_options(address)]
    credentials = credentials or own_credentials()
    if credentials is None:
        return kind.insecure_channel(address, options=options)
    loaded = credentials.loaded()
    own = (loaded.key, loaded.chain) if loaded.chain else (None, None)
    options = [option for option in options if option[0] != _LEAST_CONNECT]
    options.append((_LEAST_CONNECT, TLS_CONNECT_MS))
    certificates = grpc.ssl_channel_credentials(loaded.ca, *own)
    return kind.secure_channel(address, certificates, options=options)


def metadata_of(credentials: Credentials | None) -> tuple[tuple[str, str], ...]:
    """The metadata of a call with these credentials."""
    return () if credentials is None else credentials.loaded().metadata


def _server_credentials(credentials: Credentials) -> grpc.ServerCredentials:
    """Take the files' content of the time of each handshake."""
    given = credentials.loaded()

    def configuration() -> grpc.ServerCertificateConfiguration:
        return grpc.ssl_server_certificate_configuration([(given.key, given.chain)], given.ca)

    def renewed() -> grpc.ServerCertificateConfiguration | None:
        nonlocal given
        before, given = given, credentials.loaded()
        return None if given is before else configuration()

    asks_for_certificates = not given.tokens
    first, later = configuration(), typing.cast(Callable[[], Any], renewed)  # None: no change
    return grpc.dynamic_ssl_server_credentials(first, later, asks_for_certificates)


def bind(server: Any, host: str, port: int, credentials: Credentials | None = None) -> str:
    """Make a server listen on host:port (0: any free port); return the address.

    With `credentials`, make the server with their `interceptors`, too. Raises AddressInUse.
    """
    try:
        if credentials is None:
            bound = server.add_insecure_port(f"{in_brackets(host)}:{port}")
        else:
            certificates = _server_credentials(credentials)
            bound = server.add_secure_port(f"{in_brackets(host)}:{port}", certificates)
    except RuntimeError as error:
        raise AddressInUse(
            f"cannot listen on {host}:{port}: it is in use, or not an address of this machine; "
            "choose another"
        ) from error
    return f"{in_brackets(host)}:{bound}"


def interceptors(admission: Admission | None, *, is_async: bool = False) -> list[Any]:
    """Of a threaded server, or a `grpc.aio` one: refuse calls without a token, if it asks for
    tokens."""
    if admission is None or not admission.asks_for_token:
        return []
    return [_AsyncTokenInterceptor(admission) if is_async else _TokenInterceptor(admission)]


class _TokenInterceptor(grpc.ServerInterceptor):  # type: ignore[type-arg] # generic in its stubs only
    def __init__(self, admission: Admission) -> None:
        self._admission = admission

    def intercept_service(self, continuation: Callable[..., Any], details: Any) -> Any:
        return _refused(self._admission, details, is_async=False) or continuation(details)


class _AsyncTokenInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg] # the same
    def __init__(self, admission: Admission) -> None:
        self._admission = admission

    async def intercept_service(self, continuation: Callable[..., Any], details: Any) -> Any:
        return _refused(self._admission, details, is_async=True) or await continuation(details)


def _refused(admission: Admission, details: Any, *, is_async: bool) -> Any:
    """What refuses the call; None if it is admitted."""
    try:
        admission.of_metadata(details.invocation_metadata or ())
        return None
    except Unauthenticated as error:
        refusal = str(error)

    def complain(peer: str) -> None:
        admission.denials.add(details.method, "unauthenticated")
        admission.rate_limited_log.warn("refused %.100r of %s: %s", details.method, peer, refusal)

    return _refusing(grpc.StatusCode.UNAUTHENTICATED, refusal, is_async, complain)


def _refusing(
    code: grpc.StatusCode, why: str, is_async: bool, told: Callable[[str], None] = lambda peer: None
) -> grpc.RpcMethodHandler[Any, Any]:
    """Receives no request, whatever one that is. `told` is called with the peer of each call."""

    def refuse(_: object, context: Any) -> None:
        told(context.peer())
        context.abort(code, why)

    async def refuse_async(_: object, context: Any) -> None:
        told(context.peer())
        await context.abort(code, why)

    return grpc.stream_stream_rpc_method_handler(refuse_async if is_async else refuse)


_call: ContextVar[grpc.aio.ServicerContext[bytes, bytes]] = ContextVar("forebay-call")


def current_metadata() -> dict[str, str | bytes]:
    """Of the RPC that this coroutine serves; none outside of one."""
    call = _call.get(None)
    return {} if call is None else dict(call.invocation_metadata() or ())


def current_peer() -> str:
    """Such as 10.0.0.7:41234 or [::1]:41234, from where this RPC came; "" outside of one."""
    call = _call.get(None)
    return "" if call is None else unquote(call.peer().partition(":")[2])


_caller: ContextVar[Identity | None] = ContextVar("forebay-caller", default=None)


def current_caller(admission: Admission) -> Identity:
    """Who has sent the RPC that this coroutine serves; looked up once."""
    caller = _caller.get()
    if caller is None:
        caller = admission.of_call(_call.get())
        _caller.set(caller)
    return caller


def when_answered(callback: Callable[[], object]) -> None:
    """Call it once the RPC that this coroutine serves has been answered, or its client has gone.
    Outside of an RPC, call it on the loop's next turn."""
    call: Any = _call.get(None)
    if call is None:
        asyncio.get_running_loop().call_soon(callback)
    else:
        call.add_done_callback(lambda _: callback())


def threaded_handler(
    service: str, methods: Mapping[str, Method]
) -> grpc.GenericRpcHandler[Any, Any]:
    """A handler for the service of that full name, for a threaded server.

    Each method's function takes a request and returns an answer. It may take `is_awaited`: a
    function that tells whether the client still waits. A ForebayError becomes the call's status
    (errors.py); a malformed request is INVALID_ARGUMENT.
    """

    def handler(function: Callable[..., Any], kind: type[Message]) -> Any:
        asks_on = "is_awaited" in inspect.signature(function).parameters

        def answer(data: bytes, context: grpc.ServicerContext) -> bytes:
            options = {"is_awaited": context.is_active} if asks_on else {}
            try:
                answered: Message = function(parsed(kind, data), **options)
                return answered.SerializeToString()
            except ForebayError as error:
                context.abort(grpc.StatusCode[status_of(error)], str(error))

        return grpc.unary_unary_rpc_method_handler(answer)

    return grpc.method_handlers_generic_handler(
        service, {name: handler(function, kind) for name, (function, kind, _) in methods.items()}
    )


def parsed(kind: type[Message], data: bytes | bytearray) -> Message:
    """Raises InvalidArgument."""
    try:
        return kind.FromString(data)  # type: ignore[arg-type] # also a bytearray, uncopied
    except DecodeError as error:
        raise InvalidArgument(
            f"the request is no {kind.DESCRIPTOR.name} message ({len(data)} bytes that do not "
            "parse)"
        ) from error


async def _parsed_async(kind: type[Message], data: bytes | bytearray) -> Message:
    return parsed(kind, data)


def generic_handler(
    service: str,
    methods: Mapping[str, Method],
    *,
    of_datasets: Collection[str] = (),
    admit: Callable[[str, Any], Hashable] = lambda _, call: call.peer(),
    parse: Callable[[type[Message], bytes | bytearray], Awaitable[Message]] = _parsed_async,
) -> grpc.GenericRpcHandler[Any, Any]:
    """A handler for the service of that full name, for a `grpc.aio` server.

    Each method's coroutine function takes a request and returns an answer. Before a request is
    received, `admit(method, call)` says who sends it, or raises why not; `parse` gets it next.
    `of_datasets` names the methods whose requests carry a dataset. A ForebayError becomes the
    call's status.
    """
    receiver, rate_limited_log = RequestReceiver(), RateLimitedLog(log)

    def handler(name: str, function: Callable[..., Any], kind: type[Message]) -> Any:
        most = receiver.most_of_one if name in of_datasets else MAX_REQUEST_BYTES

        async def served(context: grpc.aio.ServicerContext[bytes, bytes]) -> bytes:
            peer = admit(name, context)
            async with receiver.request(context, peer, most) as received:
                async with receiver.parsing(peer):
                    request = await parse(kind, received.pop())
                answered: Message = await function(request)
                return answered.SerializeToString()

        async def answer(_: object, context: grpc.aio.ServicerContext[bytes, bytes]) -> bytes:
            _call.set(context)
            _caller.set(None)
            try:
                return await served(context)
            except ForebayError as error:
                refusal = grpc.StatusCode[status_of(error)], str(error)
                _forget_frames(error)
            except Exception as error:  # noqa: BLE001 - a bug: the caller alone has the error
                rate_limited_log.warn(
                    "%s failed", name, kind=name, level=logging.ERROR, exc_info=error
                )
                refusal = grpc.StatusCode.UNKNOWN, f"Unexpected {type(error).__name__}: {error}"
                _forget_frames(error)
            return await context.abort(*refusal)  # which raises

        return grpc.stream_unary_rpc_method_handler(answer)

    return grpc.method_handlers_generic_handler(
        service,
        {name: handler(name, function, kind) for name, (function, kind, _) in methods.items()},
    )


def _forget_frames(error: BaseException) -> None:
    """Let an error and its causes refer to no frames: these hold the request, and refer to the
    error, so all of it would stay until the garbage collector comes.

    The frames are not cleared: one of another coroutine that waits for the same error may be
    among them, and Python 3.11 and 3.12 would end it.
    """
    errors, seen = [error], set[int]()
    while errors:
        one = errors.pop()
        if id(one) not in seen:
            seen.add(id(one))
            one.__traceback__ = None
            errors += filter(None, (one.__cause__, one.__context__))


def refusing_handler(
    service: str, messages: ModuleType, error: ForebayError, *, is_async: bool
) -> grpc.GenericRpcHandler[Any, Any]:
    """A handler that answers each method of that service with `error`. `messages` has its messages:
    <Method>Request and <Method>Response. `is_async`: for a `grpc.aio` server."""
    handler = _refusing(grpc.StatusCode[status_of(error)], str(error), is_async)
    kinds = messages.DESCRIPTOR.message_types_by_name
    names = (kind.removesuffix("Request") for kind in kinds if kind.endswith("Request"))
    return grpc.method_handlers_generic_handler(
        service, {name: handler for name in names if f"{name}Response" in kinds}
    )
