"""What a Python dataset's fields take: tensors of one dtype, in the registered nesting."""

from __future__ import annotations

import array
import collections
import dataclasses
import json
import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

from forebay.service.blocks import Block, Component, Strings
from forebay.service.errors import InvalidArgument
from forebay.service.pipelines.python import columns
from forebay.service.pipelines.python.child_blocks import _copied
from forebay.service.pipelines.python.columns import Field, Misfit, column_of, fields_of
from forebay.service.pipelines.python.element_structures import inferred
from forebay.service.structure import assemble, encode

FLOATS = [
    np.float16, np.float32, np.float64, ml_dtypes.bfloat16, ml_dtypes.float8_e5m2,
    ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e4m3fnuz,
]  # fmt: skip
INTEGERS = [
    np.int8, np.uint8, np.int16, np.uint16, np.int32, np.uint32, np.int64, np.uint64,
    ml_dtypes.int4, ml_dtypes.uint4,
]  # fmt: skip
DTYPES = [np.dtype(kind) for kind in (*FLOATS, *INTEGERS, np.bool_, np.complex64, np.complex128)]


def sent(dtype: Any, value: Any, shape: tuple[int | None, ...] = ()) -> Any:
    """The value as its reader has it. Raises Misfit."""
    field = Field("element", dtype, shape)
    column = column_of(field, [_copied(field, value)])
    payload = np.zeros(max(column.size, 1), np.uint8)
    (found,) = columns.read(1, columns.write([column], payload), payload).components[0].elements()
    return found


def refuses(dtype: Any, value: Any, shape: tuple[int | None, ...] = ()) -> bool:
    try:
        sent(dtype, value, shape)
    except Misfit:
        return True
    return False


def ways(value: Any) -> list[tuple[Any, tuple[int, ...]]]:
    """A scalar of NumPy's, and all else that is treated alike: with the tensor's shape."""
    whole = np.asarray(value)
    return [
        (value, ()),
        (whole, ()),
        (whole[None], (1,)),
        ([value], (1,)),
        ([whole], (1,)),
        ([whole[None]], (1, 1)),
        ([[value]], (1, 1)),
        (collections.deque([value]), (1,)),
    ]


@pytest.mark.parametrize("of", DTYPES, ids=str)
@pytest.mark.parametrize("field", DTYPES, ids=str)
def test_what_has_a_dtype_fits_a_field_of_that_dtype_alone(field: Any, of: Any) -> None:
    for value, shape in ways(of.type(1)):
        if field == of:
            found = np.asarray(sent(field, value, shape))
            assert found.dtype == field
            assert found.astype(complex).ravel().tolist() == [1]
        else:
            assert refuses(field, value, shape), value


@pytest.mark.parametrize(
    ("field", "value"),
    [
        (np.float32, np.float64(16777217)),
        (np.float32, np.float64(1e300)),
        (np.float32, np.float64(1)),
        (np.complex64, np.complex128(1)),
        (np.float16, 1e6),
        (np.float16, 65520.0),
        (np.float16, -1e6),
        (np.float16, 70_000),
        (np.float32, 1e300),
        (np.float32, 10**40),
        (np.float64, 10**400),
        (np.complex64, 1e300j),
        (np.complex64, complex(math.inf, 1e300)),
        (ml_dtypes.bfloat16, 1e300),
        (ml_dtypes.float8_e4m3fn, 1e6),  # which has no infinity, and would have NaN
        (ml_dtypes.float8_e4m3fn, math.inf),
        (ml_dtypes.float8_e5m2, 1e6),
        (ml_dtypes.int4, 9),  # which would wrap around
        (ml_dtypes.uint4, -1),
        (ml_dtypes.int4, 1.5),
        (np.uint8, 256),
        (np.int64, 2**63),
        (np.int32, 1.0),
        (np.int32, True),
        (np.bool_, 1),
        (np.float32, 1j),
        (np.float32, "1"),
        (np.float32, b"1"),
        (np.float32, None),
    ],
)
def test_what_would_be_another_value_is_refused(field: Any, value: Any) -> None:
    dtype = np.dtype(field)
    assert refuses(dtype, value)
    assert refuses(dtype, [value], (1,))
    assert refuses(dtype, [[value]], (1, 1))
    with pytest.raises(Misfit) as refused:
        column_of(Field("element", dtype, ()), [dtype.type(0), value])
    assert refused.value.row == 1


@pytest.mark.parametrize(
    ("field", "value", "found"),
    [
        (np.float32, 0.1, np.float32(0.1)),
        (np.float32, 16777217, 16777216),  # rounded, as by NumPy
        (np.float16, 65519.0, 65504),
        (np.float16, math.inf, math.inf),
        (np.float32, 1e-300, 0),
        (ml_dtypes.bfloat16, 257, 256),
        (ml_dtypes.bfloat16, -math.inf, -math.inf),
        (ml_dtypes.float8_e4m3fn, 460, 448),
        (ml_dtypes.int4, -8, -8),
        (np.uint64, 2**64 - 1, 2**64 - 1),
        (np.complex64, 1.5, 1.5),
        (np.bool_, True, True),
    ],
)
def test_pythons_numbers_are_rounded(field: Any, value: Any, found: Any) -> None:
    dtype = np.dtype(field)
    for sample, shape in [(value, ()), ([value], (1,)), ([[value]], (1, 1))]:
        array = np.asarray(sent(dtype, sample, shape))
        assert array.dtype == dtype
        assert array.ravel()[0] == found


@pytest.mark.parametrize("value", [
    np.ma.array([1, 2, 3], mask=[False, True, False]),
    np.ma.array(["a", "b"], mask=[True, False]),
    np.ma.masked,
    [np.ma.array([1, 2], mask=[False, True]), np.ma.array([3, 4])],
    [np.ma.masked, 1.0],
], ids=["array", "strings", "scalar", "list of arrays", "list of scalars"])  # fmt: skip
@pytest.mark.filterwarnings("ignore:Warning. converting a masked")
def test_what_is_masked_is_refused(value: Any) -> None:
    """NumPy would show it."""
    with pytest.raises(InvalidArgument, match="masked"):
        inferred([value])
    shown = np.asarray(value)
    text = shown.dtype.kind in "SU"
    assert refuses(None if text else shown.dtype, value, shown.shape)


def test_masked_arrays_that_hide_nothing_are_arrays() -> None:
    assert sent(np.dtype(np.int64), np.ma.array([1, 2]), (2,)).tolist() == [1, 2]
    assert inferred([np.ma.array([1, 2], mask=[False, False])])


def test_lists_may_hold_several_kinds_as_numpy_joins_them() -> None:
    assert sent(np.dtype(np.uint64), [2**63 + 1, 1], (2,)).tolist() == [2**63 + 1, 1]
    assert sent(np.dtype(np.float32), [np.float32(0.5), 2, 3.5], (3,)).tolist() == [0.5, 2, 3.5]
    assert sent(np.dtype(np.int32), [True, 2], (2,)).tolist() == [1, 2]
    assert sent(np.dtype(np.int64), range(3), (3,)).tolist() == [0, 1, 2]
    assert sent(np.dtype(np.float32), [(1, 2), [3, 4]], (2, 2)).tolist() == [[1, 2], [3, 4]]
    assert sent(np.dtype(np.float32), [], (0,)).tolist() == []
    assert refuses(np.dtype(np.int32), (1, 2), (2,))  # several tensors
    assert refuses(np.dtype(np.float32), [0.5, np.float64(2)], (2,))


@given(
    st.sampled_from(DTYPES),
    st.one_of(st.booleans(), st.integers(-(2**70), 2**70), st.floats(), st.complex_numbers()),
)
def test_no_number_becomes_another_one(dtype: Any, value: Any) -> None:
    """Other than rounded; and lists and columns do not differ from the number."""
    refused = refuses(dtype, value)
    assert refuses(dtype, [value], (1,)) == refused
    if refused:
        return
    found = sent(dtype, value)
    if dtype.type in INTEGERS or dtype.kind == "b":
        assert int(found) == value
        return
    found, value = complex(found), complex(value)
    for part, given_part in ((found.real, value.real), (found.imag, value.imag)):
        assert math.isfinite(part) == math.isfinite(given_part)
        assert math.isnan(part) == math.isnan(given_part)
        if math.isinf(part):
            assert part == given_part
        elif math.isfinite(part):
            limits: Any = ml_dtypes.finfo(dtype)  # type: ignore[no-untyped-call]
            step = abs(given_part) * float(limits.eps) + float(limits.smallest_subnormal)
            assert abs(part - given_part) <= step


def named(value: object) -> str:
    """A test's name, without addresses, which differ from process to process."""
    return value if isinstance(value, str) else type(value).__name__


BUFFERS = [
    (bytearray(b"ab"), [97, 98]),
    (memoryview(b"ab"), [97, 98]),
    (array.array("f", [1.5, 2.5]), [1.5, 2.5]),
    (range(2, 8, 3), [2, 5]),
    (collections.deque([1, 2]), [1, 2]),
    (collections.deque([[1], [2]]), [[1], [2]]),
]


@pytest.mark.parametrize(("value", "found"), BUFFERS, ids=named)
def test_what_registration_takes_is_read(value: Any, found: list[Any]) -> None:
    """As tf.data's from_generator has it."""
    structure = inferred([value])
    (field,), _ = fields_of(structure)
    assert sent(field.dtype, value, field.shape).tolist() == found
    spec = tf.TensorSpec(field.shape, field.dtype)
    (theirs,) = tf.data.Dataset.from_generator(lambda: iter([value]), output_signature=spec)
    assert theirs.numpy().tolist() == found


def test_what_is_yielded_may_be_changed() -> None:
    field = Field("element", np.dtype(np.uint8), (2,))
    changing = bytearray(b"ab")
    copied = _copied(field, changing)
    changing[:] = b"xy"
    column = column_of(field, [copied])
    assert column.arrays[0][2][0].ravel().tolist() == [97, 98]


@pytest.mark.parametrize(
    ("element", "said"),
    [
        (
            [np.zeros([2, 3], np.uint8), 7],
            r"element is a list of uint8\[2, 3\], 7 \(int\); a list is one tensor",
        ),
        ({"a": [np.zeros(2), np.zeros(3)]}, r"element\['a'\] is a list of .* a tuple or a dict"),
        ([3, "label"], r"element is a list of 3 \(int\), 'label' \(str\);"),
        ([[1, 2], [3]], r"element is a list of int64\[2\], int64\[1\];"),
        ([np.int64(5), *[2.5] * 9], r"element is a list of .*, …; a list is one tensor"),
        ([np.True_, 2], r"element is a list of np.True_ \(bool\), 2 \(int\);"),
        ([2**63 + 1, 1], r"element is .*, integers that no dtype .* np.uint64"),
        ({1, 2}, r"element is \{1, 2\} \(set\), which is no array"),
        ((x for x in "ab"), r"element is <generator .*, which is no array"),
    ],
    ids=named,
)
def test_registration_says_what_a_list_is_not(element: Any, said: str) -> None:
    with pytest.raises(InvalidArgument, match=said):
        inferred([element])


Train = collections.namedtuple("Train", "tokens label")
Old = collections.namedtuple("Old", "label tokens")
Fewer = collections.namedtuple("Fewer", "tokens")
More = collections.namedtuple("More", "tokens label more")
Again = collections.namedtuple("Again", "tokens label")


@dataclasses.dataclass
class Made:
    tokens: Any
    label: Any


@dataclasses.dataclass
class Turned:
    label: Any
    tokens: Any


class Extended(tf.experimental.ExtensionType):  # type: ignore[misc]
    __name__ = "tests.fields.Extended"
    tokens: tf.Tensor
    label: tf.Tensor


class Attributes:
    """As `attrs` makes classes."""

    __attrs_attrs__ = (
        collections.namedtuple("Attribute", "name")("tokens"),
        collections.namedtuple("Attribute", "name")("label"),
    )

    def __init__(self, tokens: Any, label: Any) -> None:
        self.tokens, self.label = tokens, label


SPEC = tf.TensorSpec([], tf.int64)
NAMED = encode(Train(SPEC, SPEC))


def flattened(structure: str, element: Any) -> list[Any]:
    leaves: list[Any] = []
    _, flatten = fields_of(structure)
    flatten(element, leaves)
    return [int(leaf) for leaf in leaves]


@pytest.mark.parametrize("kind", [Train, Again, Made, Extended, Attributes])
def test_fields_of_the_same_names_fit(kind: Any) -> None:
    for structure in (NAMED, inferred([Train(1, 2)])):
        assert flattened(structure, kind(tokens=1, label=2)) == [1, 2]


@pytest.mark.parametrize(
    ("element", "said"),
    [
        (Old(label=2, tokens=1), r"Old\(label, tokens\)"),
        (Turned(label=2, tokens=1), r"Turned\(label, tokens\)"),
        ((1, 2), "a tuple of 2"),
        ([1, 2], r"\[1, 2\] \(list\)"),
        ({"tokens": 1, "label": 2}, r"a dict of \['tokens', 'label'\]"),
        (Fewer(1), r"Fewer\(tokens\)"),
        (More(1, 2, 3), r"More\(tokens, label, more\)"),
    ],
    ids=str,
)
def test_other_fields_are_refused(element: Any, said: str) -> None:
    with pytest.raises(Misfit, match=rf"element is {said}.* as Train\(tokens, label\)"):
        flattened(NAMED, element)
    nested = encode({"a": (SPEC, [Train(SPEC, SPEC)])})
    with pytest.raises(Misfit, match=rf"element\['a'\]\[1\]\[0\] is {said}"):
        flattened(nested, {"a": (1, (element,))})


def test_a_plain_tuple_takes_what_is_one() -> None:
    """As tf.data's from_generator does: such a field has no name."""
    assert flattened(encode((SPEC, SPEC)), Old(1, 2)) == [1, 2]


def test_no_element_has_more_dimensions_than_can_be_sent() -> None:
    fields_of(encode(tf.TensorSpec([1] * 31, tf.int64)))
    with pytest.raises(ValueError, match="element has 32 dimensions, and at most 31 can be sent"):
        fields_of(encode(tf.TensorSpec([1] * 32, tf.int64)))


def test_dicts_are_told_apart_by_their_keys() -> None:
    structure = encode({"a": SPEC, "b": SPEC})
    assert flattened(structure, collections.OrderedDict(b=2, a=1)) == [1, 2]
    assert flattened(structure, collections.defaultdict(int, b=2, a=1)) == [1, 2]
    for wrong in ({"a": 1}, {"a": 1, "b": 2, "c": 3}, {"a": 1, "B": 2}, Train(1, 2)):
        with pytest.raises(Misfit, match=r"and was registered as a dict of \['a', 'b'\]"):
            flattened(structure, wrong)


def test_elements_come_back_under_their_names() -> None:
    block = Block(1, (Component(np.array([1])), Component(np.array([2]))))
    parts = [component.elements() for component in block.components]
    (found,) = assemble(NAMED)(parts, 1)
    assert (found.tokens, found.label) == (1, 2)
    assert not isinstance(block.components[0].values, Strings)
    assert json.loads(NAMED)["named"] == "Train"
