"""What is registered of a dataset, one module a kind, each with a function `definition`.

`graphs.py` has tf.data, `functions.py` functions of splits, `beam.py` PCollections, `files.py`
files of records. A definition is a RegisterDatasetRequest (proto/forebay.proto) without the id and
the compression that a client asks for. Workers do not import these modules.
"""
