"""What differs between the versions of TensorFlow that Forebay runs on, 2.16 to 2.21."""

from __future__ import annotations

import tensorflow as tf

RELEASES = {1766: "2.16", 1882: "2.17", 1994: "2.18", 2129: "2.19", 2288: "2.20", 2474: "2.21"}
"""By the version number of the graphs that they make."""


def newer_maker(graph: bytes) -> str:
    """The TensorFlow that made this graph, in words, if it is newer than this process's; else
    ""."""
    made = tf.compat.v1.GraphDef.FromString(graph).versions.producer
    if made <= tf.version.GRAPH_DEF_VERSION:
        return ""
    release = RELEASES.get(made)
    return f"TensorFlow {release}" if release else f"a TensorFlow with graphs of version {made}"
