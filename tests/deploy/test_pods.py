"""The manifests' pods serve: as a user, on a read-only root, with Secrets as Kubernetes has."""

from __future__ import annotations

import base64
import ssl
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest
import tensorflow as tf
from tensorflow.data.experimental import service as stock

from forebay.service.processes import ChildProcess, free_port

from ..standbys import wait_until
from .images import ROOT, Images, Mounts
from .manifests import Object, named, rendered
from .pods import Pods

pytestmark = pytest.mark.timeout(440)

# The development environment, whose versions are the images', spares a build of a minute and more.
DEVELOPMENT: Mounts = {"/opt/forebay": Path(sys.prefix), str(ROOT): ROOT}


def probe(address: str, path: str, scheme: str = "https", token: str = "") -> int:
    """The answer's code, as for a kubelet, which checks no certificate; 0: nobody answers."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    url = f"{scheme}://{address}:8080{path}"
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    try:
        with urllib.request.urlopen(
            urllib.request.Request(url, headers=headers),
            timeout=5,
            context=context if scheme == "https" else None,
        ) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        error.close()
        return error.code
    except OSError:
        return 0


TRAINER = """
import sys
import tensorflow as tf
from forebay import service
from forebay.service.connections.dispatcher_client import DispatcherClient
from forebay.service.errors import PermissionDenied
from forebay.service.proto import forebay_pb2 as pb

target = ",".join(f"forebay-dispatcher-{n}.forebay-dispatchers.forebay.svc:5050" for n in (0, 1))
dataset_id = service.register_dataset(target, tf.data.Dataset.range(1000).map(lambda x: 2 * x))
elements = service.read(target, dataset_id, ordered=True, seed=3, bundle_splits=50)
got = [int(next(elements)) for _ in range(300)]
print("half", flush=True)
sys.stdin.readline()
got += map(int, elements)
assert sorted(got) == [*range(0, 2000, 2)]
dataset = service.from_dataset_id("distributed_epoch", target, dataset_id)
assert len([*dataset]) == 1000
client = DispatcherClient(target)
for request, response in (
    (pb.WorkerHeartbeatRequest(address="a:1", uid=1), pb.WorkerHeartbeatResponse),
    (pb.RemoveDatasetRequest(dataset_id=dataset_id), pb.RemoveDatasetResponse),
    (pb.GetStatusRequest(), pb.GetStatusResponse),
):
    try:
        client.call(request, response)
    except PermissionDenied:
        continue
    raise AssertionError(request)
client.close()
print("all", flush=True)
"""


def test_pods_serve_and_fail_over(
    images: Images, secrets: tuple[Object, ...], tmp_path: Path
) -> None:
    (packages,) = images.target("dispatcher").inside("/opt/forebay/lib").glob("*/site-packages")
    assert (packages / "forebay").is_dir()
    assert not (packages / "tensorflow").exists()

    with Pods(images, (*rendered("redis"), *secrets), tmp_path) as pods:
        at = pods.addresses
        redis = ("redis-server", "/etc/redis/redis.conf", "--bind", at["forebay-redis-0"])
        pods.start("forebay-redis-0", command=redis)
        names = ("forebay-dispatcher-0", "forebay-dispatcher-1")
        dispatchers = {name: pods.start(name, image="dispatcher") for name in names}
        worker = pods.start("forebay-worker-0", image="worker")

        def leads(name: str) -> bool:
            return probe(at[name], "/readyz") == 200

        wait_until(lambda: all(probe(at[name], "/healthz") == 200 for name in names))
        wait_until(lambda: any(map(leads, names)))
        (leader,) = filter(leads, names)
        (standby,) = {*names} - {leader}
        assert probe(at[standby], "/readyz") == 503
        wait_until(lambda: probe(at["forebay-worker-0"], "/readyz") == 200)

        files = {"/run/trainer": pods.secret("forebay-trainer")}
        trainer = images.container(
            "any-worker",
            {"FOREBAY_TLS_CA": "/run/trainer/ca.crt", "FOREBAY_TOKEN_FILE": "/run/trainer/token"},
            writable={"/tmp": tmp_path / f"{leader}-tmp"},
            readable={**DEVELOPMENT, **files},
            hosts=pods.hosts(),
            command=("python", "-c", TRAINER),
        )
        pods.ends(trainer)
        assert trainer.line() == "half"
        dispatchers[leader].kill()
        wait_until(leads, standby)
        dispatchers[leader] = pods.start(leader, image="dispatcher")  # as a kubelet does
        wait_until(lambda: probe(at[leader], "/readyz") == 503)
        assert trainer.stdin is not None
        trainer.stdin.write("\n")
        trainer.stdin.flush()
        assert trainer.line() == "all"
        assert trainer.finish() == 0
        data = named(secrets, "Secret", "forebay-token")["data"]
        tokens = {kind: base64.b64decode(data[kind]).decode().strip() for kind in data}
        scraped = {kind: probe(at[standby], "/metrics", token=tokens[kind]) for kind in tokens}
        may_see = {kind: kind.startswith(("viewer", "dispatcher")) for kind in tokens}
        assert scraped == {kind: 200 if may else 403 for kind, may in may_see.items()}

        for process in (worker, *dispatchers.values()):  # SIGTERM, as the images say
            assert process.end(60) == 0
    assert images.target("dispatcher").stop_signal == "SIGTERM"


def test_a_worker_of_python_datasets_has_their_packages(images: Images, tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    modules = "apache_beam, array_record, forebay.service, pyarrow, tensorflow, tensorflow_datasets"
    command = ("python", "-c", f"import {modules}")
    checks = images.container("worker-python", {}, writable={"/tmp": tmp_path}, command=command)
    assert checks.finish(100) == 0


def healthy(images: Images, env: dict[str, str], folder: Path) -> int:
    """The exit code of the image's HEALTHCHECK."""
    command = images.target("any-worker").healthcheck
    checks = images.container(
        "any-worker", env, writable={"/tmp": folder}, readable=DEVELOPMENT, command=command
    )
    return checks.finish(60)


@pytest.mark.parametrize("tls", [False, True])
def test_the_health_check(
    images: Images, secrets: tuple[Object, ...], tmp_path: Path, tls: bool
) -> None:
    env = {"FOREBAY_HOST": "127.0.0.1", "FOREBAY_PORT": "0", "FOREBAY_HTTP_PORT": str(free_port())}
    folder = tmp_path / "tmp"
    folder.mkdir(mode=0o777)
    folder.chmod(0o777)
    with Pods(images, secrets, tmp_path) as pods:
        readable = dict(DEVELOPMENT)
        if tls:
            readable["/tls"] = pods.secret("forebay-dispatcher-tls")
            env |= {f"FOREBAY_TLS_{name}": f"/tls/tls.{name[:3].lower()}" for name in ("KEY",)}
            env |= {"FOREBAY_TLS_CERT": "/tls/tls.crt", "FOREBAY_TLS_CA": "/tls/ca.crt"}
        assert healthy(images, env, folder) == 1
        dispatcher: ChildProcess = images.container(
            "any-worker",
            env,
            writable={"/tmp": folder},
            readable=readable,
            command=("forebay", "dispatcher"),
        )
        pods.ends(dispatcher)
        assert dispatcher.line().startswith("grpc://")
        assert healthy(images, env, folder) == 0


def test_haproxy_leads_stock_clients_to_the_leader(
    images: Images, secrets: tuple[Object, ...], tmp_path: Path
) -> None:
    objects = (*rendered("stock-clients"), *secrets)
    with Pods(images, objects, tmp_path) as pods:
        at = pods.addresses
        redis = ("redis-server", "/etc/redis/redis.conf", "--bind", at["forebay-redis-0"])
        pods.start("forebay-redis-0", command=redis)
        command = ("forebay", "dispatcher")
        names = ("forebay-dispatcher-0", "forebay-dispatcher-1")
        dispatchers = {
            name: pods.start(name, image="any-worker", readable=DEVELOPMENT, command=command)
            for name in names
        }
        pods.start(
            "forebay-worker-0",
            image="any-worker",
            readable=DEVELOPMENT,
            env={"FOREBAY_ADDRESS": f"{at['forebay-worker-0']}:%port%"},  # this test reads, too
        )
        configuration = next(
            o for o in objects if o["kind"] == "ConfigMap" and "haproxy.cfg" in o["data"]
        )
        own = at["forebay-leader-0"]
        text = configuration["data"]["haproxy.cfg"]
        assert "bind :" in text
        configuration["data"]["haproxy.cfg"] = text.replace("bind :", f"bind {own}:")
        pods.start("forebay-leader-0")

        def leads(name: str) -> bool:
            return probe(at[name], "/readyz", "http") == 200

        wait_until(lambda: any(map(leads, names)))
        wait_until(lambda: probe(at["forebay-worker-0"], "/readyz", "http") == 200)
        (leader,) = filter(leads, names)
        (standby,) = {*names} - {leader}
        reads = stock.distribute("distributed_epoch", f"grpc://{own}:5050")
        assert len([*tf.data.Dataset.range(100).apply(reads)]) == 100
        dispatchers[leader].kill()
        wait_until(leads, standby)
        assert len([*tf.data.Dataset.range(50).apply(reads)]) == 50
