"""Forebay measured beside TensorFlow's tf.data service, in the same run; `python -m benchmarks`.

Both sides have the same layout: dispatcher, worker and client are processes of their own, on
loopback, with their journals in one directory of local files. Rounds alternate between the
sides, so that whatever else the machine does falls on both. Not part of the distribution.
"""
