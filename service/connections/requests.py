"""How a request gets to a dispatcher: in pieces, so that gRPC refuses a larger message before it
receives any of it, and the server decides before each piece whether it wants it.

    the caller's role → its turn → piece after piece, within the bounds of bytes → parsed

A request below PIECE_BYTES is one message, as for any unary method of gRPC. A longer one is a
stream of messages, each but the last of just PIECE_BYTES.
"""

from __future__ import annotations

import asyncio
import contextlib
import weakref
from collections import Counter
from collections.abc import AsyncIterator, Hashable
from typing import Any

import grpc

from ..errors import InvalidArgument, Unavailable
from ..memory_limit import memory_limit

PIECE_BYTES = 1 << 20

MAX_REQUEST_BYTES = 4 << 20
"""Of a request that carries no dataset."""

MAX_DATASET_BYTES = (1 << 30) + (64 << 20)
"""Of a request that carries one: a dataset's definition, of at most 1 GiB (`MAX_BYTES` in
service/pipelines/definitions.py), and what is around it."""

MAX_UNDER_WAY = MAX_DATASET_BYTES + (512 << 20)
"""Bytes of the requests that a server has received and not answered: a dataset, and others."""

DATASET_SHARE, UNDER_WAY_SHARE = 8, 6
"""Neither is more than this part of the memory that the server may use: to register a dataset takes
four to seven times its bytes."""

SMALL_BYTES = 64 << 10
"""A request of no more is received, however many bytes are under way."""

TURNS = 64
"""Requests of one connection that are received at a time; more of them wait."""

RECEIVE_S = 60.0
"""A request must arrive in this time."""


def ask(
    channel: Any, method: str, request: bytes, *, timeout: float, metadata: object = ()
) -> bytes:
    """The serialized answer to a serialized request. Raises grpc.RpcError."""
    sent: Any = request
    call = channel.unary_unary(method, None, None)
    if len(request) >= PIECE_BYTES:
        ends = range(0, len(request) + 1, PIECE_BYTES)  # an empty piece follows a last whole one
        sent = (request[at : at + PIECE_BYTES] for at in ends)
        call = channel.stream_unary(method, None, None)
    answer: bytes = call(sent, timeout=timeout, metadata=metadata)
    return answer


class RequestReceiver:
    """The requests that are under way at one server. For its event loop."""

    def __init__(self, memory_bytes: int | None = None) -> None:
        """Of what may use so much memory, by default what this process may."""
        memory_bytes = memory_bytes or memory_limit()
        self.most_of_one = min(MAX_DATASET_BYTES, memory_bytes // DATASET_SHARE)
        """Bytes of a request with a dataset, and of a peer's requests together."""
        self._most = min(MAX_UNDER_WAY, memory_bytes // UNDER_WAY_SHARE)
        self._bytes: Counter[Hashable] = Counter()  # by peer
        self._turns = weakref.WeakValueDictionary[Hashable, asyncio.Semaphore]()
        self._parsing = weakref.WeakValueDictionary[Hashable, asyncio.Lock]()

    def parsing(self, peer: Hashable) -> asyncio.Lock:
        """Hold it to parse a request of the peer: others wait for at most one of each peer's."""
        return self._parsing.setdefault(peer, asyncio.Lock())

    @contextlib.asynccontextmanager
    async def request(
        self, call: Any, peer: Hashable, most: int
    ) -> AsyncIterator[list[bytes | bytearray]]:
        """The request of a call (grpc.aio.ServicerContext), which counts until the context ends.
        Take it out of the list, so that its memory is free when it is parsed.

        Raises InvalidArgument if it has more than `most` bytes; Unavailable if it does not arrive,
        or others leave it no room.
        """
        taken = 0
        try:
            turn = self._turns.setdefault(call.peer(), asyncio.Semaphore(TURNS))
            whole: list[bytes | bytearray] = []
            async with turn, _in_time():
                while True:
                    piece = await call.read()
                    if piece is grpc.aio.EOF:  # type: ignore[attr-defined] # not in its stubs
                        if whole and len(whole[0]) > PIECE_BYTES:  # or of an earlier version
                            raise Unavailable("the request broke off")
                        break
                    taken += len(piece)
                    self._bytes[peer] += len(piece)
                    self._check(peer, taken, most)
                    if not whole:
                        whole.append(piece)
                    elif isinstance(whole[0], bytearray):
                        whole[0] += piece  # of which no copy is kept
                    else:
                        whole[0] = bytearray(whole[0]) + piece
                    if len(piece) != PIECE_BYTES:
                        break
            yield whole or [b""]
        finally:
            self._bytes[peer] -= taken
            if not self._bytes[peer]:
                del self._bytes[peer]

    def _check(self, peer: Hashable, size: int, most: int) -> None:
        if size > most:
            raise InvalidArgument(
                f"the request has more than {most} bytes, which is too large for this method or "
                "for this server's memory"
            )
        # What only tells of life is never refused.
        full = self._bytes[peer] > self.most_of_one or self._bytes.total() > self._most
        if full and size > SMALL_BYTES:
            raise Unavailable(
                f"{self._bytes[peer]} bytes of the requests of {peer}, and {self._bytes.total()} "
                "of all, are being received: ask again when they are answered"
            )


@contextlib.asynccontextmanager
async def _in_time() -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(RECEIVE_S):
            yield
    except TimeoutError:
        raise Unavailable(f"the request did not arrive within {RECEIVE_S:.0f} s") from None
