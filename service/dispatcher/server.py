"""The dispatcher's process: it stands by and leads; it exits when it cannot write its journal.

stand by ─► lead ─► displaced by another: stand by …
              └───► the journal cannot be written: exit. Recovery is by replay
"""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Callable
from typing import TYPE_CHECKING

from ...storage import open_storage
from ..connections.access import AccessRules
from ..connections.admission import Admission
from ..connections.credentials import credentials_of_server, serves_tensorflow
from ..connections.grpc_server import advertised_address
from ..errors import InvalidArgument
from ..http.opening import open_http
from ..pipelines.definitions import check_op_libraries
from .candidate import Candidate, place_of
from .dashboard_source import DashboardSource
from .dispatcher_servicer import DispatcherServicer
from .journal_reader import JournalProcess
from .listener import ServedPort, StandbyHandler
from .metrics import DispatcherMetrics
from .options import DispatcherOptions
from .permissions import METHODS, Permissions
from .tf_data_dispatcher_servicer import TfDataDispatcherServicer

if TYPE_CHECKING:
    from ..http.server import HttpServer

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
    serves_tf = serves_tensorflow(options, credentials)
    admission = None if credentials is None else Admission(credentials, METHODS)
    permissions = _permissions(options, admission)
    listener = ServedPort(options.host, options.port, standby=options.standby, admission=admission)
    bound = listener.address
    address = advertised_address(options.address, bound)
    storage = open_storage(options.storage, allow_volatile=options.allow_volatile)
    candidate = Candidate(storage, options, address, place_of(bound))
    refusal = StandbyHandler(candidate.leader, candidate.stands_by)
    may_see = None if permissions is None else permissions.check_metrics
    metrics = http = sampling = None
    try:
        if options.http_port >= 0:
            denials = None if admission is None else admission.denials
            metrics = DispatcherMetrics(storage, candidate, refusal, denials)
            source = DashboardSource(metrics, candidate)

            def extend(server: HttpServer) -> None:
                from ..dashboard.pages import Pages  # needs the extra

                volatile = options.allow_volatile
                past = JournalProcess(storage, options.storage, allow_volatile=volatile)
                Pages(server, source, past)

            http = await open_http(metrics, options, credentials, may_see, extend)
            if http is not None:
                candidate.dashboard = http.url(address)
            sampling = asyncio.create_task(source.samples.keep(), name="forebay-samples")
            sampling.add_done_callback(_samples_ended)
    except BaseException:
        await listener.close(0)
        storage.close()
        raise
    interrupted = asyncio.Event()

    def interrupt(number: signal.Signals) -> None:
        log.info("stops, as it was told to by %s", number.name)
        interrupted.set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, interrupt, number)
    stop = asyncio.create_task(interrupted.wait(), name="forebay-interrupt")
    lead = asyncio.create_task(
        _lead(
            listener,
            candidate,
            lambda: ready(address),
            admission,
            permissions,
            serves_tf=serves_tf,
            refusal=refusal,
            metrics=metrics,
        ),
        name="forebay-dispatcher",
    )
    try:
        await asyncio.wait((lead, stop), return_when=asyncio.FIRST_COMPLETED)
        if lead.done():
            lead.result()  # raises its error
        return interrupted.is_set()
    finally:
        tasks = [task for task in (stop, lead, sampling) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await listener.close(0)
        if http is not None:
            await http.close()
        storage.close()


def _samples_ended(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (bug := task.exception()) is not None:
        log.error("the dashboard has no new samples from here on", exc_info=bug)


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


def _permissions(options: DispatcherOptions, admission: Admission | None) -> Permissions | None:
    if not options.access_file:
        return None
    if admission is None:
        raise InvalidArgument(
            f"--access-file {options.access_file} without TLS: nobody proves who he is; give "
            "--tls-cert, --tls-key and --tls-ca, too"
        )
    return Permissions(AccessRules(options.access_file), admission)


async def _lead(
    listener: ServedPort,
    candidate: Candidate,
    ready: Callable[[], None],
    admission: Admission | None = None,
    permissions: Permissions | None = None,
    *,
    serves_tf: bool = True,
    refusal: StandbyHandler | None = None,
    metrics: DispatcherMetrics | None = None,
) -> None:
    """Stand by and lead in turn, until the journal fails; without `standby`, lead once."""
    refusal = refusal or StandbyHandler(candidate.leader, candidate.stands_by)
    if candidate.standby:
        await listener.open([refusal], standby=True)
        ready()
    while True:
        dispatcher = await candidate.take_over()
        tensorflow = TfDataDispatcherServicer(dispatcher)
        try:
            own = DispatcherServicer(dispatcher, admission, permissions).handlers()
            services = [own, tensorflow.handlers() if serves_tf else tensorflow.refusing()]
            await listener.open(services, standby=False)
            if metrics is not None:
                metrics.lead(dispatcher)
            if not candidate.standby:
                ready()
            await dispatcher.stopped.wait()
        finally:
            if metrics is not None:
                metrics.stop_leading()
            await dispatcher.finish()
            await listener.close(STOP_GRACE_S)
            await tensorflow.close()
            await dispatcher.close()
            candidate.remember(dispatcher.position())
        if not (candidate.standby and dispatcher.displaced):
            return
        await listener.open([refusal], standby=True)
