"""Real processes with TLS: reads, a dispatcher's restart, and certificates that are replaced."""

from __future__ import annotations

import pathlib

import pytest
import tensorflow as tf

from forebay import service

from .. import certificates
from ..cluster import WorkerProcess
from ..forks import run
from ..stock import DispatcherProcess

NUMBER = 4_000
TRAINER = "trainer.example", "::1", "trainer@example.org"


def test_reads_go_on_over_a_restart_and_new_certificates(tmp_path: pathlib.Path) -> None:
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


def test_a_token_is_enough_to_read_in_every_way(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    authority = certificates.Authority(tmp_path / "ca")
    path = certificates.token(tmp_path / "cluster.token", "secret\n")
    server = {**authority.issue("server").files(), "token_file": path}
    own = service.Credentials(tls_ca=str(authority.file), token_file=path)
    with (
        DispatcherProcess(tmp_path / "journal", **server) as leader,
        WorkerProcess(leader.address, **server),
        certificates.using(own),
    ):
        dataset_id = service.register_dataset(leader.target, tf.data.Dataset.range(100))
        for protocol in ("unix", "tcp", "grpc"):
            elements = service.read(leader.target, dataset_id, data_transfer_protocol=protocol)
            assert sorted(int(x) for x in elements) == [*range(100)]
        monkeypatch.setenv("FILES", f"{own.tls_ca},{path}")
        ended = run(["-c", FORKS, leader.target, dataset_id])
        assert ended.stdout.splitlines() == ["read"], ended.stderr
