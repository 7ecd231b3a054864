"""The checksums and lengths of bundles that a worker has run, until it has told the dispatcher."""

from __future__ import annotations

import threading
from collections.abc import Iterable

from ..proto import forebay_pb2 as pb

MOST_REPORTED = 10_000
"""Of one job, in one heartbeat."""


class BundleReports:
    """Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._found: dict[int, list[tuple[int, int, int]]] = {}  # by job: see `add`

    def add(self, job_id: int, bundle: int, checksum: int, length: int) -> None:
        with self._lock:
            self._found.setdefault(job_id, []).append((bundle, checksum, length))

    def take(self) -> list[pb.BundleChecksums]:
        """What to report now: at most MOST_REPORTED of each job."""
        with self._lock:
            taken = {job_id: found[:MOST_REPORTED] for job_id, found in self._found.items()}
            rest = {job_id: found[MOST_REPORTED:] for job_id, found in self._found.items()}
            self._found = {job_id: found for job_id, found in rest.items() if found}
        return [
            pb.BundleChecksums(
                job_id=job_id,
                bundles=[bundle for bundle, _, _ in found],
                checksums=[checksum for _, checksum, _ in found],
                lengths=[length for _, _, length in found],
            )
            for job_id, found in taken.items()
        ]

    def put_back(self, taken: Iterable[pb.BundleChecksums]) -> None:
        """The report did not arrive."""
        with self._lock:
            for report in taken:
                of_each = zip(report.bundles, report.checksums, report.lengths, strict=True)
                self._found[report.job_id] = [*of_each, *self._found.get(report.job_id, [])]

    def forget(self) -> None:
        """Another journal: its jobs have the ids of others."""
        with self._lock:
            self._found.clear()
