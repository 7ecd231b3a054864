"""The contents of real files, in the natural form for each way of reading.

A content is a list of records, the same in each run. tf.data reads TFRecord files and lines of
text. A PyTorch dataset reads elements by number from one mapped file, and images from a folder of
JPEGs. Grain reads ArrayRecord files. All stay in the page cache.
"""

from __future__ import annotations

import functools
import io
import pathlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..storage.tfrecord import frame
from .machine import require

RECORD_BYTES = 1024
PIXELS = 224
QUALITY = 90
SHORTEST, LONGEST = 50, 2_000  # tokens
VOCABULARY = 50_000
LINE_BYTES = 20, 200
READ = ", read"  # the suffix of a case's name for `read`
AT_MOST_ONCE = ", each element at most once"  # the same, of an epoch of many files
ORDERED = ", in order"  # the same, by an ordered read
AT_LEAST_ONCE = ", each element at least once"  # the same, by claims


def _records(random: np.random.Generator, count: int) -> Iterator[bytes]:
    yield from (random.bytes(RECORD_BYTES) for _ in range(count))


def _images(random: np.random.Generator, count: int) -> Iterator[bytes]:
    yield from (random.bytes(PIXELS * PIXELS * 3) for _ in range(count))


def _jpegs(random: np.random.Generator, count: int) -> Iterator[bytes]:
    """Pieces of scikit-learn's photographs, cut at different sizes and scaled to one."""
    require("sklearn", "PIL")
    from PIL import Image
    from sklearn.datasets import load_sample_images

    photographs = [Image.fromarray(image) for image in load_sample_images().images]
    for number in range(count):
        photograph = photographs[number % len(photographs)]
        side = int(random.integers(PIXELS, min(photograph.size)))
        left, top = (int(random.integers(0, whole - side + 1)) for whole in photograph.size)
        piece = photograph.resize((PIXELS, PIXELS), box=(left, top, left + side, top + side))
        encoded = io.BytesIO()
        piece.save(encoded, "JPEG", quality=QUALITY)
        yield encoded.getvalue()


def _tokens(random: np.random.Generator, count: int) -> Iterator[bytes]:
    for length in random.integers(SHORTEST, LONGEST + 1, count):
        yield random.integers(0, VOCABULARY, length, np.int64).tobytes()


def _lines(random: np.random.Generator, count: int) -> Iterator[bytes]:
    """Hexadecimal digits, which contain no newline."""
    for length in random.integers(*LINE_BYTES, count):
        yield random.bytes(int(length)).hex()[: int(length)].encode()


@dataclass(frozen=True, kw_only=True)
class Content:
    """Records, and the path of each form of them in the directory of a row's files."""

    name: str
    records: Callable[[np.random.Generator, int], Iterator[bytes]]
    count: int
    quick_count: int
    text: bool = False  # lines, instead of TFRecord
    pictures: bool = False  # for PyTorch, a folder of JPEG files

    def files(self, directory: pathlib.Path) -> pathlib.Path:
        """The file that tf.data reads."""
        return directory / f"{self.name}.{'txt' if self.text else 'tfrecord'}"

    def numbered(self, directory: pathlib.Path) -> pathlib.Path:
        """One file with all records, or a folder with a file for each."""
        return directory / f"{self.name}.{'jpegs' if self.pictures else 'bin'}"

    def ends(self, directory: pathlib.Path) -> pathlib.Path:
        """The file with the offset of each record's end in the one file."""
        return directory / f"{self.name}.ends.npy"

    def array_record(self, directory: pathlib.Path) -> pathlib.Path:
        return directory / f"{self.name}.array_record"

    def write(self, directory: pathlib.Path, *, quick: bool, forms: set[str]) -> int:
        """Write it for tf.data, and for the other `forms` ("torch", "grain"), where that is not
        there already; how many records.
        """
        count = self.quick_count if quick else self.count
        wanted = {"tf.data": self.files, "torch": self.numbered, "grain": self.array_record}
        missing = {
            form
            for form, path in wanted.items()
            if form in {"tf.data", *forms} and not path(directory).exists()
        }
        records = list(self.records(np.random.default_rng(0), count)) if missing else []
        if "torch" in missing:
            self._write_numbered(directory, records)
        if "grain" in missing:
            _write_array_record(self.array_record(directory), records)
        if "tf.data" in missing:
            framed = (r + b"\n" for r in records) if self.text else map(frame, records)
            self.files(directory).write_bytes(b"".join(framed))
        return count

    def _write_numbered(self, directory: pathlib.Path, records: list[bytes]) -> None:
        path = self.numbered(directory)
        if self.pictures:
            path.mkdir()
            for number, record in enumerate(records):
                (path / f"{number:06}.jpg").write_bytes(record)
        else:
            path.write_bytes(b"".join(records))
            np.save(self.ends(directory), np.cumsum([len(record) for record in records]))


def _write_array_record(path: pathlib.Path, records: list[bytes]) -> None:
    from array_record.python.array_record_module import ArrayRecordWriter

    writer: Any = ArrayRecordWriter(str(path), "group_size:1")  # as Grain's documentation advises
    for record in records:
        writer.write(record)
    writer.close()


RECORDS = Content(name="records", records=_records, count=32_768, quick_count=64)
IMAGES = Content(name="images", records=_images, count=512, quick_count=8)
JPEGS = Content(name="jpegs", records=_jpegs, count=512, quick_count=8, pictures=True)
TOKENS = Content(name="tokens", records=_tokens, count=4_096, quick_count=32)
LINES = Content(name="lines", records=_lines, count=262_144, quick_count=64, text=True)


def _as_string(record: Any) -> bytes:
    return bytes(record)


def _as_bytes(record: Any) -> Any:
    return np.frombuffer(record, np.uint8)


def _as_image(record: Any) -> Any:
    return _as_bytes(record).reshape(PIXELS, PIXELS, 3)


def _as_tokens(record: Any) -> Any:
    return np.frombuffer(record, np.int64)


def _decoded(record: Any) -> Any:
    from PIL import Image

    return np.array(Image.open(io.BytesIO(record)))


@dataclass(frozen=True)
class FileCase:
    """A content, and how it is read. The process that computes elements also batches them."""

    what: str
    content: Content
    decode: Callable[[Any], Any]  # from a record, as bytes or bytearray, to NumPy
    pack: int  # records per transfer from a loader's process to the trainer's
    batched: bool = True  # else, the trainer unpacks the records one by one

    @property
    def ragged(self) -> bool:
        """Whether records differ in length; batches are padded."""
        return self.content == TOKENS  # also in a process that it was sent to

    @property
    def batch(self) -> int:
        return self.pack if self.batched else 1


_RECORDS = functools.partial(FileCase, content=RECORDS, decode=_as_bytes)
_STRINGS = functools.partial(FileCase, decode=_as_string)
_IMAGES = functools.partial(FileCase, content=IMAGES, decode=_as_image)
_JPEGS = functools.partial(FileCase, content=JPEGS, decode=_decoded)
_TOKENS = functools.partial(FileCase, content=TOKENS, decode=_as_tokens)
FILE_CASES = {
    "file_records": _STRINGS("1 KB records, strings", pack=256, batched=False, content=RECORDS),
    "file_batches_64kb": _RECORDS("64 KB batches of 1 KB records, uint8", pack=64),
    "file_batches_256kb": _RECORDS("256 KB batches of 1 KB records, uint8", pack=256),
    "file_batches_1mb": _RECORDS("1 MB batches of 1 KB records, uint8", pack=1_024),
    "file_batches_4mb": _RECORDS("4 MB batches of 1 KB records, uint8", pack=4_096),
    "file_images": _IMAGES("150 KB raw images, uint8", pack=8, batched=False),
    "file_image_batches": _IMAGES("4.8 MB batches of raw images, uint8", pack=32),
    "file_jpegs": _JPEGS("JPEG photographs, decoded, 150 KB uint8", pack=8, batched=False),
    "file_jpeg_batches": _JPEGS("4.8 MB batches of decoded JPEG photographs", pack=32),
    "file_tokens": _TOKENS("sequences of 50–2,000 int64 tokens", pack=64, batched=False),
    "file_token_batches": _TOKENS("padded batches of 32 such sequences", pack=32),
    "file_lines": _STRINGS(
        "lines of text of 20–200 bytes, strings", pack=1_000, batched=False, content=LINES
    ),
    "file_line_batches": _STRINGS("batches of 1,000 such lines", pack=1_000, content=LINES),
}
"""By row."""
