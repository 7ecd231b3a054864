"""TFRecord files in chains of Beam's transforms: read as Beam reads them."""

from __future__ import annotations

import contextlib
import gzip
import io
import pathlib
import re
from collections.abc import Callable, Iterator

import apache_beam as beam
import pytest
import tensorflow as tf

from forebay.service.errors import PipelineError
from forebay.service.pipelines.beam import internals, tfrecords
from forebay.service.pipelines.beam.translation import translate
from forebay.storage.tfrecord import frame

from .functions import numbers, pipeline_of


@pytest.mark.parametrize("chunk_bytes", [5, 40, 1 << 20])
def test_tfrecords_are_read_as_beam_reads_them(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, chunk_bytes: int
) -> None:
    """Wherever the file is cut, or broken; the same records, and then the same error."""
    monkeypatch.setattr(tfrecords, "_CHUNK_BYTES", chunk_bytes)
    monkeypatch.setattr(tfrecords, "_MAX_KNOWN", 2)
    whole = b"".join(map(frame, [b"one", b"", b"and two", b"six", b"f" * 50, b"one"]))
    broken = [bytes([*whole[:at], whole[at] ^ 4, *whole[at + 1 :]]) for at in range(len(whole))]
    cut = [whole[:at] for at in range(1, len(whole))]
    packed = gzip.compress(whole)
    two = packed + packed
    damaged = [two[:-3], packed + b"junk" + packed[4:], packed + b"more than a header",
               two[:-8] + bytes(8), gzip.compress(whole + whole[:9]), gzip.compress(broken[40]),
               packed + gzip.compress(broken[5])]  # fmt: skip
    contents = [("file", content) for content in (whole, *broken, *cut)]
    contents += [("file.gz", content) for content in (packed, two, *damaged)]
    for name, content in contents:
        path = tmp_path / name
        path.write_bytes(content)
        (bundle,) = beam.io.ReadFromTFRecord(str(path))._source.split(1 << 30)
        found = internals.tfrecord_file(bundle.source)
        assert found is not None
        theirs = outcome(bundle.source.read(bundle.source.get_range_tracker(None, None)))
        assert outcome(tfrecords.records(*found)) == theirs


def test_records_before_a_store_fails_come_first(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many of them as Beam gives, which asks for less at once; then the store's error."""
    path = tmp_path / "file"
    path.write_bytes(frame(b"one") + frame(b"two") + frame(b"three"))

    class Fails(io.BytesIO):
        def read(self, size: int | None = -1) -> bytes:
            if self.tell() + (size or 0) > 40:
                raise OSError("the store is away")
            return super().read(size)

    (bundle,) = beam.io.ReadFromTFRecord(str(path))._source.split(1 << 30)
    found = internals.tfrecord_file(bundle.source)
    assert found is not None
    content = path.read_bytes()
    monkeypatch.setattr(type(found[0]), "open_file", lambda *_: Fails(content))
    assert outcome(tfrecords.records(*found)) == [
        b"one", b"two", repr(OSError("the store is away"))
    ]  # fmt: skip


def outcome(records: Iterator[bytes]) -> list[object]:
    """What they are, and what reading them ends with."""
    found: list[object] = []
    try:
        found.extend(records)
    except Exception as error:  # noqa: BLE001 - it is compared
        found.append(repr(error))
    return found


CHANGES: dict[str, Callable[[pathlib.Path], object]] = {
    "vanished": pathlib.Path.unlink,
    "cut": lambda file: file.write_bytes(file.read_bytes()[:-3]),
    "broken": lambda file: file.write_bytes(file.read_bytes()[:-6] + b"!!!!!!"),
}


@pytest.mark.parametrize("all_of_them", [False, True], ids=["read", "read all"])
def test_a_file_that_has_gone_or_breaks_is_named(tmp_path: pathlib.Path, all_of_them: bool) -> None:
    """With the worker; and all elements before came."""
    for how, change in CHANGES.items():
        file = tmp_path / f"{how}.tfrecord"
        with tf.io.TFRecordWriter(str(file)) as records:
            for n in range(3):
                records.write(b"%d" % n)
        p = beam.Pipeline()
        if all_of_them:
            found = p | beam.Create([str(file)]) | beam.io.ReadAllFromTFRecord()
        else:
            found = p | beam.io.ReadFromTFRecord(str(file))
        chain, splits = translate(found | beam.Map(int))
        change(file)
        came: list[int] = []
        with (
            contextlib.closing(pipeline_of(chain, splits, packages=["apache-beam"])) as pipeline,
            pytest.raises(
                PipelineError, match=rf"(?s)worker w:1: split 0, .*{re.escape(str(file))}"
            ),
        ):
            for block in pipeline.run(None).blocks():
                came += numbers(iter([block]))
        assert came == ([] if how == "vanished" else [0, 1])
