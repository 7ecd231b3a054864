"""An epoch on PostgreSQL while the leader and the server are killed: nothing is lost, or twice."""

from __future__ import annotations

import tensorflow as tf

from forebay import service
from forebay.journal.verification import verify
from forebay.storage import open_storage

from ..cluster import WorkerProcess
from ..postgres_server import running_postgres
from ..standbys import leads, running_pair, wait_until
from ..stock import slow
from .test_failover import DYNAMIC, ELEMENTS


def test_an_epoch_in_which_everything_is_killed_but_the_worker() -> None:
    with running_postgres() as server, running_pair(server.url) as pair:
        addresses = ",".join(one.address for one in pair)
        with WorkerProcess(addresses):
            dataset_id = service.register_dataset(
                addresses, slow(tf.data.Dataset.range(ELEMENTS), 0.001)
            )
            got = []
            with service.read(addresses, dataset_id, processing_mode=DYNAMIC) as elements:
                for element in elements:
                    got.append(int(element))
                    if len(got) in (100, 600, 1100):
                        server.kill()
                        server.start()
                    if len(got) == 300:
                        pair[0].kill()
                    if len(got) == 900:
                        wait_until(leads, pair[1], 2)
                        pair[0].restart()
                    if len(got) == 1000:
                        pair[1].kill()
                        server.kill()
                        server.start()
                        pair[1].restart()
        for one in pair:
            assert one.stop() == 0
        assert verify(open_storage(server.url)).ok
    assert sorted(got) == list(range(ELEMENTS))
