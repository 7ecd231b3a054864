"""Files of records in an object store, by moto's S3 server behind a proxy."""

from __future__ import annotations

import collections
import contextlib
import glob
import gzip
import http.server
import os
import random
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import fsspec.core
import lance
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, write_deltalake
from pyiceberg.catalog.memory import InMemoryCatalog

from forebay.service.errors import FailedPrecondition, InvalidArgument, NotFound
from forebay.service.order import permuted_many
from forebay.service.pipelines import PythonRules, bundles_at_once
from forebay.service.pipelines.files import byte_cache, byte_sources, open_files, stores
from forebay.service.pipelines.files.known_formats import FORMATS as KNOWN
from forebay.service.pipelines.files.manifest import decode
from forebay.service.pipelines.files.reading import FileRecords
from forebay.service.pipelines.kinds import file_inspector
from forebay.service.pipelines.kinds.file_paths import matches
from forebay.service.pipelines.kinds.functions import listed
from forebay.service.pipelines.python.pipeline import PythonPipeline
from forebay.service.proto import forebay_pb2 as pb
from forebay.service.proto.python_pb2 import PythonDataset

from ..object_store import ACCESS_KEY, BUCKET, SECRET_KEY, Faults, ObjectStore, object_store
from ..record_files import (
    FORMATS,
    MDS_COLUMNS,
    Register,
    all_of,
    all_records,
    definition_of,
    flat,
    opened,
    some_sequences,
    write_megatron,
    written,
)

COUNTS = (23, 0, 5, 40)


@pytest.fixture(scope="module")
def server() -> Iterator[ObjectStore]:
    with object_store() as made:
        yield made


@pytest.fixture
def store(server: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectStore]:
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    file_inspector._fork_server.close()  # its children have the environment of its start
    monkeypatch.setattr(byte_sources, "SMALL_BYTES", 0)  # or all of these objects are small
    monkeypatch.setitem(KNOWN, "arrow", KNOWN["arrow"]._replace(native=False))  # not in children
    server.proxy.faults = Faults()
    server.proxy.forget()
    yield server
    byte_cache.use("", 0)


def put(store: ObjectStore, directory: Path, prefix: str) -> str:
    """All files below a directory; returns its URL."""
    for folder, _, names in os.walk(directory):
        for name in names:
            path = Path(folder, name)
            key = f"{prefix}/{path.relative_to(directory)}"
            store.client.put_object(Bucket=BUCKET, Key=key, Body=path.read_bytes())
    return f"s3://{BUCKET}/{prefix}"


def parquet(store: ObjectStore, path: Path, prefix: str, files: int = 3) -> str:
    for number in range(files):
        values = np.arange(number * 1000, (number + 1) * 1000)
        table = pa.table({"n": values, "text": [f"{value}" * 9 for value in values]})
        pq.write_table(table, path / f"{number}.parquet", row_group_size=200)
    return put(store, path, prefix)


def numbers(request: pb.RegisterDatasetRequest) -> list[int]:
    with contextlib.closing(opened(request)) as files:
        blocks = (block for split in files.splits for block in files.blocks(split))
        return [int(one) for block in blocks for one in block.components[0].elements()]


def public(store: ObjectStore, prefix: str) -> dict[str, Any]:
    """Returns storage_options for who has no credentials."""
    store.client.put_bucket_acl(Bucket=BUCKET, ACL="public-read")
    for one in store.client.list_objects_v2(Bucket=BUCKET, Prefix=prefix)["Contents"]:
        store.client.put_object_acl(Bucket=BUCKET, Key=one["Key"], ACL="public-read")
    return {"endpoint": store.proxy.url, "anonymous": True, "region": "us-east-1"}


def rewrite(store: ObjectStore, url: str, data: bytes) -> None:
    store.client.put_object(Bucket=BUCKET, Key=url.removeprefix(f"s3://{BUCKET}/"), Body=data)


def test_a_delta_table_in_a_store(store: ObjectStore, register: Register, tmp_path: Path) -> None:
    for begin in (0, 20):
        table = pa.table({"n": range(begin, begin + 20), "kind": [f"{begin} %"] * 20})
        write_deltalake(tmp_path, table, mode="append", partition_by=["kind"])
    DeltaTable(tmp_path).delete("n = 7")
    url = put(store, tmp_path, "delta")
    with pytest.raises(InvalidArgument, match=r"is a table of Delta Lake.* by format='delta'"):
        register(url)
    found = [one["n"] for one in all_records(register(url, format="delta"))]
    assert sorted(found) == [n for n in range(40) if n != 7]


def test_an_iceberg_table_in_a_store(
    store: ObjectStore, register: Register, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the table is written, its endpoint is a property; it is none of who reads."""
    monkeypatch.setenv("AWS_REQUEST_CHECKSUM_CALCULATION", "WHEN_REQUIRED")  # moto has not all
    catalog = InMemoryCatalog(
        "tests",
        **{
            "warehouse": f"s3://{BUCKET}/iceberg", "s3.endpoint": store.proxy.url,
            "s3.region": "us-east-1", "s3.access-key-id": ACCESS_KEY,
            "s3.secret-access-key": SECRET_KEY,
        },
    )  # fmt: skip
    catalog.create_namespace("a")
    table = catalog.create_table("a.table", pa.schema([("n", pa.int64())]))
    table.append(pa.table({"n": range(30)}))
    first = register(table.metadata_location, format="iceberg")
    table.append(pa.table({"n": range(30, 50)}))
    assert sorted(numbers(register(table.location(), format="iceberg"))) == [*range(50)]
    hint = f"{table.location()}/metadata/version-hint.text"
    rewrite(store, hint, os.path.basename(table.metadata_location).encode())
    assert sum(register(table.location(), format="iceberg").lengths) == 50
    assert sorted(numbers(first)) == [*range(30)]
    monkeypatch.delenv("AWS_ENDPOINT_URL")
    given = public(store, "iceberg/")
    request = register(table.metadata_location, format="iceberg", storage_options=given)
    assert sorted(numbers(request)) == [*range(50)]
    with pytest.raises(FailedPrecondition, match=r"iceberg'.*FileNotFoundError.*no metadata"):
        register(f"s3://{BUCKET}/nothing", format="iceberg", storage_options=given)


def test_a_lance_table_in_a_store(
    store: ObjectStore, register: Register, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, how = f"s3://{BUCKET}/lance/table", {"aws_allow_http": "true"}
    rows = pa.table({"n": range(50)})
    table = lance.write_dataset(rows, url, max_rows_per_file=20, storage_options=how)
    request = register(url, format="lance", shuffle_records=True)
    with pytest.raises(InvalidArgument, match=r"is a table of Lance.* by format='lance'"):
        register(url)
    table.delete("n < 7")
    assert sorted(numbers(request)) == [*range(50)]
    monkeypatch.delenv("AWS_ENDPOINT_URL")
    given = public(store, "lance/")
    request = register(url, format="lance", storage_options=given)
    assert numbers(request) == [*range(7, 50)]
    path = decode(PythonDataset.FromString(request.python).files).files[0].path
    rewrite(store, path, b"another one")
    with pytest.raises(FailedPrecondition, match=r"has 11 bytes with ETag .* and had .* with ETag"):
        numbers(request)


def test_partitions_are_what_is_below_the_fixed_directory(
    store: ObjectStore, register: Register, tmp_path: Path
) -> None:
    for name in ("x/k=1", "y/k=2"):
        (tmp_path / name).mkdir(parents=True)
        pq.write_table(pa.table({"n": [7]}), tmp_path / name / "a.parquet")
    url = put(store, tmp_path, "run=1")
    both = all_records(register(f"{url}/{{x,y}}/**/*.parquet"))
    assert [*map(repr, both)] == [repr({"k": np.int32(k), "n": np.int64(7)}) for k in (1, 2)]
    assert [*map(repr, all_records(register(f"{url}/x//")))] == [repr(both[0])]


def test_splits_of_a_function_are_objects_of_a_pattern(store: ObjectStore, tmp_path: Path) -> None:
    for name in ("b.npz", "a.npz", "c.txt"):
        (tmp_path / name).write_bytes(b"1")
    url = put(store, tmp_path, "splits")
    assert listed(f"{url}/*.npz") == [f"{url}/a.npz", f"{url}/b.npz"]
    assert store.proxy.lists == 1
    assert listed(f"{url}/{{b,c}}.*") == [f"{url}/b.npz", f"{url}/c.txt"]
    with pytest.raises(NotFound, match=r"matches '.*g': .*/ has \['.*c\.txt'\]. `\*\*/`"):
        listed(f"{url}/*.nothing")


@pytest.mark.parametrize("small_bytes", [0, byte_sources.SMALL_BYTES])
@pytest.mark.parametrize("format", FORMATS)
def test_records_are_those_of_local_files(
    store: ObjectStore,
    register: Register,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    small_bytes: int,
    format: str,  # noqa: A002
) -> None:
    """Of each format, with one LIST; registered in this process or in others."""
    monkeypatch.setattr(byte_sources, "SMALL_BYTES", small_bytes)
    monkeypatch.setattr(file_inspector, "_MANY_OBJECTS", 1 if small_bytes else 16)
    records = [*map(flat, written(format, tmp_path, COUNTS))]
    prefix = f"{format}/{small_bytes}/a b%20+ü"
    url = put(store, tmp_path, prefix) + ("/mds" if format == "mds" else "")
    columns: dict[str, Any] = {"columns": MDS_COLUMNS} if format == "mds" else {}
    request = register(url, **columns)
    assert store.proxy.lists == 1
    assert sum(request.lengths) == len(records)
    assert all_of(request) == records
    assert store.proxy.lists == 1, "a worker lists nothing"
    if format != "mds":
        assert all_of(register(f"{url}/*", format=format, **columns)) == records
        several = ("0", "1", "2", "3")
        suffix = url and next(iter(tmp_path.glob("0.*"))).suffix
        assert all_of(register([f"{url}/{name}{suffix}" for name in several])) == records
        assert all_of(register(f"{url}/{{0..3}}{suffix}")) == records
    shuffled = register(url, split_records=9, shuffle_records=True, seed=4, **columns)
    order = permuted_many(np.arange(len(records)), len(records), 4, 0)
    assert all_of(shuffled) == [records[number] for number in order]
    assert register(url, **columns) == request


def test_tokens_and_their_index(store: ObjectStore, register: Register, tmp_path: Path) -> None:
    sequences = some_sequences(30)
    write_megatron(tmp_path / "a", sequences, "uint16")
    url = put(store, tmp_path, "tokens")
    request = register(url, format="tokens")
    found = all_records(request)
    assert [one.tolist() for one in found] == [one.tolist() for one in sequences]
    write_megatron(tmp_path / "a", [*reversed(sequences)], "uint16")
    rewrite(store, f"{url}/a.idx", (tmp_path / "a.idx").read_bytes())
    with pytest.raises(FailedPrecondition, match=r"a\.idx has .* with ETag .* and had .* ETag"):
        all_records(request)


def test_an_index_in_a_store(store: ObjectStore, register: Register, tmp_path: Path) -> None:
    records = [*map(flat, written("tfrecord", tmp_path / "", COUNTS))]
    url = put(store, tmp_path, "indexed")
    for index_dir in (f"s3://{BUCKET}/indices", str(tmp_path / "indices")):
        first = register(f"{url}/", index_dir=index_dir)
        store.proxy.forget()
        assert register(f"{url}/", index_dir=index_dir) == first
        assert all_of(first) == records
    with pytest.raises(NotFound):
        register(f"s3://{BUCKET}/indices/s3/{BUCKET}/indexed", format="tfrecord")


def test_a_store_that_often_fails(store: ObjectStore, register: Register, tmp_path: Path) -> None:
    url = parquet(store, tmp_path, "faulty", files=8)
    store.proxy.faults = Faults(unavailable=0.05, cut=0.05, reset=0.01)
    request = register(url)
    assert numbers(request) == [*range(8000)]
    assert store.proxy.failed
    assert SECRET_KEY.encode() not in request.SerializeToString()


def test_nothing_else_is_fetched(store: ObjectStore, register: Register, tmp_path: Path) -> None:
    draws = np.random.default_rng(0)
    columns = {f"c{n}": draws.integers(0, 1 << 62, 40_000) for n in range(8)}
    pq.write_table(pa.table(columns), tmp_path / "0.parquet", row_group_size=10_000)
    request = register(put(store, tmp_path, "columns"), columns=["c3"])
    store.proxy.forget()
    files = opened(request)
    assert sum(block.count for split in files.splits for block in files.blocks(split)) == 40_000
    about = pq.read_metadata(tmp_path / "0.parquet")
    needed = sum(about.row_group(n).column(3).total_compressed_size for n in range(4))
    assert store.proxy.sent_bytes <= 1.05 * needed + (64 << 10)  # and the footer


@pytest.mark.parametrize("format", ["parquet", "jsonl"])
def test_many_small_objects_cost_few_requests_many_at_a_time(
    store: ObjectStore,
    register: Register,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    format: str,  # noqa: A002
) -> None:
    """An epoch fetches each once, and no index, also shuffled. Few are kept open."""
    monkeypatch.setattr(byte_sources, "SMALL_BYTES", 128 << 10)
    monkeypatch.setattr(open_files, "FEW_OPEN", 5)
    for number in range(60):
        path = tmp_path / f"{number:02}.{format}"
        if format == "parquet":
            pq.write_table(pa.table({"n": [2 * number, 2 * number + 1]}), path)
        else:
            path.write_text(f'{{"n": {2 * number}}}\n{{"n": {2 * number + 1}}}\n')
    url = put(store, tmp_path, f"many/{format}")
    size = sum(path.stat().st_size for path in tmp_path.iterdir())
    store.proxy.faults = Faults(latency_s=0.25)
    request = register(url, split_records=40)
    assert (store.proxy.lists, store.proxy.gets) == (1, 60 + 1)  # and the first one's begin
    assert store.proxy.most_at_once > 16
    for one in (request, register(url, split_records=120, shuffle_records=True)):
        store.proxy.forget()
        stores._opened.cache_clear()
        assert sorted(numbers(one)) == [*range(120)]
        assert stores._opened.cache_info().misses == 1, "many threads ask, and one opens it"
        assert (store.proxy.gets, store.proxy.sent_bytes) == (60, size)
        assert store.proxy.most_at_once > 8
    files = opened(request)
    assert [block.count for block in files.blocks(0)] == [2, 38], "the first one comes at once"
    assert len(files._ranges.files._open) == 5
    assert bundles_at_once(definition_of(request), request.python, PythonRules(processes=2)) == 6


def test_a_stream_is_fetched_once(store: ObjectStore, register: Register, tmp_path: Path) -> None:
    """Also from its middle; not counted, it is looked at only."""
    rows = [random.Random(number).randbytes(500).hex() for number in range(40_000)]
    data = gzip.compress("".join(f'{{"text": "{row}"}}\n' for row in rows).encode(), 1)
    (tmp_path / "a.jsonl.gz").write_bytes(data)
    url = put(store, tmp_path, "streams")
    store.proxy.forget()
    uncounted = register(url, count=False)
    assert store.proxy.sent_bytes < 5 << 20 < len(data)
    store.proxy.forget()
    counted = register(url)
    assert [*counted.lengths] == [40_000]
    assert len(data) <= store.proxy.sent_bytes < len(data) + (5 << 20)
    for request, start in ((uncounted, 0), (counted, 30_000)):
        store.proxy.forget()
        files = opened(request)
        found = [one for block in files.blocks(0, start) for one in block.components[0].elements()]
        files.close()
        assert found == [row.encode() for row in rows[start:]]
        assert store.proxy.sent_bytes < len(data) + (1 << 16)


def test_an_object_that_was_replaced(
    store: ObjectStore, register: Register, tmp_path: Path
) -> None:
    url = parquet(store, tmp_path, "changing")
    request = register(url)
    tags = [
        entry.fingerprint for entry in decode(PythonDataset.FromString(request.python).files).files
    ]
    whole, files = (tmp_path / "2.parquet").read_bytes(), opened(request)
    assert [*files.blocks(7)]
    rewrite(store, f"{url}/1.parquet", whole)
    with pytest.raises(FailedPrecondition, match="register the files anew"):
        [*files.blocks(8)]  # while it is open
    with pytest.raises(FailedPrecondition) as refused:
        numbers(request)
    assert f"{url}/1.parquet has {len(whole)} bytes with {tags[2]}" in str(refused.value)
    assert tags[1] in str(refused.value)
    store.client.delete_object(Bucket=BUCKET, Key="changing/1.parquet")
    with pytest.raises(FailedPrecondition, match=r"1\.parquet cannot be read .*deleted.*ETag"):
        numbers(request)


def test_what_is_not_there_or_not_allowed(
    store: ObjectStore, register: Register, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = parquet(store, tmp_path, "there", files=1)
    for missing in (f"s3://{BUCKET}/nothing", f"{url}/*.tar", f"{url}/{{0..1}}.parquet"):
        with pytest.raises(NotFound, match=missing.partition("*")[0].partition("{")[0]):
            register(missing)
    with pytest.raises(NotFound, match=r"nobody/x .* is not there.*NoSuchBucket: The spec"):
        register("s3://nobody/x")
    with pytest.raises(FileNotFoundError, match="NoSuchB"), stores._errors_named("s3://nobody"):
        stores._listed_by_boto3("s3://nobody", "s3://nobody/", "", {})
    with pytest.raises(InvalidArgument, match="no secrets"):
        register(url, storage_options={"secret_access_key": SECRET_KEY})
    with pytest.raises(InvalidArgument, match="needs anonymous=True"):
        register(url, storage_options={"endpoint": "http://198.51.100.1"})
    with monkeypatch.context() as asking:
        asking.setattr("moto.settings.INITIAL_NO_AUTH_ACTION_COUNT", 0)
        for one in (f"{url}/0.parquet", f"{url}/*"):
            with pytest.raises(FailedPrecondition, match=r"credentials.*: InvalidAccessKeyId: The"):
                register(one)
    monkeypatch.delenv("AWS_ENDPOINT_URL")
    given = public(store, "there/")
    assert numbers(register(url, storage_options=given)) == [*range(1000)]
    for name in store.environment:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    with pytest.raises(FailedPrecondition, match=r"no valid credentials.*no AWS credentials"):
        register(url)
    monkeypatch.setattr("boto3.DEFAULT_SESSION", None)
    with pytest.raises(PermissionError, match="no valid credentials"), stores._errors_named(url):
        stores._listed_by_boto3(url, f"s3://{BUCKET}/", "there", {})
    keys = f"aws_access_key_id={ACCESS_KEY}\naws_secret_access_key={SECRET_KEY}\nregion=us-east-1"
    (tmp_path / "config").write_text(f"[default]\nendpoint_url={store.proxy.url}\n{keys}")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    file_inspector._fork_server.close()
    assert numbers(register(url)) == [*range(1000)]


# The cache.


@pytest.fixture
def cached(store: ObjectStore, register: Register, tmp_path: Path) -> pb.RegisterDatasetRequest:
    """It has been read once."""
    (tmp_path / "files").mkdir()
    request = register(parquet(store, tmp_path / "files", tmp_path.name))
    byte_cache.use(str(tmp_path / "cache"), 1 << 30)
    assert numbers(request) == [*range(3000)]
    store.proxy.forget()
    return request


def ranges(tmp_path: Path) -> list[Path]:
    return sorted(path for path in (tmp_path / "cache").rglob("*") if path.is_file())


def test_a_second_epoch_of_the_same_server_fetches_nothing(
    store: ObjectStore, cached: pb.RegisterDatasetRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert numbers(cached) == [*range(3000)]
    assert store.proxy.gets == 0
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"{store.proxy.url}/")
    assert numbers(cached) == [*range(3000)]
    assert store.proxy.gets > 0


def test_a_damaged_cache_is_fetched_again(
    store: ObjectStore, cached: pb.RegisterDatasetRequest, tmp_path: Path
) -> None:
    for number, path in enumerate(ranges(tmp_path)):
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes((bytes(data), data[:-1], b"")[number % 3])
    byte_cache.use(str(tmp_path / "cache"), 1 << 30)  # as a worker that starts
    assert numbers(cached) == [*range(3000)]
    assert store.proxy.gets > 0


def test_a_changed_object_is_not_what_the_cache_has(
    store: ObjectStore, cached: pb.RegisterDatasetRequest, register: Register, tmp_path: Path
) -> None:
    url = f"s3://{BUCKET}/{tmp_path.name}"
    rewrite(store, f"{url}/0.parquet", (tmp_path / "files" / "2.parquet").read_bytes())
    assert numbers(register(url))[:1] == [2000]


def test_a_cache_keeps_to_its_size(
    store: ObjectStore, cached: pb.RegisterDatasetRequest, tmp_path: Path
) -> None:
    mine = tmp_path / "cache" / "mine.txt"
    mine.write_text("a file of somebody else")
    most = sum(path.stat().st_size for path in ranges(tmp_path)) // 2
    byte_cache.ByteCache(str(tmp_path / "cache"), most).evict()
    assert 0 < sum(path.stat().st_size for path in ranges(tmp_path) if path != mine) <= most
    byte_cache.use(str(tmp_path / "cache"), most)
    for _ in range(3):
        assert numbers(cached) == [*range(3000)]
        held = sum(path.stat().st_size for path in ranges(tmp_path) if path != mine)
        assert held <= most * 1.1
    assert mine.exists()


def test_a_cache_that_cannot_be_written(
    store: ObjectStore, register: Register, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "files").mkdir()
    request = register(parquet(store, tmp_path / "files", "unwritable"))
    byte_cache.use("/proc/forebay", 1 << 30)
    assert numbers(request) == [*range(3000)]
    assert caplog.text.count("cannot be written") == 1


def test_the_next_object_is_under_way_while_one_is_read(
    store: ObjectStore, register: Register, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last range of one is held until all of the next one has been asked for."""
    request = register(parquet(store, tmp_path, "next", files=2), split_records=2000)
    asked, waited, changed = collections.Counter[str](), list[bool](), threading.Condition()

    def before(path: str) -> None:
        with changed:
            asked[path] += 1
            changed.notify_all()
            if path.endswith("0.parquet") and asked[path] == 3:
                waited.append(changed.wait_for(lambda: [*asked.values()] == [3, 3], 20))

    monkeypatch.setattr(store.proxy, "before", before)
    assert numbers(request) == [*range(2000)]
    assert waited == [True], "its end, some strings, and a range"
    assert [*asked.values()] == [3, 3], "once"
    store.client.delete_object(Bucket=BUCKET, Key="next/1.parquet")
    found = opened(request).blocks(0)
    assert next(found).count == 1000
    with pytest.raises(FailedPrecondition, match=r"1\.parquet cannot be read .*deleted"):
        next(found)


def test_only_one_file_keeps_what_nobody_reads(
    store: ObjectStore, register: Register, tmp_path: Path
) -> None:
    """A reader may stop in the middle of each of many files."""
    url = parquet(store, tmp_path, "left", files=4)
    entries = decode(PythonDataset.FromString(register(url).python).files).files
    files = [byte_sources.RemoteFile(entry, {}) for entry in entries]
    for file in files:
        file.plan([(0, file.size)])
        assert bytes(file.read(0, 4)) == b"PAR1"
    assert [len(file._asked) for file in files] == [0, 0, 0, 1]
    assert bytes(files[0].read(0, 4)) == b"PAR1"


def test_a_worker_sends_credentials_to_no_address_that_a_dataset_names(
    store: ObjectStore, register: Register, tmp_path: Path
) -> None:
    """Whatever was registered, by whatever client."""
    request = register(parquet(store, tmp_path, "endpoints", files=1))
    dataset = PythonDataset.FromString(request.python)
    manifest = decode(dataset.files)
    with socket.create_server(("127.0.0.1", 0)) as thief:
        thief.setblocking(False)
        address = f"http://127.0.0.1:{thief.getsockname()[1]}"
        for wrong in (
            {"endpoint": address}, {"endpoint": address, "anonymous": "no"},
            {"region": "evil.example/x"}, {"aws_endpoint": address},
        ):  # fmt: skip
            manifest.options["storage"] = wrong
            dataset.files = manifest.encode()
            with pytest.raises(InvalidArgument, match=r"storage_options|needs anonymous|region="):
                [*FileRecords(dataset).blocks(0)]
        with pytest.raises(BlockingIOError):
            thief.accept()


def test_shuffled_records_are_asked_for_together(
    store: ObjectStore, register: Register, tmp_path: Path
) -> None:
    records = [*map(flat, written("tfrecord", tmp_path, [60]))]
    request = register(put(store, tmp_path, "together"), shuffle_records=True, split_records=60)
    store.proxy.faults = Faults(latency_s=0.2)
    assert sorted(all_of(request)) == sorted(records)
    assert store.proxy.most_at_once >= 8


@pytest.mark.parametrize(
    "pattern",
    [
        "d/**", "**", "**/*", "d/**/*", "[^a]", "[!a]", "a**/b", "?a", "[.]a", "[]a]", "a[]]b", "*",
        "d/*/x", "**/x", ".*", "d/.h/*", "[z-a]", "d/**/x",
    ],
)  # fmt: skip
def test_patterns_of_objects_are_those_of_glob(
    tmp_path: Path, pattern: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ["a", "^", "b", "]a", "a]b", ".a", "ax/b", "ay/c", "d/x", "d/e/x"]
    names += ["d/e/f/x", "d/.h/x", "d/e/.x", "xa"]
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path)
    expected = {name for name in glob.glob(pattern, recursive=True) if os.path.isfile(name)}
    assert {n for n in names if matches(n.split("/"), pattern.split("/"))} == expected


def test_objects_that_cannot_be_asked_for_are_left_out(
    store: ObjectStore, register: Register, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    url = parquet(store, tmp_path, "odd", files=2)
    for name in ("/0.parquet", "../0.parquet", "./a", "b//", "x\ty.parquet"):
        rewrite(store, f"{url}/{name}", b"PAR1")
    expected = register([f"{url}/0.parquet", f"{url}/1.parquet"]).python
    for some in (url, f"{url}/**/*.parquet"):
        caplog.clear()
        assert register(some).python == expected
        assert "has objects ['odd/../0.parquet', 'odd/./a', 'odd//0.parquet', 'odd/b" in caplog.text
    for name, of in (("a1", "0"), ("a[1]", "1")):  # brackets are no pattern
        rewrite(store, f"{url}/{name}.parquet", (tmp_path / f"{of}.parquet").read_bytes())
    assert numbers(register(f"{url}/a[1].parquet"))[:1] == [1000]


def test_what_fsspec_reads_is_compared_once_a_range(monkeypatch: pytest.MonkeyPatch) -> None:
    fs, path = fsspec.core.url_to_fs(url := "memory://forebay/a.bin")
    fs.pipe_file(path, b"0123456789")
    entry, cat = stores.head(url, {}), fs.cat_file
    info = mock.Mock(wraps=fs.info)
    monkeypatch.setattr(fs, "info", info)
    assert [stores.fetch(entry, {}, n, n + 2) for n in range(3)] == [b"01", b"12", b"23"]
    assert info.call_count == 3

    def replaced(*args: Any, **kwargs: Any) -> Any:
        data = cat(*args, **kwargs)
        fs.pipe_file(path, b"9876543210")
        return data

    monkeypatch.setattr(fs, "cat_file", replaced)
    for _ in range(2):  # while it is read, and before
        with pytest.raises(FailedPrecondition, match="and had 10 bytes with created"):
            stores.fetch(entry, {}, 0, 2)


def test_a_registered_cache_is_none(store: ObjectStore, register: Register, tmp_path: Path) -> None:
    request = register(parquet(store, tmp_path, "chosen", files=1))
    dataset = PythonDataset.FromString(request.python)
    dataset.cache_directory, dataset.cache_bytes = str(tmp_path / "chosen"), 1 << 30
    pipeline = PythonPipeline(dataset.SerializeToString(), request.sources, request.structure)
    with contextlib.closing(pipeline):
        assert sum(block.count for block in pipeline.run(None).blocks()) == 1000
    assert not (tmp_path / "chosen").exists()


def test_a_server_that_does_not_say_which_version_it_has(register: Register) -> None:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", "100")
            self.end_headers()

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/a.parquet"
        with pytest.raises(FailedPrecondition, match="neither an ETag nor a time"):
            register(url)
        server.shutdown()


def test_urls_that_cannot_be_asked_for(register: Register) -> None:
    for url, said in (
        ("s3://", "names no bucket"), ("s3://bucket//a", "an empty name"),
        ("s3://bucket/a/../b", r"an empty name, \., \.\. or a control character"),
        ("s3://bucket/a\tb", r"a\\tb' has .* a control character"),
        ("http://host/*.parquet", "HTTP has no lists"), ("HTTP://host/x?sig=SECRET", "be secret"),
        ("zip://a::http://u:SECRET@host/x.zip", "be secret"), ("https://SECRET@host/x", "secret"),
        ("s3://key:SECRET@bucket/a", "may be secret"), ("https://host/a?sig=SECRET", "be secret"),
    ):  # fmt: skip
        with pytest.raises(InvalidArgument, match=said) as refused:
            register(url)
        assert "SECRET" not in str(refused.value)
    for url, given in (("https://127.0.0.1/a", {"anonymous": True}), ("gs://a/b", {"region": "x"})):
        with pytest.raises(InvalidArgument, match=r"storage_options has .* does not take"):
            register(url, storage_options=given)


def test_a_fork_is_told_to_be_none(store: ObjectStore, tmp_path: Path) -> None:
    """It would wait for ever for threads that it does not have."""
    url = parquet(store, tmp_path, "forked", files=1)
    stores.head(f"{url}/0.parquet", {})
    read, write = os.pipe()
    if not (child := os.fork()):
        try:
            stores.head(f"{url}/0.parquet", {})
        except FailedPrecondition as error:
            os.write(write, str(error).encode())
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    assert b"method spawn" in os.read(read, 1000)
    os.close(read)
    os.close(write)
