"""Forebay's errors, and the status by which each crosses a connection.

ForebayError
├── the caller's fault
│   ├── InvalidArgument      asks for what can never be
│   ├── AlreadyExists        asks to make what is there
│   ├── NotFound             names what the dispatcher does not know
│   ├── FailedPrecondition   asks for what cannot be now, and will not be by waiting
│   └── Unimplemented        asks for what this version does not do
├── Unavailable              not now: ask again, the dispatcher is stopping or away
│   └── AnotherJournal       it has not the journal that the caller knows
├── the peer's fault
│   ├── PeerFailed           it answered with an error that is none of the above
│   └── ProtocolError        it sent what the protocol does not allow
├── PipelineError            the dataset's own computation raised, with TensorFlow's code
├── AddressInUse             the operator's fault: something else listens there
├── StorageError             storage/errors.py draws these
└── …                        WorkerRefused, OutputCancelled: within transport/, whose callers know

A message says what was wrong, with which value, and what to do. An exception that is no
ForebayError is a bug, and is left to crash whatever it concerns.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

from ..storage.errors import Corrupt, ForebayError, Missing, StorageError

if TYPE_CHECKING:
    import grpc

__all__ = [
    "AddressInUse",
    "AlreadyExists",
    "AnotherJournal",
    "FailedPrecondition",
    "ForebayError",
    "InvalidArgument",
    "NotFound",
    "PeerFailed",
    "PipelineError",
    "ProtocolError",
    "Unavailable",
    "Unimplemented",
    "error_of_status",
    "status_of",
]


class InvalidArgument(ForebayError, ValueError):
    """The request makes no sense, whatever the state. A ValueError, as in tf.data service."""


class NotFound(ForebayError):
    """The request names a dataset, job, iteration, consumer or task that is not known."""


class AlreadyExists(ForebayError):
    """What the request asks to make is there already."""


class FailedPrecondition(ForebayError, RuntimeError):
    """The request does not fit the state of what it names. A RuntimeError, as in TensorFlow."""


class Unimplemented(ForebayError):
    """This version cannot do what was asked; the message says what to use instead."""


class Unavailable(ForebayError):
    """The request may succeed later, here or at another dispatcher."""


class AnotherJournal(Unavailable):
    """The dispatcher's storage holds another journal than the caller knows: emptied, or replaced.

    Until the right storage is back, or the caller is started anew.
    """


class PeerFailed(ForebayError):
    """The other side answered with an error that we cannot mend."""


class ProtocolError(ForebayError):
    """The other side broke the protocol; its connection is closed."""


class PipelineError(ForebayError):
    """A dataset's pipeline raised. `code` is the canonical status name: INVALID_ARGUMENT …"""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code
        self.message = message

    def __reduce__(self) -> tuple[type[Self], tuple[str, str]]:
        return type(self), (self.code, self.message)


class AddressInUse(ForebayError):
    """The address to listen on is taken, or is none of this host's."""


# Names of gRPC status codes, so that the core need not import gRPC. A failed storage is
# UNAVAILABLE because a dispatcher that recovers from it can answer: TensorFlow's clients and
# workers retry that, and give up at almost anything else.
_STATUS: dict[type[ForebayError], str] = {
    InvalidArgument: "INVALID_ARGUMENT",
    NotFound: "NOT_FOUND",
    AlreadyExists: "ALREADY_EXISTS",
    FailedPrecondition: "FAILED_PRECONDITION",
    Unimplemented: "UNIMPLEMENTED",
    AnotherJournal: "ABORTED",
    Unavailable: "UNAVAILABLE",
    Corrupt: "DATA_LOSS",
    Missing: "DATA_LOSS",
    StorageError: "UNAVAILABLE",
    ForebayError: "INTERNAL",
}
_OF_STATUS = {
    _STATUS[e]: e
    for e in (
        *(InvalidArgument, NotFound, AlreadyExists),
        *(FailedPrecondition, Unimplemented, AnotherJournal),
    )
} | dict.fromkeys(("UNAVAILABLE", "CANCELLED", "DEADLINE_EXCEEDED"), Unavailable)


def status_of(error: ForebayError) -> str:
    """The name of the gRPC status code that says `error`."""
    if isinstance(error, PipelineError):
        return error.code
    return next(_STATUS[kind] for kind in type(error).__mro__ if kind in _STATUS)


def error_of_status(code: grpc.StatusCode, details: str) -> ForebayError:
    """The error that a peer's status says: `status_of`, the other way round."""
    kind = _OF_STATUS.get(code.name)
    return kind(details) if kind is not None else PeerFailed(f"{code.name}: {details}")
