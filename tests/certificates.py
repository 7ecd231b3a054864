"""Throwaway authorities, certificates and tokens for tests."""

from __future__ import annotations

import datetime
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import trustme

from forebay.service import Credentials, use_credentials
from forebay.service.connections.credentials import VARIABLES

DAY = datetime.timedelta(days=1)


class Authority:
    """A certificate authority with its files in a directory."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        directory.mkdir(exist_ok=True)
        self._ca = trustme.CA()
        self.file = directory / "ca.pem"
        self._ca.cert_pem.write_to_path(str(self.file))

    def issue(self, name: str, *hosts: str, begins: float = -1, ends: float = 1) -> Credentials:
        """Credentials with the certificate of `name`, for these hosts, by default localhost and
        127.0.0.1; valid from and to so many days from now. Writes over the files
        of an earlier one of that name."""
        now = datetime.datetime.now(datetime.UTC)
        issued = self._ca.issue_cert(
            *(hosts or ("localhost", "127.0.0.1")),
            common_name=name,
            not_before=now + begins * DAY,
            not_after=now + ends * DAY,
        )
        cert, key = self._directory / f"{name}.pem", self._directory / f"{name}.key"
        cert_new, key_new = cert.with_suffix(".pem.new"), key.with_suffix(".key.new")
        cert_new.write_bytes(b"".join(part.bytes() for part in issued.cert_chain_pems))
        issued.private_key_pem.write_to_path(str(key_new))
        cert_new.rename(cert)
        key_new.rename(key)
        return Credentials(tls_ca=str(self.file), tls_cert=str(cert), tls_key=str(key))


def token(path: Path, text: str, mode: int = 0o600) -> str:
    """The path of a file with this text."""
    path.write_text(text)
    os.chmod(path, mode)
    return str(path)


@contextmanager
def using(credentials: Credentials | None) -> Iterator[None]:
    """This process has the credentials for a while."""
    before = {variable: os.environ.get(variable) for variable in VARIABLES.values()}
    use_credentials(credentials)
    try:
        yield
    finally:
        for variable, value in before.items():
            os.environ.pop(variable, None)
            if value is not None:
                os.environ[variable] = value


def files(credentials: Credentials) -> dict[str, Any]:
    """Credentials as options of a server."""
    return {**credentials.files()}


def holder(server: Credentials, path: str) -> Credentials:
    return Credentials(tls_ca=server.tls_ca, token_file=path)
