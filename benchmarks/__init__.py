"""Forebay measured beside TensorFlow's tf.data service, in the same run: `forebay bench`.

Both sides have the same layout: dispatcher, workers and readers are processes of their own, on
loopback, with their journals in one directory of local files. Rounds alternate between the
sides, so that whatever else the machine does falls on both.
"""
