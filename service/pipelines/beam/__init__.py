"""Beam pipelines: a bounded read and the transforms behind it, as a function of splits.

Where the dataset is registered, `translation.py` makes a `Chain` and its splits from a PCollection
that was built and not run. Workers run the chain bundle by bundle (`chain.py`), through Beam's own
DoFn machinery.
"""
