"""The dispatcher's process: it stands by and leads; it exits when it cannot write its journal.

stand by ─► lead ─► displaced by another: stand by …
              └───► the journal cannot be written: exit. Recovery is by replay
"""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Callable

from ...storage import open_storage
from ..connections.credentials import credentials_of_server
from ..connections.grpc_server import advertised_address
from ..errors import InvalidArgument
from ..http.opening import open_http
from ..pipelines.definitions import check_op_libraries
from .candidate import Candidate, place_of
from .forebay_face import ForebayFace
from .listener import ServedPort, StandbyHandler
from .observed import ObservedDispatcher
from .options import DispatcherOptions
from .tensorflow_face import TensorFlowFace

log = logging.getLogger(__name__)

STOP_GRACE_S = 2.0
"""The time to send answers to journaled decisions: cutting them off would lose splits."""


async def serve(options: DispatcherOptions, ready: Callable[[str], None]) -> bool:
    """Run a dispatcher until SIGTERM or SIGINT, or until its journal fails.

    Calls `ready` with the address once it answers calls; a standby's answers name the leader.
    Returns True if a signal stopped it, False if it failed or was displaced. Raises StorageError
    when it cannot take over the journal, InvalidArgument, and AddressInUse.
    """
    _check(options)
    credentials = credentials_of_server(options)
    listener = ServedPort(
        options.host, options.port, standby=options.standby, credentials=credentials
    )
    bound = listener.address
    address = advertised_address(options.address, bound)
    storage = open_storage(options.storage, allow_volatile=options.allow_volatile)
    candidate = Candidate(storage, options, address, place_of(bound))
    refusal = StandbyHandler(candidate.leader)
    face = ObservedDispatcher(storage, candidate, refusal) if options.http_port >= 0 else None
    try:
        http = None if face is None else await open_http(face, options, credentials)
    except BaseException:
        await listener.close(0)
        storage.close()
        raise
    interrupted = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, interrupted.set)
    stop = asyncio.create_task(interrupted.wait(), name="forebay-interrupt")
    lead = asyncio.create_task(
        _lead(listener, candidate, refusal, face, lambda: ready(address)), name="forebay-dispatcher"
    )
    try:
        await asyncio.wait((lead, stop), return_when=asyncio.FIRST_COMPLETED)
        if lead.done():
            lead.result()  # raises its error
        return interrupted.is_set()
    finally:
        for task in (stop, lead):
            task.cancel()
        await asyncio.gather(stop, lead, return_exceptions=True)
        await listener.close(0)
        if http is not None:
            await http.close()
        storage.close()


def _check(options: DispatcherOptions) -> None:
    if options.existing and options.storage.startswith("memory:"):
        raise InvalidArgument(
            "--existing asks for a journal that is there already, and memory: never holds one: "
            "give --storage a directory or a Redis"
        )
    if options.standby and options.storage.startswith("memory:"):
        raise InvalidArgument(
            "a standby shares its storage with the leader, and memory: cannot be shared: give "
            "--storage a directory or a Redis"
        )
    check_op_libraries(options.load_op_library)


async def _lead(
    listener: ServedPort,
    candidate: Candidate,
    refusal: StandbyHandler,
    face: ObservedDispatcher | None,
    ready: Callable[[], None],
) -> None:
    """Stand by and lead in turn, until the journal fails; without `standby`, lead once."""
    if candidate.standby:
        await listener.open([refusal], standby=True)
        ready()
    while True:
        dispatcher = await candidate.take_over()
        tensorflow = TensorFlowFace(dispatcher)
        try:
            faces = [ForebayFace(dispatcher).handlers(), tensorflow.handlers()]
            await listener.open(faces, standby=False)
            if face is not None:
                face.lead(dispatcher)
            if not candidate.standby:
                ready()
            await dispatcher.stopped.wait()
        finally:
            if face is not None:
                face.stop_leading()
            await dispatcher.finish()
            await listener.close(STOP_GRACE_S)
            await tensorflow.close()
            await dispatcher.close()
            candidate.remember(dispatcher.position())
        if not (candidate.standby and dispatcher.displaced):
            return
        await listener.open([refusal], standby=True)
