"""Makes a graph's random numbers depend on a key, and not on what TensorFlow has drawn before.

A *key* is an int64. Each random operation draws from (key, salt). The salt is the user's seeds, or
else the operation's place among the nodes. So operations with the same seeds draw the same numbers
as each other, as in TensorFlow, but other numbers in each bundle. A function is called with a key
of its own, derived from its caller's key. A map derives its function's key from the element's
number as well, which a zip with a range provides. So parallel calls draw the same numbers in any
order, and element n draws the same numbers whether earlier elements were computed or skipped. A
loop has a key among its variables, so each iteration draws other numbers.

- Shuffles get their two seeds from the key. With `reshuffle_each_iteration=False` and the user's
  seeds they keep these: such a shuffle is meant to be the same each time.
- The operations in `_STATELESS` become their stateless counterparts.
- Operations that are nondeterministic only by option (`deterministic=False`) become deterministic.

All other operations that may give different results stay; `nondeterministic` names them. What a
function repeats (`Dataset.from_tensors(x).map(random).repeat(2)` in a flat_map) draws the same
numbers each time.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from ...proto import graph_pb2 as pb
from .canonical import CALLS, LOOPS
from .constants import INT32, INT64, constant, element_types
from .graphs import Body, Graph, all_nodes, bodies, called_functions, references, where

KEY = "forebay/key:0"
"""Stands for the key while a seeded graph is imported."""

_OF_INT64 = b"\x18\x09"  # ArgDef.type, which graph.proto does not declare


class _Stateless(NamedTuple):
    op: str
    seed_at: int  # the seed's place among the inputs
    dtype: str  # the stateful operation's attribute with the drawn dtype, and this one's
    called: str


_STATELESS = {
    "RandomUniform": _Stateless("StatelessRandomUniform", 1, "dtype", "dtype"),
    "RandomUniformInt": _Stateless("StatelessRandomUniformInt", 1, "Tout", "dtype"),
    "RandomStandardNormal": _Stateless("StatelessRandomNormal", 1, "dtype", "dtype"),
    "TruncatedNormal": _Stateless("StatelessTruncatedNormal", 1, "dtype", "dtype"),
    "Multinomial": _Stateless("StatelessMultinomial", 2, "output_dtype", "output_dtype"),
}

_SHUFFLES = {"ShuffleDataset", "ShuffleDatasetV3"}  # (input, buffer_size, seed, seed2, …)
_MAPS = {  # (input, …, what the function captures, …)
    *("MapDataset", "ParallelMapDataset", "ParallelMapDatasetV2"),
    *("MapAndBatchDataset", "ExperimentalMapAndBatchDataset"),
    *("FlatMapDataset", "InterleaveDataset"),
    *(f"ParallelInterleaveDatasetV{n}" for n in (2, 3, 4)),
    *("ScanDataset", "ExperimentalScanDataset"),  # a state before what it captures
}

_NO_SEEDS = "shuffles by seeds that the graph does not have"

# Operations that may give different results each time, by the beginnings of their names.
_NONDETERMINISTIC = {
    "draws random numbers": (
        *("Random", "Multinomial", "ParameterizedTruncatedNormal", "TruncatedNormal", "Stateful"),
        *("SampleDistortedBoundingBox", "RngSkip", "RngReadAndSkip", "FractionalAvgPool"),
        *("FractionalMaxPool", "ThreadUnsafeUnigram", "UniformCandidate", "LogUniform"),
        *("LearnedUnigram", "FixedUnigram", "AllCandidate", "AnonymousRandomSeedGenerator"),
        *("NonDeterministicInts", "RecordInput", "SamplingDataset"),
        *("GlobalShuffleDataset", "ShuffleAndRepeat"),
    ),
    "is a function in Python": ("PyFunc", "EagerPyFunc", "PyFuncStateless"),
    "keeps a state": ("MutableHashTable", "MutableDenseHashTable", "VarHandleOp", "Variable"),
    "reads a clock": ("Timestamp",),
    "gives elements as they come": ("ParallelInterleaveDataset", "ExperimentalParallelInterleave"),
    _NO_SEEDS: ("ShuffleDatasetV2",),
}
_DETERMINISTIC = {"StatefulPartitionedCall", *(f"ParallelInterleaveDatasetV{n}" for n in (2, 3, 4))}


def seeded(graph: bytes) -> bytes:
    """The graph with its random numbers drawn from KEY. Raises InvalidGraph."""
    parsed = Graph(graph)
    _Seeding(parsed.proto).run()
    return parsed.proto.SerializeToString()


def nondeterministic(graph: bytes) -> list[str]:
    """Why a bundle of this dataset may have different elements each time: for each such node its
    name, its op and the reason, in words. Empty if none is known. Raises InvalidGraph.
    """
    proto = Graph(seeded(graph)).proto
    nodes = dict(bodies(proto))
    functions = {name: own for name, own in nodes.items() if name}
    return [
        f"{node.name!r} ({node.op}){where(name)} {why}"
        for name in ("", *called_functions(proto.node, functions))
        for body in [_Body(nodes[name], KEY, function=bool(name))]
        for node in body.nodes
        for why in _why_nondeterministic(body, node)
    ]


def _why_nondeterministic(body: _Body, node: pb.NodeDef) -> Iterator[str]:
    if node.op in _SHUFFLES and _is_unseeded(body, node):  # still unseeded: no key reached it
        yield _NO_SEEDS
    if node.op not in _DETERMINISTIC and not _is_seeded_source(body, node):
        yield from (
            why for why, beginnings in _NONDETERMINISTIC.items() if node.op.startswith(beginnings)
        )


def _called(node: pb.NodeDef) -> list[str]:
    return [reference.name for reference in references(node.attr)]


class _Body(Body):
    """Nodes that draw from a key, a tensor."""

    def __init__(self, nodes: Any, key: str, *, function: bool) -> None:
        super().__init__(nodes, function=function)
        self.key = key

    def pair(self, key: str, number: str) -> str:
        attrs = {"N": pb.AttrValue(i=2), "T": _type(INT64), "axis": pb.AttrValue(i=0)}
        return self.add("Pack", [key, number], "output", **attrs)

    def derived(self, key: str, number: str) -> str:
        """A key derived from `key` and `number`."""
        return self.add(
            "StatelessRandomUniformFullInt",
            [self.constant([], INT32), self.pair(key, number)],
            "output",
            dtype=_type(INT64), T=_type(INT32), Tseed=_type(INT64),
        )  # fmt: skip

    def producer(self, tensor: str) -> pb.NodeDef | None:
        """The node; None if the tensor is an argument of the function."""
        name = tensor.split(":")[0]
        found = next((node for node in self.nodes if node.name == name), None)
        identity = found is not None and found.op == "Identity"
        return self.producer(found.input[0]) if found is not None and identity else found

    def value_of(self, tensor: str) -> int | None:
        """The value of a constant scalar."""
        node = self.producer(tensor)
        facts = None if node is None else constant(node)
        return None if facts is None else facts.value


class _Seeding:
    def __init__(self, proto: pb.GraphDef) -> None:
        self._proto = proto
        self._functions = {f.signature.name: f for f in proto.library.function}
        self._random = _random_functions(self._functions)
        self._made: set[str] = set()

    def run(self) -> None:
        for node in all_nodes(self._proto):
            if "deterministic" in node.attr and node.attr["deterministic"].s == b"false":
                node.attr["deterministic"].s = b"true"
            if "sloppy" in node.attr:  # the name in older operations
                node.attr["sloppy"].b = False
        self._seed(_Body(self._proto.node, KEY, function=False))

    def _seed(self, body: _Body) -> None:
        for place, node in enumerate(list(body.nodes)):
            salt = _number("node", place)  # not the name, which changes whenever it is built
            if node.op in _STATELESS:
                _make_stateless(body, node, salt)
            elif node.op in _SHUFFLES:
                _seed_shuffle(body, node, salt)
            elif not self._random.isdisjoint(_called(node)):
                if node.op in CALLS:
                    data = [name for name in node.input if not name.startswith("^")]
                    node.input.insert(len(data), body.derived(body.key, body.constant(salt)))
                    node.attr["Tin"].list.type.append(INT64)
                    for reference in references(node.attr):
                        reference.name = self._keyed(reference.name)
                elif node.op in LOOPS:
                    self._seed_loop(body, node, salt)
                elif node.op in _MAPS and _number_elements(body, node):
                    key = body.derived(body.key, body.constant(salt))
                    captured = len(node.attr["Targuments"].list.type)
                    state = len(node.attr["Tstate"].list.type) if "Tstate" in node.attr else 0
                    node.input.insert(1 + state + captured, key)
                    node.attr["Targuments"].list.type.append(INT64)
                    function = node.attr["f"].func
                    function.name = self._keyed(function.name, captured)

    def _keyed(self, name: str, captured: int | None = None, loops: str = "") -> str:
        """A function with a key as its last argument. If it takes a dataset's elements, with
        `captured` tensors behind them, the element's number is an argument in between. `loops` says
        which function of a loop it is: "cond" or "body"."""
        made = f"{name}_keyed{loops}" if captured is None else f"{name}_numbered"
        if made in self._made:
            return made
        self._made.add(made)
        function = self._proto.library.function.add()
        function.CopyFrom(self._functions[name])
        function.signature.name = made
        arguments = list(function.signature.input_arg)
        key = pb.ArgDef(name="forebay_key")
        key.MergeFromString(_OF_INT64)
        if captured is not None:
            number = pb.ArgDef(name="forebay_number")
            number.MergeFromString(_OF_INT64)
            at = len(arguments) - captured
            arguments.insert(at, number)
            for of_arguments in function.arg_attr, function.resource_arg_unique_id:
                _make_room(of_arguments, at)
        del function.signature.input_arg[:]
        function.signature.input_arg.extend([*arguments, key])
        body = _Body(function.node_def, key.name, function=True)
        if captured is not None:
            body.key = body.derived(key.name, "forebay_number")
        if loops:  # the two draw different numbers
            body.key = body.derived(key.name, body.constant(_number(loops)))
        self._seed(body)
        if loops == "body":
            self._next_key(function, key.name)
        return made

    def _seed_loop(self, body: _Body, node: pb.NodeDef, salt: int) -> None:
        """Make a key the loop's last variable: each iteration derives the next one's."""
        data = [name for name in node.input if not name.startswith("^")]
        node.input.insert(len(data), body.derived(body.key, body.constant(salt)))
        node.attr["T"].list.type.append(INT64)
        if "output_shapes" in node.attr and node.attr["output_shapes"].list.shape:
            node.attr["output_shapes"].list.shape.add()
        for attr in "cond", "body":
            reference = node.attr[attr].func
            reference.name = self._keyed(reference.name, loops=attr)

    def _next_key(self, function: pb.FunctionDef, key: str) -> None:
        """Give a loop's body one more output."""
        result = pb.ArgDef(name="forebay_next_key")
        result.MergeFromString(_OF_INT64)
        function.signature.output_arg.append(result)
        added = _Body(function.node_def, key, function=True)
        function.ret[result.name] = added.derived(key, added.constant(_number("next")))


def _random_functions(functions: Mapping[str, pb.FunctionDef]) -> set[str]:
    """Functions that contain, directly or indirectly, operations that a key affects."""
    random: set[str] = set()
    known = -1
    while known < len(random):
        known = len(random)
        for name, function in functions.items():
            if any(_is_random(node, random) for node in function.node_def):
                random.add(name)
    return random


def _is_random(node: pb.NodeDef, random: set[str]) -> bool:
    if node.op in CALLS or node.op in _MAPS or node.op in LOOPS:
        return not random.isdisjoint(_called(node))
    return node.op in _STATELESS or node.op in _SHUFFLES


def _make_stateless(body: _Body, node: pb.NodeDef, salt: int) -> None:
    stateless = _STATELESS[node.op]
    seeds = node.attr["seed"].i, node.attr["seed2"].i
    if any(seeds):
        salt = _number("seeds", *seeds)
    node.input.insert(stateless.seed_at, body.pair(body.key, body.constant(salt)))
    if stateless.dtype != stateless.called:
        node.attr[stateless.called].CopyFrom(node.attr[stateless.dtype])
        del node.attr[stateless.dtype]
    del node.attr["seed"], node.attr["seed2"]
    node.attr["Tseed"].CopyFrom(_type(INT64))
    node.op = stateless.op


def _seed_shuffle(body: _Body, node: pb.NodeDef, salt: int) -> None:
    one, two = node.input[2:4]
    if _is_unseeded(body, node):
        key = body.derived(body.key, body.constant(salt))
    elif "reshuffle_each_iteration" in node.attr and not node.attr["reshuffle_each_iteration"].b:
        return
    else:
        key = body.derived(body.derived(body.key, one), two)
    node.input[2] = key
    node.input[3] = body.derived(key, body.constant(1))


def _is_unseeded(body: _Body, node: pb.NodeDef) -> bool:
    """Whether TensorFlow would draw the seeds of a shuffle."""
    return [body.value_of(seed) for seed in node.input[2:4]] == [0, 0]


def _is_seeded_source(body: _Body, node: pb.NodeDef) -> bool:
    """Whether it is tf.data.Dataset.random with a seed, the same in each iteration; such as that of
    sample_from_datasets."""
    if node.op not in ("RandomDataset", "RandomDatasetV2"):
        return False
    drawn = body.value_of(node.input[0]) == 0
    return not drawn and not node.attr["rerandomize_each_iteration"].b


def _number_elements(body: _Body, node: pb.NodeDef) -> bool:
    """Zip a dataset's input with the numbers 0, 1, 2 …; False if a function's argument is it."""
    source = body.producer(node.input[0])
    if source is None:
        return False
    types, shapes = element_types(source)
    of_number, scalar = pb.AttrValue(), pb.AttrValue()
    of_number.list.type.append(INT64)
    scalar.list.shape.add()
    bounds = [body.constant(bound) for bound in (0, 2**63 - 1, 1)]
    specs = {"output_types": of_number, "output_shapes": scalar}
    numbers = body.add("RangeDataset", bounds, "handle", **specs)
    types.MergeFrom(of_number)
    shapes.MergeFrom(scalar)
    specs = {"output_types": types, "output_shapes": shapes, "N": pb.AttrValue(i=2)}
    node.input[0] = body.add("ZipDataset", [node.input[0], numbers], "handle", **specs)
    return True


def _make_room(of_arguments: Any, at: int) -> None:
    """Shift entries keyed by argument places, to insert an argument."""
    for place in sorted((place for place in of_arguments if place >= at), reverse=True):
        value = of_arguments[place]
        if isinstance(value, int):
            of_arguments[place + 1] = value
        else:
            of_arguments[place + 1].CopyFrom(value)
        del of_arguments[place]


def _number(*parts: Any) -> int:
    """A hash of the parts, as an int64."""
    digest = hashlib.sha256(repr(parts).encode()).digest()
    return int.from_bytes(digest[:8], "little", signed=True)


def key_of(seed: int, number: int) -> int:
    """The key of a bundle of this number."""
    return _number("bundle", seed, number)


def _type(dtype: int) -> pb.AttrValue:
    return pb.AttrValue(type=dtype)
