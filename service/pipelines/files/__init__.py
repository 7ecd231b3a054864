"""Files of records that can be read at any place: ArrayRecord, Parquet, TFRecord, WebDataset, MDS,
lines. Compressed ones are read from their begin (`streams.py`).

A dataset of files is a PythonDataset without splits (../python): it names the files, with their
sizes, fingerprints and numbers of records (`manifest.py`), and a format of this package. Its splits
are ranges of records. A child of the worker reads them (`reading.py`), so a worker needs neither
TensorFlow nor `--allow-python`: nothing is unpickled, unless a function is mapped over the records.

A format is a module with `FORMAT`: it inspects a file where it is registered, and opens it where it
is read (`formats.py`). It gives blocks of records, so that columns remain columns.
"""
