"""A log that is cut, zeroed or altered anywhere reads as a prefix of its batches, or is Corrupt."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.storage import Corrupt, FileStorage, Record
from forebay.storage.proto.segment_pb2 import Batch
from forebay.storage.tfrecord import BrokenFrame, frame, is_torn, masked_crc, read_frames, unframe

from ..hypothesis_profiles import examples

SEGMENT_BYTES = 100
BATCHES = [
    [b"one", b"two"],
    [b"three"],
    [b""],
    [b"four" * 5],
    [b"five", b"", b"six"],
    [b"7"],
    [b"8"],
]


class Log:
    """A log of several segments, with the place of each batch."""

    def __init__(self, path: Path) -> None:
        self.path = path
        writer = FileStorage(path, SEGMENT_BYTES).open_writer("the test")
        for batch in BATCHES:
            writer.append(batch)
        writer.close()
        self.records = list(FileStorage(path).read())
        self.segments = sorted((path / "segments").iterdir())
        self.starts: dict[Path, list[int]] = {}  # of each frame
        self.ends: list[int] = []  # of each batch in the last segment
        for segment in self.segments:
            with segment.open("rb") as file:
                self.starts[segment] = [offset for offset, _ in read_frames(file.fileno())]
        self.last = self.segments[-1]
        self.content = {segment: segment.read_bytes() for segment in self.segments}

    def before(self, offset: int) -> list[Record]:
        """The records whose batches end at or before `offset` of the last segment."""
        data = self.content[self.last]
        starts = [*self.starts[self.last], len(data)]
        whole = sum(end <= offset for end in starts[1:])
        lost = sum(len(batch) for batch in BATCHES[len(BATCHES) - len(starts) + 1 + whole :])
        return self.records[: len(self.records) - lost]

    def restore(self) -> None:
        for segment, data in self.content.items():
            segment.write_bytes(data)


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Log:
    return Log(tmp_path_factory.mktemp("log") / "storage")


@pytest.fixture(autouse=True)
def _restored(log: Log) -> Iterator[None]:
    yield
    log.restore()


def read(log: Log) -> list[Record]:
    return list(FileStorage(log.path).read())


def place(error: Corrupt) -> tuple[str, int]:
    """The file and the byte that the error names."""
    file, byte = str(error).partition(": byte ")[::2]
    return file, int(byte.partition(":")[0])


def recover_and_go_on(log: Log, expected: list[Record], tmp_path: Path) -> None:
    """A writer opens what is left, and what it appends follows the prefix.

    Unless the first batch of the last segment is missing, which is known to have been there.
    """
    copy = tmp_path / "copy"
    shutil.copytree(log.path, copy)
    storage = FileStorage(copy, SEGMENT_BYTES)
    if len(expected) < int(log.last.stem):
        with pytest.raises(Corrupt, match="records were lost"):
            storage.open_writer("the next")
        assert (copy / "segments" / log.last.name).read_bytes() == log.last.read_bytes()
        shutil.rmtree(copy)
        return
    writer = storage.open_writer("the next")
    assert writer.last_sequence == len(expected)
    writer.append([b"next"])
    writer.close()
    next_record = Record(len(expected) + 1, writer.term, b"next")
    assert list(FileStorage(copy).read()) == [*expected, next_record]
    shutil.rmtree(copy)


def test_the_log_has_several_segments(log: Log) -> None:
    assert len(log.segments) == 3
    assert len(log.starts[log.last]) > 1
    assert [record.data for record in log.records] == [data for batch in BATCHES for data in batch]


def test_the_last_segment_cut_at_every_byte(
    log: Log, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data = log.content[log.last]
    for size in range(len(data)):
        log.last.write_bytes(data[:size])
        expected = log.before(size)
        assert read(log) == expected
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            recover_and_go_on(log, expected, tmp_path)
        assert ("a crash cut off" in caplog.text) == (
            size > log.starts[log.last][1] and size not in log.starts[log.last]
        )


@pytest.mark.parametrize("size", [0, 4096])
def test_the_last_segment_zeroed_from_every_byte(log: Log, tmp_path: Path, size: int) -> None:
    data = log.content[log.last]
    starts = log.starts[log.last]
    for offset in range(len(data)):
        if data[offset] == 0:
            continue  # nothing changes here
        log.last.write_bytes(data[:offset].ljust(max(size, len(data)), b"\0"))
        expected = log.before(offset)
        # Zeros from the middle of a frame's last 4 bytes on: no disk leaves those.
        ends = [end for end in [*starts, len(data)] if 0 < end - offset < 4]
        if ends and any(data[ends[0] - 4 : offset]):
            with pytest.raises(Corrupt):
                read(log)
        else:
            assert read(log) == expected
            recover_and_go_on(log, expected, tmp_path)


def test_an_earlier_segment_cut_at_every_byte_is_corrupt(log: Log) -> None:
    for segment in log.segments[:-1]:
        data = log.content[segment]
        for size in range(len(data)):
            segment.write_bytes(data[:size])
            with pytest.raises(Corrupt) as error:
                read(log)
            if size not in log.starts[segment]:  # else the next segment leaves a gap
                assert place(error.value)[0] == str(segment)
                assert place(error.value)[1] in log.starts[segment]
        log.restore()


def test_every_flipped_bit_is_corrupt(log: Log) -> None:
    for segment, data in log.content.items():
        for i in range(len(data)):
            for bit in range(8):
                segment.write_bytes(data[:i] + bytes([data[i] ^ 1 << bit]) + data[i + 1 :])
                with pytest.raises(Corrupt) as error:
                    read(log)
                frame_start = max(start for start in log.starts[segment] if start <= i)
                assert place(error.value) == (str(segment), frame_start)
        log.restore()


def test_a_missing_segment_is_corrupt(log: Log) -> None:
    log.segments[1].unlink()
    with pytest.raises(Corrupt, match="is the next in the log") as error:
        read(log)
    assert str(error.value).startswith(f"{log.segments[2]}: ")


def test_an_empty_last_segment_is_fine(log: Log, tmp_path: Path) -> None:
    # Made, and then a crash before its first append.
    path = log.path / "segments" / f"{len(log.records) + 1:020}.tfrecord"
    path.touch()
    try:
        assert read(log) == log.records
        recover_and_go_on(log, log.records, tmp_path)
    finally:
        path.unlink()


def append_batch(log: Log, batch: Batch) -> int:
    data = log.content[log.last]
    log.last.write_bytes(data + frame(batch.SerializeToString()))
    return len(data)


@pytest.mark.parametrize("wrong", ["sequence back", "sequence on", "term", "no records", "format"])
def test_a_whole_batch_that_does_not_follow_is_corrupt(log: Log, wrong: str) -> None:
    following = len(log.records) + 1
    batch = Batch(format=1, term=1, first_sequence=following, records=[b"x"])
    match wrong:
        case "sequence back":
            batch.first_sequence -= 1
        case "sequence on":
            batch.first_sequence += 1
        case "term":
            batch.term = 0
        case "no records":
            del batch.records[:]
        case "format":
            batch.format = 0
    offset = append_batch(log, batch)
    with pytest.raises(Corrupt) as error:
        read(log)
    assert place(error.value) == (str(log.last), offset)


def test_a_frame_that_holds_no_batch_is_corrupt(log: Log) -> None:
    log.last.write_bytes(log.content[log.last] + frame(b"\xff\xff no protobuf"))
    with pytest.raises(Corrupt, match="holds no batch"):
        read(log)


@settings(max_examples=examples(300))
@given(garbage=st.binary(min_size=1, max_size=80))
def test_garbage_at_the_end_adds_no_record(log: Log, garbage: bytes) -> None:
    log.last.write_bytes(log.content[log.last] + garbage)
    try:
        assert read(log) == log.records
    except Corrupt as error:
        assert place(error)[1] == len(log.content[log.last])


# -- one frame, any place in a file, sectors lost ------------------------------------------------


def frames_of(path: Path, data: bytes) -> tuple[list[bytes], bool]:
    """The whole frames of a file, and whether what follows them is torn."""
    path.write_bytes(data)
    frames = []
    with path.open("rb") as file:
        try:
            for _, payload in read_frames(file.fileno()):
                frames.append(payload)
        except BrokenFrame as broken:
            return frames, is_torn(broken.tail, broken.offset)
    return frames, True


@settings(max_examples=examples(400))
@given(st.data())
def test_a_write_that_lost_sectors_is_torn(log: Log, data: st.DataObject) -> None:
    first = frame(b"x" * data.draw(st.integers(0, 600)))
    payload = bytes(data.draw(st.lists(st.integers(1, 255), min_size=1, max_size=8))) * data.draw(
        st.integers(1, 300)
    )
    second = frame(payload)
    whole = first + second
    sectors = range(len(first) // 512, -(-len(whole) // 512))
    lost = data.draw(st.sets(st.sampled_from(sectors), min_size=1))
    image = bytearray(whole)
    for sector in lost:
        begin, end = max(sector * 512, len(first)), min((sector + 1) * 512, len(whole))
        image[begin:end] = bytes(end - begin)
    image += bytes(data.draw(st.sampled_from([0, 1, 100, 4096])))
    frames, torn = frames_of(log.path / "scratch", bytes(image))
    # A header of which a sector ends within its first 3 bytes cannot be judged: see is_torn.
    unclear = -len(first) % 512 in (1, 2, 3) and len(first) // 512 in lost
    unchanged = bytes(image).rstrip(b"\0") == whole.rstrip(b"\0")
    assert frames == ([first[12:-4], payload] if unchanged else [first[12:-4]])
    assert torn or unclear


@settings(max_examples=examples(200))
@given(st.data())
def test_rot_in_a_large_last_frame_is_not_torn(log: Log, data: st.DataObject) -> None:
    first = frame(b"x" * data.draw(st.integers(0, 600)))
    second = frame(b"payload" * data.draw(st.integers(0, 300)))
    at = data.draw(st.integers(0, len(second) - 1))
    changed = bytearray(second)
    changed[at] ^= data.draw(st.integers(1, 255))
    frames, torn = frames_of(log.path / "scratch", first + bytes(changed))
    assert frames == [first[12:-4]]
    assert not torn or not any(changed[-4:])


def test_a_lost_header_before_a_whole_frame_is_not_torn(log: Log) -> None:
    # Something was synced behind it, so it had been synced too.
    lost = bytearray(frame(b"y" * 1000))
    lost[:512] = bytes(512)
    assert is_torn(bytes(lost), 0)
    assert not is_torn(bytes(lost) + frame(b"later"), 0)


@given(st.binary(max_size=300))
def test_unframe(payload: bytes) -> None:
    whole = frame(payload)
    assert unframe(whole) == payload
    assert unframe(whole + b"\0") is None
    for size in range(len(whole)):
        assert unframe(whole[:size]) is None


def test_a_length_beyond_the_file_allocates_nothing(log: Log) -> None:
    # As long as a header can say, with a right checksum.
    length = (2**63 - 1).to_bytes(8, "little")
    header = length + masked_crc(length).to_bytes(4, "little")
    assert frames_of(log.path / "scratch", frame(b"a") + header + b"rest") == ([b"a"], True)


def test_large_frames_are_read_across_chunks(log: Log) -> None:
    payloads = [bytes([i]) * (700_000 + i) for i in range(5)]
    data = b"".join(map(frame, payloads))
    assert frames_of(log.path / "scratch", data) == (payloads, True)
