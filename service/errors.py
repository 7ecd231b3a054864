"""Forebay's errors, and the gRPC status that carries each of them over a connection.

ForebayError
├── the caller's fault
│   ├── InvalidArgument      the request is invalid in any state
│   ├── AlreadyExists        the request creates something that exists
│   ├── NotFound             the request names something that the dispatcher does not know
│   ├── FailedPrecondition   the state does not allow the request; a retry does not help
│   ├── Unauthenticated      the peer sent no valid certificate or token
│   ├── PermissionDenied     the peer may not do that
│   ├── ResourceExhausted    the peer has as much as it may have
│   └── Unimplemented        this version does not support the request
├── Unavailable              retry: the dispatcher is stopping or away
│   └── AnotherJournal       the dispatcher does not have the journal that the caller knows
├── the peer's fault
│   ├── PeerFailed           the peer answered with an error that is none of the above
│   └── ProtocolError        the peer broke the protocol
├── PipelineError            the dataset's own computation raised, with TensorFlow's code
├── AddressInUse             the operator's fault: something else listens there
├── StorageError             storage/errors.py shows its subclasses
└── …                        WorkerRefused, OutputCancelled: internal to transport/

A message says what was wrong, with which value, and what to do. Any other exception is a bug. It is
not caught, and crashes whatever it concerns.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

from ..storage.errors import Corrupt, Missing, StorageError
from ..storage.errors import ForebayError as ForebayError

if TYPE_CHECKING:
    import grpc


class InvalidArgument(ForebayError, ValueError):
    """The request is invalid in any state. A ValueError, as in tf.data service."""


class NotFound(ForebayError):
    """The request names an unknown dataset, job, iteration, consumer or task."""


class AlreadyExists(ForebayError):
    """The request creates something that exists already."""


class FailedPrecondition(ForebayError, RuntimeError):
    """The request does not fit the state of what it names. A RuntimeError, as in TensorFlow."""


class Unauthenticated(ForebayError):
    """The peer lacks credentials, or does not accept ours. A retry does not help until the files
    change."""


class PermissionDenied(ForebayError):
    """The peer is let in, and the dispatcher's access rules do not allow it this call."""


class ResourceExhausted(ForebayError):
    """The peer has as much as the dispatcher's access rules allow it."""


class Unimplemented(ForebayError):
    """This version does not support the request; the message says what to use instead."""


class Unavailable(ForebayError):
    """The request may succeed later, here or at another dispatcher."""


class AnotherJournal(Unavailable):
    """The dispatcher's storage holds another journal than the caller knows: emptied, or replaced.

    This lasts until the right storage is back, or the caller is restarted.
    """


class PeerFailed(ForebayError):
    """The peer answered with an error that has no class here."""


class ProtocolError(ForebayError):
    """The peer broke the protocol; its connection is closed."""


class PipelineError(ForebayError):
    """A dataset's pipeline raised. `code` is the canonical status name: INVALID_ARGUMENT …"""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code
        self.message = message

    def __reduce__(self) -> tuple[type[Self], tuple[str, str]]:
        return type(self), (self.code, self.message)


class AddressInUse(ForebayError):
    """The address to listen on is taken, or does not belong to this host."""


MOST_TOLD = 1_000
"""Characters of an error that a dispatcher is told."""


def cut_error(text: str) -> str:
    """The text in MOST_TOLD characters: its beginning, and its end, where a traceback has the
    error."""
    return text if len(text) <= MOST_TOLD else f"{text[:300]} … {text[303 - MOST_TOLD :]}"


# Names of gRPC status codes, so that the core need not import gRPC. A failed storage is
# UNAVAILABLE, because a dispatcher may recover from it. TensorFlow's clients and workers retry
# UNAVAILABLE, and give up at almost any other code.
_STATUS: dict[type[ForebayError], str] = {
    InvalidArgument: "INVALID_ARGUMENT",
    NotFound: "NOT_FOUND",
    AlreadyExists: "ALREADY_EXISTS",
    FailedPrecondition: "FAILED_PRECONDITION",
    Unauthenticated: "UNAUTHENTICATED",
    PermissionDenied: "PERMISSION_DENIED",
    ResourceExhausted: "RESOURCE_EXHAUSTED",
    Unimplemented: "UNIMPLEMENTED",
    AnotherJournal: "ABORTED",
    Unavailable: "UNAVAILABLE",
    Corrupt: "DATA_LOSS",
    Missing: "DATA_LOSS",
    StorageError: "UNAVAILABLE",
    ForebayError: "INTERNAL",
}
_RETRIED = "UNAVAILABLE", "CANCELLED", "DEADLINE_EXCEEDED"
_OF_STATUS = {
    status: kind for kind, status in _STATUS.items() if status not in ("DATA_LOSS", "INTERNAL")
} | dict.fromkeys(_RETRIED, Unavailable)


def status_of(error: ForebayError) -> str:
    """The name of the gRPC status code for `error`."""
    if isinstance(error, PipelineError):
        return error.code
    return next(_STATUS[kind] for kind in type(error).__mro__ if kind in _STATUS)


def error_of_status(code: grpc.StatusCode, details: str) -> ForebayError:
    """The error for a peer's status: the inverse of `status_of`."""
    kind = _OF_STATUS.get(code.name)
    return kind(details) if kind is not None else PeerFailed(f"{code.name}: {details}")
