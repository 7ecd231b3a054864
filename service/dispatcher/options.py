"""The dispatcher's options."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ..address_forms import is_address, is_place
from ..errors import InvalidArgument
from ..options import ServerOptions, option

DEPLOYMENT_MODES = ("COLOCATED", "REMOTE", "HYBRID")
MOST_SAVES = 3
"""The default number of saves that a worker writes at a time; tf.data service's own."""

HOUR_MS = 3_600_000

LEAST_SILENCE_MS = 50
"""The least timeout: members send three heartbeats in one, and cannot in a shorter one."""

_FORMS = "give each worker HOST:PORT, HOST or HOST:%port%"


def _workers(given: str | Iterable[str]) -> tuple[str, ...]:
    if not isinstance(given, Iterable):
        raise InvalidArgument(f"the list of workers is {given!r}; give a list of addresses")
    addresses = given.split(",") if isinstance(given, str) else list(given)
    if addresses == [""]:
        return ()
    listed: list[str] = []
    for place, address in enumerate(addresses):
        if not isinstance(address, str) or not address.strip():
            raise InvalidArgument(
                f"the list of workers has no address at place {place}: {given!r}; {_FORMS}"
            )
        address = address.strip()
        if not is_place(address):
            raise InvalidArgument(
                # In the words of tf.data service's error, which its tests look for.
                "The worker's address is not configured as one that a worker can have: "
                f"{address!r}, at place {place} of the list of workers; {_FORMS}"
            )
        if is_address(address) and address in listed:  # nobody would read its second shard
            raise InvalidArgument(
                f"the list of workers has {address!r} twice, and one worker is there: {given!r}; "
                "give each worker a port of its own"
            )
        listed.append(address)
    return tuple(listed)


def _deployment_mode(mode: str | int) -> str:
    """The mode's short name, from that name, TensorFlow's enumerator, or its number."""
    names = ("", *DEPLOYMENT_MODES)
    if isinstance(mode, int) and not isinstance(mode, bool) and 0 <= mode < len(names):
        return names[mode]
    name = str(mode).upper().removeprefix("DEPLOYMENT_MODE_").removeprefix("UNSPECIFIED")
    if name not in names:
        raise InvalidArgument(
            f"deployment_mode={mode!r} must be one of {list(DEPLOYMENT_MODES)}, or left out"
        )
    return name


@dataclass(frozen=True, kw_only=True)
class DispatcherOptions(ServerOptions):
    """Times in milliseconds; a timeout of −1 never expires."""

    storage: str = option(
        "memory:",
        "Where the journal lives: file:///dir, a plain path, redis://host:port/db, "
        "postgresql://host:port/database, or memory: (lost at exit).",
        convert=str,
    )
    existing: bool = option(
        False, "Refuse to begin a new journal: for every start but a storage's first."
    )
    standby: bool = option(
        False, "Wait until the leader on this storage ends or falls silent, then lead."
    )
    leader_lease_ms: int = option(
        2_000,
        "How long a leader must be silent before a standby takes over, unless its end is seen. "
        "On local files a standby waits until it has ended.",
        least=100,
        most=HOUR_MS,
    )
    access_file: str = option(
        "",
        "Who may do what: a TOML file of grants, for certificates' names and tokens' files. "
        "Without it, whoever is let in may do everything.",
    )
    allow_volatile: bool = option(
        False, "Use a Redis or PostgreSQL whose settings can lose acknowledged events."
    )
    workers: tuple[str, ...] = option(
        (),
        "The fixed list of all workers, among which static sharding divides a dataset: "
        "HOST:PORT, HOST or HOST:%port% each, comma-separated. Other workers are refused.",
        convert=_workers,
    )
    deployment_mode: str = option(
        "",
        "COLOCATED, REMOTE or HYBRID, for clients. With COLOCATED, a client reads static "
        "shards from workers in its own process only.",
        convert=_deployment_mode,
    )
    job_gc_check_interval_ms: int = option(
        60_000, "How often it looks for iterations that nobody reads.", least=1
    )
    job_gc_timeout_ms: int = option(
        300_000,
        "Collect an iteration that nobody read for so long; 0: at once, -1: never.",
        least=0,
        off=-1,
    )
    dynamic_gc_timeout_ms: int = option(
        300_000,
        "The same with DYNAMIC sharding. A consumer that joins such an iteration later reads "
        "the splits that are left.",
        least=0,
        off=-1,
    )
    max_idle_iterations: int = option(
        16,
        "How many unread iterations of a job to keep, such as epochs that were left early; it "
        "drops the oldest. 0: none, -1: all.",
        least=0,
        off=-1,
    )
    finished_retention_ms: int = option(
        300_000,
        "How long to keep a finished epoch's details after its last read. Then only its end is "
        "kept, which later readers get. 0: not at all, -1: for ever.",
        least=0,
        off=-1,
    )
    unused_retention_hours: float = option(
        -1.0,
        "Remove datasets, with their jobs, that nobody registered or read for so long, and "
        "jobs that nobody read for so long; -1: never.",
        least=0.0001,
        off=-1,
    )
    worker_timeout_ms: int = option(
        60_000,
        "Give up a worker that is silent for so long, --reconnect-grace-ms at least; -1: never.",
        least=LEAST_SILENCE_MS,
        off=-1,
    )
    reconnect_grace_ms: int = option(
        5_000,
        "How long a worker may take to reconnect after its connection broke; three times as "
        "long after a change of leaders.",
        least=100,
        most=HOUR_MS,
    )
    client_timeout_ms: int = option(
        120_000,
        "Give up a consumer that is silent for so long; -1: never.",
        least=LEAST_SILENCE_MS,
        off=-1,
    )
    load_window_ms: int = option(
        20_000,
        "Over how long loads are measured, to say how many workers are wanted; that fewer are "
        "has to last for six times as long. At least twice the members' heartbeat interval.",
        least=200,
        most=300_000,
    )
    worker_max_concurrent_snapshots: int = option(
        0, "How many saves a worker writes at a time, at most; 0: three.", least=0
    )
    snapshot_events: int = option(
        50_000, "Events between snapshots of the state, at least.", least=1
    )
    retention_hours: float = option(
        168.0,
        "How long history is kept, for audit and rewind; 0: no longer than a restart needs it.",
        least=0.0,
    )

    @property
    def most_saves_a_worker(self) -> int:
        """The most saves that a worker writes at a time."""
        return self.worker_max_concurrent_snapshots or MOST_SAVES
