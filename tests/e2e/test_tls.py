"""Real processes with TLS: reads, a dispatcher's restart, and certificates that are replaced."""

from __future__ import annotations

import contextlib
import os
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import grpc
import pytest
import tensorflow as tf

from forebay import service
from forebay.service.connections import dispatcher_client, tunnel
from forebay.service.connections.credentials import NO_TENSORFLOW, client_context
from forebay.service.connections.grpc_server import connect, metadata_of
from forebay.service.processes import free_port
from forebay.service.proto import tf_service_pb2

from .. import certificates
from ..cluster import WorkerProcess
from ..forks import DISPATCHER, TENSORFLOW, Fork, run
from ..redis_server import running_redis
from ..standbys import wait_until
from ..stock import DispatcherProcess, ServerProcess

NUMBER = 4_000
TRAINER = "trainer.example", "::1", "trainer@example.org"


def test_reads_go_on_over_a_restart_and_new_certificates(tmp_path: Path) -> None:
    authority = certificates.Authority(tmp_path / "ca")
    dispatcher = authority.issue("dispatcher")
    workers = [authority.issue(f"worker{number}") for number in range(2)]
    trainer = authority.issue("trainer", *TRAINER)
    with (
        DispatcherProcess(tmp_path / "journal", **dispatcher.files()) as leader,
        WorkerProcess(leader.address, data_transfer_protocol="tcp", **workers[0].files()),
        WorkerProcess(leader.address, data_transfer_protocol="grpc", **workers[1].files()),
        certificates.using(trainer),
    ):
        service.wait_for_workers(leader.target, 2)
        dataset_id = service.register_dataset(leader.target, tf.data.Dataset.range(NUMBER))
        ordered = service.read(leader.target, dataset_id, ordered=True, seed=3, bundle_splits=50)
        want = [int(x) for x in ordered]
        assert sorted(want) == [*range(NUMBER)]
        elements = service.read(leader.target, dataset_id, ordered=True, seed=3, bundle_splits=50)
        got = [int(next(elements)) for _ in range(NUMBER // 4)]
        for name in ("dispatcher", "worker0", "worker1"):
            authority.issue(name)
        authority.issue("trainer", *TRAINER)
        leader.kill_and_restart()
        got += [int(x) for x in elements]
        assert got == want
        once = service.read(
            leader.target, dataset_id, job_name="once", processing_mode="distributed_epoch"
        )
        assert sorted(int(x) for x in once) == [*range(NUMBER)]
        leader.kill_and_restart()
        tensors = service.from_dataset_id("distributed_epoch", leader.target, dataset_id)
        assert sorted(int(x) for x in tensors) == [*range(NUMBER)]


FORKS = """
import os
import sys

from forebay import service
from forebay.service.connections import relay

target, dataset_id = sys.argv[1:]
files = dict(zip(("tls_ca", "token_file"), os.environ["FILES"].split(",")))
service.use_credentials(service.Credentials(**files))
assert len([*service.read(target, dataset_id)]) == 100
child = os.fork()
if not child:
    try:
        assert relay.is_needed()
        assert len([*service.read(target, dataset_id)]) == 100
        print("read", flush=True)
    finally:
        os._exit(0)
os.waitpid(child, 0)
"""


TOKEN, PASSWORD = "the-token-that-nobody-sees", "the-password-that-nobody-sees"


LOOPBACK = {
    *("0100007F", "0000000000000000FFFF00000100007F"),  # 127.0.0.1
    "00000000000000000000000001000000",  # ::1
}


def listening(pid: int) -> list[str]:
    """The addresses at which the process listens, in hexadecimal, as the kernel tells them."""
    own = set()
    for descriptor in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(OSError):
            own.add(os.readlink(f"/proc/{pid}/fd/{descriptor}"))
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in own:
                found.append(fields[1].partition(":")[0])
    return found


class Hostile:
    """A function whose pickle makes a file when it is loaded."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __call__(self, split: int) -> list[int]:
        return [split]

    def __reduce__(self) -> Any:
        made = f"__import__('pathlib').Path({str(self._path)!r}).touch() or (lambda s: [s])"
        return eval, (made,)


def said_to_stock_peers(address: str, kind: str, own: service.Credentials) -> dict[str, str]:
    """What each method of tf.data service answers that this server may have."""
    requests = [n for n in tf_service_pb2.DESCRIPTOR.message_types_by_name if n.endswith("Request")]
    said = {}
    with connect(address, credentials=own) as channel:
        for name in (request.removesuffix("Request") for request in requests):
            call = channel.unary_unary(f"/tensorflow.data.{kind}Service/{name}", None, None)
            with pytest.raises(grpc.RpcError) as refused:
                call(b"", timeout=30, metadata=metadata_of(own))
            said[name] = str(refused.value.details())
    return said


def command_lines() -> str:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            found.append(path.read_text(errors="replace"))
    return "\n".join(found)


def test_a_token_is_enough_to_read_in_every_way_and_no_secret_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    authority = certificates.Authority(tmp_path / "ca")
    path = certificates.token(tmp_path / "cluster.token", f"{TOKEN}\n")
    issued = authority.issue("server")
    own = service.Credentials(tls_ca=str(authority.file), token_file=path)
    client = {"FOREBAY_TLS_CA": own.tls_ca, "FOREBAY_TOKEN_FILE": path}
    both = {**client, "FOREBAY_TLS_CERT": issued.tls_cert, "FOREBAY_TLS_KEY": issued.tls_key}
    ports = {name: free_port() for name in ("dispatcher", "worker")}
    shown: list[str] = []

    def started(stack: contextlib.ExitStack, kind: str, imports: Any, **more: str) -> ServerProcess:
        errors = stack.enter_context((tmp_path / f"{kind}.log").open("w"))
        variables = {**both, "FOREBAY_HTTP_PORT": str(ports[kind]), **more}
        command = ["-m", "forebay.service.cli", kind]
        process = ServerProcess(
            Fork(command, imports, errors=errors.fileno(), environment=variables)
        )
        stack.callback(process.stop)
        return process

    with contextlib.ExitStack() as stack:
        redis = stack.enter_context(running_redis(tmp_path / "redis"))
        with redis.client() as admin:
            admin.config_set("requirepass", PASSWORD)
        url = redis.url.replace("redis://", f"redis://:{PASSWORD}@")
        leader = started(stack, "dispatcher", DISPATCHER, FOREBAY_STORAGE=url)
        target = leader.first_line()
        address = target.removeprefix("grpc://")
        worker = started(stack, "worker", TENSORFLOW, FOREBAY_DISPATCHER=address)
        worker_address = worker.first_line()
        stack.enter_context(certificates.using(own))
        dataset_id = service.register_dataset(target, tf.data.Dataset.range(100))
        for protocol in ("unix", "tcp", "grpc"):
            elements = service.read(target, dataset_id, data_transfer_protocol=protocol)
            assert sorted(int(x) for x in elements) == [*range(100)]
        monkeypatch.setenv("FILES", f"{own.tls_ca},{path}")
        ended = run(["-c", FORKS, target, dataset_id])
        assert ended.stdout.splitlines() == ["read"], ended.stderr

        def asked(variables: Mapping[str, str]) -> str:
            command = ["-m", "forebay.service.cli", "status", address, "--json"]
            ended = run(command, imports=DISPATCHER, environment=variables)
            shown.append(ended.stdout + ended.stderr)
            return shown[-1]

        assert '"workers"' in asked(client)
        for at, method in (
            (address, f"{dispatcher_client.SERVICE}/GetStatus"),
            (worker_address, f"{tunnel.SERVICE}/{tunnel.METHOD}"),
            (address, "x/Anything"),
        ):
            with connect(at, credentials=own) as channel, pytest.raises(grpc.RpcError) as denied:
                call: Any = channel.stream_stream(f"/{method}", None, None)
                [*call(iter([b""]), timeout=30)]
            assert denied.value.code() == grpc.StatusCode.UNAUTHENTICATED
        named = {"dispatcher": ("GetStatus", "other"), "worker": ("Transfer",)}
        for kind, methods in named.items():
            request = urllib.request.Request(
                f"https://localhost:{ports[kind]}/metrics",
                headers={"Authorization": f"Bearer {TOKEN}"},
            )
            with urllib.request.urlopen(request, context=client_context(own)) as answer:
                shown.append(answer.read().decode())
            for name in methods:
                labels = f'method="{name}",reason="unauthenticated"'
                assert f"forebay_denied_calls_total{{{labels}}} 1" in shown[-1]
        shown.append(command_lines())
        for process in (leader, worker):
            found = listening(process.pid)
            assert len(found) >= 2 and {*found} <= LOOPBACK

        refused = [said_to_stock_peers(address, "Dispatcher", own)]
        refused.append(said_to_stock_peers(worker_address, "Worker", own))
        assert [{*said.values()} for said in refused] == [{NO_TENSORFLOW}] * 2
        assert "GetSplit" in refused[0] and "GetElement" in refused[1]

        touched = tmp_path / "unpickled"
        hostile = service.register_dataset(target, Hostile(touched), splits=range(3))
        touched.unlink()  # it was tried out here
        assert hostile in asked(client)
        assert not touched.exists()
        assert sorted(service.read(target, hostile)) == [0, 1, 2]
        assert touched.exists(), "the worker has loaded it"

        old = certificates.token(tmp_path / "old.token", TOKEN)
        certificates.token(Path(path), "another-token")
        wait_until(lambda: '"workers"' in asked(client))
        assert "the token is not one that is known here" in asked(
            {**client, "FOREBAY_TOKEN_FILE": old}
        )
        assert sorted(int(x) for x in service.read(target, dataset_id)) == [*range(100)]
    shown += [
        path.read_text(errors="replace")
        for path in (*tmp_path.glob("*.log"), *(tmp_path / "redis").rglob("*"))
        if path.is_file()
    ]
    assert len(shown) > 8
    for secret in (TOKEN, PASSWORD, "another-token", Path(issued.tls_key).read_text()):
        assert not [text for text in shown if secret in text]
