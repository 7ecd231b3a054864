"""What a dispatcher can be told."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class DispatcherOptions:
    """Times in milliseconds; a timeout of −1 never runs out."""

    storage: str = "memory:"
    host: str = "127.0.0.1"
    port: int = 0  # 0: any free one
    address: str = ""  # what clients are told; by default, host and port
    standby: bool = False  # wait for the present leader to fall silent, and be one again later
    leader_lease_ms: int = 2_000  # how long a silent leader keeps its place
    existing: bool = False  # refuse to begin a new journal
    allow_volatile: bool = False  # take a storage that may lose acknowledged events
    job_gc_check_interval_ms: int = 60_000
    job_gc_timeout_ms: int = 300_000  # without consumers, before an iteration is collected
    dynamic_gc_timeout_ms: int = 300_000  # the same with DYNAMIC sharding: it can be joined again
    max_idle_iterations: int = 16  # of a job, without consumers, that workers keep; −1: no bound
    worker_timeout_ms: int = 60_000  # without a heartbeat, before a worker is lost; at least …
    client_timeout_ms: int = 120_000  # the same for a consumer
    reconnect_grace_ms: int = 5_000  # … what a worker has whose connection has broken
    snapshot_events: int = 50_000  # between snapshots, at least
    retention_hours: float = 168.0  # of history, for audit and rewind
