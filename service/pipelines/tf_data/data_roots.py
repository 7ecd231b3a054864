"""Bounds which files a graph reads: those below a worker's --data-root.

Names of files are tensors, which a graph may compute. So the graph itself compares them: before an
operation that reads files, a name that is not below a root becomes one that cannot exist.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from ...errors import PermissionDenied
from ...proto import graph_pb2 as pb
from .constants import STRING, strings
from .graphs import Body, Graph, bodies, node_name

_READERS = {
    *("TFRecordDataset", "TFRecordDatasetV2", "TextLineDataset", "CSVDataset", "CSVDatasetV2"),
    *("ExperimentalCSVDataset", "FixedLengthRecordDataset", "FixedLengthRecordDatasetV2"),
    *("MatchingFiles", "MatchingFilesDataset", "ExperimentalMatchingFilesDataset", "LoadDataset"),
    *("ListSnapshotChunksDataset", "SnapshotChunkDataset", "ReadFile", "WriteFile"),
}
"""Operations whose first input names files. Others that read files need the role `graphs`."""


def pattern_of(roots: Iterable[str]) -> str:
    """A regular expression, of Python's and of RE2, for the paths below these directories: none has
    the part `..`."""
    anywhere = "|".join(re.escape(root.rstrip("/")) for root in roots)
    return rf"(?s)(?:{anywhere})(?:/(?:\.?|[^/.][^/]*|\.[^/.][^/]*|\.\.[^/]+))*"


def require_below(paths: Iterable[str], roots: Sequence[str]) -> None:
    """Raises PermissionDenied for the first path that is not below one of them."""
    pattern = re.compile(pattern_of(roots))
    for path in paths:
        if not pattern.fullmatch(path):
            raise PermissionDenied(
                f"the dataset reads {path!r}, and this worker reads files below {', '.join(roots)} "
                "only (--data-root)"
            )


def confined(graph: bytes, roots: Sequence[str]) -> bytes:
    """The graph, which reads no files but those below these directories. A name that it computes is
    looked at when it is read. Raises InvalidGraph; PermissionDenied for a constant name."""
    proto = Graph(graph).proto
    pattern = pattern_of(roots)
    for name, nodes in bodies(proto):
        body, named = Body(nodes, function=bool(name)), {node.name: node for node in nodes}
        for node in [node for node in nodes if node.op in _READERS and node.input]:
            known = strings(named.get(node_name(node.input[0]), pb.NodeDef()))
            if known is None:
                node.input[0] = _guarded(body, node.input[0], pattern, roots)
            else:
                require_below((name.decode(errors="replace") for name in known), roots)
    return proto.SerializeToString()


def _guarded(body: Body, names: str, pattern: str, roots: Sequence[str]) -> str:
    """The tensor that takes the place of a reader's names."""
    denied = f"/dev/null/not below --data-root {','.join(roots)}/"
    matched = pb.AttrValue(s=pattern.encode())
    is_below = body.add("StaticRegexFullMatch", [names], "output", pattern=matched)
    prefix = body.constant(denied.encode(), STRING)
    other = body.add("StringJoin", [prefix, names], "output", N=pb.AttrValue(i=2))
    return body.add("SelectV2", [is_below, names, other], "output", T=pb.AttrValue(type=STRING))
