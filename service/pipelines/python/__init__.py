"""Python datasets: a user's function, called with each of a list of splits, in child processes.

The registered definition is a PythonDataset (proto/python.proto): the pickled function and splits,
and the versions that they need. Only a child process of a worker (`child.py`) unpickles them. It
loads the function once, and then gets range after range of splits. It checks elements against the
registered spec and lays them out as a block (`columns.py`), in memory that the worker maps too
(../../shared.py). So no element is pickled, and the worker copies none.

A child does one thing at a time. A bundle is one request to one child, so nothing else draws from
its random numbers. A long run keeps several children busy, each with a part of the lease, and takes
their blocks as they come. So the elements of a split are in order; splits are in order only with
one process. If a child ends, or is silent for too long, only its current work is affected: the run
does what was registered for that case (`runs.py`). Idle children are kept for the next run
(`child_connections.py`).
"""
