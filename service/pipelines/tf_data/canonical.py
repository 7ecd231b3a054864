"""A canonical form of a graph: what it computes, whatever order its nodes were traced in.

A program that iterates over a set while TensorFlow traces it adds nodes, captures tensors and
names everything in another order each time. The walk from the result back meets the same nodes
in the same order. It numbers them, and leaves their names out. Three things have no order of their
own, and are put into one by what they are:

- Control inputs, control outputs, and nodes that no result needs: by a digest of all that is
  behind them.
- Arguments of a function: by the walk through its body. The caller's digest says which of its
  tensors is which argument, and orders those that a function captures in the same way.
- Functions: by their first use. Those that are never used go by their digests.

A loop's variables keep their order. Those that its body passes on unchanged go like what a function
captures, as that is what they are in TensorFlow. Two equal nodes are not one node that is used
twice, as both may draw random numbers. Everything takes linear time. Where an order stays open
(two control inputs that are equal, and that no result needs), equal graphs may differ; different
ones never become equal. Operations with side effects keep the order in which they were traced, as
it is the order in which they run: TensorFlow chains asserts, and datasets that are made within a
function.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from ...proto import graph_pb2 as pb
from .graphs import TABLES, Graph, all_nodes, called_functions, handles_of, node_name, references

_GENERATED_HANDLE = re.compile(r"(.*/(?:SeedGenerator|MemoryCache))_\d+")
"""TensorFlow's names for a dataset's own resources; a process numbers them."""

_Tensor = tuple[str, str]

_NAMES = {
    *("_class", "_gradient_op_type", "_user_specified_name"),
    *("forward_function_name", "backward_function_name"),
}
"""Attributes that have generated names, and do not change what is computed."""

CALLS = {"PartitionedCall": 0, "StatefulPartitionedCall": 0} | dict.fromkeys(
    ("If", "StatelessIf", "Case", "StatelessCase"), 1
)
"""The place of a call's first argument among its inputs."""

_GROUPS = {
    "GroupByWindowDataset": ("key_func", "reduce_func", "window_size_func"),
    "GroupByReducerDataset": ("init_func", "reduce_func", "finalize_func"),
}
"""Functions that capture each for itself, in the order of their inputs."""

LOOPS = {"While", "StatelessWhile"}  # also what tf.map_fn is


def fingerprint(graph: bytes) -> str:
    """A digest that two graphs share if they compute the same, and differ in generated names or in
    the order of tracing. Everything else counts: constants, seeds, shapes, nodes that no result
    needs. Raises InvalidGraph."""
    parsed = Graph(graph)
    proto = parsed.proto
    form = _Form(parsed)
    called = form.called
    numbers = {name: number for number, name in enumerate(called)}
    handles: dict[str, int] = {}
    parts: list[Any] = [form.top.digest]
    for body in (form.top, *(form.bodies[name] for name in called)):
        for node in body.ordered():  # which of several equal functions and resources it uses
            used = [numbers.get(name) for name in _functions_of(node)]
            parts.append(
                (used, [handles.setdefault(handle, len(handles)) for handle in _generated(node)])
            )
    parts.append(sorted(form.bodies[name].digest for name in form.bodies.keys() - numbers.keys()))
    for gradient in proto.library.gradient:
        pair = gradient.function_name, gradient.gradient_func
        parts.append([form.bodies[name].digest if name in form.bodies else name for name in pair])
    del proto.node[:], proto.library.function[:], proto.library.gradient[:]
    parts.append(proto.SerializeToString(deterministic=True))
    return _digest(*parts).hex()


def sanitize(graph: bytes) -> bytes:
    """The graph for workers: without devices, with hash tables named by their nodes, and with the
    nodes in canonical order, which random numbers follow (seeds.py). Raises InvalidGraph.
    """
    parsed = Graph(graph)
    for node in all_nodes(parsed.proto):
        node.device = ""
        if node.op in TABLES:
            node.attr["use_node_name_sharing"].b = True
    form = _Form(parsed)
    parsed.proto.node.sort(key=form.top.number_of)
    for function in parsed.proto.library.function:
        function.node_def.sort(key=form.bodies[function.signature.name].number_of)
    return parsed.proto.SerializeToString()


class _Inputs(NamedTuple):
    """Where a node's inputs come from: pairs of a node, or an argument, and its output."""

    data: list[_Tensor]  # that have a place
    captured: list[tuple[tuple[int, ...], _Tensor]]  # with the numbers of functions' arguments
    controls: list[str]

    def names(self, key: Callable[[str], Any], *, controls: bool = True) -> list[str]:
        """Their nodes in canonical order. The key orders what has no other order."""
        captured = self.captured
        if len(captured) > 1:
            captured = sorted(captured, key=lambda pair: (pair[0], key(pair[1][0])))
        found = [*(name for name, _ in self.data), *(name for _, (name, _) in captured)]
        return [*found, *sorted(self.controls, key=key)] if controls and self.controls else found

    def numbered(self, number: Callable[[str], Any]) -> Any:
        return (
            [(number(name), output) for name, output in self.data],
            sorted((label, number(name), output) for label, (name, output) in self.captured),
            sorted(map(number, self.controls)),
        )


_NONE = _Inputs([], [], [])


class _Captured(NamedTuple):
    """Inputs of a node that its functions have as arguments, and whose order says nothing."""

    inputs: Sequence[int]
    arguments: Mapping[str, Sequence[int]]  # their places in each function


class _Body:
    """The nodes of a graph or of a function in canonical order.

    `numbers` are of nodes, `arguments` of each argument in its place: the unused ones share the
    number behind the last one.
    """

    def __init__(
        self,
        nodes: Iterable[pb.NodeDef],
        arguments: Sequence[str],
        results: Sequence[str],
        controls: Iterable[str],
        form: _Form,
    ) -> None:
        self._nodes = {node.name: node for node in nodes}
        own = {name: form.own(node) for name, node in self._nodes.items()}
        inputs = {name: form.inputs(node) for name, node in self._nodes.items()}
        behind = dict.fromkeys(arguments, b"argument")  # digests of nodes with all that they need

        def digest(name: str) -> bytes:
            return behind.get(name, b"loop")

        for name in _bottom_up(inputs, lambda name: inputs.get(name, _NONE).names(digest)):
            if name in own:
                behind[name] = _digest(own[name], inputs[name].numbered(digest))

        last = [*map(node_name, results), *sorted(map(node_name, controls), key=digest)]
        by_data = _bottom_up(
            last, lambda name: inputs.get(name, _NONE).names(digest, controls=False)
        )
        used_first = {name: number for number, name in enumerate(by_data)}

        def place(name: str) -> tuple[bytes, int]:
            return digest(name), used_first.get(name, len(used_first))

        self.numbers: dict[str, int] = {}
        used: dict[str, int] = {}

        def walk(roots: Iterable[str], key: Callable[[str], Any]) -> None:
            for name in _bottom_up(roots, lambda name: inputs.get(name, _NONE).names(key)):
                found = self.numbers if name in inputs else used
                found.setdefault(name, len(found))

        walk(last, place)
        walk(*self._beside(own, inputs, used))
        self.arguments = [used.get(name, len(used)) for name in arguments]

        def number(name: str) -> int:
            return self.numbers[name] if name in self.numbers else -1 - used[name]

        self.digest = _digest(
            [own[name] for name in self.numbers],
            [inputs[name].numbered(number) for name in self.numbers],
            [(number(name), output) for name, output in map(_tensor, results)],
            sorted(map(number, map(node_name, controls))),
        )

    def number_of(self, node: pb.NodeDef) -> int:
        return self.numbers[node.name]

    def _beside(
        self, own: Mapping[str, bytes], inputs: Mapping[str, _Inputs], used: Mapping[str, int]
    ) -> tuple[list[str], Callable[[str], bytes]]:
        """The nodes that no result needs, and a key that orders them: by all that is behind them,
        down to the nodes and arguments that have numbers. Those that no node uses are first."""
        keys = {name: b"%d" % number for name, number in self.numbers.items()}
        keys |= {name: b"argument %d" % number for name, number in used.items()}
        numbered = keys.keys() & inputs.keys()

        def key(name: str) -> bytes:
            return keys.get(name, b"loop")

        rest = [name for name in inputs if name not in numbered]
        behind = {name: [] if name in numbered else inputs[name].names(key) for name in inputs}
        for name in _bottom_up(rest, lambda name: behind.get(name, [])):
            if name in inputs and name not in numbered:
                keys[name] = _digest(own[name], inputs[name].numbered(key))
        read = {child for name in rest for child in behind[name]}
        return sorted(rest, key=lambda name: (name in read, key(name))), key

    def ordered(self) -> Iterator[pb.NodeDef]:
        return (self._nodes[name] for name in self.numbers)


class _Form:
    """The canonical form of a graph: its body, and those of its functions."""

    def __init__(self, graph: Graph) -> None:
        functions = {function.signature.name: function for function in graph.proto.library.function}
        nodes = {name: function.node_def for name, function in functions.items()}
        self.bodies: dict[str, _Body] = {}
        self._passed_on = _passed_on(graph.proto)

        def calls(name: str) -> list[str]:
            return [called for node in nodes[name] for called in _functions_of(node)]

        known = functions.keys()
        for name in _bottom_up(functions, lambda name: [f for f in calls(name) if f in known]):
            self.bodies[name] = self._function(functions[name])
        for node in graph.proto.node:
            for tensor in node.input:
                graph.node(tensor)  # raises InvalidGraph
        self.top = _Body(graph.nodes.values(), [], [graph.result.name], [], self)
        ordered = {name: list(body.ordered()) for name, body in self.bodies.items()}
        self.called = called_functions(self.top.ordered(), ordered)

    def _function(self, function: pb.FunctionDef) -> _Body:
        signature = function.signature
        passed_on = self._passed_on.get(signature.name, ())
        results = [r for at, r in enumerate(signature.output_arg) if at not in passed_on]
        body = _Body(
            function.node_def,
            [argument.name for argument in signature.input_arg],
            [function.ret.get(result.name, "") for result in results],
            function.control_ret.values(),
            self,
        )
        attrs, ids = function.arg_attr, function.resource_arg_unique_id
        arguments = [
            (
                *(body.arguments[place], _unnamed(argument), ids.get(place, -1)),
                self._attrs(attrs[place].attr) if place in attrs else [],
            )
            for place, argument in enumerate(signature.input_arg)
        ]
        rest = pb.OpDef()
        rest.CopyFrom(signature)
        for field in ("name", "input_arg", "output_arg", "control_output"):
            rest.ClearField(field)
        body.digest = _digest(
            body.digest, sorted(arguments), [*map(_unnamed, results)],
            self._attrs(function.attr), rest.SerializeToString(deterministic=True),
        )  # fmt: skip
        return body

    def own(self, node: pb.NodeDef) -> bytes:
        """A digest of what the node is without its inputs."""
        left_out = {"_read_only_resource_inputs"}  # follows from the functions
        if "Dataset" in node.op:
            left_out.add("metadata")
        captured = self._captured(node)
        taken = {at for group in captured for at in group.inputs}
        if captured:  # these types are the functions' arguments'
            left_out |= {name for name in node.attr if name.startswith("T") and name != "Tstate"}
        shapes = []
        if captured and node.op in LOOPS:
            left_out.add("output_shapes")
            every = enumerate(node.attr["output_shapes"].list.shape)
            shapes = [shape.SerializeToString() for at, shape in every if at not in taken]
        arguments = []
        for name in _functions_of(node):
            if name in self.bodies:
                own = {at for group in captured for at in group.arguments.get(name, ())}
                numbers = enumerate(self.bodies[name].arguments)
                arguments.append([number for at, number in numbers if at not in own])
        return _digest(
            self._function_digest(node.op), node.device, sorted(taken), arguments, shapes,
            self._attrs(node.attr, left_out),
        )  # fmt: skip

    def inputs(self, node: pb.NodeDef) -> _Inputs:
        data = [_tensor(tensor) for tensor in node.input if not tensor.startswith("^")]
        controls = [node_name(tensor) for tensor in node.input if tensor.startswith("^")]
        captured, taken = [], set[int]()
        for number, (inputs, arguments) in enumerate(self._captured(node)):
            taken.update(inputs)
            for at, *places in zip(inputs, *arguments.values(), strict=True):
                called = zip(arguments, places, strict=True)
                label = [self.bodies[name].arguments[place] for name, place in called]
                captured.append(((number, *label), data[at]))
        return _Inputs([t for at, t in enumerate(data) if at not in taken], captured, controls)

    def _captured(self, node: pb.NodeDef) -> list[_Captured]:
        def types(name: str) -> int:
            return len(node.attr[name].list.type) if name in node.attr else 0

        called = [name for name in _functions_of(node) if name in self.bodies]
        sizes = {name: len(self.bodies[name].arguments) for name in called}
        if node.op in LOOPS:
            places: Sequence[int] = sorted(self._passed_on.get(node.attr["body"].func.name, ()))
            found = [_Captured(places, dict.fromkeys(called, places))]
        else:  # each function's last arguments
            first, groups = 1 + types("Tstate"), [("Targuments", called)]
            if node.op in CALLS:
                first, groups = CALLS[node.op], [("Tin", called)]
            elif names := _GROUPS.get(node.op.removeprefix("Experimental")):
                groups = [(f"T{f}_other_arguments", [node.attr[f].func.name]) for f in names]
            found = []
            for name, functions in groups:
                inputs = range(first, first + types(name))
                last = {f: range(sizes[f] - len(inputs), sizes[f]) for f in functions if f in sizes}
                found.append(_Captured(inputs, last))
                first = inputs.stop
        count = sum(not tensor.startswith("^") for tensor in node.input)
        return [
            group
            for group in found
            if group.inputs and group.arguments and group.inputs[-1] < count
            if all(at[0] >= 0 and at[-1] < sizes[f] for f, at in group.arguments.items())
        ]

    def _attrs(self, attrs: Mapping[str, pb.AttrValue], left_out: Iterable[str] = ()) -> Any:
        return [
            (name, self._value(value))
            for name, value in sorted(attrs.items())
            if name not in _NAMES and name not in left_out
        ]

    def _value(self, value: pb.AttrValue) -> Any:
        kind = value.WhichOneof("value")
        if kind == "func" or (kind == "list" and value.list.func):
            found = [value.func] if kind == "func" else value.list.func
            return [(self._function_digest(ref.name), self._attrs(ref.attr)) for ref in found]
        if kind == "tensor" and value.tensor.resource_handle_val:
            plain = pb.AttrValue()
            plain.CopyFrom(value)
            for handle in plain.tensor.resource_handle_val:
                if generated := _GENERATED_HANDLE.fullmatch(handle.name):
                    handle.name = generated[1]
            value = plain
        return value.SerializeToString(deterministic=True)

    def _function_digest(self, name: str) -> Any:
        return self.bodies[name].digest if name in self.bodies else name


def _passed_on(graph: pb.GraphDef) -> dict[str, set[int]]:
    """By the name of a loop's body: the variables that it passes on as they are, and whose last
    values nobody reads."""
    functions = {function.signature.name: function for function in graph.library.function}
    bodies = [(f.node_def, f.ret.values()) for f in functions.values()]
    found: dict[str, set[int]] = {}
    for nodes, results in [(graph.node, ()), *bodies]:
        tensors = [*results, *(tensor for node in nodes for tensor in node.input)]
        read = {(name, output.rpartition(":")[2] or "0") for name, output in map(_tensor, tensors)}
        for node in nodes:
            for name in functions.keys() & _functions_of(node):
                places = set[int]()
                if node.op in LOOPS and name == node.attr["body"].func.name:
                    body = functions[name]
                    pairs = zip(body.signature.input_arg, body.signature.output_arg, strict=False)
                    for place, (argument, result) in enumerate(pairs):
                        same = body.ret.get(result.name) == argument.name
                        if same and (node.name, str(place)) not in read:
                            places.add(place)
                found[name] = found.get(name, places) & places
    return found


def _functions_of(node: pb.NodeDef) -> list[str]:
    """The functions that a node may call: itself, and those in its attributes."""
    return [node.op, *(reference.name for reference in references(node.attr))]


def _generated(node: pb.NodeDef) -> list[str]:
    return [h.name for h in handles_of(node) if _GENERATED_HANDLE.fullmatch(h.name)]


def _unnamed(argument: pb.ArgDef) -> bytes:
    plain = pb.ArgDef()
    plain.CopyFrom(argument)
    plain.ClearField("name")
    return plain.SerializeToString(deterministic=True)


def _tensor(tensor: str) -> _Tensor:
    name, _, output = tensor.partition(":")
    return name, output


def _bottom_up(roots: Iterable[str], inputs: Callable[[str], Iterable[str]]) -> Iterator[str]:
    """The names of all that the roots need, each once and behind its own inputs, but for loops."""
    seen: set[str] = set()
    for root in roots:
        if root in seen:
            continue
        seen.add(root)
        stack = [(root, iter(inputs(root)))]
        while stack:
            name, children = stack[-1]
            for child in children:
                if child not in seen:
                    seen.add(child)
                    stack.append((child, iter(inputs(child))))
                    break
            else:
                stack.pop()
                yield name


def _digest(*parts: Any) -> bytes:
    """Of text, bytes, numbers and None, in any nesting of lists and tuples."""
    digest = hashlib.sha256()

    def add(part: Any) -> None:
        if isinstance(part, list | tuple):
            digest.update(b"[%d " % len(part))
            for each in part:
                add(each)
        else:
            data = part if isinstance(part, bytes) else repr(part).encode()
            digest.update(b"%s%d " % (type(part).__name__[:1].encode(), len(data)))
            digest.update(data)

    add(parts)
    return digest.digest()
