"""Files of tokens, held against NumPy, and against Megatron's layout as its writer has it."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import numpy as np
import pytest

from forebay.service.errors import FailedPrecondition, ForebayError, InvalidArgument
from forebay.service.order import permuted_many
from forebay.service.pipelines.files.manifest import decode, difference
from forebay.service.proto.python_pb2 import PythonDataset
from forebay.storage.errors import Corrupt

from ..record_files import MEGATRON_DTYPES, Register, all_records, records, write_megatron


@pytest.mark.parametrize("dtype", MEGATRON_DTYPES)
def test_megatrons_dtypes(register: Register, tmp_path: Path, dtype: str) -> None:
    write_megatron(tmp_path / "a", [[1, 2], [], [3]], dtype)
    found = all_records(register(tmp_path / "a.bin", format="tokens"))
    assert [one.tolist() for one in found] == [[1, 2], [], [3]]
    assert {one.dtype.name for one in found} == {dtype}
    windows = all_records(register(tmp_path / "a.bin", tokens={"window": 2}))
    assert [one.tolist() for one in windows] == [[1, 2]]


def test_tokens_behind_the_last_window_are_counted(
    register: Register, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for number, count in enumerate((11, 4, 3)):
        np.arange(count, dtype=np.uint16).tofile(tmp_path / f"{number}.bin")
    request = register(tmp_path, tokens={"dtype": "uint16", "window": 4})
    assert [one.tolist() for one in all_records(request)] == [
        [0, 1, 2, 3], [4, 5, 6, 7], [0, 1, 2, 3],
    ]  # fmt: skip
    assert "6 tokens are behind the last whole windows" in caplog.text
    assert '"shape":[4]' in request.structure


def test_documents_may_lack_their_end_and_have_an_index_for_each_token(
    register: Register, tmp_path: Path
) -> None:
    tokens = np.array([5, 0, 0, 7, 8], np.uint16)
    tokens.tofile(tmp_path / "a.bin")
    np.save(tmp_path / "b.npy", tokens)
    expected = {0: [[5, 0], [0], [7, 8]], 8: [[5, 0, 0, 7, 8]], 9: [[5, 0, 0, 7, 8]]}
    requests = {
        (name, eod): register(tmp_path / name, tokens={"eod": eod} | how)
        for eod in expected
        for name, how in (("a.bin", {"dtype": "uint16"}), ("b.npy", {}))
    }
    for (_, eod), request in requests.items():
        assert [one.tolist() for one in all_records(request)] == expected[eod]


@pytest.mark.parametrize("dtype", ["<i4", ">i4", "<f2", "bool", "<u8"])
def test_arrays_of_numpy(register: Register, tmp_path: Path, dtype: str) -> None:
    rows = np.arange(12).reshape(4, 3).astype(dtype)
    np.save(tmp_path / "rows.npy", rows)
    np.save(tmp_path / "flat.npy", rows.ravel())
    assert [one.tolist() for one in all_records(register(tmp_path / "rows.npy"))] == rows.tolist()
    found = all_records(register(tmp_path / "flat.npy"))
    assert found == rows.ravel().tolist()
    assert found[0].dtype == np.dtype(dtype).newbyteorder("=")
    windows = register(tmp_path / "flat.npy", tokens={"window": 5}, shuffle_records=True, seed=2)
    order = permuted_many(np.arange(2), 2, 2, 0).tolist()
    wanted = rows.ravel()[:10].reshape(2, 5)[order].tolist()
    assert [one.tolist() for one in all_records(windows)] == wanted


def test_large_files_in_blocks(register: Register, tmp_path: Path) -> None:
    tokens = np.random.default_rng(1).integers(0, 1 << 16, 5 << 20, np.uint16)
    tokens.tofile(tmp_path / "a.bin")
    request = register(tmp_path / "a.bin", tokens={"dtype": "uint16", "window": 2049})
    wanted = tokens[: len(tokens) // 2049 * 2049].reshape(-1, 2049)
    np.testing.assert_array_equal(all_records(request), wanted)
    np.testing.assert_array_equal(
        records(request, 1, 7), wanted[request.lengths[0] + 7 :][: request.lengths[1] - 7]
    )
    ends = register(tmp_path / "a.bin", tokens={"dtype": "uint16", "eod": 77})
    parts = np.split(tokens, 1 + np.flatnonzero(tokens == 77))
    for one, part in zip(all_records(ends), parts, strict=True):
        np.testing.assert_array_equal(one, part)


def test_a_directory_is_searched_only_for_a_named_format(
    register: Register, tmp_path: Path
) -> None:
    write_megatron(tmp_path / "a", [[1, 2]], "int32")
    with pytest.raises(ForebayError, match="has no files here"):
        register(tmp_path)
    assert [one.tolist() for one in all_records(register(tmp_path, format="tokens"))] == [[1, 2]]


def test_an_index_that_is_changed_is_refused(register: Register, tmp_path: Path) -> None:
    """The tokens are the same, and so is the number of sequences."""
    write_megatron(tmp_path / "a", [[1, 2], [3, 4, 5]], "uint16")
    requests = [
        register(tmp_path / "a.bin", format="tokens", shuffle_records=True),
        register(tmp_path / "a.bin", tokens={"window": 2}),
    ]
    before = (tmp_path / "a.bin").read_bytes()
    write_megatron(tmp_path / "a", [[1, 2, 3], [4, 5]], "uint16")
    assert (tmp_path / "a.bin").read_bytes() == before
    for request in requests:
        with pytest.raises(
            FailedPrecondition, match=r"a\.idx has .*, and had .* when it was regis"
        ):
            all_records(request)
    (tmp_path / "a.idx").unlink()
    with pytest.raises(FailedPrecondition, match=r"a\.idx cannot be read \(No such file.*and had"):
        all_records(requests[0])


def test_an_index_that_was_registered_without_its_fingerprint(
    register: Register, tmp_path: Path
) -> None:
    write_megatron(tmp_path / "a", [[1, 2], [3, 4, 5]], "uint16")
    request = register(tmp_path / "a.bin", format="tokens")
    made = PythonDataset.FromString(request.python)
    new = decode(made.files)
    files = [msgspec.structs.replace(entry, beside=None) for entry in new.files]
    made.files = old = msgspec.structs.replace(new, files=files).encode()
    request.python = made.SerializeToString()
    assert [one.tolist() for one in all_records(request)] == [[1, 2], [3, 4, 5]]
    said = r"list of files \(.*a\.idx has {}, and had {}\)"
    assert re.fullmatch(
        said.format(".* bytes .*", "nothing that .*"), difference(old, new.encode())
    )
    write_megatron(tmp_path / "a", [[1, 2, 3], [4], [5]], "uint16")
    with pytest.raises(FailedPrecondition, match=r"a\.bin has 3 records, and had 2 when .* anew"):
        all_records(request)
    other = PythonDataset.FromString(register(tmp_path / "a.bin", format="tokens").python).files
    both = difference(new.encode(), other)
    assert re.fullmatch(said.format(".* bytes .*", ".* bytes .*"), both)


def test_what_is_wrong_is_named(register: Register, tmp_path: Path) -> None:
    path = tmp_path / "a.bin"
    write_megatron(tmp_path / "a", [[1, 2], [3, 4, 5]], "uint16")
    whole, index = path.read_bytes(), path.with_suffix(".idx").read_bytes()
    with pytest.raises(InvalidArgument, match=r"a\.idx is an index: give the \.bin files"):
        register(tmp_path / "a.idx")
    for damaged in (index[:-30], b"MMIDIDX\0\1" + index[9:], index[:17] + b"\x09" + index[18:]):
        path.with_suffix(".idx").write_bytes(damaged)
        with pytest.raises(Corrupt, match=r"a\.bin cannot be registered as tokens: "):
            register(path, format="tokens")
    path.with_suffix(".idx").write_bytes(index)
    path.write_bytes(whole[:-2])
    with pytest.raises(Corrupt, match=r"a\.bin .* sequences 0 to 2 do not follow .*a\.idx has"):
        register(path, format="tokens")
    path.write_bytes(whole)
    path.with_suffix(".idx").unlink()
    with pytest.raises(InvalidArgument, match=r"a\.bin has no .*a\.idx beside it: give tokens="):
        register(path, format="tokens")
    with pytest.raises(Corrupt, match=r"has 10 bytes, which are no numbers of int32: it is cut"):
        register(path, tokens={"dtype": "int32", "window": 1})
    with pytest.raises(InvalidArgument, match=r"a\.bin does not say what a record is: give"):
        register(path, tokens={"dtype": "int16"})
    np.save(tmp_path / "a.npy", np.arange(6).reshape(2, 3).T)
    with pytest.raises(InvalidArgument, match=r"shape \(3, 2\) in columns: write numbers in rows"):
        register(tmp_path / "a.npy")
    np.save(tmp_path / "a.npy", np.array(["a"]))
    with pytest.raises(InvalidArgument, match=r"a\.npy has an array of <U1 and shape \(1,\): "):
        register(tmp_path / "a.npy")
    np.save(tmp_path / "a.npy", np.arange(6).reshape(2, 3))
    with pytest.raises(InvalidArgument, match=r"a\.npy has rows of \(3,\): leave out `tokens`"):
        register(tmp_path / "a.npy", tokens={"window": 2})
    (tmp_path / "a.npy").write_bytes((tmp_path / "a.npy").read_bytes()[:-1])
    with pytest.raises(Corrupt, match=r"lacks 1 bytes of its array of \(2, 3\): it is cut"):
        register(tmp_path / "a.npy")
    for wrong in (5, {}, {"dtype": "x"}, {"dtype": "U1"}, {"size": 1}, {"window": 0},
                  {"window": 1.5}, {"window": 1, "eod": 2}, {"eod": None}):  # fmt: skip
        with pytest.raises(InvalidArgument, match=r"tokens=.*: give \{.dtype.: .uint16.\} of num"):
            register(path, tokens=wrong)
    with pytest.raises(InvalidArgument, match=r"tokens=.* is for \['tokens'\], and this is 'mds'"):
        register(path, format="mds", tokens={"eod": 0})
