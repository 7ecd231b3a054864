"""The dispatcher's server: both faces on one port, for as long as the journal can be written."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Callable

import grpc

from ...storage import open_storage
from ..grpc_server import SERVER_OPTIONS, bind
from .dispatcher import Dispatcher
from .forebay_face import ForebayFace
from .options import DispatcherOptions
from .tensorflow_face import TensorFlowFace

log = logging.getLogger(__name__)

STOP_GRACE_S = 2.0
"""For replies whose decisions are already recorded: cutting them off would lose splits."""


async def serve(options: DispatcherOptions, ready: Callable[[str], None]) -> bool:
    """Run a dispatcher until SIGTERM or SIGINT, or until its journal fails.

    Calls `ready` with the address once requests are answered. Returns whether it was stopped,
    rather than failed. Raises StorageError when the journal cannot be taken over, and
    AddressInUse.
    """
    server = grpc.aio.server(options=SERVER_OPTIONS)
    address = bind(server, options.host, options.port)
    storage = open_storage(options.storage)
    dispatcher = await Dispatcher.open(storage, options, address)
    interrupted = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, interrupted.set)
    tensorflow = TensorFlowFace(dispatcher)
    server.add_generic_rpc_handlers((ForebayFace(dispatcher).handlers(), tensorflow.handlers()))
    await server.start()
    ready(address)
    ends = [asyncio.ensure_future(e.wait()) for e in (interrupted, dispatcher.stopped)]
    await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
    for end in ends:
        end.cancel()
    dispatcher.wake_all()
    await server.stop(STOP_GRACE_S)
    await tensorflow.close()
    await dispatcher.close()
    storage.close()
    return interrupted.is_set()
