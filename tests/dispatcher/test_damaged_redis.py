"""Whatever happens to one key of a journal in Redis: `verify` says what a dispatcher says.

And what is said to be done about it ends it.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from typing import Any

import pytest
import redis

from forebay.journal.codec import encode
from forebay.journal.proto import events_pb2 as ev
from forebay.journal.snapshots import encode_snapshot
from forebay.journal.verification import repair, verify
from forebay.service.core.encoding import encode_state
from forebay.service.dispatcher.graphs import needed_blobs
from forebay.service.dispatcher.recovery import recover
from forebay.storage import Storage, StorageError, open_storage

GRAPH = b"the bytes of a graph"


def fill(url: str) -> None:
    storage = open_storage(url)
    writer = storage.open_writer("the test")
    definition = ev.DatasetDefinition(tf_data_graph=ev.TfDataGraph(blob=writer.write_blob(GRAPH)))
    elected = ev.LeaderElected(term=writer.term, journal_id="j")
    writer.append([encode(ev.Event(time_ms=1, leader_elected=elected))])
    for number in range(6):
        registered = ev.DatasetRegistered(dataset_id=f"d{number}", definition=definition)
        writer.append([encode(ev.Event(time_ms=1, dataset_registered=registered))])
    writer.write_snapshot(4, encode_snapshot(encode_state(recover(storage, 4)[0]), 1))
    writer.close()
    storage.close()


def delete(client: Any, key: str) -> None:
    client.delete(key)


def replace_by_a_string(client: Any, key: str) -> None:
    client.set(key, "something else")


def replace_by_a_hash(client: Any, key: str) -> None:
    client.delete(key)
    client.hset(key, "something", "else")


def replace_by_a_stream(client: Any, key: str) -> None:
    client.delete(key)
    client.xadd(key, {"something": "else"})


def trim(client: Any, key: str) -> None:
    client.xtrim(key, maxlen=2, approximate=False)


KEYS = ("meta", "log", "snapshots", "blobs")
DAMAGES = (delete, replace_by_a_string, replace_by_a_hash, replace_by_a_stream)


def begin(storage: Storage) -> None:
    storage.open_writer("a dispatcher").close()
    for blob in needed_blobs(recover(storage)[0]).values():
        storage.read_blob(blob)


def problems(storage: Storage) -> list[str]:
    try:
        return verify(storage, lambda storage: needed_blobs(recover(storage)[0])).problems
    except StorageError as error:  # as the command line does
        return [str(error)]


@pytest.mark.parametrize(("name", "damage"), [("log", trim), *itertools.product(KEYS, DAMAGES)])
def test_one_damaged_key(
    redis_storage_url: str, name: str, damage: Callable[[Any, str], None]
) -> None:
    fill(redis_storage_url)
    client = redis.Redis.from_url(redis_storage_url.partition("?")[0])
    key = f"{redis_storage_url.partition('prefix=')[2]}:{name}"
    damage(client, key)
    storage = open_storage(redis_storage_url)
    found = problems(storage)
    try:
        begin(storage)
    except StorageError as error:
        assert str(error) in found
        assert key in str(error)
        for _ in range(4):
            if moved := re.search(r"(\S+?):? (?:holds a|is no) .* rename that key", str(error)):
                client.rename(moved[1], f"{moved[1]}:away")
            elif "register the dataset again" in str(error):
                writer = storage.open_writer("a dispatcher")
                writer.write_blob(GRAPH)
                writer.close()
            else:
                assert "repair the journal" in str(error)
                repair(storage, truncate_corrupt=True)
            try:
                begin(storage)
                break
            except StorageError as another:
                error = another
        else:
            raise
        assert problems(storage) == []
    else:
        assert name == "snapshots"
        assert not any("dispatcher" in message for message in found)
    storage.close()
    client.close()
