"""Python datasets: a user's function, of each of a list of splits, in processes of its own.

What is registered is a PythonDataset (proto/python.proto): the function and the splits, pickled,
with the versions that they need. Nobody unpickles them but a child process of a worker
(`child.py`), which has the function once, and is then told range after range of splits. Elements
are checked there against the registered spec and laid out as a block (`columns.py`) in memory that
the worker maps, too (../../shared.py): no element is pickled, and none is copied by the worker.

A child does one thing at a time. A bundle is one request to one child, so that it is alone with
its random numbers; a long run keeps several children busy, each with a part of the lease, and has
their blocks as they come. So the elements of a split are in order, and splits are if there is one
process. A child that ends, or is silent for too long, costs what it was at: the run says, or does,
what was registered for that (`runs.py`). Children that have ended their work are kept for the next
(`children.py`).
"""
