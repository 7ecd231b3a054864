"""A worker's options."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import MISSING, dataclass
from functools import partial
from typing import cast

from ..address_forms import MAX_PORT, checked_address, parse_service
from ..connections.protocols import SERVED, transfer_protocol
from ..errors import FailedPrecondition, InvalidArgument
from ..options import ServerOptions, option, paths


def _some_dispatcher(address: str) -> str:
    if not address:
        raise InvalidArgument("the dispatcher's address is empty; give its HOST:PORT")
    parse_service(address)
    return address


def _data_address(address: str) -> str:
    return checked_address(address.replace("%dts_port%", "%port%"))  # tf.data service's name


def _roots(given: str | Iterable[str]) -> tuple[str, ...]:
    listed = given.split(",") if isinstance(given, str) else [*given]
    return tuple(x if "://" in x else path for x in listed if x for path in paths([x]))


def _tags(given: str | Iterable[str]) -> tuple[str, ...]:
    tags = tuple((given.split(",") if given else ()) if isinstance(given, str) else given)
    if not all(isinstance(tag, str) and tag for tag in tags):
        raise FailedPrecondition(
            f"Worker tags cannot be empty. Got tags {list(tags)}: leave out what is empty"
        )
    try:
        ",".join(tags).encode()
    except UnicodeEncodeError:  # bytes of the environment
        raise FailedPrecondition(f"the tags {list(tags)} are not UTF-8; write them in it") from None
    return tags


@dataclass(frozen=True, kw_only=True)
class WorkerOptions(ServerOptions):
    """Times in milliseconds."""

    dispatcher: str = option(
        cast("str", MISSING),
        "HOST:PORT of the dispatcher; several, comma-separated.",
        convert=_some_dispatcher,
    )
    data_port: int = option(
        0, "Port of the data connections; 0: any free one.", least=0, most=MAX_PORT
    )
    data_address: str = option(
        "",
        "HOST:PORT that clients connect to for data; %port% stands for the data port. By "
        "default, the host of --address.",
        convert=_data_address,
    )
    data_transfer_protocol: str | None = option(
        None,
        "The only transport to offer: unix, tcp or grpc. By default, all of them.",
        convert=partial(transfer_protocol, known=SERVED),
    )
    tags: tuple[str, ...] = option(
        (),
        "Tags of the worker, comma-separated. One that is tagged COLOCATED is read by clients "
        "in its own process, and by those that ask for ANY.",
        convert=_tags,
    )
    heartbeat_interval_ms: int = option(
        5_000, "The longest that a heartbeat waits for a change.", least=1, most=3_600_000
    )
    dispatcher_timeout_ms: int = option(
        60_000, "How long to look for the dispatcher at the start.", least=1
    )
    drain_timeout_ms: int = option(
        20_000,
        "How long a worker that was told to stop waits for trainers to receive its elements.",
        least=0,
    )  # the rest of `stop` takes up to 10 s: within Kubernetes' 30 s
    save_chunk_bytes: int = option(
        1 << 30, "distributed_save begins a new file when the last one has this size.", least=1
    )
    cross_trainer_cache_size_bytes: int = option(
        1 << 30,
        "Size of each task's cross-trainer cache. A trainer that falls further behind the "
        "fastest one misses elements. The cache evicts whole blocks, of up to 8 MB or one "
        "element.",
        least=1,
    )
    memory_budget: int = option(
        0,
        "Bytes of memory for all elements that its tasks hold, caches among them; 0: an eighth "
        "of the machine's memory, or of its cgroup's limit. When it is used up, the worker "
        "first evicts elements of epochs that nobody reads.",
        least=0,
        most=1 << 50,
    )
    allow_python: bool = option(
        False,
        "Run Python datasets: code of anybody who can register datasets. By default, a worker "
        "does so only if it and all its dispatchers listen on loopback.",
    )
    data_root: tuple[str, ...] = option(
        (),
        "Directories or URLs, comma-separated: graphs and files of records are read below them "
        "only. By default, wherever the worker's user may read. Python functions and the role "
        "`graphs` are not bound by it.",
        convert=_roots,
    )
    cache_directory: str = option(
        "",
        "Directory for what is fetched of files in object stores, so that a second epoch "
        "fetches nothing. Workers of a host may share it. By default nothing is kept.",
    )
    cache_bytes: int = option(
        64 << 30,
        "What that directory may have. Above it, what was used longest ago is removed.",
        least=1,
    )
    payload_checksums: bool = option(
        False,
        "Send a CRC-32 of each block's elements, which trainers compare. A block that arrives "
        "with other bytes is sent again.",
    )
    processes: int = option(
        0,
        "Processes for each Python dataset, and three times as many where it reads files in an "
        "object store; 0: one for each core.",
        least=0,
        most=1000,
    )
    shutdown_quiet_period_ms: int = option(
        0, "How long a worker that was told to stop waits for calls in progress.", least=0
    )
    expected_s: float = 2.0  # a task without consumers for so long counts as idle
    kept_pipelines: int = 4  # of idle tasks, those left last
    output_bytes: int = 8 << 20  # finished blocks of a task before it waits: one full block
    save_chunk_s: float = 10.0  # time limit of a stream's first chunk; doubles with each later one
