"""A throwaway authority of a run with TLS, which issues anew while the run goes on."""

from __future__ import annotations

import os
import time
from collections.abc import Collection
from pathlib import Path

from ..service.connections.credentials import Credentials

RENEW_S = 3.0


class Authority:
    """One certificate for all members, valid for these addresses. Its file is replaced in one step:
    it has the key, too."""

    def __init__(self, directory: Path, addresses: Collection[str]) -> None:
        import trustme  # only for runs with TLS

        self._ca = trustme.CA()
        self._addresses = addresses
        self._file = directory / "member.pem"
        authority = directory / "ca.pem"
        authority.write_bytes(self._ca.cert_pem.bytes())
        file = str(self._file)
        self.credentials = Credentials(tls_ca=str(authority), tls_cert=file, tls_key=file)
        self._renew_at_s = 0.0
        self.poll()

    def poll(self) -> None:
        """Issue a new certificate if it is time. Poll this often."""
        if time.monotonic() < self._renew_at_s:
            return
        issued = self._ca.issue_cert(*self._addresses, common_name="member")
        new = self._file.with_suffix(".new")
        new.touch(mode=0o600)
        new.write_bytes(issued.private_key_and_cert_chain_pem.bytes())
        os.replace(new, self._file)
        self._renew_at_s = time.monotonic() + RENEW_S
