"""Files of certificates, keys and tokens, as a server takes them; and which servers need them."""

from __future__ import annotations

import ctypes
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from forebay.service import Credentials, ForebayError
from forebay.service.connections.credentials import (
    VARIABLES,
    credentials_of_server,
    own_credentials,
)
from forebay.service.dispatcher.options import DispatcherOptions
from forebay.service.errors import InvalidArgument

from ..certificates import Authority, files, holder, token, using

pytestmark = pytest.mark.usefixtures("at_once")


@pytest.mark.parametrize(
    ("text", "mode", "wrong"),
    [
        ("secret", 0o644, "has mode 0644, so other users may use its token: chmod 600"),
        ("secret", 0o640, "has mode 0640"),
        ("", 0o600, "is empty; write a token into it"),
        ("\n", 0o600, "is empty"),
        ("one\ntwo\n", 0o600, "holds more than a token"),
        ("a b", 0o600, "holds more than a token"),
        ("ö", 0o600, "holds more than a token"),
        ("x" * 5000, 0o600, "holds more than a token"),
    ],
)
def test_token_files_that_are_refused(
    server: Credentials, tmp_path: Path, text: str, mode: int, wrong: str
) -> None:
    path = token(tmp_path / "token", text, mode)
    with pytest.raises(InvalidArgument, match=wrong) as raised:
        holder(server, path).loaded()
    assert path in str(raised.value)


def test_credentials_that_cannot_be(server: Credentials, tmp_path: Path) -> None:
    for given, wrong in (
        ({"tls_cert": "a", "tls_key": "b"}, "without tls_ca"),
        ({"tls_ca": "c", "tls_cert": "a"}, "with tls_cert .* and without tls_key"),
        ({"tls_ca": "c"}, "prove nobody's identity"),
        ({"tls_ca": 5}, "must be the path of a file"),
    ):
        with pytest.raises(InvalidArgument, match=wrong):
            Credentials(**given)


def without_rights() -> None:
    """This thread may read only what its user may read, also as root."""
    header = (ctypes.c_uint32 * 2)(0x20080522)  # of capset's third version
    assert not ctypes.CDLL(None).capset(header, (ctypes.c_uint32 * 6)())


def test_files_that_cannot_be_used(
    server: Credentials, trainer: Credentials, tmp_path: Path
) -> None:
    nonsense = tmp_path / "nonsense"
    nonsense.write_text("nonsense")
    secret = Path(server.tls_key).read_text()
    locked, pipe = token(tmp_path / "locked", secret, 0o000), tmp_path / "pipe"
    os.mkfifo(pipe, 0o600)  # which nobody writes to
    ca, cert, key, secrets = (
        rf"--{name.replace('_', '-')} \({variable}\) " for name, variable in VARIABLES.items()
    )
    with ThreadPoolExecutor(1, initializer=without_rights) as pool:
        for changed, wrong in (
            (
                {"tls_key": trainer.tls_key},
                f"the key {key}{trainer.tls_key} is not that of the certificate {cert}",
            ),
            ({"tls_key": str(tmp_path / "none")}, f"{key}.*none cannot be read: No such file"),
            ({"tls_key": str(tmp_path)}, f"{key}{tmp_path} cannot be read: Is a directory; give a"),
            ({"tls_key": locked}, f"{key}{locked} cannot be read: Permission denied; give a file"),
            ({"tls_cert": str(nonsense)}, f"{cert}.* or {key}.* cannot be used: .*in PEM"),
            ({"tls_ca": str(nonsense)}, f"{ca}{nonsense} holds no certificates in PEM"),
            ({"token_file": locked}, f"{secrets}{locked} cannot be read: Permission denied"),
            ({"tls_key": str(pipe)}, f"{key}{pipe} is no regular file; give one"),
            ({"token_file": str(pipe)}, f"{secrets}{pipe} is no regular file; give one"),
        ):
            found = pool.submit(Credentials(**files(server) | changed).loaded)
            with pytest.raises(InvalidArgument, match=wrong) as raised:
                found.result()
            assert secret not in str(raised.value)


def test_changed_files_are_in_force_unless_they_cannot_be_used(
    authority: Authority, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    found = authority.issue("changing")
    first = found.loaded()
    assert found.loaded() is first
    key = Path(found.tls_key)
    kept = key.read_bytes()
    key.write_bytes(b"half")
    assert found.loaded() is first
    assert caplog.text.count("the old stay in force") == 1
    assert found.loaded() is first
    assert caplog.text.count("the old stay in force") == 1
    key.write_bytes(kept)
    assert found.loaded().chain == first.chain
    authority.issue("changing")
    assert found.loaded().chain != first.chain


@pytest.mark.parametrize("host", ["0.0.0.0", "192.0.2.1", "::", "example.org", ""])
def test_a_bind_beyond_loopback_needs_tls(host: str, server: Credentials) -> None:
    with pytest.raises(InvalidArgument, match=r"give --tls-cert.* or --insecure"):
        credentials_of_server(DispatcherOptions(host=host))
    assert credentials_of_server(DispatcherOptions(host=host, insecure=True)) is None
    given = DispatcherOptions(host=host, **files(server))
    assert credentials_of_server(given) == server
    with using(server):
        assert credentials_of_server(DispatcherOptions(host=host)) == server
        with pytest.raises(ForebayError, match=r"give --tls-cert .* and --tls-key"):
            missing = DispatcherOptions(host=host, tls_ca=server.tls_ca, token_file="x")
            credentials_of_server(missing)
    with pytest.raises(InvalidArgument, match="--insecure beside"):
        credentials_of_server(DispatcherOptions(host=host, insecure=True, **files(server)))


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1", "127.8.9.1"])
def test_loopback_needs_none(host: str) -> None:
    assert own_credentials() is None
    assert credentials_of_server(DispatcherOptions(host=host)) is None


def test_only_a_list_of_tokens_has_commas(server: Credentials) -> None:
    assert Credentials(tls_ca="/a,b/ca", token_file="/x,/y").files() == {
        "tls_ca": "/a,b/ca",
        "token_file": "/x,/y",
    }
    with pytest.raises(InvalidArgument, match="comma beside which there is no file"):
        Credentials(tls_ca=server.tls_ca, token_file="/x,")
