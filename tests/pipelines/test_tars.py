"""Tar files of WebDataset as others write them, held against the webdataset package."""

from __future__ import annotations

import io
import random
import re
import tarfile
import tracemalloc
from array import array
from pathlib import Path
from typing import Any

import pytest
import webdataset

from forebay.service.errors import InvalidArgument
from forebay.service.pipelines.files import record_index, tars
from forebay.service.pipelines.files.byte_sources import opened_now
from forebay.storage.errors import Corrupt

from ..record_files import Register, all_records


def write(path: Path, *names: str) -> None:
    """Members whose data are their names."""
    with tarfile.open(path, "w") as tar:
        for name in names:
            info = tarfile.TarInfo(name)
            info.size = len(name.encode(errors="surrogateescape"))
            tar.addfile(info, io.BytesIO(name.encode(errors="surrogateescape")))


def samples_of(path: Path) -> list[dict[str, Any]]:
    """As webdataset has them."""
    with open(path, "rb") as stream:
        members = webdataset.tariterators.tar_file_expander([{"url": "", "stream": stream}])
        return [*webdataset.tariterators.group_by_keys(members)]


def test_extensions_that_differ_are_one_column(register: Register, tmp_path: Path) -> None:
    """The first one that a sample has, as webdataset's "jpg;jpeg;png"."""
    path = tmp_path / "a.tar"
    names = ["0.jpg", "0.cls", "1.JPEG", "1.cls", "2.PNG", "2.jpg", "2.cls", "3.png", "3.txt"]
    write(path, *names)
    image = ["jpg", "jpeg", "png"]
    expected = [
        {
            "image": webdataset.filters.getfirst(sample, image),
            "label": sample.get("cls", b"none"),
            "key": sample["__key__"].encode(),
        }
        for sample in samples_of(path)
    ]
    columns = {"image": image, "label": "cls", "key": "__key__"}
    for shuffled in (False, True):
        request = register(path, columns=columns, fill={"label": "none"}, shuffle_records=shuffled)
        found = all_records(request)
        assert sorted(found, key=lambda record: bytes(record["key"])) == expected
    assert len(all_records(register(path, columns=["__key__"]))) == 4
    with pytest.raises(
        InvalidArgument,
        match=r"sample '3' has \['png', 'txt'\], and sample '0' has \['cls', 'jpg'\].*fill",
    ):
        register(path, columns=columns)
    with pytest.raises(InvalidArgument, match=r"sample .* write samples with the same extensions"):
        register(path)
    filled = all_records(
        register(path, fill=dict.fromkeys(["jpg", "jpeg", "png", "cls", "txt"], b""))
    )
    assert [one["jpg"] for one in filled] == [b"0.jpg", b"", b"2.jpg", b""]


def test_a_file_without_a_label(register: Register, tmp_path: Path) -> None:
    write(tmp_path / "a.tar", "0.jpg", "1.jpg")
    write(tmp_path / "b.tar", "2.jpg", "2.cls")
    columns = {"image": "jpg", "label": ["cls", "txt"]}
    found = all_records(register(tmp_path, columns=columns, fill={"label": b"?"}))
    assert [one["label"] for one in found] == [b"?", b"?", b"2.cls"]
    assert len(all_records(register(tmp_path, columns=columns, missing="skip"))) == 1
    with pytest.raises(InvalidArgument, match=r"a\.tar has no columns \['cls', 'txt'\]"):
        register(tmp_path, columns=columns)
    columns["label"] = "clas"
    for how in ({"fill": {"label": b"?"}}, {"missing": "skip"}):
        with pytest.raises(
            InvalidArgument, match=r"no sample of .* has an .* \['label'\]: correct"
        ):
            register(tmp_path, columns=columns, **how)


def test_a_column_that_all_samples_have_can_be_read_alone(
    register: Register, tmp_path: Path
) -> None:
    write(tmp_path / "a.tar", "0.cls", "0.jpg", "1.jpg", "2.jpg", "2.txt")
    write(tmp_path / "b.tar", "3.jpg")
    found = all_records(register(tmp_path, columns=["jpg"]))
    assert found == [{"jpg": f"{n}.jpg".encode()} for n in range(4)]
    for columns, said in (
        (["jpg", "cls"], "has no columns|sample '1' has"),
        ({"x": ["gif", "bmp"]}, r"has no columns \['gif', 'bmp'\]: give some of .*'cls', 'jpg'"),
        ({"x": []}, "columns="),
        ({}, "columns="),
        ({"x": 5}, "columns="),
        ({1: "jpg"}, "columns="),
        ({"x\udcff": "jpg"}, r"\['x.udcff'\] of `columns` or `fill` is no UTF-8"),
        ({"x": ["jpg", "x\udcff"]}, r"\['x.udcff'\] of `columns`"),
    ):
        with pytest.raises(InvalidArgument, match=said):
            register(tmp_path, columns=columns)
    with pytest.raises(InvalidArgument, match="is no UTF-8"):
        register(tmp_path, columns=["jpg"], fill={"jpg": "\udcff"})
    with pytest.raises(InvalidArgument, match=r"fill has column 'clz', and of .*a\.tar are read"):
        register(tmp_path, columns=["jpg"], fill={"clz": b""})


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (["0.a", "1.a", "0.b", "1.b"], "is in the wrong order: members of sample '0' do not foll"),
        (["x.__key__", "x.a"], "extension '__key__', which WebDataset has for itself"),
        (["x.a", "x.__url__"], "extension '__url__', which WebDataset has for itself"),
        (["x.a\udcff"], r"columns \['a.udcff'\], whose names are no UTF-8"),
        (["x.a", "x.A"], "two members of one extension, 'a'"),
        ([f"x.e{n}" for n in range(2001)], "'x' has more than 2000 members.*name members like"),
        ([f"x{n}.{n}.jpg" for n in range(5000)], "4096 different sets .*name members like 000007"),
        ([f"x{n}.v{n}.1.jpg" for n in range(3)], "name members like 000007.jpg"),
    ],
)
def test_members_that_make_no_samples_are_refused(
    register: Register, tmp_path: Path, names: list[str], said: str
) -> None:
    """Where webdataset refuses them, too, or would read something else than is meant."""
    path = tmp_path / "a.tar"
    write(path, *names)
    with pytest.raises(InvalidArgument, match=said) as refused:
        register(path)
    assert len(str(refused.value)) < 600
    if "for itself" in said or "one ext" in said:
        with pytest.raises(ValueError, match="duplicate file name"):
            samples_of(path)


def test_names_with_dots_are_one_record_with_a_warning(
    register: Register, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for shard in range(2):
        write(tmp_path / f"{shard}.tar", *(f"img.v1.{n:06}.jpg" for n in range(100)))
    for _ in range(2):  # with an index, too
        caplog.clear()
        (first, second) = all_records(register(tmp_path))
        assert len(first) == len(second) == 101
        assert caplog.text.count("100 members make 1 records") == 1
        assert "name members like 000007.jpg" in caplog.text
        assert len(caplog.text) < 700
    for columns in (["jpg"], {"image": ["jpg", "png"]}):
        with pytest.raises(InvalidArgument, match=r"has no columns .* and 96 more") as refused:
            register(tmp_path, columns=columns)
        assert len(str(refused.value)) < 500
    write(tmp_path / "2.tar", *(f"img.v2.{n:06}.jpg" for n in range(100)))
    with pytest.raises(InvalidArgument, match=r"2\.tar has records of") as refused:
        register(tmp_path)
    assert len(str(refused.value)) < 1000
    caplog.clear()
    write(tmp_path / "3.tar", "0.left.jpg", "0.right.jpg", "0.mp3", "0.mp4")
    register(tmp_path / "3.tar")
    assert not caplog.text


def test_links_and_hidden_files_in_a_tar_are_left_out_with_a_warning(
    register: Register, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "a.tar"
    write(path, "d/._0.a", "d/0.a", "d/.DS_Store", "d/1.a", "._d", "__x__/2.a")
    assert [one["__key__"] for one in all_records(register(path))] == [b"d/0", b"d/1"]
    assert "2 members are hidden files, or links" in caplog.text
    with tarfile.open(path, "w") as tar:
        tar.addfile(tarfile.TarInfo("0.a"))
        for name, kind in (("1.a", tarfile.LNKTYPE), ("2.a", tarfile.SYMTYPE)):
            link = tarfile.TarInfo(name)
            link.type, link.linkname = kind, "0.a"
            tar.addfile(link)
    assert len(all_records(register(path))) == len(samples_of(path)) == 1
    assert "2 members are hidden files, or links" in caplog.text


def test_an_index_of_an_earlier_version_is_read_and_made_again(
    register: Register, tmp_path: Path
) -> None:
    """It does not say which extensions there are."""
    path, index = tmp_path / "a.tar", tmp_path / "a.tar.forebay-index"
    write(path, "0.a", "1.a", "1.b")
    request = register(path, columns=["a"])
    whole = index.read_bytes()
    source = opened_now(str(path), {})
    walk = tars._Grouping(str(path))
    record_index.made(source, {}, lambda of: (array("Q", walk.boundaries(of)), b""))
    assert len(index.read_bytes()) == 40 + 3 * 8 < len(whole)
    assert all_records(request) == [{"a": b"0.a"}, {"a": b"1.a"}]
    with pytest.raises(InvalidArgument, match="sample '0' has"):
        register(path, columns=["a", "b"])
    assert index.read_bytes() == whole


@pytest.mark.parametrize("shuffled", [False, True])
def test_samples_that_lack_a_column_can_be_left_out(
    register: Register, tmp_path: Path, caplog: pytest.LogCaptureFixture, shuffled: bool
) -> None:
    """They are no records, so that the others have numbers, and their count is known."""
    expected = []
    for shard, labelled in enumerate((4, 1, 7)):
        names = [f"{shard}{n:02}.{ext}" for n in range(20) for ext in ("jpg", "cls", "txt")]
        names = [one for one in names if one[-3:] != "cls" or int(one[1:-4]) % labelled == 0]
        names = [one for one in names if one != "003.jpg"]
        write(tmp_path / f"{shard}.tar", *names)
        expected += [
            {"label": sample["cls"], "image": sample["jpg"]}
            for sample in samples_of(tmp_path / f"{shard}.tar")
            if {"cls", "jpg"} <= {*sample}
        ]
    columns = {"image": ["png", "jpg"], "label": "cls"}
    how: dict[str, Any] = {"missing": "skip", "shuffle_records": shuffled, "split_records": 4}
    request = register(tmp_path, columns=columns, **how)
    assert sum(request.lengths) == len(expected) == 28
    assert "32 of 60 samples lack a column" in caplog.text
    found = all_records(request)
    assert (sorted(found, key=_label) if shuffled else found) == expected
    some = register(tmp_path, columns=columns, fill={"label": b"?"}, **how)
    assert sum(some.lengths) == 59
    assert sum(register(tmp_path, **how).lengths) == 28  # all extensions
    write(tmp_path / "no.tar", "0.jpg", "1.cls")
    with pytest.raises(InvalidArgument, match="have no records"):
        register(tmp_path / "no.tar", columns=columns, **how)
    with pytest.raises(InvalidArgument, match="missing='no' must be 'raise' or 'skip'"):
        register(tmp_path / "no.tar", missing="no")


def _label(record: dict[str, Any]) -> bytes:
    return bytes(record["label"])


def test_names_are_taken_apart_as_webdataset_does() -> None:
    """Held against its regular expression, which takes a time that grows with the square."""
    pattern = re.compile(r"^((?:.*/|)[^.]+)[.]([^/]*)$")
    draw = random.Random(1)
    for _ in range(20_000):
        name = "".join(draw.choices("ab./_", k=draw.randrange(9)))
        member = tarfile.TarInfo(name)
        found = pattern.match(name)
        if found is None or found[1].endswith("/") or re.match(r"__[^/]*__($|/)", name):
            assert tars._named(member) is None, name
        else:
            assert tars._named(member) == (found[1], found[2]), name


def _extended(kind: bytes, data: bytes, size: int | None = None) -> bytes:
    info = tarfile.TarInfo("./@LongLink")
    info.type, info.size = kind, len(data) if size is None else size
    return info.tobuf(tarfile.GNU_FORMAT) + data + bytes(-len(data) % 512)


PAX, LONG, SHARED = tarfile.XHDTYPE, tarfile.GNUTYPE_LONGNAME, tarfile.XGLTYPE
HOSTILE = {
    "many long names": (_extended(LONG, b"a.x\0") * 20_000, "more than 65536 bytes before"),
    "many pax headers": (_extended(PAX, b"8 a=bcd\n") * 20_000, "more than 65536 bytes before"),
    "a large pax header": (_extended(PAX, bytes(200 << 20)), "more than 65536 bytes before"),
    "pax headers for all": (_extended(SHARED, b"8 a=bcd\n" * 600), "or 4096 for all"),
    "digits": (_extended(PAX, b"60008 a=" + b"1" * 59_999 + b"\n"), "very many digits"),
    "keys": (_extended(PAX, b"2 " * 30_000 + b"="), "a pax header is damaged"),
    "a size below 0": (_extended(PAX, b"", -512), "before a member"),
    "a size that goes back": (_extended(PAX, b"14 size=-1536\n"), "has -1536 bytes"),
}
"""Each takes tarfile long, or a multiple of its bytes in memory."""


@pytest.mark.parametrize(("header", "said"), [*HOSTILE.values()], ids=[*HOSTILE])
def test_headers_that_take_much_are_refused(
    register: Register, tmp_path: Path, header: bytes, said: str
) -> None:
    path = tmp_path / "a.tar"
    write(path, "0.jpg", "1.jpg")
    whole = path.read_bytes()
    with path.open("wb") as file:
        for part in (whole[:1024], header, whole[1024:]):
            file.write(part)
    tracemalloc.start()
    try:
        with pytest.raises(Corrupt, match=f"a.tar.*{said}"):
            register(path)
        assert tracemalloc.get_traced_memory()[1] < 10 << 20
    finally:
        tracemalloc.stop()


def test_names_of_slashes_take_no_time(register: Register, tmp_path: Path) -> None:
    """They took a time that grew with the square, here of minutes altogether."""
    path = tmp_path / "a.tar"
    names = ["/" * 60_000 + str(number) for number in range(100)]
    write(path, *names, "0.jpg")
    assert all_records(register(path, columns=["jpg"])) == [{"jpg": b"0.jpg"}]
