"""Datasets for the tasks of a training job, and for their frameworks.

In `across.py`, the chief registers a dataset, and all tasks read it (TensorFlow).
"""
