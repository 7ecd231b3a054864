"""Real processes with TLS: reads, a dispatcher's restart, and certificates that are replaced."""

from __future__ import annotations

import pathlib

import tensorflow as tf

from forebay import service

from .. import certificates
from ..cluster import WorkerProcess
from ..stock import DispatcherProcess

NUMBER = 4_000


def test_reads_go_on_over_a_restart_and_new_certificates(tmp_path: pathlib.Path) -> None:
    authority = certificates.Authority(tmp_path / "ca")
    dispatcher = authority.issue("dispatcher")
    workers = [authority.issue(f"worker{number}") for number in range(2)]
    trainer = authority.issue("trainer", "trainer.example")
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
        authority.issue("trainer", "trainer.example")
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
