"""Journals in Redis and in PostgreSQL, and what stands behind their backs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import redis

from forebay.storage import Writer
from forebay.storage.postgres.storage import PostgresStorage
from forebay.storage.redis.log import Keys
from forebay.storage.redis.storage import RedisStorage
from forebay.storage.server_storage import ServerStorage

from ..postgres_server import PostgresServer, schema_of


class Journal(ABC):
    """A journal on a server, which a test may damage. A batch is called by its last record."""

    entry: str  # what errors call a batch
    first_aside: int  # of the batches that a cut of records 401 to 600 moves aside

    def __init__(self, url: str) -> None:
        self.url = url

    @abstractmethod
    def open(self) -> ServerStorage: ...

    def write(self, batches: int = 4, records: int = 3) -> Writer:
        """Open a writer that has appended so much."""
        writer = self.open().open_writer("the test")
        for i in range(batches):
            writer.append([b"%d" % (i * records + n + 1) for n in range(records)])
        return writer

    @abstractmethod
    def batches(self, aside: int = 0) -> dict[int, bytes]:
        """The log, or what the cut of this number has moved aside."""

    @abstractmethod
    def forge(self, last: int, data: bytes) -> None:
        """Append a batch as a writer would."""

    @abstractmethod
    def flip_a_bit(self, last: int) -> None: ...

    @abstractmethod
    def remove(self, last: int) -> None: ...

    @abstractmethod
    def put_snapshot(self, sequence: int, framed: bytes) -> None: ...

    @abstractmethod
    def snapshots_aside(self) -> dict[int, bytes]:
        """What the first cut has moved aside."""

    @abstractmethod
    def put_blob(self, name: str, data: bytes) -> None: ...

    @abstractmethod
    def set_format(self, number: int) -> None: ...

    @abstractmethod
    def delete_meta(self) -> None: ...

    @abstractmethod
    def is_there(self) -> bool:
        """Whether anything is."""


class RedisJournal(Journal):
    entry, first_aside = "log: entry {}-0", 2

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.prefix = url.partition("prefix=")[2]
        self.keys = Keys.of(self.prefix)
        self.redis: Any = redis.Redis.from_url(url.partition("?")[0])

    def open(self) -> RedisStorage:
        return RedisStorage(self.url)

    def batches(self, aside: int = 0) -> dict[int, bytes]:
        log = f"{self.prefix}:cut:{aside}:log" if aside else self.keys.log
        entries = self.redis.xrange(log)
        return {int(entry.partition(b"-")[0]): fields[b"batch"] for entry, fields in entries}

    def forge(self, last: int, data: bytes) -> None:
        self.redis.xadd(self.keys.log, {"batch": data}, id=f"{last}-0")
        self.redis.hset(self.keys.meta, "last", last)
        self.redis.hincrby(self.keys.meta, "entries", 1)

    def flip_a_bit(self, last: int) -> None:
        batches = self.batches()
        self.redis.delete(self.keys.log)
        for number, data in batches.items():
            changed = data[:-6] + bytes([data[-6] ^ (number == last)]) + data[-5:]
            self.redis.xadd(self.keys.log, {"batch": changed}, id=f"{number}-0")

    def remove(self, last: int) -> None:
        self.redis.xdel(self.keys.log, f"{last}-0")

    def put_snapshot(self, sequence: int, framed: bytes) -> None:
        self.redis.hset(self.keys.snapshots, str(sequence), framed)

    def snapshots_aside(self) -> dict[int, bytes]:
        found = self.redis.hgetall(f"{self.prefix}:cut:1:snapshots")
        return {int(sequence): framed for sequence, framed in found.items()}

    def put_blob(self, name: str, data: bytes) -> None:
        self.redis.hset(self.keys.blobs, name, data)

    def set_format(self, number: int) -> None:
        self.redis.hset(self.keys.meta, "format", number)

    def delete_meta(self) -> None:
        self.redis.delete(self.keys.meta)

    def is_there(self) -> bool:
        return bool(self.redis.exists(*self.keys))


class PostgresJournal(Journal):
    entry, first_aside = "log: row {}", 402

    def __init__(self, server: PostgresServer, url: str) -> None:
        super().__init__(url)
        self.schema = schema_of(url)
        self._server = server

    def open(self) -> PostgresStorage:
        return PostgresStorage(self.url)

    def execute(self, statement: str, *values: object) -> list[Any]:
        """Run a statement, in which {s} is the schema."""
        with self._server.client() as client:
            query = statement.format(s=f'"{self.schema}"').encode()
            cursor = client.execute(query, values)
            return cursor.fetchall() if cursor.description else []

    def batches(self, aside: int = 0) -> dict[int, bytes]:
        table = f"cut_{aside}_log" if aside else "log"
        return dict(self.execute(f"SELECT last, batch FROM {{s}}.{table} ORDER BY last"))

    def forge(self, last: int, data: bytes) -> None:
        self.execute("INSERT INTO {s}.log VALUES (%s, %s)", last, data)
        self.execute("UPDATE {s}.meta SET last = %s", last)

    def flip_a_bit(self, last: int) -> None:
        bit = "length(batch) * 8 - 45"
        changed = f"set_bit(batch, {bit}, 1 - get_bit(batch, {bit}))"
        self.execute(f"UPDATE {{s}}.log SET batch = {changed} WHERE last = %s", last)

    def remove(self, last: int) -> None:
        self.execute("DELETE FROM {s}.log WHERE last = %s", last)

    def put_snapshot(self, sequence: int, framed: bytes) -> None:
        self.execute("DELETE FROM {s}.snapshots WHERE sequence = %s", sequence)
        self.execute("INSERT INTO {s}.snapshots VALUES (%s, %s)", sequence, framed)

    def snapshots_aside(self) -> dict[int, bytes]:
        return dict(self.execute("SELECT sequence, data FROM {s}.cut_1_snapshots"))

    def put_blob(self, name: str, data: bytes) -> None:
        self.execute("UPDATE {s}.blobs SET data = %s WHERE name = %s", data, name)

    def set_format(self, number: int) -> None:
        self.execute("UPDATE {s}.meta SET format = %s", number)

    def delete_meta(self) -> None:
        self.execute("DELETE FROM {s}.meta")

    def is_there(self) -> bool:
        return bool(self.execute("SELECT FROM pg_namespace WHERE nspname = %s", self.schema))
