"""The contents of real files: lists of records, the same in each run, as TFRecord files or lines of
text. All stay in the page cache.
"""

from __future__ import annotations

import io
import pathlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

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
    """Records, and the file of them in the directory of a row's files."""

    name: str
    records: Callable[[np.random.Generator, int], Iterator[bytes]]
    count: int
    quick_count: int
    text: bool = False  # lines, instead of TFRecord

    def file(self, directory: pathlib.Path) -> pathlib.Path:
        return directory / f"{self.name}.{'txt' if self.text else 'tfrecord'}"

    def write(self, directory: pathlib.Path, *, quick: bool) -> None:
        """Write it where it is not there already."""
        file = self.file(directory)
        if not file.exists():
            count = self.quick_count if quick else self.count
            records = self.records(np.random.default_rng(0), count)
            framed = (r + b"\n" for r in records) if self.text else map(frame, records)
            file.write_bytes(b"".join(framed))


RECORDS = Content(name="records", records=_records, count=32_768, quick_count=64)
IMAGES = Content(name="images", records=_images, count=512, quick_count=8)
JPEGS = Content(name="jpegs", records=_jpegs, count=512, quick_count=8)
TOKENS = Content(name="tokens", records=_tokens, count=4_096, quick_count=32)
LINES = Content(name="lines", records=_lines, count=262_144, quick_count=64, text=True)


@dataclass(frozen=True)
class FileCase:
    """A content, and how it is read."""

    what: str
    content: Content
    batch: int = 1  # 1: the records one by one; batches of tokens are padded


FILE_CASES = {
    "file_records": FileCase("1 KB records, strings", RECORDS),
    "file_batches_64kb": FileCase("64 KB batches of 1 KB records, uint8", RECORDS, 64),
    "file_batches_256kb": FileCase("256 KB batches of 1 KB records, uint8", RECORDS, 256),
    "file_batches_1mb": FileCase("1 MB batches of 1 KB records, uint8", RECORDS, 1_024),
    "file_batches_4mb": FileCase("4 MB batches of 1 KB records, uint8", RECORDS, 4_096),
    "file_images": FileCase("150 KB raw images, uint8", IMAGES),
    "file_image_batches": FileCase("4.8 MB batches of raw images, uint8", IMAGES, 32),
    "file_jpegs": FileCase("JPEG photographs, decoded, 150 KB uint8", JPEGS),
    "file_jpeg_batches": FileCase("4.8 MB batches of decoded JPEG photographs", JPEGS, 32),
    "file_tokens": FileCase("sequences of 50–2,000 int64 tokens", TOKENS),
    "file_token_batches": FileCase("padded batches of 32 such sequences", TOKENS, 32),
    "file_lines": FileCase("lines of text of 20–200 bytes, strings", LINES),
    "file_line_batches": FileCase("batches of 1,000 such lines", LINES, 1_000),
}
"""By row."""
