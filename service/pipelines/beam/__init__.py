"""Beam pipelines: a bounded read and the transforms behind it, as a function of splits.

`translation.py` makes a `Chain` and its splits of a PCollection that was built and not run, where
the dataset is registered. `chain.py` runs it, bundle by bundle, through Beam's own DoFn machinery,
where the elements are wanted.
"""
