"""`forebay bench`: benchmarks of Forebay and TensorFlow's tf.data service in the same run.

Both sides have the same layout: dispatcher, workers and readers are separate processes, on
loopback, with their journals in one directory of local files. Rounds alternate between the sides,
so that other load on the machine affects both.
"""
