"""The dispatcher's client, for workers and trainers: its calls survive dispatcher restarts.

The client retries temporary failures (a dispatcher that is unreachable, restarting, or slow) until
a call succeeds or the client is closed. A dispatcher with another journal than the client knows
is a temporary failure, too: the right dispatcher is away. So is, for TOKEN_REPLACED_S, a token that
is refused although its file was accepted before. Commands that create something carry a request
number, which makes them idempotent: a retry gets the first answer.
"""

from __future__ import annotations

import itertools
import logging
import math
import random
import re
import threading
import time
import uuid
from typing import Any, Self, TypeVar

import grpc
from google.protobuf.message import Message

from ...journal.proto import events_pb2 as ev
from .. import tracing
from ..address_forms import parse_service
from ..errors import (
    InvalidArgument,
    ProtocolError,
    Unauthenticated,
    Unavailable,
    Unimplemented,
    error_of_status,
)
from ..proto import forebay_pb2 as pb
from . import relay
from .credentials import Credentials, own_credentials
from .grpc_server import DISPATCHER_CHANNEL_OPTIONS, LEADER_KEY, connect, metadata_of
from .proxies import proxy_note
from .reloaded import CHECK_S
from .requests import PIECE_BYTES, ask
from .tls_socket import probe

log = logging.getLogger(__name__)

SERVICE = "forebay.v1.Dispatcher"
TEMPORARY = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.ABORTED,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.DEADLINE_EXCEEDED,
)
_NO_DISPATCHER = re.compile("$|Method not found!$|Received http2 header")
"""The details of UNIMPLEMENTED from gRPC's servers in C++ and in Python, and from a web server."""
_MAYBE_TLS = re.compile("failed to connect to all addresses|Socket closed")
"""In the details of an error that may be TLS's; of several addresses, gRPC tells the last one's."""
_SAID = re.compile("(the journal|the dispatcher|this dispatcher)\\b")
"""The words of a dispatcher that is reached, and does not serve (its `Unavailable`)."""
TOKEN_REPLACED_S = 5.0
"""For so long a call is repeated though the dispatcher refuses a token whose file it has accepted
before: it was replaced, perhaps, and one side has not yet looked at its file."""
PROBE_S = 2.0
"""The least time between two probes of TLS."""
OWN_CONNECTION = [("grpc.use_local_subchannel_pool", 1)]
CALL_TIMEOUT_S = 10.0
COMPLAIN_AFTER_S = 2.0
"""A call logs that it is repeated once the pauses between its attempts take so long together, again
after twice as long, and at once if the journal is wrong."""
SHORT_PATIENCE_S = 10.0

Response = TypeVar("Response", bound=Message)


class DispatcherClient:
    """Calls the dispatcher. Thread-safe. `close` ends pending retries."""

    def __init__(
        self,
        service: str | tuple[str, str],
        known: pb.JournalPosition | None = None,
        *,
        own_connection: bool = False,
        credentials: Credentials | None = None,
    ) -> None:
        """`known` is the journal position that an earlier client knew. With `own_connection`,
        this client shares no connection with the process's other clients. `credentials` are by
        default the process's own.
        """
        self.addresses = parse_service(service)
        self._options = DISPATCHER_CHANNEL_OPTIONS + OWN_CONNECTION * own_connection
        self._caller = uuid.uuid4().hex
        self._numbers = itertools.count(1)
        self._numbered_calls = threading.Lock()  # numbered calls are sent one at a time
        self._closed = threading.Event()
        self._lock = threading.Lock()
        self._known = known or pb.JournalPosition()
        self._turn = 0  # how often the channel was replaced
        self._address = self.addresses[0]
        self._credentials = credentials or own_credentials()
        self._answered = False  # whether a dispatcher ever has
        self._serves = True  # whether the last one that was logged has answered since
        self._meets_others = False  # servers of another protocol
        self._membership = tuple(self.addresses), self._credentials
        self.failed_s = -math.inf  # when none has answered for the last time, CLOCK_MONOTONIC
        self._probe_at = 0.0
        self._fault, self._found = "", 0  # of TLS, and how often in a row
        self._channel = self._connect()

    def _connect(self) -> Any:
        """A grpc.Channel, or a RelayedChannel in a fork."""
        self._files = None if self._credentials is None else self._credentials.loaded()
        if relay.is_needed():
            return relay.RelayedChannel(self._address, self._credentials)
        relay.mark_grpc_used()
        return connect(self._address, self._options, self._credentials)

    def call(
        self,
        request: Message,
        response: type[Response],
        *,
        timeout_s: float = CALL_TIMEOUT_S,
        patience_s: float | None = None,
        closed: threading.Event | None = None,
        service: str = SERVICE,
    ) -> Response:
        """Call the method of this request (<Method>Request), and retry until it is answered.

        `timeout_s` bounds one attempt; `patience_s` all of them (None: no bound). `closed`
        ends the retries, as does `close`. `service` is the method's gRPC service. Raises the
        domain error that the dispatcher answered, or Unavailable.
        """
        method = f"/{service}/{type(request).__name__.removesuffix('Request')}"
        closed = closed or self._closed
        try:
            return self._call_again(method, request, response, timeout_s, patience_s, closed)
        except _ChannelReplaced as error:
            raise Unavailable("the connection to the dispatcher was closed") from error
        except grpc.RpcError as error:
            code, details = error.code(), error.details() or ""
            is_away = code in TEMPORARY and code is not grpc.StatusCode.ABORTED
            if is_away and not closed.is_set():
                why = self._why_no_tls(error, self._address)
                if not why and _SAID.match(details):
                    raise Unavailable(
                        f"no dispatcher serves at {', '.join(self.addresses)} now: {details}"
                    ) from error
                why = why or (
                    f"({code.name}: {details}); is it running, and reachable?{self._note()}"
                )
                raise Unavailable(
                    f"no dispatcher answers at {', '.join(self.addresses)} {why}"
                ) from error
            if code is grpc.StatusCode.UNIMPLEMENTED and _NO_DISPATCHER.match(details):
                raise Unimplemented(
                    f"what answers at {self._address} is no dispatcher of Forebay's, or an earlier "
                    f"version's: it does not know {method}; give a dispatcher's address"
                ) from error
            raise error_of_status(code, details) from error

    def _call_again(
        self,
        method: str,
        request: Message,
        response: type[Response],
        timeout_s: float,
        patience_s: float | None,
        closed: threading.Event,
    ) -> Response:
        was_accepted = self._membership in _accepted  # a token of the same file, by the service
        # A caller with short patience soon gets the error itself.
        complains = patience_s is None or patience_s > SHORT_PATIENCE_S
        complain_s = {True: COMPLAIN_AFTER_S, False: 0.0}  # by whether the dispatcher is away
        begun_s, refused_s = time.monotonic(), math.inf
        attempts, paused_s = 0, 0.0
        while True:
            try:
                return self._attempt(method, request, response, timeout_s)
            except (grpc.RpcError, _ChannelReplaced) as error:
                code, now_s, pause_s = _code(error), time.monotonic(), 0.0
                if not _is_temporary(error):
                    refused_s = min(refused_s, now_s)
                    is_refused = was_accepted and code is grpc.StatusCode.UNAUTHENTICATED
                    if not is_refused or now_s >= refused_s + TOKEN_REPLACED_S:
                        raise
                    pause_s = CHECK_S  # the files are looked at once in so long
                pause_s += random.uniform(0, min(0.02 * 2 ** min(attempts, 4), 0.3))
                if closed.is_set() or (patience_s is not None and now_s >= begun_s + patience_s):
                    raise
                # Count only the pauses: an attempt itself may have waited long.
                attempts, paused_s = attempts + 1, paused_s + pause_s
                is_away = code is not grpc.StatusCode.ABORTED  # else its journal is wrong
                if complains and paused_s > complain_s[is_away]:
                    complain_s[is_away] = max(2 * paused_s, COMPLAIN_AFTER_S)
                    details = error.details() if isinstance(error, grpc.RpcError) else error
                    log.warning(
                        "still trying to call %s at %s: %s%s",
                        method, ",".join(self.addresses), details, self._note(),
                    )  # fmt: skip
                closed.wait(pause_s)

    def call_numbered(
        self,
        request: Any,
        response: type[Response],
        *,
        patience_s: float | None = None,
        again: bool = False,
    ) -> Response:
        """Like `call`, for a request with a `request` field, which this method fills in.

        With `again`, it repeats the last request under the same number, to get its answer.
        """
        with self._numbered_calls:
            if not again:
                numbered = ev.Request(caller=self._caller, number=next(self._numbers))
                request.request.CopyFrom(numbered)
            return self.call(request, response, patience_s=patience_s)

    def _attempt(
        self, method: str, request: Message, response: type[Response], timeout_s: float
    ) -> Response:
        with self._lock:
            channel, turn, address = self._channel, self._turn, self._address
        if "known" in request.DESCRIPTOR.fields_by_name:
            request.known.CopyFrom(self._known)  # type: ignore[attr-defined]
        try:
            metadata = (*metadata_of(self._credentials), *tracing.metadata())
            said = ask(
                channel, method, request.SerializeToString(), timeout=timeout_s, metadata=metadata
            )
        except grpc.RpcError as error:
            if _is_temporary(error):
                self.failed_s = time.monotonic()
                self._meets_others |= _NO_GRPC in (error.details() or "")
                self._switch_dispatcher(turn, _leader(error), f"{method}: {error.details()}")
                if not self._answered and (why := self._why_no_tls(error, address, sure=True)):
                    raise Unauthenticated(why) from error
            raise
        except ValueError as error:  # the channel was closed meanwhile
            if self._closed.is_set():
                raise Unavailable("the connection to the dispatcher was closed") from error
            raise _ChannelReplaced from error
        answer = response.FromString(said)
        if not self._serves:
            log.info("the dispatcher %s answers", address)
        self._answered = self._serves = True
        _accepted.add(self._membership)
        if "journal" in answer.DESCRIPTOR.fields_by_name:
            self.learn(answer.journal)  # type: ignore[attr-defined]
        return answer

    def _note(self) -> str:
        other = (
            " (something that listens there speaks no gRPC: give the dispatcher's --port, not its "
            "--http-port)"
        )
        return other * self._meets_others + "".join(map(proxy_note, self.addresses))

    def _why_no_tls(self, error: grpc.RpcError, address: str, sure: bool = False) -> str:
        """What is wrong with TLS at the address, as was found out a moment ago, or is now; "" if
        nothing is, or if it is to be `sure` and may pass."""
        if not _MAYBE_TLS.search(error.details() or ""):
            return ""
        if time.monotonic() < self._probe_at:
            return "" if sure else self._fault
        what, times = probe(address, self._credentials)
        self._probe_at = time.monotonic() + PROBE_S
        self._found = self._found + 1 if what == self._fault else 1
        self._fault = what
        return "" if sure and not 0 < times <= self._found else what

    @property
    def known(self) -> pb.JournalPosition:
        """The journal position of the newest event in any answer."""
        return self._known

    def learn(self, position: pb.JournalPosition) -> None:
        """Take over a journal position from another client, to recognise a wrong journal."""
        with self._lock:
            known = self._known
            if position.journal_id != known.journal_id or position.sequence > known.sequence:
                self._known = position

    def _switch_dispatcher(self, turn: int, leader: str, why: str) -> None:
        """Switch to the leader, if it is known, else to the next address."""
        with self._lock:
            if turn != self._turn or self._closed.is_set():
                return  # another call has already switched
            known = self.addresses
            here = known.index(self._address) if self._address in known else -1
            address = leader or known[(here + 1) % len(known)]
            renewed = (
                self._credentials is not None and self._credentials.loaded() is not self._files
            )
            if address != self._address or renewed:
                if self._serves:  # else none does, and each would be logged in turn
                    log.info(
                        "asks the dispatcher %s instead of %s: %s", address, self._address, why
                    )
                self._serves = False
                self._turn += 1
                self._address = address
                self._channel.close()
                self._channel = self._connect()

    def get_dataset(
        self,
        dataset_id: str,
        *,
        with_graph: bool,
        job_name: str | None = None,
        patience_s: float | None = None,
    ) -> pb.GetDatasetResponse:
        """A registered dataset, and the progress of the job `job_name`. Raises NotFound."""
        if not isinstance(dataset_id, str):
            raise InvalidArgument(
                f"dataset_id={dataset_id!r:.100} must be a string, as `register_dataset` returns it"
            )
        request = pb.GetDatasetRequest(
            dataset_id=dataset_id,
            with_graph=with_graph,
            job_name=job_name or "",
            piece_bytes=PIECE_BYTES,
        )

        def ask() -> pb.GetDatasetResponse:
            return self.call(request, pb.GetDatasetResponse, timeout_s=60, patience_s=patience_s)

        dataset = ask()
        pieces, have = [dataset.graph], len(dataset.graph)
        while have < dataset.graph_bytes:
            request.offset, request.digest = have, dataset.digest
            piece = ask()
            if piece.HasField("definition"):  # the graph was replaced meanwhile
                dataset, pieces, have = piece, [], 0
            elif not piece.graph:
                raise ProtocolError(
                    f"the dispatcher gives {have} of {dataset.graph_bytes} bytes of the graph of "
                    f"dataset {dataset_id}, and no more"
                )
            pieces.append(piece.graph)
            have += len(piece.graph)
        dataset.graph = b"".join(pieces)
        return dataset

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End all calls. Idempotent."""
        self._closed.set()
        with self._lock:
            self._channel.close()


_NO_GRPC = "Failed parsing HTTP/2"
"""gRPC's words for an answer in another protocol."""


class _ChannelReplaced(Exception):
    """Another thread has switched to another address meanwhile."""


def _leader(error: grpc.RpcError) -> str:
    metadata: Any = error.trailing_metadata() or ()  # pairs
    return next((value for key, value in metadata if key == LEADER_KEY), "")


def _code(error: BaseException | None) -> grpc.StatusCode | None:
    """The status of a call; None if the error is of another kind."""
    return error.code() if isinstance(error, grpc.RpcError) else None


def _is_temporary(error: BaseException) -> bool:
    return isinstance(error, _ChannelReplaced) or _code(error) in TEMPORARY


_accepted: set[tuple[tuple[str, ...], Credentials | None]] = set()
"""The services that have answered this process, and with which credentials' files."""
